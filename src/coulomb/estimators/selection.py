"""Choices by rows that a fit has not seen: a starting law, features that are pursued.

A *law* is where the frequencies come from: how many coordinates each lives on and how
wide it spreads there. Laws do not see the labels, so the exact leave-one-out error of a
ridge regression on features of a law judges it, at the cost of one fit. Scores are the
alignment of these predictions with the labels, `<P, Y> / (|P| |Y|)`. Few rows and
features are enough to see which laws are hopeless; the others are compared on more.

Particles that are drawn by their own energies know nothing of each other: where two say
the same about the rows, one is wasted. *Pursued* features repel each other where it
matters, in their values on the data: of a pool, the next feature is the one that lowers
the squared error of a regression on all that are chosen already the most (orthogonal
least squares),

    argmax_k  |<f_k, R>|^2 / (|f_k|^2 + ridge),

with R what the earlier ones leave of the labels and f_k what they leave of feature k.
Few features gain much by it, many fit the noise of the labels.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb.dynamics.initial import Component, SpectralMixture, draw_phases
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
# What is taken unless another choice is better by 1.5 standard errors: the best of many
# noisy scores is too often the luckiest.
REFERENCE = "mixed"
CAREFUL = 1.5
LARGEST_SINGLE_ANGLE = 1e3  # rounded to 6e-5 in single precision
_MOST_JUDGED = 512
_RIDGE = 2.0  # the mean square of a feature is one
# Rows and features of the first round of laws, and how many go to the second.
_FIRST_ROWS, _FIRST_FEATURES, _SECOND_ROUND = 600, 128, 4
_MOST_FEATURES = 256


class Trial(NamedTuple):
    """One law, scored."""

    law: str
    score: float
    losses: Tensor  # (n,), weighted squared error of the scaled predictions


def single(sample: Sample, positions: Tensor) -> Sample:
    """Turn to single precision if angles with such frequencies allow it."""
    reach = float(sample.x.norm(dim=-1).max() * positions.norm(dim=-1).max())
    return sample if reach > LARGEST_SINGLE_ANGLE else sample.to(torch.float32)


def draw_from(
    law: SpectralMixture, count: int, dim: int, generator: torch.Generator
) -> Particles:
    """Draw frequencies of a law, and phases."""
    positions = law.draw(count, dim, generator=generator)
    return Particles(positions, draw_phases(count, generator=generator))


def row_weights(sample: Sample) -> Tensor:
    """Give the weights of the rows with a mean of one."""
    return sample.size * sample.probabilities


def choose_law(
    sample: Sample,
    *,
    laws: dict[str, SpectralMixture],
    feature_map: AbstractFeatureMap,
    n_features: int,
    generator: torch.Generator,
) -> tuple[str, list[Trial]]:
    """Choose a law by leave-one-out errors; only the best of few rows see all."""
    dim, count = sample.x.shape[1], min(n_features, _MOST_FEATURES)
    # Few columns make some laws the same; the first name stays.
    distinct = {laws[name].resolve(dim): name for name in reversed(laws)}
    names = [name for name in laws if name in distinct.values()]

    def tried(names: list[str], rows: Sample, count: int) -> list[Trial]:
        found = []
        for name in names:
            drawn = draw_from(laws[name], count, dim, generator)
            errors = leave_one_out_errors(drawn, rows, feature_map)
            found.append(Trial(name, *_judge(rows.labels - errors, rows)))
        return found

    dropped: list[Trial] = []
    if len(names) > _SECOND_ROUND and sample.size > 2 * _FIRST_ROWS:
        few = sample.take(thinned(torch.arange(sample.size), _FIRST_ROWS))
        first = tried(names, few, min(count, _FIRST_FEATURES))
        first.sort(key=lambda trial: (trial.law != REFERENCE, -trial.score))
        dropped = first[_SECOND_ROUND:]
        names = [trial.law for trial in first[:_SECOND_ROUND]]
    trials = tried(names, sample, count)
    best = max(trials, key=lambda trial: trial.score)
    for trial in trials:
        if trial.law == REFERENCE and not is_gain(trial.losses, best.losses, CAREFUL):
            best = trial
    return best.law, trials + dropped


def thinned(rows: Tensor, most: int) -> Tensor:
    """Keep about `most` of the rows, evenly."""
    return rows[:: -(-len(rows) // most)]


def is_gain(before: Tensor, after: Tensor, margin: float) -> bool:
    """Say whether losses of the same rows fell by more than so many standard errors."""
    gain = before - after
    return float(gain.mean()) > margin * float(gain.std()) / math.sqrt(len(gain))


def _judge(predictions: Tensor, sample: Sample) -> tuple[float, Tensor]:
    """Compare predictions with labels, whatever their scale."""
    labels, weights = sample.labels, row_weights(sample)
    column = weights.unsqueeze(-1)
    cross = (column * predictions * labels).sum()
    size = (column * predictions.square()).sum()
    norm = (column * labels.square()).sum()
    tiny = torch.finfo(labels.dtype).tiny
    score = float(cross / (size * norm).clamp_min(tiny).sqrt())
    # The best multiple of the predictions: their squared error is |Y|^2 (1 - score^2).
    scaled = cross / size.clamp_min(tiny) * predictions
    return score, weights * (scaled - labels).square().sum(dim=-1)


def leave_one_out_errors(
    features: Particles, sample: Sample, feature_map: AbstractFeatureMap
) -> Tensor:
    """Compute leave-one-out errors of the rows, by the best ridge regression."""
    sample = single(sample, features.positions)
    tuned = LeaveOneOut(sample, feature_map).tuned(features.to(sample.x.dtype))
    return tuned.errors


def mean_loss(
    features: Particles, sample: Sample, feature_map: AbstractFeatureMap
) -> float:
    """Average the squared leave-one-out errors."""
    errors = leave_one_out_errors(features, sample, feature_map)
    return float(sample.probabilities.to(errors) @ errors.square().sum(dim=-1))


def held_out_losses(
    features: Particles,
    inside: Sample,
    outside: Sample,
    feature_map: AbstractFeatureMap,
) -> Tensor:
    """Compute squared errors of held-out rows, as a user of the features would.

    The penalty is that of the lowest leave-one-out error inside. Features that have
    fitted noise there mislead it, which the rows outside see.
    """
    # Those that were pursued are the last.
    features = features.take(slice(-_MOST_JUDGED, None))
    inside = single(inside, features.positions)
    features = features.to(inside.x.dtype)
    objective = LeaveOneOut(inside, feature_map)
    weights = objective.tuned(features).weights
    predictions = objective.predict(features, outside.x.to(inside.x), weights)
    errors = (predictions - outside.labels).square().sum(dim=-1)
    return (row_weights(outside) * errors).double()


def furthest_gain(losses: list[Tensor], margin: float) -> int:
    """Take the stage of lowest loss, or the first if that is no clear gain."""
    best = min(range(len(losses)), key=lambda i: float(losses[i].sum()))
    return best if is_gain(losses[0], losses[best], margin) else 0


def complete(drawn: Particles, found: Particles, count: int) -> Particles:
    """Replace the last of the drawn features by the first of those found."""
    kept, found = drawn.take(slice(len(drawn[0]) - count)), found.take(slice(count))
    assert kept.phases is not None
    assert found.phases is not None
    return Particles(
        torch.cat([kept.positions, found.positions]),
        torch.cat([kept.phases, found.phases]),
    )


def pursue(
    features: Tensor, sample: Sample, count: int, ridge: float = _RIDGE
) -> Tensor:
    """Choose features one after the other by orthogonal least squares.

    Examples
    --------
    The second feature repeats the first, and the third says less but something new:

    >>> f = torch.tensor([[2.0, 2.1, 0.0], [0.0, 0.0, 1.0], [-2.0, -2.1, -1.0]])
    >>> y = torch.tensor([[3.0], [1.0], [-4.0]])
    >>> pursue(f, Sample(torch.zeros(3, 1), y), 2, ridge=0.1)
    tensor([1, 2])
    """
    root, share = row_weights(sample).sqrt().unsqueeze(-1), sample.probabilities
    features = root * (features - share @ features)
    labels = root * (sample.labels - share @ sample.labels)
    gram, cross = (features.mT @ features).double(), (features.mT @ labels).double()
    left = gram.diagonal().clone()
    tiny = torch.finfo(gram.dtype).eps * left.max()
    columns = gram.new_zeros(len(gram), count)
    free = torch.ones(len(gram), dtype=torch.bool)
    chosen = []
    for i in range(count):
        gain = cross.square().sum(dim=1) / (left + ridge)
        k = int(torch.where(free, gain, -1.0).argmax())
        free[k] = False
        chosen.append(k)
        size = left[k].clamp_min(tiny).sqrt()
        column = (gram[:, k] - columns[:, :i] @ columns[k, :i]) / size
        columns[:, i] = column
        cross -= torch.outer(column, cross[k] / size)
        left = (left - column.square()).clamp_min(tiny)
    return torch.tensor(chosen, dtype=torch.long)
