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
    AbstractBatched,
    ModelAlignment,
    NoAlignment,
    Problem,
)
from coulomb.attention.align.sampler import BatchedSampler, DriftStats
from coulomb.attention.align.scores import shuffled
from coulomb.dynamics.loop import RunSettings, init_run, run
from coulomb.features import Particles


def noise_twin(
    problem: Problem, particles: Particles, steps: int, *, seed: int
) -> Particles:
    """Let particles move as in a run, but without labels."""
    return _twin(problem, NoAlignment(), particles, steps, seed)


def label_twin(
    problem: Problem, particles: Particles, steps: int, *, seed: int
) -> Particles:
    """Let particles move as in a run, with training labels shuffled inside batches."""
    network = replace(problem.network, free={})
    mixed = replace(problem.objective, network=network, shuffle=seed)
    return _twin(problem, mixed, particles, steps, seed)


def _twin(
    problem: Problem,
    objective: AbstractBatched,
    particles: Particles,
    steps: int,
    seed: int,
) -> Particles:
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
    numbers = objective.numbers
    rows = [
        (objective.rows(before, number), objective.rows(after, number))
        for number in numbers
    ]
    pairwise = objective.score.pairwise

    def scores(shuffle: int | None) -> tuple[float, float]:
        totals = [0.0, 0.0]
        for number, both in zip(numbers, rows, strict=True):
            for index, picked in enumerate(both):
                if shuffle is not None:
                    generator = make_generator(shuffle, SHUFFLES, number)
                    picked = shuffled(picked, generator, pairwise)
                totals[index] += float(objective.score_rows(picked))
        return totals[0] / len(numbers), totals[1] / len(numbers)

    early, late = scores(None)
    mixed = [scores(number) for number in range(n_shuffles)]
    return early, late, [second - first for first, second in mixed]
