"""The section on runtime: seconds against the number of samples, and power laws."""

import math
from collections.abc import Mapping, Sequence

from coulomb._support.stats import PowerLaw, fit_power_law
from coulomb.experiments.paper import paper_table, published_power_laws
from coulomb.experiments.records import Record
from coulomb.report.charts import Axis, Chart, Curve
from coulomb.report.rows import Estimate, Row, by_row, estimates, row_inks, seconds
from coulomb.report.sections import Group, Section
from coulomb.report.sweeps import COMMON, sweep, whose_short
from coulomb.report.tables import Cell, Column, Table, number, text

_SECONDS = Axis("wall-clock seconds", log=True)
_SIZE = ("n_samples", Axis("number of samples n", log=True))


def runtime_section(records: Sequence[Record]) -> Section:
    """Show seconds against the number of samples, ours beside the published ones."""
    plain = [record for record in records if not record.job.get("control")]
    rows = by_row(plain, COMMON)
    ours = sweep(
        "runtime-ours", "Measured here", _SIZE, _SECONDS, rows, seconds("total")
    )
    found = {
        row: points
        for row, part in rows.items()
        if (points := estimates(part, "n_samples", seconds("total")))
    }
    charts = (ours, _published(found))
    return Section(
        "runtime",
        "Runtime",
        "Runtime",
        (
            "Seconds from raw columns to predictions, as the number of samples grows. "
            "The published seconds are from another machine: compare slopes, not "
            "heights. Fits are t = c nᵞ, by least squares on logarithmic axes.",
        ),
        (Group("", tuple(chart for chart in charts if chart.layers)),),
        tuple(t for t in (_table(found), _fits(found)) if t.rows),
    )


def _published_seconds() -> dict[str, dict[float, float]]:
    found: dict[str, dict[float, float]] = {}
    for line in paper_table("runtime"):
        found.setdefault(line["method"], {})[line["n_samples"]] = line["seconds"]
    return found


def _published(found: Mapping[Row, Mapping[float, Estimate]]) -> Chart:
    published = _published_seconds()
    layers = []
    for row, ink in row_inks(found).items():
        points = published.get(row.method)
        if points and row.constants == "paper":
            layers.append(
                Curve(
                    row.label,
                    tuple(points),
                    tuple(points.values()),
                    notes=tuple(f"{n:g}: {t:.4g} s" for n, t in points.items()),
                    ink=ink,
                )
            )
    return Chart(
        "runtime-published",
        "Published in the paper",
        _SIZE[1],
        _SECONDS,
        tuple(layers),
        "The paper’s table of observed seconds per job.",
    )


def _table(found: Mapping[Row, Mapping[float, Estimate]]) -> Table:
    published = _published_seconds()
    sizes = sorted({n for points in found.values() for n in points})
    body: list[tuple[Cell, ...]] = []
    for row, points in found.items():
        words = (text(row.label), text(whose_short(row.constants)))
        body.append((*words, text("here"), *(_timed(points.get(n)) for n in sizes)))
        theirs = published.get(row.method, {})
        if row.constants == "paper" and any(n in theirs for n in sizes):
            quoted = [_quoted(theirs.get(n)) for n in sizes]
            body.append((*words, text("published", tone="paper"), *quoted))
    columns = (
        Column("method", numeric=False),
        Column("constants", numeric=False),
        Column("measured", numeric=False),
        *(Column(f"n = {n:,.0f}") for n in sizes),
    )
    return Table(
        "runtime-seconds",
        "Wall-clock seconds by number of samples n",
        columns,
        tuple(body),
        "Mean ± standard error over trials; published values in italics.",
    )


def _fits(found: Mapping[Row, Mapping[float, Estimate]]) -> Table:
    published = published_power_laws()
    body = []
    for row, points in found.items():
        positive = {n: p.mean for n, p in points.items() if p.mean > 0 and n > 0}
        if len(positive) < 3:
            continue
        law = fit_power_law(list(positive), list(positive.values()))
        printed = published.get(row.method) if row.constants == "paper" else None
        theirs = printed[1] if printed else {}
        body.append(
            (
                text(row.label),
                text(whose_short(row.constants)),
                _exponent(law),
                number(theirs.get("exponent")),
                number(law.prefactor),
                number(theirs.get("prefactor")),
                number(law.sigma_log),
                number(law.n, digits=0),
            )
        )
    columns = (
        Column("method", numeric=False),
        Column("constants", numeric=False),
        Column("exponent γ, 95 % interval"),
        Column("γ published"),
        Column("prefactor c"),
        Column("c published"),
        Column("residual s.d. of log t"),
        Column("sizes"),
    )
    return Table("runtime-fits", "Power laws t = c nᵞ", columns, tuple(body))


def _timed(point: Estimate | None) -> Cell:
    """Show three digits, wherever they are: times span many powers of ten."""
    if point is None:
        return number(None)
    known = not math.isnan(point.standard_error)
    detail = f"± {point.standard_error:.1g}" if known else ""
    return Cell(f"{point.mean:.3g}", point.mean, detail=detail)


def _quoted(value: float | None) -> Cell:
    if value is None:
        return number(None)
    return Cell(f"{value:.3g}", value, tone="paper")


def _exponent(law: PowerLaw) -> Cell:
    return number(law.exponent, detail=f"({law.low:.2f} to {law.high:.2f})")
