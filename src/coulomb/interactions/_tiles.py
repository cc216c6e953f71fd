"""Exact sums over tiles of pairs: far ones by matrix products, near ones explicitly."""

import torch
from torch import Tensor

from coulomb.interactions.potentials import AbstractInteraction, PairField
from coulomb.kernels.riesz import index_directions


def tiled_sum(
    interaction: AbstractInteraction, positions: Tensor, tile: int
) -> PairField:
    count = positions.shape[0]
    potential = positions.new_zeros(count)
    gradient = torch.zeros_like(positions)
    if count < 2:
        return PairField(potential, gradient)
    centred = positions - positions.mean(dim=0)  # smaller norms cancel less
    squares = centred.square().sum(dim=-1)
    for start in range(0, count, tile):
        rows = slice(start, min(start + tile, count))
        for begin in range(0, count, tile):
            columns = slice(begin, min(begin + tile, count))
            _add_tile(interaction, centred, squares, rows, columns, potential, gradient)
    return PairField(potential / (count - 1), gradient / (count - 1))


def _add_tile(
    interaction: AbstractInteraction,
    centred: Tensor,
    squares: Tensor,
    rows: slice,
    columns: slice,
    potential: Tensor,
    gradient: Tensor,
) -> None:
    """Add a tile of pairs in place: far ones by products, near ones by differences."""
    left, right = centred[rows], centred[columns]
    size = squares[rows, None] + squares[None, columns]
    square = torch.addmm(size, left, right.T, alpha=-2)
    # The rounding of `square` is eps * size; below this bound it would show.
    near = square <= torch.finfo(square.dtype).eps ** 0.25 * size
    # Mostly a particle is near to itself alone, which spares passes over the tile.
    apart = rows == columns and int(near.sum()) == len(left)
    if apart:
        distance = square.fill_diagonal_(1.0).sqrt_()
    else:
        distance = square.masked_fill_(near, 1.0).sqrt_()
    values, slopes = interaction.radial(distance), interaction.slope(distance)
    for part in (values, slopes):
        if apart:
            part.fill_diagonal_(0.0)
        else:
            part.masked_fill_(near, 0.0)
    potential[rows] += values.sum(dim=1)
    gradient[rows] += slopes.sum(dim=1, keepdim=True) * left - slopes @ right
    if apart:
        return
    first, second = near.nonzero(as_tuple=True)
    first, second = first + rows.start, second + columns.start
    distinct = first != second
    first, second = first[distinct], second[distinct]
    for begin in range(0, first.numel(), 1 << 20):  # clustered clouds: bounded memory
        some = slice(begin, begin + (1 << 20))
        near_potential, near_gradient = pair_terms(
            interaction, centred, first[some], second[some]
        )
        potential.index_add_(0, first[some], near_potential)
        gradient.index_add_(0, first[some], near_gradient)


def pair_terms(
    interaction: AbstractInteraction, positions: Tensor, first: Tensor, second: Tensor
) -> tuple[Tensor, Tensor]:
    """Evaluate g and its gradient for listed pairs, from explicit differences."""
    difference = positions[first] - positions[second]
    distance = difference.norm(dim=-1)
    together = distance == 0
    potential = interaction.radial(distance)
    safe = distance.masked_fill(together, 1.0)
    gradient = interaction.slope(safe).unsqueeze(-1) * difference
    if together.any():
        directions = torch.tensor(index_directions(*positions.shape)).to(positions)
        apart = directions[first[together]] - directions[second[together]]
        apart = apart / apart.norm(dim=-1, keepdim=True)
        gradient[together] = -interaction.push_at_contact() * apart
    return potential, gradient
