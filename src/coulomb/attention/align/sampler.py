"""How Phase A steps: one batch, the sampler's move, and statistics of what drove it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from coulomb._support.streams import make_generator
from coulomb.attention.align.problem import ORDER, ModelAlignment, Problem
from coulomb.dynamics.langevin import (
    AbstractGradientSampler,
    AbstractSampler,
    Info,
    ProjectedLangevin,
    State,
    as_schedule,
    clip_factors,
)
from coulomb.dynamics.loop import Run
from coulomb.energy import Hamiltonian
from coulomb.features import Particles


@dataclass(eq=False)
class DriftStats:
    """What drift and noise added up to over a run."""

    start: Tensor
    drift: Tensor
    noise: float = 0.0

    @classmethod
    def of(cls, start: Tensor) -> "DriftStats":
        """Begin at zero."""
        return cls(start, torch.zeros_like(start, dtype=torch.float64))

    def drift_to_noise(self) -> Tensor:
        """Compare how far the alignment carried particles with their random walk.

        `|sum_t drift_t| / sqrt(n d sum_t 2 eta / beta_t)` in every group.
        """
        carried = self.drift.square().sum(dim=(-2, -1)).sqrt()
        n, dim = self.start.shape[-2:]
        walk = math.sqrt(n * dim * self.noise)
        return torch.where(carried > 0, carried / walk if walk else math.inf, carried)

    def record(self, run: Run) -> None:
        """Add to the last record of a run: a callback that never ends it."""
        run.history[-1]["drift_to_noise"] = self.drift_to_noise().tolist()
        moved = root_mean_square(run.particles.positions - self.start)
        run.history[-1]["moved"] = moved.tolist()


def root_mean_square(moves: Tensor) -> Tensor:
    """Average the length of moves in every group."""
    return moves.double().square().sum(dim=-1).mean(dim=-1).sqrt()


def batch_of_step(step: int, numbers: Sequence[int], seed: int) -> int:
    """Tell which batch a step sees: every epoch goes through all, in an order drawn.

    Examples
    --------
    >>> sorted(batch_of_step(step, [5, 6, 7], seed=0) for step in range(3, 6))
    [5, 6, 7]
    """
    epoch, place = divmod(step, len(numbers))
    generator = make_generator(seed, ORDER, epoch)
    order = torch.randperm(len(numbers), generator=generator)
    return numbers[int(order[place])]


@dataclass(frozen=True, eq=False)
class BatchedSampler(AbstractSampler):
    """The steps of a sampler, each on the next batch."""

    problem: Problem
    stats: DriftStats

    @cached_property
    def sampler(self) -> AbstractGradientSampler:
        """What moves the particles."""
        return self.problem.settings.build_sampler()

    def init(self, particles: Particles) -> State:
        return self.sampler.init(particles)

    def step(
        self, state: State, energy: Hamiltonian, *, generator: torch.Generator
    ) -> tuple[State, Info]:
        problem, settings = self.problem, self.problem.settings
        objective, particles = energy.objective, state.particles
        slopes: dict[str, Tensor] = {}
        if isinstance(objective, ModelAlignment):
            number = batch_of_step(state.step, problem.training, problem.seed)
            pull, slopes = replace(objective, numbers=(number,)).forces(particles)
        else:
            pull = objective.field(particles)
        scale = 1.0 if settings.drift == "N" else 1 / particles.n_particles
        gradient = scale * energy.gradient(
            particles, generator=generator, attraction=pull.gradient
        )
        following, info = self.sampler.move(state, gradient, generator=generator)
        self._add_up(state, scale * pull.gradient, gradient, info)
        free = problem.network.free
        for name, slope in slopes.items():
            free[name] = free[name] - settings.also_step_size * slope
        return following, info

    def _add_up(self, state: State, pull: Tensor, gradient: Tensor, info: Info) -> None:
        size = self.sampler.step_size
        if isinstance(self.sampler, ProjectedLangevin):
            # Clipping shortens all parts of the drift alike.
            kept = clip_factors(gradient, self.sampler.clip)
            self.stats.drift -= size * (kept * pull).double()
        else:
            # Preconditioned, the drift is no sum over its parts: all of it counts.
            assert info.drift_vectors is not None
            positions = state.particles.positions
            carried = (positions + info.drift_vectors) - positions
            self.stats.drift += carried.double()
        beta = as_schedule(self.sampler.inverse_temperature)(state.step)
        self.stats.noise += 2 * size / beta
