"""Large deviations: the rate function, its contraction, and decay measured against `N`.

For `P_N = exp(-beta_N H_N) / Z_N`, the empirical measure is near `mu` with probability
`exp(-r_N J(mu))`. When `beta_N / N -> beta`, `r_N = N` and
`J = beta E + Ent - inf = beta (F_beta - inf F_beta)`; when `beta_N / N -> inf`,
`r_N = beta_N` and `J = E - inf`. The paper's first case is `beta = 1`.

The Gibbs law of `N` particles is close to `N` independent draws of the mean-field
equilibrium: their log-density ratio stays bounded as `N` grows. The event
`int f dmu_N >= a` is made typical by drawing from the equilibrium tilted by `theta f`
instead. Weights correct for both, so that the estimates are unbiased for every `N`.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import DivergedError, ParameterError
from coulomb._support.stats import Fit, fit_line
from coulomb.dynamics.metropolis import Law, LogLaw, metropolis_move
from coulomb.features import AbstractFeatureMap, Particles
from coulomb.theory.ensembles import (
    BEST_ACCEPTANCE,
    cell_law,
    draw_independent,
    gibbs_law,
    width,
)
from coulomb.theory.equilibrium import Equilibrium, equilibrium
from coulomb.theory.grids import FloatArray
from coulomb.theory.system import Function, MeanField, Potential, evaluate

Watch = Callable[[int], None]


@dataclass(frozen=True)
class Scaling:
    """How the temperature falls with the number of particles, `beta_N = beta N^power`.

    Parameters
    ----------
    inverse_temperature
        `beta`, positive and finite.
    power
        One for speed `N` (entropy counts); above one for speed `beta_N` (it does not).

    Examples
    --------
    >>> Scaling(2.0, power=1.5).speed(16), Scaling(2.0).speed(16)
    (128.0, 16.0)
    """

    inverse_temperature: float = 1.0
    power: float = 1.0

    def __post_init__(self) -> None:
        check_real("inverse_temperature", self.inverse_temperature, above=0)
        check_real("power", self.power, at_least=1, at_most=16)

    def total(self, n_particles: int) -> float:
        """Tell `beta_N`.

        Parameters
        ----------
        n_particles
            `N`.

        Returns
        -------
        float
            The factor of `H_N` in the Gibbs law.
        """
        return float(self.inverse_temperature * n_particles**self.power)

    def speed(self, n_particles: int) -> float:
        """Tell `r_N`.

        Parameters
        ----------
        n_particles
            `N`.

        Returns
        -------
        float
            `N` at power one, `beta_N` above.
        """
        return float(n_particles) if self.power == 1 else self.total(n_particles)

    def finite(self, system: MeanField, n_particles: int) -> MeanField:
        """Give the mean field that `N` particles have, at `beta_N / N`.

        Parameters
        ----------
        system
            The system; its own temperature is replaced.
        n_particles
            `N`.

        Returns
        -------
        MeanField
            At finite temperature.
        """
        return system.at(self.total(n_particles) / n_particles)

    def limit(self, system: MeanField) -> MeanField:
        """Give the mean field of the limit.

        Parameters
        ----------
        system
            The system; its own temperature is replaced.

        Returns
        -------
        MeanField
            At `beta`, or at zero temperature if the power is above one.
        """
        return system.at(self.inverse_temperature if self.power == 1 else math.inf)


def rate_function(
    system: MeanField, density: FloatArray, *, rest: Equilibrium | None = None
) -> float:
    """Evaluate `J(rho)`. [CPM eq:rate-thermal-main, eq:rate-zero-temp-main].

    `beta (F(rho) - inf F)` at finite temperature (speed `N`), `E(rho) - inf E` at zero
    temperature (speed `beta_N`).

    Parameters
    ----------
    system
        The system of the limit.
    density
        Values on the cells, of mass one.
    rest
        Its equilibrium, if known already.

    Returns
    -------
    float
        At least zero up to rounding; zero at equilibrium.
    """
    rest = rest or equilibrium(system)
    rise = system.free_energy(density).total - rest.free_energy
    return _weight(system) * rise


def _weight(system: MeanField) -> float:
    beta = system.inverse_temperature
    return beta if math.isfinite(beta) else 1.0


def kernel_observable(
    x: Sequence[float],
    x_prime: Sequence[float],
    *,
    feature_map: AbstractFeatureMap | None = None,
) -> Function:
    """Make the function `f(w)` with `K_mu(x, x') = int f dmu`.

    Parameters
    ----------
    x, x_prime
        Two inputs.
    feature_map
        A map with one feature per particle and no phases, `f = phi(x, w) phi(x', w)`;
        None for Fourier features averaged over the phase, `f = cos(w.(x - x'))`.

    Returns
    -------
    Function
        Of positions `(..., dim)`.

    Examples
    --------
    >>> f = kernel_observable([1.0], [0.0])
    >>> f(torch.tensor([[0.0], [math.pi]]))
    tensor([ 1., -1.])
    """
    pair = torch.tensor([list(x), list(x_prime)], dtype=torch.float64)
    if feature_map is None:
        gap = pair[0] - pair[1]
        return lambda positions: torch.cos(positions @ gap.to(positions))
    if feature_map.needs_phases or feature_map.n_features(1) != 1:
        raise ParameterError(
            "`feature_map` must give one feature per particle without phases; got "
            f"{feature_map!r}. Use None for Fourier features."
        )
    chosen = feature_map

    def product(positions: Tensor) -> Tensor:
        alone = Particles(positions.unsqueeze(-2))  # each particle its own group
        features = chosen(pair.to(positions), alone)  # (..., 2, 1)
        return features[..., 0, 0] * features[..., 1, 0]

    return product


def observable_values(system: MeanField, observable: Function) -> FloatArray:
    """Evaluate an observable on the cells."""
    return evaluate(observable, torch.from_numpy(system.grid.points))


class Contraction(NamedTuple):
    """The cheapest way to a value of an observable."""

    level: float  # int f dmu
    rate: float  # inf J over measures with this value
    tilt: float  # theta, the slope of the rate
    density: FloatArray


def contract(
    system: MeanField, observable: Function, level: float, *, tolerance: float = 1e-9
) -> Contraction:
    """Minimise `J(mu)` over measures with `int f dmu = level`.

    The minimiser is the equilibrium of the tilted energy, `V - theta f / beta` (at
    zero temperature `V - theta f`); `theta` is the slope of the rate and is found as
    the root of `int f dmu_theta = level`, which rises with it.

    Parameters
    ----------
    system
        The system of the limit.
    observable
        `f`, a function of positions.
    level
        The value; outside the range of `f` the rate is infinite and refused.
    tolerance
        Of the level.

    Returns
    -------
    Contraction
        The rate, the tilt and the density.

    Examples
    --------
    >>> from coulomb.theory.grids import Interval
    >>> system = MeanField(Interval(-1, 1, 400), lambda w: 0 * w[..., 0])
    >>> found = contract(system, lambda w: w[..., 0], 0.5)  # Cramer, uniform law
    >>> round(found.tilt, 3), round(found.rate, 3)
    (1.797, 0.409)
    """
    values = observable_values(system, observable)
    if not values.min() < level < values.max():
        raise ParameterError(
            f"`level` must be between {values.min():g} and {values.max():g}, the range "
            f"of the observable; got {level!r}."
        )
    if math.isinf(system.inverse_temperature) and not system.strength:
        raise ParameterError(
            "`strength` must be positive at zero temperature; got 0, where every "
            "measure but point masses has a linear rate."
        )
    masses = system.grid.volumes
    rest = equilibrium(system)

    def tilted(theta: float) -> Equilibrium:
        return equilibrium(system.tilted(theta / _weight(system) * values))

    def excess(theta: float) -> float:
        return float(tilted(theta).density * masses @ values) - level

    far, sign = 1.0, math.copysign(1.0, level - float(rest.density * masses @ values))
    while sign * excess(sign * far) < 0:
        far *= 2
        if far > 1e8:
            raise DivergedError(f"No tilt reaches the level {level:g}.")
    theta = float(brentq(excess, 0.0, sign * far, xtol=tolerance, rtol=1e-12))
    density = tilted(theta).density
    rate = rate_function(system, density, rest=rest)
    return Contraction(float(density * masses @ values), rate, theta, density)


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
    >>> from coulomb.theory.grids import Interval
    >>> system = MeanField(Interval(-1, 1, 50), lambda w: 0 * w[..., 0])
    >>> estimate = partition_function(system, 3, generator=torch.Generator())
    >>> round(estimate.value, 6)  # log of the volume, 3 log 2
    2.079442
    """
    density = equilibrium(system).density
    _, log_weights = weighted_configurations(
        system, n_particles, density, settings=settings, generator=generator
    )
    return log_mean(log_weights)


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
    positions, log_weights = weighted_configurations(
        system,
        n_particles,
        target.density,
        tilt=target.tilt,
        observable=observable,
        settings=settings,
        generator=generator,
    )
    totals = evaluate(lambda w: observable(w).mean(dim=-1), positions)
    upper = target.tilt > 0 if upper is None else upper
    inside = totals >= level if upper else totals <= level
    logs = log_weights - target.tilt * n_particles * totals
    tail = log_mean(np.where(inside, logs, -np.inf))
    return LogEstimate(
        tail.value - normaliser.value,
        math.hypot(tail.standard_error, normaliser.standard_error),
        min(tail.effective_size, normaliser.effective_size),
    )


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
    `centre - delta`. The fit is `-log P = rate r_N + (1/2) log r_N + c + a / N`, the
    half logarithm being the prefactor of sharp large deviations and `a / N` its first
    correction, which takes four counts or more; without it the rate of independent
    particles, which is exact, comes out 1.5 % too small on N = 8 to 64. At speed
    `beta_N` the term is `a N`, because entropy still counts at that order.

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
    drawn: dict[str, Any] = {"settings": settings, "generator": generator}
    rows = []
    for count in counts:
        finite = scaling.finite(system, check_count("counts", count))
        normaliser = partition_function(finite, count, **drawn)
        tails, rates = [], []
        for upper, level in sides:
            target = contract(finite, observable, level)
            # Where the finite system rests beyond the level there is nothing rare.
            rates.append(target.rate if (target.tilt > 0) == upper else 0.0)
            known = drawn | {"upper": upper, "target": target, "normaliser": normaliser}
            tails.append(tail_probability(finite, count, observable, level, **known))
        rows.append((*_add(tails), -count * min(rates)))
        if watch is not None:
            watch(count)
    logs, errors, sizes, predictions = map(np.array, zip(*rows, strict=True))
    n = np.array(counts, dtype=np.float64)
    speeds = np.array([scaling.speed(count) for count in counts])
    decay = -logs - 0.5 * np.log(speeds)
    extra = n if scaling.power > 1 else 1 / n
    nuisance = [extra] if scaling.power > 1 or n.size > 3 else []
    fit = fit_line(speeds, decay, errors, nuisance=nuisance)
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
        value, error, size = partition_function(
            finite, count, settings=settings, generator=generator
        )
        total, least = scaling.total(count), equilibrium(finite).free_energy
        rows.append((count, -value / total, error / total, size, least))
        if watch is not None:
            watch(count)
    columns = [np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)]
    limit = equilibrium(scaling.limit(system)).free_energy
    return FreeEnergyCurve._make((*columns, limit))
