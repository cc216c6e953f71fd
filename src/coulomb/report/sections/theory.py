"""Charts of the theory, from the numbers that `--json` of its two verbs writes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coulomb._support.errors import FileFormatError
from coulomb.experiments.records import Record
from coulomb.report.chart import (
    Axis,
    Chart,
    Curve,
    Field,
    Histogram,
    Ink,
    Layer,
    Numbers,
    numbers,
)
from coulomb.report.rows import clean, metric_tables
from coulomb.report.sections import Group, Section, named_section

# The part of the numbers that tells which verb wrote them.
PARTS = {"meanfield": "flow", "deviations": "deviations"}
_PARTICLES, _DENSITY, _REST = Ink(1), Ink(2), Ink(0, 1)
_BINS = 40
_SHOWN_TIMES = 5


def theory_charts(name: str, key: str, data: Mapping[str, Any]) -> list[Chart]:
    """Chart what `coulomb meanfield` or `coulomb deviations` found."""
    try:
        return _CHARTS[name](key, data)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise FileFormatError(
            f"The numbers of `coulomb {name}` lack a part: {error!r}; write them again "
            "with its `--json`."
        ) from error


def _meanfield(key: str, data: Mapping[str, Any]) -> list[Chart]:
    points = np.array(data["points"], dtype=np.float64)
    draw = _density_on_line if points.shape[1] == 1 else _density_in_plane
    return [
        draw(key, points, data),
        _free_energy(key, data["flow"], data["equilibrium"]),
        _gap(key, data["gap"]),
    ]


def _deviations(key: str, data: Mapping[str, Any]) -> list[Chart]:
    return [_rarity(key, data["deviations"]), _partition(key, data["free_energy"])]


_CHARTS = {"meanfield": _meanfield, "deviations": _deviations}


def _density_on_line(key: str, points: Any, data: Mapping[str, Any]) -> Chart:
    x = numbers(points[:, 0])
    flow, gap = data["flow"], data["gap"]
    particles = np.array(gap["positions"][-1], dtype=np.float64)[..., 0].ravel()
    heights, edges = np.histogram(particles, bins=_BINS, density=True)
    times = flow["times"]
    chosen = np.unique(np.linspace(0, len(times) - 1, _SHOWN_TIMES).round().astype(int))
    words = f"particles at t = {times[-1]:.3g}"
    layers: list[Layer] = [
        Histogram(words, numbers(edges), numbers(heights), _PARTICLES),
    ]
    slots = (6, 3, 4, 5, 2)[-len(chosen) :]
    for i, slot in zip(chosen, slots, strict=True):
        words = f"density at t = {times[i]:.3g}"
        layers.append(_line(words, x, flow["densities"][i], Ink(slot)))
    layers.append(_line("equilibrium", x, data["equilibrium"]["density"], _REST))
    return Chart(
        f"{key}-density",
        "Density evolving, with particles on top",
        Axis("position w"),
        Axis("probability density"),
        tuple(layers),
        "The McKean-Vlasov density at several times, its equilibrium, and the "
        f"Langevin particles ({gap['counts'][-1]:g} of them, all runs together).",
    )


def _density_in_plane(key: str, points: Any, data: Mapping[str, Any]) -> Chart:
    gap = data["gap"]
    density = np.array(gap["density"], dtype=np.float64)
    columns = [np.unique(points[:, axis].round(9)) for axis in range(2)]
    field = np.full((len(columns[1]), len(columns[0])), np.nan)
    places = [
        np.searchsorted(each, points[:, i].round(9)) for i, each in enumerate(columns)
    ]
    field[places[1], places[0]] = density
    particles = np.array(gap["positions"][-1], dtype=np.float64)[0]
    cloud = (numbers(particles[:, 0]), numbers(particles[:, 1]))
    grid = (numbers(columns[0]), numbers(columns[1]))
    return Chart(
        f"{key}-density",
        "Density, with particles on top",
        Axis("position w₁"),
        Axis("position w₂"),
        (
            Field("probability density", *grid, tuple(map(numbers, field))),
            Curve("particles of one run", *cloud, ink=_PARTICLES, line=False),
        ),
        "The McKean-Vlasov density at the last time and the Langevin particles.",
        square=True,
    )


def _free_energy(key: str, flow: Mapping[str, Any], rest: Mapping[str, Any]) -> Chart:
    times = numbers(flow["step_times"])
    level = float(rest["free_energy"])
    excess = tuple(value - level for value in numbers(flow["free_energies"]))
    # The last steps are at the rounding of the equilibrium itself.
    pairs = zip(times, excess, strict=True)
    kept = [(t, value) for t, value in pairs if value > 1e-10 * (1 + abs(level))]
    x, y = ([pair[i] for pair in kept] for i in (0, 1))
    return Chart(
        f"{key}-energy",
        "The free energy falls",
        Axis("time t"),
        Axis("F(ρₜ) − F(equilibrium)", log=True),
        (_line("free energy above equilibrium", x, y, _DENSITY),),
        f"At every accepted step. The equilibrium's free energy is {level:.6g}.",
    )


def _gap(key: str, gap: Mapping[str, Any]) -> Chart:
    counts = numbers(gap["counts"])
    layers: list[Layer] = []
    for name, part, ink in (
        ("observable, r.m.s. error", "observable", _PARTICLES),
        ("W₁ distance", "first", _DENSITY),
    ):
        fit = gap.get(f"{part}_exponent")
        if fit is None:
            continue
        values = (gap[part], gap[f"{part}_errors"])
        layers.append(_measured(f"{name}, ± 2 s.e.", counts, *values, ink))
        line = np.exp(fit["intercept"]) * np.array(counts) ** fit["slope"]
        words = f"N^{fit['slope']:.2f} (95 %: {fit['low']:.2f} to {fit['high']:.2f})"
        words = f"{name.split(',')[0]}: {words}"
        layers.append(_line(words, counts, line, Ink(ink.slot, 1)))
    return Chart(
        f"{key}-gap",
        "Gap between particles and density",
        Axis("number of particles N", log=True, ticks=counts),
        Axis("distance", log=True),
        tuple(layers),
        "Langevin particles against the solution of the McKean-Vlasov equation, with "
        "the fitted powers of N.",
    )


def _rarity(key: str, curve: Mapping[str, Any]) -> Chart:
    speeds = numbers(curve["speeds"])
    values = (curve["log_probabilities"], curve["standard_errors"])
    fit, rate = curve["fit"], float(curve["rate"])
    fitted = f"± 2 s.e.; fitted rate {fit['slope']:.3f}"
    predicted = f"rate {rate:.3f}, no prefactor"
    same = np.allclose(speeds, numbers(curve["counts"]))
    return Chart(
        f"{key}-rarity",
        "Deviations become rare",
        Axis("number of particles N" if same else "speed β_N"),
        Axis("log P(|∫f dμ_N − f*| ≥ δ)"),
        (
            _measured(f"measured, {fitted}", speeds, *values, _PARTICLES),
            _line(f"predicted, {predicted}", speeds, curve["predictions"], _REST),
        ),
        f"Fitted rate {fit['slope']:.3f} ± {fit['standard_error']:.3f} (with the "
        f"prefactor of sharp large deviations); predicted {rate:.3f}.",
    )


def _partition(key: str, curve: Mapping[str, Any]) -> Chart:
    counts = numbers(curve["counts"])
    limit = float(curve["limit"])
    values = (curve["values"], curve["standard_errors"])
    finite = curve["finite_limits"]
    return Chart(
        f"{key}-partition",
        "Free energy of N particles",
        Axis("number of particles N", log=True, ticks=counts),
        Axis("−log Z_N / β_N"),
        (
            _measured("measured, ± 2 s.e.", counts, *values, _PARTICLES),
            _line("mean field at β_N / N", counts, finite, _DENSITY),
            _line("limit", (counts[0], counts[-1]), (limit, limit), _REST),
        ),
        f"The variational limit is {limit:.6g}.",
    )


def _line(name: str, x: Sequence[float], y: Iterable[float], ink: Ink) -> Curve:
    return Curve(name, tuple(x), numbers(y), ink=ink, points=False)


def _measured(
    name: str, x: Numbers, y: Sequence[float], errors: Sequence[float], ink: Ink
) -> Curve:
    """Make points, each with two standard errors either way."""
    middle, reach = np.array(numbers(y)), 2 * np.array(numbers(errors))
    parts = zip(x, middle, reach, strict=True)
    notes = tuple(f"{a:g}: {v:.4g} ± {e:.2g}" for a, v, e in parts)
    band = (numbers(middle - reach), numbers(middle + reach))
    return Curve(name, x, numbers(middle), *band, notes, ink, line=False)


def theory_sections(
    theory: Mapping[str, Mapping[str, Any]],
    records: Mapping[str, Sequence[Record]],
    problems: list[str],
) -> list[Section]:
    """Chart the numbers of the theory's verbs, and tabulate their records."""
    sections = []
    for key, part in PARTS.items():
        groups = []
        for i, (name, data) in enumerate(theory.items()):
            if part not in data:
                continue
            try:
                charts = theory_charts(key, f"{key}-{i}", data)
            except FileFormatError as error:
                problems.append(f"{name}.json: {error}")
                continue
            words = clean(name) if len(theory) > 2 else ""
            groups.append(Group(words, charts, shared=False))
        tables = metric_tables(key, records.get(key, []))
        if groups or tables:
            sections.append(named_section(key, groups, tables))
    return sections
