"""Alignment of attention itself: whether tokens attend to tokens of their class.

Other scores compare what attention gives. This one compares who attends to whom inside
each sequence, so that labels of tokens shape the kernel before anything is trained.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coulomb._support.checks import check_count
from coulomb._support.errors import ParameterError
from coulomb.attention.align.energies import IGNORED
from coulomb.attention.align.scores import AbstractScore, Rows

_LEAST = 1e-12  # of a share of attention whose logarithm is taken


def neighbour_likelihood(weights: Tensor, labels: Tensor) -> Tensor:
    """Average the logarithm of the attention that tokens pay to their own class.

    `mean_i log(sum_{j != i} A_ij [y_j = y_i] / sum_{j != i} A_ij)` inside a sequence,
    over tokens whose sequence has another of their class; every class of the batch
    weighs the same. It is the aim of neighbourhood components analysis, with attention
    in place of a Gaussian kernel.

    Examples
    --------
    >>> labels = torch.tensor([[0, 0, 1, 1]])
    >>> uniform = torch.ones(1, 4, 4)  # one of three others is of the same class
    >>> neighbour_likelihood(uniform, labels).exp()
    tensor(0.3333)
    >>> blocks = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2))
    >>> neighbour_likelihood(blocks.unsqueeze(0), labels)
    tensor(0.)
    """
    known = labels != IGNORED
    others = ~torch.eye(labels.shape[1], dtype=torch.bool, device=labels.device)
    pairs = known.unsqueeze(2) & known.unsqueeze(1) & others
    same = (labels.unsqueeze(2) == labels.unsqueeze(1)) & pairs
    judged = same.any(dim=-1)
    own = (weights * same).sum(dim=-1)
    every = (weights * pairs).sum(dim=-1)
    share = torch.where(judged, own, 1.0) / torch.where(judged, every, 1.0)
    balance = _class_weights(labels, judged).to(weights)
    return (balance * share.clamp_min(_LEAST).log()).sum(dim=(-2, -1))


def _class_weights(labels: Tensor, judged: Tensor) -> Tensor:
    """Give weights that sum to one, with the same sum for every class."""
    weight = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
    if judged.any():
        _, members, counts = torch.unique(
            labels[judged], return_inverse=True, return_counts=True
        )
        weight[judged] = 1 / (len(counts) * counts[members].double())
    return weight


@dataclass(frozen=True)
class Neighbours(AbstractScore):
    """The attention that tokens pay to their own class; see `neighbour_likelihood`.

    It has no name among the objectives of `align`: it must know how many groups there
    are. What is scored are attention weights `(batch, length, groups * length)`, those
    of all groups (layers and heads) side by side, as `feature_function` gives them.

    Examples
    --------
    >>> rows = Rows(torch.ones(1, 4, 12), torch.tensor([[0, 0, 1, 1]]))
    >>> Neighbours(groups=3)(rows).exp()
    tensor([0.3333, 0.3333, 0.3333])
    """

    groups: int = 1
    pairwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("groups", self.groups)

    def __call__(self, rows: Rows) -> Tensor:
        weights, labels = rows.features, rows.target
        if labels.is_floating_point() or labels.ndim != 2:
            raise ParameterError(
                "`labels` must be classes of tokens, (batch, length), for the "
                f"objective 'neighbours'; got {tuple(labels.shape)} of {labels.dtype}."
            )
        batch, length = labels.shape
        split = weights.reshape(batch, length, self.groups, length).movedim(2, 0)
        return neighbour_likelihood(split, labels)
