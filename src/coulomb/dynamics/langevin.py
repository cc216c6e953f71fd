"""Langevin dynamics, the way particles move: projected, or preconditioned as in Adam.

`w <- P(w - eta clip(N grad_k H) + sqrt(2 eta / beta) xi)`. The noise is never clipped;
clipping is per particle, so that the step of one does not depend on the others.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coulomb._support.checks import Registry, check_count, check_real
from coulomb._support.errors import ParameterError
from coulomb.domains import AbstractDomain, Ball, Masked, Space, check_boundary
from coulomb.energy import EnergyTerms, Hamiltonian
from coulomb.features import Particles
from coulomb.interactions import ExactSum, Riesz
from coulomb.kernels.particles import ParticleField, langevin_steps
from coulomb.objectives import AbstractSampled, FourierAlignment, GaussianPrior, Sample


class AbstractSchedule(ABC):
    """The inverse temperature as a function of the step."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Tell the inverse temperature of a step.

        Parameters
        ----------
        step
            Counted from zero.

        Returns
        -------
        float
            Positive, possibly infinite.
        """


@dataclass(frozen=True)
class Constant(AbstractSchedule):
    """The same temperature at every step.

    Parameters
    ----------
    inverse_temperature
        `beta`; infinity is gradient flow.
    """

    inverse_temperature: float

    def __post_init__(self) -> None:
        check_real(
            "inverse_temperature", self.inverse_temperature, above=0, infinite=True
        )

    def __call__(self, step: int) -> float:
        return self.inverse_temperature


@dataclass(frozen=True)
class Annealed(AbstractSchedule):
    """Cool geometrically from `start` to `end` over `steps`, then stay.

    Parameters
    ----------
    start, end
        Inverse temperatures, positive and finite.
    steps
        How long the cooling takes.

    Examples
    --------
    >>> cool = Annealed(start=1.0, end=100.0, steps=10)
    >>> cool(0), round(cool(5), 9), cool(20)
    (1.0, 10.0, 100.0)
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        check_real("start", self.start, above=0)
        check_real("end", self.end, above=0)
        check_count("steps", self.steps)

    def __call__(self, step: int) -> float:
        share = min(step / self.steps, 1.0)
        if share == 1.0:
            return self.end
        return self.start * math.exp(share * math.log(self.end / self.start))


def as_schedule(value: "float | AbstractSchedule") -> AbstractSchedule:
    """Turn a number into a constant schedule.

    Parameters
    ----------
    value
        A number or a schedule.

    Returns
    -------
    AbstractSchedule
        The schedule.
    """
    return value if isinstance(value, AbstractSchedule) else Constant(value)


class Evaluated(NamedTuple):
    """What acts on particles, and the energy and positions it was evaluated for."""

    energy: Hamiltonian
    positions: Tensor
    field: ParticleField


class State(NamedTuple):
    """What the next step needs."""

    particles: Particles
    step: int = 0
    memory: Mapping[str, Tensor] = {}  # what a sampler keeps of its past
    evaluated: Evaluated | None = None  # spares the next step an evaluation


class Info(NamedTuple):
    """What a person wants to know of the last steps, averaged over particles."""

    drift: float  # mean square of eta * clip(N grad H)
    noise: float  # mean square of the noise
    displacement: float  # mean square of the whole move
    accepted: float = 1.0
    drift_vectors: Tensor | None = None  # of each particle; of a single step only
    terms: EnergyTerms | None = None  # where the steps ended, if they were evaluated


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
            infos.append((info.drift, info.noise, info.displacement, info.accepted))
        return state, Info(
            *(sum(values) / steps for values in zip(*infos, strict=True))
        )


