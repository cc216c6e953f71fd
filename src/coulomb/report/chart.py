"""Charts as plain data: one description, drawn on the page and in print alike."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from coulomb.report.tables import harmless

Numbers = tuple[float, ...]


class Ink(NamedTuple):
    """How a method is told apart: by colour, by dash and by marker.

    Slot 0 is the colour of the text, so that references stand out in both themes.
    """

    slot: int = 0
    dash: int = 0  # 0 solid, 1 dashed, 2 dotted, 3 dash-dot
    marker: int = 0


@dataclass(frozen=True)
class Axis:
    """One axis."""

    label: str
    log: bool = False
    ticks: Numbers = ()
    names: tuple[str, ...] = ()
    zero: bool = False


@dataclass(frozen=True)
class Curve:
    """A line through points, with a band."""

    name: str
    x: Numbers
    y: Numbers
    low: Numbers = ()
    high: Numbers = ()
    notes: tuple[str, ...] = ()
    ink: Ink = Ink()  # noqa: RUF009 - immutable
    line: bool = True
    points: bool = True


@dataclass(frozen=True)
class Histogram:
    """Heights over bins."""

    name: str
    edges: Numbers
    heights: Numbers
    ink: Ink = Ink()  # noqa: RUF009 - immutable


@dataclass(frozen=True)
class Field:
    """Values over a grid, as colours."""

    name: str
    x: Numbers
    y: Numbers
    z: tuple[Numbers, ...]


@dataclass(frozen=True)
class Dots:
    """Values of named rows, each with an interval."""

    name: str
    values: Numbers
    rows: Numbers
    reach: Numbers = ()
    ink: Ink = Ink()  # noqa: RUF009 - immutable


Layer = Curve | Histogram | Field | Dots


@dataclass(frozen=True)
class Chart:
    """One picture."""

    key: str
    title: str
    x: Axis
    y: Axis
    layers: tuple[Layer, ...]
    caption: str = ""
    square: bool = False

    @property
    def alt(self) -> str:
        """Say in words what the picture shows, for those who do not see it."""
        words = [f"{self.title}: {self.y.label} against {self.x.label}."]
        for layer in self.layers[:12]:
            if isinstance(layer, Curve) and layer.y:
                first, last = _short(layer.y[0]), _short(layer.y[-1])
                start, end = _short(layer.x[0]), _short(layer.x[-1])
                words.append(
                    f"{layer.name}: {first} at {start}, {last} at {end}."
                    if len(layer.y) > 1
                    else f"{layer.name}: {first} at {start}."
                )
            elif isinstance(layer, Dots) and self.y.names:
                pairs = zip(layer.rows, layer.values, strict=True)
                each = (f"{self.y.names[round(r)]} {_short(v)}" for r, v in pairs)
                words.append(f"{layer.name}: {', '.join(each)}.")
            else:
                words.append(f"{layer.name}.")
        if len(self.layers) > 12:
            words.append(f"And {len(self.layers) - 12} more.")
        return " ".join(words)


def drawable(chart: Chart) -> Chart:
    """Leave out what an axis cannot show: no number, or nothing to take the log of.

    Examples
    --------
    >>> curve = Curve("a", (0.0, 1.0, 2.0), (1.0, 2.0, float("nan")))
    >>> axis = Axis("x", log=True)
    >>> drawable(Chart("k", "t", axis, Axis("y"), (curve,))).layers[0].x
    (1.0,)
    """
    layers: list[Layer] = []
    for layer in chart.layers:
        if isinstance(layer, Curve):
            kept = _kept(layer, chart)
            if not kept:
                continue
            layer = _pick(layer, kept, chart.y.log)
        elif isinstance(layer, Dots):
            layer = _known(layer)
            if not layer.values:
                continue
        layers.append(layer)
    return replace(chart, layers=tuple(layers))


def _kept(curve: Curve, chart: Chart) -> list[int]:
    def fine(value: float, axis: Axis) -> bool:
        return math.isfinite(value) and (value > 0 or not axis.log)

    pairs = enumerate(zip(curve.x, curve.y, strict=True))
    return [i for i, (x, y) in pairs if fine(x, chart.x) and fine(y, chart.y)]


def _known(dots: Dots) -> Dots:
    kept = [i for i, value in enumerate(dots.values) if math.isfinite(value)]
    reach = [dots.reach[i] for i in kept] if dots.reach else []
    return replace(
        dots,
        values=tuple(dots.values[i] for i in kept),
        rows=tuple(dots.rows[i] for i in kept),
        reach=tuple(r if math.isfinite(r) else 0.0 for r in reach),
    )


def _pick(curve: Curve, kept: Sequence[int], log: bool) -> Curve:
    def take(values: Sequence[float]) -> Numbers:
        return tuple(values[i] for i in kept) if values else ()

    y, low, high = take(curve.y), take(curve.low), take(curve.high)
    if log:  # a band that reaches zero ends at the edge of the picture
        low = tuple(
            max(bottom, middle / 10) for bottom, middle in zip(low, y, strict=False)
        )
    finite = all(map(math.isfinite, (*low, *high)))
    return replace(
        curve,
        x=take(curve.x),
        y=y,
        low=low if finite else (),
        high=high if finite else (),
        notes=tuple(curve.notes[i] for i in kept) if curve.notes else (),
    )


def numbers(values: Iterable[float | None]) -> Numbers:
    """Make a tuple of floats, with NaN for what is missing.

    Examples
    --------
    >>> numbers([1, None])
    (1.0, nan)
    """
    return tuple(math.nan if value is None else float(value) for value in values)


def _short(value: float) -> str:
    return f"{value:.3g}"


def chart_numbers(chart: Chart) -> str:
    """Write the numbers behind a chart as comma-separated values.

    Examples
    --------
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
