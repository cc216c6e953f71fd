"""Claims about text classification."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from coulomb._support.stats import Difference, mean_difference
from coulomb.experiments.claims import (
    Finding,
    Verdict,
    gain,
    versus,
    within,
    words,
)
from coulomb.experiments.paper import MAPS, TASKS, TEST_ROWS, paper_value
from coulomb.experiments.records import Record
from coulomb.experiments.summary import (
    by_trial,
    gather,
    mean_of,
    paired,
    select,
    shared_trials,
    without_phase_a,
)
from coulomb.text.evaluate import LOWER_IS_BETTER

_Q_EQUALS_K = tuple(f"{kind}-{name}" for name in MAPS for kind in ("vanilla", "kernel"))
_BAGS = ("unigrams", "nb-bigrams")
_SEVERAL = 2  # maps
_DOUBLE = (1.5, 2.5)
_SEEING = 0.5  # the cosine below which an objective sees the labels


def _rows(
    records: Sequence[Record], task: str, constants: str, method: Any, **wanted: object
) -> list[Record]:
    """Pick rows of a task, by default no controls."""
    chosen = {"control": None, "method": method} | wanted
    if not str(method).startswith("kernel-"):
        constants = without_phase_a(constants)
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


def mean_gain(
    records: Sequence[Record], constants: str, *, task: str
) -> Finding | None:
    """Test that Kernel rows are better than Vanilla rows, on average over the maps."""
    trials = shared_trials("accuracy", *_map_rows(records, task, constants))
    gaps = [float(np.mean(np.subtract(t[1::2], t[::2]))) for t in trials]
    return gain(mean_difference(gaps), "Mean over maps, paired by seed.")


def _vanilla(row: str) -> str:
    return row.replace("kernel", "vanilla", 1)


def gain_of(
    records: Sequence[Record], constants: str, *, task: str, row: str, metric: str
) -> Finding | None:
    """Test that a Kernel row is better than its Vanilla row."""
    ours = _rows(records, task, constants, row)
    theirs = _rows(records, task, constants, _vanilla(row))
    told = [
        f"{name} {words(_better(ours, control, metric))}"
        for name in ("norm-matched", "noise-only")
        if (control := _rows(records, task, constants, row, control=name))
    ]
    note = f"Better than its controls by: {', '.join(told)}." if told else ""
    means = versus(ours, theirs, metric)
    return gain(_better(ours, theirs, metric), note, ours=means)


def gains_of_maps(
    records: Sequence[Record],
    constants: str,
    *,
    task: str,
    metric: str,
    control: str | None = None,
) -> Finding | None:
    """Test that several Kernel rows are better than Vanilla, or than their control."""
    found = {}
    for name in MAPS:
        row = f"kernel-{name}"
        rival = row if control else _vanilla(row)
        ours = _rows(records, task, constants, row)
        theirs = _rows(records, task, constants, rival, control=control)
        each = gain(_better(ours, theirs, metric))
        if each is not None and each.difference is not None:
            found[name] = each.verdict, f"{name} {words(each.difference)}"
    if not found:
        return None
    verdicts = [each for each, _ in found.values()]
    holding = verdicts.count(Verdict.HOLDS)
    lost = verdicts.count(Verdict.FAILS) + verdicts.count(Verdict.VOID)
    verdict = Verdict.FAILS if lost > len(MAPS) - _SEVERAL else Verdict.OPEN
    if holding >= _SEVERAL:
        verdict = Verdict.HOLDS
    elif set(verdicts) == {Verdict.VOID}:
        verdict = Verdict.VOID
    told = "; ".join(f"{words} {each.value}" for each, words in found.values())
    criterion = f"Holds if a gain holds for {_SEVERAL} maps or more, does not if "
    criterion += f"it does not for {len(MAPS) - _SEVERAL + 1} or more."
    count = f"{holding} of {len(found)} maps that were run"
    return Finding(count, None, verdict, f"{told}.", criterion=criterion)


def best_of(
    records: Sequence[Record],
    constants: str,
    *,
    task: str,
    row: str,
    metric: str,
    tied: bool = False,
) -> Finding | None:
    """Test that a row is better than the best other one, or one with Q = K."""
    whose = (constants, without_phase_a(constants))
    rows = select(records, task=task, constants=whose, control=None)
    parts = gather(rows, lambda record: record.job["method"])
    means = {
        name: mean
        for name, part in parts.items()
        if name in (_Q_EQUALS_K if tied else set(parts).difference(_BAGS))
        and not np.isnan(mean := mean_of(part, metric))
    }
    if row not in means or len(means) < 2:
        return None
    pick = min if metric in LOWER_IS_BETTER else max
    rival = pick((name for name in means if name != row), key=means.__getitem__)
    ours = f"{means[row]:.4f}; best other {rival} {means[rival]:.4f}"
    difference = _better(parts[row], parts[rival], metric)
    if (twin := _vanilla(row)) in means and not any(
        a - b for a, b in shared_trials(metric, parts[row], parts[twin])
    ):
        difference = Difference(0.0, 0.0, difference.n)
    return gain(difference, "Against the best other row.", ours=ours)


def doubles_training_time(records: Sequence[Record], constants: str) -> Finding | None:
    """Test that Phase A takes as long as all the rest."""
    logs = []
    for task in TASKS:
        rows = _map_rows(records, task, constants)
        for vanilla, kernel in zip(rows[::2], rows[1::2], strict=True):
            pairs = shared_trials("seconds.cpu", kernel, vanilla)
            logs += [math.log(ours / theirs) for ours, theirs in pairs]
    if len(logs) < 2:
        return None
    ratio = mean_difference(logs)
    low, high = (math.exp(end) for end in ratio.interval)
    ours = f"{math.exp(ratio.mean):.2f} times (95 % interval {low:.2f} to {high:.2f})"
    note = "Geometric mean over maps and seeds, CPU seconds."
    criterion = f"Holds if the interval lies in {_DOUBLE[0]:g} to {_DOUBLE[1]:g}, does "
    criterion += "not if it lies outside."
    found = within((low, high), *_DOUBLE)
    return Finding(ours, None, found, note, criterion=criterion)


def beats_bags(
    records: Sequence[Record], constants: str, *, task: str
) -> Finding | None:
    """Test that the best published row is better than bags of words trained here."""
    bags = select(records, task=task, method=_BAGS)
    if not bags:
        return None
    rows = ("softmax", *_Q_EQUALS_K)
    best = max(paper_value(task, name, "accuracy") for name in rows)
    top = max(bags, key=lambda record: record.metrics["accuracy"])
    found = top.metrics["accuracy"]
    ours = f"{top.job['method']} {found:.4f} on {top.split}"
    count = TEST_ROWS[task]
    variance = (best * (1 - best) + found * (1 - found)) / count
    note = f"Standard error of two independent shares of {count} texts."
    difference = Difference(best - found, math.sqrt(variance), count)
    return gain(difference, note, ours=ours, relevant=0)


def objective_sees_labels(records: Sequence[Record], constants: str) -> Finding | None:
    """Test that shuffled labels give the objective another gradient."""
    rows = select(records, method="label-blindness", constants=constants)
    cosine = mean_difference(by_trial(rows, "cosine").values())
    if cosine.n < 2:
        return None
    note = "Cosine of the gradients with true and with shuffled labels; "
    note += "1 is label-blind."
    criterion = f"Holds if the 95 % interval is below {_SEEING:g}, does not if above."
    ours = f"{cosine.mean:.4f} ± {cosine.standard_error:.4f}"
    found = within(cosine.interval, high=_SEEING)
    return Finding(ours, None, found, note, criterion=criterion)
