"""Projected Langevin dynamics, the way particles move.

`w <- P(w - eta clip(N grad_k H) + sqrt(2 eta / beta) xi)`. The noise is never clipped;
clipping is per particle, so that the step of one does not depend on the others.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError
from coulomb._support.registry import Registry
from coulomb.domains import AbstractDomain, Ball, Masked, Space
from coulomb.dynamics.schedules import AbstractSchedule, as_schedule
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.interactions import ExactSum, Riesz
from coulomb.kernels.langevin import langevin_steps
from coulomb.objectives import AbstractSampled, FourierAlignment, GaussianPrior


class State(NamedTuple):
    """What the next step needs."""

    particles: Particles
    step: int = 0
    memory: Mapping[str, Tensor] = {}  # what a sampler keeps of its past


class Info(NamedTuple):
    """What a person wants to know of the last steps, averaged over particles."""

    drift: float  # mean square of eta * clip(N grad H)
    noise: float  # mean square of the noise
    displacement: float  # mean square of the whole move
    accepted: float = 1.0


class AbstractSampler(ABC):
    """A way to move particles: `init`, then `step` by `step`."""

    def init(self, particles: Particles) -> State:
        """Start from a configuration.

        Parameters
        ----------
        particles
            Where to start.

        Returns
        -------
        State
            At step zero.
        """
        return State(particles)

    @abstractmethod
    def step(
        self, state: State, energy: Hamiltonian, *, generator: torch.Generator
    ) -> tuple[State, Info]:
        """Move once.

        Parameters
        ----------
        state
            Where the particles are.
        energy
            What moves them.
        generator
            The source of randomness.

        Returns
        -------
        tuple
            The next state and an account of the step.
        """

    def advance(
        self,
        state: State,
        energy: Hamiltonian,
        steps: int,
        *,
        generator: torch.Generator,
    ) -> tuple[State, Info]:
        """Move `steps` times; the result does not depend on how steps are grouped.

        Parameters
        ----------
        state
            Where the particles are.
        energy
            What moves them.
        steps
            How many steps, at least one.
        generator
            The source of randomness.

        Returns
        -------
        tuple
            The last state and the mean account of the steps.
        """
        infos = []
        for _ in range(steps):
            state, info = self.step(state, energy, generator=generator)
            infos.append(info)
        return state, Info(
            *(sum(values) / steps for values in zip(*infos, strict=True))
        )


samplers: Registry[AbstractSampler] = Registry("sampler")


@samplers.add("langevin")
@dataclass(frozen=True, eq=False)
class ProjectedLangevin(AbstractSampler):
    """Projected (or reflected) Langevin steps. [CPM alg:main-langevin].

    Parameters
    ----------
    step_size
        `eta`, positive.
    inverse_temperature
        `beta`, a number or a schedule; infinity is gradient flow.
    domain
        Where particles may be.
    clip
        The largest norm of a particle's drift; infinity for no clipping.
    boundary
        "project" or "reflect".
    batch_size
        Samples per step (stochastic gradients), drawn with replacement; None for all.
    rates
        Factors of the step size, one per particle: a particle may run on a clock of its
        own without changing the law it tends to. None for all one.
    compiled
        Use the compiled loop where it applies; it makes the same steps.

    Examples
    --------
    >>> from coulomb.objectives import GaussianPrior
    >>> flow = ProjectedLangevin(step_size=0.5, inverse_temperature=math.inf)
    >>> energy = Hamiltonian(GaussianPrior(variance=1.0, inverse_temperature=1.0))
    >>> state = flow.init(Particles(torch.tensor([[1.0]])))
    >>> state, info = flow.step(state, energy, generator=torch.Generator())
    >>> state.particles.positions
    tensor([[0.5000]])
    """

    step_size: float = 0.1
    inverse_temperature: float | AbstractSchedule = 100.0
    domain: AbstractDomain = field(default_factory=Space)
    clip: float = math.inf
    boundary: str = "project"
    batch_size: int | None = None
    rates: Tensor | None = None
    compiled: bool = True

    def __post_init__(self) -> None:
        check_real("step_size", self.step_size, above=0)
        check_real("clip", self.clip, above=0, infinite=True)
        as_schedule(self.inverse_temperature)
        if self.boundary not in ("project", "reflect"):
            raise ParameterError(
                f"`boundary` must be 'project' or 'reflect'; got {self.boundary!r}."
            )
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size, at_least=2)

    def step(
        self, state: State, energy: Hamiltonian, *, generator: torch.Generator
    ) -> tuple[State, Info]:
        positions = state.particles.positions
        if self.batch_size is not None:
            energy = energy.batch(_draw_batch(energy, self.batch_size, generator))
        gradient = energy.gradient(state.particles, generator=generator)
        if isinstance(
            self.domain, Masked
        ):  # only allowed coordinates count in the clip
            gradient = gradient * self.domain.mask
        drift = -self.step_size * clip_per_particle(gradient, self.clip)
        noise = self._noise_scale(state.step) * _standard_normal(positions, generator)
        if self.rates is not None:
            drift = self.rates.unsqueeze(-1) * drift
            noise = self.rates.sqrt().unsqueeze(-1) * noise
        target = positions + drift + noise
        moved = (
            self.domain.project(target)
            if self.boundary == "project"
            else self.domain.reflect(target)
        )
        info = Info(
            _mean_square(drift), _mean_square(noise), _mean_square(moved - positions)
        )
        particles = state.particles._replace(positions=moved)
        return State(particles, state.step + 1), info

    def advance(
        self,
        state: State,
        energy: Hamiltonian,
        steps: int,
        *,
        generator: torch.Generator,
    ) -> tuple[State, Info]:
        if not self._compiles(state, energy):
            return super().advance(state, energy, steps, generator=generator)
        return self._advance_compiled(state, energy, steps, generator)

    def _noise_scale(self, step: int) -> float:
        beta = as_schedule(self.inverse_temperature)(step)
        return math.sqrt(2 * self.step_size / beta)

    def _compiles(self, state: State, energy: Hamiltonian) -> bool:
        inner = self.domain.domain if isinstance(self.domain, Masked) else self.domain
        radius = inner.radius if isinstance(inner, Ball) else math.inf
        positions = state.particles.positions
        return (
            self.compiled
            and self.boundary == "project"
            and isinstance(inner, Ball | Space)
            and isinstance(energy.interaction, Riesz)
            and (energy.strength == 0 or isinstance(energy.pair_sum, ExactSum))
            and (energy.prior is None or isinstance(energy.prior, GaussianPrior))
            and isinstance(energy.objective, FourierAlignment)
            and energy.objective.compiles(positions, radius=radius)
        )

    def _advance_compiled(
        self,
        state: State,
        energy: Hamiltonian,
        steps: int,
        generator: torch.Generator,
    ) -> tuple[State, Info]:
        """Draw what the steps need, in the order of `step`; make them in one call."""
        objective, interaction = energy.objective, energy.interaction
        assert isinstance(objective, FourierAlignment)
        assert isinstance(interaction, Riesz)
        assert energy.prior is None or isinstance(energy.prior, GaussianPrior)
        positions = state.particles.positions.detach()
        batches, scale = [], objective.scale
        noise = positions.new_empty((steps, *positions.shape))
        for index, row in enumerate(noise.unbind()):
            if self.batch_size is not None:
                batches.append(_draw_batch(energy, self.batch_size, generator))
            level = self._noise_scale(state.step + index)
            row.normal_(0.0, level, generator=generator)
        if self.rates is not None:
            noise *= self.rates.sqrt().unsqueeze(-1)
        if self.batch_size is not None:
            # Labels come unweighted: 1/B^2, and only B(B-1) pairs are of two draws.
            scale /= self.batch_size * (self.batch_size - 1)
        inner, mask = self.domain, None
        if isinstance(self.domain, Masked):
            inner = self.domain.domain
            mask = self.domain.mask.to(positions).numpy()
        moved = langevin_steps(
            positions.contiguous().numpy(),
            noise.numpy(),
            np.full(steps, self.step_size),
            objective.compiled_data(weighted=self.batch_size is None),
            scale=scale,
            batches=torch.stack(batches).numpy() if batches else None,
            prior_precision=_to_numpy(energy.prior.precision if energy.prior else 0.0),
            rates=_to_numpy(self.rates),
            strength=energy.strength,
            s=interaction.s,
            truncation=interaction.truncation,
            clip=self.clip,
            radius=inner.radius if isinstance(inner, Ball) else math.inf,
            mask=mask,
            threads=objective.threads or torch.get_num_threads(),
        )
        info = Info(
            float(moved.drift_squares.mean()),
            _mean_square(noise),
            float(moved.move_squares.mean()),
        )
        positions = torch.from_numpy(moved.positions)
        particles = state.particles._replace(positions=positions)
        return State(particles, state.step + steps), info


def clip_per_particle(gradient: Tensor, clip: float) -> Tensor:
    """Shorten each particle's gradient to norm `clip` at most.

    Parameters
    ----------
    gradient
        Shape `(..., dim)`.
    clip
        The largest norm; infinity leaves everything as it is.

    Returns
    -------
    Tensor
        The same shape and directions.

    Examples
    --------
    >>> clip_per_particle(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    if math.isinf(clip):
        return gradient
    norm = gradient.norm(dim=-1, keepdim=True)
    return gradient * torch.where(norm > clip, clip / norm, torch.ones_like(norm))


def _draw_batch(
    energy: Hamiltonian, batch_size: int, generator: torch.Generator
) -> Tensor:
    objective = energy.objective
    if not isinstance(objective, AbstractSampled):
        raise ParameterError(
            f"`batch_size` needs an objective with samples; got {objective!r}. "
            "Use batch_size=None."
        )
    weights = objective.sample.weights
    if weights is None:
        return torch.randint(objective.sample.size, (batch_size,), generator=generator)
    return torch.multinomial(
        weights.double(), batch_size, replacement=True, generator=generator
    )


def _standard_normal(positions: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(
        positions.shape,
        generator=generator,
        dtype=positions.dtype,
        device=generator.device,
    ).to(positions.device)


def _to_numpy(values: Tensor | float | None) -> Any:
    return values.detach().numpy() if isinstance(values, Tensor) else values


def _mean_square(vectors: Tensor) -> float:
    flat = vectors.reshape(-1, vectors.shape[-1])
    return float(torch.linalg.vector_norm(flat)) ** 2 / len(flat)
