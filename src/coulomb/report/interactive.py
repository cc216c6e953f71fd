"""Charts for the page, through plotly."""

import json
from typing import Any

import numpy as np
from plotly.offline import get_plotlyjs

from coulomb.report import asset
from coulomb.report.chart import (
    BAND_OPACITY,
    LIGHT,
    Axis,
    Chart,
    Curve,
    Dots,
    Field,
    Histogram,
    Layer,
)

_STYLE: dict[str, Any] = json.loads(asset("plotly.json"))
_DASHES = ("solid", "dash", "dot", "dashdot")
_MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star")


def library() -> str:
    """Give plotly's script, to be put on the page once."""
    return str(get_plotlyjs()).replace("\r\n", "\n")


def interactive(chart: Chart) -> dict[str, Any]:
    """Describe a chart to plotly.

    The legend is the page's own, so that it can be reached by keyboard; colours are
    slots of the palette, kept in `meta`, so that the page can change its theme.

    Examples
    --------
    >>> curve = Curve("<b>a", (1.0, 2.0), (3.0, 4.0))
    >>> figure = interactive(Chart("k", "t", Axis("x"), Axis("y"), (curve,)))
    >>> figure["data"][0]["name"]
    '&lt;b>a'
    """
    curves = [layer for layer in chart.layers if isinstance(layer, Curve)]
    x = _axis(chart.x, [x for layer in curves for x in layer.x])
    y = _axis(chart.y, [y for layer in curves for y in layer.y])
    if chart.square:
        x["constrain"] = "domain"
        y |= {"scaleanchor": "x", "scaleratio": 1}
    traces: list[dict[str, Any]] = []
    for layer in chart.layers:
        draw: Any = _TRACES[type(layer)]
        traces += draw(layer, chart.y)
    return {"data": traces, "layout": _STYLE["layout"] | {"xaxis": x, "yaxis": y}}


def plain_text(text: str) -> str:
    """Keep plotly from reading tags in a text."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _trace(kind: str, layer: Layer, part: str, **more: Any) -> dict[str, Any]:
    """Say what a trace is of: the page finds it by its method and its part."""
    slot = 0 if isinstance(layer, Field) else layer.ink.slot
    meta = {"slot": slot, "part": part, "method": layer.name}
    return {"type": kind, "name": plain_text(layer.name), "meta": meta, **more}


def _curve(curve: Curve, _: Axis) -> list[dict[str, Any]]:
    colour = LIGHT[curve.ink.slot]
    line = _trace(
        "scatter",
        curve,
        "line",
        x=_round(curve.x),
        y=_round(curve.y),
        mode="+".join(["lines"] * curve.line + ["markers"] * curve.points),
        line={"color": colour, "width": 2, "dash": _DASHES[curve.ink.dash]},
        marker={"color": colour, "size": 6, "symbol": _MARKERS[curve.ink.marker]},
    )
    if curve.notes:
        line["text"] = [plain_text(note) for note in curve.notes]
        line["hovertemplate"] = "%{text}<extra>%{fullData.name}</extra>"
    if not curve.low:
        return [line]
    if not curve.line:
        middle, low, high = (np.array(v) for v in (curve.y, curve.low, curve.high))
        ends = {"array": _round(high - middle), "arrayminus": _round(middle - low)}
        return [line | {"error_y": ends}]
    band = _trace(
        "scatter",
        curve,
        "band",
        x=_round(curve.x + curve.x[::-1]),
        y=_round(curve.high + curve.low[::-1]),
        fill="toself",
        mode="none",
        fillcolor=_faded(colour),
        hoverinfo="skip",
    )
    return [band, line]


def _dots(dots: Dots, axis: Axis) -> list[dict[str, Any]]:
    trace = _trace(
        "scatter",
        dots,
        "line",
        x=_round(dots.values),
        y=_round(dots.rows),
        mode="markers",
        text=[plain_text(axis.names[round(row)]) for row in dots.rows],
        hovertemplate="%{text}: %{x:.4f}<extra>%{fullData.name}</extra>",
        marker={
            "color": LIGHT[dots.ink.slot],
            "size": 8,
            "symbol": _MARKERS[dots.ink.marker],
        },
    )
    reach = {"error_x": {"array": _round(dots.reach)}} if dots.reach else {}
    return [trace | reach]


def _histogram(bars: Histogram, _: Axis) -> list[dict[str, Any]]:
    edges = np.array(bars.edges)
    look = {"color": LIGHT[bars.ink.slot], "opacity": 0.35, "line": {"width": 0}}
    places = _round((edges[:-1] + edges[1:]) / 2)
    size = {"y": _round(bars.heights), "width": _round(np.diff(edges))}
    return [_trace("bar", bars, "bars", x=places, **size, marker=look)]


def _field(field: Field, _: Axis) -> list[dict[str, Any]]:
    title = {"text": plain_text(field.name), "side": "right"}
    trace = _trace(
        "heatmap",
        field,
        "field",
        x=_round(field.x),
        y=_round(field.y),
        z=[_round(row) for row in field.z],
        colorscale="Cividis",
        colorbar={"title": title, "thickness": 12, "outlinewidth": 0},
        hovertemplate="%{z:.4g}<extra></extra>",
    )
    return [trace]


_TRACES = {Curve: _curve, Dots: _dots, Histogram: _histogram, Field: _field}


def _axis(axis: Axis, shown: list[float]) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "title": {"text": plain_text(axis.label), "standoff": 10},
        **_STYLE["axis"],
        "zeroline": axis.zero,
    }
    if axis.names:
        layout |= {
            "tickmode": "array",
            "tickvals": list(range(len(axis.names))),
            "ticktext": [plain_text(name) for name in axis.names],
            "range": [len(axis.names) - 0.5, -0.5],
        }
    if axis.log:
        layout |= {"type": "log", "exponentformat": "power"}
        if axis.ticks:
            layout |= {
                "tickmode": "array",
                "tickvals": list(axis.ticks),
                "ticktext": [f"{tick:,g}" for tick in axis.ticks],
            }
        else:
            wide = bool(shown) and max(shown) > 30 * min(shown)
            layout["dtick"] = 1 if wide else "D2"  # D2 labels 2 and 5 as well
    return layout


def _round(values: Any) -> list[float | None]:
    """Six digits are more than a screen shows, and half of the bytes."""
    rounded = (float(f"{value:.6g}") for value in values)
    return [value if value == value else None for value in rounded]


def _faded(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{BAND_OPACITY})"
