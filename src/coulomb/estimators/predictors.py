"""`CoulombClassifier` and `CoulombRegressor`: learned features and their linear head.

A table becomes numbers, `CoulombSampler` learns features of them, and a linear model
sees both, side by side. Its penalty is chosen inside: for squares by the exact
leave-one-out error, for the logistic loss on held-out folds together with the number of
steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import reduce
from operator import add
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from joblib import effective_n_jobs
from scipy import sparse
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    validate_data,
)
from threadpoolctl import threadpool_limits

from coulomb._support.checks import check_count, check_labels, check_member, check_real
from coulomb._support.errors import ParameterError, ParameterTypeError
from coulomb.estimators.base import (
    RowReservoir,
    SavedEstimator,
    _check_classes,
    describe_columns,
    draw_seed,
    drop_weightless,
    read_target,
)
from coulomb.estimators.chunked import (
    Chunk,
    Chunks,
    as_chunks,
    has_parts,
    open_spool,
    over_parts,
    summarise,
)
from coulomb.estimators.coulomb import CoulombSampler
from coulomb.estimators.tabular import (
    ALPHAS,
    Head,
    RidgePath,
    RidgeSums,
    Table,
    as_keys,
    encode,
    encoded_names,
    fit_logistic,
    fit_ridge,
    learn_columns,
    merge_rows,
    probabilities,
    read_table,
)
from coulomb.features import Particles, as_feature_map

_GRADIENT_ROWS = 500
_BLOCK = 20_000  # rows whose features are in memory at once


@dataclass(eq=False, repr=False)
class _AbstractPredictor(SavedEstimator, BaseEstimator):
    """What the classifier and the regressor share; a final class knows its targets."""

    n_components: int = 256
    _: KW_ONLY
    sampler: CoulombSampler | None = None
    alphas: Any = None
    raw_columns: bool = True
    categorical_features: Any = None
    max_categories: int = 60
    early_stopping: bool = False
    n_jobs: int | None = None
    random_state: Any = None
    _target: ClassVar[str]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        return tags

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Learn columns, features and head.

        Parameters
        ----------
        X
            A data frame, an Arrow table or an array, shape `(n, p)`; NaN and None are
            missing values. Or a Dask array or frame, the path of Parquet files, or any
            iterable of chunks `(X, y)` or `(X, y, sample_weight)`; those of a generator
            are kept in a temporary file. Of more than 100,000 rows a uniform sample is
            learned from; the head of a regressor sees all.
        y
            Class labels or numbers, shape `(n,)`; the name of a column of Parquet files
            or of a Dask frame; None for chunks.
        sample_weight
            Weights of the rows; an integer weight equals repeating the row.

        Returns
        -------
        Self
            The estimator.
        """
        with self._all_or_nothing(), self._threads(), open_spool() as spool:
            self._check_settings()
            self._seen: RowReservoir | None = None
            seed = draw_seed(self.random_state)
            chunks, classes = as_chunks(X, y, sample_weight, spool), None
            if chunks is None:
                table, y, weight = self._check_part(X, y, sample_weight)
            else:
                summary = summarise(chunks, self, seed)
                *table, y, weight = summary.arrays
                table = [as_keys(x) if x.dtype == object else x for x in table]
                self.__dict__.update(summary.about)
                classes = summary.classes
            table, y, weight = self._weigh(table, y, weight)
            self._learn(table, self._read_target(y, classes), weight, seed)
            if chunks is not None and chunks.sampled:
                self._refine_head(chunks, encode(table, self.columns_), weight, seed)
        return self

    def _partial_fit(self, X: Any, y: Any, classes: Any, sample_weight: Any) -> Self:
        if has_parts(X):
            for part in as_chunks(X, y, sample_weight) or ():
                self._partial_fit(part.X, part.y, classes, part.weight)
            return self
        with self._all_or_nothing(), self._threads():
            self._check_settings()
            before = getattr(self, "_seen", None)
            reset = before is None
            rows = self._check_part(X, y, sample_weight, reset=reset)
            table, y, weight = self._weigh(*rows)
            if before is None:
                self._seed = draw_seed(self.random_state)
                self._learned_at = 0
                y = self._read_target(y, y if classes is None else classes)
            else:
                y = self._read_target(y, getattr(self, "classes_", None))
            self._seen = RowReservoir.of((y, weight, *table), self._seed, before)
            y, weight, *table = self._seen.arrays
            if self._seen.seen >= 2 * self._learned_at:
                self._learn(table, y, weight, self._seed)
                self._learned_at = self._seen.seen
            else:
                table, y, weight = merge_rows(table, y, weight)
                self._learn_head(encode(table, self.columns_), y, weight, self._seed)
        return self

    def _check_settings(self) -> None:
        check_count("n_components", self.n_components)
        check_count("max_categories", self.max_categories)
        if self.sampler is not None and not isinstance(self.sampler, CoulombSampler):
            raise ParameterTypeError(
                f"`sampler` must be None or a CoulombSampler; got {self.sampler!r}."
            )
        if self.alphas is not None:
            if isinstance(self.alphas, str) or not np.size(self.alphas):
                raise ParameterError(
                    f"`alphas` must be None or positive numbers; got {self.alphas!r}."
                )
            for alpha in np.atleast_1d(np.asarray(self.alphas, dtype=object)):
                check_real("alphas", alpha, above=0)

    @contextmanager
    def _threads(self) -> Iterator[None]:
        limit = self.n_jobs
        if limit is not None:
            size = abs(limit) if isinstance(limit, int) else limit
            check_count("n_jobs", size, at_most=1024)
            limit = effective_n_jobs(limit)
        with threadpool_limits(limits=limit):
            yield

    def _check_part(
        self, X: Any, y: Any, sample_weight: Any, *, reset: bool = True
    ) -> tuple[Table, np.ndarray, np.ndarray]:
        """Check some rows, and read them."""
        if y is None:
            raise ParameterError(
                f"{type(self).__name__} requires y to be passed, but the target y is "
                "None."
            )
        table = self._check_table(X, reset=reset)
        y = self._check_target(y)
        counted = np.empty((len(y), 1))
        check_consistent_length(counted, *table[:1])
        weight = _check_sample_weight(
            sample_weight, counted, dtype=np.float64, ensure_non_negative=True
        )
        return table, y, weight

    def _weigh(
        self, table: Table, y: np.ndarray, weight: np.ndarray
    ) -> tuple[Table, np.ndarray, np.ndarray]:
        """Weigh the classes, and leave out rows that weigh nothing."""
        if self._target == "classes":
            weight = weight * compute_sample_weight(self.class_weight, y)
        kept, y, weight = drop_weightless(np.arange(len(y)), y, weight)
        return [column[kept] for column in table], y, weight

    def _check_table(self, X: Any, *, reset: bool) -> Table:
        if sparse.issparse(X):
            raise ParameterTypeError(
                f"`X` must be dense for {type(self).__name__}; got a sparse matrix. "
                "Use CoulombSampler with a linear model, or X.toarray()."
            )
        frame = hasattr(X, "iloc") or hasattr(X, "column_names")
        if frame or hasattr(X, "to_arrow"):
            validate_data(self, X, reset=reset, skip_check_array=True)
            if min(X.shape) == 0:
                check_array(np.empty(X.shape))  # refuses, with its own sentence
        else:
            text = np.asarray(X).dtype.kind in "OUS"
            finite: Any = False if text else "allow-nan"
            options = {"dtype": None if text else np.float64}
            X = validate_data(self, X, reset=reset, ensure_all_finite=finite, **options)
        kinds = None if reset else [column["category"] for column in self.columns_]
        return read_table(X, self._names(), kinds, self.categorical_features)

    def _names(self) -> list[str]:
        numbered = [f"x{j}" for j in range(self.n_features_in_)]
        return list(getattr(self, "feature_names_in_", numbered))

    def _learn(self, table: Table, y: np.ndarray, weight: Any, seed: int) -> None:
        """Learn columns, features and head."""
        table, y, weight = merge_rows(table, y, weight)
        self.columns_ = learn_columns(table, self._names(), weight, self.max_categories)
        z = encode(table, self.columns_)
        self.sampler_ = None
        # Nothing can be learned from constant columns or a constant target.
        size = np.abs(y).max() or 1.0
        if z.shape[1] and describe_columns((y / size)[:, None], weight).varying[0]:
            sampler = CoulombSampler() if self.sampler is None else clone(self.sampler)
            options: dict[str, Any] = {"standardize": False, "random_state": seed}
            options |= {"n_components": self.n_components, "target": self._target}
            if self.early_stopping:
                options["stopping"] = "held-out"
            equal = bool((weight == weight[0]).all())
            sampler.set_params(**options).set_output(transform="default")
            self.sampler_ = sampler.fit(z, y, None if equal else weight)
        self._learn_head(z, y, weight, seed)

    def _learn_head(
        self, z: np.ndarray, y: np.ndarray, weight: np.ndarray, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        head = self._fit_head(self._design(z), y, weight, rng)
        self.coef_, self.intercept_, self.alpha_ = head.coef, head.intercept, head.alpha
        self.alpha_losses_ = head.losses
        self.feature_importances_ = self._importances(z, weight, rng)

    def _refine_head(
        self, chunks: Chunks, z: np.ndarray, weight: np.ndarray, seed: int
    ) -> None:
        """Fit the head to all rows, where sums are all that it needs."""

    def _describe_part(self, table: Table, weight: np.ndarray) -> None:
        """Columns are learned from the sample."""

    def _alphas(self, head: str) -> list[float]:
        chosen = ALPHAS[head] if self.alphas is None else np.ravel(self.alphas)
        return [float(alpha) for alpha in chosen]

    def _design(self, z: np.ndarray) -> np.ndarray:
        """Put the columns beside the features."""
        parts = [z] if self.raw_columns or self.sampler_ is None else []
        if self.sampler_ is not None:
            parts.insert(0, self.sampler_.transform(z))
        return np.column_stack(parts)

    def _scores(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        table = self._check_table(X, reset=False)
        with self._threads():
            design = self._design(encode(table, self.columns_))
            return design @ self.coef_ + self.intercept_

    def _check_restored(self) -> None:
        self._check_width(len(self.columns_))
        width = len(encoded_names(self.columns_))
        used = width if self.raw_columns or self.sampler_ is None else 0
        shape = self._n_learned + used, len(self.intercept_)
        if self.coef_.shape != shape:
            raise ValueError(f"coef_ has shape {self.coef_.shape}, not {shape}")
        if self.sampler_ is not None and self.sampler_.n_features_in_ != width:
            raise ValueError(
                f"sampler_ takes {self.sampler_.n_features_in_} columns, not {width}"
            )
        # Two rows, one with nothing in it, use every number of the columns.
        kinds = [column["category"] for column in self.columns_]
        rows = [np.array([None, "a"] if k else [np.nan, 1.0]) for k in kinds]
        scores = self._design(encode(rows, self.columns_)) @ self.coef_
        if not np.isfinite(scores + self.intercept_).all():
            raise ValueError("columns_ give scores that are not finite")

    def _importances(
        self, z: np.ndarray, weight: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Mean squared slope of the scores along each column, times its variance."""
        share = weight / weight.sum()
        variance = share @ (z - share @ z) ** 2
        rows = rng.choice(len(z), min(len(z), _GRADIENT_ROWS), replace=False)
        square = np.zeros(z.shape[1])
        for k in range(self.coef_.shape[1]):
            slopes = self._slopes(z[rows], self.coef_[:, k])
            square += share[rows] @ slopes**2 / share[rows].sum()
        owners = [j for j, _ in encoded_names(self.columns_)]
        found = np.bincount(owners, square * variance, minlength=len(self.columns_))
        return found / found.sum() if found.sum() > 0 else found

    def _slopes(self, z: np.ndarray, coef: np.ndarray) -> np.ndarray:
        """Differentiate a score with respect to the encoded columns."""
        count = self._n_learned
        straight = coef[count:] if len(coef) > count else np.zeros(z.shape[1])
        slopes = np.tile(straight, (len(z), 1))
        if self.sampler_ is not None:
            x = torch.from_numpy(z).requires_grad_()
            positions = torch.from_numpy(self.sampler_.random_weights_.T.copy())
            phases = torch.from_numpy(self.sampler_.random_offset_)
            feature_map = as_feature_map(self.sampler_.feature_map)
            features = feature_map(x, Particles(positions, phases))
            score = (features @ torch.from_numpy(coef[:count].copy())).sum()
            bent = torch.autograd.grad(score, x)[0].numpy()
            slopes += bent / np.sqrt(self.sampler_.n_components)
        return slopes

    @property
    def _n_learned(self) -> int:
        if self.sampler_ is None:
            return 0
        return len(self.sampler_.get_feature_names_out())

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Score predictions: accuracy of classes, R^2 of numbers.

        Parameters
        ----------
        X
            Rows, with the columns of `fit`, or parts of them.
        y
            Their targets; of a Parquet path or a Dask frame, the name of a column.
        sample_weight
            Weights of the rows.

        Returns
        -------
        float
            At most one.
        """
        if not has_parts(X):
            return float(super().score(X, y, sample_weight))
        chunks = as_chunks(X, y, sample_weight)
        assert chunks is not None
        found = chunks.total(_score_part, _ScoreSums.join, self)
        return 1.0 - found.errors / (found.spread or found.mass)

    def plot(self, X: Any = None) -> Any:
        """Draw the particles, the importances and, given rows, partial dependence.

        Parameters
        ----------
        X
            Rows to average over for the partial dependence on the two most important
            columns of numbers: a data frame or an array; None leaves it out.

        Returns
        -------
        matplotlib.figure.Figure
            The figure.
        """
        from matplotlib.figure import Figure
        from sklearn.inspection import PartialDependenceDisplay

        check_is_fitted(self)
        order = np.argsort(-self.feature_importances_, kind="stable")
        numbers = [j for j in order if not self.columns_[j]["category"]][:2]
        shown = numbers if X is not None else []
        figure = Figure(figsize=(4 * (2 + len(shown)), 3.6), layout="constrained")
        axes = figure.subplots(1, 2 + len(shown))
        self._plot_particles(axes[0])
        top = order[:15][::-1]
        names = [self.columns_[j]["name"] for j in top]
        axes[1].barh(names, self.feature_importances_[top])
        axes[1].set(title="importances", xlabel="share of the squared slope")
        if shown:
            most = int(np.argmax(np.abs(self.coef_).sum(axis=0)))
            target = {"target": self.classes_[most]} if len(self.intercept_) > 1 else {}
            PartialDependenceDisplay.from_estimator(
                self, X, [int(j) for j in shown], ax=list(axes[2:]), **target
            )
        return figure

    def _plot_particles(self, axis: Any) -> None:
        names = encoded_names(self.columns_)
        axis.set(title="particles")
        if self.sampler_ is None:
            return
        weights = self.sampler_.random_weights_  # (columns, features)
        size = np.abs(self.coef_[: self._n_learned]).sum(axis=1)
        size = size.reshape(-1, weights.shape[1]).sum(axis=0)  # some maps give two
        strength = np.abs(weights) @ size
        top = np.argsort(-strength, kind="stable")[:2]
        across, up = weights[top[0]], weights[top[-1]]
        axis.scatter(across, up, s=4 + 60 * size / max(size.max(), 1e-300), alpha=0.6)
        axis.set(
            xlabel=f"frequency of {names[top[0]][1]}",
            ylabel=f"frequency of {names[top[-1]][1]}",
        )


class _ScoreSums(NamedTuple):
    """Sums of a score: errors, weights, and for numbers mean and spread of targets."""

    errors: float
    mass: float
    mean: float = 0.0
    spread: float = 0.0

    def join(self, other: "_ScoreSums") -> "_ScoreSums":
        """Add up; spreads are about the mean of all."""
        mass = self.mass + other.mass
        gap, share = other.mean - self.mean, other.mass / mass
        between = self.mass * share * gap**2
        return _ScoreSums(
            self.errors + other.errors,
            mass,
            self.mean + share * gap,
            self.spread + other.spread + between,
        )


def _score_part(chunk: Chunk, start: int, model: Any) -> _ScoreSums:
    y, found = model._check_target(chunk.y), model.predict(chunk.X)
    weight = np.ones(len(y)) if chunk.weight is None else np.asarray(chunk.weight)
    mass = float(weight.sum())
    if model._target == "classes":
        return _ScoreSums(float(weight @ (found != y)), mass)
    mean = float(weight @ y) / mass
    spread = float(weight @ (y - mean) ** 2)
    return _ScoreSums(float(weight @ (y - found) ** 2), mass, mean, spread)


def _blocks(chunk: Chunk, model: Any, origin: np.ndarray) -> Iterator[Any]:
    """Give design, targets and weights of some rows, a block at a time."""
    table, y, weight = model._check_part(*chunk, reset=False)
    kept, y, weight = drop_weightless(np.arange(len(y)), y, weight)
    table = [x[kept] for x in table]
    for start in range(0, len(y), _BLOCK):
        rows = slice(start, start + _BLOCK)
        design = model._design(encode([x[rows] for x in table], model.columns_))
        yield design - origin, y[rows, None], weight[rows]


def _sum_part(chunk: Chunk, start: int, model: Any, origin: np.ndarray) -> RidgeSums:
    parts = (RidgeSums.of(*block) for block in _blocks(chunk, model, origin))
    return reduce(RidgeSums.__add__, parts)


def _lose_part(
    chunk: Chunk, start: int, model: Any, origin: np.ndarray, path: RidgePath
) -> np.ndarray:
    parts = (path.losses(*block) for block in _blocks(chunk, model, origin))
    return reduce(np.add, parts)


@dataclass(eq=False, repr=False, kw_only=True)
class CoulombClassifier(_AbstractPredictor, ClassifierMixin, BaseEstimator):
    """Classification by learned random features, from tables as they come.

    Numbers are standardised, heavy tails bent, ranks put beside; missing values filled
    and marked; categories become zeros and ones. `CoulombSampler` learns features, a
    linear head sees features and columns. Equal rows are merged first, so an integer
    weight is a repeated row and the order of rows does not matter.

    Parameters
    ----------
    n_components
        How many features are learned.
    sampler
        A `CoulombSampler` with other settings for the features; its number of features,
        target, seed and standardisation are set here. None takes the defaults.
    head
        "logistic", or "ridge": squares, with probabilities from a logistic regression
        on the leave-one-out scores.
    class_weight
        None, "balanced" or a weight for each class.
    alphas
        Penalties to choose from, as multiples of the mean weight; None for a grid.
    raw_columns
        Give the head the columns beside the features.
    categorical_features
        Columns, by name or number, that are categories whatever their type; None takes
        those of strings, objects and categorical types.
    max_categories
        Levels of a category that get a column of their own; the others share one.
    early_stopping
        Stop the Langevin steps of a `sampler` with the alignment when a held-out fifth
        of the rows says so. Under the joint energy held-out rows decide in any case.
    n_jobs
        Threads of the linear algebra; None leaves them as they are, -1 takes all.
    random_state
        Seed, generator or None, as in scikit-learn.

    Attributes
    ----------
    classes_
        The classes, sorted.
    sampler_
        The fitted `CoulombSampler` on the encoded columns; None if nothing varies.
    columns_
        How each column of the table is encoded.
    coef_, intercept_
        The head, for the features first and then the encoded columns.
    alpha_, alpha_losses_
        The chosen penalty, and the held-out loss of each.
    feature_importances_
        Mean squared slope along each column, times its variance; they sum to one.

    See Also
    --------
    CoulombRegressor : The same for numbers.
    CoulombSampler : The features alone, for any linear model.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(400, 4))
    >>> y = np.where(X[:, 0] * X[:, 1] > 0, "same", "other")
    >>> model = CoulombClassifier(32, random_state=0).fit(X[:300], y[:300])
    >>> bool(model.score(X[300:], y[300:]) > 0.85)
    True
    >>> model.predict_proba(X[:3]).sum(axis=1).round(6).tolist()
    [1.0, 1.0, 1.0]
    """

    _target = "classes"

    head: str = "logistic"
    class_weight: Any = None

    def partial_fit(
        self, X: Any, y: Any = None, classes: Any = None, sample_weight: Any = None
    ) -> Self:
        """Learn from one chunk of rows after another.

        A uniform sample of 20,000 rows is remembered. The head is fitted to them at
        each call; columns and features are learned anew whenever the number of rows
        seen has doubled. At these calls, and while all rows are remembered, the result
        is that of `fit` on all of them.

        Parameters
        ----------
        X
            A chunk of rows, or parts as in `fit`, read one after the other.
        y
            Their labels.
        classes
            All classes, if the first chunk may lack some.
        sample_weight
            Weights of the rows.

        Returns
        -------
        CoulombClassifier
            The estimator.
        """
        return self._partial_fit(X, y, classes, sample_weight)

    @over_parts
    def decision_function(self, X: Any) -> Any:
        """Compute the logits of the classes.

        Parameters
        ----------
        X
            Rows, with the columns of `fit`.

        Returns
        -------
        ndarray
            Shape `(n,)` for two classes, of the second; else `(n, n_classes)`.
        """
        scores = self._scores(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    @over_parts
    def predict_proba(self, X: Any) -> Any:
        """Compute the probabilities of the classes.

        Parameters
        ----------
        X
            Rows, with the columns of `fit`.

        Returns
        -------
        ndarray
            Shape `(n, n_classes)`; rows sum to one.
        """
        found = probabilities(self._scores(X))
        return found if found.shape[1] > 1 else np.column_stack([1.0 - found, found])

    @over_parts
    def predict(self, X: Any) -> Any:
        """Predict the most probable class.

        Parameters
        ----------
        X
            Rows, with the columns of `fit`.

        Returns
        -------
        ndarray
            Labels, shape `(n,)`.
        """
        scores = self._scores(X)
        second = scores[:, 0] > 0
        return self.classes_[
            second.astype(int) if scores.shape[1] == 1 else scores.argmax(axis=1)
        ]

    def _check_restored(self) -> None:
        super()._check_restored()
        count = len(self.intercept_)
        if self.classes_.shape != (max(2, count),) or not count:
            raise ValueError("classes_ does not fit the scores")
        check_labels("classes_", self.classes_)

    def _check_settings(self) -> None:
        super()._check_settings()
        check_member("head", self.head, tuple(ALPHAS))

    def _check_target(self, y: Any) -> np.ndarray:
        y = column_or_1d(y, warn=True)
        if y.dtype.kind == "f":
            check_array(y, ensure_2d=False, input_name="y")
        _check_classes(y)
        return y

    def _read_target(self, y: np.ndarray, classes: Any) -> np.ndarray:
        read = read_target(y, target="classes", classes=classes)
        assert read.classes is not None
        self.classes_ = read.classes
        if len(self.classes_) < 2:
            raise ParameterError(
                "`y` must hold at least two classes; got one class, "
                f"{self.classes_[0]!r}."
            )
        return read.values.astype(np.float64)

    def _fit_head(
        self,
        design: np.ndarray,
        y: np.ndarray,
        weight: np.ndarray,
        rng: np.random.Generator,
    ) -> Head:
        count = len(self.classes_)
        targets = np.eye(count)[y.astype(int)]
        targets = targets[:, 1:] if count == 2 else targets
        alphas = self._alphas(self.head)
        if self.head == "logistic":
            return fit_logistic(design, targets, weight, alphas, rng)
        squares = fit_ridge(design, targets, weight, alphas)
        assert squares.held_out is not None
        logits = fit_logistic(squares.held_out, targets, weight, [1e-3], rng)
        return squares._replace(
            coef=squares.coef @ logits.coef,
            intercept=squares.intercept @ logits.coef + logits.intercept,
        )


@dataclass(eq=False, repr=False)
class CoulombRegressor(_AbstractPredictor, RegressorMixin, BaseEstimator):
    """Regression by learned random features, from tables as they come.

    As `CoulombClassifier`, with a ridge head whose penalty has the least exact
    leave-one-out error. The target is always a number, however few values it has.
    Predictions stay within the targets of training.

    Parameters
    ----------
    n_components
        How many features are learned.
    sampler
        A `CoulombSampler` with other settings for the features; its number of features,
        target, seed and standardisation are set here. None takes the defaults.
    alphas
        Penalties to choose from, as multiples of the mean weight; None for a grid.
    raw_columns
        Give the head the columns beside the features.
    categorical_features
        Columns, by name or number, that are categories whatever their type; None takes
        those of strings, objects and categorical types.
    max_categories
        Levels of a category that get a column of their own; the others share one.
    early_stopping
        Stop the Langevin steps of a `sampler` with the alignment when a held-out fifth
        of the rows says so. Under the joint energy held-out rows decide in any case.
    n_jobs
        Threads of the linear algebra; None leaves them as they are, -1 takes all.
    random_state
        Seed, generator or None, as in scikit-learn.

    Attributes
    ----------
    target_range_
        The least and the greatest target.
    sampler_
        The fitted `CoulombSampler` on the encoded columns; None if nothing varies.
    columns_
        How each column of the table is encoded.
    coef_, intercept_
        The head, for the features first and then the encoded columns.
    alpha_, alpha_losses_
        The chosen penalty, and the held-out loss of each.
    feature_importances_
        Mean squared slope along each column, times its variance; they sum to one.

    See Also
    --------
    CoulombClassifier : The same for classes.
    CoulombSampler : The features alone, for any linear model.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(400, 4))
    >>> y = np.sin(2 * X[:, 0]) + X[:, 1] ** 2
    >>> model = CoulombRegressor(64, random_state=0).fit(X[:300], y[:300])
    >>> bool(model.score(X[300:], y[300:]) > 0.9)
    True
    >>> model.feature_importances_.argsort()[-2:].tolist()
    [0, 1]
    """

    _target = "number"

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Learn from one chunk of rows after another.

        A uniform sample of 20,000 rows is remembered. The head is fitted to them at
        each call; columns and features are learned anew whenever the number of rows
        seen has doubled. At these calls, and while all rows are remembered, the result
        is that of `fit` on all of them.

        Parameters
        ----------
        X
            A chunk of rows, or parts as in `fit`, read one after the other.
        y
            Their targets.
        sample_weight
            Weights of the rows.

        Returns
        -------
        CoulombRegressor
            The estimator.
        """
        return self._partial_fit(X, y, None, sample_weight)

    @over_parts
    def predict(self, X: Any) -> Any:
        """Predict numbers.

        Parameters
        ----------
        X
            Rows, with the columns of `fit`.

        Returns
        -------
        ndarray
            Shape `(n,)`.
        """
        return self._scores(X)[:, 0].clip(*self.target_range_)

    def _check_restored(self) -> None:
        super()._check_restored()
        if self.target_range_.shape != (2,) or len(self.intercept_) != 1:
            raise ValueError("target_range_ does not fit the scores")

    def _check_target(self, y: Any) -> np.ndarray:
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        return column_or_1d(y, warn=True)

    def _read_target(self, y: np.ndarray, classes: Any) -> np.ndarray:
        return y

    def _fit_head(
        self,
        design: np.ndarray,
        y: np.ndarray,
        weight: np.ndarray,
        rng: np.random.Generator,
    ) -> Head:
        self.target_range_ = np.array([y.min(), y.max()])
        return fit_ridge(design, y[:, None], weight, self._alphas("ridge"))

    def _refine_head(
        self, chunks: Chunks, z: np.ndarray, weight: np.ndarray, seed: int
    ) -> None:
        origin = self._design(z[:_GRADIENT_ROWS]).mean(axis=0)
        sums = chunks.total(_sum_part, add, self, origin)
        alphas = self._alphas("ridge")
        path = sums.path(alphas)
        losses = chunks.total(_lose_part, add, self, origin, path) / sums.mass
        best = int(losses.argmin())
        self.coef_, self.intercept_ = path.coefficients(best)
        self.intercept_ = self.intercept_ - origin @ self.coef_
        self.alpha_, self.alpha_losses_ = alphas[best], losses
        self.target_range_ = np.array([sums.low, sums.high])
        rng = np.random.default_rng(seed)
        self.feature_importances_ = self._importances(z, weight, rng)
