"""The paper's claims as the page shows them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coulomb._support.errors import CoulombError
from coulomb.experiments.claims import Finding, Result, Verdict, judge_claims, words
from coulomb.experiments.paper import check_paper
from coulomb.experiments.records import Record
from coulomb.report.rows import clean
from coulomb.report.tables import Column, Table, number, text

_TONES = {
    Verdict.HOLDS: "holds",
    Verdict.FAILS: "fails",
    Verdict.UNTESTED: "untested",
}
_WITH = {
    "paper": "With the paper’s constants",
    "default": "With our defaults",
    "tables": "In the paper’s own tables",
}
_NOTE_LENGTH = 400
_BROKEN = (CoulombError, ArithmeticError, LookupError, TypeError, ValueError)


class Count(NamedTuple):
    """How often a verdict was reached."""

    verdict: str
    tone: str
    number: int

    @property
    def label(self) -> str:
        """The verdict, said of several claims."""
        plural = {"holds": "hold", "fails": "do not hold"}
        return self.verdict if self.number == 1 else plural.get(self.tone, self.verdict)


class Bar(NamedTuple):
    """The verdicts with one set of constants."""

    label: str
    counts: list[Count]

    @property
    def alt(self) -> str:
        """The bar in words."""
        parts = (f"{count.number} {count.label}" for count in self.counts)
        return f"{self.label}: {', '.join(parts)}."


class FindingView(NamedTuple):
    """A verdict and what it rests on."""

    label: str
    verdict: str
    tone: str
    ours: str
    note: str


class ClaimView(NamedTuple):
    """A sentence of the paper and what was found."""

    sentence: str
    source: str
    paper: str
    findings: list[FindingView]

    @property
    def tones(self) -> str:
        """All verdicts, for the filter of the page."""
        return " ".join(sorted({finding.tone for finding in self.findings}))

    @property
    def tested(self) -> bool:
        """Whether anything was found."""
        return self.tones != "untested"


class ClaimsView(NamedTuple):
    """Everything about the claims."""

    bars: list[Bar]
    claims: list[ClaimView]
    filters: list[Count]
    csv: str
    checks: Table


def view_claims(
    records: Mapping[str, Sequence[Record]], problems: list[str]
) -> ClaimsView | None:
    """Hold the claims against the records."""
    results = _judge(records, problems)
    if not results:
        return None
    found = [finding for result in results for finding in result.findings]
    whose = list(dict.fromkeys(finding.constants for finding in found))
    return ClaimsView(
        bars=[
            Bar(_with(name), _counts([f for f in found if f.constants == name]))
            for name in whose
        ],
        claims=[_view(result) for result in results],
        filters=_counts(found),
        csv=_table(results).csv,
        checks=_checks(),
    )


def _judge(
    records: Mapping[str, Sequence[Record]], problems: list[str]
) -> list[Result]:
    """Judge with all records, or else with each experiment that can be judged alone."""
    try:
        return judge_claims(records)
    except _BROKEN:
        pass
    alone: dict[str, list[Result]] = {}
    for name in records:
        try:
            alone[name] = judge_claims({name: records[name]})
        except _BROKEN as error:
            problems.append(
                f"{clean(name)}: its claims could not be judged, because a record "
                f"lacks something they need ({clean(repr(error), 120)})."
            )
    return [
        alone.get(result.claim.needs, nothing)[i]
        for nothing in [judge_claims({})]
        for i, result in enumerate(nothing)
    ]


def _view(result: Result) -> ClaimView:
    claim = result.claim
    findings = [
        FindingView(
            _with(finding.constants),
            finding.verdict.value,
            _TONES[finding.verdict],
            clean(_ours(finding), 300),
            clean(finding.note, _NOTE_LENGTH),
        )
        for finding in result.findings
    ]
    if len(findings) > 1 and len({finding[1:] for finding in findings}) == 1:
        findings = [findings[0]._replace(label="With either constants")]
    return ClaimView(
        clean(claim.text, 600),
        clean(claim.source, 120),
        clean(claim.paper, 200),
        findings,
    )


def _ours(finding: Finding) -> str:
    """Our number, and the difference the verdict rests on unless it says so itself."""
    if finding.difference is None:
        return finding.ours
    gap = words(finding.difference)
    if not finding.ours or gap in finding.ours:
        return finding.ours or gap
    return f"{finding.ours}; paired difference {gap}"


def _with(constants: str) -> str:
    return _WITH.get(constants, constants)


def _counts(findings: Sequence[Finding]) -> list[Count]:
    return [
        Count(
            verdict.value, tone, sum(finding.verdict is verdict for finding in findings)
        )
        for verdict, tone in _TONES.items()
    ]


def _table(results: Sequence[Result]) -> Table:
    headers = ("claim", "source", "constants", "paper", "ours")
    columns = tuple(Column(header, numeric=False) for header in headers)
    columns += (Column("difference"), Column("standard error"), Column("trials"))
    columns += (Column("verdict", numeric=False), Column("note", numeric=False))
    rows = []
    for result in results:
        claim = result.claim
        for finding in result.findings:
            gap = finding.difference
            rows.append(
                (
                    text(claim.text),
                    text(claim.source),
                    text(finding.constants),
                    text(claim.paper),
                    text(finding.ours),
                    number(gap.mean if gap else None),
                    number(gap.standard_error if gap else None),
                    number(gap.n if gap else None),
                    text(finding.verdict.value),
                    text(finding.note),
                )
            )
    return Table("claims", "The paper's claims", columns, tuple(rows))


def _checks() -> Table:
    columns = (
        Column("what the published tables say about themselves", False, wide=True),
        Column("found", numeric=False, wide=True),
        Column("confirmed", numeric=False),
    )
    rows = tuple(
        (text(each.title), text(each.found), text("yes" if each.confirmed else "no"))
        for each in check_paper()
    )
    return Table("paper-checks", "The published tables, checked by code", columns, rows)
