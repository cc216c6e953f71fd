"""Claims about text classification."""

from collections.abc import Callable
from typing import Any

import numpy as np

from coulomb._support.stats import Difference, mean_difference
from coulomb.experiments.claims import (
    Evidence,
    Finding,
    Test,
    claim,
    gain,
    verdict,
    versus,
    words,
)
from coulomb.experiments.paper import MAPS, TASKS, kernel_minus_vanilla, paper_value
from coulomb.experiments.records import Record
from coulomb.experiments.summary import by_trial, paired, select, summarise
from coulomb.text.evaluate import LOWER_IS_BETTER

_NAMES = {"sst2": "SST-2", "qqp": "QQP", "rotten_tomatoes": "Rotten Tomatoes"}
_Q_EQUALS_K = tuple(f"{kind}-{name}" for name in MAPS for kind in ("vanilla", "kernel"))
_BAGS = ("unigrams", "nb-bigrams")


def _rows(
    evidence: Evidence, task: str, constants: str, **wanted: object
) -> list[Record]:
    """Pick rows of a task, by default no controls."""
    chosen = {"control": None} | wanted
    return select(evidence["text"], task=task, constants=constants, **chosen)


def _table_claim(
    name: str, task: str, text: str, paper: str, **more: Any
) -> Callable[[Test], Test]:
    """Register a claim of a task's table."""
    source, text = f"tab:{task}_detailed_metrics", f"On {_NAMES[task]}, {text}"
    return claim(name, source=source, text=text, paper=paper, needs="text", **more)


def _pair(
    evidence: Evidence, task: str, constants: str, row: str, other: str, metric: str
) -> Difference:
    ours, theirs = (_rows(evidence, task, constants, method=m) for m in (row, other))
    difference = paired(ours, theirs, metric)
    sign = -1 if metric in LOWER_IS_BETTER else 1
    return difference._replace(mean=sign * difference.mean)


def _controls(
    evidence: Evidence, task: str, constants: str, row: str, metric: str
) -> str:
    ours = _rows(evidence, task, constants, method=row)
    told = [
        f"{control} {words(paired(ours, theirs, metric))}"
        for control in ("norm-matched", "noise-only")
        if (theirs := _rows(evidence, task, constants, method=row, control=control))
    ]
    return f"Minus its controls: {', '.join(told)}." if told else ""


def _mean_gain(task: str) -> None:
    mean, error = kernel_minus_vanilla(task)

    @_table_claim(
        f"kernel-helps-{task}",
        task,
        "Phase A improves accuracy, averaged over the maps.",
        f"{mean:+.4f} ± {error:.4f} over maps, one run each",
    )
    def test(evidence: Evidence, constants: str) -> Finding | None:
        rows = _rows(evidence, task, constants)
        gaps: dict[object, list[float]] = {}
        for name in MAPS:
            ours = by_trial(select(rows, method=f"kernel-{name}"), "accuracy")
            theirs = by_trial(select(rows, method=f"vanilla-{name}"), "accuracy")
            for trial in ours:
                if trial in theirs:
                    gaps.setdefault(trial, []).append(ours[trial] - theirs[trial])
        whole = [float(np.mean(g)) for g in gaps.values() if len(g) == len(MAPS)]
        return gain(mean_difference(whole), "Mean over maps, paired by seed.")


def _gain_of(task: str, row: str, metric: str, text: str) -> None:
    other = row.replace("kernel", "vanilla", 1)
    before, after = (paper_value(task, name, metric) for name in (other, row))

    @_table_claim(
        f"{row}-{metric}-{task}".replace("_", "-"),
        task,
        f"{row.capitalize()} {text}.",
        f"{before:.4f} to {after:.4f}",
    )
    def test(evidence: Evidence, constants: str) -> Finding | None:
        difference = _pair(evidence, task, constants, row, other, metric)
        note = _controls(evidence, task, constants, row, metric)
        ours, theirs = (
            _rows(evidence, task, constants, method=m) for m in (row, other)
        )
        return gain(difference, note, ours=versus(ours, theirs, metric))


