"""Interactions: radial pair potentials that keep particles apart, and their sums.

`W = (1 / (2 N (N-1))) sum_{k != l} g(|w_k - w_l|)`. What the dynamics needs of it is,
for each particle, the potential it feels, `u_k = (1/(N-1)) sum_l g(|w_k - w_l|)`, and
its gradient in `w_k`, which is `N grad_k W`. A *sum* computes both: exactly, by
unbiased random batches, or with a far field whose cost grows linearly in `N`.

Particles at the same place have no direction to part in, so they get one: the pair is
pushed apart along a fixed direction of their two indices, with the force at the
truncation (or at `CLOSEST` without one). It is the same in every run and antisymmetric,
so that the centre of mass stays.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coulomb import kernels
from coulomb._support.checks import Registry, check_count, check_real
from coulomb._support.errors import ParameterError
from coulomb._support.ranks import Ranks
from coulomb.kernels.particles import CLOSEST, index_directions, riesz_sums

__all__ = [
    "AbstractInteraction",
    "AbstractPairSum",
    "Coulomb",
    "ExactSum",
    "FarFieldSum",
    "Log",
    "PairField",
    "RandomBatchSum",
    "Ranks",
    "Riesz",
    "interactions",
    "pair_energy",
    "pair_sums",
]


class AbstractInteraction(ABC):
    """A repulsive radial potential `g(r)`."""

    @abstractmethod
    def radial(self, distance: Tensor) -> Tensor:
        """Evaluate `g(r)`.

        Parameters
        ----------
        distance
            Distances `r >= 0`, any shape.

        Returns
        -------
        Tensor
            The same shape.
        """

    @abstractmethod
    def slope(self, distance: Tensor) -> Tensor:
        """Evaluate `g'(r) / r`, so that the gradient of `g(|d|)` is `slope * d`.

        Parameters
        ----------
        distance
            Distances `r > 0`, any shape.

        Returns
        -------
        Tensor
            The same shape; at most zero, because `g` repels.
        """

    def taylor(self, square: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate `g'(r)/r` and its first two derivatives in `r^2`.

        Parameters
        ----------
        square
            Squared distances, any shape.

        Returns
        -------
        tuple
            Three tensors of the same shape.
        """
        with torch.enable_grad():
            variable = square.detach().requires_grad_(True)
            slope = self.slope(variable.sqrt())
            (curve,) = torch.autograd.grad(slope.sum(), variable, create_graph=True)
            (bend,) = torch.autograd.grad(curve.sum(), variable)
        return slope.detach(), curve.detach(), bend

    @abstractmethod
    def push_at_contact(self) -> float:
        """Tell the force between two particles at the same place.

        Returns
        -------
        float
            A finite number, `-g'` at the contact distance.
        """


interactions: Registry[AbstractInteraction] = Registry("interaction")


