"""The paper's claims as the page shows them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coulomb.experiments.claims import (
    COUNTED,
    Finding,
    Result,
    Verdict,
    judge_claims,
    words,
)
from coulomb.experiments.paper import check_paper
from coulomb.experiments.records import Record
from coulomb.experiments.summary import gather
from coulomb.report.tables import Column, Header, Table, tabulate

_WITH = {
    "paper": "With the paper’s constants",
    "paper-plain": "With the paper’s constants, drift without the factor N",
    "paper-main": "With the constants of the paper’s main text",
    "default": "With our defaults",
    "tables": "In the paper’s own tables",
}


def view_claims(
    records: Mapping[str, Sequence[Record]], problems: list[str]
) -> dict[str, Any]:
    """Hold the claims against the records; what the page's template shows of them."""
    results = judge_claims(records, problems)
    found = [finding for result in results for finding in result.findings]
    parts = gather(found, lambda finding: finding.constants)
    return {
        "bars": [_bar(_WITH.get(name, name), part) for name, part in parts.items()],
        "claims": [_view(result) for result in results],
        "filters": [each for each in Verdict if each in {f.verdict for f in found}],
        "csv": _table(results).csv,
        "checks": _checks(),
    }


def _bar(label: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """Count the verdicts with one set of constants, and say it in words."""
    plural = {Verdict.HOLDS: "hold", Verdict.FAILS: "do not hold"}
    counts = Counter(finding.verdict for finding in findings)
    parts = [
        (each, n, each.value if n == 1 else plural.get(each, each.value))
        for each in Verdict
        for n in [counts[each]]
    ]
    alt = f"{label}: {', '.join(f'{n} {words}' for _, n, words in parts)}."
    holds, tested = counts[Verdict.HOLDS], sum(counts[each] for each in COUNTED)
    sentence = f"{label}, {holds} of {tested} tested claims hold." if tested else ""
    if counts[Verdict.OPEN]:
        sentence += f" {counts[Verdict.OPEN]} are inconclusive."
    return {"label": label, "counts": parts, "alt": alt, "finding": sentence}


def _view(result: Result) -> dict[str, Any]:
    """Name the findings by their constants, or once if they are all the same."""
    findings = {_WITH.get(f.constants, f.constants): f for f in result.findings}
    if len(findings) > len({replace(f, constants="") for f in result.findings}) == 1:
        findings = {"With either constants": result.findings[0]}
    tones = sorted({finding.verdict.name.lower() for finding in result.findings})
    return {"claim": result.claim, "findings": findings, "tones": " ".join(tones)}


def told(finding: Finding) -> str:
    """Our number, and the difference the verdict rests on unless it says so itself."""
    if finding.difference is None:
        return finding.ours
    gap = words(finding.difference)
    if not finding.ours or gap in finding.ours:
        return finding.ours or gap
    return f"{finding.ours}; paired difference {gap}"


def _table(results: Sequence[Result]) -> Table:
    rows = [
        (
            *(claim.text, claim.source, finding.constants, claim.paper, finding.ours),
            *(finding.difference or (None,) * 3),
            *(finding.verdict.value, finding.criterion, finding.note),
        )
        for claim, findings in results
        for finding in findings
    ]
    columns: list[Header] = ["claim", "source", "constants", "paper", "ours"]
    columns += map(Column, ("difference", "standard error", "trials"))
    columns += ["verdict", "criterion", "note"]
    return tabulate("claims", "The paper's claims", columns, rows)


def _checks() -> Table:
    columns = (
        Column("what the published tables say about themselves", False, wide=True),
        Column("found", numeric=False, wide=True),
        "confirmed",
    )
    rows = [(c.title, c.found, "yes" if c.confirmed else "no") for c in check_paper()]
    title = "The published tables, checked by code"
    return tabulate("paper-checks", title, columns, rows)
