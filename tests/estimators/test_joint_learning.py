"""Learning by an energy of all features: what moves, what decides, which columns."""

import numpy as np
import pytest
from scipy import sparse
from sklearn.linear_model import RidgeCV

from coulomb import CoulombSampler
from coulomb._support.errors import FileFormatError, ParameterError
from coulomb.objectives import Evidence


def additive(n=400, dim=6, seed=0):
    """Two columns of six matter."""
    source = np.random.default_rng(seed)
    X = source.normal(size=(n, dim))
    return X, np.sin(3 * X[:, 0]) + X[:, 1] ** 2 + 0.1 * source.normal(size=n)


def test_moving_gains_where_there_is_something_to_learn():
    X, y = additive(2400)
    scores = {}
    for objective in ("alignment", "evidence", "leave-one-out"):
        sampler = CoulombSampler(24, objective=objective, random_state=0)
        features = sampler.fit_transform(X[:2000], y[:2000])
        model = RidgeCV(np.logspace(-4, 2, 7)).fit(features, y[:2000])
        scores[objective] = model.score(sampler.transform(X[2000:]), y[2000:])
    assert sampler.scaled_
    assert sampler.n_iter_ > 0
    # The standard error of an R^2 of 400 rows near 0.9 is about 0.01.
    assert scores["evidence"] > scores["alignment"] + 0.05
    assert scores["leave-one-out"] > scores["alignment"] + 0.05


def test_noise_moves_nothing_far():
    """Held-out rows see that nothing is learned; one in six says so by chance."""
    moved = []
    for seed in range(6):
        X = np.random.default_rng(seed).normal(size=(300, 4))
        y = np.random.default_rng(seed + 100).normal(size=300)
        sampler = CoulombSampler(16, target="number", random_state=seed).fit(X, y)
        moved.append(sampler.scaled_)
    assert sum(moved) <= 4


def test_a_fit_repeats_itself_and_knows_its_path():
    X, y = additive()
    one, two = (CoulombSampler(16, random_state=3).fit(X, y) for _ in range(2))
    np.testing.assert_array_equal(one.transform(X), two.transform(X))
    steps = one.history_["step"]
    assert steps[-1] == one.n_iter_ if one.n_iter_ else len(steps) <= 1


def test_many_features_do_not_pay_for_a_record_of_their_energy(monkeypatch):
    seen, energy = [], Evidence.energy

    def watched(self, particles):
        seen.append(particles.n_particles)
        return energy(self, particles)

    monkeypatch.setattr(Evidence, "energy", watched)
    X, y = additive()
    sampler = CoulombSampler(700, random_state=0).fit(X, y)
    assert sampler.n_iter_ == 0
    assert sampler.history_["step"].tolist() == [0]
    assert np.isfinite(sampler.history_["energy"]).all()
    assert max(seen) == 512


def test_particles_keep_their_coordinates():
    X, y = additive()
    sampler = CoulombSampler(32, coordinates=2, random_state=0).fit(X, y)
    drawn = sampler.random_weights_[:, : 32 - sampler.n_pursued_]
    assert ((drawn != 0).sum(axis=0) == 2).all()


def test_heavy_tails_are_cut_and_ones_stay_ones():
    X, y = additive(600)
    X[:, 2] = 0.0
    X[:12, 2] = 1.0  # rare
    X[:3, 3] = 1e3  # far out
    sampler = CoulombSampler(16, random_state=0).fit(X, y)
    limits = sampler.column_limits_
    assert set(np.flatnonzero(np.isfinite(limits))) <= {3}
    far = X[:1].copy()
    if np.isfinite(limits[3]):
        farther = far.copy()
        farther[0, 3] = 1e6
        np.testing.assert_array_equal(
            sampler.transform(far), sampler.transform(farther)
        )
    spread = X[:, 2].std()
    assert min(abs(sampler.scale_[2] - spread), abs(sampler.scale_[2] - 1)) < 1e-9


def test_sparse_rows_are_cut_like_dense_ones():
    X, y = additive()
    X[np.abs(X) < 0.7] = 0.0
    X[:2, 3] = 40.0
    thin = sparse.csr_matrix(X)
    one, two = (CoulombSampler(8, random_state=0).fit(rows, y) for rows in (X, thin))
    np.testing.assert_allclose(one.column_limits_, two.column_limits_)
    np.testing.assert_allclose(one.transform(X), two.transform(thin), atol=1e-9)


def test_saved_limits_are_loaded(tmp_path):
    X, y = additive()
    X[:3, 3] = 50.0
    sampler = CoulombSampler(8, random_state=0).fit(X, y)
    sampler.save(tmp_path / "file.safetensors")
    loaded = CoulombSampler.load(tmp_path / "file.safetensors")
    np.testing.assert_array_equal(loaded.transform(X), sampler.transform(X))


def test_damaged_limits_are_refused(tmp_path):
    X, y = additive()
    sampler = CoulombSampler(8, random_state=0, max_iter=0).fit(X, y)
    for limits in (np.full(6, np.nan), np.zeros(6), np.ones(3)):
        sampler.column_limits_ = limits
        sampler.save(tmp_path / "file.safetensors")
        with pytest.raises(FileFormatError, match="column_limits_ must be positive"):
            CoulombSampler.load(tmp_path / "file.safetensors")


@pytest.mark.parametrize(
    ("values", "taken"), [(30, "classes"), (80, "numbers"), (8, None)]
)
def test_whole_numbers_are_taken_with_a_warning(values, taken, recwarn):
    X = np.random.default_rng(0).normal(size=(1000, 3))
    y = np.arange(1000) % values
    sampler = CoulombSampler(8, random_state=0, max_iter=5)
    if taken is None:
        sampler.fit(X, y)
        assert not recwarn
        return
    with pytest.warns(UserWarning, match=f"{values} different whole numbers.*{taken}"):
        sampler.fit(X, y)
    sampler.set_params(target="number").fit(X, y)


def test_a_joint_energy_refuses_parameters_of_the_other():
    X, y = additive(60)
    sampler = CoulombSampler(8, objective="evidence", inverse_temperature=10.0)
    with pytest.raises(ParameterError, match="`inverse_temperature` must be left"):
        sampler.fit(X, y)
    with pytest.raises(ParameterError, match="objective"):
        CoulombSampler(8, objective="accuracy").fit(X, y)


def test_many_features_only_have_their_scales_moved():
    X, y = additive(300)
    sampler = CoulombSampler(600, random_state=0).fit(X, y)
    assert sampler.n_iter_ == 0
    assert sampler.transform(X).shape == (300, 600)
