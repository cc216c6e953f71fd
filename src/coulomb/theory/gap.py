"""Particles against the density: distances, and the gap as `N` grows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError
from coulomb._support.stats import Fit, fit_power, standard_error
from coulomb.domains import check_boundary
from coulomb.dynamics.langevin import ProjectedLangevin
from coulomb.features import Particles
from coulomb.theory.deviations import observable_values
from coulomb.theory.ensembles import draw_independent
from coulomb.theory.flow import FlowSettings, evolve
from coulomb.theory.grids import AbstractGrid, FloatArray, Interval
from coulomb.theory.system import Function, MeanField, evaluate


class Distances(NamedTuple):
    """Wasserstein distances of order one and two."""

    first: float
    second: float


def line_distances(
    positions: FloatArray, grid: AbstractGrid, density: FloatArray
) -> Distances:
    """Compare particles on the line with a piecewise constant density.

    `W_p^p = int_0^1 |Q_N(u) - Q(u)|^p du`; between jumps of the empirical quantile
    function `Q_N` and kinks of `Q` the integrand is a power of a line, so that the
    integral is exact.

    Parameters
    ----------
    positions
        Shape `(n,)` or `(n, 1)`.
    grid
        An interval.
    density
        Values on the cells, of mass one.

    Returns
    -------
    Distances
        `W_1` and `W_2`.

    Examples
    --------
    >>> grid = Interval(0.0, 1.0, 10)
    >>> gap = line_distances(np.array([0.5]), grid, grid.uniform())
    >>> round(gap.first, 6), round(gap.second, 6)
    (0.25, 0.288675)
    """
    if not isinstance(grid, Interval):
        raise ParameterError(f"`grid` must be an Interval; got {grid!r}.")
    points = np.sort(np.asarray(positions, dtype=np.float64).reshape(-1))
    masses = density * grid.volumes
    levels = np.concatenate([[0.0], np.cumsum(masses)])
    levels /= levels[-1]
    rises = np.concatenate([[True], np.diff(levels) > 0])
    marks = np.arange(points.size + 1) / points.size
    cuts = np.union1d(levels, marks)
    low, high = cuts[:-1], cuts[1:]
    middle = 0.5 * (low + high)
    place = np.minimum((middle * points.size).astype(np.intp), points.size - 1)
    # Quantiles at both ends of a piece, from the cell its middle lies in: empty cells
    # make the quantile function jump.
    above = np.clip(np.searchsorted(levels, middle, side="left"), 1, grid.size)
    width = np.where(rises[above], levels[above] - levels[above - 1], 1.0)
    slope = grid.volumes[above - 1] / width
    base = grid.edges[above - 1]
    start = base + slope * (low - levels[above - 1]) - points[place]
    stop = base + slope * (high - levels[above - 1]) - points[place]
    length = high - low
    same = start * stop >= 0
    span = np.where(same, 1.0, np.abs(stop - start))
    absolute = np.where(
        same, 0.5 * np.abs(start + stop), 0.5 * (start**2 + stop**2) / span
    )
    square = (start**2 + start * stop + stop**2) / 3
    return Distances(
        float(length @ absolute), float(np.sqrt(max(float(length @ square), 0.0)))
    )


@dataclass(frozen=True)
class GapSettings:
    """How the particles are run.

    Parameters
    ----------
    step_size
        `eta` for the smallest number of particles.
    decay
        `eta` falls as `N^-decay`; the theorem wants it to fall.
    boundary
        "project" or "reflect".
    replicas
        Independent runs for each `N`, at least two.
    clip
        The largest drift of a particle; singular forces need one at a finite step.
    """

    step_size: float = 1e-3
    decay: float = 0.0
    boundary: str = "reflect"
    replicas: int = 16
    clip: float = math.inf

    def __post_init__(self) -> None:
        check_real("step_size", self.step_size, above=0)
        check_real("decay", self.decay, at_least=0)
        check_count("replicas", self.replicas, at_least=2)
        check_real("clip", self.clip, above=0, infinite=True)
        check_boundary(self.boundary)


class GapCurve(NamedTuple):
    """Distances between particles and density, means over replicas."""

    counts: FloatArray
    first: FloatArray  # W_1; NaN where the domain is not an interval
    first_errors: FloatArray
    second: FloatArray  # W_2
    second_errors: FloatArray
    observable: FloatArray  # root mean square of int f dmu_N - int f drho
    observable_errors: FloatArray
    bias: FloatArray  # mean of int f dmu_N - int f drho
    bias_errors: FloatArray
    first_exponent: Fit | None
    second_exponent: Fit | None
    observable_exponent: Fit
    density: FloatArray  # of the continuum at the final time
    positions: list[FloatArray]  # (replicas, N, dim) of the particles then


def mean_field_gap(
    system: MeanField,
    density: FloatArray,
    time: float,
    counts: Sequence[int],
    observable: Function,
    *,
    settings: GapSettings | None = None,
    flow: FlowSettings | None = None,
    generator: torch.Generator,
    watch: Callable[[int], None] | None = None,
) -> GapCurve:
    """Run particles and the density side by side. [CPM thm:main-mckean-vlasov].

    Particles start as independent draws of the density. On an interval the Wasserstein
    distances are exact, by quantiles; exponents are fitted to their decay with `N`. For
    exchangeable particles with bounded forces `N^-1/2` is expected on the line.

    Parameters
    ----------
    system
        The system.
    density
        At time zero.
    time
        When to compare, positive.
    counts
        Numbers of particles, at least three.
    observable
        `f`, a function of positions such as `kernel_observable`.
    settings
        How the particles are run.
    flow
        How the density is run.
    generator
        The source of randomness.
    watch
        Called with each `N` when it is done.

    Returns
    -------
    GapCurve
        Distances, fitted exponents, and the final density and particles.
    """
    settings = settings or GapSettings()
    check_real("time", time, above=0)
    rho = system.grid.normalise(density)
    final = evolve(system, rho, [time], settings=flow).last
    expected = float(
        final * system.grid.volumes @ observable_values(system, observable)
    )
    rows, clouds = [], []
    for count in counts:
        check_count("counts", count, at_least=2)
        step = settings.step_size * (counts[0] / count) ** settings.decay
        steps = max(1, math.ceil(time / step))
        sampler = ProjectedLangevin(
            step_size=time / steps,
            inverse_temperature=system.inverse_temperature,
            domain=system.grid.domain,
            clip=settings.clip,
            boundary=settings.boundary,
        )
        cloud = draw_independent(
            system, rho, settings.replicas, count, generator=generator
        )
        start = sampler.init(Particles(cloud))
        energy = system.hamiltonian()
        state, _ = sampler.advance(start, energy, steps, generator=generator)
        cloud = state.particles.positions
        clouds.append(cloud.numpy())
        rows.append(_compare(system, final, cloud, observable, expected))
        if watch is not None:
            watch(count)
    n = np.array(counts, dtype=np.float64)
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    first, second, size, _ = zip(columns[::2], columns[1::2], strict=True)
    on_line = isinstance(system.grid, Interval)
    fits = (
        fit_power(n, *first) if on_line else None,
        fit_power(n, *second) if on_line else None,
        fit_power(n, *size),
    )
    return GapCurve._make((n, *columns, *fits, final, clouds))


def _compare(
    system: MeanField,
    density: FloatArray,
    cloud: torch.Tensor,
    observable: Function,
    expected: float,
) -> tuple[float, ...]:
    """Give W_1, W_2, the size of the observable's error and its mean, with errors."""
    first = second = np.full(cloud.shape[0], math.nan)
    if isinstance(system.grid, Interval):
        pairs = [line_distances(c, system.grid, density) for c in cloud.numpy()]
        first, second = (np.array(values) for values in zip(*pairs, strict=True))
    seen = evaluate(lambda w: observable(w).mean(dim=-1), cloud) - expected
    square = seen**2
    size = math.sqrt(float(square.mean()))
    return (
        *_estimate(first),
        *_estimate(second),
        size,
        standard_error(square) / (2 * size),  # delta method for the root
        *_estimate(seen),
    )


def _estimate(values: FloatArray) -> tuple[float, float]:
    return float(values.mean()), standard_error(values)
