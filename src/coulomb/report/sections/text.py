"""The sections on text: the paper's tables beside ours, and every arm of Phase A."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coulomb._support.stats import Difference
from coulomb.experiments.paper import MAPS, TASKS, paper_table
from coulomb.experiments.phase_a import compare_arms
from coulomb.experiments.records import Record
from coulomb.experiments.summary import METHOD_TITLES, gather, paired, values_of
from coulomb.report.chart import Axis, Chart, Dots, Ink
from coulomb.report.rows import (
    WORDS,
    Row,
    averaged,
    budgets_of,
    by_constants,
    by_row,
    clean,
    dots,
    estimate,
    score_table,
    slug,
    sweep,
    whose,
    whose_short,
)
from coulomb.report.sections import Group, Section, named_section
from coulomb.report.tables import (
    Cell,
    Column,
    Header,
    Table,
    mark_best,
    number,
    tabulate,
)

_SHARED = ("task", "changes")
_BLIND = "label-blindness"
_NAMES: dict[str, str] = WORDS["tasks"]
# Series of one row stand a little apart, so that none covers another.
_SERIES = {
    "": ("trained here, ± 2 s.e.", Ink(1, 0, 0), -0.2),
    "norm-matched": ("norm-matched control", Ink(2, 0, 1), 0.0),
    "noise-only": ("noise-only control", Ink(3, 0, 2), 0.2),
}
_QUOTED = Ink(7, 0, 4)
_COLUMNS: list[tuple[str, str, int, str]] = WORDS["text"]["columns"]


def text_section(records: Sequence[Record]) -> Section:
    """Show every row of the paper's tables, its controls, and bags of words."""
    tasks = gather(records, lambda r: clean(r.job.get("task") or "text"))
    groups, tables = [], []
    for task, part in tasks.items():
        rows = [record for record in part if record.job.get("method") != _BLIND]
        lines = paper_table(task) if task in TASKS else []
        published = {line["row"]: line for line in lines}
        name = _NAMES.get(task, task)
        splits = ", ".join(sorted({clean(r.split) for r in rows}))
        for constants, chosen in by_constants(rows).items():
            key = f"text-{slug(task)}-{slug(constants)}"
            theirs = published if constants == "paper" else {}
            charts = (_accuracies(key, chosen, theirs), _gains(key, chosen, theirs))
            title = f"{name} ({splits} split), {whose(constants).lower()}"
            groups.append(Group(title, charts, shared=False))
        tables.append(_table(slug(task), f"{name}, {splits} split", rows, published))
    return named_section("text", groups, tables)


def show_heads(records: Sequence[Record]) -> tuple[list[Group], list[Table]]:
    """Show accuracy in attention against the number of particles of a head."""
    tasks = gather(records, lambda record: clean(record.job.get("task")))
    groups, tables = [], []
    common = (*_SHARED, "n_components")
    for task, part in tasks.items():
        axis = Axis("particles M per head", log=True, ticks=budgets_of(part))
        charts = [
            sweep(
                f"heads-{slug(task)}-{slug(constants)}",
                f"Accuracy, {whose(constants).lower()}",
                ("n_components", axis),
                chosen,
                "accuracy",
                Axis("accuracy"),
                common=common,
            )
            for constants, chosen in by_constants(part).items()
        ]
        name = _NAMES.get(task, task)
        groups.append(Group(f"Attention on {name}", charts))
        tables.append(
            score_table(
                f"heads-{slug(task)}",
                f"Accuracy by number of particles M per head, {name}",
                part,
                ("n_components", "M"),
                "accuracy",
                common=common,
            )
        )
    return groups, tables