class AbstractGradientSampler(AbstractSampler):
    """A sampler whose steps need the gradient of the energy and no more."""

    step_size: float
    inverse_temperature: float | AbstractSchedule
    clip: float
    batch_size: int | None

    def __post_init__(self) -> None:
        check_real("step_size", self.step_size, above=0)
        check_real("clip", self.clip, above=0, infinite=True)
        as_schedule(self.inverse_temperature)
        if self.batch_size is not None:
            # More than there are rows is all of them.
            check_count("batch_size", self.batch_size, at_least=2, at_most=sys.maxsize)

    @abstractmethod
    def move(
        self, state: State, gradient: Tensor, *, generator: torch.Generator
    ) -> tuple[State, Info]:
        """Move once along a gradient.

        Parameters
        ----------
        state
            Where the particles are.
        gradient
            `N grad_k H` there, the shape of the positions.
        generator
            The source of randomness.

        Returns
        -------
        tuple
            The next state and an account of the step.
        """

    def step(
        self, state: State, energy: Hamiltonian, *, generator: torch.Generator
    ) -> tuple[State, Info]:
        energy = _batched(energy, self.batch_size, generator)
        gradient = energy.gradient(state.particles, generator=generator)
        return self.move(state, gradient, generator=generator)


samplers: Registry[AbstractSampler] = Registry("sampler")


@samplers.add("langevin")
@dataclass(frozen=True, eq=False)
class ProjectedLangevin(AbstractGradientSampler):
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
        super().__post_init__()
        check_boundary(self.boundary)

    def move(
        self, state: State, gradient: Tensor, *, generator: torch.Generator
    ) -> tuple[State, Info]:
        positions = state.particles.positions
        if isinstance(self.domain, Masked):
            # Only allowed coordinates count in the clip.
            gradient = gradient * self.domain.mask
        drift = -self.step_size * clip_per_particle(gradient, self.clip)
        beta = as_schedule(self.inverse_temperature)(state.step)
        noise = _standard_normal(positions, generator)
        noise = math.sqrt(2 * self.step_size / beta) * noise
        if self.rates is not None:
            drift = self.rates.unsqueeze(-1) * drift
            noise = self.rates.sqrt().unsqueeze(-1) * noise
        target = positions + drift + noise
        moved = (
            self.domain.project(target)
            if self.boundary == "project"
            else self.domain.reflect(target)
        )
        return _arrive(state, moved, drift, noise)

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
        batch = _batch_rows(objective, self.batch_size)
        beta = as_schedule(self.inverse_temperature)
        noise = positions.new_empty((steps, *positions.shape))
        for index, row in enumerate(noise.unbind()):
            if batch is not None:
                batches.append(_draw_rows(objective.sample, batch, generator))
            level = math.sqrt(2 * self.step_size / beta(state.step + index))
            row.normal_(0.0, level, generator=generator)
        if self.rates is not None:
            noise *= self.rates.sqrt().unsqueeze(-1)
        if batch is not None:
            # Labels come unweighted: 1/B^2, and only B(B-1) pairs are of two draws.
            scale /= batch * (batch - 1)
        inner, mask = self.domain, None
        if isinstance(self.domain, Masked):
            inner = self.domain.domain
            mask = self.domain.mask.to(positions).numpy()
        before = state.evaluated
        if before is not None and (
            before.energy is not energy
            or before.positions is not state.particles.positions
            or batch is not None
        ):
            before = None
        moved = langevin_steps(
            positions.contiguous().numpy(),
            noise.numpy(),
            np.full(steps, self.step_size),
            objective.compiled_data(weighted=batch is None),
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
            field=before.field if before else None,
            want_field=batch is None,
        )
        info = Info(
            float(moved.drift_squares.mean()),
            mean_square(noise),
            float(moved.move_squares.mean()),
        )
        positions = torch.from_numpy(moved.positions)
        particles = state.particles._replace(positions=positions)
        after = State(particles, state.step + steps)
        if moved.field is None:
            return after, info
        alignment = torch.from_numpy(moved.field.potential) + objective.constant
        repulsion = torch.from_numpy(moved.field.repulsion)
        terms = energy.combine(particles, alignment.mean(), 0.5 * repulsion.mean())
        evaluated = Evaluated(energy, positions, moved.field)
        return after._replace(evaluated=evaluated), info._replace(terms=terms)


