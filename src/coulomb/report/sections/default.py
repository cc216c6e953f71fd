"""Tables of experiments that have no section of their own."""

from collections.abc import Sequence

from coulomb.experiments.records import Record
from coulomb.experiments.summary import gather, values_of
from coulomb.report.rows import (
    averaged,
    by_row,
    clean,
    estimate,
    slug,
    varying,
)
from coulomb.report.sections import Section
from coulomb.report.tables import Cell, Column, Header, Table, tabulate

_MOST_ROWS = 500


def general_section(records: Sequence[Record]) -> Section:
    """Show every metric of every row."""
    name = clean(records[0].experiment)
    title = name.capitalize()
    tables = metric_tables(name, records)
    return Section(f"x-{slug(name)}", title, title, tables=tables)


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
        (
            row.label,
            row.constants or "–",
            *(mean(key, part) for key in shown),
            len(part),
        )
        for row, part in by_row(records, constant - {"method", "constants"}).items()
    ]
    names = [Column(clean(key).replace("_", " ")) for key in shown]
    columns: list[Header] = ["row", "constants", *names, Column("records")]
    note = "Mean ± standard error over trials."
    if len(rows) > _MOST_ROWS:
        note += f" The first {_MOST_ROWS} of {len(rows)} rows."
    key, caption = f"{slug(name)}-metrics", f"Metrics of {name}"
    return [tabulate(key, caption, columns, rows[:_MOST_ROWS], note)]