@interactions.add("riesz")
@dataclass(frozen=True)
class Riesz(AbstractInteraction):
    """The Riesz potential `g_s`, log at `s = 0`. [CPM Eq:homogeneous_potential].

    `g_s(r) = r^-s` for `s > 0`, `-log r` for `s = 0`, `-r^-s` for `-2 < s < 0`; with a
    truncation, `g_s(max(r, truncation))`, whose force is zero inside.

    Parameters
    ----------
    s
        The exponent, above -2.
    truncation
        Distances below it count as it; 0 for none.

    Examples
    --------
    >>> Riesz(s=1).radial(torch.tensor([0.5, 2.0]))
    tensor([2.0000, 0.5000])
    >>> Riesz(s=0, truncation=0.1).radial(torch.tensor([0.0, 1.0]))
    tensor([2.3026, -0.0000])
    """

    s: float = 0.0
    truncation: float = 0.0

    def __post_init__(self) -> None:
        check_real("s", self.s, above=-2)
        check_real("truncation", self.truncation, at_least=0)

    def radial(self, distance: Tensor) -> Tensor:
        distance = distance.clamp_min(self.truncation)
        if self.s == 0:
            return -distance.log()
        power = distance.pow(-self.s)
        return power if self.s > 0 else -power

    def slope(self, distance: Tensor) -> Tensor:
        strength = abs(self.s) if self.s else 1.0
        values = -strength * distance.pow(-self.s - 2)
        if not self.truncation:
            return values
        return values.masked_fill(distance < self.truncation, 0.0)

    def taylor(self, square: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slope = self.slope(square.sqrt())
        half = self.s / 2
        curve = -(half + 1) * slope / square
        return slope, curve, -(half + 2) * curve / square

    def push_at_contact(self) -> float:
        strength = abs(self.s) if self.s else 1.0
        return float(strength * max(self.truncation, CLOSEST) ** (-self.s - 1))


@interactions.add("log")
def Log(truncation: float = 0.0) -> Riesz:
    """Make the logarithmic interaction, `Riesz(s=0)`.

    Parameters
    ----------
    truncation
        Distances below it count as it; 0 for none.

    Returns
    -------
    Riesz
        The interaction.
    """
    return Riesz(s=0.0, truncation=truncation)


def Coulomb(dim: int, truncation: float = 0.0) -> Riesz:
    """Make the Coulomb interaction of `dim` dimensions, `Riesz(s=dim - 2)`.

    It is `|w|` with a minus sign on the line, the logarithm in the plane and the Newton
    potential `1/r` in space.

    Parameters
    ----------
    dim
        The dimension, at least 1.
    truncation
        Distances below it count as it; 0 for none.

    Returns
    -------
    Riesz
        The interaction.

    Examples
    --------
    >>> Coulomb(3)
    Riesz(s=1.0, truncation=0.0)
    """
    check_count("dim", dim)
    return Riesz(s=float(dim - 2), truncation=truncation)


class PairField(NamedTuple):
    """What each particle feels of the others."""

    potential: Tensor  # (*groups, n): u_k = (1/(n-1)) sum_l g(|w_k - w_l|)
    gradient: Tensor  # (*groups, n, dim): the gradient of u_k in w_k, `N grad_k W`


class AbstractPairSum(ABC):
    """A way to sum an interaction over all pairs of a group.

    `ranks` are processes that share the work, each with a block of the particles. All
    of them have all positions and a generator in the same state, and get all sums.
    """

    random: ClassVar[bool] = False
    ranks: Ranks | None

    def __call__(
        self,
        interaction: AbstractInteraction,
        positions: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> PairField:
        """Sum over the other particles of the group.

        Parameters
        ----------
        interaction
            The potential.
        positions
            Shape `(*groups, n, dim)`; groups do not feel each other.
        generator
            Draws the batches of random sums; exact sums take None.

        Returns
        -------
        PairField
            Potential and gradient. A single particle feels nothing.
        """
        flat = positions.reshape(-1, *positions.shape[-2:])
        fields = [self._sum(interaction, group, generator) for group in flat]
        potential, gradient = map(torch.stack, zip(*fields, strict=True))
        if self.ranks is not None:
            self.ranks.add([potential, gradient])
        return PairField(
            potential.reshape(positions.shape[:-1]), gradient.reshape(positions.shape)
        )

    @abstractmethod
    def _sum(
        self,
        interaction: AbstractInteraction,
        positions: Tensor,
        generator: torch.Generator | None,
    ) -> PairField:
        """Sum over one group, positions `(n, dim)`; zeros where others compute."""


pair_sums: Registry[AbstractPairSum] = Registry("pair_sum")


@pair_sums.add("exact")
@dataclass(frozen=True)
class ExactSum(AbstractPairSum):
    """All pairs, tile by tile; memory stays at `tile^2` numbers.

    Few dimensions use compiled explicit differences. Many use matrix products for the
    distances; pairs too close for that (where `|a|^2 + |b|^2 - 2 a.b` would cancel) are
    summed again from their differences.

    Parameters
    ----------
    tile
        Particles per side of a tile.
    threads
        For the compiled form; None takes torch's number.
    ranks
        Processes that share the particles, `Ranks.join()` under `torchrun`.
    """

    tile: int = 2048
    threads: int | None = None
    ranks: Ranks | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_count("tile", self.tile)

    def _sum(
        self,
        interaction: AbstractInteraction,
        positions: Tensor,
        generator: torch.Generator | None,
    ) -> PairField:
        rows = _block(self.ranks, len(positions))
        if isinstance(interaction, Riesz) and _compiled_pays(positions):
            potential, gradient = riesz_sums(
                positions.detach().contiguous().numpy(),
                s=interaction.s,
                truncation=interaction.truncation,
                threads=self.threads or torch.get_num_threads(),
                rows=rows,
            )
            return PairField(torch.from_numpy(potential), torch.from_numpy(gradient))
        return _tiled_sum(interaction, positions, self.tile, rows)


@pair_sums.add("random-batch")
@dataclass(frozen=True)
class RandomBatchSum(AbstractPairSum):
    """Each particle feels a random group of others: unbiased, O(N b).

    The cloud is cut at random into groups of `batch_size + 1`; in its group a particle
    meets all others. (Jin, Li and Liu 2020, random batch methods.)

    Parameters
    ----------
    batch_size
        Partners of each particle; all of them if there are fewer.
    ranks
        Processes that share the particles, `Ranks.join()` under `torchrun`.
    """

    batch_size: int = 128
    ranks: Ranks | None = field(default=None, repr=False)
    random: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)

    def _sum(
        self,
        interaction: AbstractInteraction,
        positions: Tensor,
        generator: torch.Generator | None,
    ) -> PairField:
        options = (self.batch_size, generator, self.ranks)
        return _grouped_sum(interaction, positions, *options)


@pair_sums.add("far-field")
@dataclass(frozen=True)
class FarFieldSum(AbstractPairSum):
    """A far field of the whole cloud, corrected without bias by random batches.

    About the centre `c` of the cloud, `|w_k - w_l|^2 = rho_k + t_kl` with
    `rho_k = |a_k|^2 + mean |b|^2`, `a = w_k - c`, `b = w_l - c` and
    `t_kl = (|b_l|^2 - mean |b|^2) - 2 a_k . b_l`. Expanded in `t / rho` to first order,
    and to second along `a_k`, the sum over `l` needs only the first two moments of the
    cloud: O(N p^2) for all particles, and accurate in many dimensions, where distances
    concentrate. The remainder, exact pair minus its expansion, is averaged over a
    random group of partners, so that the sum is unbiased in every dimension;
    `batch_size=0` leaves it out.

    Parameters
    ----------
    batch_size
        Partners for the correction.
    ranks
        Processes that share the particles, `Ranks.join()` under `torchrun`.
    """

    batch_size: int = 16
    ranks: Ranks | None = field(default=None, repr=False)
    random: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size, at_least=0)

    def _sum(
        self,
        interaction: AbstractInteraction,
        positions: Tensor,
        generator: torch.Generator | None,
    ) -> PairField:
        if bool((positions == positions[:1]).all()):  # one place: there is no far field
            return ExactSum(ranks=self.ranks)._sum(interaction, positions, None)
        expansion = _expand(interaction, positions)
        far = expansion.total(_block(self.ranks, len(positions)))
        if self.batch_size == 0:
            return far
        options = (self.batch_size, generator, self.ranks)
        rest = _grouped_sum(interaction, positions, *options, minus=expansion)
        return PairField(far.potential + rest.potential, far.gradient + rest.gradient)