@samplers.add("adam")
@dataclass(frozen=True, eq=False)
class AdamLangevin(AbstractGradientSampler):
    """Langevin steps preconditioned as in Adam; a flow at infinite `beta`.

    `m <- b1 m + (1 - b1) f`, `v <- b2 v + (1 - b2) f^2` with `f = N grad_k H`, and
    `w <- P(w - eta m / s + sqrt(2 eta / (beta s)) xi)`, where `s = sqrt(v) + eps` and
    `m`, `v` are corrected for their start at zero. Where the energy is steep in some
    coordinates and flat in others, plain steps are as short as the steepest one allows;
    these are not.

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
        super().__post_init__()
        check_real("floor", self.floor, above=0)
        for value in self.decay:
            check_real("decay", value, at_least=0, below=1)

    def init(self, particles: Particles) -> State:
        zero = torch.zeros_like(particles.positions)
        return State(particles, memory={"mean": zero, "square": zero})

    def move(
        self, state: State, gradient: Tensor, *, generator: torch.Generator
    ) -> tuple[State, Info]:
        positions, one, two = state.particles.positions, *self.decay
        force, made = clip_per_particle(gradient, self.clip), state.step + 1
        mean = one * state.memory["mean"] + (1 - one) * force
        square = two * state.memory["square"] + (1 - two) * force.square()
        scale = (square / (1 - two**made)).sqrt() + self.floor
        drift = -self.step_size * (mean / (1 - one**made)) / scale
        beta = as_schedule(self.inverse_temperature)(state.step)
        noise = _standard_normal(positions, generator)
        noise = math.sqrt(2 * self.step_size / beta) * noise / scale.sqrt()
        moved = self.domain.project(positions + drift + noise)
        memory = {"mean": mean, "square": square}
        return _arrive(state, moved, drift, noise, memory)


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
    return gradient if math.isinf(clip) else gradient * clip_factors(gradient, clip)


def clip_factors(gradient: Tensor, clip: float | Tensor) -> Tensor:
    """Say how much of each gradient `clip_per_particle` leaves.

    Parameters
    ----------
    gradient
        Shape `(..., dim)`.
    clip
        The largest norm, finite or not; a tensor for one per configuration.

    Returns
    -------
    Tensor
        Shape `(..., 1)`, at most one.
    """
    norm = gradient.norm(dim=-1, keepdim=True)
    return torch.where(norm > clip, clip / norm, torch.ones_like(norm))


def _arrive(
    before: State,
    moved: Tensor,
    drift: Tensor,
    noise: Tensor,
    memory: Mapping[str, Tensor] | None = None,
) -> tuple[State, Info]:
    """Give the state where a step has led, and an account of the step."""
    info = Info(
        mean_square(drift),
        mean_square(noise),
        mean_square(moved - before.particles.positions),
        drift_vectors=drift,
    )
    particles = before.particles._replace(positions=moved)
    return State(particles, before.step + 1, memory or {}), info


def _batched(
    energy: Hamiltonian, batch_size: int | None, generator: torch.Generator
) -> Hamiltonian:
    """Estimate the energy from a batch of the samples, or take all of them."""
    objective = energy.objective
    if batch_size is None:
        return energy
    if not isinstance(objective, AbstractSampled):
        raise ParameterError(
            f"`batch_size` needs an objective with samples; got {objective!r}. "
            "Use batch_size=None."
        )
    rows = _batch_rows(objective, batch_size)
    if rows is None:
        return energy
    return energy.batch(_draw_rows(objective.sample, rows, generator))


def _batch_rows(objective: AbstractSampled, batch_size: int | None) -> int | None:
    """Say how many rows to draw; None for all: a batch as large as the data is them."""
    if batch_size is None or batch_size >= objective.sample.size:
        return None
    return batch_size


def _draw_rows(sample: Sample, count: int, generator: torch.Generator) -> Tensor:
    if sample.weights is None:
        return torch.randint(sample.size, (count,), generator=generator)
    weights = sample.weights.double()
    return torch.multinomial(weights, count, replacement=True, generator=generator)


def _standard_normal(positions: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(
        positions.shape,
        generator=generator,
        dtype=positions.dtype,
        device=generator.device,
    ).to(positions.device)


def _to_numpy(values: Tensor | float | None) -> Any:
    return values.detach().numpy() if isinstance(values, Tensor) else values


def mean_square(vectors: Tensor) -> float:
    """Average the squared norms of vectors.

    Parameters
    ----------
    vectors
        Shape `(..., dim)`.

    Returns
    -------
    float
        The mean square.
    """
    flat = vectors.reshape(-1, vectors.shape[-1])
    return float(torch.linalg.vector_norm(flat)) ** 2 / len(flat)