def _best_of(
    task: str, row: str, metric: str, text: str, rows: tuple[str, ...] = ()
) -> None:
    @_table_claim(
        f"best-{metric}-{task}".replace("_", "-"),
        task,
        f"{row.capitalize()} {text}.",
        f"{paper_value(task, row, metric):.4f}",
    )
    def test(evidence: Evidence, constants: str) -> Finding | None:
        records = _rows(evidence, task, constants)
        if rows:
            records = select(records, method=rows)
        means = {
            each.row["method"]: each.mean
            for each in summarise(records, metric)
            if each.row["method"] not in _BAGS
        }
        if row not in means or len(means) < 2:
            return None
        pick = min if metric in LOWER_IS_BETTER else max
        others = {name: mean for name, mean in means.items() if name != row}
        rival = pick(others, key=lambda name: others[name])
        difference = _pair(evidence, task, constants, row, rival, metric)
        ours = f"{means[row]:.4f}; best other {rival} {others[rival]:.4f}"
        return gain(difference, "Against the best other row.", ours=ours)


for _task in TASKS:
    _mean_gain(_task)
for _task, _row, _metric, _text in (
    ("sst2", "kernel-porf-softplus", "accuracy", "has the best accuracy"),
    ("sst2", "kernel-porf-softplus", "mcc", "has the best MCC"),
    ("sst2", "kernel-favor", "ece", "has the lowest ECE"),
    ("sst2", "kernel-cos2", "brier", "has the lowest Brier score"),
):
    _best_of(_task, _row, _metric, _text)
for _row, _metric, _text in (
    ("kernel-elu", "accuracy", "improves accuracy"),
    ("kernel-elu", "log_loss", "reduces the log loss"),
    ("kernel-softmaxfeat", "accuracy", "improves accuracy"),
):
    _gain_of("sst2", _row, _metric, _text)
_best_of(
    "qqp",
    "kernel-softmaxfeat",
    "accuracy",
    "is the strongest model with Q = K",
    _Q_EQUALS_K,
)
_gain_of("qqp", "kernel-softmaxfeat", "log_loss", "reduces the log loss")
_gain_of("qqp", "kernel-softmaxfeat", "brier", "reduces the Brier score")
for _metric in ("accuracy", "mcc", "log_loss", "brier"):
    _text = f"has the best {_metric.replace('_', ' ')}"
    _best_of("rotten_tomatoes", "kernel-softmaxfeat", _metric, _text)
_gain_of("rotten_tomatoes", "kernel-softmaxfeat", "accuracy", "improves accuracy")


@claim(
    source="Effect of Kernel Learning",
    text="Phase A roughly doubles the training time.",
    paper="1.8 to 2.1 times",
    needs="text",
)
def _doubles_training_time(evidence: Evidence, constants: str) -> Finding | None:
    ratios = []
    for task in TASKS:
        rows = _rows(evidence, task, constants)
        for name in MAPS:
            ours = by_trial(select(rows, method=f"kernel-{name}"), "seconds.cpu")
            theirs = by_trial(select(rows, method=f"vanilla-{name}"), "seconds.cpu")
            ratios += [ours[t] / theirs[t] for t in ours if t in theirs]
    if len(ratios) < 2:
        return None
    middle = float(np.median(ratios))
    return Finding(f"{middle:.2f} times (median)", None, verdict(1.5 <= middle <= 2.5))


def _beats_bags(task: str) -> None:
    best = max(
        paper_value(task, name, "accuracy") for name in ("softmax", *_Q_EQUALS_K)
    )

    @_table_claim(
        f"above-bag-of-words-{task}",
        task,
        "the paper's best row beats a bag of words (the paper shows no such baseline).",
        f"{best:.4f}",
        constants=("tables",),
    )
    def test(evidence: Evidence, constants: str) -> Finding | None:
        bags = select(evidence["text"], task=task, method=_BAGS)
        if not bags:
            return None
        top = max(bags, key=lambda record: record.metrics["accuracy"])
        gap = best - top.metrics["accuracy"]
        ours = f"{top.job['method']} {top.metrics['accuracy']:.4f} on {top.split}"
        return Finding(ours, Difference(gap, float("nan"), 1), verdict(gap > 0))


for _task in TASKS:
    _beats_bags(_task)


@claim(
    source="alignment for attention kernel",
    text="Alignment attracts particles to features that explain the labels.",
    needs="text",
)
def _objective_sees_labels(evidence: Evidence, constants: str) -> Finding | None:
    rows = select(evidence["text"], method="label-blindness", constants=constants)
    found = [record.metrics["cosine"] for record in rows]
    if not found:
        return None
    cosine = float(np.mean(found))
    note = "Cosine of the gradients with true and with shuffled labels; "
    note += "1 is label-blind."
    return Finding(f"{cosine:.3f}", None, verdict(cosine < 0.5), note)
