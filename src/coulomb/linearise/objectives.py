"""Energies of a head's particles: how far its rows are from the teacher's."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb._support.registry import Registry
from coulomb.features import AbstractFeatureMap, Particles, SoftmaxFeatures
from coulomb.linearise.divergence import divergence_field
from coulomb.linearise.layers import softmax_rows
from coulomb.linearise.pairs import paired_features, paired_weights
from coulomb.objectives import AbstractObjective, Field

__all__ = [
    "AbstractImitation",
    "LogKernelAlignment",
    "OutputError",
    "RawAlignment",
    "RowAlignment",
    "RowDivergence",
    "Rows",
    "imitations",
]


class Rows(NamedTuple):
    """Queries, keys and values of some sequences, as the teacher makes them."""

    q: Tensor  # (batch, heads, n, dim), the queries that are compared
    k: Tensor  # (batch, heads, m, dim)
    v: Tensor  # (batch, heads, m, dim_v)
    query_mask: Tensor  # (batch, n)
    key_mask: Tensor  # (batch, m)
    bias: Tensor | None = None  # (batch or 1, heads, n, m)

    def teacher(self) -> Tensor:
        """Write out softmax attention, shape `(batch, heads, n, m)`."""
        return softmax_rows(self.q, self.k, self.key_mask, self.bias)

    def mean(self, values: Tensor) -> Tensor:
        """Average over real queries."""
        weights = self.query_mask.unsqueeze(1).to(values.dtype)
        return (values * weights).sum(dim=(0, 2)) / weights.sum().clamp_min(1)


@dataclass(frozen=True, eq=False)
class AbstractImitation(AbstractObjective):
    """A comparison of the student's attention with the teacher's."""

    batches: Sequence[Rows]
    feature_map: AbstractFeatureMap
    tilt: Tensor

    @abstractmethod
    def compare(self, rows: Rows, positions: Tensor) -> Tensor:
        """Evaluate the energy of one batch."""

    def energy(self, particles: Particles) -> Tensor:
        positions = particles.positions
        if positions.shape[-1] == self.tilt.shape[-1] + 1:
            positions = torch.cat([positions, positions], dim=-1)
        parts = [self.compare(rows, positions) for rows in self.batches]
        return torch.stack(parts).mean(dim=0)

    def rows(self, rows: Rows, positions: Tensor) -> Tensor:
        """Write out the student's attention."""
        return paired_weights(
            rows.q, rows.k, positions, self.tilt, self.feature_map, rows.key_mask
        )

    def kernel(self, rows: Rows, positions: Tensor) -> Tensor:
        """Write out the student's kernel before its rows are normalised."""
        phi_q, phi_k = paired_features(
            rows.q, rows.k, positions, self.tilt, self.feature_map, rows.key_mask
        )
        return phi_q @ phi_k.transpose(-1, -2)


imitations: Registry[AbstractImitation] = Registry("objective")


@imitations.add("kl")
@dataclass(frozen=True, eq=False)
class RowDivergence(AbstractImitation):
    """`KL(p_i || s_i)`, the mean over queries of the divergence of their rows.

    Examples
    --------
    >>> from coulomb.features import SoftmaxFeatures
    >>> x, real = torch.zeros(1, 1, 3, 2), torch.ones(1, 3, dtype=torch.bool)
    >>> rows = Rows(x, x, x, real, real)
    >>> energy = RowDivergence([rows], SoftmaxFeatures(), torch.zeros(1, 2))
    >>> energy.energy(Particles(torch.ones(1, 4, 6)))
    tensor([0.])
    """

    def compare(self, rows: Rows, positions: Tensor) -> Tensor:
        teacher = rows.teacher()
        tiny = torch.finfo(teacher.dtype).tiny
        student = self.rows(rows, positions).clamp_min(tiny)
        entropy = torch.special.entr(teacher).sum(dim=-1)
        return rows.mean(-(teacher * student.log()).sum(dim=-1) - entropy)

    def field(self, particles: Particles) -> Field:
        feature_map, positions = self.feature_map, particles.positions
        if type(feature_map) is not SoftmaxFeatures:
            return super().field(particles)
        shared = positions.shape[-1] == self.tilt.shape[-1] + 1
        with torch.no_grad():
            pairs = torch.cat([positions, positions], dim=-1) if shared else positions
            parts = [
                divergence_field(rows, pairs, self.tilt, feature_map.temperature)
                for rows in self.batches
            ]
            energy, gradient = (
                torch.stack(part).mean(dim=0) for part in zip(*parts, strict=True)
            )
            if shared:
                gradient = torch.stack(gradient.chunk(2, dim=-1)).sum(dim=0)
        felt = energy.unsqueeze(-1).expand(positions.shape[:-1])
        return Field(felt, particles.n_particles * gradient)


