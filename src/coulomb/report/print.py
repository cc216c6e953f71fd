"""Charts as a paper would print them, through matplotlib."""

import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

from coulomb._support.archive import write_whole
from coulomb.report.chart import (
    BAND_OPACITY,
    LIGHT,
    Axis,
    Chart,
    Dots,
    Field,
    Histogram,
    Layer,
    drawable,
)
from coulomb.report.rows import tick

PRINT_STYLE = matplotlib.rc_params_from_file(
    Path(__file__).parent / "assets" / "print.mplstyle", use_default_template=False
)
_WIDTH, _HEIGHT = 5.6, 3.5  # inches
_DASHES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "D", "^", "x", "P", "*")
_MANY_DECADES, _FEW_LABELS = 1e4, 40
_LETTERS_PER_INCH = 14  # of the legend's font


def printed(chart: Chart) -> tuple[bytes, bytes]:
    """Draw a chart, as SVG and as PNG."""
    with matplotlib.rc_context(PRINT_STYLE):
        height = _HEIGHT + (0.8 if chart.square else 0)
        height = max(height, 1.1 + 0.2 * min(len(chart.y.names), 400))
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        legend_below(figure, _draw_chart(figure.subplots(), chart))
        return save(figure)


def print_side_by_side(charts: Sequence[Chart], path: Path) -> None:
    """Draw charts in one picture, each with a legend of its own."""
    with matplotlib.rc_context(PRINT_STYLE):
        figure = Figure(figsize=(4.2 * len(charts), 4.6), layout="constrained")
        for axis, chart in zip(figure.subplots(1, len(charts)), charts, strict=True):
            entries = _draw_chart(axis, drawable(chart))
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
            axis.legend(*zip(*entries, strict=True), fontsize=7, **below)
        write_whole(path, lambda file: figure.savefig(file, dpi=110))


def _draw_chart(axis: Any, chart: Chart) -> list[tuple[Any, str]]:
    """Draw a chart on an axis and list the entries of its legend."""
    keys = [_draw(axis, layer) for layer in chart.layers]
    axis.set_title(safe_text(chart.title))
    axis.set(xlabel=safe_text(chart.x.label), ylabel=safe_text(chart.y.label))
    _scale(axis.xaxis, axis.set_xscale, chart.x)
    _scale(axis.yaxis, axis.set_yscale, chart.y)
    if chart.x.zero:
        axis.axvline(0, color=LIGHT[0], linewidth=0.8)
    if chart.square:
        axis.set_aspect("equal")
    shown = zip(keys, chart.layers, strict=True)
    return [(key, safe_text(layer.name)) for key, layer in shown if key is not None]


def safe_text(text: str) -> str:
    r"""Keep matplotlib from reading formulas in a text.

    Examples
    --------
    >>> print(safe_text("5$ and 6$"))
    5\$ and 6\$
    """
    return re.sub(r"(?<!\\)\$", r"\\$", text)


def legend_below(figure: Figure, entries: list[tuple[Any, str]]) -> None:
    """Put the legend below the axes, where it covers nothing."""
    if not entries:
        return
    width = float(figure.get_figwidth())
    longest = max(len(name) for _, name in entries) + 6
    columns = max(1, min(len(entries), int(width * _LETTERS_PER_INCH / longest)))
    rows = -(-len(entries) // columns)
    figure.set_figheight(figure.get_figheight() + 0.17 * rows)
    keys, names = zip(*entries, strict=True)
    figure.legend(keys, names, loc="outside lower center", ncols=columns)


def save(figure: Figure) -> tuple[bytes, bytes]:
    """Write a figure to memory; `savefig` would draw it twice for each file."""
    svg, png = io.BytesIO(), io.BytesIO()
    with warnings.catch_warnings():
        # A name may hold letters that the font does not; boxes are better than nothing.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})
        # Both files have the same places; finding them is half of the work.
        figure.set_layout_engine("none")
        figure.set_dpi(120)
        FigureCanvasAgg(figure).print_png(png, metadata={"Software": "coulomb"})
    return svg.getvalue(), png.getvalue()


def _draw(axis: Any, layer: Layer) -> Any:
    """Draw one layer and return its key in the legend."""
    if isinstance(layer, Field):
        values = np.ma.masked_invalid(np.array(layer.z))
        look = {"cmap": "cividis", "shading": "nearest", "rasterized": True}
        mesh = axis.pcolormesh(np.array(layer.x), np.array(layer.y), values, **look)
        axis.grid(False)
        axis.figure.colorbar(mesh, ax=axis, shrink=0.85, label=safe_text(layer.name))
        return None
    colour = LIGHT[layer.ink.slot]
    marker = _MARKERS[layer.ink.marker]
    if isinstance(layer, Histogram):
        axis.stairs(layer.heights, layer.edges, fill=True, color=colour, alpha=0.35)
        return Patch(color=colour, alpha=0.35)
    style: dict[str, Any] = {"color": colour, "linestyle": "none", "marker": marker}
    if isinstance(layer, Dots):
        style |= {"markersize": 5, "elinewidth": 1.2, "xerr": layer.reach or None}
        return axis.errorbar(layer.values, layer.rows, **style)
    if layer.line:
        style["linestyle"] = _DASHES[layer.ink.dash]
    if not layer.points:
        style["marker"] = "none"
    if layer.low and layer.line:
        look = {"color": colour, "alpha": BAND_OPACITY, "linewidth": 0}
        axis.fill_between(layer.x, layer.low, layer.high, **look)
    elif layer.low:  # the key has a bar too, and is no point of the data
        reach = np.abs(np.array([layer.low, layer.high]) - layer.y)
        return axis.errorbar(layer.x, layer.y, reach, elinewidth=1.2, **style)
    axis.plot(layer.x, layer.y, **style)
    return Line2D([], [], **style)


def _scale(axis: Any, set_scale: Any, wanted: Axis) -> None:
    if wanted.names:
        axis.set_ticks(range(len(wanted.names)), labels=[*map(safe_text, wanted.names)])
        axis.axes.set_ylim(len(wanted.names) - 0.5, -0.5)
    if not wanted.log:
        return
    set_scale("log")
    low, high = axis.get_view_interval()
    if high > _MANY_DECADES * low:  # minor ticks would be a grey bar
        axis.set_minor_locator(NullLocator())
    if high < _FEW_LABELS * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    # As formulas, which is matplotlib's way, powers would take a fifth of the time.
    axis.set_major_formatter(lambda place, _: tick(place))
    axis.set_minor_formatter("")
    if wanted.ticks:
        axis.set_ticks(wanted.ticks, labels=[f"{place:,g}" for place in wanted.ticks])
        axis.set_ticks([], minor=True)
