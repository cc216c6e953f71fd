"""From records to tidy tables: means, paired differences and power laws."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from coulomb._support.archive import csv_text, write_bytes
from coulomb._support.stats import Difference, fit_power_law, mean_difference
from coulomb.experiments.records import (
    COMPRESSED,
    PLANS,
    Job,
    Record,
    write_compressed,
)

Item = TypeVar("Item")
Key = TypeVar("Key")
# What tells repetitions of one row apart; designs beyond the paper's are repetitions.
REPETITION = ("seed", "trial", "design")
MATCHED = ("noise", "n_samples", "n_features", "n_components", "task")
_ROW = ("task", "constants", "n_components", "method")  # of a table of text
_PAPER_DESIGN = 42
METHOD_TITLES: dict[str, str] = PLANS["titles"]
CONTROLS: dict[str, str] = PLANS["controls"]
CALIBRATION = ("log_loss", "brier", "ece")
METRICS: dict[str, list[str]] = PLANS["metrics"]


class Summary(NamedTuple):
    """One row of a table over its repetitions."""

    row: Job  # everything of the job but its repetition
    title: str
    mean: float
    standard_error: float
    standard_deviation: float
    n: int


def gather(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Put together what has the same key, in the order of first appearance.

    Examples
    --------
    >>> gather([1, 2, 3], lambda number: number % 2)
    {1: [1, 3], 0: [2]}
    """
    parts: dict[Key, list[Item]] = {}
    for item in items:
        parts.setdefault(key(item), []).append(item)
    return parts


def row_of(record: Record) -> Job:
    """Take away what tells repetitions apart."""
    row = {name: part for name, part in record.job.items() if name not in REPETITION}
    if record.job.get("design", _PAPER_DESIGN) != _PAPER_DESIGN:
        row["design"] = "fresh"
    return row


def row_title(job: Mapping[str, Any]) -> str:
    """Name a row for people.

    Examples
    --------
    >>> row_title({"method": "langevin", "constants": "paper", "strength": 0.5})
    "learned particles, the paper's constants, lambda = 0.5"
    >>> row_title({"method": "svm", "constants": "paper", "gamma": 0.5})
    'RBF SVM, gamma = 0.5'
    """
    method = str(job["method"])
    parts = [METHOD_TITLES.get(method, method)]
    if "gamma" in job:
        parts.append(f"gamma = {job['gamma']:g}")
    if method in ("langevin", "importance", "fixed"):
        whose = {"paper": "the paper's constants", "default": "our defaults"}
        parts.append(whose.get(str(job.get("constants")), str(job.get("constants"))))
    if method == "langevin" and "strength" in job:
        parts.append(f"lambda = {job['strength']:g}")
        if job.get("exponent"):
            parts.append(f"Riesz s = {job['exponent']:g}")
    if job.get("control"):
        parts.append(CONTROLS.get(str(job["control"]), str(job["control"])))
    return ", ".join(parts)


