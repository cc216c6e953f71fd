"""The two ends of a predictor: tables become matrices, and heads become predictions.

A table is read into one array per column: float64 with NaN for numbers, and objects
(strings, None where missing) for categories. What is learned of a column is plain
data, so that it can be saved as JSON. A head is a linear model on features and encoded
columns, with its penalty chosen inside.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, logsumexp, ndtri, softmax

from coulomb._support.errors import ParameterError
from coulomb.estimators.base import describe_columns

# Beyond this many standard deviations a column counts as heavy-tailed, and values are
# bent smoothly towards `_KNEE` robust deviations: two rows must not decide a fit.
_HEAVY, _KNEE = 6.0, 3.0
_NORMAL_QUARTILES = 1.349  # of a normal law, in standard deviations
_FEW_VALUES, _KNOTS = 6, 64  # of a column that is also given by its ranks
_NUMBERS = "biuf"

# Penalties to choose from.
ALPHAS = {
    "ridge": tuple(np.logspace(-6, 3, 19)),
    "logistic": tuple(np.logspace(-3, 1, 5)),
}
_FOLDS = 3
_STEPS, _EVERY, _PATIENCE = 60, 5, 3  # of the logistic head

Table = list[np.ndarray]


def read_table(
    X: Any, names: Sequence[str], kinds: Sequence[bool] | None, marked: Any = None
) -> Table:
    """Read a data frame, an Arrow table or an array into one array per column.

    `kinds` says which columns are categories, None that their types shall tell.
    `marked` names columns, by name or number, that are categories in any case.

    Examples
    --------
    >>> read_table(np.array([["1", "a"], ["2", None]], dtype=object), "xy", None)
    [array([1., 2.]), array(['a', None], dtype=object)]
    """
    if hasattr(X, "to_arrow"):
        X = X.to_arrow()
    chosen = _find_marked(marked, names)
    read = _series if hasattr(X, "iloc") else _arrow
    if isinstance(X, np.ndarray):
        read = _array
    table = []
    for j, name in enumerate(names):
        known = None if kinds is None else kinds[j]
        values = read(X, j, True if j in chosen else known)
        if values.dtype != object and np.isinf(values).any():
            raise ParameterError(
                f"`X` must be finite or missing; column {name!r} holds infinity."
            )
        if known is False and values.dtype == object:
            raise ParameterError(
                f"Column {name!r} of `X` must hold numbers, as in `fit`; got "
                f"{next(v for v in values if v is not None)!r}."
            )
        table.append(values)
    return table


def learn_columns(
    table: Table, names: Sequence[str], weight: np.ndarray, max_categories: int
) -> list[dict[str, Any]]:
    """Learn how each column becomes numbers; see `encode` for what is kept.

    Examples
    --------
    >>> column = np.array(["b", "a", "b", None], dtype=object)
    >>> learned = learn_columns([column], ["x"], np.ones(4), 30)
    >>> learned[0]["levels"], learned[0]["missing"]
    (['b', 'a'], True)
    """
    columns = []
    for name, values in zip(names, table, strict=True):
        column = {"name": str(name), "category": values.dtype == object}
        if column["category"]:
            column |= _learn_category(values, weight, max_categories)
        else:
            column |= _learn_number(values, weight)
        columns.append(column)
    return columns


def encode(table: Table, columns: list[dict[str, Any]]) -> np.ndarray:
    """Turn a table into numbers: standardised numbers, and zeros and ones.

    Numbers of many values give their normal scores, too. Missing numbers take the
    median, beside an indicator if training had any. A category gives a column for each
    level, one if there are two; levels beyond the most frequent share one. A value that
    training did not know goes there too, or else counts as the average row.

    Examples
    --------
    >>> column = np.array([1.0, np.nan, 3.0])
    >>> encode([column], learn_columns([column], ["x"], np.ones(3), 30)).shape
    (3, 2)
    """
    n = len(table[0]) if table else 0
    parts = [
        (_encode_category if column["category"] else _encode_number)(values, column)
        for values, column in zip(table, columns, strict=True)
    ]
    return np.column_stack([np.empty((n, 0)), *parts])


def encoded_names(columns: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """List the encoded columns: which column of the table each is of, and its name."""
    found = []
    for j, column in enumerate(columns):
        name = column["name"]
        if column["category"]:
            levels = column["levels"][1:] if column["single"] else column["levels"]
            found += [(j, f"{name}={level}") for level in levels]
            found += [(j, f"{name}, rare")] * column["rare"]
        else:
            found += [(j, name)] * column["varies"]
            found += [(j, f"{name}, ranked")] * bool(column.get("ranks"))
        found += [(j, f"{name} missing")] * column["missing"]
    return found


def merge_rows(
    table: Table, y: np.ndarray, weight: np.ndarray
) -> tuple[Table, np.ndarray, np.ndarray]:
    """Make one row of equal rows, and sort: repeating a row is weighing it.

    Examples
    --------
    >>> x, y = np.array([2.0, 1.0, 2.0]), np.zeros(3)
    >>> merge_rows([x], y, np.ones(3))
    ([array([2., 1.])], array([0., 0.]), array([2., 1.]))
    """
    # Adding 0 makes -0 the same as 0. Any order will do, that of the bytes is fast.
    joined = np.column_stack([*map(_numbered, table), y]) + 0.0
    joined[np.isnan(joined)] = np.nan
    rows = joined.view(np.dtype((np.void, joined.itemsize * joined.shape[1])))
    _, first, group = np.unique(rows.ravel(), return_index=True, return_inverse=True)
    total = np.bincount(group, weights=weight, minlength=len(first))
    return [column[first] for column in table], y[first], total


def _numbered(values: np.ndarray) -> np.ndarray:
    if values.dtype != object:
        return values
    levels = sorted({key for key in values if key is not None})
    index = {key: code for code, key in enumerate(levels)}
    return np.array([index.get(key, -1) for key in values], dtype=np.float64)


def _find_marked(marked: Any, names: Sequence[str]) -> set[int]:
    if marked is None:
        return set()
    if isinstance(marked, str) or not isinstance(marked, Iterable):
        raise ParameterError(
            f"`categorical_features` must be None or a list of columns; got {marked!r}."
        )
    found = set()
    for one in marked:
        at = list(names).index(one) if isinstance(one, str) and one in names else one
        if isinstance(at, bool) or not isinstance(at, int | np.integer):
            raise ParameterError(
                f"`categorical_features` must name columns of `X`; got {one!r}."
            )
        if not 0 <= at < len(names):
            raise ParameterError(
                f"`categorical_features` must be below {len(names)}, the number of "
                f"columns; got {one!r}."
            )
        found.add(int(at))
    return found


def _series(X: Any, j: int, category: bool | None) -> np.ndarray:
    """Read a column of a pandas frame."""
    series = X.iloc[:, j]
    kind = getattr(series.dtype, "kind", "O")
    if kind in "mM":
        raise ParameterError(
            f"Column {X.columns[j]!r} of `X` holds times; make numbers of them first."
        )
    if kind in _NUMBERS and not category:
        return series.to_numpy(dtype=np.float64, na_value=np.nan)
    if category is False:  # integers may come as objects
        return _as_numbers(series.to_numpy(dtype=object, na_value=None))
    codes, levels = series.factorize()
    return np.array([*map(_key, levels), None], dtype=object)[codes]


def _arrow(X: Any, j: int, category: bool | None) -> np.ndarray:
    """Read a column of an Arrow table."""
    import pyarrow as pa

    column = X.column(j)
    kind = column.type
    number = pa.types.is_boolean(kind) or pa.types.is_integer(kind)
    if (number or pa.types.is_floating(kind)) and not category:
        return column.cast(pa.float64()).to_numpy()
    if pa.types.is_temporal(kind):
        raise ParameterError(
            f"Column {X.column_names[j]!r} of `X` holds times; make numbers of them "
            "first."
        )
    values = np.empty(len(column), dtype=object)
    values[:] = column.to_pylist()
    return _as_numbers(values) if category is False else as_keys(values)


def _array(X: np.ndarray, j: int, category: bool | None) -> np.ndarray:
    """Read a column of an array; of objects, what can be numbers is."""
    values = X[:, j]
    if category:
        return as_keys(values)
    if values.dtype.kind in _NUMBERS:
        return values.astype(np.float64)
    numbers = _as_numbers(values)
    return as_keys(values) if numbers.dtype == object else numbers


def _as_numbers(values: np.ndarray) -> np.ndarray:
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        return values


def as_keys(values: np.ndarray) -> np.ndarray:
    """Write all values of a category as words, None where missing."""
    keys = np.empty(len(values), dtype=object)
    keys[:] = [_key(value) for value in values]
    return keys


def _key(value: Any) -> str | None:
    """Write a value so that 1, 1.0 and a saved 1 are the same; None where missing."""
    if value is None or type(value).__name__ == "NAType":
        return None
    if isinstance(value, bool | np.bool_) or not isinstance(
        value, int | float | np.number
    ):
        return str(value)
    return None if value != value else f"{value:.17g}"


def _learn_number(values: np.ndarray, weight: np.ndarray) -> dict[str, Any]:
    missing = np.isnan(values)
    known, share = values[~missing], weight[~missing]
    if known.size == 0:
        return {"varies": False, "missing": False, "fill": 0.0}
    low, fill, high = (
        float(q)
        for q in np.quantile(
            known, [0.25, 0.5, 0.75], method="inverted_cdf", weights=share
        )
    )
    filled = np.where(missing, fill, values)
    learned: dict[str, Any] = {"fill": fill, "missing": bool(missing.any())}
    mean, scale, varying = describe_columns(filled[:, None], weight)
    learned |= {"varies": bool(varying[0]), "bent": None}
    if varying[0]:
        reach = np.abs((known - mean[0]) / scale[0]).max()
        if reach > _HEAVY:
            width = (high - low) / _NORMAL_QUARTILES
            learned["bent"] = [fill, width if width > 0 else float(scale[0])]
            mean, scale, _ = describe_columns(_bend(filled, learned)[:, None], weight)
        learned["ranks"] = _learn_ranks(known, share)
    return learned | {"mean": float(mean[0]), "scale": float(scale[0])}


def _learn_ranks(values: np.ndarray, weight: np.ndarray) -> list[list[float]] | None:
    """Find normal scores of some values; few different ones need none."""
    found, where = np.unique(values, return_inverse=True)
    if len(found) < _FEW_VALUES:
        return None
    mass = np.bincount(where, weight)
    scores = ndtri((np.cumsum(mass) - mass / 2) / mass.sum())
    some = np.linspace(0, len(found) - 1, min(len(found), _KNOTS)).astype(int)
    return [found[some].tolist(), scores[some].tolist()]


def _bend(values: np.ndarray, column: dict[str, Any]) -> np.ndarray:
    """Draw far values in, `u / sqrt(1 + (u / knee)^2)`, where the column is heavy."""
    if column["bent"] is None:
        return values
    centre, width = column["bent"]
    with np.errstate(over="ignore"):
        u = np.clip((values - centre) / width, -1e100, 1e100)
    return u / np.sqrt(1.0 + (u / _KNEE) ** 2)


def _encode_number(values: np.ndarray, column: dict[str, Any]) -> np.ndarray:
    missing = np.isnan(values)
    parts = []
    if column["varies"]:
        filled = np.where(missing, column["fill"], values)
        parts.append((_bend(filled, column) - column["mean"]) / column["scale"])
        if ranks := column.get("ranks"):  # not in files of old
            parts.append(np.interp(filled, *ranks))
    if column["missing"]:
        parts.append(missing.astype(np.float64))
    return np.column_stack([np.empty((len(values), 0)), *parts])


def _learn_category(
    values: np.ndarray, weight: np.ndarray, max_categories: int
) -> dict[str, Any]:
    mass: dict[Any, float] = {}
    for key, share in zip(values, weight.tolist(), strict=True):
        mass[key] = mass.get(key, 0.0) + share
    missing = mass.pop(None, 0.0)
    levels = sorted(mass, key=lambda key: (-mass[key], key))
    kept, others = levels[:max_categories], levels[max_categories:]
    total = float(weight.sum())
    return {
        "levels": kept if len(levels) > 1 else [],
        "rare": bool(others),
        "missing": missing > 0 and bool(mass),
        "single": len(levels) == len(kept) == 2,
        "shares": [mass[key] / total for key in kept] if len(levels) > 1 else [],
    }


def _encode_category(values: np.ndarray, column: dict[str, Any]) -> np.ndarray:
    levels, rare, missing = column["levels"], column["rare"], column["missing"]
    count = len(levels)
    # One row for each level, one for what is rare or unknown, one for what is missing.
    rows = np.zeros((count + 2, count + rare + missing))
    rows[:count, :count] = np.eye(count)
    rows[count, :count] = 0.0 if rare else column["shares"]
    rows[count, count : count + rare] = 1.0
    rows[-1] = rows[count]
    if missing:
        rows[-1] = np.arange(rows.shape[1]) == rows.shape[1] - 1
    index: dict[Any, int] = {key: code for code, key in enumerate(levels)}
    index[None] = count + 1
    codes = [index.get(key, count) for key in values]
    return rows[codes, int(column["single"]) :]


class Head(NamedTuple):
    """A linear model of the design, and what its penalty was chosen by."""

    coef: np.ndarray  # (n_design, outputs)
    intercept: np.ndarray  # (outputs,)
    alpha: float
    losses: np.ndarray  # (alphas,)
    held_out: np.ndarray | None = None  # leave-one-out predictions, (n, outputs)


def fit_ridge(
    design: np.ndarray, targets: np.ndarray, weight: np.ndarray, alphas: Sequence[float]
) -> Head:
    """Fit ridge regression with the penalty of the least leave-one-out error.

    With leverages `h_i = q_i (1 / sum q + u_i (E + a)^-1 u_i')` the prediction for a
    row without it is exact, `y_i - (y_i - f_i) / (1 - h_i)`. A row of weight 2 is left
    out whole. Penalties are multiples of the mean weight.

    Examples
    --------
    >>> x = np.arange(6.0)[:, None]
    >>> head = fit_ridge(x, 2 * x + 1, np.ones(6), [1e-6, 1.0])
    >>> head.alpha, head.coef.round(3).tolist()
    (1e-06, [[2.0]])
    """
    origin, level = (weight @ rows / weight.sum() for rows in (design, targets))
    design, centred = design - origin, targets - level
    path = RidgeSums.of(design, centred, weight).path(alphas)
    losses = path.losses(design, centred, weight) / path.mass
    best = int(losses.argmin())
    coef, intercept = path.coefficients(best)
    (errors,) = path.left_out(design, centred, weight, slice(best, best + 1))
    intercept += level - origin @ coef
    return Head(coef, intercept, float(alphas[best]), losses, targets - errors)


class RidgeSums(NamedTuple):
    """What a ridge regression needs of rows that are never in memory together."""

    mass: float
    design: np.ndarray  # (p,)
    targets: np.ndarray  # (outputs,)
    products: np.ndarray  # (p, p)
    cross: np.ndarray  # (p, outputs)
    rows: int
    low: float  # of the targets
    high: float

    @classmethod
    def of(
        cls, design: np.ndarray, targets: np.ndarray, weight: np.ndarray
    ) -> "RidgeSums":
        """Sum over some rows, about an origin near their mean."""
        heavy = design * weight[:, None]
        return cls(
            float(weight.sum()),
            heavy.sum(axis=0),
            weight @ targets,
            heavy.T @ design,
            heavy.T @ targets,
            len(weight),
            float(targets.min(initial=np.inf)),
            float(targets.max(initial=-np.inf)),
        )

    def __add__(self, other: Any) -> "RidgeSums":
        sums = [x + y for x, y in zip(self[:-2], other[:-2], strict=True)]
        low, high = min(self.low, other.low), max(self.high, other.high)
        return RidgeSums._make([*sums, low, high])

    def path(self, alphas: Sequence[float]) -> "RidgePath":
        """Solve for every penalty."""
        mean, level = self.design / self.mass, self.targets / self.mass
        products = self.products - self.mass * np.outer(mean, mean)
        values, vectors = np.linalg.eigh(products)
        cross = vectors.T @ (self.cross - np.outer(self.design, level))
        penalties = np.asarray(alphas) * self.mass / self.rows
        shrinking = 1.0 / (values.clip(0.0)[:, None] + penalties)
        return RidgePath(mean, level, vectors, cross, shrinking, self.mass)


class RidgePath(NamedTuple):
    """Ridge regressions with several penalties, in the eigenbasis of the products."""

    mean: np.ndarray
    level: np.ndarray
    vectors: np.ndarray
    cross: np.ndarray
    shrinking: np.ndarray  # (p, penalties)
    mass: float

    def losses(
        self, design: np.ndarray, targets: np.ndarray, weight: np.ndarray
    ) -> np.ndarray:
        """Sum the leave-one-out losses of some rows, one for each penalty."""
        errors = self.left_out(design, targets, weight, slice(None))
        return np.array([(weight @ each**2).sum() for each in errors])

    def left_out(
        self, design: np.ndarray, targets: np.ndarray, weight: np.ndarray, k: slice
    ) -> Iterator[np.ndarray]:
        """Give errors of rows by regressions that have not seen them."""
        rows = (design - self.mean) @ self.vectors
        reaches = rows**2 @ self.shrinking[:, k]
        for shrunk, reach in zip(self.shrinking.T[k], reaches.T, strict=True):
            leverages = weight * (1.0 / self.mass + reach)
            residuals = targets - self.level - rows @ (shrunk[:, None] * self.cross)
            yield residuals / np.maximum(1.0 - leverages, 1e-10)[:, None]

    def coefficients(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Give slopes and intercept for a penalty."""
        coef = self.vectors @ (self.shrinking[:, [k]] * self.cross)
        return coef, self.level - self.mean @ coef


