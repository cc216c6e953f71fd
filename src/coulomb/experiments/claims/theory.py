"""Claims of the theorems, measured on particles."""

from collections.abc import Sequence

from coulomb._support.stats import mean_difference
from coulomb.experiments.claims import Finding, Test, gain, verdict
from coulomb.experiments.records import Record
from coulomb.experiments.summary import mean_of, select

_LARGEST = 3.0  # standard errors between a slope and its prediction


def _mean_field_limit(records: Sequence[Record], constants: str) -> Finding | None:
    found = mean_difference(-record.metrics["w1_exponent"] for record in records)
    note = "Wasserstein distance to the density falls as N to minus this power."
    return gain(found, note)


def _free_energy_falls(records: Sequence[Record], constants: str) -> Finding | None:
    rises = sum(record.metrics["free_energy_rises"] for record in records)
    return Finding(f"rises in {rises:.0f} steps", None, verdict(not rises))


def _decays_at(method: str) -> Test:
    """Test that probabilities of deviations decay with the predicted rate."""

    def test(records: Sequence[Record], constants: str) -> Finding | None:
        rows = select(records, method=method)
        if not rows:
            return None
        slope, rate = mean_of(rows, "slope"), rows[0].metrics["rate"]
        error = sum(r.metrics["slope_error"] ** 2 for r in rows) ** 0.5 / len(rows)
        ours = f"slope {slope:.4f} ± {error:.4f}, predicted {rate:.4f}"
        close = abs(slope - rate) < _LARGEST * error
        note = "With a logarithmic correction in the fit."
        return Finding(ours, None, verdict(close), note)

    return test


TESTS: dict[str, Test] = {
    "mean-field-limit": _mean_field_limit,
    "free-energy-falls": _free_energy_falls,
    "deviations-at-speed-N": _decays_at("speed N"),
    "deviations-at-speed-beta_N": _decays_at("speed beta"),
}
