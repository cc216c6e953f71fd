"""The page: what is read, what is on it and in which order, and how it is written."""

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from coulomb._support.archive import check_output, read_json, write_bytes
from coulomb._support.errors import CoulombError, ParameterError
from coulomb._support.progress import progress_bar
from coulomb._version import __version__
from coulomb.experiments.claims import BROKEN, SMOKE, is_smoke, learned
from coulomb.experiments.records import FILE, Record, load_experiments
from coulomb.experiments.summary import paired, select
from coulomb.report import asset
from coulomb.report.chart import (
    Chart,
    Field,
    Layer,
    chart_numbers,
    drawable,
    theme_styles,
)
from coulomb.report.interactive import interactive, library
from coulomb.report.print import printed
from coulomb.report.rows import (
    EXPECTED,
    clean,
    metric_tables,
    place_of,
    slug,
    whose,
)
from coulomb.report.sections import SECTIONS, Section
from coulomb.report.sections.claims import told, view_claims
from coulomb.report.sections.synthetic import (
    budget_section,
    noise_section,
    runtime_section,
    strength_section,
)
from coulomb.report.sections.text import phase_a_section, text_section
from coulomb.report.sections.theory import PARTS, theory_sections
from coulomb.report.tables import Column, Header, Table, tabulate

_BUILDERS: dict[str, Callable[[Sequence[Record]], Section]] = {
    "noise": noise_section,
    "strength": strength_section,
    "budget": budget_section,
    "runtime": runtime_section,
    "text": text_section,
    "phase-a": phase_a_section,
}


