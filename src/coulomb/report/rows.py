"""Rows of tables and figures: which records belong together, and what to call them."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from coulomb._support.checks import packaged
from coulomb._support.stats import Difference, mean_difference
from coulomb.experiments.records import Record
from coulomb.experiments.summary import (
    METHOD_TITLES,
    as_number,
    gather,
    paired,
    select,
    values_of,
)
from coulomb.report.chart import METHOD_SLOTS, Axis, Chart, Curve, Dots, Ink
from coulomb.report.tables import (
    Cell,
    Column,
    Header,
    Table,
    mark_best,
    number,
    tabulate,
)

Estimate = Difference
"""A mean over trials with its standard error, which is NaN for one trial."""

WORDS = packaged("coulomb.report", "assets/words.toml")
_LETTERS: dict[str, str] = WORDS["letters"]
_OTHERS = [1, 2, 3, 4, 5, 6, 7]
_MOST_ROWS = 500  # of a table of every metric
_NAMING = {"method", "constants", "control"}
_SEEDS = {"seed", "trial", "head"}
LONGEST_NAME = 60


class Row(NamedTuple):
    """Records that differ only in their seed and in what an axis shows."""

    method: str
    constants: str
    control: str
    variant: tuple[tuple[str, str], ...]

    @property
    def label(self) -> str:
        """The name a reader sees, without whose constants they are."""
        name = METHOD_TITLES.get(self.method, self.method)
        if self.control:
            name = f"{self.control} control"
        settings = (
            f"{_LETTERS.get(key, key)} = {value}" for key, value in self.variant
        )
        return ", ".join([name, *settings])


def clean(text: object, longest: int = LONGEST_NAME) -> str:
    r"""Make a name of a record fit to show: one line, not too long, no control codes.

    Examples
    --------
    >>> clean("a\x00b\nc"), clean(0.5), clean("x" * 99, 5)
    ('a b c', '0.5', 'xxxx…')
    """
    shown = f"{text:g}" if isinstance(text, float) else str(text)
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else " " for c in shown)
    shown = " ".join(shown.split())
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def slug(name: object) -> str:
    """Make a name fit for links and files.

    Examples
    --------
    >>> slug('<b>"Our" text')
    'b-our-text'
    """
    letters = "".join(
        c if c.isascii() and c.isalnum() else "-" for c in clean(name).lower()
    )
    return "-".join(part for part in letters.split("-") if part) or "unnamed"


def by_row(
    records: Iterable[Record], shared: Collection[str]
) -> dict[Row, list[Record]]:
    """Sort records into rows, which differ in more than their seed and `shared`."""

    def row_of(record: Record) -> Row:
        job = record.job
        others = sorted(set(job) - _NAMING - _SEEDS - set(shared))
        return Row(
            clean(job.get("method", record.experiment)),
            clean(job.get("constants") or ""),
            clean(job.get("control") or ""),
            tuple((clean(key), clean(job[key])) for key in others),
        )

    order = {method: place for place, method in enumerate(METHOD_TITLES)}

    def place(row: Row) -> tuple[object, ...]:
        return order.get(row.method, len(order)), row.method, row.variant, row.control

    rows = gather(records, row_of)
    return {row: rows[row] for row in sorted(rows, key=place)}


def varying(records: Iterable[Record], keys: Iterable[str]) -> list[str]:
    """List those of the keys that take several values."""
    seen = [record.job for record in records]
    return [key for key in keys if len({repr(job.get(key)) for job in seen}) > 1]


def estimate(records: Iterable[Record], metric: str) -> Estimate | None:
    """Average a metric over the records that have it."""
    known = [value for _, value in values_of(records, metric)]
    return mean_difference(known) if known else None


def estimates(
    records: Iterable[Record], key: str, metric: str
) -> dict[float, Estimate]:
    """Average over trials at every place of an axis."""
    parts = gather(records, lambda record: place_of(record, key))
    return {
        place: known
        for place in sorted(place for place in parts if place is not None)
        if (known := estimate(parts[place], metric)) is not None
    }


def curve(
    name: str, points: Mapping[float, Estimate], ink: Ink, unit: str = ""
) -> Curve:
    """Make a line of estimates, with a band of two standard errors."""
    y = tuple(point.mean for point in points.values())
    errors = [point.standard_error for point in points.values()]
    spread = [0.0 if math.isnan(error) else 2 * error for error in errors]
    notes = [
        f"{x:g}: {point.mean:.4g}"
        + ("" if math.isnan(point.standard_error) else f" ± {wide:.2g}")
        + f"{unit} ({point.n} trials)"
        for (x, point), wide in zip(points.items(), spread, strict=True)
    ]
    low, high = (
        tuple(m + sign * s for m, s in zip(y, spread, strict=True))
        if any(spread)
        else ()
        for sign in (-1, 1)
    )
    several = len(points) > 1  # a band needs two points, a bar one
    return Curve(name, tuple(points), y, low, high, tuple(notes), ink, line=several)


def dots(name: str, points: Mapping[float, Estimate], ink: Ink) -> Dots:
    """Make a series of estimates, each with two standard errors either way."""
    values = tuple(point.mean for point in points.values())
    reach = tuple(2 * point.standard_error for point in points.values())
    return Dots(name, values, tuple(points), reach, ink)


def row_inks(rows: Iterable[Row]) -> dict[Row, Ink]:
    """Give every row its look: colour for the method, dash for variant and control."""
    inks: dict[Row, Ink] = {}
    families: dict[str, list[Any]] = {}
    free = [(slot, dash) for dash in range(4) for slot in range(8)]
    for row in rows:
        family = families.setdefault(row.method, [])
        slots = METHOD_SLOTS.get(row.method, [])
        if not slots:  # unnamed methods begin with colours of their own
            others = [method for method in families if method not in METHOD_SLOTS]
            first = others.index(row.method) % len(_OTHERS)
            slots = _OTHERS[first:] + _OTHERS[:first]
        if row.variant not in family:
            family.append(row.variant)
        slot = slots[family.index(row.variant) % len(slots)]
        dash = {"": 0, "norm-matched": 1, "noise-only": 2}.get(row.control, 3)
        wishes = [(slot, dash), *((slot, other) for other in range(3)), *free]
        pair = next((wish for wish in wishes if wish in free), (slot, dash))
        if pair in free:
            free.remove(pair)
        inks[row] = Ink(*pair, marker=len(inks) % 7)
    return inks


COMMON = frozenset(
    ("n_samples", "n_features", "n_components", "design", "noise", "trial", "seed")
)
BAYES = "Bayes (best possible)"
EXPECTED = "expected_accuracy"
_ACCURACY = Axis("expected accuracy")
_WHOSE: dict[str, str] = WORDS["whose"]
_RIVALS = ("norm-matched", "noise-only", "fixed")
_BAND = "Means over trials; bands are ± 2 standard errors."
_ERRORS = "Mean ± standard error over trials; ● marks the best mean of a column."
_PAIRED = (
    "Difference of expected accuracies ± standard error over trials; green and red are "
    "more than two standard errors from zero."
)
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def sweep(
    key: str,
    title: str,
    x: tuple[str, Axis],
    records: Sequence[Record],
    metric: str = EXPECTED,
    y: Axis = _ACCURACY,
    *,
    common: Collection[str] = COMMON,
) -> Chart:
    """Chart a metric of every row along an entry of the jobs."""
    place, axis = x
    unit = " s" if y.label.endswith("seconds") else ""
    rows, layers = by_row(records, common), []
    for row, ink in row_inks(rows).items():
        points = estimates(rows[row], place, metric)
        if points:
            layers.append(curve(row.label, points, ink, unit))
    best = estimates(records, place, "bayes_accuracy")
    if layers and best and metric in (EXPECTED, "accuracy"):
        line = (tuple(best), tuple(point.mean for point in best.values()))
        layers.append(Curve(BAYES, *line, ink=Ink(0, 3), points=len(best) == 1))
    return Chart(key, title, axis, y, tuple(layers), _BAND)


def score_table(
    key: str,
    caption: str,
    records: Sequence[Record],
    x: tuple[str, str],
    metric: str = EXPECTED,
    *,
    common: Collection[str] = COMMON,
) -> Table:
    """Tabulate means: one row for each method, one column for each place of an axis."""
    place, letter = x
    rows = by_row(records, common)
    found = {row: estimates(part, place, metric) for row, part in rows.items()}
    places = sorted({each for points in found.values() for each in points})
    scores = [Column(f"{letter} = {tick(each)}", better=1) for each in places]
    columns: list[Header] = ["method", "constants", *scores, Column("trials")]
    body = [
        (
            row.label,
            whose_short(row.constants),
            *(averaged(points.get(each)) for each in places),
            max(point.n for point in points.values()),
        )
        for row, points in found.items()
        if points
    ]
    table = mark_best(tabulate(key, caption, columns, body, _ERRORS))
    best = estimates(records, place, "bayes_accuracy")
    if not (best and body):
        return table
    limits = (best[each].mean if each in best else None for each in places)
    last = (BAYES, "–", *limits, "–")
    return tabulate(key, caption, columns, (*table.rows, last), _ERRORS)


def difference_table(
    key: str, caption: str, records: Sequence[Record], *, by_noise: bool
) -> Table:
    """Tabulate learned minus its controls and minus fixed features, paired by trial."""
    learned = select(records, method="langevin", control=None)
    levels = sorted({s for r in learned if (s := place_of(r, "noise")) is not None})
    places: dict[str, Any] = {"difference": levels}
    if by_noise:
        places = {f"σ = {tick(level)}": level for level in levels}
    columns: list[Header] = ["learned row", "constants", "minus", *map(Column, places)]
    body: list[tuple[Cell | str, ...]] = []
    for row, part in by_row(learned, COMMON).items():
        for name in _RIVALS:
            rivals = _rivals(name, row, records)
            cells = [
                _difference(select(part, noise=at), select(rivals, noise=at))
                for at in places.values()
            ]
            words = (row.label, whose_short(row.constants), _rival(name))
            if any(cell.value is not None for cell in cells):
                body.append((*words, *cells))
    return tabulate(key, caption, columns, body, _PAIRED)


def metric_tables(name: str, records: Sequence[Record]) -> list[Table]:
    """Tabulate every metric, averaged over the repetitions of a row."""
    if not records:
        return []
    keys = sorted({key for record in records for key in record.job})
    # What follows from the method says nothing more about a row.
    methods = gather(records, lambda record: repr(record.job.get("method")))
    free = {key for part in methods.values() for key in varying(part, keys)}
    constant = set(keys) - free
    named = {key for record in records for key in record.metrics}
    shown = sorted(key for key in named if values_of(records, key))

    def mean(key: str, part: Sequence[Record]) -> Cell:
        return averaged(estimate(part, key), error=".2g")

    rows = [
        (row.label, row.constants or "–", *(mean(k, part) for k in shown), len(part))
        for row, part in by_row(records, constant - {"method", "constants"}).items()
    ]
    names = [Column(clean(key).replace("_", " ")) for key in shown]
    columns: list[Header] = ["row", "constants", *names, Column("records")]
    note = "Mean ± standard error over trials."
    if len(rows) > _MOST_ROWS:
        note += f" The first {_MOST_ROWS} of {len(rows)} rows."
    key, caption = f"{slug(name)}-metrics", f"Metrics of {name}"
    return [tabulate(key, caption, columns, rows[:_MOST_ROWS], note)]


def by_constants(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Split records by whose constants they use."""
    parts = gather(records, lambda r: clean(r.job.get("constants") or "other"))
    order = [*_WHOSE, *(name for name in parts if name not in _WHOSE)]
    return {name: parts[name] for name in order if name in parts}


