"""Many configurations at once: energies, exact draws of product laws, Metropolis moves.

Positions have shape `(configurations, n_particles, dim)`.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coulomb._support.errors import ParameterError
from coulomb.domains import AbstractDomain, Box
from coulomb.features import Particles
from coulomb.interactions import AbstractInteraction, AbstractPairSum, PairField
from coulomb.theory.grids import AbstractBoxGrid, AbstractGrid, FloatArray
from coulomb.theory.system import MeanField

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


def mean_spacing(system: MeanField, n_particles: int) -> float:
    """Tell the distance of neighbours, about: the softening for Metropolis drifts.

    The force of the nearest particle has no variance, and a drift that follows it is
    mostly refused; any drift leaves the law as it is.
    """
    width = float(np.ptp(system.grid.centres, axis=0).max())
    return width / float(n_particles ** (1 / system.grid.dim))


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


class LogLaw(NamedTuple):
    """The logarithm of an unnormalised density, and its gradient in the positions."""

    value: Tensor  # (configurations,)
    gradient: Tensor  # (configurations, n_particles, dim)


Law = Callable[[Tensor], LogLaw]


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


def metropolis_move(
    law: Law,
    positions: Tensor,
    here: LogLaw,
    step_size: Tensor,
    domain: AbstractDomain,
    *,
    generator: torch.Generator,
) -> tuple[Tensor, LogLaw, Tensor]:
    """Move every configuration once, leaving its law invariant.

    The proposal is `w + h clip(grad log p) + sqrt(2 h) xi`; one that leaves the domain
    is refused, except that in a box it is reflected, and its density is the sum over
    its mirror images. Drifts longer than the noise are shortened to it, which singular
    forces need; any drift is exact.
    """
    if isinstance(domain, Box) and _reflects(domain):
        # Up to here the images left out are below rounding, so the move is exact.
        step_size = step_size.clamp_max((domain.upper - domain.lower) ** 2 / 40)
    h = step_size[:, None, None]
    limit = 1 / h.sqrt()
    noise = torch.randn(positions.shape, generator=generator, dtype=positions.dtype)
    uniform = torch.rand(positions.shape[0], generator=generator, dtype=positions.dtype)
    forward = _limited(here.gradient, limit)
    proposal = positions + h * forward + (2 * h).sqrt() * noise
    if _reflects(domain):
        proposal = domain.reflect(proposal)
    inside = domain.contains(proposal).all(dim=-1)
    # Outside the law need not be defined; such proposals are refused anyway.
    proposal = torch.where(inside[:, None, None], proposal, positions)
    there = law(proposal)
    backward = proposal + h * _limited(there.gradient, limit)
    quotient = _log_density(positions, backward, h, domain) - _log_density(
        proposal, positions + h * forward, h, domain
    )
    accept = inside & (uniform.log() < there.value - here.value + quotient)
    chosen = accept[:, None, None]
    moved = torch.where(chosen, proposal, positions)
    now = LogLaw(
        torch.where(accept, there.value, here.value),
        torch.where(chosen, there.gradient, here.gradient),
    )
    return moved, now, accept


def _limited(gradient: Tensor, limit: Tensor) -> Tensor:
    norm = gradient.norm(dim=-1, keepdim=True)
    gradient = torch.where(norm.isfinite(), gradient, torch.zeros_like(gradient))
    return gradient * torch.where(norm > limit, limit / norm, torch.ones_like(norm))


def _reflects(domain: AbstractDomain) -> bool:
    if not isinstance(domain, Box):
        return False
    return math.isfinite(domain.lower) and math.isfinite(domain.upper)


def _log_density(
    places: Tensor, means: Tensor, h: Tensor, domain: AbstractDomain
) -> Tensor:
    """Evaluate the log-density of proposals with these means, up to a constant."""
    if not (isinstance(domain, Box) and _reflects(domain)):
        return -((places - means).square() / (4 * h)).sum((-1, -2))
    width = domain.upper - domain.lower
    images = []
    for shift, mirrored in itertools.product((-1, 0, 1), (False, True)):
        image = 2 * domain.lower - places if mirrored else places
        images.append(-((image + 2 * shift * width - means).square()) / (4 * h))
    return torch.stack(images).logsumexp(dim=0).sum((-1, -2))