@dataclass(frozen=True)
class Results:
    """What a folder holds."""

    folder: Path
    records: dict[str, list[Record]]
    theory: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def read_results(folder: Path) -> Results:
    """Read every experiment of a folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ParameterError(
            f"`DIR` must be a folder of results; there is none at {str(folder)!r}. "
            "`coulomb reproduce` makes one."
        )
    problems: list[str] = []
    records = load_experiments(folder, problems)
    for name in [name for name, found in records.items() if not found]:
        problems.append(f"{name}/{FILE}: holds no finished record.")
        del records[name]
    theory = {}
    for path in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        try:
            content = read_json(path, finite=False, complaint=": not JSON")
            if isinstance(content, dict) and set(PARTS.values()) & set(content):
                theory[str(path.relative_to(folder).with_suffix(""))] = content
        except (CoulombError, OSError) as error:
            problems.append(str(error))
    problems = [clean(each.replace(f"{folder}/", ""), 300) for each in problems]
    if not (records or theory):
        detail = f" {problems[0]}" if problems else ""
        raise ParameterError(
            f"`DIR` must hold results, such as noise/{FILE}; found none in "
            f"{str(folder)!r}.{detail} `coulomb reproduce NAME --out DIR` makes some."
        )
    return Results(folder, records, theory, tuple(problems))


@dataclass(frozen=True)
class Contents:
    """All that the page says."""

    folder: str
    tiles: dict[str, str]
    findings: list[str]
    problems: tuple[str, ...]
    missing: list[str]
    claims: dict[str, Any] | None
    sections: list[Section]
    settings_tables: list[Table]

    @property
    def links(self) -> list[tuple[str, str]]:
        """List the sections: where a link leads and what it says."""
        claims = [("claims", "Claims")] if self.claims else []
        middle = [(section.key, section.link) for section in self.sections]
        first, last = ("summary", "Summary"), ("settings", "Settings")
        return [first, *claims, *middle, last]


def arrange(results: Results) -> Contents:
    """Decide what is on the page."""
    records, problems = results.records, list(results.problems)
    sections = []
    for name in _order(records):
        if name in PARTS:
            continue
        try:
            section = _BUILDERS.get(name, _default_section)(records[name])
            sections.append(_first_charts(section, problems))
        except BROKEN as error:
            problems.append(
                f"{clean(name)}: cannot be drawn, because a record lacks something "
                f"({clean(repr(error), 120)})."
            )
    sections.extend(theory_sections(results.theory, records, problems))
    claims = view_claims(records, problems) if records else None
    verdicts = [bar["finding"] for bar in claims["bars"]] if claims else []
    everything = [record for part in records.values() for record in part]
    smoke = [SMOKE] if is_smoke(everything) else []
    return Contents(
        folder=results.folder.resolve().name,
        tiles=_tiles(results, everything),
        findings=[*smoke, *filter(None, verdicts), *_noise_findings(results)],
        problems=tuple(problems),
        missing=list(_missing(results)),
        claims=claims,
        sections=sections,
        settings_tables=[_settings(results), _environments(everything)],
    )


_MOST_CHARTS = 36  # of a section; each takes half a second


def _first_charts(section: Section, problems: list[str]) -> Section:
    """Leave out charts beyond a bound, and say so."""
    count, groups = 0, []
    for group in section.groups:
        charts = group.charts[: max(0, _MOST_CHARTS - count)]
        groups.append(replace(group, charts=charts))
        count += len(group.charts)
    if count > _MOST_CHARTS:
        told = f"the first {_MOST_CHARTS} of {count:,} charts are drawn."
        problems.append(f"{section.title}: {told}")
    return replace(section, groups=groups)


def _default_section(records: Sequence[Record]) -> Section:
    """Show every metric of every row of an experiment without a section of its own."""
    name = clean(records[0].experiment)
    title = name.capitalize()
    tables = metric_tables(name, records)
    return Section(f"x-{slug(name)}", title, title, tables=tables)


def _noise_findings(results: Results) -> Iterator[str]:
    """Say how far learned particles are above fixed ones and above their control."""
    records = [
        record
        for record in results.records.get("noise", [])
        if not is_smoke([record])
        and (place_of(record, "noise") or math.inf) <= _LITTLE_NOISE
    ]
    for constants in ("paper", "default"):
        ours = learned(records, constants)
        fixed = select(records, method="fixed", constants=constants, design=42)
        control = learned(records, constants, control="norm-matched")
        gains = [paired(ours, rival, EXPECTED) for rival in (fixed, control)]
        if all(gain.n > 1 for gain in gains):
            over, beyond = (
                f"{gain.mean:+.3f} ± {gain.standard_error:.3f}".replace("-", "−")
                for gain in gains
            )
            yield (
                f"Synthetic problem, σ ≤ {_LITTLE_NOISE:g}, "
                f"{whose(constants).lower()}: learned minus random Fourier features "
                f"{over}; learned minus its norm-matched control {beyond} (expected "
                "accuracy, paired)."
            )


_LITTLE_NOISE = 1.0


def _order(records: dict[str, list[Record]]) -> list[str]:
    known = [name for name in SECTIONS if name in records]
    return known + [name for name in records if name not in SECTIONS]


def _missing(results: Results) -> Iterator[str]:
    for name in SECTIONS:
        if name not in set(results.records) | _drawn(results):
            yield (
                f"{name}: has not been run; `coulomb reproduce {name} --out DIR` and "
                "then `coulomb report DIR` put it on this page."
            )


def _tiles(results: Results, records: Sequence[Record]) -> dict[str, str]:
    rows = {
        (r.experiment, clean(r.job.get("method")), clean(r.job.get("control")))
        for r in records
    }
    return {
        "experiments": str(len(set(results.records) | _drawn(results))),
        "records, one per job and control": f"{len(records):,}",
        "methods and controls": str(len(rows)),
    }


def _drawn(results: Results) -> set[str]:
    keys = {key for content in results.theory.values() for key in content}
    return {name for name, part in PARTS.items() if part in keys}


def _settings(results: Results) -> Table:
    rows = []
    for name in _order(results.records):
        records = results.records[name]
        values: dict[str, dict[str, None]] = {}
        for record in records:
            for key, value in record.job.items():
                if key not in ("seed", "trial"):
                    values.setdefault(clean(key), {})[clean(value)] = None
        several = {key: list(found) for key, found in values.items() if len(found) > 1}
        single = {key: list(found) for key, found in values.items() if len(found) == 1}
        trials = {repr(record.job.get("trial")) for record in records}
        counts = (len(records), len(trials))
        rows.append((clean(name), *counts, _listed(several), _listed(single)))
    columns: list[Header] = ["experiment", Column("records"), Column("trials")]
    for heading in ("settings that vary", "settings that do not"):
        columns.append(Column(heading, numeric=False, wide=True))
    return tabulate("run-settings", "Run settings", columns, rows)


def _listed(values: dict[str, list[str]]) -> str:
    parts = (
        f"{key}: {', '.join(found[:12])}{', …' if len(found) > 12 else ''}"
        for key, found in values.items()
    )
    return "; ".join(parts) or "–"


def _environments(records: Sequence[Record]) -> Table:
    counts: Counter[tuple[str, str]] = Counter()
    for record in records:
        counts["coulomb", clean(record.version)] += 1
        for key, value in record.environment.items():
            counts[clean(key), clean(value)] += 1
    columns = ("what", "value", Column("records"))
    rows = [(*pair, count) for pair, count in counts.items()]
    return tabulate("environment", "Environment of the runs", columns, rows)


_SCRIPTS = ("theme.js", "charts.js", "tables.js")


class Picture(NamedTuple):
    """A chart in all its forms."""

    key: str
    title: str
    alt: str
    caption: str
    svg: bytes
    png: bytes
    csv: str
    interactive: dict[str, Any]
    legend: Sequence[Layer]
    rows: int  # of a vertical axis with names


def draw(chart: Chart, *, own_legend: bool) -> Picture:
    """Draw a chart in all its forms."""
    chart = drawable(chart)
    words = (chart.key, chart.title, chart.alt, chart.caption)
    legend = legend_of([chart]) if own_legend else []
    forms = (*printed(chart), chart_numbers(chart), interactive(chart))
    return Picture(*words, *forms, legend, len(chart.y.names))


def legend_of(charts: Iterable[Chart]) -> list[Layer]:
    """List what can be switched on and off in a group of charts, each name once."""
    entries: dict[str, Layer] = {}
    for chart in charts:
        for layer in drawable(chart).layers:
            if not isinstance(layer, Field):
                entries.setdefault(layer.name, layer)
    return list(entries.values())


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a folder of results."""
    target = Path(folder) / "report.html" if out is None else Path(out)
    check_output(target)
    contents = arrange(read_results(folder))
    total = sum(len(g.charts) for s in contents.sections for g in s.groups) + 1
    with progress_bar("drawing", total) as advance:
        sections = []
        for section in contents.sections:
            groups = []
            for group in section.groups:
                pictures = []
                for chart in group.charts:
                    pictures.append(draw(chart, own_legend=not group.shared))
                    advance(note=chart.title)
                legend = legend_of(group.charts) if group.shared else []
                groups.append(
                    {"title": group.title, "legend": legend, "pictures": pictures}
                )
            sections.append({**vars(section), "groups": groups})
        advance(note="page")
    page = _render(contents, sections)
    write_bytes(target, page.encode())
    return target


