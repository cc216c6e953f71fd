"""Tidy tables of every experiment, as rows and as CSV."""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from coulomb._support.archive import write_whole
from coulomb.experiments.records import Record
from coulomb.experiments.summary import (
    Summary,
    compare_controls,
    compare_vanilla,
    power_laws,
    summarise,
)

# What is worth a table of its own.
METRICS = {
    "noise": ("expected_accuracy", "accuracy", "f1", "bayes_accuracy", "seconds.total"),
    "strength": ("expected_accuracy", "accuracy", "f1", "bayes_accuracy"),
    "budget": ("expected_accuracy", "accuracy", "f1", "bayes_accuracy"),
    "runtime": ("seconds.total", "seconds.cpu", "expected_accuracy"),
    "text": ("accuracy", "mcc", "log_loss", "brier", "ece", "ece_paper", "roc_auc"),
    "phase-a": ("score", "validation_score", "seconds.cpu"),
    "meanfield": ("w1_exponent", "w2_exponent", "observable_exponent"),
    "deviations": ("slope", "rate", "free_energy", "free_energy_limit"),
}


def experiment_tables(
    name: str, records: Sequence[Record]
) -> dict[str, list[dict[str, Any]]]:
    """Make the tables of an experiment."""
    metrics = METRICS.get(name, ("accuracy",))
    summary = [
        {"metric": metric, **row}
        for metric in metrics
        for row in as_table(summarise(records, metric))
    ]
    in_text = [r for r in records if "task" in r.job]
    on_vectors = [r for r in records if "task" not in r.job]
    judged = "score" if name == "phase-a" else "accuracy"
    tables = {
        "summary": summary,
        "controls": compare_controls(on_vectors, "expected_accuracy")
        + compare_controls(in_text, judged),
        "vanilla": compare_vanilla(in_text, judged),
    }
    if name == "runtime":
        tables["power_laws"] = power_laws(records)
    return {title: rows for title, rows in tables.items() if rows}


def write_tables(folder: Path, found: Mapping[str, Sequence[Record]]) -> list[Path]:
    """Write the tables of all experiments as CSV."""
    written = []
    for name, records in found.items():
        for title, rows in experiment_tables(name, records).items():
            path = Path(folder) / f"{name}-{title.replace('_', '-')}.csv"
            write_csv(path, rows)
            written.append(path)
    return written


def as_table(summaries: Iterable[Summary]) -> list[dict[str, Any]]:
    """Flatten summaries to plain rows."""
    return [
        {**s.row, **{k: v for k, v in s._asdict().items() if k != "row"}}
        for s in summaries
    ]


def table_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as CSV, with the columns in order of their first appearance.

    Examples
    --------
    >>> print(table_text([{"n": 2, "mean": 0.123456789}]), end="")
    n,mean
    2,0.123457
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([[_cell(row.get(name)) for name in names] for row in rows])
    return out.getvalue()


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a CSV file, whole or not at all."""
    text = table_text(rows)
    write_whole(Path(path), lambda temporary: temporary.write_text(text))


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value
