"""Where particles start, and which are kept: laws, Gibbs weights and resampling."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from coulomb._support.checks import Registry, check_count, check_real
from coulomb._support.errors import ParameterError


class AbstractLaw(ABC):
    """A law of the positions."""

    def draw(
        self,
        n: int,
        dim: int,
        *,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Draw positions.

        Parameters
        ----------
        n
            Number of particles.
        dim
            Number of coordinates.
        generator
            The source of randomness.
        dtype
            Of the positions.

        Returns
        -------
        Tensor
            Shape `(n, dim)`.
        """
        return self._draw(n, dim, generator).to(dtype)

    @abstractmethod
    def _draw(self, n: int, dim: int, generator: torch.Generator) -> Tensor:
        """Draw positions in float64."""


starting_laws: Registry[AbstractLaw] = Registry("start")


@starting_laws.add("gaussian")
@dataclass(frozen=True)
class Gaussian(AbstractLaw):
    """Independent normal coordinates.

    `variance = 2 gamma` is the spectral law of the kernel `exp(-gamma |x - x'|^2)`.

    Parameters
    ----------
    variance
        Of each coordinate.

    Examples
    --------
    >>> Gaussian(2.0).draw(3, 2, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([3, 2])
    """

    variance: float = 1.0

    def __post_init__(self) -> None:
        check_real("variance", self.variance, above=0)

    def _draw(self, n: int, dim: int, generator: torch.Generator) -> Tensor:
        standard = torch.randn(n, dim, generator=generator, dtype=torch.float64)
        return math.sqrt(self.variance) * standard


@starting_laws.add("orthogonal")
@dataclass(frozen=True)
class Orthogonal(AbstractLaw):
    """Orthogonal blocks with the norms of Gaussian vectors (Yu et al. 2016).

    Each particle has the law of a Gaussian one; within a block of `dim` particles the
    directions are orthogonal, which lowers the variance of the kernel.

    Parameters
    ----------
    variance
        Of each coordinate.
    """

    variance: float = 1.0

    def __post_init__(self) -> None:
        check_real("variance", self.variance, above=0)

    def _draw(self, n: int, dim: int, generator: torch.Generator) -> Tensor:
        blocks = math.ceil(n / dim)
        square = torch.randn(blocks, dim, dim, generator=generator, dtype=torch.float64)
        basis, triangle = torch.linalg.qr(square)
        # The sign makes the basis uniform over rotations, not only orthogonal.
        basis = basis * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        lengths = torch.randn(n, dim, generator=generator, dtype=torch.float64)
        directions = basis.mT.reshape(-1, dim)[:n]
        scaled = directions * vector_norm(lengths, dim=-1, keepdim=True)
        return math.sqrt(self.variance) * scaled


@starting_laws.add("sparse")
@dataclass(frozen=True)
class Sparse(AbstractLaw):
    """Gaussian particles that live on a few coordinates each.

    Parameters
    ----------
    coordinates
        How many coordinates a particle has; all of them if there are fewer.
    variance
        Of each of these coordinates.

    Examples
    --------
    >>> law = Sparse(coordinates=1)
    >>> drawn = law.draw(5, 3, generator=torch.Generator().manual_seed(0))
    >>> (drawn != 0).sum(dim=1)
    tensor([1, 1, 1, 1, 1])
    """

    coordinates: int = 2
    variance: float = 1.0

    def __post_init__(self) -> None:
        check_count("coordinates", self.coordinates)
        check_real("variance", self.variance, above=0)

    def _draw(self, n: int, dim: int, generator: torch.Generator) -> Tensor:
        order = torch.rand(n, dim, generator=generator).argsort(dim=-1, stable=True)
        mask = (order < self.coordinates).to(torch.float64)
        standard = torch.randn(n, dim, generator=generator, dtype=torch.float64)
        return math.sqrt(self.variance) * standard * mask


class Component(NamedTuple):
    """One part of a mixture of spectral laws."""

    coordinates: int  # how many a particle lives on; 0 for all
    bandwidth: float  # m: the kernel is exp(-(m/k) r^2) on k coordinates
    absolute: bool = False  # then it is exp(-m r^2)

    @property
    def variance(self) -> float:
        """The variance of each coordinate a particle lives on."""
        return 2 * self.bandwidth / (1 if self.absolute else self.coordinates)


class SpectralDraw(NamedTuple):
    """Particles of a mixture, with what they came from."""

    positions: Tensor  # (n, dim)
    mask: Tensor  # (n, dim), ones on a particle's own coordinates
    variance: Tensor  # (n,), of each of these coordinates


@starting_laws.add("spectral-mixture")
@dataclass(frozen=True)
class SpectralMixture(AbstractLaw):
    """A mixture of Gaussian spectral laws on few or many coordinates, in equal shares.

    Parameters
    ----------
    components
        The parts; those that are the same in `dim` coordinates count once.

    Examples
    --------
    >>> law = SpectralMixture((Component(1, 1.0), Component(0, 0.5)))
    >>> drawn = law.draw_parts(4, 2, generator=torch.Generator().manual_seed(0))
    >>> drawn.mask.sum(dim=1), drawn.variance
    (tensor([1., 1., 2., 2.], dtype=torch.float64),
     tensor([2.0000, 2.0000, 0.5000, 0.5000], dtype=torch.float64))
    """

    components: tuple[Component, ...] = (Component(0, 1.0),)

    def resolve(self, dim: int) -> tuple[Component, ...]:
        """Write the components with the number of coordinates they have in `dim`.

        Parameters
        ----------
        dim
            Number of coordinates there are.

        Returns
        -------
        tuple
            Distinct components, in order.
        """
        parts = (
            part._replace(coordinates=min(part.coordinates or dim, dim))
            for part in self.components
        )
        return tuple(dict.fromkeys(parts))

    def draw_parts(
        self, n: int, dim: int, *, generator: torch.Generator
    ) -> SpectralDraw:
        """Draw particles together with their coordinates and variances.

        Parameters
        ----------
        n
            Number of particles.
        dim
            Number of coordinates.
        generator
            The source of randomness.

        Returns
        -------
        SpectralDraw
            In float64, component after component.
        """
        parts = self.resolve(dim)
        positions, masks, variances = [], [], []
        for index, part in enumerate(parts):
            count = n * (index + 1) // len(parts) - n * index // len(parts)
            law = Sparse(part.coordinates, part.variance)
            drawn = law.draw(count, dim, generator=generator)
            positions.append(drawn)
            masks.append((drawn != 0).to(drawn.dtype))
            variances.append(torch.full((count,), part.variance, dtype=drawn.dtype))
        return SpectralDraw(
            torch.cat(positions), torch.cat(masks), torch.cat(variances)
        )

    def _draw(self, n: int, dim: int, generator: torch.Generator) -> Tensor:
        return self.draw_parts(n, dim, generator=generator).positions


def draw_phases(
    n: int, *, generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Draw phases uniformly from `[0, 2 pi)`.

    Parameters
    ----------
    n
        Number of particles.
    generator
        The source of randomness.
    dtype
        Of the phases.

    Returns
    -------
    Tensor
        Shape `(n,)`.
    """
    unit = torch.rand(n, generator=generator, dtype=torch.float64)
    return (2 * math.pi * unit).to(dtype)


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
