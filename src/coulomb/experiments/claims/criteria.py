"""Tests of the claims: on the synthetic problem, on text, of the theorems.

Each takes the records of its experiment, the constants and what `claims.csv` says.
"""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from coulomb._support.stats import Difference, mean_difference
from coulomb.experiments.claims import (
    Finding,
    Found,
    Records,
    Verdict,
    agrees,
    compare,
    gain,
    is_below,
    learned,
    versus,
    within,
    words,
)
from coulomb.experiments.paper import (
    MAPS,
    TASKS,
    TEST_ROWS,
    paper_table,
    paper_value,
)
from coulomb.experiments.summary import (
    by_trial,
    gather,
    mean_of,
    paired,
    power_laws,
    row_title,
    select,
    shared_trials,
    without_phase_a,
)
from coulomb.text.settings import LOWER_IS_BETTER, PAPER_ROWS

_METRIC = "expected_accuracy"
_MODERATE = (1.0, 10.0, 100.0)
_NONZERO = (0.2, 0.5, 0.8, 1.0, 1.5)
_ROUGHLY = 0.85  # "roughly 90 %" is more than this
_WIDEST = 0.5  # an interval of exponents that is wider excludes too little
_MINIMAL = 0.02  # "minimal separation", against gains of "a few points"


def _baseline(records: Records, method: str, **where: object) -> Records:
    """Pick a method with the paper's constants, on the paper's design."""
    return select(records, method=method, constants="paper", design=42, **where)


def beats(
    records: Records,
    constants: str,
    *,
    method: str,
    metric: str = _METRIC,
    **where: object,
) -> Found:
    """Test that learned particles have more of a metric than a method."""
    ours, control = (
        learned(records, constants, control=control, **where)
        for control in (None, "norm-matched")
    )
    note = f"Over its norm-matched control {words(paired(ours, control, metric))}."
    return compare(ours, _baseline(records, method, **where), metric, note)


def _at_budgets(records: Records, constants: str, *budgets: int) -> list[Records]:
    """Pick learned rows with these numbers of features, then fixed ones."""
    ours: list[Records] = [learned(records, constants, n_components=n) for n in budgets]
    return ours + [_baseline(records, "fixed", n_components=n) for n in budgets]


def gap_widens(records: Records, constants: str) -> Found:
    """Test that the gap to fixed features grows with their number."""
    many, few, fixed_many, fixed_few = _at_budgets(records, constants, 256, 16)
    trials = shared_trials(_METRIC, many, fixed_many, few, fixed_few)
    difference = mean_difference((a - b) - (c - d) for a, b, c, d in trials)
    return gain(difference, "Gap at D = 256 minus gap at D = 16.")


def retains_90_percent(records: Records, constants: str) -> Found:
    """Test that 64 features retain roughly what 256 have."""
    many, few, *_ = _at_budgets(records, constants, 256, 64)
    share = mean_difference(b / a for a, b in shared_trials(_METRIC, many, few))
    if share.n < 2:
        return None
    told = versus(few, many, _METRIC)
    ours = f"{share.mean:.1%} ± {share.standard_error:.1%} ({told})"
    note = "On vectors; a coin toss is right half the time."
    criterion = f"Holds if the 95 % interval of the share is above {_ROUGHLY:.0%}."
    found = within(share.interval, _ROUGHLY)
    return Finding(ours, None, found, note, criterion=criterion)


def fixed_degrades_more(records: Records, constants: str) -> Found:
    """Test that fixed features keep less of it than learned ones."""
    many, few, fixed_many, fixed_few = _at_budgets(records, constants, 256, 64)
    trials = shared_trials(_METRIC, many, few, fixed_many, fixed_few)
    difference = mean_difference(b / a - d / c for a, b, c, d in trials)
    told = f"learned {versus(few, many, _METRIC)}; "
    told += f"fixed {versus(fixed_few, fixed_many, _METRIC)}"
    note = "Share kept by learned minus share kept by fixed features."
    return gain(difference, note, ours=told)


def tuned_svm_best(records: Records, constants: str) -> Found:
    """Test that no other method is better than the tuned machine."""
    records = select(records, control=None, design=42, n_features=5)
    tuned = select(records, method="svm", gamma=0.5)
    if constants == "default":
        tuned = select(records, method="svm-cv")
    others = gather(
        select(records, constants=("paper", constants)),
        lambda r: "" if r.job["method"].startswith("svm") else row_title(r.job),
    )
    others.pop("", None)
    if not tuned or not others:
        return None
    best = max(others, key=lambda name: mean_of(others[name], _METRIC))
    return compare(tuned, others[best], _METRIC, f"Against the best other: {best}.")