@imitations.add("mse")
@dataclass(frozen=True, eq=False)
class OutputError(AbstractImitation):
    """`|(s_i - p_i) v|^2 / mean |p_i v|^2`, relative squared error of the output."""

    def compare(self, rows: Rows, positions: Tensor) -> Tensor:
        teacher = rows.teacher()
        wrong = (self.rows(rows, positions) - teacher) @ rows.v
        size = rows.mean((teacher @ rows.v).square().sum(dim=-1))
        return rows.mean(wrong.square().sum(dim=-1)) / size.clamp_min(1e-12)


@imitations.add("alignment")
@dataclass(frozen=True, eq=False)
class RowAlignment(AbstractImitation):
    """`1 - <p_i, s_i> / (|p_i| |s_i|)`, the alignment of normalised rows.

    Kernel-target alignment with each row a problem of its own: no row outweighs the
    others, whatever the length of its query.
    """

    def compare(self, rows: Rows, positions: Tensor) -> Tensor:
        student = self.rows(rows, positions)
        return rows.mean(
            1 - torch.cosine_similarity(rows.teacher(), student, dim=-1, eps=1e-12)
        )


@imitations.add("raw-alignment")
@dataclass(frozen=True, eq=False)
class RawAlignment(AbstractImitation):
    """`1 - <T, K> / (|T| |K|)` with the teacher's kernel `T = exp(q . k / sqrt(d))`.

    The mean over sequences. Kept as a control: the few largest entries of `T` are
    nearly all of its norm, so that a kernel is aligned which is right for a few pairs
    of tokens and for no row.
    """

    def compare(self, rows: Rows, positions: Tensor) -> Tensor:
        scores = _scores(rows)
        hidden = ~_pairs(rows)
        top = scores.masked_fill(hidden, -torch.inf).amax(dim=(2, 3), keepdim=True)
        teacher = (scores - top).exp().masked_fill(hidden, 0)
        student = self.kernel(rows, positions).masked_fill(hidden, 0)
        return 1 - _cosine(teacher, student)


@imitations.add("log-alignment")
@dataclass(frozen=True, eq=False)
class LogKernelAlignment(AbstractImitation):
    """The alignment of log kernels, each row of them centred."""

    def compare(self, rows: Rows, positions: Tensor) -> Tensor:
        real = _pairs(rows)
        kernel = self.kernel(rows, positions)
        student = kernel.clamp_min(torch.finfo(kernel.dtype).tiny).log()
        parts = []
        for values in (_scores(rows), student):
            total = values.masked_fill(~real, 0).sum(dim=-1, keepdim=True)
            mean = total / real.sum(dim=-1, keepdim=True).clamp_min(1)
            parts.append((values - mean).masked_fill(~real, 0))
        return 1 - _cosine(*parts)


def _scores(rows: Rows) -> Tensor:
    scores = rows.q @ rows.k.transpose(-1, -2) * rows.q.shape[-1] ** -0.5
    return scores if rows.bias is None else scores + rows.bias


def _pairs(rows: Rows) -> Tensor:
    return (rows.query_mask[:, :, None] & rows.key_mask[:, None, :]).unsqueeze(1)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    # Each sequence by itself: the student's kernel has one free factor in each.
    dims = (2, 3)
    norms = a.square().sum(dim=dims) * b.square().sum(dim=dims)
    cosines = (a * b).sum(dim=dims) / norms.clamp_min(1e-24).sqrt()
    return cosines.mean(dim=0)
