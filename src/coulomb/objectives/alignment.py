"""Alignment energies: of any map, of Fourier features in closed form, and centred."""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from coulomb import kernels
from coulomb._support.errors import ParameterError
from coulomb.features import AbstractFeatureMap, Particles
from coulomb.kernels.particles import LARGEST_ANGLE, FourierData
from coulomb.objectives.base import AbstractObjective, AbstractSampled, Field, Sample


@dataclass(frozen=True, eq=False)
class Alignment(AbstractSampled):
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
class FourierAlignment(AbstractSampled):
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

    @property
    def constant(self) -> float:
        """The part of the potential that does not depend on the particles."""
        if not self.distinct_pairs:
            return 0.0
        weighted = self.sample.probabilities.unsqueeze(-1) * self.sample.labels
        return self.scale * float(weighted.double().square().sum())

    def potential(self, particles: Particles) -> Tensor:
        cosine, sine = self._sums(particles.positions)
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
        return float(self.sample.x.norm(dim=-1).max()) * reach <= LARGEST_ANGLE

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
            labels = self.sample.labels
            if weighted:
                labels = self.sample.probabilities.unsqueeze(-1) * labels
            data = FourierData.of(self.sample.x.numpy(), labels.numpy())
            self._prepared[weighted] = data
        return self._prepared[weighted]

    def _sums(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        weighted = self.sample.probabilities.unsqueeze(-1) * self.sample.labels
        angles = self.sample.x @ positions.mT  # (*groups, n, N)
        return weighted.mT @ angles.cos(), weighted.mT @ angles.sin()

    def _blocked_field(self, positions: Tensor) -> Field:
        """Evaluate by matrix products, in blocks of particles that stay in cache."""
        weighted = self.sample.probabilities.unsqueeze(-1) * self.sample.labels
        block = max(1, _BLOCK // max(1, self.sample.size))
        fields = [
            _fourier_block(self.sample.x, weighted, part)
            for part in torch.split(positions, block, dim=-2)
        ]
        potential = torch.cat([part.potential for part in fields], dim=-1)
        gradient = torch.cat([part.gradient for part in fields], dim=-2)
        return Field(self.constant + self.scale * potential, self.scale * gradient)


# Multiplications per angle above which matrix products beat the compiled loop.
_COMPILED_WORK = 48
# Angles in one block of the plain form.
_BLOCK = 1 << 18


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
