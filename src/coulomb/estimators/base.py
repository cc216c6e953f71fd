"""What the estimators share: columns and targets, random Fourier features, saving."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from scipy import sparse
from sklearn.base import (
    BaseEstimator,
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
)
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.sparsefuncs import mean_variance_axis
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    validate_data,
)
from torch import Tensor

from coulomb._support.archive import read_archive, write_archive
from coulomb._support.checks import (
    check_count,
    check_labels,
    check_member,
    check_memory,
    check_real,
    check_seed,
)
from coulomb._support.errors import FileFormatError, ParameterError, shown
from coulomb.domains import AbstractDomain, Ball, Box, Space, Sphere
from coulomb.dynamics.initial import AbstractLaw, draw_phases
from coulomb.estimators.chunked import over_parts
from coulomb.features import AbstractFeatureMap, feature_maps
from coulomb.interactions import AbstractInteraction, Riesz
from coulomb.objectives import label_matrix

# Entries of one block of features: two megabytes stay in a core's cache.
_BLOCK_ENTRIES = 2**18
# Above this, the difference of two values may leave the range of float64.
_LARGEST_VALUE = 1e300
# Below this, squares stay in range.
_SQUARABLE = 1e150
_MOST_ROWS = 20_000  # that partial_fit remembers
_TARGETS = ("auto", "classes", "number")
_ROWS: dict[str, Any] = {"accept_sparse": "csr", "dtype": [np.float64, np.float32]}
_FORMAT = "coulomb-estimator-1"
# Settings that are objects; nothing else in a file becomes one.
_KINDS: list[type] = [Ball, Box, Space, Sphere, Riesz]
_KINDS += [type(feature_maps.build(name)) for name in feature_maps]
_CLASSES = {kind.__name__: kind for kind in _KINDS}


class SavedEstimator:
    """Saving without pickle: settings and learned attributes, arrays beside JSON."""

    # Learned attributes that do not end in an underscore.
    _also_saved: ClassVar[tuple[str, ...]] = ()

    def save(self, path: str | Path) -> None:
        """Write settings and all that was learned to one safetensors file.

        The file is written whole or not at all. Training data are not kept, so
        `partial_fit` begins anew after `load`.

        Parameters
        ----------
        path
            The file to make or replace.
        """
        check_is_fitted(self)
        arrays: dict[str, np.ndarray] = {}
        facts = _describe(self, arrays, "")
        write_archive(path, arrays, {"format": _FORMAT, **facts})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote. Nothing in the file is run.

        Parameters
        ----------
        path
            The file.

        Returns
        -------
        Self
            The fitted estimator.
        """
        arrays, facts = read_archive(
            path,
            complaint="is not a saved estimator",
            form=_FORMAT,
            framework="np",
            # Nothing has moved before the first step; most columns have no limit.
            unbounded=("history_.", "column_limits_"),
        )
        if facts.get("class") != cls.__name__:
            raise FileFormatError(
                f"{path} holds a {facts.get('class')!r}, not a {cls.__name__!r}; load "
                "it with that class."
            )
        try:
            estimator = _rebuild(cls, facts, arrays)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            raise FileFormatError(f"{path} is damaged: {error}.") from error
        return estimator

    def _check_restored(self) -> None:
        """Refuse learned attributes that do not fit together."""

    def _check_width(self, width: int) -> None:
        count = getattr(self, "n_features_in_", None)
        names = getattr(self, "feature_names_in_", ("",) * width)
        words = all(isinstance(name, str) for name in names)
        if type(count) is not int or not count == len(names) == width or not words:
            raise ValueError(f"n_features_in_, or its names, are not {width} columns")

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Leave the estimator as it was if fitting fails."""
        before = dict(self.__dict__)
        try:
            yield
        except BaseException as error:
            self.__dict__ = before
            if isinstance(error, OverflowError):  # NumPy's, of a long whole number
                raise ParameterError("`X` and `y` must fit into float64.") from error
            raise


@dataclass(eq=False, repr=False)
class AbstractFourierSampler(
    SavedEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator
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

    n_components: int = 100
    _: KW_ONLY
    gamma: str | float = "scale"
    standardize: bool = True
    random_state: Any = None
    _supervised: ClassVar[bool] = True
    _gammas: ClassVar[tuple[str, ...]] = ("scale",)
    _also_saved: ClassVar[tuple[str, ...]] = ("_varying",)

    @over_parts
    def transform(self, X: Any) -> Any:
        """Map rows to features.

        Parameters
        ----------
        X
            Dense or sparse data, shape `(n, n_features_in_)`. A sparse matrix stays
            sparse. A Dask collection, a Parquet path or an iterable of chunks is mapped
            part by part.

        Returns
        -------
        ndarray
            Features, shape `(n, n_features)`, in the precision of `X`; of a Dask
            collection a Dask array, of other parts an iterator of arrays.
        """
        return self._features(X)

    def _features(self, X: Any) -> np.ndarray:
        X = self._check_new(X)
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

    @property
    def _n_features_out(self) -> int:
        return int(self.random_offset_.shape[0])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        tags.target_tags.required = self._supervised
        return tags

    def _fit_input(
        self, X: Any, y: Any, sample_weight: Any
    ) -> tuple[Any, Any, np.ndarray]:
        """Check settings and data, learn the columns; return the rows that count."""
        check_count("n_components", self.n_components)
        self._check_gamma()
        least = {"ensure_min_samples": 2} if self._supervised else {}
        X, y, weight = self._check_rows(X, y, sample_weight, **least)
        check_memory("n_components", 16 * X.shape[1] * int(self.n_components))
        X, y, weight = drop_weightless(X, y, weight)
        needed = self.standardize or self.gamma == "scale"
        self._set_columns(describe_columns(X, weight, standardize=needed))
        return X, y, weight

    def _set_columns(self, columns: "Columns") -> None:
        """Keep location, scale and bandwidth, or what leaves columns as they are."""
        gamma = 1.0 / max(1, int(columns.varying.sum()))
        if not self.standardize:
            if self.gamma == "scale":
                gamma = scale_gamma(columns)
            columns = leave_columns(len(columns.mean))
        self.mean_, self.scale_, self._varying = columns
        self.gamma_ = gamma if isinstance(self.gamma, str) else float(self.gamma)

    def _check_rows(
        self, X: Any, y: Any, sample_weight: Any, **options: Any
    ) -> tuple[Any, Any, np.ndarray]:
        """Check data and weights; without supervision labels are not looked at."""
        X = as_array(X)
        if self._supervised:
            X, y = validate_data(self, X, y, **_ROWS, **options)
        else:
            X, y = validate_data(self, X, **_ROWS, **options), None
        weight = _check_sample_weight(
            sample_weight, X, dtype=np.float64, ensure_non_negative=True
        )
        return X, y, weight

    def _check_restored(self) -> None:
        weights, offset = self.random_weights_, self.random_offset_
        rows = weights.shape[:1]
        self._check_width(len(weights))
        expected = {"feature_scale_": offset.shape, "mean_": rows, "scale_": rows}
        if weights.ndim != 2 or weights.shape[1:] != offset.shape:
            raise ValueError(
                f"random_weights_ has shape {weights.shape} beside {offset.shape[0]} "
                "phases"
            )
        for name, shape in expected.items():
            found = getattr(self, name).shape
            if found != shape:
                raise ValueError(f"{name} has shape {found}, not {shape}")
        for name in ("random_weights_", "random_offset_", *expected):
            if getattr(self, name).dtype.kind != "f":
                raise ValueError(f"{name} is of the type {getattr(self, name).dtype}")
        if (self.scale_ <= 0).any():
            raise ValueError("scale_ has values that are not positive")

    def _check_new(self, X: Any) -> Any:
        check_is_fitted(self)
        X = as_array(X)
        return validate_data(self, X, reset=False, **_ROWS)

    def _check_gamma(self) -> None:
        if not is_name("gamma", self.gamma, *self._gammas):
            check_real("gamma", self.gamma, above=0, at_most=_SQUARABLE)

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


def as_array(X: Any) -> Any:
    """Make an array of an Arrow table; of a frame, refuse what is no number."""
    if hasattr(X, "select_dtypes"):
        for name, column in X.select_dtypes(exclude=["number", "bool"]).items():
            try:
                column.astype(float)
            except (TypeError, ValueError):
                raise ParameterError(
                    f"`X` must hold numbers; its column {shown(name)} holds others. "
                    "Encode it, or use CoulombClassifier or CoulombRegressor."
                ) from None
    if not hasattr(X, "column_names"):
        return X
    return np.column_stack([column.to_numpy() for column in X.columns])


class RowReservoir(NamedTuple):
    """A uniform random sample of the rows seen so far: those with the smallest keys."""

    arrays: tuple[np.ndarray, ...]  # of equal length
    keys: np.ndarray
    seen: int  # rows so far, kept or not

    @classmethod
    def of(
        cls,
        chunk: tuple[np.ndarray, ...],
        seed: int,
        before: "RowReservoir | None" = None,
    ) -> "RowReservoir":
        """Add a chunk to what was kept before."""
        seen = before.seen if before else 0
        keys = np.random.default_rng([seed, seen]).random(len(chunk[0]))
        seen += len(keys)
        if before:
            pairs = zip(before.arrays, chunk, strict=True)
            chunk = tuple(np.concatenate(pair) for pair in pairs)
            keys = np.concatenate([before.keys, keys])
        keep = np.sort(np.argsort(keys, kind="stable")[:_MOST_ROWS])
        return cls(tuple(array[keep] for array in chunk), keys[keep], seen)


def is_name(argument: str, value: Any, *known: str) -> bool:
    """Say whether a value is one of these names; another string is refused."""
    if isinstance(value, str):
        check_member(argument, value, known)
    return isinstance(value, str)


def draw_seed(random_state: Any) -> int:
    """Turn scikit-learn's seed, generator or None into one number."""
    if isinstance(random_state, int | np.integer):
        check_seed("random_state", random_state, at_most=2**32 - 1)
    try:
        source = check_random_state(random_state)
    except ValueError as error:
        raise ParameterError(
            "`random_state` must be None, a whole number or a numpy.random.RandomState;"
            f" got {shown(random_state)}."
        ) from error
    return int(source.randint(2**31 - 1))