def misspecified_svm(records: Records, constants: str) -> Found:
    """Test that both wrong bandwidths lose."""
    rows = select(records, method="svm", noise=(1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0))
    good = select(rows, gamma=0.5)
    gaps = {g: paired(good, select(rows, gamma=g), _METRIC) for g in (0.01, 100.0)}
    smallest = min(gaps.values(), key=lambda gap: gap.mean)
    told = ", ".join(f"gamma {g:g}: {words(gap)}" for g, gap in gaps.items())
    return gain(smallest, f"At sigma up to 1. {told}.")


def _langevin_law(
    records: Records, constants: str
) -> tuple[str, tuple[float, float]] | None:
    """Give the exponent of the seconds of Langevin learning, and its interval."""
    laws = power_laws(select(records, method="langevin", constants=constants))
    if not laws:
        return None
    low, high = laws[0]["low"], laws[0]["high"]
    ours = f"{laws[0]['exponent']:.3f} (95 % interval {low:.3f} to {high:.3f})"
    return ours, (low, high)


def langevin_exponent(records: Records, constants: str) -> Found:
    """Test that the seconds grow with the published power."""
    law = _langevin_law(records, constants)
    if law is None:
        return None
    table = {line["method"]: line["exponent"] for line in paper_table("power_laws")}
    printed = table["langevin"]
    inside = "lies" if law[1][0] <= printed <= law[1][1] else "does not lie"
    note = f"{printed:.3f} {inside} in the interval."
    criterion = f"Holds if {printed:.3f} lies in the 95 % interval, and that is no "
    criterion += f"wider than {_WIDEST:g}."
    found = agrees(law[1], printed, _WIDEST)
    return Finding(law[0], None, found, note, criterion=criterion)


def langevin_sublinear(records: Records, constants: str) -> Found:
    """Test that the seconds grow more slowly than the samples."""
    law = _langevin_law(records, constants)
    return is_below(*law, 1.0) if law else None


def runtime_order(records: Records, constants: str) -> Found:
    """Test that exponents fall from kernels to machines to features."""
    laws = {x["method"]: x for x in power_laws(select(records, constants="paper"))}
    with_features = ("fixed", "importance", "langevin")
    if not {"multiple-kernels", "svm", *with_features} <= set(laws):
        return None
    rest = max(with_features, key=lambda name: laws[name]["exponent"])
    order = [laws[name] for name in ("multiple-kernels", "svm", rest)]
    gaps = [
        Difference(
            first["exponent"] - second["exponent"],
            math.hypot(first["standard_error"], second["standard_error"]),
            min(first["n"], second["n"]) - 1,  # a line has two parameters
        )
        for first, second in pairwise(order)
    ]
    worst = min(gaps, key=lambda gap: gap.mean)
    powers = [law["exponent"] for law in order]
    ours = f"{powers[0]:.3f}, {powers[1]:.3f}, at most {powers[2]:.3f}"
    return gain(worst, "The smaller gap of the exponents.", ours=ours, relevant=0)


def _strengths(
    records: Records, constants: str, *strengths: float, **where: object
) -> Records:
    wanted = {"method": "langevin", "constants": constants, "control": None} | where
    return select(records, strength=strengths, **wanted)


def stronger(
    records: Records,
    constants: str,
    *,
    ours: list[float],
    theirs: list[float],
    **where: object,
) -> Found:
    """Test that some strengths of the repulsion are better than others."""
    these, those = (", ".join(f"{s:g}" for s in part) for part in (ours, theirs))
    note = f"lambda in {{{these}}} minus lambda in {{{those}}}."
    a, b = (_strengths(records, constants, *s, **where) for s in (ours, theirs))
    return compare(a, b, _METRIC, note)


def repulsion_beats_fixed(records: Records, constants: str) -> Found:
    """Test that repelled particles are better than fixed ones."""
    ours = _strengths(records, constants, *_NONZERO, noise=_MODERATE)
    return compare(ours, _baseline(records, "fixed", noise=_MODERATE), _METRIC)


