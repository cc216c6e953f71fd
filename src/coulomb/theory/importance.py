"""Weighted configurations: importance sampling from the mean field.

The Gibbs law of `N` particles is close to `N` independent draws of the mean-field
equilibrium: their log-density ratio stays bounded as `N` grows. The event
`int f dmu_N >= a` is made typical by drawing from the equilibrium tilted by `theta f`
instead. Weights correct for both, so that the estimates are unbiased for every `N`.
"""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coulomb._support.checks import check_count
from coulomb._support.errors import ParameterError
from coulomb.dynamics.metropolis import Law, LogLaw, metropolis_move
from coulomb.features import Particles
from coulomb.theory.ensembles import (
    BEST_ACCEPTANCE,
    cell_law,
    draw_independent,
    gibbs_law,
    width,
)
from coulomb.theory.grids import FloatArray
from coulomb.theory.system import Function, MeanField, Potential


@dataclass(frozen=True)
class ImportanceSettings:
    """How much is drawn.

    Parameters
    ----------
    configurations
        Independent draws of the whole configuration.
    bridges
        Laws between the independent draws and the Gibbs law, each followed by
        Metropolis moves (annealed importance sampling); 0 weighs the draws at once.
        Cold systems, whose weights spread, need some.
    moves
        Metropolis moves per bridge.
    """

    configurations: int = 4000
    bridges: int = 0
    moves: int = 2

    def __post_init__(self) -> None:
        check_count("configurations", self.configurations, at_least=10)
        check_count("bridges", self.bridges, at_least=0)
        check_count("moves", self.moves)


class LogEstimate(NamedTuple):
    """The logarithm of a positive number, with the error of the logarithm."""

    value: float
    standard_error: float
    effective_size: float  # of the weights


def log_mean(log_values: FloatArray) -> LogEstimate:
    """Estimate `log E[exp(value)]` from independent draws."""
    top = float(log_values.max())
    if not math.isfinite(top):
        return LogEstimate(-math.inf, math.inf, 0.0)
    weights = np.exp(log_values - top)
    mean = float(weights.mean())
    error = float(weights.std(ddof=1)) / (mean * math.sqrt(weights.size))
    size = float(weights.sum() ** 2 / (weights**2).sum())
    return LogEstimate(top + math.log(mean), error, size)


def weighted_configurations(
    system: MeanField,
    n_particles: int,
    density: FloatArray,
    *,
    tilt: float = 0.0,
    observable: Function | None = None,
    settings: ImportanceSettings | None = None,
    generator: torch.Generator,
) -> tuple[Tensor, FloatArray]:
    """Draw from a product law and weigh for `exp(-beta N H_N + theta sum_k f(w_k))`.

    The mean of `exp(w)` over the log-weights estimates the normaliser.
    With bridges the draws are moved through laws in between (Neal 2001), which keeps
    the weights even.
    """
    settings = settings or ImportanceSettings()
    if math.isinf(system.inverse_temperature):
        raise ParameterError(
            "`inverse_temperature` must be finite for particles; got inf."
        )
    positions = draw_independent(
        system, density, settings.configurations, n_particles, generator=generator
    )
    start_law = cell_law(system.grid, np.log(density))
    goal_law = gibbs_law(system, n_particles, system.inverse_temperature)
    if tilt and observable is not None:
        goal_law = _tilted(goal_law, tilt, observable)
    weights = torch.zeros(settings.configurations, dtype=torch.float64)
    goal, start = goal_law(positions), start_law(positions)
    first = 0.01 * width(system.grid) ** 2 / n_particles
    step = torch.full((settings.configurations,), first).double()
    times = np.linspace(0, 1, settings.bridges + 2)
    for before, after in itertools.pairwise(times):
        weights = weights + (after - before) * (goal.value - start.value)
        if after == 1:
            break
        law = _between(start_law, goal_law, float(after))
        now = law(positions)
        for _ in range(settings.moves):
            positions, now, accepted, _ = metropolis_move(
                law, positions, now, step, system.grid.domain, generator=generator
            )
            share = float(accepted.double().mean())
            step = step * math.exp(0.5 * (share - BEST_ACCEPTANCE))
        goal, start = goal_law(positions), start_law(positions)
    return positions, weights.numpy()


def _tilted(law: Law, tilt: float, observable: Function) -> Law:
    """Multiply a law by `exp(tilt sum_k f(w_k))`."""
    objective = Potential(observable)

    def tilted(positions: Tensor) -> LogLaw:
        value, gradient = law(positions)
        seen = objective.field(Particles(positions))
        value = value + tilt * seen.potential.sum(dim=-1)
        return LogLaw(value, gradient + tilt * seen.gradient)

    return tilted


def _between(start_law: Law, goal_law: Law, time: float) -> Law:
    """Give the geometric mean of two laws, from the start at 0 to the goal at 1."""

    def law(positions: Tensor) -> LogLaw:
        goal, start = goal_law(positions), start_law(positions)
        mixed = (time * g + (1 - time) * s for g, s in zip(goal, start, strict=True))
        return LogLaw(*mixed)

    return law
