"""The Gibbs law of finitely many particles, by parallel tempering, with diagnostics.

`P_N = exp(-beta N H_N) / Z_N` on the domain, that is `beta_N = beta N` in the paper's
words. [CPM Eq:Gibbs_Measure].
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError
from coulomb.dynamics.metropolis import LogLaw, metropolis_move
from coulomb.theory.ensembles import BEST_ACCEPTANCE, draw_independent, gibbs_law, width
from coulomb.theory.grids import FloatArray
from coulomb.theory.system import MeanField


def _check_chains(values: FloatArray) -> FloatArray:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] < 4:
        raise ParameterError(
            "`values` must have shape (chains, draws) with at least 4 draws; got "
            f"{values.shape}."
        )
    return values


def split_r_hat(values: FloatArray) -> float:
    """Compare the variance between half-chains with that inside them.

    `R^2 = ((n-1)/n W + B/n) / W` with `W` the mean variance of the half-chains and
    `B/n` the variance of their means. (Gelman et al., Bayesian Data Analysis, 3rd ed.)

    Parameters
    ----------
    values
        One observable, shape `(chains, draws)`.

    Returns
    -------
    float
        Near 1 if the chains agree; values above 1.01 ask for longer chains.

    Examples
    --------
    >>> chains = np.random.default_rng(0).normal(size=(4, 1000))
    >>> split_r_hat(chains) < 1.01, split_r_hat(chains + np.arange(4)[:, None]) > 1.5
    (True, True)
    """
    values = _check_chains(values)
    half = values.shape[1] // 2
    pieces = np.concatenate([values[:, :half], values[:, -half:]])
    within = float(pieces.var(axis=1, ddof=1).mean())
    if within == 0:
        return 1.0 if np.ptp(pieces) == 0 else float("inf")
    between = float(pieces.mean(axis=1).var(ddof=1))
    return float(np.sqrt((half - 1) / half + between / within))


def effective_sample_size(values: FloatArray) -> float:
    """Count the independent draws that would give the mean as well.

    `n_eff = chains * draws / (1 + 2 sum rho_t)`, the autocorrelations `rho_t` of all
    chains together, summed in pairs as long as they are positive and falling (Geyer).

    Parameters
    ----------
    values
        One observable, shape `(chains, draws)`.

    Returns
    -------
    float
        At most `chains * draws * log10(chains * draws)`.

    Examples
    --------
    >>> chains = np.random.default_rng(0).normal(size=(4, 1000))
    >>> 3000 < effective_sample_size(chains) < 5500
    True
    """
    values = _check_chains(values)
    chains, draws = values.shape
    centred = values - values.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, 2 * draws, axis=1)
    covariance = np.fft.irfft(np.abs(spectrum) ** 2, axis=1)[:, :draws] / draws
    within = float((covariance[:, 0] * draws / (draws - 1)).mean())
    total = within * (draws - 1) / draws
    if chains > 1:
        total += float(values.mean(axis=1).var(ddof=1))
    most = chains * draws * max(1.0, np.log10(chains * draws))
    if total == 0:
        return float(chains * draws)
    correlation = 1 - (within - covariance.mean(axis=0)) / total
    correlation[0] = 1.0
    even = draws - draws % 2
    pairs = correlation[:even].reshape(-1, 2).sum(axis=1)
    stop = int(np.argmax(pairs < 0)) if (pairs < 0).any() else pairs.size
    falling = np.minimum.accumulate(pairs[:stop])
    time = max(2 * float(falling.sum()) - 1, 1e-12)
    return float(min(chains * draws / time, most))


@dataclass(frozen=True)
class TemperingSettings:
    """How the Gibbs law is sampled.

    Parameters
    ----------
    chains
        Independent ladders, at least two: R-hat compares them.
    rungs
        Temperatures of a ladder; one for no tempering.
    hottest
        The smallest inverse temperature, as a fraction of the wanted one.
    warmup
        Sweeps that tune the steps and are thrown away.
    draws
        Sweeps that are kept.
    thin
        Moves of every configuration per sweep.
    step_size
        The first step, as a fraction of the squared diameter over `n_particles`.
    """

    chains: int = 4
    rungs: int = 4
    hottest: float = 0.25
    warmup: int = 500
    draws: int = 1000
    thin: int = 1
    step_size: float = 0.01

    def __post_init__(self) -> None:
        check_count("chains", self.chains, at_least=2)
        check_count("rungs", self.rungs)
        check_real("hottest", self.hottest, above=0, at_most=1)
        check_count("warmup", self.warmup, at_least=0)
        check_count("draws", self.draws, at_least=4)
        check_count("thin", self.thin)
        check_real("step_size", self.step_size, above=0)


class GibbsSample(NamedTuple):
    """Draws of the Gibbs law with their diagnostics."""

    positions: Tensor  # (chains, draws, n_particles, dim)
    energies: FloatArray  # (chains, draws): H
    accepted: FloatArray  # (rungs,): share of moves accepted, coldest first
    swapped: FloatArray  # (rungs - 1,): share of exchanges accepted
    r_hat: float  # of the energy
    effective_size: float  # of the energy


def gibbs_sample(
    system: MeanField,
    n_particles: int,
    *,
    settings: TemperingSettings | None = None,
    generator: torch.Generator,
) -> GibbsSample:
    """Sample `exp(-beta N H_N)`: Metropolis-adjusted Langevin, parallel tempering.

    Each ladder holds configurations at inverse temperatures from `beta` to
    `hottest * beta`; neighbours are exchanged with probability
    `min(1, exp(N (beta_i - beta_j) (H_i - H_j)))`.

    Parameters
    ----------
    system
        The system, at finite temperature.
    n_particles
        `N`.
    settings
        Chains, temperatures and lengths.
    generator
        The source of randomness.

    Returns
    -------
    GibbsSample
        Draws at the coldest temperature.

    Examples
    --------
    >>> from coulomb.theory.grids import Interval
    >>> system = MeanField(Interval(-1, 1, 50), lambda w: w[..., 0] ** 2)
    >>> few = TemperingSettings(chains=2, warmup=20, draws=30)
    >>> sample = gibbs_sample(
    ...     system, 3, settings=few, generator=torch.Generator().manual_seed(0)
    ... )
    >>> tuple(sample.positions.shape)
    (2, 30, 3, 1)
    """
    settings = settings or TemperingSettings()
    check_count("n_particles", n_particles)
    if math.isinf(system.inverse_temperature):
        raise ParameterError(
            "`inverse_temperature` must be finite for sampling; got inf. Use "
            "`ground_state` for the limit."
        )
    ladder = _Ladder(system, n_particles, settings, generator)
    for _ in range(settings.warmup):
        ladder.sweep(tune=True)
    sweeps = [ladder.sweep(tune=False) for _ in range(settings.draws)]
    positions, energies, accepted, swapped = zip(*sweeps, strict=True)
    values = torch.stack(energies, dim=1).numpy()
    return GibbsSample(
        torch.stack(positions, dim=1),
        values,
        np.mean(accepted, axis=0),
        np.nanmean(swapped, axis=0),
        split_r_hat(values),
        effective_sample_size(values),
    )


class _Sweep(NamedTuple):
    """The coldest configurations after a sweep, and what was accepted in it."""

    positions: Tensor  # (chains, n_particles, dim)
    energies: Tensor  # (chains,)
    accepted: FloatArray  # (rungs,): share of moves
    swapped: FloatArray  # (rungs - 1,): share of exchanges; NaN where none was tried


class _Ladder:
    """All chains and rungs as one batch, `(chains, rungs)` flattened."""

    def __init__(
        self,
        system: MeanField,
        n_particles: int,
        settings: TemperingSettings,
        generator: torch.Generator,
    ) -> None:
        self._settings, self._generator = settings, generator
        self._domain, self._count = system.grid.domain, n_particles
        rungs, count = settings.rungs, settings.chains * settings.rungs
        shares = torch.logspace(0, math.log10(settings.hottest), rungs).double()
        self._betas = (system.inverse_temperature * shares).repeat(settings.chains)
        self._law = gibbs_law(system, n_particles, self._betas)
        self._positions = draw_independent(
            system, system.grid.uniform(), count, n_particles, generator=generator
        )
        self._now = self._law(self._positions)
        first = settings.step_size * width(system.grid) ** 2 / n_particles
        self._log_steps = torch.full((rungs,), math.log(first), dtype=torch.float64)
        self._turn = 0

    def sweep(self, *, tune: bool) -> _Sweep:
        """Move every configuration, then exchange neighbours of each ladder."""
        chains, rungs = self._settings.chains, self._settings.rungs
        shares = []
        for _ in range(self._settings.thin):
            steps = self._log_steps.exp().repeat(chains)
            self._positions, self._now, accepted, _ = metropolis_move(
                self._law,
                self._positions,
                self._now,
                steps,
                self._domain,
                generator=self._generator,
            )
            shares.append(accepted.double().reshape(chains, rungs).mean(dim=0))
            if tune:
                self._log_steps += 0.1 * (shares[-1] - BEST_ACCEPTANCE)
        swapped = self._exchange()
        cold = slice(None, None, rungs)
        energies = -self._now.value[cold] / (self._betas[cold] * self._count)
        moved = torch.stack(shares).mean(dim=0).numpy()
        return _Sweep(self._positions[cold].clone(), energies, moved, swapped)

    def _exchange(self) -> FloatArray:
        """Exchange neighbours, even and odd pairs by turns; tell the shares."""
        chains, rungs = self._settings.chains, self._settings.rungs
        lower = torch.arange(rungs - 1)[self._turn % 2 :: 2]
        self._turn += 1
        shape = (chains, max(lower.numel(), 1))
        uniform = torch.rand(shape, generator=self._generator, dtype=torch.float64)
        # log p / beta is -N H, whatever the rung.
        scaled = (self._now.value / self._betas).reshape(chains, rungs)
        betas = self._betas.reshape(chains, rungs)
        rise = (betas[:, lower] - betas[:, lower + 1]) * (
            scaled[:, lower + 1] - scaled[:, lower]
        )
        swap = uniform.log() < rise
        order = torch.arange(rungs).repeat(chains, 1)
        order[:, lower] += swap.long()
        order[:, lower + 1] -= swap.long()
        index = (order + rungs * torch.arange(chains)[:, None]).reshape(-1)
        ratio = self._betas / self._betas[index]
        value, gradient = (part[index] for part in self._now)
        self._positions = self._positions[index]
        self._now = LogLaw(value * ratio, gradient * ratio[:, None, None])
        shares = np.full(rungs - 1, math.nan)
        shares[lower.numpy()] = swap.double().mean(dim=0).numpy()
        return shares