class Columns(NamedTuple):
    """Mean and population standard deviation of each column; which columns vary."""

    mean: np.ndarray
    scale: np.ndarray  # 1 where a column does not vary
    varying: np.ndarray

    def join(self, other: "Columns", share: float) -> "Columns":
        """Describe the rows of both; `share` is how much the other's weigh.

        `V = (1 - q) V_a + q V_b + q (1 - q) (m_b - m_a)^2`.

        Examples
        --------
        >>> one = describe_columns(np.array([[1.0]]), np.ones(1))
        >>> two = describe_columns(np.array([[3.0], [5.0]]), np.ones(2))
        >>> one.join(two, 2 / 3)
        Columns(mean=array([3.]), scale=array([1.63299316]), varying=array([ True]))
        """
        gap = other.mean - self.mean
        scale = np.where(self.varying, self.scale, 0.0)
        width = np.where(other.varying, other.scale, 0.0)
        # Divided by the largest, so that no square leaves the range.
        unit = np.maximum(np.maximum(scale, width), np.abs(gap))
        unit[unit == 0] = 1.0
        square = (1 - share) * (scale / unit) ** 2 + share * (width / unit) ** 2
        scale = unit * np.sqrt(square + share * (1 - share) * (gap / unit) ** 2)
        mean = self.mean + share * gap
        varying = scale > 10 * np.finfo(scale.dtype).eps * np.abs(mean)
        return Columns(mean, np.where(varying, scale, 1.0), varying)


