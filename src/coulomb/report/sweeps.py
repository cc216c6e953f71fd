"""Methods along an axis: charts, tables of means, paired differences."""

import math
from collections.abc import Collection, Mapping, Sequence

from coulomb.experiments.records import Record
from coulomb.experiments.summary import paired
from coulomb.report.charts import Axis, Chart, Curve, Ink
from coulomb.report.rows import (
    Estimate,
    Row,
    Value,
    as_number,
    by_row,
    clean,
    curve,
    estimates,
    metric,
    row_inks,
)
from coulomb.report.tables import Cell, Column, Table, mark_best, number, text

COMMON = frozenset(
    ("n_samples", "n_features", "n_components", "design", "noise", "trial", "seed")
)
BAYES = "Bayes (best possible)"
EXPECTED = metric("expected_accuracy")
_WHOSE = {"paper": "The paper’s constants", "default": "Our defaults"}
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
    y: Axis,
    rows: Mapping[Row, Sequence[Record]],
    value: Value,
    *,
    bayes: bool = False,
) -> Chart:
    """Chart every row along an entry of the jobs."""
    place, axis = x
    unit = " s" if y.label.endswith("seconds") else ""
    layers = []
    for row, ink in row_inks(rows).items():
        points = estimates(rows[row], place, value)
        if points:
            layers.append(curve(row.label, points, ink, unit))
    if layers and bayes:
        everyone = [record for part in rows.values() for record in part]
        best = estimates(everyone, place, metric("bayes_accuracy"))
        if best:
            layers.append(_level(BAYES, best))
    return Chart(key, title, axis, y, tuple(layers), _BAND)


def score_table(
    key: str,
    caption: str,
    records: Sequence[Record],
    x: tuple[str, str],
    value: Value = EXPECTED,
    *,
    better: int = 1,
    common: Collection[str] = COMMON,
) -> Table:
    """Tabulate means: one row for each method, one column for each place of an axis."""
    place, letter = x
    rows = by_row(records, common)
    found = {row: estimates(part, place, value) for row, part in rows.items()}
    places = sorted({each for points in found.values() for each in points})
    columns = (
        Column("method", numeric=False),
        Column("constants", numeric=False),
        *(Column(f"{letter} = {tick(each)}", better=better) for each in places),
        Column("trials"),
    )
    body = tuple(
        (
            text(row.label),
            text(whose_short(row.constants)),
            *(averaged(points.get(each)) for each in places),
            number(max(point.n for point in points.values()), digits=0),
        )
        for row, points in found.items()
        if points
    )
    table = mark_best(Table(key, caption, columns, body, _ERRORS))
    best = estimates(records, place, metric("bayes_accuracy")) if better > 0 else {}
    if not (best and body):
        return table
    limits = [number(best[each].mean if each in best else None) for each in places]
    last = (text(BAYES), text("–"), *limits, text("–"))
    return Table(key, caption, columns, (*table.rows, last), _ERRORS)


def difference_table(
    key: str, caption: str, records: Sequence[Record], *, by_noise: bool
) -> Table:
    """Tabulate learned minus its controls and minus fixed features, paired by trial."""
    learned = [r for r in records if _is(r, "langevin", None)]
    levels = sorted({s for r in learned if (s := place_of(r, "noise")) is not None})
    columns: list[Column] = [
        Column("learned row", numeric=False),
        Column("constants", numeric=False),
    ]
    body = []
    if by_noise:
        columns += [Column("minus", numeric=False)]
        columns += [Column(f"σ = {tick(level)}") for level in levels]
    else:
        columns += [Column(f"minus {_rival(name)}") for name in _RIVALS]
    for row, part in by_row(learned, COMMON).items():
        words = (text(row.label), text(whose_short(row.constants)))
        others = {name: _rivals(name, row, records) for name in _RIVALS}
        if not by_noise:
            cells = [_difference(part, others[name]) for name in _RIVALS]
            body.append((*words, *cells))
            continue
        for name in _RIVALS:
            cells = [
                _difference(_at(part, level), _at(others[name], level))
                for level in levels
            ]
            if any(cell.value is not None for cell in cells):
                body.append((*words, text(_rival(name)), *cells))
    return Table(key, caption, tuple(columns), tuple(body), _PAIRED)


def by_constants(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Split records by whose constants they use."""
    parts: dict[str, list[Record]] = {}
    for record in records:
        name = clean(record.job.get("constants") or "other")
        parts.setdefault(name, []).append(record)
    order = [*_WHOSE, *(name for name in parts if name not in _WHOSE)]
    return {name: parts[name] for name in order if name in parts}


def whose(constants: str) -> str:
    """Say whose constants they are, as a title."""
    return _WHOSE.get(constants, constants)


def whose_short(constants: str) -> str:
    """Say whose constants they are, in a table."""
    return {"paper": "paper’s", "default": "ours"}.get(constants, constants or "–")


def averaged(point: Estimate | None, *, signed: bool = False, digits: int = 3) -> Cell:
    """Show a mean with its standard error."""
    if point is None or not point.n:
        return number(None)
    known = not math.isnan(point.standard_error)
    detail = f"± {point.standard_error:.{digits}f}" if known else ""
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


def _level(name: str, points: Mapping[float, Estimate]) -> Curve:
    y = tuple(point.mean for point in points.values())
    return Curve(name, tuple(points), y, ink=Ink(0, 3), points=len(points) == 1)


def _is(record: Record, method: str, control: str | None) -> bool:
    job = record.job
    return job.get("method") == method and (job.get("control") or None) == control


def _at(records: Sequence[Record], level: float) -> list[Record]:
    return [record for record in records if place_of(record, "noise") == level]


def _rival(name: str) -> str:
    return "random Fourier features" if name == "fixed" else f"{name} control"


def _rivals(name: str, row: Row, records: Collection[Record]) -> list[Record]:
    constants = [
        r for r in records if clean(r.job.get("constants") or "") == row.constants
    ]
    if name == "fixed":
        return [r for r in constants if _is(r, "fixed", None)]
    found = by_row([r for r in constants if _is(r, row.method, name)], COMMON)
    return found.get(row._replace(control=name), [])


def _difference(ours: Sequence[Record], theirs: Sequence[Record]) -> Cell:
    gap = paired(_sound(ours), _sound(theirs), "expected_accuracy")
    return averaged(gap if gap.n else None, signed=True)


def _sound(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if EXPECTED(record) is not None]
