"""Many configurations at once: their energies, and exact draws of product laws.

Positions have shape `(configurations, n_particles, dim)`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coulomb._support.errors import ParameterError
from coulomb.dynamics.metropolis import Law, LogLaw
from coulomb.features import Particles
from coulomb.interactions import AbstractInteraction, AbstractPairSum, PairField
from coulomb.theory.grids import AbstractBoxGrid, AbstractGrid, FloatArray
from coulomb.theory.system import MeanField

# The acceptance at which Langevin proposals are most efficient in many dimensions.
BEST_ACCEPTANCE = 0.574
# Pairs held at once: few enough to stay in the cache.
_PAIRS = 1 << 17


@dataclass(frozen=True)
class BatchedSum(AbstractPairSum):
    """All pairs of all configurations by broadcasting: many small groups at once.

    The twin of `ExactSum`, which takes group after group. Particles at the same place
    get no direction here: exact draws and Metropolis moves do not put them there.
    """

    softening: float = 0.0

    def __call__(
        self,
        interaction: AbstractInteraction,
        positions: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> PairField:
        count = positions.shape[-2]
        flat = positions.reshape(-1, *positions.shape[-2:])
        potential = flat.new_zeros(flat.shape[:-1])
        gradient = torch.zeros_like(flat)
        if count > 1:
            chunk = max(1, _PAIRS // (count * count))
            for start in range(0, flat.shape[0], chunk):
                some = slice(start, start + chunk)
                potential[some], gradient[some] = _all_pairs(
                    interaction, flat[some], self.softening
                )
        return PairField(
            potential.reshape(positions.shape[:-1]), gradient.reshape(positions.shape)
        )


def _all_pairs(
    interaction: AbstractInteraction, positions: Tensor, softening: float
) -> tuple[Tensor, Tensor]:
    count = positions.shape[-2]
    difference = positions.unsqueeze(-2) - positions.unsqueeze(-3)  # (c, n, n, dim)
    distance = difference.square().sum(dim=-1).sqrt()
    oneself = torch.eye(count, dtype=torch.bool)
    distance = distance.masked_fill(oneself, 1.0)
    values = interaction.radial(distance).masked_fill(oneself, 0.0)
    slopes = interaction.slope(distance.clamp_min(softening))
    slopes = slopes.masked_fill(oneself | (distance == 0), 0.0)
    gradient = (slopes.unsqueeze(-1) * difference).sum(dim=-2)
    return values.sum(dim=-1) / (count - 1), gradient / (count - 1)


class Energies(NamedTuple):
    """Energies of configurations and what moves their particles."""

    value: Tensor  # (configurations,): H
    gradient: Tensor  # (configurations, n_particles, dim): N grad_k H


def configuration_energies(
    system: MeanField, positions: Tensor, *, softening: float = 0.0
) -> Energies:
    """Evaluate `H` and `N grad_k H` of many configurations."""
    field = system.objective.field(Particles(positions))
    value, gradient = field.potential.mean(dim=-1), field.gradient
    if system.strength:
        pairs = BatchedSum(softening)(system.interaction, positions)
        value = value + 0.5 * system.strength * pairs.potential.mean(dim=-1)
        gradient = gradient + system.strength * pairs.gradient
    return Energies(value, gradient)


def gibbs_law(system: MeanField, n_particles: int, betas: Tensor | float) -> Law:
    """Give the law `exp(-beta N H)` of configurations, each at its inverse temperature.

    Its gradient, the drift of Metropolis moves, is softened below the distance of
    neighbours: the force of the nearest particle has no variance, and a drift that
    follows it is mostly refused; any drift leaves the law as it is.
    """
    factor = -torch.as_tensor(betas, dtype=torch.float64).reshape(-1)
    spacing = width(system.grid) / float(n_particles ** (1 / system.grid.dim))

    def law(positions: Tensor) -> LogLaw:
        energies = configuration_energies(system, positions, softening=spacing)
        value = factor * n_particles * energies.value
        return LogLaw(value, factor[:, None, None] * energies.gradient)

    return law


def width(grid: AbstractGrid) -> float:
    """Tell the largest extent of the centres of a grid."""
    return float(np.ptp(grid.centres, axis=0).max())


class Draws(NamedTuple):
    """Independent draws of a piecewise constant density."""

    positions: Tensor  # (configurations, n_particles, dim)
    log_density: Tensor  # (configurations,): of the whole configuration


def draw_independent(
    system: MeanField,
    density: FloatArray,
    configurations: int,
    n_particles: int,
    *,
    generator: torch.Generator,
) -> Draws:
    """Draw particles independently from a density on the grid.

    A cell is drawn by its mass, then a uniform place in it; so the density of the draws
    is known exactly.
    """
    grid = _box(system.grid)
    total = configurations * n_particles
    levels = np.cumsum(density * grid.volumes)
    uniforms = torch.rand(total, generator=generator, dtype=torch.float64).numpy()
    cells = np.searchsorted(levels, uniforms * levels[-1], side="right")
    cells = np.minimum(cells, grid.size - 1)
    positions = np.empty((total, grid.dim))
    missing = np.arange(total)
    while missing.size:
        shape = (missing.size, grid.dim)
        jitter = torch.rand(shape, generator=generator, dtype=torch.float64).numpy()
        places = grid.centres[cells[missing]] + (jitter - 0.5) * np.array(grid.spacing)
        positions[missing] = places
        if grid.inside.all():
            break
        outside = ~grid.domain.contains(torch.from_numpy(places)).numpy()
        missing = missing[outside]  # cut cells: only their part inside counts
    logs = np.log(density[cells]).reshape(configurations, n_particles).sum(axis=1)
    shaped = positions.reshape(configurations, n_particles, grid.dim)
    return Draws(torch.from_numpy(shaped), torch.from_numpy(logs))


def _box(grid: AbstractGrid) -> AbstractBoxGrid:
    if not isinstance(grid, AbstractBoxGrid):
        raise ParameterError(f"`grid` must be a box or a disc for draws; got {grid!r}.")
    return grid


class CellLookup:
    """The product of a piecewise constant density over the particles."""

    def __init__(self, grid: AbstractGrid, log_density: FloatArray) -> None:
        grid = _box(grid)
        whole = grid.embed(log_density)
        whole[~grid.inside] = -np.inf
        filled = np.where(grid.inside, whole, log_density.min())
        slopes = np.gradient(filled, *grid.spacing)
        self._values = torch.from_numpy(whole)
        parts = slopes if isinstance(slopes, tuple | list) else [slopes]
        self._slopes = torch.from_numpy(np.stack(parts, axis=-1))
        self._spacing = torch.tensor(grid.spacing, dtype=torch.float64)
        self._corner = torch.tensor(grid.corner, dtype=torch.float64)
        self._last = torch.tensor(grid.shape) - 1

    def __call__(self, positions: Tensor) -> LogLaw:
        """Evaluate the law; its gradient is that between cells."""
        index = ((positions - self._corner) / self._spacing).floor().long()
        index = torch.minimum(index.clamp_min(0), self._last)
        cell = tuple(index.unbind(dim=-1))
        return LogLaw(self._values[cell].sum(dim=-1), self._slopes[cell])
