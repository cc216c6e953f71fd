"""Sections on the synthetic problem: noise, strength and budget."""

import math
from collections.abc import Mapping, Sequence

from coulomb._support.stats import fit_power_law
from coulomb.experiments.paper import published_power_laws, published_seconds
from coulomb.experiments.records import Record
from coulomb.experiments.summary import as_number, gather
from coulomb.report.chart import Axis, Chart, Curve
from coulomb.report.rows import (
    COMMON,
    Estimate,
    Row,
    budgets_of,
    by_constants,
    by_row,
    clean,
    difference_table,
    estimates,
    place_of,
    row_inks,
    score_table,
    slug,
    sweep,
    varying,
    whose,
    whose_short,
)
from coulomb.report.sections import Group, Section, named_section
from coulomb.report.sections.text import show_heads
from coulomb.report.tables import Cell, Column, Header, Table, number, tabulate

_PAPER_DESIGN = 42
_SIGMA = ("noise", Axis("noise on the logit, standard deviation σ", log=True))
_SECONDS = Axis("wall-clock seconds", log=True)
_SIZE = ("n_samples", Axis("number of samples n", log=True))
_DRAWN = "on the drawn labels"
_SCORES = (
    ("accuracy", f"Accuracy {_DRAWN}", "accuracy", Axis("accuracy")),
    ("f1", f"F1 score {_DRAWN}", "f1", Axis("F1 score")),
    ("seconds", "Runtime", "seconds.total", _SECONDS),
)


def noise_section(records: Sequence[Record]) -> Section:
    """Show accuracy, F1 and runtime against the noise, whose constants apart."""
    groups, tables = [], []
    for title, key, part in _variants(records):
        for constants, chosen in by_constants(part).items():
            start = f"noise-{slug(constants)}{key}"
            charts = [sweep(f"{start}-expected", "Expected accuracy", _SIGMA, chosen)]
            charts += [
                sweep(f"{start}-{short}", head, _SIGMA, chosen, metric, y)
                for short, head, metric, y in _SCORES
            ]
            groups.append(Group(_join(whose(constants), title), charts))
        tables += [
            score_table(
                f"noise-accuracy{key}",
                _join("Expected accuracy at each noise level σ", title),
                part,
                ("noise", "σ"),
            ),
            difference_table(
                f"noise-differences{key}",
                _join("Learned minus its controls, paired by trial", title),
                part,
                by_noise=True,
            ),
        ]
    return named_section("noise", groups, tables)


def strength_section(records: Sequence[Record]) -> Section:
    """Show accuracy against the noise for each strength of the repulsion."""
    groups = []
    plain = [record for record in records if not record.job.get("control")]
    for constants, chosen in by_constants(plain).items():
        charts = []
        for name, other in (("log", "riesz"), ("riesz", "log")):
            part = [record for record in chosen if _repulsion(record) != other]
            key, title = f"strength-{slug(constants)}-{name}", f"{name} repulsion"
            common = COMMON | {"exponent"}
            charts.append(sweep(key, title.capitalize(), _SIGMA, part, common=common))
        groups.append(Group(whose(constants), charts))
    tables = [
        score_table(
            "strength-accuracy",
            "Expected accuracy at each noise level σ, by strength λ and exponent s "
            "(s = 0 is the logarithm)",
            plain,
            ("noise", "σ"),
        ),
        difference_table(
            "strength-differences",
            "Learned minus its controls, mean over all noise levels, paired by trial",
            records,
            by_noise=False,
        ),
    ]
    return named_section("strength", groups, tables)


def budget_section(records: Sequence[Record]) -> Section:
    """Show accuracy against the number of features."""
    in_text = [record for record in records if "task" in record.job]
    records = [record for record in records if "task" not in record.job]
    groups, tables = show_heads(in_text)
    axis = Axis("number of features D", log=True, ticks=budgets_of(records))
    along = ("n_components", axis)
    levels = gather(records, lambda record: place_of(record, "noise"))
    noises = sorted(level for level in levels if level is not None)
    charts: dict[str, list[Chart]] = {name: [] for name in by_constants(records)}
    for i, sigma in enumerate(noises):
        for constants, chosen in by_constants(levels[sigma]).items():
            key = f"budget-{slug(constants)}-{i}"
            title = f"Expected accuracy, σ = {sigma:g}"
            charts[constants].append(sweep(key, title, along, chosen))
        tables.insert(
            i,
            score_table(
                f"budget-accuracy-{i}",
                f"Expected accuracy by number of features D, σ = {sigma:g}",
                levels[sigma],
                ("n_components", "D"),
            ),
        )
    groups = [Group(whose(name), each) for name, each in charts.items()] + groups
    return named_section("budget", groups, tables)


