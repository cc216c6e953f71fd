"""What the paper claims, what our records say to it, and a verdict.

The sentences are data, `paper_values/claims.csv`; each names its test, a function of
`criteria`, and the arguments it takes there.
"""

import enum
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from coulomb._support.errors import CoulombError
from coulomb._support.stats import Difference
from coulomb.experiments.paper import paper_table
from coulomb.experiments.records import Record
from coulomb.experiments.summary import mean_of, paired, select

Evidence = Mapping[str, Sequence[Record]]
"""Records by the name of their experiment."""


class Verdict(enum.StrEnum):
    """What becomes of a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "inconclusive"
    VOID = "not applicable"
    UNTESTED = "not tested here"


COUNTED = (Verdict.HOLDS, Verdict.FAILS, Verdict.OPEN)
SMOKE = "A smoke run: two trials, no verdicts."
_RELEVANT = 0.005  # half a point; an interval of gains below it is of no gain


@dataclass(frozen=True)
class Finding:
    """What our records say to a claim, with one set of constants."""

    ours: str
    difference: Difference | None
    verdict: Verdict
    note: str = ""
    constants: str = ""
    criterion: str = ""


Records = Sequence[Record]
Found = Finding | None
Test = Callable[..., Found]
"""Judges the records of an experiment, with a set of constants."""


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper."""

    name: str
    needs: str  # the experiment whose records are judged
    constants: tuple[str, ...]
    source: str
    paper: str
    text: str
    test: Test
    where: Mapping[str, Any]  # further arguments of the test


class Result(NamedTuple):
    """A claim with what was found."""

    claim: Claim
    findings: tuple[Finding, ...]


def all_claims() -> list[Claim]:
    """List the claims, in the order of the paper.

    Examples
    --------
    >>> all_claims()[0].name
    'moderate-noise-fixed'
    """
    from coulomb.experiments.claims import criteria

    tests = vars(criteria)
    return [
        Claim(
            **line
            | {"constants": tuple(line["constants"].split())}
            | {"test": tests[line["test"]], "where": json.loads(line["where"])}
        )
        for line in paper_table("claims")
    ]


# What a record may raise whose job or metrics are not what its experiment writes.
BROKEN = (
    *(CoulombError, ArithmeticError, AttributeError),
    *(LookupError, TypeError, ValueError),
)


def is_smoke(records: Iterable[Record]) -> bool:
    """Whether some records are of the preset that only tries whether all works."""
    return any(record.extra.get("preset") == "smoke" for record in records)


def judge_claims(evidence: Evidence, problems: list[str] | None = None) -> list[Result]:
    """Hold every claim against the records.

    A test that the records of its experiment break is told to `problems` if that is a
    list, and its claim is not tested; nor is one whose records are of a smoke run.

    Examples
    --------
    >>> {f.verdict.value for r in judge_claims({}) for f in r.findings}
    {'not tested here'}
    """
    results = []
    for claim in all_claims():
        records = evidence.get(claim.needs)
        findings = []
        for constants in claim.constants:
            found, note = None, f"Needs `coulomb reproduce {claim.needs}`."
            try:
                if records and is_smoke(records):
                    note = SMOKE
                elif records:
                    found = claim.test(records, constants, **claim.where)
            except BROKEN as error:
                if problems is None:
                    raise
                note = f"A record lacks what it needs ({error!r:.120})."
                problem = f"{claim.needs}: its claims could not be judged. {note}"
                if problem not in problems:
                    problems.append(problem)
            if found is None:
                found = Finding("", None, Verdict.UNTESTED, note)
            findings.append(replace(found, constants=constants))
        results.append(Result(claim, tuple(findings)))
    return results


def within(
    interval: tuple[float, float], low: float = -math.inf, high: float = math.inf
) -> Verdict:
    """Judge a claim that a number lies between two bounds, by its 95 % interval.

    Examples
    --------
    >>> [within(each, 0).value for each in ((1, 2), (-2, -1), (-1, 2))]
    ['holds', 'does not hold', 'inconclusive']
    """
    start, end = interval
    if low < start and end < high:
        return Verdict.HOLDS
    return Verdict.FAILS if end <= low or start >= high else Verdict.OPEN


def agrees(interval: tuple[float, float], value: float, widest: float) -> Verdict:
    """Judge a claim of a number: it lies in our 95 % interval, which is narrow enough.

    Examples
    --------
    >>> [agrees(each, 1, 0.5).value for each in ((0.9, 1.1), (1.1, 1.2), (0, 2))]
    ['holds', 'does not hold', 'inconclusive']
    """
    start, end = interval
    if not start <= value <= end:
        return Verdict.FAILS
    return Verdict.HOLDS if end - start <= widest else Verdict.OPEN


def gain(
    difference: Difference,
    note: str = "",
    *,
    ours: str = "",
    relevant: float = _RELEVANT,
) -> Found:
    """Judge a claim of a gain by the 95 % interval of the paired differences.

    Examples
    --------
    >>> [gain(Difference(m, 0.01, 10)).verdict.value for m in (0.03, 0.01, -0.03)]
    ['holds', 'inconclusive', 'does not hold']
    """
    if difference.n < 2:
        return None
    criterion = "Holds if the 95 % interval of the difference is above 0, does not if "
    criterion += f"it is below {relevant:g}."
    found = within(difference.interval, 0)
    if not difference.mean and not difference.standard_error:
        found, note = Verdict.VOID, f"{note} Both rows are the same.".strip()
    elif found is Verdict.OPEN and difference.interval[1] < relevant:
        found = Verdict.FAILS
    return Finding(ours, difference, found, note, criterion=criterion)


def is_below(
    ours: str,
    interval: tuple[float, float],
    bound: float,
    note: str = "",
    difference: Difference | None = None,
) -> Finding:
    """Judge a claim that a number is below a bound, by its 95 % interval."""
    criterion = f"Holds if the 95 % interval is below {bound:g}, does not if above."
    found = within(interval, high=bound)
    return Finding(ours, difference, found, note, criterion=criterion)


def versus(ours: Records, theirs: Records, metric: str) -> str:
    """Write two means side by side."""
    return f"{mean_of(ours, metric):.4f} against {mean_of(theirs, metric):.4f}"


def compare(ours: Records, theirs: Records, metric: str, note: str = "") -> Found:
    """Judge a claim that our rows have more of a metric than theirs."""
    told = versus(ours, theirs, metric)
    return gain(paired(ours, theirs, metric), note, ours=told)


def words(difference: Difference) -> str:
    """Write a difference with its standard error.

    Examples
    --------
    >>> words(Difference(0.01234, 0.0045, 10))
    '+0.0123 ± 0.0045'
    """
    if math.isnan(difference.standard_error):
        return f"{difference.mean:+.4f}"
    return f"{difference.mean:+.4f} ± {difference.standard_error:.4f}"


def learned(records: Records, constants: str, **wanted: Any) -> list[Record]:
    """Pick the learned row of the synthetic study."""
    strength = 0.5 if constants == "paper" else None
    entries: dict[str, Any] = {"control": None, "strength": strength, "design": 42}
    return select(records, method="langevin", constants=constants, **(entries | wanted))
