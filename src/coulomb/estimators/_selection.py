"""Choosing bandwidth, sparsity and temperature from held-out alignment.

A *law* is where the frequencies come from: how many coordinates each lives on and how
wide it spreads there. A *divergence* is how far, in nats, the labels may bend that law
through `exp(-beta V)`. For each pair of them and each fold, frequencies are chosen
without the fold, a ridge regression on their features predicts the fold's labels, and
the score is the alignment of all these predictions with the labels,
`<P, Y> / (|P| |Y|)`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb.dynamics.initial import Component, SpectralDraw, SpectralMixture
from coulomb.dynamics.resampling import (
    gibbs_weights,
    resamplers,
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
_RIDGE = 1.0
_MOST_FEATURES = 256
_BLOCK = 1 << 21


class Trial(NamedTuple):
    """One law and divergence, scored."""

    law: str
    divergence: float
    score: float
    losses: Tensor  # (n,), weighted squared error of the scaled predictions


def choose_law(
    x: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    laws: dict[str, SpectralMixture],
    divergences: tuple[float, ...],
    order: Tensor,
    n_candidates: int,
    n_features: int,
    generator: torch.Generator,
) -> tuple[Trial, list[Trial]]:
    """Score every law and divergence on held-out folds and choose one."""
    folds = deal_folds(order, len(x))
    weights = weights / weights.mean()
    trials: list[Trial] = []
    seen: set[tuple[Component, ...]] = set()
    for name, law in laws.items():
        parts = law.resolve(x.shape[1])
        if parts in seen:  # few columns make some laws the same
            continue
        seen.add(parts)
        drawn = law.draw_parts(n_candidates, x.shape[1], generator=generator)
        sums = _fold_sums(x, weights.unsqueeze(-1) * labels, folds, drawn)
        for divergence in divergences:
            predictions = _predict_folds(
                x,
                labels,
                weights,
                folds,
                sums,
                drawn.positions,
                divergence,
                min(n_features, _MOST_FEATURES),
                generator,
            )
            score, losses = judge(predictions, labels, weights)
            trials.append(Trial(name, divergence, score, losses))
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


def deal_folds(order: Tensor, n: int) -> Tensor:
    """Deal rows out to the folds."""
    folds = torch.empty(n, dtype=torch.long)
    folds[order] = torch.arange(n) % FOLDS
    return folds


def _fold_sums(x: Tensor, labels: Tensor, folds: Tensor, drawn: SpectralDraw) -> Tensor:
    """Compute `sum_{i in fold} q_i Y_i e^{i w.x_i}` as `(2, folds, labels, n)`."""
    member = torch.nn.functional.one_hot(folds, FOLDS).to(x)  # (n, folds)
    split = (member.unsqueeze(-1) * labels.unsqueeze(1)).flatten(1)
    positions = drawn.positions.to(x)
    parts = []
    for block in torch.split(positions, max(1, _BLOCK // len(x))):
        angles = x @ block.mT
        parts.append(torch.stack([split.mT @ angles.cos(), split.mT @ angles.sin()]))
    shape = (2, FOLDS, labels.shape[1], len(positions))
    return torch.cat(parts, dim=-1).reshape(shape)


def _predict_folds(
    x: Tensor,
    labels: Tensor,
    weights: Tensor,
    folds: Tensor,
    sums: Tensor,
    positions: Tensor,
    divergence: float,
    n_features: int,
    generator: torch.Generator,
) -> Tensor:
    """Predict every fold by a ridge regression that has not seen it."""
    whole = sums.sum(dim=1)
    beta = temperature_of_divergence(_energy(whole, weights.sum()), divergence)
    predictions = torch.empty_like(labels)
    for fold in range(FOLDS):
        inside = folds != fold
        energy = _energy(whole - sums[:, fold], weights[inside].sum())
        chosen = resamplers.build("systematic")(
            gibbs_weights(energy, beta), n_features, generator=generator
        )
        phases = 2 * math.pi * torch.rand(n_features, generator=generator).to(x)
        angles = x @ positions[chosen].to(x).mT + phases
        features = math.sqrt(2 / n_features) * angles.cos()
        predictions[~inside] = _ridge(
            features[inside], labels[inside], weights[inside], features[~inside]
        )
    return predictions


def _energy(sums: Tensor, mass: Tensor) -> Tensor:
    return -sums.square().sum(dim=(0, 1)).double() / float(mass) ** 2


def _ridge(features: Tensor, labels: Tensor, weights: Tensor, new: Tensor) -> Tensor:
    share = weights / weights.sum()
    centre, level = share @ features, share @ labels
    root = weights.sqrt().unsqueeze(-1)
    centred = root * (features - centre)
    gram = centred.mT @ centred
    gram.diagonal().add_(_RIDGE)
    factor = torch.linalg.cholesky(gram)
    right = centred.mT @ (root * (labels - level))
    return (new - centre) @ torch.cholesky_solve(right, factor) + level


def judge(predictions: Tensor, labels: Tensor, weights: Tensor) -> tuple[float, Tensor]:
    """Compare predictions with labels, whatever their scale."""
    column = weights.unsqueeze(-1)
    cross = (column * predictions * labels).sum()
    size = (column * predictions.square()).sum()
    norm = (column * labels.square()).sum()
    tiny = torch.finfo(labels.dtype).tiny
    score = float(cross / (size * norm).clamp_min(tiny).sqrt())
    # The best multiple of the predictions: their squared error is |Y|^2 (1 - score^2).
    scaled = cross / size.clamp_min(tiny) * predictions
    return score, weights * (scaled - labels).square().sum(dim=-1)
