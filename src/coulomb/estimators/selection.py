"""Choices on rows that were held out: law and temperature, what is pursued, moves.

A *law* is where the frequencies come from: how many coordinates each lives on and how
wide it spreads there. Laws do not see the labels, so the exact leave-one-out error of a
ridge regression on features of a law judges it, at the cost of one fit. A *divergence*
is how far, in nats, the labels may bend the law through `exp(-beta V)`; it is judged on
folds, whose frequencies are chosen without the fold. Scores are the alignment of all
these predictions with the labels, `<P, Y> / (|P| |Y|)`.

Particles that are drawn by their own energies know nothing of each other: where two say
the same about the rows, one is wasted. *Pursued* features repel each other where it
matters, in their values on the data: of a pool, the next feature is the one that lowers
the squared error of a regression on all that are chosen already the most (orthogonal
least squares),

    argmax_k  |<f_k, R>|^2 / (|f_k|^2 + ridge),

with R what the earlier ones leave of the labels and f_k what they leave of feature k.
Few features gain much by it, many fit the noise of the labels.

How many are pursued, and how far particles move afterwards, is a *path* of ever more
learning; where to stop on it is judged by ridge regressions on rows held out from all
of it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb.dynamics.initial import Component, SpectralMixture, draw_phases
from coulomb.dynamics.resampling import (
    Resampler,
    gibbs_weights,
    temperature_of_divergence,
)
from coulomb.features import AbstractFeatureMap, Particles
from coulomb.objectives import LeaveOneOut, Sample

# Multiples m of the "scale" bandwidth, and coordinates per particle (0: all).
LAWS = {
    "dense": SpectralMixture((Component(0, 1.0),)),
    "smooth": SpectralMixture((Component(0, 0.5),)),
    "smoother": SpectralMixture((Component(0, 0.25),)),
    "smoothest": SpectralMixture((Component(0, 0.06),)),
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
LARGEST_SINGLE_ANGLE = 1e3  # rounded to 6e-5 in single precision
# How many features may be pursued, and how many are judged.
COUNTS = (8, 16, 32, 64, 128)
_MOST_JUDGED = 512
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

    def single(self, positions: Tensor) -> "Rows":
        """Turn to single precision if angles with such frequencies allow it."""
        reach = float(self.x.norm(dim=-1).max() * positions.norm(dim=-1).max())
        if reach > LARGEST_SINGLE_ANGLE:
            return self
        return Rows(*(part.float() for part in self))


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

    def errors(self, rows: Rows, feature_map: AbstractFeatureMap) -> Tensor:
        """Compute leave-one-out errors of the rows, by the best ridge regression."""
        particles = Particles(self.positions.to(rows.x), self.phases.to(rows.x))
        weights = rows.weights / rows.weights.sum()
        objective = LeaveOneOut(Sample(rows.x, rows.labels, weights), feature_map)
        return objective.tuned(particles).errors


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

    def centred(self) -> tuple[Tensor, Tensor]:
        """Products of features, and of features with labels, less their means."""
        means = self.features / self.mass
        gram = self.gram - torch.outer(self.features, means)
        return gram, self.cross - torch.outer(means, self.labels)

    def predict(self, new: Tensor) -> Tensor:
        """Predict by a ridge regression, `(rows, labels)`."""
        gram, cross = self.centred()
        centred = new.double() - self.features / self.mass
        gram.diagonal().add_(_RIDGE)
        solved = torch.cholesky_solve(cross, torch.linalg.cholesky(gram))
        return centred @ solved + self.labels / self.mass


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
    feature_map: AbstractFeatureMap,
    n_candidates: int,
    n_features: int,
    generator: torch.Generator,
) -> tuple[Trial, list[Trial]]:
    """Choose a law by leave-one-out errors, then on folds how far it is bent."""
    dim, count = rows.x.shape[1], min(n_features, _MOST_FEATURES)
    trials: list[Trial] = []
    seen: set[tuple[Component, ...]] = set()
    for name, law in laws.items():
        parts = law.resolve(dim)
        if parts in seen:  # few columns make some laws the same
            continue
        seen.add(parts)
        positions = law.draw(count, dim, generator=generator)
        drawn = Features(positions, draw_phases(count, generator=generator))
        predictions = rows.labels - drawn.errors(rows, feature_map)
        trials.append(Trial(name, 0.0, *judge(predictions, rows)))
    law_name = _best(trials, (REFERENCE[0], 0.0)).law
    law = laws[law_name]
    positions = law.draw(n_candidates, dim, generator=generator).to(rows.x)
    sums = _fold_sums(rows, positions)
    bent = []
    for divergence in DIVERGENCES:
        predictions = _predict_by_law(
            rows, sums, positions, divergence, count, generator
        )
        bent.append(Trial(law_name, divergence, *judge(predictions, rows)))
    return _best(bent, (law_name, REFERENCE[1])), trials + bent


def _best(trials: list[Trial], reference: tuple[str, float]) -> Trial:
    """Take the best score, or the reference if it is not clearly worse."""
    best = max(trials, key=lambda trial: trial.score)
    for trial in trials:
        if (trial.law, trial.divergence) == reference and not is_gain(
            trial.losses, best.losses, MARGIN
        ):
            return trial
    return best


def is_gain(before: Tensor, after: Tensor, margin: float) -> bool:
    """Say whether losses of the same rows fell by more than so many standard errors."""
    gain = before - after
    return float(gain.mean()) > margin * float(gain.std()) / math.sqrt(len(gain))


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
        predicted = moments.predict(features[outside])
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


class Stage(NamedTuple):
    """A point on the path of learning: what was pursued and how far particles moved."""

    features: Features
    pursued: int = 0
    steps: int = 0  # of the particles; their shared scales moved before the first
    scaled: bool = False


def held_out_losses(
    features: Features, inside: Rows, outside: Rows, feature_map: AbstractFeatureMap
) -> Tensor:
    """Compute squared errors of held-out rows, as a user of the features would.

    The penalty is that of the lowest leave-one-out error inside. Features that have
    fitted noise there mislead it, which the rows outside see.
    """
    # Those that were pursued are the last.
    features = features.take(slice(-_MOST_JUDGED, None))
    x, labels, weights = inside.single(features.positions)
    particles = Particles(features.positions.to(x), features.phases.to(x))
    sample = Sample(x, labels, weights / weights.sum())
    objective = LeaveOneOut(sample, feature_map)
    weights = objective.tuned(particles).weights
    predictions = objective.predict(particles, outside.x.to(x), weights)
    errors = (predictions - outside.labels).square().sum(dim=-1)
    return (outside.weights * errors).double()


def furthest_gain(losses: list[Tensor], margin: float) -> int:
    """Take the stage of lowest loss, or the first if that is no clear gain."""
    best = min(range(len(losses)), key=lambda i: float(losses[i].sum()))
    return best if is_gain(losses[0], losses[best], margin) else 0


def complete(drawn: Features, found: Features, count: int) -> Features:
    """Replace the last of the drawn features by the first of those found."""
    kept = drawn.take(slice(len(drawn.phases) - count))
    found = found.take(slice(count))
    return Features(*(torch.cat(both) for both in zip(kept, found, strict=True)))


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
