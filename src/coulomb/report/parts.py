"""Parts of the page: sections, groups of charts under one legend, pictures."""

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from coulomb.report.chart import (
    Chart,
    Curve,
    Dots,
    Field,
    Histogram,
    Ink,
    Layer,
    drawable,
)
from coulomb.report.interactive import interactive
from coulomb.report.print import printed
from coulomb.report.tables import Table, harmless


@dataclass(frozen=True)
class Group:
    """Charts that share a legend."""

    title: str
    charts: tuple[Chart, ...]
    shared: bool = True


@dataclass(frozen=True)
class Section:
    """One part of the page."""

    key: str
    title: str
    link: str
    intro: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    tables: tuple[Table, ...] = ()


class LegendEntry(NamedTuple):
    """A name and its look."""

    name: str
    ink: Ink


class Picture(NamedTuple):
    """A chart in all its forms."""

    key: str
    title: str
    alt: str
    caption: str
    svg: bytes
    png: bytes
    csv: str
    interactive: dict[str, Any] | None
    legend: list[LegendEntry]
    rows: int  # of a vertical axis with names


def draw(chart: Chart, *, own_legend: bool) -> Picture:
    """Draw a chart in all its forms."""
    chart = drawable(chart)
    svg, png = printed(chart)
    return Picture(
        chart.key,
        chart.title,
        chart.alt,
        chart.caption,
        svg,
        png,
        chart_numbers(chart),
        interactive(chart),
        legend_of([chart]) if own_legend else [],
        len(chart.y.names),
    )


def legend_of(charts: Iterable[Chart]) -> list[LegendEntry]:
    """List what can be switched on and off in a group of charts."""
    entries: dict[str, LegendEntry] = {}
    for chart in charts:
        for layer in drawable(chart).layers:
            if not isinstance(layer, Field):
                entries.setdefault(layer.name, LegendEntry(layer.name, layer.ink))
    return list(entries.values())


def chart_numbers(chart: Chart) -> str:
    """Write the numbers behind a chart as comma-separated values.

    Examples
    --------
    >>> from coulomb.report.chart import Axis
    >>> layer = Curve("a", (1.0,), (2.0,), (1.5,), (2.5,))
    >>> print(chart_numbers(Chart("k", "t", Axis("x"), Axis("y"), (layer,))))
    series,x,y,low,high
    a,1.0,2.0,1.5,2.5
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\r\n")
    writer.writerow(["series", "x", "y", "low", "high"])
    for layer in chart.layers:
        for line in _lines(layer, chart.y.names):
            writer.writerow([harmless(layer.name), *line])
    return file.getvalue()


def _lines(layer: Layer, names: tuple[str, ...]) -> Iterator[tuple[object, ...]]:
    if isinstance(layer, Curve):
        for i, point in enumerate(zip(layer.x, layer.y, strict=True)):
            band = (layer.low[i], layer.high[i]) if layer.low else ("", "")
            yield (*point, *band)
    elif isinstance(layer, Dots):
        for i, (row, value) in enumerate(zip(layer.rows, layer.values, strict=True)):
            reach = layer.reach[i] if layer.reach else None
            ends = ("", "") if reach is None else (value - reach, value + reach)
            yield (harmless(names[round(row)]), value, *ends)
    elif isinstance(layer, Histogram):
        for left, height in zip(layer.edges, layer.heights, strict=False):
            yield (left, height, "", "")
    else:
        for y, values in zip(layer.y, layer.z, strict=True):
            for x, value in zip(layer.x, values, strict=True):
                yield (x, y, value, "")
