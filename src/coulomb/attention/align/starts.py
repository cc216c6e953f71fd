"""Where Phase A begins: particles placed by construction, and labels that choose.

Windows, for tags: a token's state holds the embedding of its position. A particle along
the sum of a few neighbouring embeddings answers to tokens in that window, so that
tokens near each other share features: local attention. A token's label is known in part
from the token itself, and only what is left, `unexplained`, can be learned from others;
`Contexts.choose` picks the windows whose content predicts most of it, one after the
other, on tokens it was not fitted to.

Pairs: a token's state holds the embedding of its part, so that the same word looks
different in the first and in the second text. Particles without the direction of the
part (`remove_part_direction`) have a kernel that joins equal words of both texts, the
closer the larger their norms are. Labels choose the norm, by what they have to do with
`cross_text_attention`, the attention that is paid to the other text.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError
from coulomb._support.stats import permutation_p_value

_TINY = math.ldexp(1.0, -60)  # so that an embedding of zero gives zero
# The ridge, as a share of the mean square of a feature.
_RIDGE = 1e-2
DRAWN = 0.0  # the name, among multiples of norms, of particles as they were drawn
# Standard errors by which shares of attention must differ to mean anything, squared,
# for every class but the first.
_CERTAIN = 16.0


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


def count_labels(tokens: Tensor, labels: Tensor, n_classes: int) -> Tensor:
    """Count how often a token of each kind has each label.

    Examples
    --------
    >>> count_labels(torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0]), 2)
    tensor([[0, 2],
            [1, 0]])
    """
    if tokens.shape != labels.shape or tokens.ndim != 1 or not len(tokens):
        raise ParameterError(
            "`tokens` and `labels` must be two lists of one length, not empty; got "
            f"shapes {tuple(tokens.shape)} and {tuple(labels.shape)}."
        )
    kinds = int(tokens.max()) + 1
    pairs = torch.bincount(tokens * n_classes + labels, minlength=kinds * n_classes)
    return pairs.reshape(kinds, n_classes)


def unexplained(
    tokens: Tensor, labels: Tensor, counts: Tensor, *, prior: float = 2.0
) -> Tensor:
    """Give what a token's own kind does not say of its label, leaving it out.

    `r_i = e(y_i) - p_i`, `p_i(y) = (n_i(y) + a p(y)) / (n_i + a)`, where `n_i` counts
    the labels of *other* tokens of the same kind and `p` the labels of all.

    Examples
    --------
    >>> tokens, labels = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 1])
    >>> counts = count_labels(tokens, labels, 2)
    >>> unexplained(tokens, labels, counts, prior=1e-9)[:, 0].round()
    tensor([ 0.,  0.,  1., -1.])
    """
    check_real("prior", prior, above=0)
    own = torch.nn.functional.one_hot(labels, counts.shape[1]).float()
    of_all = counts.sum(dim=0) / counts.sum()
    shares = counts[tokens] - own + prior * of_all
    return own - shares / shares.sum(dim=1, keepdim=True)


def describe_shifts(shifts: Sequence[int]) -> str:
    """Say where windows are.

    Examples
    --------
    >>> describe_shifts([1, 0, -2])
    '+1, 0, -2 tokens away'
    """
    told = (f"{shift:+d}" if shift else "0" for shift in shifts)
    return f"{', '.join(told)} tokens away"


class Choice(NamedTuple):
    """What labels chose, and how much of them it explains."""

    shifts: tuple[int, ...]  # the best first
    explained: float  # share of the unexplained squares that they predict, held out
    centred: float  # the same of a window around the token itself


class ChoiceTest(NamedTuple):
    """What labels chose, against what labels without meaning choose."""

    choice: Choice
    shuffled: tuple[float, ...]  # explained by what each shuffle of the labels chose
    alone: dict[int, float]  # explained by each window, without the others

    @property
    def p_value(self) -> float:
        """Of the labels being one more shuffle."""
        return permutation_p_value(self.choice.explained, self.shuffled)

    def sentence(self) -> str:
        """Tell what was found."""
        where = describe_shifts(self.choice.shifts)
        return (
            f"windows chosen by the labels ({where}) tell "
            f"{100 * self.choice.explained:.2g} % of what a token leaves open of its "
            f"label, on other texts; a window around the token itself "
            f"{100 * self.choice.centred:.2g} %, those chosen by {len(self.shuffled)} "
            f"shuffles of the labels at most {100 * max(self.shuffled):.2g} % "
            f"(p = {self.p_value:.2g})"
        )


class Contexts:
    """What windows show of every token, beside what is to be predicted from it.

    Only sums of products are kept, of two halves of the data: what is fitted to one is
    judged on the other.

    Examples
    --------
    >>> contexts = Contexts((-1, 0, 1), dim=1, n_classes=1)
    >>> source = torch.Generator().manual_seed(0)
    >>> for _ in range(2):
    ...     shown = torch.randn(500, 3, generator=source)
    ...     contexts.add(shown, shown[:, :1] + 0.1 * shown[:, 2:])
    >>> contexts.choose(2).shifts
    (-1, 1)
    """

    def __init__(self, shifts: Sequence[int], *, dim: int, n_classes: int) -> None:
        if 0 not in shifts:
            raise ParameterError(f"`shifts` must contain 0; got {tuple(shifts)}.")
        self.shifts, self.dim = tuple(shifts), check_count("dim", dim)
        size = 1 + len(self.shifts) * dim  # the first column is constant
        self.products = torch.zeros(2, size, size, dtype=torch.float64)
        self.targets = torch.zeros(2, size, n_classes, dtype=torch.float64)
        self.squares = torch.zeros(2, n_classes, dtype=torch.float64)
        self._turn = 0

    def add(self, shown: Tensor, rest: Tensor) -> None:
        """Add tokens to the half whose turn it is."""
        design = torch.cat([torch.ones_like(shown[:, :1]), shown], dim=1)
        rest = rest.to(design)
        self.products[self._turn] += design.mT @ design
        self.targets[self._turn] += design.mT @ rest
        self.squares[self._turn] += rest.square().sum(dim=0)
        self._turn = 1 - self._turn

    def explained(self, shifts: Sequence[int]) -> float:
        """Predict one half from the other, by ridge regression on some windows."""
        chosen = [0]
        for shift in shifts:
            first = 1 + self.shifts.index(shift) * self.dim
            chosen += range(first, first + self.dim)
        products = self.products[:, chosen][:, :, chosen]
        targets = self.targets[:, chosen]
        lost = [self._lost(products, targets, half) for half in (0, 1)]
        guessed = [
            self._lost(products[:, :1, :1], targets[:, :1], half) for half in (0, 1)
        ]
        return 1 - sum(lost) / sum(guessed) if sum(guessed) > 0 else 0.0

    def _lost(self, products: Tensor, targets: Tensor, half: int) -> float:
        """Fit one half, and give the squares that are left of the other."""
        size = products.shape[1]
        fitted, judged = products[half], products[1 - half]
        ridge = torch.full((size,), _RIDGE, dtype=torch.float64)
        ridge *= fitted.diagonal()[1:].mean() if size > 1 else 0.0
        ridge[0] = 1e-12 * fitted[0, 0]  # the constant is free, and nobody may be there
        matrix = fitted + ridge.clamp_min(torch.finfo(torch.float64).tiny).diag()
        weights = torch.linalg.solve(matrix, targets[half])
        predicted = (weights * targets[1 - half]).sum()
        size_of = (weights * (judged @ weights)).sum()
        return float(self.squares[1 - half].sum() - 2 * predicted + size_of)

    def of_columns(self, columns: slice) -> "Contexts":
        """Look at some columns of what is to be predicted."""
        part = copy(self)
        part.targets = self.targets[..., columns]
        part.squares = self.squares[:, columns]
        return part

    def choose(self, count: int) -> Choice:
        """Choose windows one after the other, each by what it adds to those before."""
        check_count("count", count)
        chosen: list[int] = []
        best = 0.0
        while len(chosen) < min(count, len(self.shifts)):
            scores = {
                shift: self.explained([*chosen, shift])
                for shift in self.shifts
                if shift not in chosen
            }
            shift = max(scores, key=lambda name: scores[name])
            if not scores[shift] > best:
                break
            best = scores[shift]
            chosen.append(shift)
        return Choice(tuple(chosen) or (0,), best, self.explained([0]))


def remove_part_direction(
    particles: Tensor, parts: Tensor, *, factor: float = 1.0
) -> Tensor:
    """Turn particles until two embeddings are the same to them, and scale them.

    `w' = c |w| v / |v|`, `v = w - (w . u) u` with `u` along the difference of the
    embeddings.

    Examples
    --------
    >>> parts = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    >>> remove_part_direction(torch.tensor([[[3.0, 4.0]]]), parts, factor=2.0)
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


