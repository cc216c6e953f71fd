"""The section on Phase A: learned particles against every control, with p-values."""

from collections.abc import Sequence

from coulomb._support.stats import Difference
from coulomb.experiments.phase_a import compare_arms
from coulomb.experiments.records import Record
from coulomb.experiments.summary import METHOD_TITLES, gather, values_of
from coulomb.report.chart import Axis, Chart, Ink
from coulomb.report.rows import averaged, clean, dots, estimate, slug
from coulomb.report.sections import Group, Section, named_section
from coulomb.report.tables import Column, Header, Table, mark_best, number, tabulate

_ORDER = (
    *("learned", "neighbours", "by-hand", "placed", "strewn"),
    *("vanilla", "averaging", "softmax"),
)


def phase_a_section(records: Sequence[Record]) -> Section:
    """Show every arm of the proof, and what learned ones have over the others."""
    records = [record for record in records if _is_sound(record)]
    tasks = gather(records, lambda record: record.job["task"])
    charts = [_chart(task, part) for task, part in tasks.items()]
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


def _chart(task: str, records: Sequence[Record]) -> Chart:
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
