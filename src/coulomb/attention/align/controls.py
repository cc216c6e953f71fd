"""Controls of Phase A: runs without labels, with wrong labels, scores of wrong labels.

Nothing here changes the model, or the run that is compared.
"""

from dataclasses import replace

import torch
from torch import Tensor

from coulomb._support.streams import make_generator
from coulomb.attention.align.problem import (
    MOVES,
    SHUFFLES,
    ModelAlignment,
    NoAlignment,
    Problem,
)
from coulomb.attention.align.sampler import BatchedSampler, DriftStats
from coulomb.attention.align.scores import Rows, shuffled
from coulomb.dynamics.loop import RunSettings, init_run, run
from coulomb.features import Particles
from coulomb.objectives import AbstractObjective


def run_twin(
    problem: Problem,
    particles: Particles,
    steps: int,
    *,
    seed: int,
    shuffled_labels: bool = False,
) -> Particles:
    """Let particles move as in a run, but without labels.

    Or with training labels that are shuffled inside batches.
    """
    objective: AbstractObjective = NoAlignment()
    if shuffled_labels:
        network = replace(problem.network, free={})
        objective = replace(problem.objective, network=network, shuffle=seed)
    sampler = BatchedSampler(problem, DriftStats.of(particles.positions))
    begun = init_run(sampler, particles, generator=make_generator(seed, MOVES))
    settings = RunSettings(steps, record_every=max(1, steps))
    return run(begun, sampler, problem.energy(objective), settings).particles


def label_cosines(
    objective: ModelAlignment, particles: Particles, *, n_shuffles: int = 3
) -> Tensor:
    """Compare gradients with true and with shuffled labels."""
    true = objective.field(particles).gradient.flatten(-2)
    cosines = []
    for number in range(n_shuffles):
        mixed = replace(objective, shuffle=number).field(particles).gradient
        cosines.append(torch.cosine_similarity(true, mixed.flatten(-2), dim=-1))
    return torch.stack(cosines).mean(dim=0)


def shuffled_gains(
    objective: ModelAlignment, before: Particles, after: Particles, n_shuffles: int
) -> tuple[float, float, list[float]]:
    """Score both ends of a run with true labels, and its gain with each permutation."""
    numbers, pairwise = objective.numbers, objective.score.pairwise
    ends = [
        [objective.rows(end, number) for number in numbers] for end in (before, after)
    ]

    def score(rows: list[list[Rows]], shuffle: int | None) -> float:
        total = 0.0
        for number, picked in zip(numbers, rows, strict=True):
            if shuffle is not None:
                generator = make_generator(shuffle, SHUFFLES, number)
                picked = shuffled(picked, generator, pairwise)
            total += float(objective.score_rows(picked))
        return total / len(numbers)

    early, late = (score(rows, None) for rows in ends)
    gains = [score(ends[1], n) - score(ends[0], n) for n in range(n_shuffles)]
    return early, late, gains
