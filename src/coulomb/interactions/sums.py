"""Ways to sum an interaction over all pairs: exact, random, with a far field."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coulomb import kernels
from coulomb._support.checks import check_count
from coulomb._support.registry import Registry
from coulomb.interactions._groups import expand, grouped_sum
from coulomb.interactions._tiles import tiled_sum
from coulomb.interactions.potentials import AbstractInteraction, PairField, Riesz
from coulomb.kernels.riesz import riesz_sums


class AbstractPairSum(ABC):
    """A way to sum an interaction over all pairs of a group."""

    random: ClassVar[bool] = False

    @abstractmethod
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
    """

    tile: int = 2048
    threads: int | None = None

    def __post_init__(self) -> None:
        check_count("tile", self.tile)

    def __call__(
        self,
        interaction: AbstractInteraction,
        positions: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> PairField:
        if positions.ndim > 2:
            return _per_group(self, interaction, positions, generator)
        if _compiled_pays(interaction, positions):
            assert isinstance(interaction, Riesz)
            potential, gradient = riesz_sums(
                positions.detach().contiguous().numpy(),
                s=interaction.s,
                truncation=interaction.truncation,
                threads=self.threads or torch.get_num_threads(),
            )
            return PairField(torch.from_numpy(potential), torch.from_numpy(gradient))
        return tiled_sum(interaction, positions, self.tile)


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
    """

    batch_size: int = 128
    random: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)

    def __call__(
        self,
        interaction: AbstractInteraction,
        positions: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> PairField:
        if positions.ndim > 2:
            return _per_group(self, interaction, positions, generator)
        return grouped_sum(interaction, positions, self.batch_size, generator)


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
    """

    batch_size: int = 16
    random: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size, at_least=0)

    def __call__(
        self,
        interaction: AbstractInteraction,
        positions: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> PairField:
        if positions.ndim > 2:
            return _per_group(self, interaction, positions, generator)
        if bool((positions == positions[:1]).all()):  # one place: there is no far field
            return ExactSum()(interaction, positions)
        expansion = expand(interaction, positions)
        far = expansion.total()
        if self.batch_size == 0:
            return far
        rest = grouped_sum(
            interaction, positions, self.batch_size, generator, minus=expansion
        )
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
    field = pair_sum(interaction, positions, generator=generator)
    return 0.5 * field.potential.mean(dim=-1)


def _per_group(
    pair_sum: AbstractPairSum,
    interaction: AbstractInteraction,
    positions: Tensor,
    generator: torch.Generator | None,
) -> PairField:
    flat = positions.reshape(-1, *positions.shape[-2:])
    fields = [pair_sum(interaction, group, generator=generator) for group in flat]
    potential = torch.stack([field.potential for field in fields])
    gradient = torch.stack([field.gradient for field in fields])
    return PairField(
        potential.reshape(positions.shape[:-1]), gradient.reshape(positions.shape)
    )


# Above this many dimensions matrix products beat explicit differences.
_EXPLICIT_DIMENSIONS = 32


def _compiled_pays(interaction: AbstractInteraction, positions: Tensor) -> bool:
    return (
        isinstance(interaction, Riesz)
        and positions.shape[-1] <= _EXPLICIT_DIMENSIONS
        and positions.device.type == "cpu"
        and positions.dtype in (torch.float32, torch.float64)
        and kernels.available()
    )