def _accuracies(
    key: str, records: Sequence[Record], published: Mapping[str, Mapping[str, Any]]
) -> Chart:
    rows = _ordered(records)
    names = list(dict.fromkeys(row.method for row in rows))
    layers = []
    for control, (series, ink, offset) in _SERIES.items():
        points = {
            names.index(row.method) + offset: point
            for row, part in rows.items()
            if row.control == control
            and (point := estimate(part, "accuracy")) is not None
        }
        layers.append(dots(series, points, ink))
    theirs = {
        float(place): float(published[name]["accuracy"])
        for place, name in enumerate(names)
        if name in published
    }
    layers.append(Dots("published", tuple(theirs.values()), tuple(theirs), ink=_QUOTED))
    return Chart(
        f"{key}-accuracy",
        "Accuracy of every row",
        Axis("accuracy"),
        Axis("", names=tuple(names)),
        tuple(layer for layer in layers if layer.values),
        "Means over seeds. Published values are single runs.",
    )


def _gains(
    key: str, records: Sequence[Record], published: Mapping[str, Mapping[str, Any]]
) -> Chart:
    """Kernel minus Vanilla and minus its controls, paired by seed."""
    parts = gather(
        records,
        lambda r: (clean(r.job.get("method")), clean(r.job.get("control") or "")),
    )
    maps = [name for name in MAPS if (f"kernel-{name}", "") in parts]
    layers = []
    for control, (series, ink, offset) in _SERIES.items():
        gaps = {}
        for i, name in enumerate(maps):
            rival = f"kernel-{name}" if control else f"vanilla-{name}"
            theirs = parts.get((rival, control), [])
            gap = paired(parts[f"kernel-{name}", ""], theirs, "accuracy")
            if gap.n:
                gaps[i + offset] = gap
        layers.append(dots(f"minus {series if control else 'Vanilla'}", gaps, ink))
    quoted = {
        float(place): published[f"kernel-{name}"]["accuracy"]
        - published[f"vanilla-{name}"]["accuracy"]
        for place, name in enumerate(maps)
        if f"kernel-{name}" in published
    }
    title = "minus Vanilla, published"
    layers.append(Dots(title, tuple(quoted.values()), tuple(quoted), ink=_QUOTED))
    return Chart(
        f"{key}-gains",
        "What Phase A gains",
        Axis("accuracy, Kernel minus other", zero=True),
        Axis("", names=tuple(maps)),
        tuple(layer for layer in layers if layer.values),
        "Paired by seed, ± 2 standard errors. A gain that is there against Vanilla but "
        "not against the norm-matched control is a gain of the norms alone.",
    )


def _table(
    key: str,
    caption: str,
    records: Sequence[Record],
    published: Mapping[str, Mapping[str, Any]],
) -> Table:
    columns: list[Header] = ["row", "constants"]
    for _, heading, better, theirs in _COLUMNS:
        columns.append(Column(heading, better=better))
        if theirs and published:
            columns.append(Column(f"{heading} published"))
    columns.append(Column("seeds"))
    body = []
    for row, part in _ordered(records).items():
        quoted = published.get(row.method, {})
        if row.control or row.constants != "paper":
            quoted = {}
        name = f"{row.method}, {row.control} control" if row.control else row.method
        cells: list[Cell | str | float] = [name, whose_short(row.constants)]
        for metric, _, _, theirs in _COLUMNS:
            cells.append(averaged(estimate(part, metric)))
            if theirs and published:
                shown = number(quoted.get(theirs, math.nan))
                cells.append(replace(shown, tone="paper"))
        body.append([*cells, len(part)])
    note = (
        "Mean ± standard error over seeds; ● marks the best mean of a column; "
        "published values, single runs, in italics."
    )
    return mark_best(tabulate(f"text-{key}", caption, columns, body, note))


def _ordered(records: Sequence[Record]) -> dict[Row, list[Record]]:
    """Sort rows as the paper does, each map's Vanilla, Kernel and controls together."""
    first = ["softmax", "favor-wqwk", "performer", "linformer"]
    pairs = [f"{kind}-{name}" for name in MAPS for kind in ("vanilla", "kernel")]
    order = {name: i for i, name in enumerate(first + pairs)}
    rows = by_row(records, _SHARED)
    by_place = sorted(rows, key=lambda row: order.get(row.method, len(order)))
    return {row: rows[row] for row in by_place}


