"""Particles that look at places: a start from which attention is local.

A token's state holds the embedding of its position. A particle along the sum of a few
neighbouring embeddings answers to tokens in that window, so that tokens near each other
share features: the kernel of local attention, at any number of particles.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError

_TINY = math.ldexp(1.0, -60)  # so that an embedding of zero gives zero


def window_particles(
    positions: Tensor,
    *,
    n_heads: int,
    n_particles: int,
    span: int,
    norm: float = 3.0,
    width: float = 1.5,
    shifts: Sequence[int] | None = None,
) -> Tensor:
    """Point particles at windows of positions, spread evenly over a sequence.

    `w_k = norm u_k / |u_k|`, `u_k = sum_t exp(-(t - c_k)^2 / (2 s^2)) p_t / |p_t|` with
    centres `c_k` from 0 to `span` and `s` the width, or the distance of centres if that
    is larger. No label is looked at and nothing is drawn.

    With shifts the particles are untied: those of a head with shift `h` meet queries in
    windows around `c_k - h`, so that a token at position t attends to keys around
    `t + h`. One vector for queries and keys could not tell left from right.

    Examples
    --------
    >>> table = torch.eye(4)
    >>> found = window_particles(
    ...     table, n_heads=1, n_particles=2, span=3, norm=1.0, width=0.1
    ... )
    >>> found.argmax(dim=-1)
    tensor([[0, 3]])
    >>> after = window_particles(
    ...     table, n_heads=1, n_particles=4, span=3, width=0.1, shifts=[1]
    ... )
    >>> [half.argmax(dim=-1).tolist() for half in after.split(4, dim=-1)]
    [[[0, 0, 1, 2]], [[0, 1, 2, 3]]]
    """
    check_count("n_heads", n_heads)
    check_count("n_particles", n_particles)
    check_count("span", span, at_least=0)
    check_real("norm", norm, at_least=0)
    check_real("width", width, above=0)
    if positions.ndim != 2 or positions.shape[1] % n_heads:
        raise ParameterError(
            "`positions` must have shape (length, n_heads * dim); got "
            f"{tuple(positions.shape)} and {n_heads} heads."
        )
    if shifts is not None and len(shifts) != n_heads:
        raise ParameterError(
            f"`shifts` must have one number for each of {n_heads} heads; got "
            f"{len(shifts)}."
        )
    length = len(positions)
    table = positions.detach().reshape(length, n_heads, -1).transpose(0, 1)
    table = table / table.norm(dim=-1, keepdim=True).clamp_min(_TINY)
    centres = torch.linspace(0, min(span, length - 1), n_particles)
    apart = float(centres[1] - centres[0]) if n_particles > 1 else 0.0
    spread = max(width, apart)
    asked = _windows(table, centres, spread, norm)
    if shifts is None:
        return asked
    before = centres - torch.tensor(shifts).unsqueeze(1)
    # A window beyond the first or last position is the window of that position.
    before = before.clamp(0, length - 1)
    return torch.cat([_windows(table, before, spread, norm), asked], dim=-1)


def _windows(table: Tensor, centres: Tensor, spread: float, norm: float) -> Tensor:
    """Add up windows of a table `(heads, length, dim)`, to vectors of one norm."""
    distance = torch.arange(table.shape[1]) - centres.unsqueeze(-1)
    sums = torch.exp(-0.5 * (distance / spread).square()).to(table) @ table
    return norm * sums / sums.norm(dim=-1, keepdim=True).clamp_min(_TINY)
