"""What an energy is, the data it looks at, label vectors, and the prior."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb._support.checks import check_real
from coulomb._support.errors import ParameterError
from coulomb.features import Particles


class Field(NamedTuple):
    """What one evaluation of an energy gives the dynamics."""

    potential: Tensor  # (*groups, n): the energy felt by each particle
    gradient: Tensor  # (*groups, n, dim): N grad_k E


class AbstractObjective(ABC):
    """An energy `E` of the whole configuration."""

    @abstractmethod
    def energy(self, particles: Particles) -> Tensor:
        """Evaluate `E`.

        Parameters
        ----------
        particles
            The configuration.

        Returns
        -------
        Tensor
            One number per group.
        """

    def field(self, particles: Particles) -> Field:
        """Evaluate the energy each particle feels and `N grad_k E`.

        An energy that is not a sum over particles is shared by them equally.

        Parameters
        ----------
        particles
            The configuration.

        Returns
        -------
        Field
            Potential and gradient.
        """
        with torch.enable_grad():
            positions = particles.positions.detach().requires_grad_(True)
            energy = self.energy(particles._replace(positions=positions))
            (gradient,) = torch.autograd.grad(energy.sum(), positions)
        shared = energy.detach().unsqueeze(-1).expand(positions.shape[:-1])
        return Field(shared, particles.n_particles * gradient)


class AbstractOneBody(AbstractObjective):
    """An energy that is the mean of a potential, `E = mean_k V(w_k)`."""

    @abstractmethod
    def potential(self, particles: Particles) -> Tensor:
        """Evaluate `V(w_k)` for every particle.

        Parameters
        ----------
        particles
            The configuration.

        Returns
        -------
        Tensor
            Shape `(*groups, n_particles)`.
        """

    def energy(self, particles: Particles) -> Tensor:
        return self.potential(particles).mean(dim=-1)

    def field(self, particles: Particles) -> Field:
        with torch.enable_grad():
            positions = particles.positions.detach().requires_grad_(True)
            potential = self.potential(particles._replace(positions=positions))
            (gradient,) = torch.autograd.grad(potential.sum(), positions)
        return Field(potential.detach(), gradient)


@dataclass(frozen=True, eq=False)
class Sample:
    """Inputs, label vectors and probability weights of the samples.

    Parameters
    ----------
    x
        Inputs, shape `(n, dim)`.
    labels
        Label vectors `Y`, shape `(n, n_labels)`; see `label_matrix`.
    weights
        Non-negative, summing to one, shape `(n,)`; None for equal weights.
    """

    x: Tensor
    labels: Tensor
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        if self.labels.ndim != 2 or self.labels.shape[0] != self.x.shape[0]:
            raise ParameterError(
                "`labels` must have one row per sample, "
                f"({self.x.shape[0]}, n_labels); got {tuple(self.labels.shape)}."
            )

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.x.shape[0]

    @property
    def probabilities(self) -> Tensor:
        """The weights as a vector that sums to one."""
        if self.weights is None:
            return self.x.new_full((self.size,), 1 / self.size)
        return self.weights

    def pair_mass(self) -> float:
        """Tell the weight of all pairs of different samples, `1 - sum q_i^2`.

        Returns
        -------
        float
            `(n-1)/n` for equal weights.
        """
        if self.weights is None:
            return (self.size - 1) / self.size
        return 1 - float(self.weights.double().square().sum())

    def batch(self, indices: Tensor) -> "Sample":
        """Take a batch whose rows were drawn with replacement by their weights.

        A sample drawn twice appears once with twice the weight, so that pairs of a
        sample with itself can be told apart.

        Parameters
        ----------
        indices
            Sample numbers, shape `(batch,)`.

        Returns
        -------
        Sample
            The batch.
        """
        distinct, counts = torch.unique(indices, return_counts=True)
        weights = counts.to(self.x.dtype) / indices.numel()
        return Sample(self.x[distinct], self.labels[distinct], weights)


class AbstractSampled(AbstractOneBody):
    """A one-body energy of a sample, which can be estimated from a batch of it."""

    sample: Sample

    @abstractmethod
    def on(self, sample: Sample) -> "AbstractSampled":
        """Give the same energy on other data, such as a held-out part.

        Parameters
        ----------
        sample
            The other data.

        Returns
        -------
        AbstractSampled
            A new objective.
        """

    @abstractmethod
    def batch(self, indices: Tensor) -> "AbstractSampled":
        """Estimate the energy from samples drawn with replacement by their weights.

        Parameters
        ----------
        indices
            Sample numbers, at least two.

        Returns
        -------
        AbstractSampled
            An objective whose gradient is an unbiased estimate of this one's.
        """


@dataclass(frozen=True, eq=False)
class GaussianPrior(AbstractOneBody):
    """Keep particles near a Gaussian law, `-(1/beta) log p0(w) = |w|^2 / (2 v beta)`.

    With `variance = 2 gamma` the law is the spectral density of `exp(-gamma r^2)`; the
    Gibbs measure of the sum is then that density times `exp(-beta V)`.

    Parameters
    ----------
    variance
        `v`, the variance of the law in each coordinate; a number, or one per particle,
        shape `(n_particles,)`.
    inverse_temperature
        `beta`; the prior vanishes at infinity.

    Examples
    --------
    >>> prior = GaussianPrior(variance=2.0, inverse_temperature=10.0)
    >>> prior.potential(Particles(torch.tensor([[2.0, 0.0]])))
    tensor([0.1000])
    """

    variance: float | Tensor
    inverse_temperature: float

    def __post_init__(self) -> None:
        smallest = self.variance
        if isinstance(smallest, Tensor):
            smallest = float(smallest.min())
        check_real("variance", smallest, above=0)
        check_real(
            "inverse_temperature", self.inverse_temperature, above=0, infinite=True
        )

    @property
    def precision(self) -> float | Tensor:
        """`1 / (v beta)`: the gradient is `precision * w`."""
        return 1 / (self.variance * self.inverse_temperature)

    def potential(self, particles: Particles) -> Tensor:
        return 0.5 * self.precision * particles.positions.square().sum(dim=-1)

    def field(self, particles: Particles) -> Field:
        positions = particles.positions.detach()
        precision = self.precision
        if isinstance(precision, Tensor):
            precision = precision.unsqueeze(-1)
        return Field(self.potential(Particles(positions)), precision * positions)


LABEL_KINDS = (
    "signs",
    "centred-signs",
    "one-hot",
    "centred",
    "balanced",
    "regression",
)


def label_matrix(
    y: Tensor,
    *,
    kind: str,
    n_classes: int = 2,
    weights: Tensor | None = None,
) -> Tensor:
    """Turn labels into the vectors `Y_i` whose products say who belongs together.

    Parameters
    ----------
    y
        Class numbers from 0, or real targets, shape `(n,)` or `(n, outputs)`.
    kind
        "signs" (y = -1, +1, the paper's binary labels), "centred-signs" (the same,
        centred and scaled to unit variance), "one-hot" (the paper's multi-class),
        "centred" (one-hot minus the class frequencies), "balanced" (centred one-hot,
        every class weighing the same) or "regression" (centred, unit variance).
    n_classes
        How many classes there are.
    weights
        Probability weights of the samples; None for equal ones.

    Returns
    -------
    Tensor
        Shape `(n, n_labels)`.

    Examples
    --------
    >>> label_matrix(torch.tensor([0, 1, 1, 1]), kind="centred-signs").ravel()
    tensor([-1.7321,  0.5774,  0.5774,  0.5774], dtype=torch.float64)
    """
    if kind not in LABEL_KINDS:
        known = ", ".join(LABEL_KINDS)
        raise ParameterError(f"`kind` must be one of {known}; got {kind!r}.")
    n = y.shape[0]
    if weights is None:
        weights = torch.full((n,), 1 / n, dtype=torch.float64)
    weights = weights.double()
    if kind == "signs":
        return (2.0 * y.double() - 1).unsqueeze(-1)
    if kind == "centred-signs":
        return _standardised((2.0 * y.double() - 1).unsqueeze(-1), weights)
    if kind == "regression":
        values = y.double().reshape(n, -1)
        return _standardised(values, weights) / math.sqrt(values.shape[1])
    one_hot = torch.nn.functional.one_hot(y.long(), n_classes).double()
    if kind == "one-hot":
        return one_hot
    share = _mean(one_hot, weights)
    if kind == "centred":
        return one_hot - share
    return (one_hot - share) / share.clamp_min(1e-300).sqrt()


def _standardised(values: Tensor, weights: Tensor) -> Tensor:
    centred = values - _mean(values, weights)
    deviation = _mean(centred.square(), weights).sqrt()
    return centred / torch.where(deviation > 0, deviation, torch.ones_like(deviation))


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    """Average rows in a fixed order: torch's products depend on its threads."""
    products = (weights * values.mT).contiguous()
    return torch.from_numpy(products.cpu().numpy().sum(axis=1)).to(values.device)
