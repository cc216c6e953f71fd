"""Claims of the theorems, measured on particles."""

from collections.abc import Sequence

from coulomb._support.stats import mean_difference
from coulomb.experiments.claims import Finding, Verdict, agrees, gain
from coulomb.experiments.records import Record
from coulomb.experiments.summary import mean_of, select

_WIDEST = 0.1  # of the rate: a wider interval excludes too little
_FEWEST = 10  # particles that the largest system must have


def mean_field_limit(records: Sequence[Record], constants: str) -> Finding | None:
    """Test that particles approach the density."""
    found = mean_difference(-record.metrics["w1_exponent"] for record in records)
    note = "Wasserstein distance to the density falls as N to minus this power."
    return gain(found, note, relevant=0)


def free_energy_falls(records: Sequence[Record], constants: str) -> Finding | None:
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


def _slope(rows: Sequence[Record]) -> tuple[str, Verdict]:
    slope, rate = mean_of(rows, "slope"), rows[0].metrics["rate"]
    error = sum(r.metrics["slope_error"] ** 2 for r in rows) ** 0.5 / len(rows)
    interval = (slope - 1.96 * error, slope + 1.96 * error)
    told = f"slope {slope:.4f} ± {error:.4f}, predicted {rate:.4f}"
    return told, agrees(interval, rate, _WIDEST * rate)


def decays_at(
    records: Sequence[Record], constants: str, *, method: str, calibration: str = ""
) -> Finding | None:
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
    criterion += f"that is no wider than {_WIDEST:.0%} of it; inconclusive if N "
    criterion += f"stays below {_FEWEST}, or if independent particles miss theirs."
    return Finding(ours, None, found, note, criterion=criterion)