_ORDER = (
    *("learned", "neighbours", "by-hand", "placed", "strewn"),
    *("vanilla", "averaging", "softmax"),
)


def phase_a_section(records: Sequence[Record]) -> Section:
    """Show every arm of the proof, and what learned ones have over the others."""
    records = [record for record in records if _is_sound(record)]
    tasks = gather(records, lambda record: record.job["task"])
    charts = [_arm_chart(task, part) for task, part in tasks.items()]
    tables = [_differences(records), *(_scores(t, part) for t, part in tasks.items())]
    return named_section("phase-a", [Group("", charts, shared=False)], tables)


def _is_sound(record: Record) -> bool:
    named = all(isinstance(record.job.get(key), str) for key in ("task", "method"))
    budget = record.job.get("n_components", "")
    counted = budget is None or (type(budget) is int and budget > 0)
    return named and counted and bool(values_of([record], "score"))


def _arms(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Sort records by name and number of particles of their arm, learned ones first."""

    def place(record: Record) -> tuple[int, str, int, str]:
        method, budget = record.job["method"], record.job["n_components"]
        known = _ORDER.index(method) if method in _ORDER else len(_ORDER)
        return known, method, budget or 0, clean(record.job.get("control", ""))

    def arm(record: Record) -> tuple[str, str]:
        job = record.job
        parts = [METHOD_TITLES.get(job["method"], job["method"]), job.get("control")]
        name = ", ".join(clean(part) for part in parts if part)
        return name, clean(job["n_components"] or "–")

    return gather(sorted(records, key=place), arm)


def _arm_chart(task: str, records: Sequence[Record]) -> Chart:
    arms = {
        f"{name}, M = {budget}" if budget != "–" else name: estimate(part, "score")
        for (name, budget), part in _arms(records).items()
    }
    points = [point for point in arms.values() if point is not None]
    layer = dots("score, ± 2 s.e.", dict(enumerate(points)), Ink(1, 0, 0))
    return Chart(
        f"phase-a-{slug(task)}",
        f"Every arm, {clean(task)}",
        Axis("score"),
        Axis("", names=tuple(name for name, point in arms.items() if point)),
        (layer,) if points else (),
        "Means over seeds ± 2 standard errors; differences are paired, so their errors "
        "are smaller.",
    )


def _scores(task: str, records: Sequence[Record]) -> Table:
    columns: list[Header] = ["arm", Column("M"), Column("score", better=1)]
    columns += [Column("score on validation rows"), Column("seeds")]
    body = [
        (
            name,
            budget,
            averaged(estimate(part, "score"), digits=4),
            averaged(estimate(part, "validation_score"), digits=4),
            len(part),
        )
        for (name, budget), part in _arms(records).items()
    ]
    caption = f"Every arm, {clean(task)}"
    note = "Mean ± standard error over seeds; ● marks the best mean."
    return mark_best(tabulate(f"phase-a-{slug(task)}", caption, columns, body, note))


def _differences(records: Sequence[Record]) -> Table:
    body = []
    for row in compare_arms(records):
        gap = Difference(row["mean"], row["standard_error"], row["n"])
        body.append(
            (
                clean(row["task"]),
                clean(row["method"]),
                number(row["n_components"], digits=0),
                clean(row["against"]),
                averaged(gap, signed=True, digits=4),
                number(row["p_value"], digits=5),
                number(row["n"], digits=0),
            )
        )
    return tabulate(
        "phase-a-differences",
        "Learned arms minus the others, paired by seed",
        (
            "task",
            "arm",
            Column("M"),
            "minus",
            *map(Column, ("difference", "p", "seeds")),
        ),
        body,
        "Mean difference ± standard error; p is of Student’s paired test, two-sided. "
        "With Phase A of the default, noise alone is the vanilla arm.",
    )
