"""The shared base: columns, weights, precision, blocks, sparsity."""

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.kernel_approximation import RBFSampler

from coulomb._support.errors import ParameterError
from coulomb.estimators import base
from coulomb.estimators.base import (
    describe_columns,
    encode_target,
    scale_gamma,
)
from coulomb.estimators.baselines import OrthogonalSampler


@pytest.fixture
def X():
    return np.random.default_rng(0).normal(3.0, 2.0, size=(40, 4))


def fitted(X, **settings):
    return OrthogonalSampler(32, random_state=0, **settings).fit(X)


def test_features_are_the_formula(X):
    sampler = fitted(X)
    z = (X - X.mean(axis=0)) / X.std(axis=0)
    phase = z @ sampler.random_weights_ + sampler.random_offset_
    np.testing.assert_allclose(
        sampler.transform(X), np.sqrt(2 / 32) * np.cos(phase), atol=1e-13
    )


@pytest.mark.parametrize("convert", [np.asarray, sparse.csr_matrix, sparse.csr_array])
def test_blocks_do_not_change_the_features(X, convert, monkeypatch):
    sampler = fitted(X)
    whole = sampler.transform(convert(X))
    monkeypatch.setattr(base, "_BLOCK_ENTRIES", 7 * 32)
    np.testing.assert_allclose(sampler.transform(convert(X)), whole, atol=1e-14)


@pytest.mark.parametrize("standardize", [True, False])
def test_sparse_equals_dense(X, standardize):
    X = np.where(np.abs(X) < 2.0, 0.0, X)
    dense = fitted(X, standardize=standardize)
    thin = fitted(sparse.csr_matrix(X), standardize=standardize)
    np.testing.assert_allclose(thin.mean_, dense.mean_, atol=1e-14)
    np.testing.assert_allclose(thin.scale_, dense.scale_, rtol=1e-13)
    np.testing.assert_allclose(thin.gamma_, dense.gamma_, rtol=1e-13)
    np.testing.assert_allclose(
        thin.transform(sparse.csr_matrix(X)), dense.transform(X), atol=1e-12
    )


