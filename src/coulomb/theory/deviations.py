"""Large deviations: the rate function and its contraction to an observable.

For `P_N = exp(-beta_N H_N) / Z_N`, the empirical measure is near `mu` with probability
`exp(-r_N J(mu))`. When `beta_N / N -> beta`, `r_N = N` and
`J = beta E + Ent - inf = beta (F_beta - inf F_beta)`; when `beta_N / N -> inf`,
`r_N = beta_N` and `J = E - inf`. The paper's first case is `beta = 1`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from coulomb._support.checks import check_real
from coulomb._support.errors import DivergedError, ParameterError
from coulomb.features import AbstractFeatureMap, Particles
from coulomb.theory.equilibrium import equilibrium
from coulomb.theory.grids import FloatArray
from coulomb.theory.self_consistent import Equilibrium
from coulomb.theory.system import Function, MeanField


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
        check_real("power", self.power, at_least=1)

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
    points = torch.from_numpy(np.ascontiguousarray(system.grid.points))
    with torch.no_grad():
        return np.asarray(observable(points).double().numpy())


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
    >>> from coulomb.theory.boxes import Interval
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
