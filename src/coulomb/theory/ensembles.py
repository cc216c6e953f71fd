"""Many configurations at once: their energies, and exact draws of product laws.

Positions have shape `(configurations, n_particles, dim)`.
"""

import numpy as np
import torch
from torch import Tensor

from coulomb._support.errors import ParameterError
from coulomb.dynamics.metropolis import Law, LogLaw
from coulomb.features import Particles
from coulomb.interactions import AbstractInteraction, PairField
from coulomb.theory.grids import AbstractBoxGrid, AbstractGrid, FloatArray
from coulomb.theory.system import MeanField

# The acceptance at which Langevin proposals are most efficient in many dimensions.
BEST_ACCEPTANCE = 0.574
# Pairs held at once: few enough to stay in the cache.
_PAIRS = 1 << 17


def batched_pairs(
    interaction: AbstractInteraction, positions: Tensor, *, softening: float = 0.0
) -> PairField:
    """Sum the pairs of each configuration by broadcasting: many small groups at once.

    The twin of `ExactSum`, which takes group after group. Particles at the same place
    get no direction here: exact draws and Metropolis moves do not put them there.
    """
    chunk = max(1, _PAIRS // positions.shape[-2] ** 2)
    parts = [
        _all_pairs(interaction, x, softening) for x in torch.split(positions, chunk)
    ]
    return PairField(*map(torch.cat, zip(*parts, strict=True)))


def _all_pairs(
    interaction: AbstractInteraction, positions: Tensor, softening: float
) -> PairField:
    count = positions.shape[-2]
    difference = positions.unsqueeze(-2) - positions.unsqueeze(-3)  # (c, n, n, dim)
    distance = difference.square().sum(dim=-1).sqrt()
    oneself = torch.eye(count, dtype=torch.bool)
    distance = distance.masked_fill(oneself, 1.0)
    values = interaction.radial(distance).masked_fill(oneself, 0.0)
    slopes = interaction.slope(distance.clamp_min(softening))
    slopes = slopes.masked_fill(oneself | (distance == 0), 0.0)
    gradient = (slopes.unsqueeze(-1) * difference).sum(dim=-2)
    others = max(count - 1, 1)  # a single particle feels nothing
    return PairField(values.sum(dim=-1) / others, gradient / others)


def configuration_energies(
    system: MeanField, positions: Tensor, *, softening: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Evaluate `H` and `N grad_k H` of many configurations."""
    field = system.objective.field(Particles(positions))
    value, gradient = field.potential.mean(dim=-1), field.gradient
    if system.strength:
        pairs = batched_pairs(system.interaction, positions, softening=softening)
        value = value + 0.5 * system.strength * pairs.potential.mean(dim=-1)
        gradient = gradient + system.strength * pairs.gradient
    return value, gradient


def gibbs_law(system: MeanField, n_particles: int, betas: Tensor | float) -> Law:
    """Give the law `exp(-beta N H)` of configurations, each at its inverse temperature.

    Its gradient, the drift of Metropolis moves, is softened below the distance of
    neighbours: the force of the nearest particle has no variance, and a drift that
    follows it is mostly refused; any drift leaves the law as it is.
    """
    factor = -torch.as_tensor(betas, dtype=torch.float64).reshape(-1)
    spacing = width(system.grid) / float(n_particles ** (1 / system.grid.dim))

    def law(positions: Tensor) -> LogLaw:
        value, gradient = configuration_energies(system, positions, softening=spacing)
        return LogLaw(factor * n_particles * value, factor[:, None, None] * gradient)

    return law


def width(grid: AbstractGrid) -> float:
    """Tell the largest extent of the centres of a grid."""
    return float(np.ptp(grid.centres, axis=0).max())


def draw_independent(
    system: MeanField,
    density: FloatArray,
    configurations: int,
    n_particles: int,
    *,
    generator: torch.Generator,
) -> Tensor:
    """Draw particles independently from a density on the grid.

    A cell is drawn by its mass, then a uniform place in it; so the density of the draws
    is known exactly, see `cell_law`.
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
    return torch.from_numpy(positions.reshape(configurations, n_particles, grid.dim))


def _box(grid: AbstractGrid) -> AbstractBoxGrid:
    if not isinstance(grid, AbstractBoxGrid):
        raise ParameterError(f"`grid` must be a box or a disc for draws; got {grid!r}.")
    return grid


def cell_law(grid: AbstractGrid, log_density: FloatArray) -> Law:
    """Give the product of a piecewise constant density over the particles.

    Its gradient is that between cells.
    """
    grid = _box(grid)
    whole = grid.embed(log_density)
    whole[~grid.inside] = -np.inf
    filled = np.where(grid.inside, whole, log_density.min())
    parts = [np.gradient(filled, h, axis=a) for a, h in enumerate(grid.spacing)]
    values, slopes = torch.from_numpy(whole), torch.from_numpy(np.stack(parts, axis=-1))
    spacing = torch.tensor(grid.spacing, dtype=torch.float64)
    corner = torch.tensor(grid.corner, dtype=torch.float64)
    last = torch.tensor(grid.shape) - 1

    def law(positions: Tensor) -> LogLaw:
        index = ((positions - corner) / spacing).floor().long()
        cell = torch.minimum(index.clamp_min(0), last).unbind(dim=-1)
        return LogLaw(values[cell].sum(dim=-1), slopes[cell])

    return law
