"""Claims about the synthetic problem: noise, budget, runtime and repulsion."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from coulomb._support.stats import Difference, mean_difference
from coulomb.experiments.claims import (
    Finding,
    agrees,
    compare,
    gain,
    learned,
    versus,
    within,
    words,
)
from coulomb.experiments.paper import paper_table
from coulomb.experiments.records import Record
from coulomb.experiments.summary import (
    by_trial,
    gather,
    mean_of,
    paired,
    power_laws,
    row_title,
    select,
    shared_trials,
)

_METRIC = "expected_accuracy"
_MODERATE = (1.0, 10.0, 100.0)
_NONZERO = (0.2, 0.5, 0.8, 1.0, 1.5)
_ROUGHLY = 0.85  # "roughly 90 %" is more than this
_WIDEST = 0.5  # an interval of exponents that is wider excludes too little
_MINIMAL = 0.02  # "minimal separation", against gains of "a few points"


def _baseline(records: Sequence[Record], method: str, **where: object) -> list[Record]:
    """Pick a method with the paper's constants, on the paper's design."""
    return select(records, method=method, constants="paper", design=42, **where)


def beats(
    records: Sequence[Record],
    constants: str,
    *,
    method: str,
    metric: str = _METRIC,
    **where: object,
) -> Finding | None:
    """Test that learned particles have more of a metric than a method."""
    ours, control = (
        learned(records, constants, control=control, **where)
        for control in (None, "norm-matched")
    )
    note = f"Over its norm-matched control {words(paired(ours, control, metric))}."
    return compare(ours, _baseline(records, method, **where), metric, note)


def _at_budgets(
    records: Sequence[Record], constants: str, *budgets: int
) -> list[list[Record]]:
    """Pick learned rows with these numbers of features, then fixed ones."""
    ours = [learned(records, constants, n_components=n) for n in budgets]
    return ours + [_baseline(records, "fixed", n_components=n) for n in budgets]


def gap_widens(records: Sequence[Record], constants: str) -> Finding | None:
    """Test that the gap to fixed features grows with their number."""
    many, few, fixed_many, fixed_few = _at_budgets(records, constants, 256, 16)
    trials = shared_trials(_METRIC, many, fixed_many, few, fixed_few)
    difference = mean_difference((a - b) - (c - d) for a, b, c, d in trials)
    return gain(difference, "Gap at D = 256 minus gap at D = 16.")


def retains_90_percent(records: Sequence[Record], constants: str) -> Finding | None:
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


def fixed_degrades_more(records: Sequence[Record], constants: str) -> Finding | None:
    """Test that fixed features keep less of it than learned ones."""
    many, few, fixed_many, fixed_few = _at_budgets(records, constants, 256, 64)
    trials = shared_trials(_METRIC, many, few, fixed_many, fixed_few)
    difference = mean_difference(b / a - d / c for a, b, c, d in trials)
    told = f"learned {versus(few, many, _METRIC)}; "
    told += f"fixed {versus(fixed_few, fixed_many, _METRIC)}"
    note = "Share kept by learned minus share kept by fixed features."
    return gain(difference, note, ours=told)


def tuned_svm_best(records: Sequence[Record], constants: str) -> Finding | None:
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


def misspecified_svm(records: Sequence[Record], constants: str) -> Finding | None:
    """Test that both wrong bandwidths lose."""
    rows = select(records, method="svm", noise=(1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0))
    good = select(rows, gamma=0.5)
    gaps = {g: paired(good, select(rows, gamma=g), _METRIC) for g in (0.01, 100.0)}
    smallest = min(gaps.values(), key=lambda gap: gap.mean)
    told = ", ".join(f"gamma {g:g}: {words(gap)}" for g, gap in gaps.items())
    return gain(smallest, f"At sigma up to 1. {told}.")


def _langevin_law(
    records: Sequence[Record], constants: str
) -> tuple[str, tuple[float, float]] | None:
    """Give the exponent of the seconds of Langevin learning, and its interval."""
    laws = power_laws(select(records, method="langevin", constants=constants))
    if not laws:
        return None
    low, high = laws[0]["low"], laws[0]["high"]
    ours = f"{laws[0]['exponent']:.3f} (95 % interval {low:.3f} to {high:.3f})"
    return ours, (low, high)


def langevin_exponent(records: Sequence[Record], constants: str) -> Finding | None:
    """Test that the seconds grow with the published power."""
    law = _langevin_law(records, constants)
    if law is None:
        return None
    [printed] = (
        line["exponent"]
        for line in paper_table("power_laws")
        if line["method"] == "langevin"
    )
    inside = "lies" if law[1][0] <= printed <= law[1][1] else "does not lie"
    note = f"{printed:.3f} {inside} in the interval."
    criterion = f"Holds if {printed:.3f} lies in the 95 % interval, and that is no "
    criterion += f"wider than {_WIDEST:g}."
    found = agrees(law[1], printed, _WIDEST)
    return Finding(law[0], None, found, note, criterion=criterion)


def langevin_sublinear(records: Sequence[Record], constants: str) -> Finding | None:
    """Test that the seconds grow more slowly than the samples."""
    law = _langevin_law(records, constants)
    if law is None:
        return None
    criterion = "Holds if the 95 % interval is below 1, does not if it is above."
    return Finding(law[0], None, within(law[1], high=1.0), criterion=criterion)


def runtime_order(records: Sequence[Record], constants: str) -> Finding | None:
    """Test that exponents fall from kernels to machines to features."""
    laws = {
        law["method"]: law for law in power_laws(select(records, constants="paper"))
    }
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
    records: Sequence[Record], constants: str, *strengths: float, **where: object
) -> list[Record]:
    wanted = {"method": "langevin", "constants": constants, "control": None} | where
    return select(records, strength=strengths, **wanted)


def stronger(
    records: Sequence[Record],
    constants: str,
    *,
    ours: Sequence[float],
    theirs: Sequence[float],
    **where: object,
) -> Finding | None:
    """Test that some strengths of the repulsion are better than others."""
    these, those = (", ".join(f"{s:g}" for s in part) for part in (ours, theirs))
    note = f"lambda in {{{these}}} minus lambda in {{{those}}}."
    a, b = (_strengths(records, constants, *s, **where) for s in (ours, theirs))
    return compare(a, b, _METRIC, note)


def repulsion_beats_fixed(records: Sequence[Record], constants: str) -> Finding | None:
    """Test that repelled particles are better than fixed ones."""
    ours = _strengths(records, constants, *_NONZERO, noise=_MODERATE)
    return compare(ours, _baseline(records, "fixed", noise=_MODERATE), _METRIC)


def _spread(records: Sequence[Record], constants: str, *noise: float) -> Difference:
    """Take the best minus the worst strength, log repulsion."""
    where = {"exponent": 0.0, "noise": noise}
    rows = _strengths(records, constants, 0.0, *_NONZERO, **where)
    parts = gather(rows, lambda record: record.job["strength"]).values()
    ranked = sorted(parts, key=lambda part: mean_of(part, _METRIC))
    if len(ranked) < 2:
        return mean_difference([])
    return paired(ranked[-1], ranked[0], _METRIC)


def small_noise_no_effect(records: Sequence[Record], constants: str) -> Finding | None:
    """Test that strengths differ little without noise."""
    spread = _spread(records, constants, 1e-5, 1e-4, 1e-3)
    if spread.n < 2:
        return None
    note = "Best minus worst strength, log repulsion."
    criterion = f"Holds if the 95 % interval is below {_MINIMAL:g}, does not if above."
    found = within(spread.interval, high=_MINIMAL)
    return Finding(words(spread), spread, found, note, criterion=criterion)


def smaller_variance(records: Sequence[Record], constants: str) -> Finding | None:
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


def large_noise_gaps_narrow(
    records: Sequence[Record], constants: str
) -> Finding | None:
    """Test that strengths differ less where noise is extreme."""
    moderate = _spread(records, constants, 1.0)
    extreme = _spread(records, constants, 1e3, 1e4, 1e5)
    error = math.hypot(moderate.standard_error, extreme.standard_error)
    count = min(moderate.n, extreme.n)
    difference = Difference(moderate.mean - extreme.mean, error, count)
    return gain(
        difference, "Spread over strengths at sigma = 1 minus at extreme noise."
    )
