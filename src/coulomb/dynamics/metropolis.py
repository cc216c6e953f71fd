"""Metropolis-adjusted Langevin: exact samples of the Gibbs law, the yardstick.

The law is `exp(-beta N H)` on the domain: what projected Langevin steps tend to as the
step goes to zero.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coulomb._support.checks import check_real
from coulomb._support.errors import ParameterError
from coulomb.domains import AbstractDomain, Space, Sphere
from coulomb.dynamics.langevin import (
    AbstractSampler,
    Info,
    State,
    clip_per_particle,
    samplers,
)
from coulomb.dynamics.schedules import AbstractSchedule, as_schedule
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.objectives import AbstractOneBody


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
        here = state.particles
        if here.positions.ndim != 2:
            raise ParameterError(
                "`particles` must be one group for Metropolis steps; got positions of "
                f"shape {tuple(here.positions.shape)}."
            )
        beta = as_schedule(self.inverse_temperature)(state.step)
        drift = self._drift(energy, here)
        noise = math.sqrt(2 * self.step_size / beta) * torch.randn(
            here.positions.shape, generator=generator, dtype=here.positions.dtype
        )
        there = here._replace(positions=here.positions + drift + noise)
        backward = self._drift(energy, there)
        uniform = torch.rand(here.n_particles, generator=generator, dtype=noise.dtype)

        back = here.positions - there.positions - backward
        quotient = _squares(noise) - _squares(back)  # of the proposal densities
        ratio = quotient * beta / (4 * self.step_size)
        inside = self.domain.contains(there.positions)
        accept = self._accept(energy, here, there, beta, ratio, inside, uniform)
        moved = torch.where(accept.unsqueeze(-1), there.positions, here.positions)
        info = Info(
            float(_squares(drift).mean()),
            float(_squares(noise).mean()),
            float(_squares(moved - here.positions).mean()),
            float(accept.double().mean()),
        )
        return State(here._replace(positions=moved), state.step + 1), info

    def _drift(self, energy: Hamiltonian, particles: Particles) -> Tensor:
        gradient = energy.gradient(particles)
        return -self.step_size * clip_per_particle(gradient, self.clip)

    def _accept(
        self,
        energy: Hamiltonian,
        here: Particles,
        there: Particles,
        beta: float,
        ratio: Tensor,
        inside: Tensor,
        uniform: Tensor,
    ) -> Tensor:
        if energy.strength == 0 and isinstance(energy.objective, AbstractOneBody):
            rise = _one_body(energy, there) - _one_body(energy, here)
            return inside & (uniform.log() < ratio - beta * rise)
        rise = here.n_particles * (energy.value(there) - energy.value(here))
        joint = inside.all() & (uniform[0].log() < ratio.sum() - beta * rise)
        return joint.expand(here.n_particles)


def _one_body(energy: Hamiltonian, particles: Particles) -> Tensor:
    assert isinstance(energy.objective, AbstractOneBody)
    potential = energy.objective.potential(particles)
    if energy.prior is not None:
        potential = potential + energy.prior.potential(particles)
    return potential


def _squares(vectors: Tensor) -> Tensor:
    return vectors.square().sum(dim=-1)
