"""Features chosen one after the other, against refits from scratch."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifierCV

from coulomb import CoulombSampler
from coulomb._support.errors import ParameterError
from coulomb.estimators.learning import (
    complete,
    furthest_gain,
    held_out_losses,
    pursue,
)
from coulomb.features import Fourier, Particles
from coulomb.objectives import Sample


def problem(n=60, pool=12, labels=2, seed=0):
    source = torch.Generator().manual_seed(seed)
    features = torch.randn(n, pool, generator=source, dtype=torch.float64)
    return features, torch.randn(n, labels, generator=source, dtype=torch.float64)


def refit(features, labels, count):
    """Choose by fitting every regression from scratch: the slow twin."""
    features, labels = features - features.mean(dim=0), labels - labels.mean(dim=0)
    chosen = []
    for _ in range(count):
        errors = {}
        for k in set(range(features.shape[1])) - set(chosen):
            part = features[:, [*chosen, k]]
            fitted = part @ torch.linalg.lstsq(part, labels).solution
            errors[k] = float((labels - fitted).square().sum())
        chosen.append(min(errors, key=errors.get))
    return chosen


def rows(labels, weights=None):
    return Sample(torch.zeros(len(labels), 1, dtype=labels.dtype), labels, weights)


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_that_of_refits(labels, seed):
    features, y = problem(labels=labels, seed=seed)
    found = pursue(features, rows(y), 8, ridge=0.0)
    assert found.tolist() == refit(features, y, 8)


def test_fewer_are_the_first_of_more():
    features, y = problem()
    few, many = (pursue(features, rows(y), count) for count in (3, 9))
    assert torch.equal(few, many[:3])


def test_copies_are_the_last_choice():
    features, y = problem(pool=6)
    doubled = torch.cat([features, features], dim=1)
    found = pursue(doubled, rows(y), 12)
    assert sorted(i % 6 for i in found[:6].tolist()) == list(range(6))
    assert sorted(found.tolist()) == list(range(12))


def test_neither_offsets_nor_a_row_twice_change_the_choice():
    features, y = problem()
    weights = torch.ones(60, dtype=torch.float64)
    weights[:10] = 2
    twice = torch.cat([torch.arange(60), torch.arange(10)])
    weighted = pursue(features, rows(y, weights / weights.sum()), 6, ridge=1e-9)
    repeated = pursue(features[twice] + 5, rows(y[twice] - 3), 6, ridge=1e-9)
    assert torch.equal(weighted, repeated)
    assert not torch.equal(weighted, pursue(features, rows(y), 6, ridge=1e-9))


def drawn_features(count, dim, seed, scale=1.0):
    source = torch.Generator().manual_seed(seed)
    positions = scale * torch.randn(count, dim, generator=source, dtype=torch.float64)
    return Particles(positions, 6.28 * torch.rand(count, generator=source).double())


def chosen_count(labels, x, pool, counts=(0, 8, 16)):
    """Pursue on half of the rows; the other half decides."""
    halves = [Sample(x[i::2], labels[i::2]) for i in range(2)]
    # Nearly constant features.
    drawn = drawn_features(32, x.shape[1], seed=1, scale=0.01)
    inside = halves[0]
    found = pool.take(pursue(Fourier()(inside.x, pool), inside, counts[-1]))
    losses = [
        held_out_losses(complete(drawn, found, k), *halves, Fourier()) for k in counts
    ]
    return counts[furthest_gain(losses, 1.0)], losses


def test_labels_that_are_a_feature_are_found():
    x, pool = problem(n=200, pool=4)[0], drawn_features(50, 4, seed=2)
    labels = Fourier()(x, pool)[:, 7:8]
    count, losses = chosen_count(labels - labels.mean(), x, pool)
    assert count > 0
    assert float(losses[1].mean()) < 0.05 * float(losses[0].mean())


def test_noise_is_not_pursued():
    """Fitting noise costs on held-out rows, so that a gain is rarer than by chance.

    A gain of one standard error by chance alone would have a probability of one sixth.
    """
    pool, counts = drawn_features(200, 4, seed=2), []
    for seed in range(20):
        x, labels = problem(n=120, pool=4, labels=1, seed=seed)
        counts.append(chosen_count(labels, x, pool)[0])
    assert counts.count(0) >= 17


def xor(n=400, seed=0):
    X = np.random.default_rng(seed).normal(size=(n, 6))
    return X, np.sin(3 * X[:, 0]) * X[:, 1] > 0


def test_few_features_gain():
    X, y = load_digits(return_X_y=True)
    train, test = slice(1000), slice(1000, None)
    scores = {}
    for pursuit in (0, 16):
        sampler = CoulombSampler(
            16, pursuit=pursuit, objective="alignment", random_state=0
        )
        model = RidgeClassifierCV().fit(
            sampler.fit_transform(X[train], y[train]), y[train]
        )
        scores[pursuit] = model.score(sampler.transform(X[test]), y[test])
    assert sampler.n_pursued_ > 0
    # One standard error of a score of 797 rows is below 0.017.
    assert scores[16] > scores[0] + 0.06


def test_the_other_features_stay_what_they_were():
    X, y = xor()
    options = {"objective": "alignment", "random_state": 0}
    drawn = CoulombSampler(32, pursuit=0, **options).fit(X, y)
    pursued = CoulombSampler(32, pursuit=12, **options).fit(X, y)
    assert (drawn.n_pursued_, pursued.n_pursued_) == (0, 12)
    np.testing.assert_array_equal(
        drawn.transform(X)[:, :20], pursued.transform(X)[:, :20]
    )
    assert not np.isclose(drawn.random_offset_[20:], pursued.random_offset_[20:]).any()
    np.testing.assert_array_equal(drawn.particles_, pursued.particles_)


def test_as_many_as_the_pool_holds_and_more():
    """An odd number above the size of the pool: no feature comes twice."""
    X, y = xor(200)
    sampler = CoulombSampler(1001, pursuit=1001, random_state=0).fit(X, y)
    assert sampler.n_pursued_ == 1001
    assert len(np.unique(sampler.random_offset_)) == 1001


def test_nothing_is_pursued_at_a_given_temperature_or_without_labels():
    X, y = xor()
    for options in ({"inverse_temperature": 100.0}, {"max_iter": 0}):
        sampler = CoulombSampler(32, random_state=0, **options).fit(X, y)
        assert sampler.n_pursued_ == 0
    assert CoulombSampler.paper().pursuit == 0


def test_what_was_tried_is_told():
    X, y = xor()
    sampler = CoulombSampler(32, random_state=0).fit(X, y)
    tried = [t for t in sampler.selection_ if "law" not in t]
    assert (tried[0]["scaled"], tried[0]["pursued"], tried[0]["steps"]) == (False, 0, 0)
    ends = (sampler.scaled_, sampler.n_pursued_, sampler.n_iter_)
    assert ends in [(t["scaled"], t["pursued"], t["steps"]) for t in tried]
    assert {t["pursued"] for t in tried} <= {0, 8, 16, 32}
    assert {t["steps"] for t in tried} <= {0, 5, 10, 20, 40}


def test_controls():
    X, y = xor()
    options = {"objective": "alignment", "random_state": 0}
    sampler = CoulombSampler(32, pursuit=20, **options).fit(X, y)
    control, noise = sampler.control(1), sampler.noise_control(0)
    for found in (control, noise):
        np.testing.assert_array_equal(found.random_offset_, sampler.random_offset_)
    norms = [np.linalg.norm(s.random_weights_, axis=0) for s in (sampler, control)]
    np.testing.assert_allclose(*norms)
    assert noise.n_pursued_ == 0
    same = CoulombSampler(32, pursuit=0, **options).fit(X, y).noise_control(0)
    np.testing.assert_array_equal(noise.random_weights_, same.random_weights_)


def test_chunks_are_pursued_anew():
    X, y = xor()
    sampler = CoulombSampler(16, pursuit=8, random_state=0).partial_fit(
        X[:100], y[:100]
    )
    before = sampler.random_weights_[:, 8:].copy()
    sampler.partial_fit(X[100:], y[100:])
    assert sampler.n_pursued_ == 8
    assert not np.array_equal(before, sampler.random_weights_[:, 8:])


def test_saved_and_loaded(tmp_path):
    X, y = xor()
    sampler = CoulombSampler(16, pursuit=8, random_state=0).fit(X, y)
    sampler.save(tmp_path / "sampler.safetensors")
    loaded = CoulombSampler.load(tmp_path / "sampler.safetensors")
    assert (loaded.pursuit, loaded.n_pursued_) == (8, 8)
    np.testing.assert_array_equal(loaded.transform(X), sampler.transform(X))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pursuit": "some"}, "pursuit"),
        ({"pursuit": -1}, "`pursuit` must be at least 0; got -1"),
        ({"pursuit": 17}, "`pursuit` must be at most `n_components` = 16; got 17"),
        ({"pursuit": 3, "feature_map": "elu"}, "Only Fourier features are pursued"),
    ],
)
def test_bad_numbers(options, message):
    X, y = xor(60)
    with pytest.raises(ParameterError, match=message):
        CoulombSampler(16, **options).fit(X, y)
