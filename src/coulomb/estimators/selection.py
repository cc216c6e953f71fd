"""Choices made on held-out folds: the law and temperature, and what is pursued.

A *law* is where the frequencies come from: how many coordinates each lives on and how
wide it spreads there. A *divergence* is how far, in nats, the labels may bend that law
through `exp(-beta V)`. For each pair of them and each fold, frequencies are chosen
without the fold, a ridge regression on their features predicts the fold's labels, and
the score is the alignment of all these predictions with the labels,
`<P, Y> / (|P| |Y|)`.

Particles that are drawn by their own energies know nothing of each other: where two say
the same about the rows, one is wasted. Repulsion between positions does not see that.
*Pursued* features repel each other where it matters, in their values on the data: of a
pool, the next feature is the one that lowers the squared error of a regression on all
that are chosen already the most (orthogonal least squares),

    argmax_k  |<f_k, R>|^2 / (|f_k|^2 + ridge),

with R what the earlier ones leave of the labels and f_k what they leave of feature k.
Few features gain much by it. Many fit the noise of the labels, so their number is
chosen on held-out folds, and the other features stay what the dynamics made them.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb.dynamics.initial import Component, SpectralMixture
from coulomb.dynamics.resampling import (
    Resampler,
    gibbs_weights,
    temperature_of_divergence,
)

# Multiples m of the "scale" bandwidth, and coordinates per particle (0: all).
LAWS = {
    "dense": SpectralMixture((Component(0, 1.0),)),
    "smooth": SpectralMixture((Component(0, 0.5),)),
    "rough": SpectralMixture((Component(0, 2.0),)),
    "rougher": SpectralMixture((Component(0, 4.0),)),
    "pairs": SpectralMixture(
        tuple(Component(k, m) for k in (1, 2) for m in (1.0, 2.0))
    ),
    "mixed": SpectralMixture(
        tuple(Component(k, m) for k in (1, 2, 3, 0) for m in (1.0, 2.0))
    ),
    "wide": SpectralMixture(
        tuple(Component(k, m) for k in (1, 2, 3, 0) for m in (4.0, 8.0, 16.0))
    ),
}
# What the pool of `pursue` has beside the chosen law: every scale that may be of use.
BROAD = SpectralMixture(
    tuple(Component(k, m) for k in (1, 2, 3, 0) for m in (0.25, 0.5, 1.0, 2.0))
)
DIVERGENCES = (0.0, 0.5, 1.0, 2.0)
# What is taken unless another choice is better by 1.5 standard errors: the best of many
# noisy scores is too often the luckiest.
REFERENCE = ("mixed", 1.0)
MARGIN = 1.5
# Too few rows to score anything are bent less.
CAUTIOUS = ("mixed", 0.5)
FOLDS = 5
# How many features may be pursued, and the penalties that judge them.
COUNTS = (8, 16, 32, 64, 128)
_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_RIDGE = 1.0
_MOST_FEATURES = 256
_BLOCK = 1 << 21


class Rows(NamedTuple):
    """Rows to choose by, sorted by label: dealt out in turn, the folds are balanced."""

    x: Tensor  # (n, dim)
    labels: Tensor  # (n, labels)
    weights: Tensor  # (n,), of mean one

    def folds(self) -> list[Tensor]:
        """Say for each fold which rows are in it."""
        number = torch.arange(len(self.x)) % FOLDS
        return [number == fold for fold in range(FOLDS)]


class Features(NamedTuple):
    """Frequencies and phases of features `cos(w . x + b)`."""

    positions: Tensor  # (count, dim)
    phases: Tensor  # (count,)

    def take(self, chosen: Tensor | slice) -> "Features":
        """Keep some of them."""
        return Features(self.positions[chosen], self.phases[chosen])

    def values(self, x: Tensor) -> Tensor:
        """Evaluate them, unscaled, shape `(n, count)`."""
        return (x @ self.positions.to(x).mT + self.phases.to(x)).cos()


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

    def take(self, chosen: Tensor) -> "Moments":
        """Keep some features."""
        gram = self.gram[chosen][:, chosen]
        return self._replace(
            features=self.features[chosen], gram=gram, cross=self.cross[chosen]
        )

    def predict(self, new: Tensor, penalties: tuple[float, ...]) -> Tensor:
        """Predict by ridge regressions, `(penalties, rows, labels)`."""
        gram, cross = self.centred()
        centred = new.double() - self.features / self.mass
        predictions = []
        for penalty in penalties:
            shifted = gram.clone()
            shifted.diagonal().add_(penalty)
            solved = torch.cholesky_solve(cross, torch.linalg.cholesky(shifted))
            predictions.append(centred @ solved + self.labels / self.mass)
        return torch.stack(predictions)


class Trial(NamedTuple):
    """One law and divergence, scored."""

    law: str
    divergence: float
    score: float
    losses: Tensor  # (n,), weighted squared error of the scaled predictions


def choose_law(
    rows: Rows,
    *,
    laws: dict[str, SpectralMixture],
    n_candidates: int,
    n_features: int,
    generator: torch.Generator,
) -> tuple[Trial, list[Trial]]:
    """Score every law and divergence on held-out folds and choose one."""
    dim, count = rows.x.shape[1], min(n_features, _MOST_FEATURES)
    trials: list[Trial] = []
    seen: set[tuple[Component, ...]] = set()
    for name, law in laws.items():
        parts = law.resolve(dim)
        if parts in seen:  # few columns make some laws the same
            continue
        seen.add(parts)
        positions = law.draw(n_candidates, dim, generator=generator).to(rows.x)
        sums = _fold_sums(rows, positions)
        for divergence in DIVERGENCES:
            predictions = _predict_by_law(
                rows, sums, positions, divergence, count, generator
            )
            judged = judge(predictions, rows)
            trials.append(Trial(name, divergence, *judged))
    return _best(trials), trials


def _best(trials: list[Trial]) -> Trial:
    """Take the best score, or the reference if it is not clearly worse."""
    best = max(trials, key=lambda trial: trial.score)
    for trial in trials:
        if (trial.law, trial.divergence) == REFERENCE:
            gain = trial.losses - best.losses
            standard_error = float(gain.std()) / math.sqrt(len(gain))
            if float(gain.mean()) <= MARGIN * standard_error:
                return trial
    return best


def _fold_sums(rows: Rows, positions: Tensor) -> Tensor:
    """Compute `sum_{i in fold} q_i Y_i e^{i w.x_i}` as `(2, folds, labels, n)`."""
    member = torch.stack(rows.folds(), dim=1).to(rows.x)  # (n, folds)
    weighted = rows.weights.unsqueeze(-1) * rows.labels
    split = (member.unsqueeze(-1) * weighted.unsqueeze(1)).flatten(1)
    parts = []
    for block in torch.split(positions, max(1, _BLOCK // len(rows.x))):
        angles = rows.x @ block.mT
        parts.append(torch.stack([split.mT @ angles.cos(), split.mT @ angles.sin()]))
    shape = (2, FOLDS, rows.labels.shape[1], len(positions))
    return torch.cat(parts, dim=-1).reshape(shape)


def _predict_by_law(
    rows: Rows,
    sums: Tensor,
    positions: Tensor,
    divergence: float,
    count: int,
    generator: torch.Generator,
) -> Tensor:
    """Predict every fold by a ridge regression that has not seen it."""
    x, labels, weights = rows
    whole = sums.sum(dim=1)
    beta = temperature_of_divergence(_energy(whole, weights.sum()), divergence)
    predictions = torch.empty_like(labels)
    for fold, outside in enumerate(rows.folds()):
        inside = ~outside
        energy = _energy(whole - sums[:, fold], weights[inside].sum())
        chosen = Resampler("systematic")(
            gibbs_weights(energy, beta), count, generator=generator
        )
        phases = 2 * math.pi * torch.rand(count, generator=generator).to(x)
        features = Features(positions[chosen], phases).values(x)
        features *= math.sqrt(2 / count)
        moments = Moments.of(features[inside], labels[inside], weights[inside])
        predicted = moments.predict(features[outside], (_RIDGE,))[0]
        predictions[outside] = predicted.to(labels)
    return predictions


def _energy(sums: Tensor, mass: Tensor) -> Tensor:
    return -sums.square().sum(dim=(0, 1)).double() / float(mass) ** 2


def judge(predictions: Tensor, rows: Rows) -> tuple[float, Tensor]:
    """Compare predictions with labels, whatever their scale."""
    labels, weights = rows.labels.to(predictions), rows.weights.to(predictions)
    column = weights.unsqueeze(-1)
    cross = (column * predictions * labels).sum()
    size = (column * predictions.square()).sum()
    norm = (column * labels.square()).sum()
    tiny = torch.finfo(labels.dtype).tiny
    score = float(cross / (size * norm).clamp_min(tiny).sqrt())
    # The best multiple of the predictions: their squared error is |Y|^2 (1 - score^2).
    scaled = cross / size.clamp_min(tiny) * predictions
    return score, weights * (scaled - labels).square().sum(dim=-1)


class Pursuit(NamedTuple):
    """Features, of which the last were chosen one after the other."""

    features: Features
    pursued: int  # how many of them
    scores: list[tuple[int, float]]  # numbers that were tried, and held-out scores


def complete(
    drawn: Features, pool: Features, rows: Rows, judges: Rows, count: int | None
) -> Pursuit:
    """Replace the last of the drawn features by some that complete the others."""
    scores: list[tuple[int, float]] = []
    if count is None:
        count, scores = choose_count(judges, drawn=drawn, pool=pool)
    if count:
        moments = Moments.of(pool.values(rows.x), rows.labels, rows.weights)
        found = pool.take(pursue(*moments.centred(), count))
        kept = drawn.take(slice(len(drawn.phases) - count))
        drawn = Features(*(torch.cat(both) for both in zip(kept, found, strict=True)))
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
    rows: Rows, *, drawn: Features, pool: Features
) -> tuple[int, list[tuple[int, float]]]:
    """Decide on held-out folds how many features shall come from a pool."""
    drawn = drawn.take(slice(_MOST_FEATURES))
    size = len(drawn.phases)
    counts = (0, *(count for count in COUNTS if count <= size))
    # Products in single precision would not be positive enough for small penalties.
    rows = Rows(*(part.double() for part in rows))
    features = torch.cat([drawn.values(rows.x), pool.values(rows.x)], dim=1)
    features *= math.sqrt(2 / size)
    judged = [
        min((judge(one, rows) for one in ones), key=lambda j: j[1].sum())
        for ones in _predict_by_count(features, rows, size, counts)
    ]
    scores = [(count, score) for count, (score, _) in zip(counts, judged, strict=True)]
    losses = [losses for _, losses in judged]
    best = min(range(len(counts)), key=lambda i: float(losses[i].sum()))
    gain = losses[0] - losses[best]
    enough = MARGIN * float(gain.std()) / math.sqrt(len(gain))
    return (counts[best] if float(gain.mean()) > enough else 0), scores


def _predict_by_count(
    features: Tensor, rows: Rows, size: int, counts: tuple[int, ...]
) -> Tensor:
    """Predict every fold without it, `(counts, penalties, n, labels)`.

    Of the features, `size` are drawn and the others the pool.
    """
    folds = rows.folds()
    parts = [Moments.of(features[i], rows.labels[i], rows.weights[i]) for i in folds]
    whole = Moments(*(torch.stack(s).sum(dim=0) for s in zip(*parts, strict=True)))
    shape = len(counts), len(_PENALTIES), *rows.labels.shape
    predictions = torch.empty(shape, dtype=torch.float64)
    for here, part in zip(folds, parts, strict=True):
        inside = whole.without(part)
        gram, cross = inside.centred()
        ridge = _RIDGE * 2 / size  # the features are scaled
        found = pursue(gram[size:, size:], cross[size:], counts[-1], ridge) + size
        for i, count in enumerate(counts):
            used = torch.cat([torch.arange(size - count), found[:count]])
            new = features[here][:, used]
            predictions[i][:, here] = inside.take(used).predict(new, _PENALTIES)
    return predictions