def fit_logistic(
    design: np.ndarray,
    targets: np.ndarray,
    weight: np.ndarray,
    alphas: Sequence[float],
    rng: np.random.Generator,
) -> Head:
    """Fit logistic regression; folds choose penalty and number of steps together.

    One column of targets is the probability of the second of two classes; more are
    one-hot. All folds and penalties descend side by side, in single precision, as
    columns of the same products.

    Examples
    --------
    >>> x = np.linspace(-2, 2, 40)[:, None]
    >>> head = fit_logistic(x, x > 0, np.ones(40), [0.1], np.random.default_rng(0))
    >>> bool(head.coef[0, 0] > 1)
    True
    """
    mean = weight @ design / weight.sum()
    centred = design - mean
    values, vectors = np.linalg.eigh((centred * weight[:, None]).T @ centred)
    given = centred @ vectors, values.clip(0.0), targets, weight
    rows, values, y, mass = (array.astype(np.float32) for array in given)
    penalties = (np.asarray(alphas) * weight.mean()).astype(np.float32)
    folds = min(_FOLDS, len(rows))
    fold = rng.permutation(len(rows)) % folds
    outside = np.stack([mass * (fold == k) for k in range(folds)], axis=1)
    outside = np.repeat(outside, len(penalties), axis=1)
    problem = rows, values, y, mass[:, None] - outside, np.tile(penalties, folds)
    *_, history = descend(*problem, steps=_STEPS, outside=outside)
    losses = history.reshape(len(history), folds, -1).sum(axis=1) / weight.sum()
    step, k = np.unravel_index(losses[1:].argmin(), losses[1:].shape)
    coef, intercept, _ = descend(
        rows, values, y, mass[:, None], penalties[[k]], steps=_EVERY * (int(step) + 1)
    )
    slopes = vectors @ coef[..., 0].astype(float)
    level = intercept[..., 0].astype(float) - mean @ slopes
    return Head(slopes, level, float(alphas[k]), losses[1:].min(axis=0))