def drop_weightless(X: Any, y: Any, weight: np.ndarray) -> tuple[Any, Any, np.ndarray]:
    """Leave out rows of weight zero, so that they are as if absent."""
    keep = weight > 0
    if not keep.any():
        raise ParameterError("`sample_weight` must hold a positive weight; got none.")
    if keep.all():
        return X, y, weight
    return X[keep], None if y is None else y[keep], weight[keep]


def leave_columns(count: int) -> Columns:
    """Describe columns that are not to be changed."""
    return Columns(np.zeros(count), np.ones(count), np.ones(count, dtype=bool))


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
    if not standardize:
        return leave_columns(X.shape[1])
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


def scale_gamma(columns: Columns) -> float:
    """Compute `1 / (p Var(X))` over all entries, as scikit-learn's "scale" does.

    Examples
    --------
    >>> scale_gamma(describe_columns(np.array([[0.0, 2.0], [2.0, 0.0]]), np.ones(2)))
    0.5
    """
    scale = np.where(columns.varying, columns.scale, 0.0)
    largest = np.maximum(np.abs(columns.mean), scale)
    unit = largest.max()
    if unit == 0:
        return 1.0
    if not 1 / _SQUARABLE < unit < _SQUARABLE:
        raise ParameterError(
            f"Column {int(largest.argmax())} of `X` holds values like {unit:.3g}, "
            "whose variance is out of range; use `standardize=True` or rescale it."
        )
    mean = columns.mean / unit
    total = ((scale / unit) ** 2 + (mean - mean.mean()) ** 2).mean() * unit**2
    return float(1.0 / (len(mean) * total)) if total > 0 else 1.0


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
    check_member("target", target, _TARGETS)
    y = np.asarray(y)
    if y.dtype.kind not in "biufSU" or target == "number":
        check_labels("y", y.tolist())
    if target == "number" and y.dtype.kind not in "biuf":
        raise ParameterError(
            f"`y` must hold numbers with target='number'; got {shown(y[0])}."
        )
    if target == "number" or (target == "auto" and _looks_measured(y)):
        return Target(y.astype(np.float64), None)
    found, codes = np.unique(y, return_inverse=True)
    if classes is None:
        return Target(codes, found)
    check_labels("classes", np.asarray(classes).tolist())
    known = np.unique(np.asarray(classes))
    unknown = np.setdiff1d(found, known)
    if unknown.size:
        raise ParameterError(
            f"`y` must hold only the classes of the first call; got {unknown[0]!r}. "
            "Name all of them there: partial_fit(X, y, classes=...)."
        )
    return Target(np.searchsorted(known, y), known)


