"""What the paper claims, what our records say to it, and a verdict.

The sentences are data, `paper_values/claims.csv`; each has a test in one of the modules
beside this one, under the same name.
"""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
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
    UNTESTED = "not tested here"


@dataclass(frozen=True)
class Finding:
    """What our records say to a claim, with one set of constants."""

    ours: str
    difference: Difference | None
    verdict: Verdict
    note: str = ""
    constants: str = ""


Test = Callable[[Sequence[Record], str], Finding | None]
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
    from coulomb.experiments.claims import synthetic, text, theory

    tests = synthetic.TESTS | text.TESTS | theory.TESTS
    return [
        Claim(**line | {"constants": tuple(line["constants"].split())}, test=test)
        for line in paper_table("claims")
        for test in [tests[line["name"]]]
    ]


_BROKEN = (CoulombError, ArithmeticError, LookupError, TypeError, ValueError)


def judge_claims(evidence: Evidence, problems: list[str] | None = None) -> list[Result]:
    """Hold every claim against the records.

    A test that the records of its experiment break is told to `problems` if that is a
    list, and its claim is not tested.

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
                if records:
                    found = claim.test(records, constants)
            except _BROKEN as error:
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


def verdict(holds: bool) -> Verdict:
    """Say whether a claim holds."""
    return Verdict.HOLDS if holds else Verdict.FAILS


def gain(difference: Difference, note: str = "", *, ours: str = "") -> Finding | None:
    """Judge a claim of a gain: it holds two standard errors above zero.

    Examples
    --------
    >>> gain(Difference(0.03, 0.01, 10)).verdict.value
    'holds'
    >>> gain(Difference(0.01, 0.01, 10)).verdict.value
    'does not hold'
    """
    if difference.n < 2:
        return None
    holds = difference.mean > 0 and difference.distinct
    if not difference.distinct:
        note = f"{note} Within two standard errors of zero.".strip()
    return Finding(ours, difference, verdict(holds), note)


def versus(ours: Sequence[Record], theirs: Sequence[Record], metric: str) -> str:
    """Write two means side by side."""
    return f"{mean_of(ours, metric):.4f} against {mean_of(theirs, metric):.4f}"


def compare(
    ours: Sequence[Record], theirs: Sequence[Record], metric: str, note: str = ""
) -> Finding | None:
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


def learned(records: Sequence[Record], constants: str, **wanted: Any) -> list[Record]:
    """Pick the learned row of the synthetic study."""
    strength = 0.5 if constants == "paper" else None
    entries: dict[str, Any] = {"control": None, "strength": strength, "design": 42}
    return select(records, method="langevin", constants=constants, **(entries | wanted))
