"""Gibbs weights and the choice of D particles out of N."""

import math

import torch
from torch import Tensor

from coulomb._support.checks import Registry, check_count, check_real
from coulomb._support.errors import ParameterError


def gibbs_weights(energies: Tensor, inverse_temperature: float) -> Tensor:
    """Compute `w_k = exp(-beta h_k) / sum_j exp(-beta h_j)`. [CPM alg:langevin_kernel].

    Parameters
    ----------
    energies
        The energy of each particle, shape `(n,)`.
    inverse_temperature
        `beta`; infinity shares the weight among the lowest energies.

    Returns
    -------
    Tensor
        Weights that sum to one.

    Examples
    --------
    >>> gibbs_weights(torch.tensor([0.0, 1000.0]), 1.0)
    tensor([1., 0.])
    """
    beta = check_real(
        "inverse_temperature", inverse_temperature, at_least=0, infinite=True
    )
    lowest = energies == energies.min()
    if beta == float("inf") or not bool(torch.isfinite(energies).any()):
        return lowest.to(energies.dtype) / lowest.sum()
    return torch.softmax(-beta * energies, dim=-1)


def temperature_of_divergence(energies: Tensor, divergence: float) -> float:
    """Find `beta` at which Gibbs weights are `divergence` nats from equal ones.

    `KL(w || 1/n) = sum_k w_k log(n w_k)` grows with `beta` from zero to the logarithm
    of the number of candidates per lowest energy; the root is found by bisection.
    Unlike `beta`, the divergence means the same for every problem and label scale.

    Parameters
    ----------
    energies
        The energy of each candidate, shape `(n,)`, finite.
    divergence
        In nats, at least zero.

    Returns
    -------
    float
        `beta`; zero if the divergence or the spread of the energies is.

    Examples
    --------
    >>> beta = temperature_of_divergence(torch.tensor([0.0, 1.0]), 0.2)
    >>> weights = gibbs_weights(torch.tensor([0.0, 1.0]), beta)
    >>> round(float((weights * (2 * weights).log()).sum()), 6)
    0.2
    """
    check_real("divergence", divergence, at_least=0)
    gaps = energies.double() - energies.double().min()
    widest = float(gaps.max())
    if divergence == 0 or widest == 0:
        return 0.0
    low, high = math.log(1e-3 / widest), math.log(1e6 / widest)
    for _ in range(60):
        middle = 0.5 * (low + high)
        beta = math.exp(middle)
        logarithms = torch.log_softmax(-beta * gaps, dim=0)
        found = float((logarithms.exp() * logarithms).sum()) + math.log(len(gaps))
        low, high = (middle, high) if found < divergence else (low, middle)
    return math.exp(low)


def effective_sample_size(weights: Tensor) -> float:
    """Compute `(sum w)^2 / sum w^2`: how many equal weights these are worth.

    Parameters
    ----------
    weights
        Non-negative, not all zero, shape `(n,)`.

    Returns
    -------
    float
        Between 1 and n.

    Examples
    --------
    >>> effective_sample_size(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    2.0
    """
    scaled = weights.double() / weights.double().max()
    return float(scaled.sum() ** 2 / scaled.square().sum())


class Resampler:
    """A way to choose `count` indices in proportion to weights.

    Parameters
    ----------
    name
        "multinomial", "systematic" or "stratified".
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self, weights: Tensor, count: int, *, generator: torch.Generator
    ) -> Tensor:
        """Choose indices; each is expected `count * weight` times.

        Parameters
        ----------
        weights
            Non-negative, shape `(n,)`.
        count
            How many to choose.
        generator
            The source of randomness.

        Returns
        -------
        Tensor
            Indices, shape `(count,)`.
        """
        check_count("count", count)
        total = weights.double().sum()
        if not bool(torch.isfinite(total)) or float(total) <= 0 or (weights < 0).any():
            raise ParameterError(
                "`weights` must be non-negative with a positive finite sum; got a sum "
                f"of {float(total)!r}."
            )
        edges = (weights.double() / total).cumsum(dim=0)
        points = self._points(count, generator)
        chosen = torch.searchsorted(edges, points, right=True)
        # Rounding can leave the last edge just below one; never choose weight zero.
        return chosen.clamp_max(int(weights.nonzero().max()))

    def _points(self, count: int, generator: torch.Generator) -> Tensor:
        grid = torch.arange(count, dtype=torch.float64)
        if self.name == "systematic":
            return (grid + torch.rand(1, generator=generator).double()) / count
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        if self.name == "stratified":
            return (grid + uniform) / count
        return uniform


resamplers: Registry[Resampler] = Registry("resampling")
for _name in ("multinomial", "systematic", "stratified"):
    resamplers.add(_name)(lambda name=_name: Resampler(name))


def choose_uniformly(n: int, count: int, *, generator: torch.Generator) -> Tensor:
    """Choose `count` different particles out of `n`.

    Parameters
    ----------
    n
        How many there are.
    count
        How many to take, at most n.
    generator
        The source of randomness.

    Returns
    -------
    Tensor
        Distinct indices in increasing order, shape `(count,)`.
    """
    if count > n:
        raise ParameterError(
            f"`count` must be at most the number of particles, {n}; got {count}."
        )
    return torch.randperm(n, generator=generator)[:count].sort().values
