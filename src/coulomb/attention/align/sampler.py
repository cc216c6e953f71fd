"""How Phase A steps: one batch, the engine's move, and an account of what drove it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coulomb._support.errors import unknown_name
from coulomb._support.streams import make_generator
from coulomb.attention.align.energies import AbstractBatched, Evaluated
from coulomb.domains import Space
from coulomb.dynamics.langevin import (
    AbstractSampler,
    AdamLangevin,
    Info,
    ProjectedLangevin,
    State,
    as_schedule,
)
from coulomb.dynamics.stopping import AbstractStopRule, StopReason
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.objectives import Field

DRIFTS = ("N", "plain")
# Paths of the random streams that belong to one seed.
MOVES, ORDER, HELD_OUT, SHUFFLES, TWINS, WARM_UP = range(6)


@dataclass(eq=False)
class Account:
    """What was added up over a run."""

    start: Tensor
    drift: Tensor
    noise: float = 0.0
    now: Tensor | None = None

    @classmethod
    def of(cls, start: Tensor) -> "Account":
        """Open an account."""
        return cls(start, torch.zeros_like(start, dtype=torch.float64))

    def drift_to_noise(self) -> Tensor:
        """Compare how far the alignment carried particles with their random walk.

        `|sum_t drift_t| / sqrt(n d sum_t 2 eta / beta_t)` in every group.
        """
        carried = self.drift.square().sum(dim=(-2, -1)).sqrt()
        n, dim = self.start.shape[-2:]
        walk = math.sqrt(n * dim * self.noise)
        return torch.where(carried > 0, carried / walk if walk else math.inf, carried)

    def moved(self) -> Tensor:
        """Measure how far particles are from their start, root mean square."""
        now = self.start if self.now is None else self.now
        return root_mean_square(now - self.start)


def root_mean_square(moves: Tensor) -> Tensor:
    """Average the length of moves in every group."""
    return moves.double().square().sum(dim=-1).mean(dim=-1).sqrt()


@dataclass(frozen=True, eq=False)
class Recorder(AbstractStopRule):
    """A rule that never ends a run: asked first, it adds the account to the record."""

    account: Account

    def check(
        self, history: Sequence[dict[str, Any]], windows: Sequence[Tensor]
    ) -> StopReason | None:
        history[-1]["drift_to_noise"] = self.account.drift_to_noise().tolist()
        history[-1]["moved"] = self.account.moved().tolist()
        return None


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
class BatchedLangevin(AbstractSampler):
    """The engine's Langevin steps, each on the next batch."""

    moves: ProjectedLangevin | AdamLangevin
    numbers: tuple[int, ...]
    seed: int
    account: Account
    drift: str
    free: dict[str, Tensor]
    free_step_size: float

    def __post_init__(self) -> None:
        if self.drift not in DRIFTS:
            raise unknown_name("drift", self.drift, DRIFTS)

    def init(self, particles: Particles) -> State:
        return self.moves.init(particles)

    def step(
        self, state: State, energy: Hamiltonian, *, generator: torch.Generator
    ) -> tuple[State, Info]:
        particles = state.particles
        objective = energy.objective
        assert isinstance(objective, AbstractBatched)
        number = batch_of_step(state.step, self.numbers, self.seed)
        pull, others = objective.at(number).forces(particles)
        # The model is evaluated once: the engine sees what was found.
        found = replace(energy, objective=Evaluated(pull))
        scale = 1.0 if self.drift == "N" else 1 / particles.n_particles
        gradient = scale * found.gradient(particles, generator=generator)
        seen = Hamiltonian(Evaluated(Field(pull.potential, gradient)))
        following, info = self.moves.step(state, seen, generator=generator)
        if isinstance(self.moves, AdamLangevin):
            self._add_up_preconditioned(state, seen, info)
        else:
            self._add_up(state.step, scale * pull.gradient, gradient)
        self.account.now = following.particles.positions
        for name, slope in others.items():
            self.free[name] = self.free[name] - self.free_step_size * slope
        return following, info

    def _add_up(self, step: int, pull: Tensor, gradient: Tensor) -> None:
        size = self.moves.step_size
        norm = gradient.norm(dim=-1, keepdim=True)
        kept = (self.moves.clip / norm).clamp_max(1.0)  # clipping shortens all parts
        self.account.drift -= size * (kept * pull).double()
        beta = as_schedule(self.moves.inverse_temperature)(step)
        self.account.noise += 2 * size / beta

    def _add_up_preconditioned(
        self, state: State, seen: Hamiltonian, info: Info
    ) -> None:
        """Add the whole drift: preconditioned, it is no sum over its parts."""
        still = replace(self.moves, inverse_temperature=math.inf, domain=Space())
        positions = state.particles.positions
        unused = torch.Generator(positions.device)
        carried = still.step(state, seen, generator=unused)[0].particles.positions
        self.account.drift += (carried - positions).double()
        self.account.noise += info.noise / positions.shape[-1]
