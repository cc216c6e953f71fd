"""`write_report`: a folder of results becomes one page that needs nothing else."""

import base64
import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from coulomb._support.archive import write_whole
from coulomb._support.progress import progress_bar
from coulomb._version import __version__
from coulomb.report.contents import Contents, arrange
from coulomb.report.interactive import library
from coulomb.report.movie import Run, pack, print_runs
from coulomb.report.palette import theme_styles
from coulomb.report.reading import read_results
from coulomb.report.sections import Group, Picture, draw, legend_of

PAGE = "report.html"
_TITLE = "A Coulomb particle model for learning kernels"
_SCRIPTS = ("theme.js", "charts.js", "tables.js", "movie.js")


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a folder of results."""
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
                groups.append(_group(group, pictures))
            sections.append({**vars(section), "groups": groups})
        movie = _movie(contents.runs)
        advance(note="page")
    page = _render(contents, sections, movie)
    target = Path(folder) / PAGE if out is None else Path(out)
    write_whole(target, lambda path: path.write_text(page, encoding="utf-8"))
    return target


def _render(
    contents: Contents, sections: list[dict[str, Any]], movie: dict[str, Any] | None
) -> str:
    early, script, plotly = _asset("early.js"), _joined_scripts(), library()
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
    environment.filters["data_uri"] = _data_uri
    environment.filters["code"] = _code
    page = environment.get_template("page.html").render(
        vars(contents)
        | {
            "title": _TITLE,
            "version": __version__,
            "policy": policy,
            "style": Markup(theme_styles() + _asset("page.css")),
            "early_script": Markup(early),
            "script": Markup(script),
            "library": Markup(plotly),
            "sections": sections,
            "movie": movie,
            "links": contents.links(with_movie=movie is not None),
            "charts_data": _as_script(charts),
            "movie_data": _as_script(pack(contents.runs)),
        }
    )
    return page.lstrip()  # the macros leave empty lines before the doctype


def _group(group: Group, pictures: list[Picture]) -> dict[str, Any]:
    return {
        "title": group.title,
        "legend": legend_of(group.charts) if group.shared else [],
        "pictures": pictures,
    }


def _movie(runs: list[Run]) -> dict[str, Any] | None:
    if not runs:
        return None
    svg, png = print_runs(runs)
    first = runs[0]
    names = "; ".join(run.title for run in runs)
    return {
        "intro": (
            "Each dot is a random feature, drawn at its frequency. Grey dots are where "
            "the particles start, crosses the frequencies of the log-odds, the dotted "
            "circle the domain. Energy and kernel follow the same frame."
        ),
        "titles": [run.title for run in runs],
        "n_frames": len(first.steps),
        "alt_particles": f"{first.positions.shape[1]} particles moving in the plane "
        f"of {first.axes[0]} and {first.axes[1]}.",
        "alt_energy": f"Energy from {first.energy[0]:.4g} to {first.energy[-1]:.4g}.",
        "alt_kernel": "Kernel matrix of samples sorted by class probability.",
        "picture": Picture(
            "particles-frames",
            "The first and the last frame",
            f"Particles at the start and at the end, energy and kernel: {names}.",
            "Particles at the start (grey) and at the end, their energy, and the "
            "kernel matrix before and after.",
            svg,
            png,
            csv="",
            interactive=None,
            legend=[],
            rows=0,
        ),
    }


def _joined_scripts() -> str:
    return "\n".join(_asset(name) for name in _SCRIPTS)


def _asset(name: str) -> str:
    return (files("coulomb.report") / "assets" / name).read_text(encoding="utf-8")


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
