"""Sections on the synthetic problem: noise, strength and budget."""

import math
from collections.abc import Mapping, Sequence

from coulomb._support.stats import PowerLaw, fit_power_law
from coulomb.experiments.paper import paper_table, published_power_laws
from coulomb.experiments.records import Record
from coulomb.report.chart import Axis, Chart, Curve
from coulomb.report.rows import (
    COMMON,
    EXPECTED,
    Estimate,
    Row,
    Value,
    as_number,
    by_constants,
    by_row,
    clean,
    difference_table,
    estimates,
    metric,
    place_of,
    row_inks,
    score_table,
    seconds,
    slug,
    sweep,
    varying,
    whose,
    whose_short,
)
from coulomb.report.sections import Group, Section
from coulomb.report.sections.text import show_heads
from coulomb.report.tables import Cell, Column, Table, number, text

_PAPER_DESIGN = 42
_SIGMA = ("noise", Axis("noise on the logit, standard deviation σ", log=True))
_ACCURACY = Axis("expected accuracy")
_SCORES: tuple[tuple[str, str, Axis, Value, bool], ...] = (
    ("expected", "Expected accuracy", _ACCURACY, EXPECTED, True),
    (
        "accuracy",
        "Accuracy on the drawn labels",
        Axis("accuracy"),
        metric("accuracy"),
        True,
    ),
    ("f1", "F1 score on the drawn labels", Axis("F1 score"), metric("f1"), False),
    (
        "seconds",
        "Runtime",
        Axis("wall-clock seconds", log=True),
        seconds("total"),
        False,
    ),
)


def noise_section(records: Sequence[Record]) -> Section:
    """Show accuracy, F1 and runtime against the noise, whose constants apart."""
    groups, tables = [], []
    for title, key, part in _variants(records):
        for constants, chosen in by_constants(part).items():
            rows = by_row(chosen, COMMON)
            charts = [
                sweep(
                    f"noise-{slug(constants)}{key}-{short}",
                    head,
                    _SIGMA,
                    y,
                    rows,
                    value,
                    bayes=bayes,
                )
                for short, head, y, value, bayes in _SCORES
            ]
            groups.append(Group(_join(whose(constants), title), tuple(charts)))
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
    return Section(
        "noise",
        "Accuracy against noise",
        "Noise",
        (
            "The paper’s nonlinear synthetic problem. The expected accuracy replaces "
            "each drawn test label by its known probability, so it is free of the "
            "labels’ own noise; no method can be above the Bayes line. Every learned "
            "row carries two controls: the same norms without the labels’ placement, "
            "and the same dynamics without the labels’ force.",
        ),
        tuple(groups),
        tuple(tables),
    )


def strength_section(records: Sequence[Record]) -> Section:
    """Show accuracy against the noise for each strength of the repulsion."""
    groups = []
    plain = [record for record in records if not record.job.get("control")]
    for constants, chosen in by_constants(plain).items():
        charts = []
        for name, other in (("log", "riesz"), ("riesz", "log")):
            part = [record for record in chosen if _repulsion(record) != other]
            charts.append(
                sweep(
                    f"strength-{slug(constants)}-{name}",
                    f"{name.capitalize()} repulsion",
                    _SIGMA,
                    _ACCURACY,
                    by_row(part, COMMON | {"exponent"}),
                    EXPECTED,
                    bayes=True,
                )
            )
        groups.append(Group(whose(constants), tuple(charts)))
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
    return Section(
        "strength",
        "The strength of the repulsion",
        "Strength",
        (
            "λ from 0 to 1.5 for the logarithmic and the Riesz repulsion, against "
            "random Fourier features. The paper finds moderate strengths best.",
        ),
        tuple(groups),
        tuple(tables),
    )


def budget_section(records: Sequence[Record]) -> Section:
    """Show accuracy against the number of features."""
    in_text = [record for record in records if "task" in record.job]
    records = [record for record in records if "task" not in record.job]
    groups, tables = [], []
    budgets = sorted({d for r in records if (d := place_of(r, "n_components"))})
    axis = Axis("number of features D", log=True, ticks=tuple(budgets))
    noises = sorted({s for r in records if (s := place_of(r, "noise")) is not None})
    for constants, chosen in by_constants(records).items():
        charts = [
            sweep(
                f"budget-{slug(constants)}-{i}",
                f"Expected accuracy, σ = {sigma:g}",
                ("n_components", axis),
                _ACCURACY,
                by_row([r for r in chosen if place_of(r, "noise") == sigma], COMMON),
                EXPECTED,
                bayes=True,
            )
            for i, sigma in enumerate(noises)
        ]
        groups.append(Group(whose(constants), tuple(charts)))
    for i, sigma in enumerate(noises):
        tables.append(
            score_table(
                f"budget-accuracy-{i}",
                f"Expected accuracy by number of features D, σ = {sigma:g}",
                [r for r in records if place_of(r, "noise") == sigma],
                ("n_components", "D"),
            )
        )
    in_attention = show_heads(in_text)
    groups.extend(in_attention[0])
    tables.extend(in_attention[1])
    return Section(
        "budget",
        "How many features are needed",
        "Budget",
        ("Accuracy against D for fixed, importance-sampled and learned features.",),
        tuple(groups),
        tuple(tables),
    )


def _variants(records: Sequence[Record]) -> list[tuple[str, str, list[Record]]]:
    """Split by the number of columns, and by whether the design is the paper's."""
    parts: dict[tuple[str, str], list[Record]] = {}
    columns = varying(records, ["n_features"])
    for record in records:
        words, key = [], ""
        if columns:
            p = as_number(record.job.get("n_features"))
            words.append(f"p = {clean(p)}")
            key += f"-p{slug(p)}"
        if record.job.get("design", _PAPER_DESIGN) != _PAPER_DESIGN:
            words.append("fresh designs")
            key += "-fresh"
        parts.setdefault((", ".join(words), key), []).append(record)
    return [(title, key, part) for (title, key), part in parts.items()]


def _repulsion(record: Record) -> str:
    if not place_of(record, "strength"):
        return "none"
    return "riesz" if place_of(record, "exponent") else "log"


def _join(*words: str) -> str:
    return ", ".join(word for word in words if word)


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
    return Section(
        "runtime",
        "Runtime",
        "Runtime",
        (
            "Seconds from raw columns to predictions, as the number of samples grows. "
            "The published seconds are from another machine: compare slopes, not "
            "heights. Fits are t = c nᵞ, by least squares on logarithmic axes.",
        ),
        (Group("", (ours, _published(found))),),
        (_table(found), _fits(found)),
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
