"""Claims about text classification."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coulomb._support.stats import Difference, mean_difference
from coulomb.experiments.claims import Finding, Test, gain, verdict, versus, words
from coulomb.experiments.paper import MAPS, TASKS, paper_value
from coulomb.experiments.records import Record
from coulomb.experiments.summary import (
    gather,
    mean_of,
    paired,
    select,
    shared_trials,
)
from coulomb.text.evaluate import LOWER_IS_BETTER

_Q_EQUALS_K = tuple(f"{kind}-{name}" for name in MAPS for kind in ("vanilla", "kernel"))
_BAGS = ("unigrams", "nb-bigrams")


def _rows(
    records: Sequence[Record], task: str, constants: str, method: Any, **wanted: object
) -> list[Record]:
    """Pick rows of a task, by default no controls."""
    chosen = {"control": None, "method": method} | wanted
    return select(records, task=task, constants=constants, **chosen)


def _map_rows(
    records: Sequence[Record], task: str, constants: str
) -> list[list[Record]]:
    """Pick the Vanilla and the Kernel row of each map, in turn."""
    return [_rows(records, task, constants, name) for name in _Q_EQUALS_K]


def _better(
    ours: Sequence[Record], theirs: Sequence[Record], metric: str
) -> Difference:
    """Pair by seed; a difference above zero is for the better."""
    difference = paired(ours, theirs, metric)
    sign = -1 if metric in LOWER_IS_BETTER else 1
    return difference._replace(mean=sign * difference.mean)


def _mean_gain(task: str) -> Test:
    """Test that Kernel rows are better than Vanilla rows, on average over the maps."""

    def test(records: Sequence[Record], constants: str) -> Finding | None:
        trials = shared_trials("accuracy", *_map_rows(records, task, constants))
        gaps = [float(np.mean(np.subtract(t[1::2], t[::2]))) for t in trials]
        return gain(mean_difference(gaps), "Mean over maps, paired by seed.")

    return test


def _gain_of(task: str, row: str, metric: str) -> Test:
    """Test that a Kernel row is better than its Vanilla row."""

    def test(records: Sequence[Record], constants: str) -> Finding | None:
        ours = _rows(records, task, constants, row)
        theirs = _rows(records, task, constants, row.replace("kernel", "vanilla", 1))
        told = [
            f"{name} {words(paired(ours, control, metric))}"
            for name in ("norm-matched", "noise-only")
            if (control := _rows(records, task, constants, row, control=name))
        ]
        note = f"Minus its controls: {', '.join(told)}." if told else ""
        means = versus(ours, theirs, metric)
        return gain(_better(ours, theirs, metric), note, ours=means)

    return test


def _best_of(task: str, row: str, metric: str, among: Sequence[str] = ()) -> Test:
    """Test that a row is better than the best other one."""

    def test(records: Sequence[Record], constants: str) -> Finding | None:
        rows = select(records, task=task, constants=constants, control=None)
        parts = gather(rows, lambda record: record.job["method"])
        means = {
            name: mean
            for name, part in parts.items()
            if name in (among or set(parts).difference(_BAGS))
            and not np.isnan(mean := mean_of(part, metric))
        }
        if row not in means or len(means) < 2:
            return None
        pick = min if metric in LOWER_IS_BETTER else max
        rival = pick((name for name in means if name != row), key=means.__getitem__)
        ours = f"{means[row]:.4f}; best other {rival} {means[rival]:.4f}"
        difference = _better(parts[row], parts[rival], metric)
        return gain(difference, "Against the best other row.", ours=ours)

    return test


def _doubles_training_time(records: Sequence[Record], constants: str) -> Finding | None:
    ratios = []
    for task in TASKS:
        rows = _map_rows(records, task, constants)
        for vanilla, kernel in zip(rows[::2], rows[1::2], strict=True):
            pairs = shared_trials("seconds.cpu", kernel, vanilla)
            ratios += [ours / theirs for ours, theirs in pairs]
    if len(ratios) < 2:
        return None
    middle = float(np.median(ratios))
    return Finding(f"{middle:.2f} times (median)", None, verdict(1.5 <= middle <= 2.5))


def _beats_bags(task: str) -> Test:
    """Test that the best published row is better than bags of words trained here."""

    def test(records: Sequence[Record], constants: str) -> Finding | None:
        bags = select(records, task=task, method=_BAGS)
        if not bags:
            return None
        rows = ("softmax", *_Q_EQUALS_K)
        best = max(paper_value(task, name, "accuracy") for name in rows)
        top = max(bags, key=lambda record: record.metrics["accuracy"])
        gap = best - top.metrics["accuracy"]
        ours = f"{top.job['method']} {top.metrics['accuracy']:.4f} on {top.split}"
        return Finding(ours, Difference(gap, float("nan"), 1), verdict(gap > 0))

    return test


def _objective_sees_labels(records: Sequence[Record], constants: str) -> Finding | None:
    rows = select(records, method="label-blindness", constants=constants)
    if not rows:
        return None
    cosine = mean_of(rows, "cosine")
    note = "Cosine of the gradients with true and with shuffled labels; "
    note += "1 is label-blind."
    return Finding(f"{cosine:.3f}", None, verdict(cosine < 0.5), note)


_SOFTMAXFEAT = "kernel-softmaxfeat"

TESTS: dict[str, Test] = {
    **{f"kernel-helps-{task}": _mean_gain(task) for task in TASKS},
    "best-accuracy-sst2": _best_of("sst2", "kernel-porf-softplus", "accuracy"),
    "best-mcc-sst2": _best_of("sst2", "kernel-porf-softplus", "mcc"),
    "best-ece-sst2": _best_of("sst2", "kernel-favor", "ece"),
    "best-brier-sst2": _best_of("sst2", "kernel-cos2", "brier"),
    "best-accuracy-qqp": _best_of("qqp", _SOFTMAXFEAT, "accuracy", _Q_EQUALS_K),
    **{
        f"best-{metric}-rotten-tomatoes".replace("_", "-"): _best_of(
            "rotten_tomatoes", _SOFTMAXFEAT, metric
        )
        for metric in ("accuracy", "mcc", "log_loss", "brier")
    },
    **{
        f"{row}-{metric}-{task}".replace("_", "-"): _gain_of(task, row, metric)
        for task, row, metric in (
            ("sst2", "kernel-elu", "accuracy"),
            ("sst2", "kernel-elu", "log_loss"),
            ("sst2", _SOFTMAXFEAT, "accuracy"),
            ("qqp", _SOFTMAXFEAT, "log_loss"),
            ("qqp", _SOFTMAXFEAT, "brier"),
            ("rotten_tomatoes", _SOFTMAXFEAT, "accuracy"),
        )
    },
    "doubles-training-time": _doubles_training_time,
    **{f"above-bag-of-words-{task}": _beats_bags(task) for task in TASKS},
    "objective-sees-labels": _objective_sees_labels,
}
