"""The centred kernel-target alignment, an energy of the whole configuration."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coulomb.features import AbstractFeatureMap, Particles
from coulomb.objectives.base import AbstractObjective, Sample


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
