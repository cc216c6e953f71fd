"""Orthogonal random features."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from coulomb._support.errors import ParameterError, ParameterTypeError
from coulomb.estimators.baselines import OrthogonalSampler


@parametrize_with_checks([OrthogonalSampler(20)])
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.fixture
def X():
    return np.random.default_rng(0).normal(size=(12, 5))


def exact_kernel(X, gamma):
    return np.exp(-gamma * ((X[:, None] - X) ** 2).sum(axis=-1))


def kernels(make, X, repeats):
    return np.stack([make(seed).fit(X).transform(X) for seed in range(repeats)])


def orthogonal_kernels(X, repeats):
    features = kernels(
        lambda seed: OrthogonalSampler(
            20, gamma=0.3, standardize=False, random_state=seed
        ),
        X,
        repeats,
    )
    return features @ features.transpose(0, 2, 1)


def test_kernel_is_unbiased(X):
    draws = orthogonal_kernels(X, 1000)
    error = draws.mean(axis=0) - exact_kernel(X, 0.3)
    standard_error = draws.std(axis=0) / np.sqrt(len(draws))
    # 78 entries: 4.5 standard errors are exceeded by chance once in 2000 runs
    assert (np.abs(error) < 4.5 * standard_error).all()


def test_error_is_below_that_of_independent_draws(X):
    exact = exact_kernel(X, 0.3)
    features = kernels(
        lambda seed: RBFSampler(gamma=0.3, n_components=20, random_state=seed), X, 400
    )
    independent = (features @ features.transpose(0, 2, 1) - exact) ** 2
    orthogonal = (orthogonal_kernels(X, 400) - exact) ** 2
    pairs = ~np.eye(len(X), dtype=bool)
    gain = (independent - orthogonal)[:, pairs].mean(axis=1)
    assert gain.mean() > 3 * gain.std() / np.sqrt(len(gain))


def test_pipeline_clone_and_names(X):
    y = np.arange(12) % 2
    model = make_pipeline(OrthogonalSampler(16, random_state=0), LogisticRegression())
    model.set_output(transform="pandas")
    first = model.fit(X, y).predict_proba(X)
    np.testing.assert_array_equal(clone(model).fit(X, y).predict_proba(X), first)
    frame = model[0].transform(X)
    assert list(frame.columns[:2]) == ["orthogonalsampler0", "orthogonalsampler1"]


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"n_components": 0}, ParameterError, "`n_components` must be at least 1"),
        ({"n_components": 2.5}, ParameterTypeError, "must be a whole number; got 2.5"),
        ({"gamma": -1.0}, ParameterError, "`gamma` must be positive; got -1.0"),
        ({"gamma": "scal"}, ParameterError, "did you mean 'scale'"),
    ],
)
def test_bad_settings(X, settings, error, message):
    with pytest.raises(error, match=message):
        OrthogonalSampler(**settings).fit(X)
