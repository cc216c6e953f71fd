"""What the paper claims, what our records say to it, and a verdict."""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np

from coulomb._support.errors import CoulombError
from coulomb._support.stats import Difference
from coulomb.experiments.records import Record
from coulomb.experiments.summary import paired, select, values_of

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


def verdict(holds: bool) -> Verdict:
    """Say whether a claim holds."""
    return Verdict.HOLDS if holds else Verdict.FAILS


Test = Callable[[Evidence, str], Finding | None]


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper."""

    name: str
    source: str
    text: str
    paper: str
    test: Test
    constants: tuple[str, ...]
    needs: str


@dataclass(frozen=True)
class Result:
    """A claim with what was found."""

    claim: Claim
    findings: tuple[Finding, ...]


_MODULES = ("synthetic", "text", "theory")
_CLAIMS: list[Claim] = []


def claim(
    name: str = "",
    *,
    source: str,
    text: str,
    paper: str = "no number",
    needs: str,
    constants: tuple[str, ...] = ("paper", "default"),
) -> Callable[[Test], Test]:
    """Register the decorated test as that of a claim; its name is the claim's."""

    def register(test: Test) -> Test:
        title = name or test.__name__.strip("_").replace("_", "-")
        _CLAIMS.append(Claim(title, source, text, paper, test, constants, needs))
        return test

    return register


def all_claims() -> list[Claim]:
    """List the claims, in the order of the paper.

    Examples
    --------
    >>> all_claims()[0].name
    'moderate-noise-fixed'
    """
    for name in _MODULES:
        import_module(f"coulomb.experiments.claims.{name}")
    # Stable, and the same whichever module was imported first.
    return sorted(
        _CLAIMS, key=lambda each: _MODULES.index(each.test.__module__.split(".")[-1])
    )


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
    for each in all_claims():
        findings = []
        for constants in each.constants:
            found, note = None, f"Needs `coulomb reproduce {each.needs}`."
            try:
                if each.needs in evidence:
                    found = each.test(evidence, constants)
            except _BROKEN as error:
                if problems is None:
                    raise
                note = f"A record lacks what it needs ({error!r:.120})."
                problem = f"{each.needs}: its claims could not be judged. {note}"
                if problem not in problems:
                    problems.append(problem)
            if found is None:
                found = Finding("", None, Verdict.UNTESTED, note)
            findings.append(replace(found, constants=constants))
        results.append(Result(each, tuple(findings)))
    return results


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
    if not holds and not difference.distinct:
        note = f"{note} Within two standard errors of zero.".strip()
    return Finding(ours, difference, verdict(holds), note)


def versus(ours: Sequence[Record], theirs: Sequence[Record], metric: str) -> str:
    """Write two means side by side."""
    means = [
        float(np.mean([value for _, value in values_of(rows, metric)] or [math.nan]))
        for rows in (ours, theirs)
    ]
    return f"{means[0]:.4f} against {means[1]:.4f}"


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
