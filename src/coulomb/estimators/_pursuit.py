"""Choosing features one after the other, each by what the earlier ones leave.

Particles that are drawn by their own energies know nothing of each other: where two say
the same about the rows, one is wasted. Repulsion between positions does not see that.
Here features repel each other where it matters, in their values on the data: of a pool,
the next feature is the one that lowers the squared error of a regression on all that
are chosen already the most (orthogonal least squares),

    argmax_k  |<f_k, R>|^2 / (|f_k|^2 + ridge),

with R what the earlier ones leave of the labels and f_k what they leave of feature k.
Few features gain much by it. Many fit the noise of the labels, so their number is
chosen on held-out folds, and the other features stay what the dynamics made them.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb.estimators._selection import FOLDS, MARGIN, deal_folds, judge
from coulomb.objectives import Sample

COUNTS = (8, 16, 32, 64, 128)
_RIDGE = 1.0
_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_MOST_FEATURES = 256


class Waves(NamedTuple):
    """Frequencies and phases of features `cos(w . x + b)`."""

    positions: Tensor  # (count, dim)
    phases: Tensor  # (count,)

    def take(self, chosen: Tensor | slice) -> "Waves":
        """Keep some of them."""
        return Waves(self.positions[chosen], self.phases[chosen])

    def features(self, x: Tensor) -> Tensor:
        """Evaluate them, unscaled, shape `(n, count)`."""
        return (x @ self.positions.to(x).mT + self.phases.to(x)).cos()


class Pursuit(NamedTuple):
    """Features, of which the last were chosen one after the other."""

    waves: Waves
    pursued: int  # how many of them
    scores: list[tuple[int, float]]  # numbers that were tried, and held-out scores


class Moments(NamedTuple):
    """Weighted sums over rows: of features, of labels, and of their products."""

    mass: Tensor
    features: Tensor  # (count,)
    labels: Tensor  # (labels,)
    gram: Tensor  # (count, count)
    cross: Tensor  # (count, labels)

    @classmethod
    def of(cls, features: Tensor, labels: Tensor, weights: Tensor) -> "Moments":
        """Sum over rows, in double precision after the products."""
        weighted = weights.unsqueeze(-1) * features
        sums = (
            weights.sum(),
            weighted.sum(dim=0),
            weights @ labels,
            weighted.mT @ features,
            weighted.mT @ labels,
        )
        return cls(*(part.double() for part in sums))

    def without(self, other: "Moments") -> "Moments":
        """Take the rows of a part away."""
        return Moments(*(a - b for a, b in zip(self, other, strict=True)))

    def centred(self) -> tuple[Tensor, Tensor]:
        """Products of features, and of features with labels, less their means."""
        means = self.features / self.mass
        gram = self.gram - torch.outer(self.features, means)
        return gram, self.cross - torch.outer(means, self.labels)


def complete(
    sample: Sample,
    *,
    drawn: Waves,
    pool: Waves,
    count: int | None,
    judges: Tensor,
    rows: Tensor,
) -> Pursuit:
    """Replace the last of the drawn features by some that complete the others."""
    weights = sample.probabilities * sample.size
    scores: list[tuple[int, float]] = []
    if count is None:
        count, scores = choose_count(
            *(sample.x[judges], sample.labels[judges], weights[judges]),
            torch.arange(len(judges)),
            drawn=drawn,
            pool=pool,
        )
    if count:
        features = pool.features(sample.x[rows])
        moments = Moments.of(features, sample.labels[rows], weights[rows])
        found = pool.take(pursue(*moments.centred(), count))
        kept = drawn.take(slice(len(drawn.phases) - count))
        drawn = Waves(*(torch.cat(both) for both in zip(kept, found, strict=True)))
    return Pursuit(drawn, count, scores)


def pursue(gram: Tensor, cross: Tensor, count: int, ridge: float = _RIDGE) -> Tensor:
    """Choose features one after the other by orthogonal least squares.

    Examples
    --------
    The second feature repeats the first, and the third says less but something new:

    >>> f = torch.tensor([[2.0, 2.1, 0.0], [0.0, 0.0, 1.0]])
    >>> y = torch.tensor([[3.0], [1.0]])
    >>> pursue(f.T @ f, f.T @ y, 2, ridge=0.1)
    tensor([1, 2])
    """
    left, cross = gram.diagonal().clone(), cross.clone()
    tiny = torch.finfo(gram.dtype).eps * left.max()
    columns = gram.new_zeros(len(gram), count)
    free = torch.ones(len(gram), dtype=torch.bool)
    chosen = []
    for i in range(count):
        gain = cross.square().sum(dim=1) / (left + ridge)
        k = int(torch.where(free, gain, -1.0).argmax())
        free[k] = False
        chosen.append(k)
        root = left[k].clamp_min(tiny).sqrt()
        column = (gram[:, k] - columns[:, :i] @ columns[k, :i]) / root
        columns[:, i] = column
        cross -= torch.outer(column, cross[k] / root)
        left = (left - column.square()).clamp_min(tiny)
    return torch.tensor(chosen, dtype=torch.long)


def choose_count(
    x: Tensor,
    labels: Tensor,
    weights: Tensor,
    order: Tensor,
    *,
    drawn: Waves,
    pool: Waves,
) -> tuple[int, list[tuple[int, float]]]:
    """Decide on held-out folds how many features shall come from a pool."""
    drawn = drawn.take(slice(_MOST_FEATURES))
    size = len(drawn.phases)
    counts = (0, *(count for count in COUNTS if count <= size))
    weights = weights / weights.mean()
    features = torch.cat([drawn.features(x), pool.features(x)], dim=1)
    features *= math.sqrt(2 / size)
    folds = deal_folds(order, len(x))
    predictions = _predict_folds(features, labels, weights, folds, size, counts)
    labels, weights = labels.double(), weights.double()
    judged = [
        min((judge(one, labels, weights) for one in ones), key=lambda j: j[1].sum())
        for ones in predictions
    ]
    scores = [(count, score) for count, (score, _) in zip(counts, judged, strict=True)]
    losses = [losses for _, losses in judged]
    best = min(range(len(counts)), key=lambda i: float(losses[i].sum()))
    gain = losses[0] - losses[best]
    enough = MARGIN * float(gain.std()) / math.sqrt(len(gain))
    return (counts[best] if float(gain.mean()) > enough else 0), scores


def _predict_folds(
    features: Tensor,
    labels: Tensor,
    weights: Tensor,
    folds: Tensor,
    size: int,
    counts: tuple[int, ...],
) -> Tensor:
    """Predict every fold without it, `(counts, penalties, n, labels)`.

    Of the features, `size` are drawn and the others the pool.
    """
    rows = [folds == fold for fold in range(FOLDS)]
    parts = [Moments.of(features[i], labels[i], weights[i]) for i in rows]
    whole = Moments(
        *(torch.stack(sums).sum(dim=0) for sums in zip(*parts, strict=True))
    )
    shape = len(counts), len(_PENALTIES), *labels.shape
    predictions = torch.empty(shape, dtype=torch.float64)
    for here, part in zip(rows, parts, strict=True):
        inside = whole.without(part)
        gram, cross = inside.centred()
        means, level = inside.features / inside.mass, inside.labels / inside.mass
        ridge = _RIDGE * 2 / size  # the features are scaled
        found = pursue(gram[size:, size:], cross[size:], counts[-1], ridge) + size
        for i, count in enumerate(counts):
            used = torch.cat([torch.arange(size - count), found[:count]])
            new = features[here][:, used] - means[used]
            fitted = _predict(gram[used][:, used], cross[used], new)
            predictions[i][:, here] = fitted + level
    return predictions


def _predict(gram: Tensor, cross: Tensor, new: Tensor) -> Tensor:
    """Predict by ridge regressions with every penalty, `(penalties, rows, labels)`."""
    values, vectors = torch.linalg.eigh(gram)
    right, rotated = vectors.mT @ cross, new.double() @ vectors
    values = values.clamp_min(0).unsqueeze(-1)
    return torch.stack([rotated @ (right / (values + p)) for p in _PENALTIES])
