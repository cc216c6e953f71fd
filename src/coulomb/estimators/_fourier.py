"""What every random-Fourier transformer shares."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from scipy import sparse
from sklearn.base import (
    BaseEstimator,
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
)
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    validate_data,
)

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError, unknown_name
from coulomb.dynamics.initial import AbstractLaw, draw_phases
from coulomb.estimators._columns import (
    describe_columns,
    drop_weightless,
    scale_gamma,
)
from coulomb.estimators._saving import load_estimator, save_estimator

# Entries of one block of features: two megabytes stay in a core's cache.
_BLOCK_ENTRIES = 2**18


class AbstractFourierSampler(
    ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator
):
    """Random Fourier features `sqrt(2 w_k) cos(omega_k . z + b_k)` of scaled inputs.

    `z = (x - mean_) / scale_`. A final class calls `_fit_input`, which checks the data
    and learns the columns, then `_store_features` with frequencies for the columns
    that vary; a constant column carries no frequency, whatever it holds later.

    Attributes
    ----------
    random_weights_
        Frequencies omega of the scaled inputs, shape `(n_features_in_, n_features)`.
    random_offset_
        Phases b, shape `(n_features,)`.
    feature_scale_
        Amplitudes, shape `(n_features,)`: `sqrt(2 / n_features)` for equal weights.
    mean_, scale_
        Location and scale of each column; zeros and ones without standardisation.
    gamma_
        The bandwidth on the scaled inputs, `exp(-gamma |z - z'|^2)`.
    """

    n_components: int
    gamma: str | float
    standardize: bool

    def transform(self, X: Any) -> np.ndarray:
        """Map rows to features.

        Parameters
        ----------
        X
            Dense or sparse data, shape `(n, n_features_in_)`. A sparse matrix stays
            sparse.

        Returns
        -------
        ndarray
            Features, shape `(n, n_features)`, in the precision of `X`.
        """
        return self._features(X)

    def _features(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(
            self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False
        )
        features = np.empty((X.shape[0], self._n_features_out), dtype=X.dtype)
        amplitudes = self.feature_scale_.astype(X.dtype)
        blocks = self._cosines(X, self.random_weights_, self.random_offset_)
        for rows, cosines in blocks:
            np.multiply(cosines, amplitudes, out=features[rows])
        return features

    def kernel(self, X: Any, Z: Any = None) -> np.ndarray:
        """Evaluate the kernel of the features, `K(x, z) = phi(x) . phi(z)`.

        Parameters
        ----------
        X
            Rows, shape `(n, n_features_in_)`.
        Z
            Columns, shape `(m, n_features_in_)`; None means `X`.

        Returns
        -------
        ndarray
            The Gram matrix, shape `(n, m)`.
        """
        left = self._features(X)
        right = left if Z is None else self._features(Z)
        return left @ right.T

    def save(self, path: str | Path) -> None:
        """Write settings and features to one safetensors file, whole or not at all.

        Training data are not kept, so `partial_fit` begins anew after `load`.

        Parameters
        ----------
        path
            The file to make or replace.
        """
        check_is_fitted(self)
        save_estimator(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote. Nothing in the file is run.

        Parameters
        ----------
        path
            The file.

        Returns
        -------
        AbstractFourierSampler
            Ready to transform.
        """
        return load_estimator(cls, path)

    @property
    def _n_features_out(self) -> int:
        return int(self.random_offset_.shape[0])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _fit_input(
        self, X: Any, y: Any = None, sample_weight: Any = None, *, supervised: bool
    ) -> tuple[Any, Any, np.ndarray]:
        """Check settings and data, learn the columns; return the rows that count."""
        check_count("n_components", self.n_components)
        self._check_gamma()
        X, y = self._check_rows(X, y, supervised=supervised)
        weight = _check_sample_weight(
            sample_weight, X, dtype=np.float64, ensure_non_negative=True
        )
        X, y, weight = drop_weightless(X, y, weight)
        columns = describe_columns(X, weight, standardize=self.standardize)
        self.mean_, self.scale_, self._varying = columns
        self.gamma_ = self._resolve_gamma(X, weight)
        return X, y, weight

    def _check_gamma(self) -> None:
        check_gamma(self.gamma)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Leave the estimator as it was if fitting fails."""
        before = dict(self.__dict__)
        try:
            yield
        except BaseException:
            self.__dict__ = before
            raise

    def _check_rows(self, X: Any, y: Any, *, supervised: bool) -> tuple[Any, Any]:
        settings = {"accept_sparse": "csr", "dtype": [np.float64, np.float32]}
        if supervised:
            return validate_data(self, X, y, ensure_min_samples=2, **settings)
        return validate_data(self, X, **settings), None

    def _resolve_gamma(self, X: Any, weight: np.ndarray) -> float:
        if self.gamma != "scale":
            return float(self.gamma)
        if self.standardize:
            return 1.0 / max(1, int(self._varying.sum()))
        return scale_gamma(X, weight)

    def _draw_features(
        self, law: AbstractLaw, count: int, generator: torch.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw frequencies `(n_varying, count)` and phases."""
        dim = int(self._varying.sum())
        if dim == 0:
            return np.empty((0, count)), np.zeros(count)
        weights = law.draw(count, dim, generator=generator)
        return weights.T.numpy(), draw_phases(count, generator=generator).numpy()

    def _store_features(
        self, weights: np.ndarray, offset: np.ndarray, *, mass: Any = None
    ) -> Self:
        """Keep frequencies `(n_varying, D)`, phases and, if unequal, their masses."""
        self.random_weights_ = self._embed(weights)
        self.random_offset_ = offset
        equal = np.full(offset.shape, 1.0 / max(1, offset.shape[0]))
        self.feature_scale_ = np.sqrt(2.0 * (equal if mass is None else mass))
        return self

    def _embed(self, weights: np.ndarray) -> np.ndarray:
        """Give constant columns the frequency zero."""
        full = np.zeros((self._varying.shape[0], weights.shape[1]))
        full[self._varying] = weights
        return full

    def _cosines(
        self, X: Any, weights: np.ndarray, offset: np.ndarray
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield `cos(z . omega + b)` for blocks of rows, in the precision of X."""
        rows = max(1, _BLOCK_ENTRIES // max(1, offset.shape[0], X.shape[1]))
        if sparse.issparse(X):
            # Subtracting the mean would fill the matrix, so it moves to the phase.
            weights = weights / self.scale_[:, None]
            offset = offset - self.mean_ @ weights
        else:
            weights, offset = weights.astype(X.dtype), offset.astype(X.dtype)
        for start in range(0, X.shape[0], rows):
            block = slice(start, start + rows)
            with np.errstate(over="ignore", invalid="ignore"):
                phase = self._scaled(X[block]) @ weights
                phase += offset
            if not np.isfinite(phase).all():
                row = start + int(np.argmin(np.isfinite(phase).all(axis=1)))
                raise ParameterError(
                    f"`X` holds values in row {row} too far from the training data "
                    "to compute with; scale or clip them."
                )
            yield block, np.cos(phase, out=phase)

    def _scaled(self, X: Any) -> Any:
        if sparse.issparse(X):
            return X
        return ((X - self.mean_) / self.scale_).astype(X.dtype, copy=False)


def draw_seed(random_state: Any) -> int:
    """Turn scikit-learn's seed, generator or None into one number."""
    return int(check_random_state(random_state).randint(2**31 - 1))


def check_gamma(gamma: Any) -> None:
    """Refuse a bandwidth that is neither "scale" nor a positive number.

    Examples
    --------
    >>> check_gamma("scales")
    Traceback (most recent call last):
    coulomb._support.errors.ParameterError: `gamma` has no member 'scales'; did you
    mean 'scale'? Known: scale.
    """
    if not isinstance(gamma, str):
        check_real("gamma", gamma, above=0)
    elif gamma != "scale":
        raise unknown_name("gamma", gamma, ["scale"])
