"""Sums over random groups, and the far field they correct."""

from typing import NamedTuple

import torch
from torch import Tensor

from coulomb._support.errors import ParameterError
from coulomb.interactions._tiles import pair_terms
from coulomb.interactions.potentials import AbstractInteraction, PairField


def _random_groups(
    count: int, batch_size: int, generator: torch.Generator | None
) -> list[Tensor]:
    """Cut a random order into groups of nearly equal size; rows are groups."""
    if generator is None:
        raise ParameterError(
            "`generator` must be given to a random pair sum; got None. "
            "Pass a torch.Generator, or use ExactSum()."
        )
    order = torch.randperm(count, generator=generator)
    n_groups = max(1, count // (batch_size + 1))
    size, larger = divmod(count, n_groups)
    cut = larger * (size + 1)
    groups = [order[:cut].reshape(-1, size + 1), order[cut:].reshape(-1, size)]
    return [group for group in groups if group.numel()]


# Numbers in one chunk of group-by-group distances: bounded memory for any N.
_CHUNK = 1 << 22


def grouped_sum(
    interaction: AbstractInteraction,
    positions: Tensor,
    batch_size: int,
    generator: torch.Generator | None,
    *,
    minus: "Expansion | None" = None,
) -> PairField:
    """Average over the partners in random groups, less an expansion if one is given."""
    count = positions.shape[0]
    potential = positions.new_zeros(count)
    gradient = torch.zeros_like(positions)
    if count < 2:
        return PairField(potential, gradient)
    centred = positions - positions.mean(dim=0)
    for groups in _random_groups(count, batch_size, generator):
        size = groups.shape[1]
        for chunk in torch.split(groups, max(1, _CHUNK // size**2)):
            members = centred[chunk]
            values, slopes, together = _group_terms(interaction, members)
            along = torch.zeros_like(values)
            if minus is not None:
                along = _subtract_expansion(minus, chunk, values, slopes)
            total = (slopes + along).sum(dim=-1, keepdim=True) * members
            total -= slopes @ members
            _part_coincident(interaction, centred, chunk, together, total)
            potential[chunk] = values.sum(dim=-1) / (size - 1)
            gradient[chunk] = total / (size - 1)
    return PairField(potential, gradient)


def _group_terms(
    interaction: AbstractInteraction, members: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Evaluate g and g'/r inside groups `(groups, size, dim)`, and who coincides."""
    # Explicit differences: the distances of close pairs must not cancel.
    distance = torch.cdist(
        members, members, compute_mode="donot_use_mm_for_euclid_dist"
    )
    own = torch.eye(members.shape[1], dtype=torch.bool, device=members.device)
    values = interaction.radial(distance.masked_fill(own, 1.0)).masked_fill(own, 0.0)
    zero = distance == 0
    slopes = interaction.slope(distance.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)
    return values, slopes, zero & ~own


def _subtract_expansion(
    expansion: "Expansion", chunk: Tensor, values: Tensor, slopes: Tensor
) -> Tensor:
    """Take the expansion off in place; return what is to be taken off along `a_k`."""
    members = expansion.centred[chunk]
    deviation = expansion.excess[chunk].unsqueeze(-2) - 2 * members @ members.mT
    value, slope, curve, bend = (part[chunk].unsqueeze(-1) for part in expansion[2:])
    own = torch.eye(members.shape[1], dtype=torch.bool, device=members.device)
    deviation, square = deviation.masked_fill(own, 0.0), deviation.square()
    values -= (value + 0.5 * slope * deviation + 0.25 * curve * square).masked_fill(
        own, 0.0
    )
    slopes -= (slope + curve * deviation).masked_fill(own, 0.0)
    return (-0.5 * bend * square).masked_fill(own, 0.0)


def _part_coincident(
    interaction: AbstractInteraction,
    centred: Tensor,
    chunk: Tensor,
    together: Tensor,
    gradient: Tensor,
) -> None:
    """Add the gradients between particles at the same place."""
    group, first, second = together.nonzero(as_tuple=True)
    if group.numel():
        pair = chunk[group, first], chunk[group, second]
        _, pushes = pair_terms(interaction, centred, *pair)
        gradient.index_put_((group, first), pushes, accumulate=True)


class Expansion(NamedTuple):
    """The far field about the centre of the cloud, as Taylor coefficients in `r^2`."""

    centred: Tensor  # (n, dim), b_l = w_l - c
    excess: Tensor  # (n,), |b_l|^2 - mean |b|^2
    value: Tensor  # (n,), g at rho_k
    slope: Tensor  # (n,), g'(r)/r at rho_k
    curve: Tensor  # (n,), its first derivative in r^2
    bend: Tensor  # (n,), its second

    def total(self) -> PairField:
        """Average the expansion over the other particles, from the cloud's moments."""
        count = self.centred.shape[0]
        others = count - 1
        own = self.excess - 2 * self.centred.square().sum(dim=-1)
        covariance = self.centred.mT @ self.centred
        skew = self.excess @ self.centred
        spread = self.centred @ covariance
        # Over all l, deviations sum to zero about the centre and their squares to this.
        squares = (
            self.excess.square().sum()
            - 4 * self.centred @ skew
            + 4 * (self.centred * spread).sum(dim=-1)
            - own.square()
        )
        potential = others * self.value - 0.5 * self.slope * own
        potential = potential + 0.25 * self.curve * squares
        factor = count * self.slope + 0.5 * self.bend * squares
        gradient = factor.unsqueeze(-1) * self.centred
        gradient = gradient - self.curve.unsqueeze(-1) * (skew - 2 * spread)
        return PairField(potential / others, gradient / others)


def expand(interaction: AbstractInteraction, positions: Tensor) -> Expansion:
    centred = positions - positions.mean(dim=0)
    squares = centred.square().sum(dim=-1)
    spread = squares.mean()
    rho = squares + spread
    value = interaction.radial(rho.sqrt())
    return Expansion(centred, squares - spread, value, *interaction.taylor(rho))
