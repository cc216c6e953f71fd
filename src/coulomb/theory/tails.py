"""Rare events and partition functions of finitely many particles."""

import math

import numpy as np
import torch

from coulomb.theory.deviations import Contraction, contract
from coulomb.theory.equilibrium import equilibrium
from coulomb.theory.importance import (
    ImportanceSettings,
    LogEstimate,
    log_mean,
    weighted_configurations,
)
from coulomb.theory.system import Function, MeanField


def partition_function(
    system: MeanField,
    n_particles: int,
    *,
    settings: ImportanceSettings | None = None,
    generator: torch.Generator,
) -> LogEstimate:
    """Estimate `log Z_N`, `Z_N = int exp(-beta N H_N)`. [CPM Eq:Gibbs_Measure].

    Parameters
    ----------
    system
        At `beta = beta_N / N`, finite.
    n_particles
        `N`.
    settings
        How much is drawn.
    generator
        The source of randomness.

    Returns
    -------
    LogEstimate
        `-log Z_N / (beta N)` tends to the least free energy.

    Examples
    --------
    >>> from coulomb.theory.boxes import Interval
    >>> system = MeanField(Interval(-1, 1, 50), lambda w: 0 * w[..., 0])
    >>> estimate = partition_function(system, 3, generator=torch.Generator())
    >>> round(estimate.value, 6)  # log of the volume, 3 log 2
    2.079442
    """
    weighted = weighted_configurations(
        system,
        n_particles,
        equilibrium(system).density,
        settings=settings,
        generator=generator,
    )
    return log_mean(weighted.log_weights)


def tail_probability(
    system: MeanField,
    n_particles: int,
    observable: Function,
    level: float,
    *,
    upper: bool | None = None,
    target: Contraction | None = None,
    normaliser: LogEstimate | None = None,
    settings: ImportanceSettings | None = None,
    generator: torch.Generator,
) -> LogEstimate:
    """Estimate the probability that `int f dmu_N` is at least as far out as `level`.

    `P = Z^-1 Z_theta E_theta[1{tail} exp(-theta N int f dmu_N)]`: the tilted law makes
    the tail typical, so that 1e-8 takes no more draws than 1e-2.

    Parameters
    ----------
    system
        At `beta = beta_N / N`, finite.
    n_particles
        `N`.
    observable
        `f`, a function of positions.
    level
        Where the tail begins.
    upper
        Whether the tail is above the level; None takes the side away from equilibrium.
    target
        The contraction to this level, if known already.
    normaliser
        `log Z_N`, if estimated already with independent draws.
    settings
        How much is drawn.
    generator
        The source of randomness.

    Returns
    -------
    LogEstimate
        The logarithm of the probability with its standard error.
    """
    if normaliser is None:
        normaliser = partition_function(
            system, n_particles, settings=settings, generator=generator
        )
    target = target or contract(system, observable, level)
    weighted = weighted_configurations(
        system,
        n_particles,
        target.density,
        tilt=target.tilt,
        observable=observable,
        settings=settings,
        generator=generator,
    )
    with torch.no_grad():
        totals = observable(weighted.positions).mean(dim=-1).double().numpy()
    upper = target.tilt > 0 if upper is None else upper
    inside = totals >= level if upper else totals <= level
    logs = weighted.log_weights - target.tilt * n_particles * totals
    tail = log_mean(np.where(inside, logs, -np.inf))
    return LogEstimate(
        tail.value - normaliser.value,
        math.hypot(tail.standard_error, normaliser.standard_error),
        min(tail.effective_size, normaliser.effective_size),
    )
