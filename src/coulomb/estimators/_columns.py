"""Columns and targets at the edge: safe moments, weights, centred labels."""

from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from coulomb._support.errors import ParameterError, unknown_name
from coulomb.objectives import label_matrix

# Above this, the difference of two values may leave the range of float64.
_LARGEST_VALUE = 1e300
# Below this, squares stay in range.
_SQUARABLE = 1e150
_TARGETS = ("auto", "classes", "number")


class Columns(NamedTuple):
    """Mean and population standard deviation of each column; which columns vary."""

    mean: np.ndarray
    scale: np.ndarray  # 1 where a column does not vary
    varying: np.ndarray


def drop_weightless(X: Any, y: Any, weight: np.ndarray) -> tuple[Any, Any, np.ndarray]:
    """Leave out rows of weight zero, so that they are as if absent."""
    keep = weight > 0
    if not keep.any():
        raise ParameterError("`sample_weight` must hold a positive weight; got none.")
    if keep.all():
        return X, y, weight
    return X[keep], None if y is None else y[keep], weight[keep]


def describe_columns(
    X: Any, weight: np.ndarray, *, standardize: bool = True
) -> Columns:
    """Compute `mean_j = sum_i w_i x_ij / sum_i w_i` and the spread about it.

    Sums are taken in float64 of columns divided by their largest value, so that no
    square overflows. A column whose spread is below the rounding of its mean counts
    as constant.

    Examples
    --------
    >>> columns = describe_columns(np.array([[1.0, 7.0], [3.0, 7.0]]), np.ones(2))
    >>> columns.mean.tolist(), columns.scale.tolist(), columns.varying.tolist()
    ([2.0, 7.0], [1.0, 1.0], [True, False])
    """
    n_columns = X.shape[1]
    if not standardize:
        return Columns(
            np.zeros(n_columns), np.ones(n_columns), np.ones(n_columns, dtype=bool)
        )
    largest = _largest(X)
    if largest.max(initial=0.0) > _LARGEST_VALUE:
        raise ParameterError(
            f"Column {int(largest.argmax())} of `X` holds values up to "
            f"{largest.max():.3g}, too large to standardise; divide it first."
        )
    share = weight / weight.sum()
    mean, variance = _moments(X, share, np.where(largest > 0, largest, 1.0))
    mean, scale = mean * largest, np.sqrt(variance) * largest
    varying = scale > 10 * np.finfo(X.dtype).eps * np.abs(mean)
    return Columns(mean, np.where(varying, scale, 1.0), varying)


def scale_gamma(X: Any, weight: np.ndarray) -> float:
    """Compute `1 / (p Var(X))` over all entries, as scikit-learn's "scale" does.

    Examples
    --------
    >>> scale_gamma(np.array([[0.0, 2.0], [2.0, 0.0]]), np.ones(2))
    0.5
    """
    largest = _largest(X)
    unit = largest.max()
    if unit == 0:
        return 1.0
    if not 1 / _SQUARABLE < unit < _SQUARABLE:
        raise ParameterError(
            f"Column {int(largest.argmax())} of `X` holds values up to {unit:.3g}, "
            "whose variance is out of range; use `standardize=True` or rescale it."
        )
    mean, variance = _moments(X, weight / weight.sum(), np.full(X.shape[1], unit))
    total = (variance + (mean - mean.mean()) ** 2).mean() * unit**2
    return float(1.0 / (X.shape[1] * total)) if total > 0 else 1.0


class Target(NamedTuple):
    """Targets as numbers: class codes from 0, or the values themselves."""

    values: np.ndarray
    classes: np.ndarray | None  # None for numbers

    @property
    def kind(self) -> str:
        """The default way to make label vectors of them."""
        if self.classes is None:
            return "regression"
        return "centred-signs" if len(self.classes) == 2 else "centred"


