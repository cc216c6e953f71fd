"""Which words of one text stand in the other: kernels that see through parts of a pair.

A token's state holds the embedding of its part, so that the same word looks different
in the first and in the second text of a pair. `blind_particles` do not see the part:
their kernel joins equal words of both texts, the closer the larger their norms are.
Labels choose the norm, by what they have to do with `crossing`, the attention that is
paid to the other text.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb._support.checks import check_real
from coulomb._support.errors import ParameterError
from coulomb._support.stats import permutation_p_value

DRAWN = 0.0  # the name, among multiples of norms, of particles as they were drawn
# Standard errors by which shares of attention must differ to mean anything, squared,
# for every class but the first.
_CERTAIN = 16.0


def blind_particles(particles: Tensor, parts: Tensor, *, factor: float = 1.0) -> Tensor:
    """Turn particles until two embeddings are the same to them, and scale them.

    `w' = c |w| v / |v|`, `v = w - (w . u) u` with `u` along the difference of the
    embeddings.

    Examples
    --------
    >>> parts = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    >>> blind_particles(torch.tensor([[[3.0, 4.0]]]), parts, factor=2.0)
    tensor([[[ 0., 10.]]])
    """
    check_real("factor", factor, above=0)
    heads, dim = particles.shape[-3], particles.shape[-1]
    if parts.shape != (2, heads * dim):
        raise ParameterError(
            f"`parts` must have shape {(2, heads * dim)}, an embedding for each text "
            f"of a pair; got {tuple(parts.shape)}."
        )
    apart = (parts[0] - parts[1]).view(heads, 1, dim)
    tiny = torch.finfo(particles.dtype).tiny  # so that zero stays zero
    unit = apart / apart.norm(dim=-1, keepdim=True).clamp_min(tiny)
    turned = particles - (particles * unit).sum(dim=-1, keepdim=True) * unit
    length = turned.norm(dim=-1, keepdim=True).clamp_min(tiny)
    return factor * particles.norm(dim=-1, keepdim=True) * turned / length


def crossing(weights: Tensor, parts: Tensor, mask: Tensor) -> Tensor:
    """Average the share of its attention that a token pays to the other text.

    `mean_i sum_j A_ij [p_j != p_i] / sum_{j != i} A_ij`, over the tokens of a pair.

    Examples
    --------
    >>> everywhere = torch.ones(1, 1, 3, 3)
    >>> crossing(everywhere, torch.tensor([[0, 0, 1]]), torch.ones(1, 3).bool())
    tensor([[0.6667]])
    """
    others = ~torch.eye(parts.shape[1], dtype=torch.bool, device=parts.device)
    seen = mask.unsqueeze(1) & mask.unsqueeze(2) & others  # (batch, length, length)
    across = seen & (parts.unsqueeze(1) != parts.unsqueeze(2))
    paid = (weights * across.unsqueeze(1)).sum(dim=-1)
    every = (weights * seen.unsqueeze(1)).sum(dim=-1)
    share = paid / torch.where(every > 0, every, 1.0)
    return share.sum(dim=-1) / mask.sum(dim=1).clamp_min(1).unsqueeze(1)


def told_by_labels(values: Tensor, labels: Tensor) -> float:
    """Give the share of the variance of numbers that lies between classes.

    `sum_c n_c (m_c - m)^2 / sum_i (z_i - m)^2`, for two classes the squared
    correlation with the label, averaged over columns.

    Examples
    --------
    >>> told_by_labels(torch.tensor([[1.0], [1.0], [3.0]]), torch.tensor([0, 0, 1]))
    1.0
    """
    values = values.double()
    centred = values - values.mean(dim=0)
    one_hot = torch.nn.functional.one_hot(labels).double()
    counts = one_hot.sum(dim=0).clamp_min(1).unsqueeze(1)
    between = ((one_hot.mT @ centred).square() / counts).sum(dim=0)
    whole = centred.square().sum(dim=0)
    return float((between / torch.where(whole > 0, whole, 1.0)).mean())


class MatchChoice(NamedTuple):
    """What labels chose for the particles of pairs."""

    factor: float  # of the drawn norms; 0 if the particles stay as they were drawn
    explained: float  # by the labels, of the attention that crosses
    drawn: float  # the same of particles as they were drawn


def choose_norm(shares: Mapping[float, Tensor], labels: Tensor) -> MatchChoice:
    """Choose the norm of blind particles by what labels tell of their crossing.

    Examples
    --------
    >>> labels = torch.tensor([0, 1]).repeat(50)
    >>> noise = torch.rand(100, 1, generator=torch.Generator().manual_seed(0))
    >>> choose_norm({DRAWN: noise, 4.0: noise + labels[:, None]}, labels).factor
    4.0
    """
    if DRAWN not in shares:
        raise ParameterError(
            f"`shares` must contain {DRAWN}, for particles as drawn; got "
            f"{sorted(shares)}."
        )
    told = {factor: told_by_labels(each, labels) for factor, each in shares.items()}
    best = max(told.values())
    # Of a squared correlation: 2 r (1 - r^2) / sqrt(n).
    error = 2 * math.sqrt(best / len(labels)) * (1 - best)
    good = [factor for factor in sorted(told) if told[factor] >= best - error]
    # Grows as what chance tells, (classes - 1) / n.
    chance = _CERTAIN * int(labels.max())
    factor = good[0] if len(labels) * best >= chance else DRAWN
    return MatchChoice(factor, told[factor], told[DRAWN])


class MatchTest(NamedTuple):
    """What labels chose, against what labels without meaning choose."""

    choice: MatchChoice
    shuffled: tuple[float, ...]  # told of the best norm by each shuffle of the labels
    alone: dict[float, float]  # told of each norm

    @property
    def p_value(self) -> float:
        """Of the labels being one more shuffle; 1 if they chose nothing."""
        if self.choice.factor == DRAWN:
            return 1.0
        return permutation_p_value(max(self.alone.values()), self.shuffled)

    def sentence(self) -> str:
        """Tell what was found."""
        return (
            f"{in_words(self.choice)}; {len(self.shuffled)} shuffles of the labels "
            f"tell at most {100 * max(self.shuffled):.2g} % (p = {self.p_value:.2g})"
        )


def in_words(choice: MatchChoice) -> str:
    """Say what was chosen.

    Examples
    --------
    >>> in_words(MatchChoice(DRAWN, 0.001, 0.001))
    'particles stay as drawn, of whose attention between the texts labels tell 0.1 %'
    """
    if choice.factor == DRAWN:
        return (
            "particles stay as drawn, of whose attention between the texts labels tell "
            f"{100 * choice.drawn:.2g} %"
        )
    return (
        f"labels chose particles blind to the part, {choice.factor:g} times as long as "
        "drawn: they tell "
        f"{100 * choice.explained:.2g} % of their attention between the texts, and "
        f"{100 * choice.drawn:.2g} % of that of particles as drawn"
    )


def judge_norms(
    shares: Mapping[float, Tensor], labels: Tensor, *, n_shuffles: int, seed: int
) -> MatchTest:
    """Compare what the labels choose with what shuffled labels choose."""
    source = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(n_shuffles):
        order = torch.randperm(len(labels), generator=source)
        found.append(
            max(told_by_labels(each, labels[order]) for each in shares.values())
        )
    alone = {factor: told_by_labels(each, labels) for factor, each in shares.items()}
    return MatchTest(choose_norm(shares, labels), tuple(found), alone)
