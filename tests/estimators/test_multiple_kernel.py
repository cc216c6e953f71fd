"""Multiple-kernel learning: the weights, the machine, the messages."""

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.base import clone
from sklearn.kernel_ridge import KernelRidge
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.utils.estimator_checks import parametrize_with_checks
from threadpoolctl import threadpool_info, threadpool_limits

from coulomb._support.errors import ParameterError, ParameterTypeError
from coulomb.estimators import baselines as multiple_kernel
from coulomb.estimators.baselines import (
    MultipleKernelClassifier,
    MultipleKernelRegressor,
    solve_alignment,
    solve_margin,
)

GAMMAS = (0.05, 0.5, 2.0)


@parametrize_with_checks(
    [
        MultipleKernelClassifier(),
        MultipleKernelClassifier(standardize=True),
        MultipleKernelClassifier(method="margin", probability=True),
        MultipleKernelRegressor(kernels=["rbf", "linear"]),
    ]
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
    source = multiple_kernel._Kernels(GAMMAS, None, X)
    products, targets = multiple_kernel._alignment_problem(source, X, labels)
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
        ({"regularization": 0}, ParameterError, "`regularization` must be positive"),
        ({"kernels": "rbf"}, ParameterTypeError, "`kernels` must be a sequence"),
        ({"kernels": []}, ParameterError, "`kernels` must hold at least one"),
        ({"kernels": ["rbff"]}, ParameterError, "did you mean 'rbf'"),
        ({"kernels": [3]}, ParameterTypeError, "functions or names; got 3"),
        ({"kernels": [lambda X, Z: X]}, ParameterError, r"shape \(90, 90\) here"),
        (
            {"kernels": [lambda X, Z: -rbf_kernel(X, Z)]},
            ParameterError,
            "diagonals of at least 0",
        ),
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


def margin_by_hand(kernel, signs, r):
    """The same problem, given to a solver that knows nothing of it."""
    Q = (1 - r) * kernel * np.outer(signs, signs) + r * np.eye(len(signs))
    upper, lower = signs > 0, signs < 0
    start = np.where(upper, 1 / upper.sum(), 1 / lower.sum())
    return minimize(
        lambda g: g @ Q @ g,
        start,
        jac=lambda g: 2 * Q @ g,
        bounds=[(0, 1)] * len(signs),
        constraints=[
            {"type": "eq", "fun": lambda g, part=part: g[part].sum() - 1}
            for part in (upper, lower)
        ],
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )


@pytest.mark.parametrize("r", [0.01, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_the_margin_problem_against_a_generic_solver(r, scale):
    X, y = make_problem(40)
    signs, kernel = np.where(y == 1, 1.0, -1.0), rbf_kernel(X * scale, gamma=0.5)
    ours, theirs = solve_margin(kernel, signs, r), margin_by_hand(kernel, signs, r)
    Q = (1 - r) * kernel * np.outer(signs, signs) + r * np.eye(40)
    assert ours.min() >= 0
    for part in (signs > 0, signs < 0):
        assert ours[part].sum() == pytest.approx(1.0, abs=1e-9)
    assert ours @ Q @ ours == pytest.approx(theirs.fun, rel=1e-7)
    np.testing.assert_allclose(ours, theirs.x, atol=1e-4)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_weights_are_the_margins_of_the_kernels(n_classes):
    X, y = make_problem(40, n_classes)
    kernels = np.stack([rbf_kernel(X, gamma=gamma) for gamma in GAMMAS])
    parts = []
    for place in [1] if n_classes == 2 else range(3):
        signs = np.where(y == place, 1.0, -1.0)
        pulls = signs * margin_by_hand(kernels.mean(axis=0), signs, 0.2).x
        margins = np.einsum("i,mij,j->m", pulls, kernels, pulls)
        parts.append(margins / margins.sum())
    model = MultipleKernelClassifier(GAMMAS, method="margin", regularization=0.2)
    model.fit(X, y)
    np.testing.assert_allclose(model.kernel_weights_, np.mean(parts, axis=0), atol=1e-4)
    mixed = np.einsum("m,mij->ij", model.kernel_weights_, kernels)
    np.testing.assert_allclose(model.kernel(X), mixed, atol=1e-12)


def test_rows_that_are_alike_have_no_margin():
    model = MultipleKernelClassifier(GAMMAS, method="margin")
    model.fit(np.ones((6, 2)), [0, 1] * 3)
    np.testing.assert_allclose(model.kernel_weights_, 1 / 3)


@pytest.mark.parametrize("method", ["alignf", "margin"])
def test_kernels_of_the_user(method):
    """Gaussian kernels as functions, of any scale, are the bandwidths' own."""
    X, y = make_problem(60, 3)
    given = [
        lambda X, Z, gamma=gamma: 7 * rbf_kernel(X, Z, gamma=gamma) for gamma in GAMMAS
    ]
    ours = MultipleKernelClassifier(kernels=given, method=method).fit(X, y)
    theirs = MultipleKernelClassifier(GAMMAS, method=method).fit(X, y)
    assert ours.gammas_ is None
    np.testing.assert_allclose(ours.kernel_weights_, theirs.kernel_weights_, atol=1e-6)
    np.testing.assert_allclose(ours.kernel(X[:9]), theirs.kernel(X[:9]), atol=1e-6)
    # A kernel that knows the classes takes most of the weight.
    sees = [lambda X, Z: rbf_kernel(X, Z, gamma=0.5), "linear"]
    model = MultipleKernelClassifier(kernels=sees, method=method).fit(X, y)
    assert model.kernel_weights_[0] > 0.5


@pytest.mark.parametrize("n_classes", [2, 3])
def test_probabilities(n_classes):
    X, y = make_problem(240, n_classes)
    names = np.array(["in", "mid", "out"])[y]
    model = MultipleKernelClassifier(probability=True).fit(X[:160], names[:160])
    found = model.predict_proba(X[160:])
    assert found.shape == (80, n_classes)
    np.testing.assert_allclose(found.sum(axis=1), 1.0)
    right = found[np.arange(80), np.searchsorted(model.classes_, names[160:])]
    # Of shares of the classes the log loss is near log(n_classes).
    assert -np.log(right).mean() < 0.6 * np.log(n_classes)
    assert not hasattr(MultipleKernelClassifier(), "predict_proba")
    with pytest.raises(ParameterError, match="a class has a single sample"):
        MultipleKernelClassifier(probability=True).fit(X[:9], [0] * 8 + [1])


@pytest.mark.parametrize("alpha", [1e-3, 1.0])
def test_regression_is_kernel_ridge_on_the_mixture(alpha):
    X, _ = make_problem(80)
    y = 5 + np.sin(2 * X[:, 0]) + X[:, 1]
    model = MultipleKernelRegressor(GAMMAS, alpha=alpha).fit(X[:60], y[:60])
    theirs = KernelRidge(alpha=alpha, kernel="precomputed")
    theirs.fit(model.kernel(X[:60]), y[:60] - y[:60].mean())
    expected = theirs.predict(model.kernel(X[60:])) + y[:60].mean()
    np.testing.assert_allclose(model.predict(X[60:]), expected, atol=1e-8)
    ideal = np.outer(y[:60] - y[:60].mean(), y[:60] - y[:60].mean())
    kernels = centred_kernels(X[:60])
    best = max(
        alignment(v, kernels, ideal)
        for v in np.random.default_rng(0).dirichlet(np.ones(3), 500)
    )
    assert alignment(model.kernel_weights_, kernels, ideal) > best - 1e-9


def blas_threads():
    found = [each for each in threadpool_info() if each["user_api"] == "blas"]
    return max(each["num_threads"] for each in found)


class Watched(np.ndarray):
    """An array that notes how many threads BLAS has when it is multiplied."""

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        self.seen.append(blas_threads())
        plain = [np.asarray(each) for each in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)


@pytest.mark.parametrize(
    "model",
    [
        MultipleKernelClassifier(method="alignf"),
        MultipleKernelClassifier(method="margin"),
        MultipleKernelRegressor(),
    ],
    ids=["alignf", "margin", "regressor"],
)
def test_the_same_bits_on_one_and_two_threads(model):
    """BLAS has one thread where sums are taken: their bits may depend on threads."""
    X = np.random.default_rng(0).normal(size=(300, 10))
    y = X[:, 0] if isinstance(model, MultipleKernelRegressor) else X[:, 0] > 0
    seen, found = [], []

    def kernel(a, b):
        seen.append(blas_threads())
        return a @ b.T

    model.set_params(kernels=["rbf", kernel])
    for threads in (1, 2):
        with threadpool_limits(limits=threads, user_api="blas"):
            assert blas_threads() == threads
            model.fit(X, y)
            calls = len(seen)
            decide = getattr(model, "decision_function", model.predict)
            found.append(np.concatenate([model.kernel_weights_, decide(X[:99])]))
            assert len(seen) > calls
            if isinstance(model, MultipleKernelRegressor):
                model.dual_coef_ = model.dual_coef_.view(Watched)
                model.dual_coef_.seen = seen
                calls = len(seen)
                model.predict(X[:9])
                assert len(seen) > calls + 1  # by the kernel and by the product
    assert set(seen) == {1}
    assert (found[0] == found[1]).all()
