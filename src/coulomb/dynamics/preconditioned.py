"""Adam-preconditioned dynamics: every coordinate of a particle on a clock of its own.

`m <- b1 m + (1 - b1) f`, `v <- b2 v + (1 - b2) f^2` with the gradient `f = N grad_k H`,
and `w <- P(w - eta m / s + sqrt(2 eta / (beta s)) xi)`, where `s = sqrt(v) + eps` and
`m`, `v` are corrected for their start at zero.

Where the energy is steep in some coordinates and flat in others, plain steps are as
short as the steepest one allows; these are not.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coulomb._support.checks import check_count, check_real
from coulomb.domains import AbstractDomain, Space
from coulomb.dynamics.langevin import (
    AbstractSampler,
    Info,
    State,
    _draw_batch,
    _mean_square,
    _standard_normal,
    clip_per_particle,
    samplers,
)
from coulomb.dynamics.schedules import AbstractSchedule, as_schedule
from coulomb.energy import Hamiltonian
from coulomb.features import Particles


@samplers.add("adam")
@dataclass(frozen=True, eq=False)
class AdamLangevin(AbstractSampler):
    """Langevin steps preconditioned as in Adam; a flow at infinite `beta`.

    The preconditioner follows the particles, so that at a finite temperature the law
    is only near the Gibbs law. Use it to minimise, and `ProjectedLangevin` to sample.

    Parameters
    ----------
    step_size
        `eta`, positive: about the length of a coordinate's first moves.
    inverse_temperature
        `beta`, a number or a schedule; infinity is the flow without noise.
    domain
        Where particles may be; moves are projected on it.
    clip
        The largest norm of a particle's gradient; infinity for no clipping.
    decay
        `b1` and `b2`, from 0 to less than 1.
    floor
        `eps`, positive.
    batch_size
        Samples per step, drawn with replacement; None for all.

    Examples
    --------
    >>> from coulomb.objectives import GaussianPrior
    >>> flow = AdamLangevin(step_size=0.1)
    >>> energy = Hamiltonian(GaussianPrior(variance=1.0, inverse_temperature=1.0))
    >>> state = flow.init(Particles(torch.tensor([[1.0, 100.0]])))
    >>> state, _ = flow.step(state, energy, generator=torch.Generator())
    >>> state.particles.positions
    tensor([[ 0.9000, 99.9000]])
    """

    step_size: float = 0.02
    inverse_temperature: float | AbstractSchedule = math.inf
    domain: AbstractDomain = field(default_factory=Space)
    clip: float = math.inf
    decay: tuple[float, float] = (0.9, 0.99)
    floor: float = 1e-8
    batch_size: int | None = None

    def __post_init__(self) -> None:
        check_real("step_size", self.step_size, above=0)
        check_real("clip", self.clip, above=0, infinite=True)
        check_real("floor", self.floor, above=0)
        as_schedule(self.inverse_temperature)
        for value in self.decay:
            check_real("decay", value, at_least=0, below=1)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size, at_least=2)

    def init(self, particles: Particles) -> State:
        zero = torch.zeros_like(particles.positions)
        return State(particles, memory={"mean": zero, "square": zero})

    def step(
        self, state: State, energy: Hamiltonian, *, generator: torch.Generator
    ) -> tuple[State, Info]:
        positions = state.particles.positions
        if self.batch_size is not None:
            energy = energy.batch(_draw_batch(energy, self.batch_size, generator))
        gradient = energy.gradient(state.particles, generator=generator)
        mean, square = self._moments(state, clip_per_particle(gradient, self.clip))
        first, second = (1 - b ** (state.step + 1) for b in self.decay)
        scale = (square / second).sqrt() + self.floor
        drift = -self.step_size * (mean / first) / scale
        beta = as_schedule(self.inverse_temperature)(state.step)
        noise = _standard_normal(positions, generator)
        noise = math.sqrt(2 * self.step_size / beta) * noise / scale.sqrt()
        moved = self.domain.project(positions + drift + noise)
        info = Info(
            _mean_square(drift), _mean_square(noise), _mean_square(moved - positions)
        )
        particles = state.particles._replace(positions=moved)
        memory = {"mean": mean, "square": square}
        return State(particles, state.step + 1, memory), info

    def _moments(self, state: State, gradient: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.decay
        mean = one * state.memory["mean"] + (1 - one) * gradient
        square = two * state.memory["square"] + (1 - two) * gradient.square()
        return mean, square
