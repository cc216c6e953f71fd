"""Measured decay against `N`: tail probabilities and free energies."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError
from coulomb._support.stats import Fit, fit_line
from coulomb.theory.deviations import Scaling, contract, observable_values
from coulomb.theory.equilibrium import equilibrium
from coulomb.theory.grids import FloatArray
from coulomb.theory.importance import ImportanceSettings, LogEstimate
from coulomb.theory.system import Function, MeanField
from coulomb.theory.tails import partition_function, tail_probability

Watch = Callable[[int], None]


class DeviationCurve(NamedTuple):
    """The decay of `P(|int f dmu_N - centre| >= delta)` with `N`."""

    counts: FloatArray  # N
    speeds: FloatArray  # r_N
    log_probabilities: FloatArray
    standard_errors: FloatArray  # of the log-probabilities
    effective_sizes: FloatArray  # of the weights behind them
    predictions: FloatArray  # -N J at the temperature of N particles
    centre: float  # int f dmu at the equilibrium of the limit
    rate: float  # the limit of -log P / r_N
    fit: Fit  # its slope estimates the rate


def deviation_curve(
    system: MeanField,
    observable: Function,
    delta: float,
    counts: Sequence[int],
    *,
    scaling: Scaling | None = None,
    settings: ImportanceSettings | None = None,
    generator: torch.Generator,
    watch: Watch | None = None,
) -> DeviationCurve:
    """Measure how fast deviations of an observable become rare. [CPM thm:main-ldp].

    The rate is the smaller of the contractions to `centre + delta` and to
    `centre - delta`. The fit is `-log P = rate r_N + (1/2) log r_N + c`, the half
    logarithm being the prefactor of sharp large deviations; at speed `beta_N` a term
    `a N` is fitted too, because entropy still counts at that order.

    Parameters
    ----------
    system
        The system; its temperature is set by the scaling.
    observable
        `f`, a function of positions.
    delta
        The deviation, positive.
    counts
        Numbers of particles, at least three (at speed `beta_N`, four).
    scaling
        `beta_N`; `Scaling()` if None.
    settings
        How much is drawn.
    generator
        The source of randomness.
    watch
        Called with each `N` when it is done.

    Returns
    -------
    DeviationCurve
        Measurements, predictions and the fitted rate.
    """
    check_real("delta", delta, above=0)
    scaling = scaling or Scaling()
    limit = scaling.limit(system)
    values = observable_values(system, observable)
    masses = equilibrium(limit).density * system.grid.volumes
    centre = float(masses @ values)
    sides = [
        (upper, level)
        for upper, level in ((True, centre + delta), (False, centre - delta))
        if values.min() < level < values.max()
    ]
    if not sides:
        raise ParameterError(
            f"`delta` must leave {centre:g} +- delta inside the range of the "
            f"observable, {values.min():g} to {values.max():g}; got {delta!r}."
        )
    rate = min(contract(limit, observable, level).rate for _, level in sides)
    rows = []
    for count in counts:
        check_count("counts", count)
        finite = scaling.finite(system, count)
        normaliser = partition_function(
            finite, count, settings=settings, generator=generator
        )
        tails, rates = [], []
        for upper, level in sides:
            target = contract(finite, observable, level)
            # Where the finite system rests beyond the level there is nothing rare.
            rates.append(target.rate if (target.tilt > 0) == upper else 0.0)
            tails.append(
                tail_probability(
                    finite,
                    count,
                    observable,
                    level,
                    upper=upper,
                    target=target,
                    normaliser=normaliser,
                    settings=settings,
                    generator=generator,
                )
            )
        total = _add(tails)
        rows.append((*total, -count * min(rates)))
        if watch is not None:
            watch(count)
    logs, errors, sizes, predictions = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    n = np.array(counts, dtype=np.float64)
    speeds = np.array([scaling.speed(count) for count in counts])
    decay = -logs - 0.5 * np.log(speeds)
    fit = fit_line(speeds, decay, errors, nuisance=None if scaling.power == 1 else n)
    return DeviationCurve(
        n, speeds, logs, errors, sizes, predictions, centre, rate, fit
    )


def _add(parts: list[LogEstimate]) -> LogEstimate:
    """Add probabilities given by their logarithms."""
    finite = [part for part in parts if math.isfinite(part.value)]
    top = max(part.value for part in finite)
    shares = [math.exp(part.value - top) for part in finite]
    total = sum(shares)
    error = math.hypot(
        *(s * p.standard_error for s, p in zip(shares, finite, strict=True))
    )
    largest = finite[int(np.argmax(shares))]
    return LogEstimate(top + math.log(total), error / total, largest.effective_size)


class FreeEnergyCurve(NamedTuple):
    """`-log Z_N / beta_N` against its variational limit."""

    counts: FloatArray
    values: FloatArray
    standard_errors: FloatArray
    effective_sizes: FloatArray
    finite_limits: FloatArray  # inf F at beta_N / N
    limit: float  # inf F at finite temperature, inf E at zero temperature


def free_energy_curve(
    system: MeanField,
    counts: Sequence[int],
    *,
    scaling: Scaling | None = None,
    settings: ImportanceSettings | None = None,
    generator: torch.Generator,
    watch: Watch | None = None,
) -> FreeEnergyCurve:
    """Measure `-log Z_N / beta_N`, which tends to the least free energy.

    [CPM lem:Z-beta-asymptotics].

    Parameters
    ----------
    system
        The system; its temperature is set by the scaling.
    counts
        Numbers of particles.
    scaling
        `beta_N`; `Scaling()` if None.
    settings
        How much is drawn.
    generator
        The source of randomness.
    watch
        Called with each `N` when it is done.

    Returns
    -------
    FreeEnergyCurve
        Measurements and limits.
    """
    scaling = scaling or Scaling()
    rows = []
    for count in counts:
        finite = scaling.finite(system, check_count("counts", count))
        estimate = partition_function(
            finite, count, settings=settings, generator=generator
        )
        total = scaling.total(count)
        rows.append(
            (
                count,
                -estimate.value / total,
                estimate.standard_error / total,
                estimate.effective_size,
                equilibrium(finite).free_energy,
            )
        )
        if watch is not None:
            watch(count)
    columns = [np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)]
    limit = equilibrium(scaling.limit(system)).free_energy
    n, values, errors, sizes, finite_limits = columns
    return FreeEnergyCurve(n, values, errors, sizes, finite_limits, limit)
