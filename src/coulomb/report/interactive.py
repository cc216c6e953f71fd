"""Charts for the page, through plotly."""

import json
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from coulomb.report.chart import Axis, Chart, Curve, Dots, Field, Histogram
from coulomb.report.palette import DASHES, LIGHT, MARKERS

BAND_OPACITY = 0.13


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
    figure = go.Figure()
    for layer in chart.layers:
        if isinstance(layer, Curve):
            for trace in _curve(layer):
                figure.add_trace(trace)
        elif isinstance(layer, Dots):
            figure.add_trace(_dots(layer, chart.y))
        elif isinstance(layer, Histogram):
            figure.add_trace(_histogram(layer))
        else:
            figure.add_trace(_field(layer))
    curves = [layer for layer in chart.layers if isinstance(layer, Curve)]
    figure.update_layout(
        template="none",
        showlegend=False,
        hovermode="closest",
        bargap=0,
        margin={"l": 64, "r": 14, "t": 10, "b": 52},
        xaxis=_axis(chart.x, [x for layer in curves for x in layer.x]),
        yaxis=_axis(chart.y, [y for layer in curves for y in layer.y]),
    )
    if chart.square:
        figure.update_yaxes(scaleanchor="x", scaleratio=1)
        figure.update_xaxes(constrain="domain")
    return json.loads(figure.to_json())


def plain_text(text: str) -> str:
    """Keep plotly from reading tags in a text."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _curve(curve: Curve) -> list[Any]:
    colour = LIGHT[curve.ink.slot]
    name = plain_text(curve.name)
    traces = []
    if curve.low and curve.line:
        traces.append(
            go.Scatter(
                x=_round(curve.x + curve.x[::-1]),
                y=_round(curve.high + curve.low[::-1]),
                fill="toself",
                mode="none",
                fillcolor=_faded(colour),
                hoverinfo="skip",
                name=name,
                meta={"slot": curve.ink.slot, "part": "band", "method": curve.name},
            )
        )
    mode = "+".join(
        word
        for word, wanted in (("lines", curve.line), ("markers", curve.points))
        if wanted
    )
    bars = None
    if curve.low and not curve.line:
        bars = {
            "array": _round(h - y for h, y in zip(curve.high, curve.y, strict=True)),
            "arrayminus": _round(
                y - low for y, low in zip(curve.y, curve.low, strict=True)
            ),
        }
    notes = [plain_text(note) for note in curve.notes]
    traces.append(
        go.Scatter(
            x=_round(curve.x),
            y=_round(curve.y),
            mode=mode,
            name=name,
            text=notes or None,
            hovertemplate="%{text}<extra>%{fullData.name}</extra>" if notes else None,
            line={"color": colour, "width": 2, "dash": DASHES[curve.ink.dash]},
            marker={"color": colour, "size": 6, "symbol": MARKERS[curve.ink.marker]},
            error_y=bars,
            meta={"slot": curve.ink.slot, "part": "line", "method": curve.name},
        )
    )
    return traces


def _dots(dots: Dots, axis: Axis) -> Any:
    colour = LIGHT[dots.ink.slot]
    names = [plain_text(axis.names[round(row)]) for row in dots.rows]
    return go.Scatter(
        x=_round(dots.values),
        y=_round(dots.rows),
        mode="markers",
        name=plain_text(dots.name),
        text=names,
        hovertemplate="%{text}: %{x:.4f}<extra>%{fullData.name}</extra>",
        marker={"color": colour, "size": 8, "symbol": MARKERS[dots.ink.marker]},
        error_x={"array": _round(dots.reach)} if dots.reach else None,
        meta={"slot": dots.ink.slot, "part": "line", "method": dots.name},
    )


def _histogram(bars: Histogram) -> Any:
    pairs = list(zip(bars.edges, bars.edges[1:], strict=False))
    return go.Bar(
        x=_round((left + right) / 2 for left, right in pairs),
        y=_round(bars.heights),
        width=_round(right - left for left, right in pairs),
        name=plain_text(bars.name),
        marker={"color": LIGHT[bars.ink.slot], "opacity": 0.35, "line": {"width": 0}},
        meta={"slot": bars.ink.slot, "part": "bars", "method": bars.name},
    )


def _field(field: Field) -> Any:
    return go.Heatmap(
        x=_round(field.x),
        y=_round(field.y),
        z=[_round(row) for row in field.z],
        colorscale="Cividis",
        colorbar={
            "title": {"text": plain_text(field.name), "side": "right"},
            "thickness": 12,
            "outlinewidth": 0,
        },
        hovertemplate="%{z:.4g}<extra></extra>",
        name=plain_text(field.name),
        meta={"slot": 0, "part": "field", "method": field.name},
    )


def _axis(axis: Axis, shown: list[float]) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "title": {"text": plain_text(axis.label), "standoff": 10},
        "automargin": True,
        "zeroline": axis.zero,
        "zerolinewidth": 1.5,
        "showgrid": True,
        "ticks": "outside",
        "ticklen": 4,
        "tickfont": {"size": 11},
        "showline": True,
        "fixedrange": False,
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
        wide = bool(shown) and max(shown) > 30 * min(shown)
        layout["dtick"] = 1 if wide else "D2"  # D2 labels 2 and 5 as well
        if axis.ticks:
            layout.pop("dtick", None)
            layout |= {
                "tickmode": "array",
                "tickvals": list(axis.ticks),
                "ticktext": [f"{tick:,g}" for tick in axis.ticks],
            }
    return layout


def _round(values: Any) -> list[float | None]:
    """Six digits are more than a screen shows, and half of the bytes."""
    rounded = (float(f"{value:.6g}") for value in values)
    return [value if value == value else None for value in rounded]


def _faded(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{BAND_OPACITY})"