def cross_text_attention(weights: Tensor, parts: Tensor, mask: Tensor) -> Tensor:
    """Average the share of its attention that a token pays to the other text.

    `mean_i sum_j A_ij [p_j != p_i] / sum_{j != i} A_ij`, over the tokens of a pair.

    Examples
    --------
    >>> everywhere = torch.ones(1, 1, 3, 3)
    >>> parts, mask = torch.tensor([[0, 0, 1]]), torch.ones(1, 3).bool()
    >>> cross_text_attention(everywhere, parts, mask)
    tensor([[0.6667]])
    """
    others = ~torch.eye(parts.shape[1], dtype=torch.bool, device=parts.device)
    seen = mask.unsqueeze(1) & mask.unsqueeze(2) & others  # (batch, length, length)
    across = seen & (parts.unsqueeze(1) != parts.unsqueeze(2))
    paid = (weights * across.unsqueeze(1)).sum(dim=-1)
    every = (weights * seen.unsqueeze(1)).sum(dim=-1)
    share = paid / torch.where(every > 0, every, 1.0)
    return share.sum(dim=-1) / mask.sum(dim=1).clamp_min(1).unsqueeze(1)


def variance_explained(values: Tensor, labels: Tensor) -> float:
    """Give the share of the variance of numbers that lies between classes.

    `sum_c n_c (m_c - m)^2 / sum_i (z_i - m)^2`, for two classes the squared
    correlation with the label, averaged over columns.

    Examples
    --------
    >>> variance_explained(torch.tensor([[1.0], [1.0], [3.0]]), torch.tensor([0, 0, 1]))
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
    told = _explained(shares, labels)
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
        most = 100 * max(self.shuffled)
        return (
            f"{describe_norm(self.choice)}; {len(self.shuffled)} shuffles of the "
            f"labels tell at most {most:.2g} % (p = {self.p_value:.2g})"
        )


def describe_norm(choice: MatchChoice) -> str:
    """Say what was chosen.

    Examples
    --------
    >>> describe_norm(MatchChoice(DRAWN, 0.001, 0.001))
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
        found.append(max(_explained(shares, labels[order]).values()))
    alone = _explained(shares, labels)
    return MatchTest(choose_norm(shares, labels), tuple(found), alone)


def _explained(shares: Mapping[float, Tensor], labels: Tensor) -> dict[float, float]:
    return {name: variance_explained(each, labels) for name, each in shares.items()}