def _check_classes(y: np.ndarray) -> None:
    # Of None and of two types scikit-learn says that they are unknown.
    if y.dtype.kind not in "biufSU":
        check_labels("y", y.tolist())
    check_classification_targets(y)


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
    if sparse.issparse(X):
        values = X.astype(np.float64)
        values.data /= unit[values.indices]
        mean, variance = mean_variance_axis(values, axis=0, weights=share)
        return mean, variance.clip(0.0)  # which rounding may leave below zero
    values = X / unit
    mean = share @ values
    # Shares do not sum to one exactly; a second pass keeps constants constant.
    mean += share @ (values - mean)
    return mean, share @ (values - mean) ** 2


def _describe(
    estimator: Any, arrays: dict[str, np.ndarray], prefix: str
) -> dict[str, Any]:
    """Give what JSON can hold of an estimator; its arrays go to `arrays`."""
    learned: dict[str, Any] = {}
    for name, value in vars(estimator).items():
        if name not in estimator._also_saved and not _is_learned(name):
            continue
        if isinstance(value, SavedEstimator):
            nested = _describe(value, arrays, f"{prefix}{name}/")
            learned[name] = {"estimator": nested}
        elif isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            arrays[prefix + name] = value
        elif isinstance(value, np.ndarray):
            learned[name] = {"names": value.tolist(), "dtype": value.dtype.str}
        elif isinstance(value, dict):
            for key, column in value.items():
                arrays[f"{prefix}{name}.{key}"] = column
            learned[name] = {"columns": list(value)}
        else:
            learned[name] = value
    return {
        "class": type(estimator).__name__,
        "settings": _encode_settings(estimator),
        "learned": learned,
    }


def _rebuild(kind: Any, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> Any:
    """Make the estimator of which `_describe` spoke."""
    settings = facts["settings"].items()
    estimator = kind(**{name: _decode(value) for name, value in settings})
    for name, value in facts["learned"].items():
        if not _is_learned(name):
            raise ValueError(f"{name!r} is not a learned attribute")
        if isinstance(value, dict) and "estimator" in value:
            nested = value["estimator"]
            inner = _inside(arrays, name)
            value = _rebuild(_known_sampler(nested["class"]), nested, inner)
        elif isinstance(value, dict) and "names" in value:
            text = value.get("dtype", "O").startswith("<U")
            value = np.array(value["names"], dtype=str if text else object)
        elif isinstance(value, dict) and "columns" in value:
            value = {key: arrays[f"{name}.{key}"] for key in value["columns"]}
        setattr(estimator, name, value)
    for name, array in arrays.items():
        if name in estimator._also_saved or _is_learned(name):
            setattr(estimator, name, array)
    estimator._check_restored()
    return estimator


def _is_learned(name: str) -> bool:
    return name.isidentifier() and name.endswith("_") and not name.startswith("_")


def _inside(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    start = f"{name}/"
    return {k.removeprefix(start): a for k, a in arrays.items() if k.startswith(start)}


def _known_sampler(name: str) -> Any:
    for kind in AbstractFourierSampler.__subclasses__():
        if kind.__name__ == name and kind.__module__.startswith("coulomb."):
            return kind
    raise ValueError(f"unknown class {name!r}")


def _encode_settings(estimator: Any) -> dict[str, Any]:
    settings = estimator.get_params(deep=False).items()
    return {name: _encode(name, value) for name, value in settings}


def _encode(name: str, value: Any) -> Any:
    if name == "random_state" and not isinstance(value, int | None):
        return None  # a generator has moved on since; the features are in the file
    kinds = AbstractDomain | AbstractInteraction | AbstractFeatureMap
    if isinstance(value, kinds) and type(value).__name__ in _CLASSES:
        found = {f.name: getattr(value, f.name) for f in fields(value)}  # type: ignore[arg-type]
        return {"class": type(value).__name__, "fields": found}
    if isinstance(value, AbstractFourierSampler):
        return {"sampler": type(value).__name__, "settings": _encode_settings(value)}
    if isinstance(value, dict):
        return {"pairs": [[_encode(name, part) for part in p] for p in value.items()]}
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, str | int | float | bool | tuple | list):
        return value
    raise ParameterError(
        f"`{name}` must be a name, a number or an object of this library to be saved; "
        f"got {value!r}. Use pickle for your own functions."
    )


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "pairs" in value:
        return dict(value["pairs"])
    if "sampler" in value:
        settings = value["settings"].items()
        options = {name: _decode(part) for name, part in settings}
        return _known_sampler(value["sampler"])(**options)
    if value.get("class") not in _CLASSES:
        raise ValueError(f"unknown class {value.get('class')!r}")
    return _CLASSES[value["class"]](**value["fields"])