def test_a_sparse_matrix_stays_sparse(monkeypatch):
    X = sparse.random(200, 300, density=0.01, format="csr", random_state=0)

    def refuse(*args, **kwargs):
        raise AssertionError("densified")

    monkeypatch.setattr(sparse.csr_matrix, "toarray", refuse)
    monkeypatch.setattr(sparse.csr_matrix, "todense", refuse)
    assert np.isfinite(fitted(X).transform(X)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_precision_is_kept(X, dtype):
    X = X.astype(dtype)
    sampler = fitted(X)
    for rows in (X, sparse.csr_matrix(X)):
        assert sampler.transform(rows).dtype == dtype
    exact = sampler.transform(X.astype(np.float64))
    # 8 float32 roundings of a phase below 30
    np.testing.assert_allclose(sampler.transform(X), exact, atol=8 * 30 * 6e-8 / 4)


def test_gamma_scale_counts_varying_columns(X):
    X = np.column_stack([X, np.full(40, 0.1)])
    assert fitted(X).gamma_ == 0.25
    assert fitted(np.ones((5, 2))).gamma_ == 1.0
    assert fitted(X, gamma=0.7).gamma_ == 0.7


@pytest.mark.parametrize("convert", [np.asarray, sparse.csr_matrix])
def test_gamma_scale_without_standardisation_is_scikit_learns(X, convert):
    theirs = RBFSampler(gamma="scale").fit(convert(X))._gamma
    ours = fitted(convert(X), standardize=False)
    assert ours.gamma_ == pytest.approx(theirs, rel=1e-12)
    assert not ours.mean_.any()
    assert (ours.scale_ == 1).all()


def test_gamma_scale_of_nothing_is_one():
    for X in (np.zeros((3, 2)), np.ones((3, 2))):
        assert scale_gamma(describe_columns(X, np.ones(3))) == 1.0


def test_constant_columns_contribute_nothing(X):
    wide = np.column_stack([X[:, :2], np.full(40, 0.1), X[:, 2:]])
    sampler = fitted(wide)
    np.testing.assert_allclose(sampler.transform(wide), fitted(X).transform(X))
    assert sampler.scale_[2] == 1.0
    assert not sampler.random_weights_[2].any()
    moved = wide.copy()
    moved[:, 2] = 77.0
    np.testing.assert_array_equal(sampler.transform(moved), sampler.transform(wide))


@pytest.mark.parametrize("convert", [np.asarray, sparse.csr_matrix])
def test_integer_weights_repeat_rows(X, convert):
    weight = np.random.default_rng(1).integers(0, 4, size=40)
    repeated = describe_columns(
        convert(np.repeat(X, weight, axis=0)), np.ones(weight.sum())
    )
    sampler = OrthogonalSampler(8, random_state=0)
    weighted = clone(sampler).fit(convert(X), sample_weight=weight)
    np.testing.assert_allclose(weighted.mean_, repeated.mean, rtol=1e-13)
    np.testing.assert_allclose(weighted.scale_, repeated.scale, rtol=1e-13)


@pytest.mark.parametrize("standardize", [True, False])
def test_rows_of_weight_zero_are_absent(X, standardize):
    weight = np.ones(40)
    weight[:5] = 0
    wild = X.copy()
    wild[:5] = 1e10
    sampler = OrthogonalSampler(8, standardize=standardize, random_state=0)
    a = clone(sampler).fit(wild, sample_weight=weight)
    b = clone(sampler).fit(X[5:])
    np.testing.assert_array_equal(a.transform(X), b.transform(X))


def test_weights_must_be_sensible(X):
    with pytest.raises(ValueError, match=r"[Nn]egative"):
        OrthogonalSampler().fit(X, sample_weight=np.full(40, -1.0))
    with pytest.raises(ValueError, match=r"non-zero|positive"):
        OrthogonalSampler().fit(X, sample_weight=np.zeros(40))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("convert", [np.asarray, sparse.csr_matrix])
@pytest.mark.parametrize("factor", [1e30, 1e-30])
def test_far_units_give_the_same_features(X, dtype, convert, factor):
    plain, far = X.astype(dtype), (X * factor).astype(dtype)
    expected = fitted(plain).transform(plain)
    found = fitted(convert(far)).transform(convert(far))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_wide_float64_columns_are_standardised(X):
    np.testing.assert_allclose(
        fitted(X * 1e250).transform(X * 1e250), fitted(X).transform(X), atol=1e-10
    )


def test_values_out_of_range_name_their_column(X):
    X[0, 2] = 1e305
    with pytest.raises(ParameterError, match=r"Column 2 of `X` .* too large"):
        fitted(X)
    X[0, 2] = 1e200
    with pytest.raises(ParameterError, match=r"Column 2 of `X` .*standardize=True"):
        fitted(X, standardize=False)


def test_new_rows_out_of_range_are_refused(X):
    sampler = fitted(X.astype(np.float32) * np.float32(1e-30))
    with pytest.raises(ParameterError, match="too far from the training data"):
        sampler.transform(np.full((1, 4), 3e38, dtype=np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_missing_and_infinite_values_are_refused(X, bad):
    sampler = fitted(X)
    X[3, 1] = bad
    for call in (sampler.transform, sampler.fit, sampler.kernel):
        with pytest.raises(ValueError, match=r"NaN|infinity"):
            call(X)


def test_kernel_is_the_product_of_features(X):
    sampler = fitted(X).set_output(transform="pandas")
    np.testing.assert_allclose(np.diag(sampler.kernel(X)), 1.0, atol=0.8)
    features = np.asarray(sampler.transform(X))
    np.testing.assert_allclose(sampler.kernel(X, X[:3]), features @ features[:3].T)


def test_settings_changed_after_the_fit_wait_for_the_next(X):
    sampler = fitted(X)
    before = sampler.transform(X)
    sampler.set_params(standardize=False, gamma=9.0, n_components=3)
    np.testing.assert_array_equal(sampler.transform(X), before)


def test_one_row_is_enough():
    sampler = fitted(np.array([[1.0, 2.0]]))
    np.testing.assert_allclose(
        sampler.transform([[1.0, 2.0]])[0],
        np.sqrt(2 / 32) * np.cos(sampler.random_offset_),
    )


def test_targets():
    ones = np.ones(4)
    np.testing.assert_allclose(
        encode_target(np.array([0, 1, 2, 2]), ones).sum(axis=0), 0.0, atol=1e-15
    )
    assert encode_target(np.array([0, 1, 2, 2]), ones).shape == (4, 3)
    number = encode_target(np.array([0, 1, 2, 2]), ones, target="number")
    assert number.shape == (4, 1)
    assert number.std() == pytest.approx(1.0)
    huge = encode_target(np.array([1e200, 2e200, 0.0, 5e200]), ones)
    assert huge.shape == (4, 1)
    assert huge.std() == pytest.approx(1.0)
    weight = np.array([1.0, 3.0])
    assert weight @ encode_target(np.array(["a", "b"]), weight) == pytest.approx(0.0)


@pytest.mark.parametrize(
    "y, target, found",
    [([1, 1], "auto", "one class"), ([0.5, 0.5], "auto", "one value")],
)
def test_constant_targets_are_refused(y, target, found):
    with pytest.raises(ParameterError, match=f"`y` must vary.*got {found}"):
        encode_target(np.array(y), np.ones(2), target=target)


def test_unknown_target():
    with pytest.raises(ParameterError, match="did you mean 'classes'"):
        encode_target(np.array([0, 1]), np.ones(2), target="clases")
