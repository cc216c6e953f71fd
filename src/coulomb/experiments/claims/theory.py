"""Claims of the theorems, measured on particles."""

from coulomb._support.stats import mean_difference
from coulomb.experiments.claims import Evidence, Finding, claim, gain, verdict
from coulomb.experiments.summary import select

_LARGEST = 3.0  # standard errors between a slope and its prediction


@claim(
    source="thm:main-mckean-vlasov",
    text="The particles' empirical measure converges to the McKean-Vlasov density.",
    paper="convergence, no rate",
    needs="meanfield",
    constants=("default",),
)
def _mean_field_limit(evidence: Evidence, constants: str) -> Finding | None:
    slopes = [-record.metrics["w1_exponent"] for record in evidence["meanfield"]]
    found = mean_difference(slopes)
    note = "Wasserstein distance to the density falls as N to minus this power."
    return gain(found, note)


@claim(
    source="eq:main-mckean-vlasov",
    text="The free energy falls along the flow.",
    needs="meanfield",
    constants=("default",),
)
def _free_energy_falls(evidence: Evidence, constants: str) -> Finding | None:
    rises = sum(r.metrics["free_energy_rises"] for r in evidence["meanfield"])
    return Finding(f"rises in {rises:.0f} steps", None, verdict(not rises))


def _speed(name: str, method: str, label: str) -> None:
    @claim(
        f"deviations-at-{name}".replace(" ", "-"),
        source=label,
        text=f"Deviations of the empirical measure become rare at {name}, with the "
        "theorem's rate.",
        needs="deviations",
        constants=("default",),
    )
    def test(evidence: Evidence, constants: str) -> Finding | None:
        rows = select(evidence["deviations"], method=method)
        if not rows:
            return None
        slope = sum(r.metrics["slope"] for r in rows) / len(rows)
        error = sum(r.metrics["slope_error"] ** 2 for r in rows) ** 0.5 / len(rows)
        rate = rows[0].metrics["rate"]
        ours = f"slope {slope:.4f} ± {error:.4f}, predicted {rate:.4f}"
        close = abs(slope - rate) < _LARGEST * error
        note = "With a logarithmic correction in the fit."
        return Finding(ours, None, verdict(close), note)


_speed("speed N", "speed N", "eq:rate-thermal-main")
_speed("speed beta_N", "speed beta", "eq:rate-zero-temp-main")