def pair_energy(
    interaction: AbstractInteraction,
    positions: Tensor,
    *,
    pair_sum: AbstractPairSum | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Evaluate `W = (1/(2N(N-1))) sum_{k != l} g(|w_k - w_l|)`. [CPM eq:WN-def].

    Parameters
    ----------
    interaction
        The potential.
    positions
        Shape `(*groups, n, dim)`.
    pair_sum
        How to sum; exactly if None.
    generator
        For random sums.

    Returns
    -------
    Tensor
        One number per group.

    Examples
    --------
    >>> pair_energy(Riesz(s=1), torch.tensor([[0.0], [2.0]]))
    tensor(0.2500)
    """
    pair_sum = pair_sum or ExactSum()
    found = pair_sum(interaction, positions, generator=generator)
    return 0.5 * found.potential.mean(dim=-1)


def _block(ranks: Ranks | None, count: int) -> slice:
    """Give this process its part of a range, all of it without others."""
    return slice(0, count) if ranks is None else ranks.block(count)


# Above this many dimensions matrix products beat explicit differences.
_EXPLICIT_DIMENSIONS = 32


def _compiled_pays(positions: Tensor) -> bool:
    return (
        positions.shape[-1] <= _EXPLICIT_DIMENSIONS
        and positions.device.type == "cpu"
        and positions.dtype in (torch.float32, torch.float64)
        and kernels.available()
    )


def _tiled_sum(
    interaction: AbstractInteraction,
    positions: Tensor,
    tile: int,
    block: slice | None = None,
) -> PairField:
    """Sum exactly over tiles: far pairs by matrix products, near ones explicitly."""
    count = positions.shape[0]
    block = block or slice(0, count)
    potential = positions.new_zeros(count)
    gradient = torch.zeros_like(positions)
    if count < 2:
        return PairField(potential, gradient)
    centred = positions - positions.mean(dim=0)  # smaller norms cancel less
    squares = centred.square().sum(dim=-1)
    for start in range(block.start, block.stop, tile):
        rows = slice(start, min(start + tile, block.stop))
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

    def fill(part: Tensor, value: float) -> Tensor:
        if apart:
            return part.fill_diagonal_(value)
        return part.masked_fill_(near, value)

    distance = fill(square, 1.0).sqrt_()
    values = fill(interaction.radial(distance), 0.0)
    slopes = fill(interaction.slope(distance), 0.0)
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
        near_potential, near_gradient = _pair_terms(
            interaction, centred, first[some], second[some]
        )
        potential.index_add_(0, first[some], near_potential)
        gradient.index_add_(0, first[some], near_gradient)


def _pair_terms(
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


def _grouped_sum(
    interaction: AbstractInteraction,
    positions: Tensor,
    batch_size: int,
    generator: torch.Generator | None,
    ranks: Ranks | None,
    *,
    minus: "_Expansion | None" = None,
) -> PairField:
    """Average over the partners in random groups, less an expansion if one is given."""
    count = positions.shape[0]
    potential = positions.new_zeros(count)
    gradient = torch.zeros_like(positions)
    if count < 2:
        return PairField(potential, gradient)
    centred = positions - positions.mean(dim=0)
    for groups in _random_groups(count, batch_size, generator):
        size, groups = groups.shape[1], groups[_block(ranks, len(groups))]
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
    expansion: "_Expansion", chunk: Tensor, values: Tensor, slopes: Tensor
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
        _, pushes = _pair_terms(interaction, centred, *pair)
        gradient.index_put_((group, first), pushes, accumulate=True)


class _Expansion(NamedTuple):
    """The far field about the centre of the cloud, as Taylor coefficients in `r^2`."""

    centred: Tensor  # (n, dim), b_l = w_l - c
    excess: Tensor  # (n,), |b_l|^2 - mean |b|^2
    value: Tensor  # (n,), g at rho_k
    slope: Tensor  # (n,), g'(r)/r at rho_k
    curve: Tensor  # (n,), its first derivative in r^2
    bend: Tensor  # (n,), its second

    def total(self, rows: slice) -> PairField:
        """Average the expansion over the other particles, from the cloud's moments."""
        count = self.centred.shape[0]
        others = count - 1
        covariance = self.centred.mT @ self.centred
        skew, size = self.excess @ self.centred, self.excess.square().sum()
        centred, excess, value, slope, curve, bend = (part[rows] for part in self)
        own = excess - 2 * centred.square().sum(dim=-1)
        spread = centred @ covariance
        # Over all l, deviations sum to zero about the centre and their squares to this.
        squares = size - 4 * centred @ skew + 4 * (centred * spread).sum(dim=-1)
        squares -= own.square()
        found = PairField(torch.zeros_like(self.value), torch.zeros_like(self.centred))
        potential = others * value - 0.5 * slope * own + 0.25 * curve * squares
        factor = count * slope + 0.5 * bend * squares
        gradient = factor.unsqueeze(-1) * centred
        gradient -= curve.unsqueeze(-1) * (skew - 2 * spread)
        found.potential[rows], found.gradient[rows] = (
            potential / others,
            gradient / others,
        )
        return found


def _expand(interaction: AbstractInteraction, positions: Tensor) -> _Expansion:
    centred = positions - positions.mean(dim=0)
    squares = centred.square().sum(dim=-1)
    spread = squares.mean()
    rho = squares + spread
    value = interaction.radial(rho.sqrt())
    return _Expansion(centred, squares - spread, value, *interaction.taylor(rho))
