"""Importance-sampled features: the chi-square problem, the draw, the estimator."""

import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import minimize
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from coulomb._support.errors import ParameterError, ParameterTypeError
from coulomb.estimators.baselines import (
    ImportanceSampler,
    solve_chi_square,
)


@parametrize_with_checks(
    [ImportanceSampler(20, n_candidates=500), ImportanceSampler(9, selection="top")]
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.fixture
def problem():
    X = np.random.default_rng(0).normal(size=(150, 3))
    return X, np.where(X[:, 0] * X[:, 1] > 0, 1, -1)


def sampler(**settings):
    return ImportanceSampler(
        **{"n_components": 30, "n_candidates": 800, "random_state": 0} | settings
    )


def kkt_residual(a, q, divergence):
    """Largest violation of the optimality conditions, in units of the range of a."""
    a = (a - a.min()) / np.ptp(a)
    count, active = len(a), q > 0
    # stationarity on the support: a_k - nu - lam (q_k - 1/N) = 0, lam >= 0
    design = np.column_stack([np.ones(active.sum()), q[active]])
    (level, lam), *_ = np.linalg.lstsq(design, a[active], rcond=None)
    slack = a - level - lam * q
    gap = abs(np.sum((q - 1 / count) ** 2) - divergence) / divergence
    return max(np.abs(slack[active]).max(), slack[~active].max(initial=0), -lam, gap)


@pytest.mark.parametrize("divergence", [1e-8, 1e-5, 0.005, 0.05, 0.3, 0.8])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_solution_is_optimal(divergence, scale):
    a = scale * np.random.default_rng(0).exponential(size=1000)
    q = solve_chi_square(a, divergence)
    assert q.sum() == pytest.approx(1.0, abs=1e-12)
    assert q.min() >= 0
    assert np.sum((q - 1e-3) ** 2) <= divergence * (1 + 1e-12)
    assert kkt_residual(a, q, divergence) < 1e-8


@pytest.mark.parametrize("divergence", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_solution_equals_a_general_solver(divergence, seed):
    a = np.random.default_rng(seed).exponential(size=8)
    start = np.full(8, 1 / 8)
    found = minimize(
        lambda q: -a @ q,
        start,
        jac=lambda q: -a,
        method="SLSQP",
        bounds=[(0, 1)] * 8,
        constraints=[
            {"type": "eq", "fun": lambda q: q.sum() - 1},
            {"type": "ineq", "fun": lambda q: divergence - np.sum((q - start) ** 2)},
        ],
        options={"ftol": 1e-14, "maxiter": 500},
    )
    q = solve_chi_square(a, divergence)
    assert a @ q == pytest.approx(-found.fun, rel=1e-7)
    np.testing.assert_allclose(q, found.x, atol=1e-4)


def test_tolerance_bounds_the_divergence():
    a = np.random.default_rng(0).exponential(size=1000)
    for tol in (1e-2, 1e-6, 1e-10):
        missing = 0.005 - np.sum((solve_chi_square(a, 0.005, tol=tol) - 1e-3) ** 2)
        assert 0 <= missing + 1e-15 <= 0.005 * tol + 2e-15


def test_no_divergence_is_uniform():
    np.testing.assert_array_equal(
        solve_chi_square(np.arange(4.0), 0.0), np.full(4, 0.25)
    )


def test_much_divergence_takes_the_best():
    q = solve_chi_square(np.array([1.0, 3.0, 2.0]), 5.0)
    np.testing.assert_array_equal(q, [0.0, 1.0, 0.0])
    # |e_1 - 1/3|^2 = 2/3 is just enough
    np.testing.assert_array_equal(solve_chi_square(np.array([1.0, 3.0, 2.0]), 0.7), q)


def test_ties_share():
    q = solve_chi_square(np.array([2.0, 1.0, 2.0, 0.0]), 10.0)
    np.testing.assert_array_equal(q, [0.5, 0.0, 0.5, 0.0])
    q = solve_chi_square(np.array([2.0, 1.0, 2.0, 1.0, 0.0]), 0.1)
    assert q[0] == q[2] > q[1] == q[3] > 0


@pytest.mark.parametrize("divergence", [0.0, 0.1, 10.0])
def test_equal_scores_stay_uniform(divergence):
    q = solve_chi_square(np.full(5, 0.3), divergence)
    np.testing.assert_array_equal(q, np.full(5, 0.2))


def test_one_candidate():
    np.testing.assert_array_equal(solve_chi_square(np.array([2.0]), 0.005), [1.0])


def test_scores_do_not_depend_on_their_unit_or_origin():
    a = np.random.default_rng(0).exponential(size=50)
    q = solve_chi_square(a, 0.02)
    np.testing.assert_allclose(solve_chi_square(7 * a + 3, 0.02), q, atol=1e-11)


def test_alignments_are_the_double_sum(problem):
    X, y = problem
    weight = np.random.default_rng(1).uniform(size=150)
    model = sampler().fit(X, y, sample_weight=weight)
    # equal weights: the transform is phi / sqrt(D)
    features = np.sqrt(30) * model.transform(X)
    share = weight / weight.sum()
    centred = y - share @ y
    centred = share * centred / np.sqrt(share @ centred**2)
    expected = np.einsum("i,j,ik,jk->k", centred, centred, features, features)
    found = model.alignments_[model.selected_]
    np.testing.assert_allclose(found, expected, atol=1e-13)


def test_effective_sample_size_is_set_by_the_divergence(problem):
    model = sampler(n_candidates=2000, divergence=0.01).fit(*problem)
    # |q|^2 = |q - 1/N|^2 + 1/N
    assert model.effective_sample_size_ == pytest.approx(1 / (0.01 + 1 / 2000))
    assert model.weights_.shape == model.alignments_.shape == (2000,)
    assert (model.weights_[model.selected_] > 0).all()


def test_top_features_carry_their_weights(problem):
    model = sampler(selection="top").fit(*problem)
    kept = model.weights_[model.selected_]
    assert kept.min() >= np.delete(model.weights_, model.selected_).max()
    np.testing.assert_allclose(model.feature_scale_, np.sqrt(2 * kept / kept.sum()))


def alignment(K, Y):
    H = np.eye(len(K)) - 1 / len(K)
    K, Y = H @ K @ H, H @ Y @ H
    return (K * Y).sum() / np.linalg.norm(K) / np.linalg.norm(Y)


@pytest.mark.parametrize("kind", ["binary", "classes", "number"])
def test_chosen_features_align_better_than_random_ones(kind):
    X = np.random.default_rng(0).normal(size=(300, 3))
    signal = X[:, 0] * X[:, 1]
    y = {
        "binary": np.where(signal > 0, "a", "b"),
        "classes": np.digitize(signal, [-0.5, 0.5]),
        "number": signal,
    }[kind]
    fresh = np.random.default_rng(1).normal(size=(200, 3))
    ideal = np.outer(*[np.sign(fresh[:, 0] * fresh[:, 1])] * 2)
    chosen, plain = (
        np.array(
            [
                alignment(
                    sampler(divergence=divergence, random_state=seed)
                    .fit(X, y)
                    .kernel(fresh),
                    ideal,
                )
                for seed in range(10)
            ]
        )
        for divergence in (0.005, 0.0)
    )
    gain = chosen - plain
    assert gain.mean() > 3 * gain.std() / np.sqrt(len(gain))


def test_whole_numbers_may_be_a_quantity():
    X = np.random.default_rng(0).normal(size=(100, 2))
    counts = np.random.default_rng(1).poisson(np.exp(X[:, 0]))
    classes = sampler().fit(X, counts).alignments_
    number = sampler(target="number").fit(X, counts).alignments_
    assert not np.allclose(classes, number)
    shifted = sampler(target="number").fit(X, 3.0 * counts + 5.0)
    np.testing.assert_allclose(shifted.alignments_, number, atol=1e-13)


def test_integer_weights_repeat_rows(problem):
    X, y = problem
    weight = np.random.default_rng(1).integers(0, 4, size=150)
    weighted = sampler().fit(X, y, sample_weight=weight)
    repeated = sampler().fit(np.repeat(X, weight, axis=0), np.repeat(y, weight))
    np.testing.assert_allclose(weighted.alignments_, repeated.alignments_, atol=1e-13)
    np.testing.assert_allclose(weighted.transform(X), repeated.transform(X), atol=1e-12)


def test_a_class_of_weight_zero_is_absent(problem):
    X, y = problem
    y = y.copy()
    y[:5] = 2
    weight = np.where(y == 2, 0.0, 1.0)
    a = sampler().fit(X, y, sample_weight=weight)
    b = sampler().fit(X[5:], y[5:])
    np.testing.assert_array_equal(a.alignments_, b.alignments_)


def test_sparse_equals_dense(problem):
    X, y = problem
    dense = sampler().fit(X, y)
    thin = sampler().fit(sparse.csr_matrix(X), y)
    np.testing.assert_allclose(thin.alignments_, dense.alignments_, atol=1e-13)
    np.testing.assert_array_equal(thin.selected_, dense.selected_)


def test_random_state_decides(problem):
    first = sampler().fit(*problem)
    np.testing.assert_array_equal(
        clone(first).fit(*problem).random_weights_, first.random_weights_
    )
    other = sampler(random_state=1).fit(*problem)
    assert not np.allclose(other.random_weights_, first.random_weights_)


def test_pipeline_and_pandas(problem):
    X, y = problem
    model = make_pipeline(sampler(), LogisticRegression()).set_output(
        transform="pandas"
    )
    assert model.fit(X, y).score(X, y) > 0.8
    assert model[0].transform(X).columns[0] == "importancesampler0"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_missing_and_infinite_values_are_refused(problem, bad):
    X, y = problem
    y = y.astype(float)
    y[0] = bad
    with pytest.raises(ValueError, match=r"NaN|infinity"):
        sampler().fit(X, y)
    X[0, 0] = bad
    with pytest.raises(ValueError, match=r"NaN|infinity"):
        sampler().fit(X, problem[1])


def test_labels_must_vary_and_be_there(problem):
    X, y = problem
    with pytest.raises(ParameterError, match=r"`y` must vary.*got one class"):
        sampler().fit(X, np.ones(150))
    with pytest.raises(ParameterError, match=r"`y` must vary.*got one class"):
        sampler().fit(X, y, sample_weight=(y == 1).astype(float))
    with pytest.raises(ValueError, match="requires y to be passed"):
        sampler().fit(X, None)
    with pytest.raises(ValueError, match="minimum of 2 is required"):
        sampler().fit(X[:1], y[:1])


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"n_components": 0}, ParameterError, "`n_components` must be at least 1"),
        ({"n_candidates": 0}, ParameterError, "`n_candidates` must be at least 1"),
        ({"divergence": -0.1}, ParameterError, "`divergence` must be at least 0"),
        ({"tol": 0.0}, ParameterError, "`tol` must be positive; got 0.0"),
        ({"gamma": -1.0}, ParameterError, "`gamma` must be positive; got -1.0"),
        ({"gamma": None}, ParameterTypeError, "`gamma` must be a number; got None"),
        ({"selection": "stratifed"}, ParameterError, "did you mean 'stratified'"),
        ({"target": "numbre"}, ParameterError, "did you mean 'number'"),
        (
            {"selection": "top", "n_candidates": 20},
            ParameterError,
            "`n_components` = 30 exceeds `n_candidates` = 20",
        ),
    ],
)
def test_bad_settings(problem, settings, error, message):
    with pytest.raises(error, match=message):
        sampler(**settings).fit(*problem)