def whose(constants: str) -> str:
    """Say whose constants they are, as a title."""
    return _WHOSE.get(constants, constants)


def whose_short(constants: str) -> str:
    """Say whose constants they are, in a table."""
    return str(WORDS["short"].get(constants, constants or "–"))


def averaged(
    point: Estimate | None, *, signed: bool = False, digits: int = 3, error: str = ""
) -> Cell:
    """Show a mean with its standard error, whose format may be another."""
    if point is None or not point.n:
        return number(None)
    known = not math.isnan(point.standard_error)
    detail = f"± {point.standard_error:{error or f'.{digits}f'}}" if known else ""
    if not signed:
        return number(point.mean, digits=digits, detail=detail)
    tone = ""
    if point.distinct:
        tone = "holds" if point.mean > 0 else "fails"
    shown = f"{point.mean:+.{digits}f}".replace("-", "−")
    return Cell(shown, point.mean, detail=detail, tone=tone)


def tick(value: float) -> str:
    """Write a place of an axis: powers of ten as such, others plainly.

    Examples
    --------
    >>> tick(1e-5), tick(0.1), tick(200.0), tick(10000.0)
    ('10⁻⁵', '0.1', '200', '10⁴')
    """
    power = round(math.log10(value)) if value > 0 else 0
    if abs(power) > 2 and math.isclose(value, 10.0**power):
        return "10" + str(power).translate(_RAISED)
    return f"{value:g}"


def place_of(record: Record, key: str) -> float | None:
    """Read a number of a job."""
    return as_number(record.job.get(key))


def budgets_of(records: Iterable[Record]) -> tuple[float, ...]:
    """List the numbers of features, as ticks of an axis."""
    return tuple(sorted({d for r in records if (d := place_of(r, "n_components"))}))


def _rival(name: str) -> str:
    return "random Fourier features" if name == "fixed" else f"{name} control"


def _rivals(name: str, row: Row, records: Collection[Record]) -> list[Record]:
    same = {"constants": row.constants or ("", None)}
    if name == "fixed":
        return select(records, method="fixed", control=None, **same)
    found = by_row(select(records, method=row.method, control=name, **same), COMMON)
    return found.get(row._replace(control=name), [])


def _difference(ours: Sequence[Record], theirs: Sequence[Record]) -> Cell:
    return averaged(paired(ours, theirs, EXPECTED), signed=True)
