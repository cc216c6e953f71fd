"""The section on Phase A: learned particles against every control, with p-values."""

from collections.abc import Sequence

from coulomb._support.stats import Difference
from coulomb.experiments.phase_a import compare_arms
from coulomb.experiments.records import Record
from coulomb.experiments.summary import METHOD_TITLES
from coulomb.report.chart import Axis, Chart, Dots, Ink
from coulomb.report.rows import averaged, clean, estimate, metric, slug
from coulomb.report.sections import Group, Section
from coulomb.report.tables import Column, Table, mark_best, number, text

_SCORE = metric("score")
_VALIDATION = metric("validation_score")
_INK = Ink(1, 0, 0)
_ORDER = (
    *("learned", "neighbours", "by-hand", "placed", "strewn"),
    *("vanilla", "averaging", "softmax"),
)


def phase_a_section(records: Sequence[Record]) -> Section:
    """Show every arm of the proof, and what learned ones have over the others."""
    records = [record for record in records if _is_sound(record)]
    tasks: dict[str, list[Record]] = {}
    for record in records:
        tasks.setdefault(record.job["task"], []).append(record)
    charts = [_chart(task, part) for task, part in tasks.items()]
    tables = [_differences(records), *(_scores(t, part) for t, part in tasks.items())]
    return Section(
        "phase-a",
        "Does Phase A learn?",
        "Phase A",
        (
            "Learned particles beside the same norms without alignment, noise alone, "
            "particles as they were drawn, plain averaging and softmax attention. For "
            "tags, windows that no label chose: windows (around the token), "
            "random-windows (at random shifts) and by-hand (before and after it); for "
            "pairs, windows are particles blind to the part whose norms no label "
            "chose. The score is the accuracy, or the F1 of entities, on rows that "
            "chose nothing.",
        ),
        (Group("", tuple(charts), shared=False),),
        tuple(tables),
    )


def _is_sound(record: Record) -> bool:
    named = all(isinstance(record.job.get(key), str) for key in ("task", "method"))
    budget = record.job.get("n_components", "")
    counted = budget is None or (type(budget) is int and budget > 0)
    return named and counted and _SCORE(record) is not None


def _arms(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Sort records by name and number of particles of their arm, learned ones first."""
    arms: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(records, key=_place):
        job = record.job
        parts = [METHOD_TITLES.get(job["method"], job["method"]), job.get("control")]
        name = ", ".join(clean(part) for part in parts if part)
        arms.setdefault((name, clean(job["n_components"] or "–")), []).append(record)
    return arms


def _place(record: Record) -> tuple[int, str, int, str]:
    job = record.job
    known = _ORDER.index(job["method"]) if job["method"] in _ORDER else len(_ORDER)
    return known, job["method"], job["n_components"] or 0, clean(job.get("control", ""))


def _chart(task: str, records: Sequence[Record]) -> Chart:
    arms = {
        f"{name}, M = {budget}" if budget != "–" else name: estimate(map(_SCORE, part))
        for (name, budget), part in _arms(records).items()
    }
    points = {name: point for name, point in arms.items() if point is not None}
    layer = Dots(
        "score, ± 2 s.e.",
        tuple(point.mean for point in points.values()),
        tuple(float(i) for i in range(len(points))),
        tuple(2 * point.standard_error for point in points.values()),
        _INK,
    )
    return Chart(
        f"phase-a-{slug(task)}",
        f"Every arm, {clean(task)}",
        Axis("score"),
        Axis("", names=tuple(points)),
        (layer,) if points else (),
        "Means over seeds ± 2 standard errors; differences are paired, so their errors "
        "are smaller.",
    )


def _scores(task: str, records: Sequence[Record]) -> Table:
    columns = (
        Column("arm", numeric=False),
        Column("M"),
        Column("score", better=1),
        Column("score on validation rows"),
        Column("seeds"),
    )
    body = tuple(
        (
            text(name),
            text(budget),
            averaged(estimate(map(_SCORE, part)), digits=4),
            averaged(estimate(map(_VALIDATION, part)), digits=4),
            number(len(part), digits=0),
        )
        for (name, budget), part in _arms(records).items()
    )
    caption = f"Every arm, {clean(task)}"
    note = "Mean ± standard error over seeds; ● marks the best mean."
    return mark_best(Table(f"phase-a-{slug(task)}", caption, columns, body, note))


def _differences(records: Sequence[Record]) -> Table:
    columns = (
        Column("task", numeric=False),
        Column("arm", numeric=False),
        Column("M"),
        Column("minus", numeric=False),
        Column("difference"),
        Column("p"),
        Column("seeds"),
    )
    body = []
    for row in compare_arms(records):
        gap = Difference(row["mean"], row["standard_error"], row["n"])
        body.append(
            (
                text(clean(row["task"])),
                text(clean(row["method"])),
                number(row["n_components"], digits=0),
                text(clean(row["against"])),
                averaged(gap, signed=True, digits=4),
                number(row["p_value"], digits=5),
                number(row["n"], digits=0),
            )
        )
    return Table(
        "phase-a-differences",
        "Learned arms minus the others, paired by seed",
        columns,
        tuple(body),
        "Mean difference ± standard error; p is of Student’s paired test, two-sided. "
        "With Phase A of the default, noise alone is the vanilla arm.",
    )