def as_number(value: Any) -> float | None:
    """Take finite numbers only: records may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def values_of(records: Iterable[Record], metric: str) -> list[tuple[Record, float]]:
    """Pick a number out of every record that has it; "seconds.cpu" is a time."""
    kind, _, name = metric.rpartition(".")
    pairs = (
        (r, as_number((r.seconds if kind == "seconds" else r.metrics).get(name)))
        for r in records
    )
    return [(record, value) for record, value in pairs if value is not None]


def summarise(records: Iterable[Record], metric: str) -> list[Summary]:
    """Average a metric over the repetitions of every row and split.

    Examples
    --------
    >>> def made(trial, accuracy):
    ...     job = {"method": "svm", "trial": trial, "seed": trial}
    ...     return Record("noise", job, "", "test", {"accuracy": accuracy}, {}, {}, "1")
    >>> found = summarise([made(0, 0.6), made(1, 0.8)], "accuracy")[0]
    >>> round(found.mean, 3), round(found.standard_error, 3), found.n
    (0.7, 0.1, 2)
    """
    found = []
    pairs = (
        (row_of(record) | {"split": record.split}, value)
        for record, value in values_of(records, metric)
    )
    for part in gather(pairs, lambda pair: _key(pair[0])).values():
        row, values = part[0][0], [value for _, value in part]
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        error = deviation / math.sqrt(len(values))
        mean = float(np.mean(values))
        found.append(Summary(row, row_title(row), mean, error, deviation, len(values)))
    return found


def mean_of(records: Iterable[Record], metric: str) -> float:
    """Average a metric over all records that have it; NaN if none has."""
    values = [value for _, value in values_of(records, metric)]
    return float(np.mean(values)) if values else math.nan


def _key(row: Job) -> str:
    return json.dumps(row, sort_keys=True)


def select(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """Keep the records whose job has these entries."""
    allowed = {
        name: value if isinstance(value, tuple | list) else (value,)
        for name, value in wanted.items()
    }
    return [r for r in records if all(r.job.get(k) in x for k, x in allowed.items())]


def by_trial(
    records: Iterable[Record], metric: str, *, level: Sequence[str] = ()
) -> dict[tuple[Any, ...], float]:
    """Average a metric over everything but the trial, and the entries of `level`."""
    parts = gather(
        values_of(records, metric),
        lambda pair: tuple(pair[0].job.get(n) for n in ("trial", "design", *level)),
    )
    return {
        place: float(np.mean([value for _, value in part]))
        for place, part in parts.items()
    }


def shared_trials(metric: str, *sets: Iterable[Record]) -> list[tuple[float, ...]]:
    """List the metric of several sets of records at each trial that all have."""
    found = [by_trial(records, metric) for records in sets]
    return [
        tuple(each[trial] for each in found)
        for trial in found[0]
        if all(trial in each for each in found)
    ]


def paired(
    ours: Iterable[Record],
    theirs: Iterable[Record],
    metric: str,
    *,
    match: Sequence[str] = MATCHED,
) -> Difference:
    """Compare two sets of records trial by trial.

    Records are compared at the same trial and the same entries of `match`; differences
    are then averaged inside each trial, for trials of different noise share random
    numbers, so that only trials count as repetitions.
    """
    a, b = (by_trial(rows, metric, level=match) for rows in (ours, theirs))
    trials = gather((place for place in a if place in b), lambda place: place[:2])
    return mean_difference(
        float(np.mean([a[place] - b[place] for place in trials[trial]]))
        for trial in sorted(trials, key=str)
    )


def without_phase_a(constants: str) -> str:
    """Name the constants of rows without Phase A: the drift is nothing to them.

    Examples
    --------
    >>> without_phase_a("paper-plain"), without_phase_a("default")
    ('paper', 'default')
    """
    return "paper" if constants == "paper-plain" else constants


def compare_controls(records: Sequence[Record], metric: str) -> list[dict[str, Any]]:
    """Compare every learned row with its two controls, trial by trial."""
    found = []
    controls = [record for record in records if record.job.get("control")]
    for control in gather(controls, lambda record: _key(row_of(record))).values():
        row = row_of(control[0])
        alone = row | {"control": None}
        gap = paired([r for r in records if row_of(r) == alone], control, metric)
        if gap.n:
            title = row_title(alone)
            found.append({**row, "title": title, "metric": metric, **gap._asdict()})
    return found


def compare_vanilla(records: Sequence[Record], metric: str) -> list[dict[str, Any]]:
    """Compare every Kernel row of a text task with its Vanilla row, seed by seed."""
    found = []
    rows = gather(
        select(records, control=None),
        lambda r: tuple((name, r.job[name]) for name in _ROW if name in r.job),
    )
    for key, kernel in rows.items():
        row = dict(key)
        kind, _, feature_map = str(row.pop("method", "")).partition("-")
        alike = row | {"constants": without_phase_a(row["constants"])}
        vanilla = rows.get((*alike.items(), ("method", f"vanilla-{feature_map}")), [])
        gap = paired(kernel, vanilla, metric)
        if kind == "kernel" and gap.n:
            row |= {"feature_map": feature_map, "metric": metric}
            found.append({**row, **gap._asdict()})
    return found


def power_laws(
    records: Sequence[Record], metric: str = "seconds.total"
) -> list[dict[str, Any]]:
    """Fit a power law in the number of samples to every row of `runtime`."""
    found = []
    summaries = summarise(select(records, control=None), metric)
    for part in gather(
        summaries, lambda each: _key(each.row | {"n_samples": None})
    ).values():
        if len(part) >= 3:
            points = sorted((each.row["n_samples"], each.mean) for each in part)
            law = fit_power_law(*zip(*points, strict=True))
            row = {k: v for k, v in part[0].row.items() if k != "n_samples"}
            found.append({**row, "title": row_title(row), **law._asdict()})
    return found


def experiment_tables(
    name: str, records: Sequence[Record]
) -> dict[str, list[dict[str, Any]]]:
    """Make the tables of an experiment."""
    summary = [
        {"metric": metric, **each.row, **each._asdict()}
        for metric in METRICS.get(name, ("accuracy",))
        for each in summarise(records, metric)
    ]
    for line in summary:
        del line["row"]
    in_text = [r for r in records if "task" in r.job]
    on_vectors = [r for r in records if "task" not in r.job]
    judged = ("score",) if name == "phase-a" else ("accuracy", *CALIBRATION)
    controls = compare_controls(on_vectors, "expected_accuracy")
    vanilla = []
    for metric in judged:
        controls += compare_controls(in_text, metric)
        vanilla += compare_vanilla(in_text, metric)
    tables = {"summary": summary, "controls": controls, "vanilla": vanilla}
    if name == "runtime":
        tables["power_laws"] = power_laws(records)
    return {title: rows for title, rows in tables.items() if rows}


def write_tables(folder: Path, found: Mapping[str, Sequence[Record]]) -> list[Path]:
    """Write the tables of all experiments as CSV, and their records compressed."""
    written = []
    for name, records in found.items():
        written.append(Path(folder) / "records" / f"{name}{COMPRESSED}")
        write_compressed(written[-1], records)
        for title, rows in experiment_tables(name, records).items():
            path = Path(folder) / f"{name}-{title.replace('_', '-')}.csv"
            write_csv(path, rows)
            written.append(path)
    return written


def table_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as CSV, with the columns in order of their first appearance.

    Examples
    --------
    >>> print(table_text([{"n": 2, "mean": 0.123456789}]), end="")
    n,mean
    2,0.123457
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    return csv_text(names, ([_cell(row.get(name)) for name in names] for row in rows))


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a CSV file, whole or not at all."""
    write_bytes(Path(path), table_text(rows).encode())


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value