def _spread(records: Records, constants: str, *noise: float) -> Difference:
    """Take the best minus the worst strength, log repulsion."""
    where = {"exponent": 0.0, "noise": noise}
    rows = _strengths(records, constants, 0.0, *_NONZERO, **where)
    parts = gather(rows, lambda record: record.job["strength"]).values()
    ranked = sorted(parts, key=lambda part: mean_of(part, _METRIC))
    if len(ranked) < 2:
        return mean_difference([])
    return paired(ranked[-1], ranked[0], _METRIC)


def small_noise_no_effect(records: Records, constants: str) -> Found:
    """Test that strengths differ little without noise."""
    spread = _spread(records, constants, 1e-5, 1e-4, 1e-3)
    if spread.n < 2:
        return None
    note = "Best minus worst strength, log repulsion."
    return is_below(words(spread), spread.interval, _MINIMAL, note, spread)


def smaller_variance(records: Records, constants: str) -> Found:
    """Test that repelled particles scatter less."""
    logs, counts = [], []
    for noise in _MODERATE:
        where = {"noise": noise, "exponent": 0.0}
        rows = [
            by_trial(_strengths(records, constants, strength, **where), _METRIC)
            for strength in (0.0, 0.5, 0.8, 1.0)
        ]
        if min(map(len, rows)) < 2:
            continue
        spreads = [float(np.var(list(row.values()), ddof=1)) for row in rows]
        if min(spreads) > 0:
            none, *others = map(math.log, spreads)
            logs.append(none - float(np.mean(others)))
            counts.append(min(map(len, rows)))
    if not logs:
        return None
    # The log of a sample variance has variance 2 / (n - 1), of a ratio twice that.
    error = math.sqrt(4 / (min(counts) - 1) / len(logs))
    ratio = Difference(float(np.mean(logs)), error, min(counts))
    note = "Mean log ratio of variances, lambda = 0 over the others."
    return gain(ratio, note, relevant=0)


def large_noise_gaps_narrow(records: Records, constants: str) -> Found:
    """Test that strengths differ less where noise is extreme."""
    moderate = _spread(records, constants, 1.0)
    extreme = _spread(records, constants, 1e3, 1e4, 1e5)
    error = math.hypot(moderate.standard_error, extreme.standard_error)
    count = min(moderate.n, extreme.n)
    difference = Difference(moderate.mean - extreme.mean, error, count)
    return gain(
        difference, "Spread over strengths at sigma = 1 minus at extreme noise."
    )


_Q_EQUALS_K = tuple(f"{kind}-{name}" for name in MAPS for kind in ("vanilla", "kernel"))
_BAGS = ("unigrams", "nb-bigrams")
_SEVERAL = 2  # maps
_DOUBLE = (1.5, 2.5)
_SEEING = 0.5  # the cosine below which an objective sees the labels


def _rows(
    records: Records, task: str, constants: str, method: Any, **wanted: object
) -> Records:
    """Pick rows of a task, by default no controls."""
    chosen = {"control": None, "method": method} | wanted
    if not str(method).startswith("kernel-"):
        constants = without_phase_a(constants)
    return select(records, task=task, constants=constants, **chosen)


def _map_rows(records: Records, task: str, constants: str) -> list[Records]:
    """Pick the Vanilla and the Kernel row of each map, in turn."""
    return [_rows(records, task, constants, name) for name in _Q_EQUALS_K]


def _better(ours: Records, theirs: Records, metric: str) -> Difference:
    """Pair by seed; a difference above zero is for the better."""
    difference = paired(ours, theirs, metric)
    sign = -1 if metric in LOWER_IS_BETTER else 1
    return difference._replace(mean=sign * difference.mean)


def mean_gain(records: Records, constants: str, *, task: str) -> Found:
    """Test that Kernel rows are better than Vanilla rows, on average over the maps."""
    trials = shared_trials("accuracy", *_map_rows(records, task, constants))
    gaps = [float(np.mean(np.subtract(t[1::2], t[::2]))) for t in trials]
    return gain(mean_difference(gaps), "Mean over maps, paired by seed.")


def _vanilla(row: str) -> str:
    return row.replace("kernel", "vanilla", 1)


