"""Where heads should look: labels choose among windows of neighbouring tokens.

A token's label is known in part from the token itself, and only what is left can be
learned from others. `unexplained` is what is left; `choose_shifts` picks the windows
whose content predicts most of it, one after the other, on tokens it was not fitted to.
"""

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError
from coulomb._support.stats import permutation_p_value

# The ridge, as a share of the mean square of a feature.
_RIDGE = 1e-2


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


def in_words(shifts: Sequence[int]) -> str:
    """Say where windows are.

    Examples
    --------
    >>> in_words([1, 0, -2])
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
        return (
            f"windows chosen by the labels ({in_words(self.choice.shifts)}) tell "
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
