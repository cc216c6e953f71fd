"""Where the particles of a head start: at landmarks of its keys.

Features `softmax_m(-|k - c_m|^2 / (2 h))` are soft assignments of a key to landmarks
`c_m`, and a query that weighs landmarks by `exp(q . c_m / sqrt(d))` attends to keys
through them. The landmarks are k-means centres in the metric of the scores
`q . k / sqrt(d)`, so that no feature is spent on directions no query looks at.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb.dynamics.initial import Orthogonal
from coulomb.linearise.pairs import join_pairs, mean_key_row

__all__ = ["Start", "landmark_start", "orthogonal_pairs", "random_start"]

_ROUNDS = 8

# The width h of an assignment, in units of the variance of a coordinate of the keys.
_WIDTH = 2.0

# Eigenvalues of the metric are at least this share of the largest.
_FLOOR = 1e-6


class Start(NamedTuple):
    """Particles of every head of a layer, and its tilt."""

    positions: Tensor  # (heads, n_features, 2 dim + 2)
    tilt: Tensor  # (heads, dim)


def centring_tilt(positions: Tensor, q: Tensor) -> Tensor:
    """Choose the tilt that centres queries, `t + mean_l u_l = mean(q) / sqrt(d)`."""
    return q.mean(dim=1) / math.sqrt(q.shape[-1]) - mean_key_row(positions)


def random_start(
    q: Tensor, n_features: int, *, scale: float, generator: torch.Generator
) -> Start:
    """Draw Gaussian particles, the same row for queries and keys."""
    heads, _, dim = q.shape
    rows = scale * torch.randn(heads, n_features, dim, generator=generator)
    rows = rows.to(q)
    zero = rows.new_zeros(heads, n_features)
    positions = join_pairs(rows, zero, rows, zero)
    return Start(positions, centring_tilt(positions, q))


def orthogonal_pairs(
    heads: int, n_features: int, dim: int, *, generator: torch.Generator
) -> Start:
    """Draw the particles of FAVOR+ with orthogonal blocks, the control of learning."""
    law = Orthogonal(1.0)
    draws = [law.draw(n_features, dim, generator=generator) for _ in range(heads)]
    rows = torch.stack(draws)
    zero = rows.new_zeros(heads, n_features)
    positions = join_pairs(rows, zero, rows, zero)
    return Start(positions, -mean_key_row(positions))


def landmark_start(
    q: Tensor, k: Tensor, n_features: int, *, generator: torch.Generator
) -> Start:
    """Place particles at landmarks of the keys.

    Examples
    --------
    >>> x = torch.eye(4).repeat(1, 5, 1)
    >>> start = landmark_start(x, x, 4, generator=torch.Generator())
    >>> start.positions.shape
    torch.Size([1, 4, 10])
    """
    dim = q.shape[-1]
    centre, query = (x.mean(dim=1, keepdim=True) for x in (k, q))
    root, inverse = _metric(q - query)
    y = (k - centre) @ root
    landmarks = _k_means(y, n_features, generator=generator)
    spread = y.square().mean(dim=(1, 2))[:, None, None].clamp_min(1e-12)
    scaled = landmarks / (_WIDTH * spread)
    w = landmarks @ inverse / math.sqrt(dim)
    a = -(w * query).sum(dim=-1)
    u = scaled @ root.transpose(1, 2)
    b = -0.5 * (scaled * landmarks).sum(dim=-1) - (u * centre).sum(dim=-1)
    positions = join_pairs(w, a, u, b)
    return Start(positions, centring_tilt(positions, q))


def _metric(q: Tensor) -> tuple[Tensor, Tensor]:
    # |R' k|^2 is the variance of q . k / sqrt(d) over the (centred) queries.
    covariance = q.transpose(1, 2) @ q / (q.shape[1] * q.shape[-1])
    values, vectors = torch.linalg.eigh(covariance)
    floor = (_FLOOR * values.amax(dim=-1, keepdim=True)).clamp_min(1e-12)
    roots = values.clamp_min(0).maximum(floor).sqrt().unsqueeze(1)
    return vectors * roots, (vectors / roots).transpose(1, 2)


def _k_means(y: Tensor, n_centres: int, *, generator: torch.Generator) -> Tensor:
    heads, n, _ = y.shape
    if n < n_centres:  # few tokens: some landmarks coincide until they are moved
        first = torch.randint(n, (n_centres,), generator=generator)
    else:
        first = torch.randperm(n, generator=generator)[:n_centres]
    centres = y[:, first]
    for _ in range(_ROUNDS):
        half = 0.5 * centres.square().sum(dim=-1).unsqueeze(1)
        nearest = (y @ centres.transpose(1, 2) - half).argmax(dim=-1)
        counts = y.new_zeros(heads, n_centres)
        counts.scatter_add_(1, nearest, torch.ones_like(nearest, dtype=y.dtype))
        sums = torch.zeros_like(centres)
        sums.scatter_add_(1, nearest.unsqueeze(-1).expand_as(y), y)
        full = counts.unsqueeze(-1)
        centres = torch.where(full > 0, sums / full.clamp_min(1), centres)
    return centres
