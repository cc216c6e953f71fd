"""From records to tidy tables: means, paired differences and power laws."""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from coulomb._support.archive import harmless, write_bytes
from coulomb._support.stats import Difference, fit_power_law, mean_difference
from coulomb.experiments.records import Job, Record

Item = TypeVar("Item")
# What tells repetitions of one row apart; designs beyond the paper's are repetitions.
REPETITION = ("seed", "trial", "design")
MATCHED = ("noise", "n_samples", "n_features", "n_components", "task")
_ROW = ("task", "constants", "n_components", "method")  # of a table of text
_PAPER_DESIGN = 42
METHOD_TITLES = {
    "logistic": "logistic regression",
    "svm": "RBF SVM",
    "svm-cv": "RBF SVM, bandwidth by cross-validation",
    "fixed": "random Fourier features",
    "orthogonal": "orthogonal random features",
    "multiple-kernels": "multiple-kernel learning",
    "importance": "importance sampling",
    "langevin": "learned particles",
    # Arms of Phase A: windows around the token, and at shifts drawn at random.
    "placed": "windows",
    "strewn": "random-windows",
}
CONTROLS = {
    "norm-matched": "control: same norms, no alignment",
    "noise-only": "control: noise only",
}
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


class Summary(NamedTuple):
    """One row of a table over its repetitions."""

    row: Job  # everything of the job but its repetition
    title: str
    mean: float
    standard_error: float
    standard_deviation: float
    n: int


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


def values_of(records: Iterable[Record], metric: str) -> list[tuple[Record, float]]:
    """Pick a number out of every record that has it."""
    kind, _, name = metric.rpartition(".")
    found = []
    for record in records:
        content = record.seconds if kind == "seconds" else record.metrics
        if content.get(name) is not None:
            found.append((record, float(content[name])))
    return found


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
    for row, values in _by_row(
        (row_of(record) | {"split": record.split}, value)
        for record, value in values_of(records, metric)
    ):
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        error = deviation / math.sqrt(len(values))
        mean = float(np.mean(values))
        found.append(Summary(row, row_title(row), mean, error, deviation, len(values)))
    return found


def _by_row(pairs: Iterable[tuple[Job, Item]]) -> list[tuple[Job, list[Item]]]:
    """Gather what belongs to equal rows, in order of first appearance."""
    groups: dict[str, tuple[Job, list[Item]]] = {}
    for row, item in pairs:
        groups.setdefault(json.dumps(row, sort_keys=True), (row, []))[1].append(item)
    return list(groups.values())


def select(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """Keep the records whose job has these entries."""

    def matches(job: Job) -> bool:
        for name, value in wanted.items():
            allowed = value if isinstance(value, tuple | list) else (value,)
            if job.get(name) not in allowed:
                return False
        return True

    return [record for record in records if matches(record.job)]


def by_trial(
    records: Iterable[Record], metric: str, *, level: Sequence[str] = ()
) -> dict[tuple[Any, ...], float]:
    """Average a metric over everything but the trial, and the entries of `level`."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for record, value in values_of(records, metric):
        job = record.job
        place = (job.get("trial"), job.get("design"), *(job.get(n) for n in level))
        groups.setdefault(place, []).append(value)
    return {place: float(np.mean(values)) for place, values in groups.items()}


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
    trials: dict[tuple[Any, ...], list[float]] = {}
    for place in a:
        if place in b:
            trials.setdefault(place[:2], []).append(a[place] - b[place])
    return mean_difference(float(np.mean(trials[t])) for t in sorted(trials, key=str))


def compare_controls(records: Sequence[Record], metric: str) -> list[dict[str, Any]]:
    """Compare every learned row with its two controls, trial by trial."""
    found = []
    controls = [record for record in records if record.job.get("control")]
    for row, control in _by_row((row_of(record), record) for record in controls):
        alone = row | {"control": None}
        gap = paired([r for r in records if row_of(r) == alone], control, metric)
        title = row_title(alone)
        found.append({**row, "title": title, "metric": metric, **gap._asdict()})
    return found


def compare_vanilla(records: Sequence[Record], metric: str) -> list[dict[str, Any]]:
    """Compare every Kernel row of a text task with its Vanilla row, seed by seed."""
    rows = {
        tuple(r.job[name] for name in _ROW if name in r.job): r.job
        for r in records
        if str(r.job.get("method")).startswith("kernel-") and not r.job.get("control")
    }
    found = []
    for job in rows.values():
        feature_map = job["method"].removeprefix("kernel-")
        row = {name: job[name] for name in _ROW if name in job and name != "method"}
        same = select(records, control=None, **row)
        kernel, vanilla = (
            select(same, method=f"{kind}-{feature_map}")
            for kind in ("kernel", "vanilla")
        )
        gap = paired(kernel, vanilla, metric)
        if gap.n:
            row |= {"feature_map": feature_map, "metric": metric}
            found.append({**row, **gap._asdict()})
    return found


def power_laws(
    records: Sequence[Record], metric: str = "seconds.total"
) -> list[dict[str, Any]]:
    """Fit a power law in the number of samples to every row of `runtime`."""
    found = []
    for row, points in _by_row(
        (
            {name: part for name, part in each.row.items() if name != "n_samples"},
            (each.row["n_samples"], each.mean),
        )
        for each in summarise(select(records, control=None), metric)
    ):
        if len(points) >= 3:
            law = fit_power_law(*zip(*sorted(points), strict=True))
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
    writer.writerow(map(harmless, names))
    writer.writerows([[_cell(row.get(name)) for name in names] for row in rows])
    return out.getvalue()


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a CSV file, whole or not at all."""
    write_bytes(Path(path), table_text(rows).encode())


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return harmless(value) if isinstance(value, str) else value
