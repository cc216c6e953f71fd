"""The published numbers, and what they say about themselves."""

import csv
import math
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from coulomb._support.errors import unknown_name
from coulomb._support.stats import PowerLaw, fit_power_law, standard_error

TASKS = ("sst2", "qqp", "rotten_tomatoes")
TABLES = (*TASKS, "runtime", "power_laws", "datasets", "claims")
MAPS = ("favor", "elu", "softplus", "sigmoid2", "softmaxfeat", "cos2", "porf-softplus")
_DIGITS = 5e-5  # half of the last printed digit
# Rows of the splits that are reported on; of QQP, of the subset that is used here.
TEST_ROWS = {"sst2": 872, "qqp": 8507, "rotten_tomatoes": 1066}


class Check(NamedTuple):
    """One thing the published tables say about themselves."""

    title: str
    found: str
    confirmed: bool


@cache
def _read(name: str) -> list[dict[str, Any]]:
    source = files("coulomb.experiments").joinpath("paper_values", f"{name}.csv")
    lines = list(csv.DictReader(source.read_text(encoding="utf-8").splitlines()))
    if name == "claims":  # quoted as printed
        return lines
    return [{key: _number(text) for key, text in line.items()} for line in lines]


def paper_table(name: str) -> list[dict[str, Any]]:
    """Read a published table, or the sentences that can be tested ("claims").

    Examples
    --------
    >>> len(paper_table("sst2")), paper_table("sst2")[0]["accuracy"]
    (18, 0.805)
    """
    if name not in TABLES:
        raise unknown_name("table", name, TABLES)
    return [dict(line) for line in _read(name)]


def paper_value(table: str, row: str, metric: str) -> float:
    """Look up one published number.

    Examples
    --------
    >>> paper_value("qqp", "kernel-softmaxfeat", "log_loss")
    0.4354
    """
    for line in paper_table(table):
        if line["row"] == row:
            return float(line[metric])
    raise unknown_name("row", row, [line["row"] for line in paper_table(table)])


def kernel_minus_vanilla(task: str, metric: str = "accuracy") -> tuple[float, float]:
    """Average the gain of Phase A over the seven feature maps.

    Examples
    --------
    >>> mean, error = kernel_minus_vanilla("qqp")
    >>> round(mean, 4), round(error, 4)
    (0.0062, 0.0016)
    """
    gaps = [
        paper_value(task, f"kernel-{m}", metric)
        - paper_value(task, f"vanilla-{m}", metric)
        for m in MAPS
    ]
    return float(np.mean(gaps)), standard_error(np.array(gaps))


def is_multiple(value: float, rows: int) -> bool:
    """Whether a printed accuracy can be a count of right answers over `rows`.

    Examples
    --------
    >>> is_multiple(0.8050, 872), is_multiple(0.8044, 872)
    (True, False)
    """
    return abs(round(value * rows) / rows - value) <= _DIGITS * 1.001


def impossible_calibration(task: str) -> list[str]:
    """List the rows whose ECE exceeds the root of their Brier score, which none can.

    By Jensen's inequality `ECE <= mean |p - correct| <= sqrt(mean (p - correct)^2)`,
    and for two classes the last is the root of the Brier score.

    Examples
    --------
    >>> len(impossible_calibration("qqp"))
    18
    """
    return [
        line["row"]
        for line in paper_table(task)
        if line["ece"] - _DIGITS > math.sqrt(line["brier"] + _DIGITS)
    ]


def published_seconds() -> dict[str, dict[float, float]]:
    """List the published seconds by method and number of samples."""
    curves: dict[str, dict[float, float]] = {}
    for line in paper_table("runtime"):
        curves.setdefault(line["method"], {})[line["n_samples"]] = line["seconds"]
    return curves


def published_power_laws() -> dict[str, tuple[PowerLaw, dict[str, Any]]]:
    """Fit the published seconds again, beside the published fits."""
    printed = {line["method"]: line for line in paper_table("power_laws")}
    return {
        method: (fit_power_law(list(curve), list(curve.values())), printed[method])
        for method, curve in published_seconds().items()
    }


def check_paper() -> list[Check]:
    """Check the published tables against themselves."""
    return list(_checks())


def _checks() -> Iterator[Check]:
    for task in ("sst2", "rotten_tomatoes"):
        rows = TEST_ROWS[task]
        values = [line["accuracy"] for line in paper_table(task)]
        hits = sum(is_multiple(value, rows) for value in values)
        yield Check(
            f"{task}: every accuracy is a multiple of 1/{rows}, a single run, "
            "not a mean over three seeds" + (" (dev split)" * (task == "sst2")),
            f"{hits} of {len(values)}; one in three means of three runs is one",
            hits == len(values),
        )
    for task in TASKS:
        bad = impossible_calibration(task)
        yield Check(
            f"{task}: ECE above the root of the Brier score, which no ECE can be",
            f"{len(bad)} of 18 rows",
            bool(bad),
        )
    same = [
        f"{task} {line['row']}"
        for task in TASKS
        for line in paper_table(task)
        if line["log_loss"] == line["accuracy"]
    ]
    title = "log loss printed equal to accuracy"
    yield Check(title, ", ".join(same) or "none", bool(same))
    for task in TASKS:
        mean, error = kernel_minus_vanilla(task)
        yield Check(
            f"{task}: the mean gain of Phase A is within two standard errors of 0",
            f"{mean:+.4f} ± {error:.4f} over seven maps",
            abs(mean) < 2 * error,
        )
    best = max(paper_table("qqp"), key=lambda line: line["accuracy"])["row"]
    yield Check(
        "qqp: the text calls softmax the strongest; its own table has another best "
        "accuracy",
        f"best accuracy: {best}",
        best != "softmax",
    )


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