def gain_of(
    records: Records, constants: str, *, task: str, row: str, metric: str
) -> Found:
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
    records: Records,
    constants: str,
    *,
    task: str,
    metric: str,
    control: str | None = None,
) -> Found:
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
    records: Records,
    constants: str,
    *,
    task: str,
    row: str,
    metric: str,
    tied: bool = False,
) -> Found:
    """Test that a row is better than the best other one, or one with Q = K."""
    rivals = _Q_EQUALS_K if tied else PAPER_ROWS
    parts = {name: _rows(records, task, constants, name) for name in rivals}
    means = {name: mean_of(part, metric) for name, part in parts.items()}
    means = {name: mean for name, mean in means.items() if not np.isnan(mean)}
    if row not in means or len(means) < 2:
        return None
    pick = min if metric in LOWER_IS_BETTER else max
    rival = pick((name for name in means if name != row), key=means.__getitem__)
    ours = f"{means[row]:.4f}; best other {rival} {means[rival]:.4f}"
    difference = _better(parts[row], parts[rival], metric)
    twin = paired(parts[row], parts[_vanilla(row)], metric)
    if twin.mean == twin.standard_error == 0:
        difference = twin
    note = "Against the best other row."
    missing = len(rivals) - len(means)
    if missing:
        note += f" {missing} of {len(rivals)} rows were not run, so it cannot hold yet."
    found = gain(difference, note, ours=ours)
    if found and missing and found.verdict is Verdict.HOLDS:
        found = replace(found, verdict=Verdict.OPEN)
    return found


def doubles_training_time(records: Records, constants: str) -> Found:
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


def beats_bags(records: Records, constants: str, *, task: str) -> Found:
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


def objective_sees_labels(records: Records, constants: str) -> Found:
    """Test that shuffled labels give the objective another gradient."""
    rows = select(records, method="label-blindness", constants=constants)
    cosine = mean_difference(by_trial(rows, "cosine").values())
    if cosine.n < 2:
        return None
    note = "Cosine of the gradients with true and with shuffled labels; "
    note += "1 is label-blind."
    ours = f"{cosine.mean:.4f} ± {cosine.standard_error:.4f}"
    return is_below(ours, cosine.interval, _SEEING, note)


_WIDEST_RATE = 0.1  # of the rate: a wider interval excludes too little
_FEWEST = 10  # particles that the largest system must have


def mean_field_limit(records: Records, constants: str) -> Found:
    """Test that particles approach the density."""
    found = mean_difference(-record.metrics["w1_exponent"] for record in records)
    note = "Wasserstein distance to the density falls as N to minus this power."
    return gain(found, note, relevant=0)


def free_energy_falls(records: Records, constants: str) -> Found:
    """Test that no step raises the free energy."""
    if any("free_steps" not in record.metrics for record in records):
        return None  # records of a solver that refuses rises
    steps = sum(record.metrics["free_steps"] for record in records)
    rises = sum(record.metrics["free_energy_rises"] for record in records)
    largest = max(record.metrics["largest_rise"] for record in records)
    ours = f"rises in {rises:.0f} of {steps:.0f} steps"
    ours += f", by {largest:.2g} at most" if rises else ""
    criterion = "Holds if no step of a solver that takes any step raises it beyond "
    criterion += "rounding."
    found = Verdict.FAILS if rises else Verdict.HOLDS
    return Finding(ours, None, found, criterion=criterion)


def _slope(rows: Records) -> tuple[str, Verdict]:
    slope, rate = mean_of(rows, "slope"), rows[0].metrics["rate"]
    error = sum(r.metrics["slope_error"] ** 2 for r in rows) ** 0.5 / len(rows)
    interval = (slope - 1.96 * error, slope + 1.96 * error)
    told = f"slope {slope:.4f} ± {error:.4f}, predicted {rate:.4f}"
    return told, agrees(interval, rate, _WIDEST_RATE * rate)


def decays_at(
    records: Records, constants: str, *, method: str, calibration: str = ""
) -> Found:
    """Test that probabilities of deviations decay with the predicted rate."""
    rows = select(records, method=method)
    if not rows:
        return None
    ours, found = _slope(rows)
    counts = rows[0].job["counts"]
    note = f"N = {counts[0]} to {counts[-1]}, with finite-N terms in the fit."
    known = select(records, method=calibration)
    if known:
        told, right = _slope(known)
        note += f" Independent particles, whose rate is exact: {told}."
        found = found if right is Verdict.HOLDS else Verdict.OPEN
    if counts[-1] < _FEWEST:
        found = Verdict.OPEN
    criterion = "Holds if the rate lies in the 95 % interval of the slope, and "
    criterion += f"that is no wider than {_WIDEST_RATE:.0%} of it; inconclusive if N "
    criterion += f"stays below {_FEWEST}, or if independent particles miss theirs."
    return Finding(ours, None, found, note, criterion=criterion)