def _variants(records: Sequence[Record]) -> list[tuple[str, str, list[Record]]]:
    """Split by the number of columns, and by whether the design is the paper's."""
    columns = varying(records, ["n_features"])

    def variant(record: Record) -> tuple[str, str]:
        words, key = [], ""
        if columns:
            p = as_number(record.job.get("n_features"))
            words.append(f"p = {clean(p)}")
            key += f"-p{slug(p)}"
        if record.job.get("design", _PAPER_DESIGN) != _PAPER_DESIGN:
            words.append("fresh designs")
            key += "-fresh"
        return ", ".join(words), key

    return [(*names, part) for names, part in gather(records, variant).items()]


def _repulsion(record: Record) -> str:
    if not place_of(record, "strength"):
        return "none"
    return "riesz" if place_of(record, "exponent") else "log"


def _join(*words: str) -> str:
    return ", ".join(word for word in words if word)


def runtime_section(records: Sequence[Record]) -> Section:
    """Show seconds against the number of samples, ours beside the published ones."""
    plain = [record for record in records if not record.job.get("control")]
    total = "seconds.total"
    ours = sweep("runtime-ours", "Measured here", _SIZE, plain, total, _SECONDS)
    found = {
        row: points
        for row, part in by_row(plain, COMMON).items()
        if (points := estimates(part, "n_samples", total))
    }
    groups = [Group("", (ours, _published(found)))]
    return named_section("runtime", groups, (_table(found), _fits(found)))


def _published(found: Mapping[Row, Mapping[float, Estimate]]) -> Chart:
    published = published_seconds()
    layers = []
    for row, ink in row_inks(found).items():
        points = published.get(row.method)
        if points and row.constants == "paper":
            notes = tuple(f"{n:g}: {t:.4g} s" for n, t in points.items())
            places = (tuple(points), tuple(points.values()))
            layers.append(Curve(row.label, *places, notes=notes, ink=ink))
    return Chart(
        "runtime-published",
        "Published in the paper",
        _SIZE[1],
        _SECONDS,
        tuple(layers),
        "The paper’s table of observed seconds per job.",
    )


def _table(found: Mapping[Row, Mapping[float, Estimate]]) -> Table:
    published = published_seconds()
    sizes = sorted({n for points in found.values() for n in points})
    body: list[tuple[Cell | str, ...]] = []
    for row, points in found.items():
        words = (row.label, whose_short(row.constants))
        body.append((*words, "here", *(_timed(points.get(n)) for n in sizes)))
        theirs = published.get(row.method, {})
        if row.constants == "paper" and any(n in theirs for n in sizes):
            known = {n: Estimate(t, math.nan, 1) for n, t in theirs.items()}
            quoted = (_timed(known.get(n), "paper") for n in sizes)
            body.append((*words, Cell("published", tone="paper"), *quoted))
    return tabulate(
        "runtime-seconds",
        "Wall-clock seconds by number of samples n",
        ["method", "constants", "measured", *(Column(f"n = {n:,.0f}") for n in sizes)],
        body,
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
                row.label,
                whose_short(row.constants),
                number(law.exponent, detail=f"({law.low:.2f} to {law.high:.2f})"),
                theirs.get("exponent"),
                law.prefactor,
                theirs.get("prefactor"),
                law.sigma_log,
                law.n,
            )
        )
    numeric = ("exponent γ, 95 % interval", "γ published", "prefactor c", "c published")
    columns: list[Header] = ["method", "constants", *map(Column, numeric)]
    columns += [Column("residual s.d. of log t"), Column("sizes")]
    return tabulate("runtime-fits", "Power laws t = c nᵞ", columns, body)


def _timed(point: Estimate | None, tone: str = "") -> Cell:
    """Show three digits, wherever they are: times span many powers of ten."""
    if point is None:
        return number(None)
    known = not math.isnan(point.standard_error)
    detail = f"± {point.standard_error:.1g}" if known else ""
    return Cell(f"{point.mean:.3g}", point.mean, detail=detail, tone=tone)
