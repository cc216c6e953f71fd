"""Charts as plain data, and their colours: drawn on the page and in print alike."""

import math
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, NamedTuple, TypeVar

from coulomb._support.archive import csv_text
from coulomb.report import asset

Numbers = tuple[float, ...]

_COLOURS = tomllib.loads(asset("colours.toml"))
_SLOTS: list[list[str]] = _COLOURS["slots"]
LIGHT, DARK = zip(*_SLOTS, strict=True)
TONES: dict[str, list[str]] = _COLOURS["tones"]
METHOD_SLOTS: dict[str, list[int]] = _COLOURS["methods"]
BAND_OPACITY = 0.13
_MOST_LAYERS = 100


def theme_styles() -> str:
    """Write both themes as style sheet variables; `data-theme` overrules the system."""
    colours = TONES | {f"slot-{i}": pair for i, pair in enumerate(_SLOTS)}
    light, dark = (
        "".join(f"--{name}:{pair[theme]};" for name, pair in colours.items())
        for theme in (0, 1)
    )
    slots = "".join(
        f".slot-{i}{{stroke:var(--slot-{i})}}.dot.slot-{i}{{fill:var(--slot-{i})}}"
        for i in range(len(_SLOTS))
    )
    return (
        f":root{{color-scheme:light;{light}}}\n"
        "@media (prefers-color-scheme:dark){:root:not([data-theme=light])"
        f"{{color-scheme:dark;{dark}}}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n{slots}\n"
    )


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

    def shows(self, value: float) -> bool:
        """Whether a value has a place on this axis."""
        return math.isfinite(value) and (value > 0 or not self.log)


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
Drawn = TypeVar("Drawn", Curve, Dots)


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
                points = list(zip(layer.x, layer.y, strict=True))
                ends = points[:: len(points) - 1 or 1]
                told = ", ".join(f"{y:.3g} at {x:.3g}" for x, y in ends)
                words.append(f"{layer.name}: {told}.")
            elif isinstance(layer, Dots) and self.y.names:
                pairs = zip(layer.rows, layer.values, strict=True)
                each = (f"{self.y.names[round(r)]} {v:.3g}" for r, v in pairs)
                words.append(f"{layer.name}: {', '.join(each)}.")
            else:
                words.append(f"{layer.name}.")
        if len(self.layers) > 12:
            words.append(f"And {len(self.layers) - 12} more.")
        return " ".join(words)


def drawable(chart: Chart) -> Chart:
    """Leave out what an axis cannot show: no number, or nothing to take the log of.

    Of more layers than a legend has room for the first are shown, and the caption says
    so.

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
            points = zip(layer.x, layer.y, strict=True)
            kept = [chart.x.shows(x) and chart.y.shows(y) for x, y in points]
            layer = _pick(layer, kept, "x", "y", "low", "high", "notes")
            low, high = layer.low, layer.high
            if chart.y.log:  # a band that reaches zero ends at the edge of the picture
                low = tuple(max(b, y / 10) for b, y in zip(low, layer.y, strict=False))
            if not all(map(math.isfinite, (*low, *high))):
                low = high = ()
            layer = replace(layer, low=low, high=high)
        elif isinstance(layer, Dots):
            kept = [math.isfinite(value) for value in layer.values]
            layer = _pick(layer, kept, "values", "rows", "reach")
            reach = tuple(r if math.isfinite(r) else 0.0 for r in layer.reach)
            layer = replace(layer, reach=reach)
        else:
            kept = [True]
        if any(kept):
            layers.append(layer)
    caption = chart.caption
    if len(layers) > _MOST_LAYERS:
        caption += f" The first {_MOST_LAYERS} of {len(layers):,} rows."
    return replace(chart, layers=tuple(layers[:_MOST_LAYERS]), caption=caption.strip())


def _pick(layer: Drawn, kept: Sequence[bool], *columns: str) -> Drawn:
    """Take some entries of the columns of a layer; a column may be empty."""
    picked: dict[str, Any] = {
        name: tuple(compress(getattr(layer, name), kept)) for name in columns
    }
    return replace(layer, **picked)


def numbers(values: Iterable[float | None]) -> Numbers:
    """Make a tuple of floats, with NaN for what is missing.

    Examples
    --------
    >>> numbers([1, None])
    (1.0, nan)
    """
    return tuple(math.nan if value is None else float(value) for value in values)


def chart_numbers(chart: Chart) -> str:
    """Write the numbers behind a chart as comma-separated values.

    Examples
    --------
    >>> layer = Curve("a", (1.0,), (2.0,), (1.5,), (2.5,))
    >>> print(chart_numbers(Chart("k", "t", Axis("x"), Axis("y"), (layer,))))
    series,x,y,low,high
    a,1.0,2.0,1.5,2.5
    """
    rows = (
        (layer.name, *line)
        for layer in chart.layers
        for line in _lines(layer, chart.y.names)
    )
    return csv_text(("series", "x", "y", "low", "high"), rows)


def _lines(layer: Layer, names: tuple[str, ...]) -> Iterator[tuple[object, ...]]:
    if isinstance(layer, Curve):
        for i, point in enumerate(zip(layer.x, layer.y, strict=True)):
            band = (layer.low[i], layer.high[i]) if layer.low else ("", "")
            yield (*point, *band)
    elif isinstance(layer, Dots):
        for i, (row, value) in enumerate(zip(layer.rows, layer.values, strict=True)):
            reach = layer.reach[i] if layer.reach else None
            ends = ("", "") if reach is None else (value - reach, value + reach)
            yield (names[round(row)], value, *ends)
    elif isinstance(layer, Histogram):
        for left, height in zip(layer.edges, layer.heights, strict=False):
            yield (left, height, "", "")
    else:
        for y, values in zip(layer.y, layer.z, strict=True):
            for x, value in zip(layer.x, values, strict=True):
                yield (x, y, value, "")