def read_target(y: Any, *, target: str = "auto", classes: Any = None) -> Target:
    """Tell classes from numbers.

    Examples
    --------
    >>> read_target(np.array(["a", "b", "b"])).values.tolist()
    [0, 1, 1]
    >>> read_target(np.array([0.5, 1.5])).kind
    'regression'
    """
    if target not in _TARGETS:
        raise unknown_name("target", target, _TARGETS)
    y = np.asarray(y)
    if target == "number" or (target == "auto" and _looks_measured(y)):
        return Target(y.astype(np.float64), None)
    found, codes = np.unique(y, return_inverse=True)
    if classes is None:
        return Target(codes, found)
    known = np.unique(np.asarray(classes))
    unknown = np.setdiff1d(found, known)
    if unknown.size:
        raise ParameterError(
            f"`y` must hold only the classes of the first call; got {unknown[0]!r}. "
            "Name all of them there: partial_fit(X, y, classes=...)."
        )
    return Target(np.searchsorted(known, y), known)


def encode_target(y: Any, weight: np.ndarray, *, target: str = "auto") -> np.ndarray:
    """Turn targets into centred columns whose Gram matrix is the ideal kernel.

    Two classes give one column of signs, centred and of unit variance, and so do
    numbers; more classes give one-hot columns less their means.

    Examples
    --------
    >>> encode_target(np.array(["a", "b"]), np.ones(2)).ravel().tolist()
    [-1.0, 1.0]
    """
    read = read_target(y, target=target)
    return label_columns(read, weight).numpy()


def label_columns(
    target: Target, weight: np.ndarray, kind: str | None = None
) -> Tensor:
    """Make label vectors, refusing targets that do not vary."""
    values = target.values
    if target.classes is None:
        # Divided by the largest, so that squares of huge numbers stay in range.
        values = values / max(np.abs(values).max(initial=0.0), np.finfo(float).tiny)
        if not describe_columns(values[:, None], weight).varying[0]:
            raise _constant_target("one value")
    elif np.unique(values).size < 2:
        raise _constant_target("one class")
    return label_matrix(
        torch.as_tensor(values),
        kind=kind or target.kind,
        n_classes=0 if target.classes is None else len(target.classes),
        weights=torch.as_tensor(weight / weight.sum()),
    )


def _constant_target(found: str) -> ParameterError:
    return ParameterError(
        f"`y` must vary: the labels are what features are chosen by; got {found}."
    )


def _looks_measured(y: np.ndarray) -> bool:
    if y.dtype.kind not in "fiu":
        return False
    # Beyond 2**53 every float is whole, so size is the only sign of a measurement.
    if y.dtype.kind == "f" and ((y != np.rint(y)) | (np.abs(y) > 2.0**53)).any():
        return True
    return np.unique(y).size > max(20, y.size / 10)


def _largest(X: Any) -> np.ndarray:
    magnitude = abs(X).max(axis=0)
    if sparse.issparse(magnitude):
        magnitude = magnitude.toarray().ravel()
    return np.asarray(magnitude, dtype=np.float64)


def _moments(
    X: Any, share: np.ndarray, unit: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted mean and variance of the columns of `X / unit`."""
    if not sparse.issparse(X):
        values = X / unit
        mean = share @ values
        # Shares do not sum to one exactly; a second pass keeps constants constant.
        mean += share @ (values - mean)
        return mean, share @ (values - mean) ** 2
    rows = np.repeat(np.arange(X.shape[0]), np.diff(X.indptr))
    values, stored = X.data / unit[X.indices], share[rows]

    def add_up(terms: np.ndarray) -> np.ndarray:
        return np.bincount(X.indices, weights=terms, minlength=X.shape[1])

    full = np.bincount(X.indices, minlength=X.shape[1]) == X.shape[0]
    empty = np.where(full, 0.0, np.maximum(0.0, 1.0 - add_up(stored)))
    mean = add_up(stored * values)
    mean += add_up(stored * (values - mean[X.indices])) - empty * mean
    spread = add_up(stored * (values - mean[X.indices]) ** 2)
    return mean, spread + empty * mean**2
