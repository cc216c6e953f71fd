"""Scores: how well output vectors `f_i` agree with a target, in O(n) for labels.

A score is large when the kernel `K = F F'` of the outputs says who belongs together.
Neither `K` nor any matrix of pairs is formed unless the target is one. `Neighbours`
alone looks at attention itself: whether tokens attend to tokens of their class.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coulomb._support.checks import Registry, check_count
from coulomb._support.errors import ParameterError, ParameterTypeError
from coulomb.objectives import centred_alignment

IGNORED = -100  # the label of tokens that have none, as in torch's cross-entropy
_LEAST = 1e-12  # of a share of attention whose logarithm is taken


def class_vectors(labels: Tensor, *, balanced: bool = False) -> Tensor:
    """Turn targets into vectors whose products say who belongs together.

    Examples
    --------
    >>> class_vectors(torch.tensor([3, 7, 7]))
    tensor([[1., 0.],
            [0., 1.],
            [0., 1.]])
    """
    if labels.is_floating_point():
        return labels.reshape(labels.shape[0], -1)
    classes, members = torch.unique(labels, return_inverse=True)
    vectors = torch.nn.functional.one_hot(members, len(classes))
    vectors = vectors.to(torch.get_default_dtype())
    return vectors / vectors.sum(dim=0).sqrt() if balanced else vectors


def within_class_alignment(features: Tensor, labels: Tensor) -> Tensor:
    """Average products inside classes. [CPM "Alignment for attention kernel"].

    `(1/(n(n-1))) sum_{i<j} (Y_i . Y_j) f_i . f_j`, through
    `2 sum_{i<j} = |Y'F|^2 - sum_i |Y_i|^2 |f_i|^2`: no pair is formed.

    Examples
    --------
    >>> features = torch.tensor([[1.0], [2.0], [5.0]])
    >>> within_class_alignment(features, class_vectors(torch.tensor([0, 0, 1])))
    tensor(0.3333)
    """
    n = features.shape[-2]
    everyone = (labels.mT @ features).square().sum(dim=(-2, -1))
    own = (labels.square().sum(dim=-1) * features.square().sum(dim=-1)).sum(dim=-1)
    return (everyone - own) / (2 * n * (n - 1))


def target_alignment(
    features: Tensor, gram: Tensor, probabilities: Tensor | None = None
) -> Tensor:
    """Compare the kernel of the outputs with a given one, both centred.

    `<HKH, HTH>_F / (|HKH|_F |HTH|_F)` with `K = F F'`; `K` is not formed.

    Examples
    --------
    >>> features = torch.tensor([[1.0], [-1.0], [1.0]])
    >>> round(float(target_alignment(features, features @ features.mT)), 3)
    1.0
    """
    n = features.shape[-2]
    if probabilities is None:
        probabilities = features.new_full((n,), 1 / n)
    weight = probabilities.unsqueeze(-1)  # (*groups, n, 1)
    root = weight.sqrt()
    centred = root * (features - (weight * features).sum(dim=-2, keepdim=True))
    target = (gram + gram.mT) / 2
    target = target - (target * weight).sum(dim=-2, keepdim=True)
    target = target - (target * weight.mT).sum(dim=-1, keepdim=True)
    target = root * target * root.mT
    cross = (centred * (target @ centred)).sum(dim=(-2, -1))
    covariance = centred.mT @ centred
    size = covariance.square().sum(dim=(-2, -1)) * target.square().sum(dim=(-2, -1))
    safe = torch.where(size > 0, size, torch.ones_like(size))
    return torch.where(size > 0, cross / safe.sqrt(), 0 * cross)


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


class Rows(NamedTuple):
    """Output vectors with what they are to be aligned with, row by row."""

    features: Tensor  # (*groups, n, dim)
    target: Tensor  # labels (n,) or (n, n_labels); for pairs (*groups, n, n)
    probabilities: Tensor | None = None  # (*groups, n)


class AbstractScore(ABC):
    """A number that is large when outputs and target agree."""

    pairwise: ClassVar[bool] = False  # whether the target is a matrix of pairs
    normalised: ClassVar[bool] = True  # whether the size of the outputs does not count
    of_logits: ClassVar[bool] = False  # whether it looks at what the model returns

    @abstractmethod
    def __call__(self, rows: Rows) -> Tensor:
        """Compare outputs with their target."""

    def label(self) -> str:
        """Name the score in a sentence."""
        return re.sub("(?<=[a-z])(?=[A-Z])", "-", type(self).__name__).lower()


scores: Registry[AbstractScore] = Registry("objective")


@scores.add("centred")
@dataclass(frozen=True)
class Centred(AbstractScore):
    """The centred, normalised kernel-target alignment, between 0 and 1 for classes.

    `A = <HKH, YY'>_F / (|HKH|_F |HYY'H|_F)`, `K = F F'`. It does not change when the
    outputs are scaled or shifted.

    Examples
    --------
    >>> rows = Rows(torch.tensor([[1.0], [1.0], [4.0]]), torch.tensor([0, 0, 1]))
    >>> round(float(Centred()(rows)), 3)
    1.0
    """

    balanced: bool = False

    def __call__(self, rows: Rows) -> Tensor:
        labels = class_vectors(rows.target, balanced=self.balanced)
        return centred_alignment(rows.features, labels.to(rows.features))


@scores.add("within-class")
@dataclass(frozen=True)
class WithinClass(AbstractScore):
    """The paper's average of products inside classes.

    `(1/(n(n-1))) sum_{i<j} [y_i = y_j] f_i . f_j`; it grows with the outputs, and sees
    little of the labels.

    Examples
    --------
    >>> rows = Rows(torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([0, 0, 1]))
    >>> WithinClass()(rows)
    tensor(0.3333)
    """

    normalised: ClassVar[bool] = False

    def __call__(self, rows: Rows) -> Tensor:
        labels = class_vectors(rows.target)
        return within_class_alignment(rows.features, labels.to(rows.features))


@scores.add("likelihood")
@dataclass(frozen=True)
class Likelihood(AbstractScore):
    """The mean logarithm of the probability that the model gives to the label.

    `(1/n) sum_i log softmax(f_i)[y_i]`, minus the cross-entropy: outputs are the logits
    of the model, so that particles learn what is of use to the layers above them.

    Examples
    --------
    >>> rows = Rows(torch.zeros(3, 2), torch.tensor([0, 0, 1]))
    >>> round(float(Likelihood()(rows)), 3)
    -0.693
    """

    of_logits: ClassVar[bool] = True

    def __call__(self, rows: Rows) -> Tensor:
        return -torch.nn.functional.cross_entropy(rows.features, rows.target)


@scores.add("target")
@dataclass(frozen=True)
class Target(AbstractScore):
    """Alignment with a target kernel instead of labels; see `target_alignment`.

    The labels of a batch are then a Gram matrix: `(batch, batch)` between sequences, or
    `(batch, length, length)` between the tokens of each, such as a teacher's attention.

    Examples
    --------
    >>> round(float(Target()(Rows(torch.eye(3), torch.eye(3)))), 3)
    1.0
    """

    pairwise: ClassVar[bool] = True

    def __call__(self, rows: Rows) -> Tensor:
        target, n = rows.target.to(rows.features), rows.features.shape[-2]
        if target.shape[-2:] != (n, n):
            raise ParameterError(
                f"`labels` must be Gram matrices, ({n}, {n}), for the objective "
                f"'target'; got the shape {tuple(target.shape)}."
            )
        return target_alignment(rows.features, target, rows.probabilities)


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


def as_score(objective: str | AbstractScore) -> AbstractScore:
    """Turn a name into a score.

    Examples
    --------
    >>> as_score("within-class")
    WithinClass()
    """
    if isinstance(objective, AbstractScore):
        return objective
    if isinstance(objective, str):
        return scores.build(objective)
    raise ParameterTypeError(f"`objective` must be a name or a score; got {objective}.")


def shuffled(
    picked: Sequence[Rows], generator: torch.Generator, pairwise: bool
) -> list[Rows]:
    """Give every vector the target of another of its batch, in all layers the same."""
    target, share = picked[0].target, picked[0].probabilities
    if share is not None:  # a matrix or classes of tokens for each sequence, padded
        parts = []
        for each, weight in zip(target, share, strict=True):
            order = torch.arange(len(weight), device=each.device)
            labelled = weight > 0 if each.ndim > 1 else (weight > 0) & (each >= 0)
            real = order[labelled]
            mixed = torch.randperm(len(real), generator=generator).to(real.device)
            order[real] = real[mixed]
            parts.append(each[order][:, order] if each.ndim > 1 else each[order])
        target = torch.stack(parts)
    else:
        mixed = torch.randperm(len(target), generator=generator).to(target.device)
        target = target[mixed][:, mixed] if pairwise else target[mixed]
    return [rows._replace(target=target) for rows in picked]
