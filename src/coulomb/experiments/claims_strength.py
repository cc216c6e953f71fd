"""Claims about the strength of the repulsion."""

import math
from collections.abc import Sequence

import numpy as np

from coulomb._support.stats import Difference
from coulomb.experiments.claims import (
    Evidence,
    Finding,
    Verdict,
    claim,
    gain,
    versus,
    words,
)
from coulomb.experiments.records import Record
from coulomb.experiments.summary import by_trial, paired, select, summarise

_METRIC = "expected_accuracy"
_MODERATE = (1.0, 10.0, 100.0)
_MINIMAL = 0.02  # "minimal separation", against gains of "a few points"


def _strengths(
    evidence: Evidence, constants: str, strengths: Sequence[float], **where: object
) -> list[Record]:
    return select(
        evidence["strength"],
        method="langevin",
        constants=constants,
        control=None,
        strength=tuple(strengths),
        **where,
    )


def _spread(evidence: Evidence, constants: str, noise: tuple[float, ...]) -> Difference:
    """Take the largest minus the smallest strength's mean accuracy."""
    means: dict[float, list[float]] = {}
    rows = select(evidence["strength"], constants=constants, control=None, noise=noise)
    for each in summarise(select(rows, method="langevin", exponent=0.0), _METRIC):
        means.setdefault(each.row["strength"], []).append(each.mean)
    if len(means) < 2:
        return Difference(math.nan, math.nan, 0)
    ranked = sorted(means, key=lambda strength: float(np.mean(means[strength])))
    best, worst = (
        _strengths(evidence, constants, (s,), noise=noise, exponent=0.0)
        for s in (ranked[-1], ranked[0])
    )
    return paired(best, worst, _METRIC)


@claim(
    "small-noise-no-effect",
    source="Ablation, fig:supp-lambda-sweep",
    text="At small noise (sigma <= 1e-3) the strength has little effect.",
    paper="minimal separation",
    needs="strength",
)
def _(evidence: Evidence, constants: str) -> Finding | None:
    spread = _spread(evidence, constants, (1e-5, 1e-4, 1e-3))
    if spread.n < 2:
        return None
    verdict = Verdict.HOLDS if spread.mean < _MINIMAL else Verdict.FAILS
    return Finding(
        words(spread), spread, verdict, "Best minus worst strength, log repulsion."
    )


@claim(
    "repulsion-beats-fixed",
    source="Ablation, fig:supp-lambda-sweep",
    text="At moderate noise, nonzero potentials outperform vanilla random features.",
    paper="a few points",
    needs="strength",
)
def _(evidence: Evidence, constants: str) -> Finding | None:
    ours = _strengths(evidence, constants, (0.2, 0.5, 0.8, 1.0, 1.5), noise=_MODERATE)
    fixed = select(
        evidence["strength"], method="fixed", constants="paper", noise=_MODERATE
    )
    told = versus(ours, fixed, _METRIC)
    return gain(paired(ours, fixed, _METRIC), ours=told)


@claim(
    "repulsion-beats-none",
    source="Ablation, fig:supp-lambda-sweep",
    text="At moderate noise, nonzero potentials outperform lambda = 0.",
    paper="a few points",
    needs="strength",
)
def _(evidence: Evidence, constants: str) -> Finding | None:
    ours = _strengths(evidence, constants, (0.2, 0.5, 0.8, 1.0, 1.5), noise=_MODERATE)
    none = _strengths(evidence, constants, (0.0,), noise=_MODERATE)
    told = versus(ours, none, _METRIC)
    return gain(paired(ours, none, _METRIC), ours=told)


@claim(
    "best-strength",
    source="Ablation, fig:supp-lambda-sweep",
    text="A strength of 0.5 to 1.0 gives the most reliable gains.",
    needs="strength",
)
def _(evidence: Evidence, constants: str) -> Finding | None:
    best = _strengths(evidence, constants, (0.5, 0.8, 1.0), noise=_MODERATE)
    others = _strengths(evidence, constants, (0.0, 0.2, 1.5), noise=_MODERATE)
    note = "lambda in {0.5, 0.8, 1} minus lambda in {0, 0.2, 1.5}."
    told = versus(best, others, _METRIC)
    return gain(paired(best, others, _METRIC), note, ours=told)


@claim(
    "smaller-variance",
    source="Ablation, fig:supp-lambda-sweep",
    text="At moderate noise, a strength of 0.5 to 1.0 has a smaller variance than 0.",
    needs="strength",
)
def _(evidence: Evidence, constants: str) -> Finding | None:
    logs, counts = [], []
    for noise in _MODERATE:
        rows = [
            by_trial(
                _strengths(evidence, constants, (s,), noise=noise, exponent=0.0),
                _METRIC,
            )
            for s in (0.0, 0.5, 0.8, 1.0)
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
    return gain(ratio, "Mean log ratio of variances, lambda = 0 over the others.")


@claim(
    "large-noise-gaps-narrow",
    source="Ablation, fig:supp-lambda-sweep",
    text="At extreme noise (sigma >= 1e3) the gaps between strengths narrow.",
    needs="strength",
)
def _(evidence: Evidence, constants: str) -> Finding | None:
    moderate = _spread(evidence, constants, (1.0,))
    extreme = _spread(evidence, constants, (1e3, 1e4, 1e5))
    if min(moderate.n, extreme.n) < 2:
        return None
    error = math.hypot(moderate.standard_error, extreme.standard_error)
    difference = Difference(moderate.mean - extreme.mean, error, extreme.n)
    return gain(
        difference, "Spread over strengths at sigma = 1 minus at extreme noise."
    )


@claim(
    "too-strong",
    source="Ablation, fig:supp-lambda-sweep",
    text="A very large strength (1.5) underperforms a moderate one (0.5).",
    needs="strength",
)
def _(evidence: Evidence, constants: str) -> Finding | None:
    return gain(
        paired(
            _strengths(evidence, constants, (0.5,)),
            _strengths(evidence, constants, (1.5,)),
            _METRIC,
        ),
        "Over all noise levels.",
    )
