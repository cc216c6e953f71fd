"""The noise-only control: the same fit, but for the pull of the labels."""

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

from coulomb import Ball, CoulombSampler
from coulomb._support.errors import CoulombError

# Nothing is left to the data to choose.
FIXED = {
    "gamma": 0.5,
    "coordinates": "all",
    "inverse_temperature": 50.0,
    "random_state": 0,
}
# A free random walk from the law itself.
WALK = FIXED | {
    "n_candidates": None,
    "prior": False,
    "interaction_strength": 0.0,
    "step_size": 2.0,
    "max_iter": 20,
    "standardize": False,
}


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 4))
    return X, np.sin(3 * X[:, 0]) * X[:, 1] > 0


def test_it_does_not_see_the_labels(problem):
    X, y = problem
    mixed = np.random.default_rng(1).permutation(y)
    first, second = (
        CoulombSampler(20, **FIXED).fit(X, labels) for labels in (y, mixed)
    )
    assert not np.array_equal(first.particles_, second.particles_)
    twins = [model.noise_control(7) for model in (first, second)]
    np.testing.assert_array_equal(twins[0].particles_, twins[1].particles_)
    np.testing.assert_array_equal(twins[0].transform(X), twins[1].transform(X))


def test_a_free_walk_has_the_variance_of_its_steps(problem):
    """`2 gamma + n 2 eta / beta` in each coordinate; four standard errors."""
    model = CoulombSampler(1000, **WALK).fit(*problem)
    twin = model.noise_control(1)
    variance = 2 * 0.5 + 20 * 2 * 2.0 / 50.0
    error = 4 * np.sqrt(2 / twin.particles_.size)
    assert np.mean(twin.particles_**2) == pytest.approx(variance, rel=error)


def test_the_prior_keeps_the_norms_of_the_law(problem):
    """`E |w|^2 = 2 gamma p`: four standard errors, and 1 % for the finite step."""
    model = CoulombSampler(1000, interaction_strength=0.0, **FIXED).fit(*problem)
    twin = model.noise_control(1)
    size = np.mean((twin.particles_**2).sum(axis=1))
    error = 4 * np.sqrt(2 / twin.particles_.size) + 0.01
    assert size == pytest.approx(2 * 0.5 * 4, rel=error)


def test_where_labels_hardly_pull_it_is_the_fit_itself(problem):
    """With the seed of the fit it has the same noise; 20 clipped drifts are 4e-8."""
    model = CoulombSampler(30, clip=1e-9, **WALK).fit(*problem)
    twin = model.noise_control(0)
    np.testing.assert_allclose(twin.particles_, model.particles_, atol=1e-7)
    assert not np.allclose(model.noise_control(1).particles_, model.particles_)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"domain": Ball(1.0)},
        {
            "objective": "alignment",
            "stopping": "held-out",
            "max_iter": 200,
            "batch_size": 64,
        },
        {"n_particles": 40, "resample": "gibbs", "inverse_temperature": 20.0},
        {"coordinates": 2, "gamma": 0.5},
        {"max_iter": 0},
        {"max_iter": 0, "n_candidates": None},
        {"feature_map": "softplus", "inverse_temperature": 20.0},
    ],
    ids=str,
)
def test_everything_else_is_as_in_the_fit(changes, problem):
    X, y = problem
    X = np.column_stack([X, np.full(len(X), 3.0)])  # a column that does not vary
    model = CoulombSampler(20, random_state=0, **changes).fit(X, y)
    before = model.random_weights_.copy()
    twin = model.noise_control(5)
    np.testing.assert_array_equal(model.random_weights_, before)
    assert twin.particles_.shape == model.particles_.shape
    assert twin.random_weights_.shape == model.random_weights_.shape
    assert not np.array_equal(twin.random_weights_, before)
    np.testing.assert_array_equal(twin.random_offset_, model.random_offset_)
    np.testing.assert_array_equal(twin.random_weights_[-1], 0)
    assert twin.transform(X).shape == model.transform(X).shape
    rows = {tuple(row) for row in twin.particles_}
    assert {tuple(row) for row in twin.random_weights_.T} <= rows
    if "domain" in changes:
        norms = np.linalg.norm(twin.random_weights_, axis=0)
        assert norms.max() <= 1 + 1e-12
    if "coordinates" in changes:
        assert ((twin.random_weights_ != 0).sum(axis=0) == 2).all()


def test_the_paper_s_constants(problem):
    X, y = problem
    model = CoulombSampler.paper(20, max_iter=30, random_state=0).fit(X, y)
    twin = model.noise_control(0)
    assert twin.transform(X).shape == (200, 20)
    assert np.linalg.norm(twin.particles_, axis=1).max() <= 5 + 1e-9


def test_no_column_varies():
    X, y = np.ones((20, 2)), np.arange(20) % 2
    model = CoulombSampler(5, random_state=0).fit(X, y)
    np.testing.assert_array_equal(model.noise_control(0).random_weights_, 0)


def test_after_saving(problem, tmp_path):
    model = CoulombSampler(20, random_state=0).fit(*problem)
    model.save(tmp_path / "model.safetensors")
    again = CoulombSampler.load(tmp_path / "model.safetensors")
    mine, theirs = (m.noise_control(3).random_weights_ for m in (model, again))
    np.testing.assert_array_equal(mine, theirs)


def test_mistakes_are_named(problem):
    with pytest.raises(NotFittedError):
        CoulombSampler(20).noise_control()
    model = CoulombSampler(20, random_state=0).fit(*problem)
    with pytest.raises(CoulombError, match="must be those of the fit"):
        model.set_params(n_components=10).noise_control()
