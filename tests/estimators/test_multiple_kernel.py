"""Multiple-kernel learning: the weights, the machine, the messages."""

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.base import clone
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.utils.estimator_checks import parametrize_with_checks

from coulomb._support.errors import ParameterError, ParameterTypeError
from coulomb.estimators import baselines as multiple_kernel
from coulomb.estimators.baselines import (
    MultipleKernelClassifier,
    solve_alignment,
)

GAMMAS = (0.05, 0.5, 2.0)


@parametrize_with_checks(
    [MultipleKernelClassifier(), MultipleKernelClassifier(standardize=True)]
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


def make_problem(n=90, n_classes=2, seed=0):
    X = np.random.default_rng(seed).normal(size=(n, 2))
    radius = np.hypot(*X.T)
    return X, np.digitize(radius, [1.1] if n_classes == 2 else [0.8, 1.5])


def centred_kernels(X, gammas=GAMMAS):
    H = np.eye(len(X)) - 1 / len(X)
    return np.stack([H @ rbf_kernel(X, gamma=gamma) @ H for gamma in gammas])


def alignment(v, kernels, ideal):
    K = np.einsum("m,mij->ij", v, kernels)
    return (K * ideal).sum() / np.linalg.norm(K) / np.linalg.norm(ideal)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_weights_maximise_the_alignment(n_classes):
    X, y = make_problem(60, n_classes)
    H = np.eye(60) - 1 / 60
    ideal = H @ (y[:, None] == y).astype(float) @ H
    kernels = centred_kernels(X)
    found = minimize(
        lambda v: -alignment(v, kernels, ideal),
        np.full(3, 1 / 3),
        bounds=[(0, 1)] * 3,
        constraints={"type": "eq", "fun": lambda v: v.sum() - 1},
        options={"ftol": 1e-14},
    )
    model = MultipleKernelClassifier(GAMMAS).fit(X, y)
    assert model.kernel_weights_.sum() == pytest.approx(1.0)
    assert alignment(model.kernel_weights_, kernels, ideal) == pytest.approx(
        -found.fun, abs=1e-8
    )
    np.testing.assert_allclose(model.kernel_weights_, found.x, atol=1e-3)


def test_problem_is_that_of_the_whole_matrices(monkeypatch):
    X, y = make_problem(50, 3)
    labels = np.eye(3)[y] - np.eye(3)[y].mean(axis=0)
    monkeypatch.setattr(multiple_kernel, "_BLOCK_ENTRIES", 3 * 50 * 7)
    products, targets = multiple_kernel._alignment_problem(X, np.array(GAMMAS), labels)
    kernels = centred_kernels(X)
    np.testing.assert_allclose(products, np.einsum("mij,lij->ml", kernels, kernels))
    np.testing.assert_allclose(
        targets, np.einsum("mij,ic,jc->m", kernels, labels, labels)
    )


def test_conditions_of_optimality():
    # gradient Mv - a vanishes on the support and is non-negative off it
    rng = np.random.default_rng(0)
    for _ in range(20):
        root = rng.normal(size=(5, 5))
        M, a = root @ root.T, rng.uniform(size=5)
        v = solve_alignment(M, a)
        v = v * (v @ a) / (v @ M @ v)
        gradient = M @ v - a
        assert np.abs(gradient[v > 0]).max() < 1e-8
        assert gradient.min() > -1e-8


def test_copies_and_blind_kernels():
    np.testing.assert_allclose(solve_alignment(np.ones((2, 2)), np.ones(2)).sum(), 1.0)
    blind = np.diag([0.0, 2.0])
    np.testing.assert_allclose(solve_alignment(blind, np.array([0.0, 1.0])), [0, 1])
    np.testing.assert_allclose(solve_alignment(np.eye(2), np.zeros(2)), [0.5, 0.5])
    np.testing.assert_allclose(
        solve_alignment(np.zeros((2, 2)), np.zeros(2)), [0.5, 0.5]
    )


def test_one_bandwidth_is_a_gaussian_machine():
    X, y = make_problem(n_classes=3)
    ours = MultipleKernelClassifier([0.7], C=2.0).fit(X, y)
    theirs = SVC(gamma=0.7, C=2.0).fit(X, y)
    fresh, _ = make_problem(seed=1)
    np.testing.assert_allclose(
        ours.decision_function(fresh), theirs.decision_function(fresh), atol=2e-3
    )
    np.testing.assert_array_equal(ours.predict(fresh), theirs.predict(fresh))


@pytest.mark.parametrize("n_classes", [2, 3])
def test_learns_rings(n_classes):
    X, y = make_problem(240, n_classes)
    names = np.array(["in", "mid", "out"])[y]
    model = MultipleKernelClassifier().fit(X[:160], names[:160])
    assert set(model.classes_) == set(names)
    # chance is near 1/2 and 1/3; the standard error of 80 labels is below 0.056
    assert model.score(X[160:], names[160:]) > 0.75


def test_uniform_weights():
    model = MultipleKernelClassifier(GAMMAS, method="uniform").fit(*make_problem())
    np.testing.assert_allclose(model.kernel_weights_, 1 / 3)


def test_standardisation_is_the_scalers():
    X, y = make_problem()
    X = X * [1.0, 1e3] + 5.0
    ours = MultipleKernelClassifier(standardize=True).fit(X, y)
    theirs = make_pipeline(StandardScaler(), MultipleKernelClassifier()).fit(X, y)
    np.testing.assert_allclose(
        ours.decision_function(X), theirs.decision_function(X), atol=1e-8
    )


def test_settings_changed_after_the_fit_wait_for_the_next():
    X, y = make_problem()
    model = MultipleKernelClassifier(GAMMAS).fit(X, y)
    before = model.decision_function(X)
    model.set_params(gammas=(9.0,))
    np.testing.assert_array_equal(model.decision_function(X), before)
    assert clone(model).fit(X, y).kernel_weights_.shape == (1,)


def test_constant_inputs_do_not_fail():
    model = MultipleKernelClassifier(GAMMAS).fit(np.ones((6, 2)), [0, 1] * 3)
    np.testing.assert_allclose(model.kernel_weights_, 1 / 3)


def test_far_units():
    X, y = make_problem()
    plain = MultipleKernelClassifier(standardize=True).fit(X, y)
    far = MultipleKernelClassifier(standardize=True).fit(X * 1e200, y)
    np.testing.assert_allclose(far.kernel_weights_, plain.kernel_weights_, atol=1e-8)
    with pytest.raises(ParameterError, match="squared distances overflow"):
        MultipleKernelClassifier().fit(X * 1e200, y)


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"gammas": ()}, ParameterError, "`gammas` must hold at least one"),
        ({"gammas": 0.5}, ParameterTypeError, "`gammas` must be a sequence"),
        (
            {"gammas": (0.1, -0.2)},
            ParameterError,
            "`gammas` must be positive; got -0.2",
        ),
        ({"C": 0.0}, ParameterError, "`C` must be positive; got 0.0"),
        ({"method": "align"}, ParameterError, "did you mean 'alignf'"),
    ],
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        MultipleKernelClassifier(**settings).fit(*make_problem())


def test_bad_data():
    X, y = make_problem()
    with pytest.raises(ParameterError, match=r"`y` must vary.*got one class"):
        MultipleKernelClassifier().fit(X, np.ones(90, dtype=int))
    with pytest.raises(ValueError, match="minimum of 2 is required"):
        MultipleKernelClassifier().fit(X[:1], y[:1])
    with pytest.raises(ValueError, match="Unknown label type"):
        MultipleKernelClassifier().fit(X, X[:, 0])
    for bad in (np.nan, np.inf):
        X[0, 0] = bad
        with pytest.raises(ValueError, match=r"NaN|infinity"):
            MultipleKernelClassifier().fit(X, y)
