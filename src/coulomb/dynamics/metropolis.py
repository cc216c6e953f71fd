"""Metropolis-adjusted Langevin (MALA): exact samples of the Gibbs law, the yardstick.

The law is `exp(-beta N H)` on the domain: what projected Langevin steps tend to as the
step goes to zero.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb._support.checks import check_real
from coulomb._support.errors import ParameterError
from coulomb.domains import AbstractDomain, Box, Space, Sphere
from coulomb.dynamics.langevin import (
    AbstractSampler,
    AbstractSchedule,
    Info,
    State,
    as_schedule,
    clip_factors,
    mean_square,
    samplers,
)
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.objectives import AbstractOneBody


class LogLaw(NamedTuple):
    """The logarithm of a density, and its gradient, at many configurations."""

    value: Tensor  # (configurations,)
    gradient: Tensor  # (configurations, n_particles, dim)


Law = Callable[[Tensor], LogLaw]


class Move(NamedTuple):
    """One Metropolis move of many configurations."""

    positions: Tensor  # (configurations, n_particles, dim)
    now: LogLaw  # the law at these positions
    accepted: Tensor  # (configurations,), booleans
    noise: Tensor  # of the proposals


def metropolis_move(
    law: Law,
    positions: Tensor,
    here: LogLaw,
    step_size: Tensor,
    domain: AbstractDomain,
    *,
    limit: float | None = None,
    reflect: bool = True,
    generator: torch.Generator,
) -> Move:
    """Move every configuration once, leaving its law invariant.

    The proposal is `w + h clip(grad log p) + sqrt(2 h) xi`; one that leaves the domain
    is refused, or reflected, and then its density is the sum over its mirror images.

    Parameters
    ----------
    law
        Gives the logarithm of the density and its gradient.
    positions
        Shape `(configurations, n_particles, dim)`.
    here
        The law at these positions.
    step_size
        `h` of each configuration.
    domain
        Where particles may be.
    limit
        The largest norm of a particle's gradient in the proposal; any is exact. None
        makes the drift at most as long as the noise, which singular forces need.
    reflect
        Reflect at the walls of a bounded box instead of refusing.
    generator
        The source of randomness.

    Returns
    -------
    Move
        Positions, the law there, which proposals were accepted, and their noise.
    """
    box = domain if reflect and isinstance(domain, Box) and domain.bounded else None
    if box is not None:
        # Up to here the images left out are below rounding, so the move is exact.
        step_size = step_size.clamp_max((box.upper - box.lower) ** 2 / 40)
    h = step_size[:, None, None]
    longest = 1 / h.sqrt() if limit is None else torch.full_like(h, limit)
    noise = torch.randn(positions.shape, generator=generator, dtype=positions.dtype)
    uniform = torch.rand(positions.shape[0], generator=generator, dtype=positions.dtype)
    noise = (2 * h).sqrt() * noise
    mean = positions + h * _limited(here.gradient, longest)
    proposal = mean + noise
    if box is not None:
        proposal = box.reflect(proposal)
    inside = domain.contains(proposal).all(dim=-1)
    # Outside the law need not be defined; such proposals are refused anyway.
    proposal = torch.where(inside[:, None, None], proposal, positions)
    there = law(proposal)
    backward = proposal + h * _limited(there.gradient, longest)
    quotient = _log_density(positions, backward, h, box) - _log_density(
        proposal, mean, h, box
    )
    accept = inside & (uniform.log() < there.value - here.value + quotient)
    chosen = accept[:, None, None]
    now = LogLaw(
        torch.where(accept, there.value, here.value),
        torch.where(chosen, there.gradient, here.gradient),
    )
    return Move(torch.where(chosen, proposal, positions), now, accept, noise)


def _limited(gradient: Tensor, limit: Tensor) -> Tensor:
    """Clip per particle; a force that is not finite has no direction."""
    finite = gradient.norm(dim=-1, keepdim=True).isfinite()
    gradient = torch.where(finite, gradient, torch.zeros_like(gradient))
    return gradient * clip_factors(gradient, limit)


def _log_density(places: Tensor, means: Tensor, h: Tensor, box: Box | None) -> Tensor:
    """Evaluate the log-density of proposals with these means, up to a constant."""
    if box is None:
        return -((places - means).square() / (4 * h)).sum((-1, -2))
    width = box.upper - box.lower
    images = []
    for shift, mirrored in itertools.product((-1, 0, 1), (False, True)):
        image = 2 * box.lower - places if mirrored else places
        images.append(-((image + 2 * shift * width - means).square()) / (4 * h))
    return torch.stack(images).logsumexp(dim=0).sum((-1, -2))


@samplers.add("metropolis")
@dataclass(frozen=True, eq=False)
class MetropolisLangevin(AbstractSampler):
    """Langevin proposals, accepted so that the Gibbs law is exactly invariant.

    A proposal outside the domain is refused. Without interaction the particles are
    independent and each is accepted for itself; with it, the whole configuration is.

    Parameters
    ----------
    step_size
        `eta`, positive.
    inverse_temperature
        `beta`, a finite number or a schedule.
    domain
        Where particles may be; not a sphere, which has no volume to propose in.
    clip
        The largest norm of a particle's drift in the proposal; any value is exact.
    """

    step_size: float = 0.1
    inverse_temperature: float | AbstractSchedule = 100.0
    domain: AbstractDomain = field(default_factory=Space)
    clip: float = math.inf

    def __post_init__(self) -> None:
        check_real("step_size", self.step_size, above=0)
        check_real("clip", self.clip, above=0, infinite=True)
        if isinstance(self.domain, Sphere):
            raise ParameterError(
                "`domain` must have an interior for Metropolis steps; got "
                f"{self.domain!r}. Use ProjectedLangevin on spheres."
            )
        if not math.isfinite(as_schedule(self.inverse_temperature)(0)):
            raise ParameterError(
                "`inverse_temperature` must be finite for Metropolis steps; got inf. "
                "Use ProjectedLangevin for gradient flow."
            )

    def step(
        self, state: State, energy: Hamiltonian, *, generator: torch.Generator
    ) -> tuple[State, Info]:
        particles = state.particles
        if particles.positions.ndim != 2:
            raise ParameterError(
                "`particles` must be one group for Metropolis steps; got positions of "
                f"shape {tuple(particles.positions.shape)}."
            )
        n, dim = particles.positions.shape
        beta = as_schedule(self.inverse_temperature)(state.step)
        objective, prior = energy.objective, energy.prior
        # Particles that do not interact are n configurations of one particle each.
        alone = energy.strength == 0 and isinstance(objective, AbstractOneBody)
        shape = (n, 1, dim) if alone else (1, n, dim)

        def law(positions: Tensor) -> LogLaw:
            moved = particles._replace(positions=positions.reshape(n, dim))
            if isinstance(objective, AbstractOneBody) and alone:
                value = objective.potential(moved)
                value = value if prior is None else value + prior.potential(moved)
            else:
                value = n * energy.value(moved).unsqueeze(0)
            gradient = energy.gradient(moved).reshape(shape)
            return LogLaw(-beta * value, -beta * gradient)

        positions = particles.positions.reshape(shape)
        here, limit = law(positions), beta * self.clip
        h = positions.new_full((shape[0], 1, 1), self.step_size / beta)
        move = metropolis_move(
            *(law, positions, here, h.ravel(), self.domain),
            limit=limit,
            reflect=False,
            generator=generator,
        )
        drift = h * _limited(here.gradient, torch.full_like(h, limit))
        info = Info(
            mean_square(drift),
            mean_square(move.noise),
            mean_square(move.positions - positions),
            float(move.accepted.double().mean()),
        )
        moved = Particles(move.positions.reshape(n, dim), particles.phases)
        return State(moved, state.step + 1), info