def _render(contents: Contents, sections: list[dict[str, Any]]) -> str:
    early, plotly = asset("early.js"), library()
    script = "\n".join(map(asset, _SCRIPTS))
    policy = (
        "default-src 'none'; "
        f"script-src {' '.join(map(_fingerprint, (early, plotly, script)))}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )
    pictures = [p for s in sections for g in s["groups"] for p in g["pictures"]]
    charts = {picture.key: picture.interactive for picture in pictures}
    environment = Environment(
        loader=PackageLoader("coulomb.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "data_uri": _data_uri,
        "code": _code,
        "clean": clean,
        "told": told,
    }
    page = environment.get_template("page.html").render(
        vars(contents)
        | {
            "version": __version__,
            "policy": policy,
            "style": Markup(theme_styles() + asset("page.css")),
            "early_script": Markup(early),
            "script": Markup(script),
            "library": Markup(plotly),
            "sections": sections,
            "links": contents.links,
            "charts_data": _as_script(charts),
        }
    )
    return page.lstrip()  # the macros leave empty lines before the doctype


def _fingerprint(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _as_script(data: Any) -> Markup:
    """JSON that no text in it can break out of."""
    written = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        written = written.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(written)


def _code(sentence: str) -> Markup:
    """Show what stands between back quotes as code."""
    parts = str(sentence).split("`")
    marked = (
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part)
        for i, part in enumerate(parts)
    )
    return Markup("").join(marked)


def _data_uri(content: str | bytes, kind: str) -> str:
    raw = content.encode() if isinstance(content, str) else content
    charset = ";charset=utf-8" if kind.startswith("text/") else ""
    return f"data:{kind}{charset};base64,{base64.b64encode(raw).decode()}"