def descend(
    rows: np.ndarray,
    values: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray,
    penalties: np.ndarray,
    *,
    steps: int,
    outside: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Descend several penalised logistic losses at once, `(columns, outputs, k)`.

    The curvature of the loss is at most 1/4 (two classes) or 1/2 (more) of that of
    squares, which is diagonal in this basis: steps of its inverse, with Nesterov's
    momentum, restarted where it points uphill, need no search. `outside` are weights of
    the rows to judge by; their losses come last, one row for every fifth step.
    """
    (n, dim), outputs, count = rows.shape, targets.shape[1], len(penalties)
    bound = 0.25 if outputs == 1 else 0.5
    sizes = 1.0 / (bound * values[:, None, None] + penalties)
    total = weights.sum(axis=0)
    # Half a row of each class keeps the logarithms finite.
    share = (targets.T @ weights + 0.5) / (total + 0.5 * max(2, outputs))
    intercept = np.log(share / (1.0 - share) if outputs == 1 else share)
    ahead_intercept = intercept = intercept.astype(rows.dtype)
    ahead = coef = np.zeros((dim, outputs, count), rows.dtype)
    momentum = np.ones(count, rows.dtype)
    history: list[np.ndarray] = []
    for step in range(steps + 1):
        scores = (rows @ ahead.reshape(dim, -1)).reshape(n, outputs, count)
        scores += ahead_intercept
        if outside is not None and step % _EVERY == 0:
            history.append((outside * _cross_entropy(scores, targets)).sum(axis=0))
            if _settled(history):
                break
        if step == steps:
            break
        excess = (probabilities(scores) - targets[..., None]) * weights[:, None]
        slope = (rows.T @ excess.reshape(n, -1)).reshape(dim, outputs, count)
        slope += penalties * ahead
        new = ahead - sizes * slope
        new_intercept = ahead_intercept - excess.sum(axis=0) / (bound * total)
        moved = new - coef
        momentum = np.where((slope * moved).sum(axis=(0, 1)) > 0, 1.0, momentum)
        following = (1.0 + np.sqrt(1.0 + 4.0 * momentum**2)) / 2.0
        pull = ((momentum - 1.0) / following).astype(rows.dtype)
        ahead = new + pull * moved
        ahead_intercept = new_intercept + pull * (new_intercept - intercept)
        coef, intercept, momentum = new, new_intercept, following
    return ahead, ahead_intercept, np.array(history)


def _settled(history: list[np.ndarray]) -> bool:
    if len(history) <= _PATIENCE + 1:
        return False
    before = np.min(history[:-_PATIENCE], axis=0)
    return bool((np.min(history[-_PATIENCE:], axis=0) > 0.9999 * before).all())


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Turn scores `(n, outputs, ...)` into probabilities.

    Examples
    --------
    >>> probabilities(np.zeros((1, 4))).tolist()
    [[0.25, 0.25, 0.25, 0.25]]
    """
    return expit(scores) if scores.shape[1] == 1 else softmax(scores, axis=1)


def _cross_entropy(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    picked = (targets[..., None] * scores).sum(axis=1)
    if targets.shape[1] == 1:
        return np.logaddexp(0.0, scores[:, 0]) - picked
    return logsumexp(scores, axis=1) - picked
