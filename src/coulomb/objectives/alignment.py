"""Alignment energies: how badly the features of the particles explain the labels.

Energies are minimised everywhere; a score is minus an energy. With probability weights
`q_i` of the samples (1/n unless given) and a label matrix `Y`, the potential is

    V(w) = -(1/Z) sum_{i != j} q_i q_j (Y_i . Y_j) phi(x_i, w) phi(x_j, w),

with `Z = 1 - sum_i q_i^2`, so that equal weights give the paper's 1/(n(n-1)).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb import kernels
from coulomb._support.checks import check_real
from coulomb._support.errors import ParameterError
from coulomb.features import AbstractFeatureMap, Particles
from coulomb.kernels.particles import LARGEST_ANGLE, FourierData

LABEL_KINDS = (
    "signs",
    "centred-signs",
    "one-hot",
    "centred",
    "balanced",
    "regression",
)
# Multiplications per angle above which matrix products beat the compiled loop.
_COMPILED_WORK = 48
# Angles in one block of the plain form.
_BLOCK = 1 << 18


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
            # Zeros where no particle is seen.
            (gradient,) = torch.autograd.grad(
                energy.sum(), positions, materialize_grads=True
            )
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

    def take(self, rows: Tensor) -> "Sample":
        """Keep some samples; their weights are scaled to sum to one.

        Parameters
        ----------
        rows
            Which.

        Returns
        -------
        Sample
            These samples.
        """
        weights = self.weights
        if weights is not None:
            weights = weights[rows] / weights[rows].sum()
        return Sample(self.x[rows], self.labels[rows], weights)

    def to(self, dtype: torch.dtype) -> "Sample":
        """Convert to another precision.

        Parameters
        ----------
        dtype
            Of inputs, labels and weights.

        Returns
        -------
        Sample
            The same samples.
        """
        weights = None if self.weights is None else self.weights.to(dtype)
        return Sample(self.x.to(dtype), self.labels.to(dtype), weights)

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


class AbstractSampled(AbstractObjective):
    """An energy of a sample, which can be estimated from a batch of it."""

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
            An objective whose gradient estimates this one's; without bias if the
            energy is one-body.
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


@dataclass(frozen=True, eq=False)
class Alignment(AbstractOneBody, AbstractSampled):
    """Alignment of any feature map, in O(n N). [CPM eq:main-hamiltonian].

    `sum_{i != j} = |sum_i q_i Y_i phi_i|^2 - sum_i q_i^2 |Y_i|^2 phi_i^2`.

    Parameters
    ----------
    sample
        The data.
    feature_map
        Any map with one feature per particle.
    distinct_pairs
        Leave out pairs of a sample with itself and divide by the weight of the others,
        as the paper does; otherwise the sum runs over all pairs, which makes an integer
        weight the same as a repeated sample.
    normaliser
        `Z`; None takes the weight of the pairs that are summed.

    Examples
    --------
    >>> from coulomb.features import Fourier
    >>> sample = Sample(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [-1.0]]))
    >>> particles = Particles(torch.tensor([[math.pi]]), torch.zeros(1))
    >>> Alignment(sample, Fourier()).potential(particles)
    tensor([-2.0000])
    """

    sample: Sample
    feature_map: AbstractFeatureMap
    distinct_pairs: bool = True
    normaliser: float | None = None

    def __post_init__(self) -> None:
        if self.feature_map.n_features(1) != 1:
            raise ParameterError(
                "`feature_map` must give one feature per particle here; "
                f"got {self.feature_map!r}. Use FourierAlignment for (cos, sin) pairs."
            )
        _check_pairs(self)

    def potential(self, particles: Particles) -> Tensor:
        features = self.feature_map(self.sample.x, particles)  # (*groups, n, N)
        weighted = self.sample.probabilities.unsqueeze(-1) * self.sample.labels
        total = (weighted.mT @ features).square().sum(dim=-2)
        if self.distinct_pairs:
            total = total - weighted.square().sum(dim=-1) @ features.square()
        return -total / _normaliser(self)

    def on(self, sample: Sample) -> "Alignment":
        return replace(self, sample=sample, normaliser=None)

    def batch(self, indices: Tensor) -> "Alignment":
        return replace(
            self,
            sample=self.sample.batch(indices),
            distinct_pairs=True,
            normaliser=_batch_normaliser(self, indices),
        )


@dataclass(frozen=True, eq=False)
class FourierAlignment(AbstractOneBody, AbstractSampled):
    """Alignment of Fourier features, averaged over the phase, in closed form.

    `V(w) = -(1/Z) (|sum_i q_i Y_i e^{i w.x_i}|^2 - sum_i q_i^2 |Y_i|^2)`; the last term
    does not move the particles. [CPM Eq:FourierFeature_EnergyFunction].

    Parameters
    ----------
    sample
        The data.
    distinct_pairs, normaliser
        As in `Alignment`.
    threads
        For the compiled form; None takes torch's number.

    Examples
    --------
    >>> sample = Sample(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [-1.0]]))
    >>> FourierAlignment(sample).potential(Particles(torch.tensor([[math.pi]])))
    tensor([-1.])
    """

    sample: Sample
    distinct_pairs: bool = True
    normaliser: float | None = None
    threads: int | None = None
    _prepared: dict[bool, FourierData] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        _check_pairs(self)

    @property
    def scale(self) -> float:
        """`1/Z`, in front of the squared sums."""
        return 1 / _normaliser(self)

    @cached_property
    def constant(self) -> float:
        """The part of the potential that does not depend on the particles."""
        if not self.distinct_pairs:
            return 0.0
        return self.scale * float(self._weighted_labels.double().square().sum())

    @cached_property
    def _weighted_labels(self) -> Tensor:
        return self.sample.probabilities.unsqueeze(-1) * self.sample.labels

    @cached_property
    def _largest_row(self) -> float:
        return float(self.sample.x.norm(dim=-1).max())

    def potential(self, particles: Particles) -> Tensor:
        positions = particles.positions
        if not positions.requires_grad and self.compiles(positions):
            return self.field(particles).potential
        weighted = self._weighted_labels
        angles = self.sample.x @ positions.mT  # (*groups, n, N)
        cosine, sine = weighted.mT @ angles.cos(), weighted.mT @ angles.sin()
        total = (cosine.square() + sine.square()).sum(dim=-2)
        return self.constant - self.scale * total

    def field(self, particles: Particles) -> Field:
        positions = particles.positions.detach()
        if self.compiles(positions):
            potential, gradient = self.compiled_data().alignment(
                positions.contiguous().numpy(),
                scale=self.scale,
                threads=self.threads or torch.get_num_threads(),
            )
            shifted = torch.from_numpy(potential) + self.constant
            return Field(shifted, torch.from_numpy(gradient))
        return self._blocked_field(positions)

    def on(self, sample: Sample) -> "FourierAlignment":
        return replace(self, sample=sample, normaliser=None, _prepared={})

    def batch(self, indices: Tensor) -> "FourierAlignment":
        return replace(
            self,
            sample=self.sample.batch(indices),
            normaliser=_batch_normaliser(self, indices),
            _prepared={},
        )

    def compiles(self, positions: Tensor, *, radius: float = math.inf) -> bool:
        """Tell whether the compiled form takes these particles, and pays.

        Parameters
        ----------
        positions
            Shape `(n_particles, dim)`.
        radius
            No particle will go farther from the origin than this.

        Returns
        -------
        bool
            False for groups, other devices, many dimensions or huge angles.
        """
        dim, n_labels = self.sample.x.shape[1], self.sample.labels.shape[1]
        if not (
            kernels.available()
            and positions.ndim == 2
            and positions.device.type == "cpu"
            and positions.dtype == self.sample.x.dtype
            and positions.dtype in (torch.float32, torch.float64)
            and dim + 2 * n_labels <= _COMPILED_WORK
        ):
            return False
        # Between two checks, one call of the loop, particles at most double their norm.
        reach = min(radius, 2 * float(positions.norm(dim=-1).max()))
        return self._largest_row * reach <= LARGEST_ANGLE

    def compiled_data(self, *, weighted: bool = True) -> FourierData:
        """Lay out the data for the compiled loops, once.

        Parameters
        ----------
        weighted
            Multiply the labels by the weights; batches, which are drawn by weight, take
            them as they are.

        Returns
        -------
        FourierData
            Inputs and labels.
        """
        if weighted not in self._prepared:
            labels = self._weighted_labels if weighted else self.sample.labels
            data = FourierData.of(self.sample.x.numpy(), labels.numpy())
            self._prepared[weighted] = data
        return self._prepared[weighted]

    def _blocked_field(self, positions: Tensor) -> Field:
        """Evaluate by matrix products, in blocks of particles that stay in cache."""
        block = max(1, _BLOCK // max(1, self.sample.size))
        fields = [
            _fourier_block(self.sample.x, self._weighted_labels, part)
            for part in torch.split(positions, block, dim=-2)
        ]
        potential = torch.cat([part.potential for part in fields], dim=-1)
        gradient = torch.cat([part.gradient for part in fields], dim=-2)
        return Field(self.constant + self.scale * potential, self.scale * gradient)


def _fourier_block(x: Tensor, weighted: Tensor, positions: Tensor) -> Field:
    angles = x @ positions.mT  # (*groups, n, block)
    cosine, sine = angles.cos(), angles.sin()
    real, imaginary = weighted.mT @ cosine, weighted.mT @ sine  # (*groups, c, block)
    potential = -(real.square() + imaginary.square()).sum(dim=-2)
    pull = (weighted @ imaginary) * cosine - (weighted @ real) * sine
    return Field(potential, -2 * pull.mT @ x)


def _normaliser(objective: Alignment | FourierAlignment) -> float:
    if objective.normaliser is not None:
        return objective.normaliser
    return objective.sample.pair_mass() if objective.distinct_pairs else 1.0


def _batch_normaliser(
    objective: Alignment | FourierAlignment, indices: Tensor
) -> float:
    # Of B^2 pairs of draws B(B-1) are of two draws; each of those is an unbiased pair.
    draws = indices.numel()
    if draws < 2:
        raise ParameterError(f"`batch_size` must be at least 2; got {draws}.")
    return _normaliser(objective) * (draws - 1) / draws


def _check_pairs(objective: Alignment | FourierAlignment) -> None:
    if _normaliser(objective) <= 0:
        raise ParameterError(
            "`sample` must have at least two samples of positive weight to have a "
            f"pair; got {objective.sample.size}."
        )


@dataclass(frozen=True, eq=False)
class CentredAlignment(AbstractObjective):
    """Minus the centred kernel-target alignment of the whole configuration.

    `A(K) = <HKH, YY'>_F / (|HKH|_F |HYY'H|_F)`, `H` the (weighted) centring matrix;
    through the covariances of features and labels, so that no n x n matrix is formed.

    Parameters
    ----------
    sample
        The data.
    feature_map
        Any map.

    Examples
    --------
    >>> from coulomb.features import Fourier
    >>> sample = Sample(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [-1.0]]))
    >>> particles = Particles(torch.tensor([[torch.pi]]), torch.zeros(1))
    >>> CentredAlignment(sample, Fourier()).energy(particles)
    tensor(-1.)
    """

    sample: Sample
    feature_map: AbstractFeatureMap

    def energy(self, particles: Particles) -> Tensor:
        features = self.feature_map(self.sample.x, particles)
        return -centred_alignment(
            features, self.sample.labels, self.sample.probabilities
        )


def centred_alignment(
    features: Tensor, labels: Tensor, probabilities: Tensor | None = None
) -> Tensor:
    """Compute `A(K)` of the kernel of `features` with the labels, between -1 and 1.

    Parameters
    ----------
    features
        Shape `(*groups, n, n_features)`; the kernel is their inner product.
    labels
        Shape `(n, n_labels)`.
    probabilities
        Weights that sum to one, shape `(n,)`; None for equal ones.

    Returns
    -------
    Tensor
        One number per group; zero if features or labels do not vary.
    """
    if probabilities is None:
        probabilities = features.new_full((features.shape[-2],), 1 / features.shape[-2])
    root = probabilities.sqrt().unsqueeze(-1)
    centred = root * (features - (probabilities.unsqueeze(-2) @ features))
    target = root * (labels - probabilities @ labels)
    cross = (target.mT @ centred).square().sum(dim=(-2, -1))
    size = _gram_square(centred) * _gram_square(target)
    # The root of what varies only: at zero its gradient would not be a number.
    varies = size > 0
    safe = torch.where(varies, size, torch.ones_like(size)).sqrt()
    return torch.where(varies, cross / safe, torch.zeros_like(cross))


def _gram_square(vectors: Tensor) -> Tensor:
    """Compute `|vectors vectors'|_F^2` through the smaller Gram matrix."""
    n, m = vectors.shape[-2:]
    gram = vectors.mT @ vectors if m <= n else vectors @ vectors.mT
    return gram.square().sum(dim=(-2, -1))
