"""Learning the particles of one attention layer from the teacher's queries and keys."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb.dynamics.preconditioned import AdamLangevin
from coulomb.energy import Hamiltonian
from coulomb.features import AbstractFeatureMap, Favor, Particles
from coulomb.interactions import Riesz
from coulomb.linearise.layers import as_positive_map
from coulomb.linearise.objectives import (
    AbstractImitation,
    RowDivergence,
    Rows,
    imitations,
)
from coulomb.linearise.settings import LineariseSettings
from coulomb.linearise.start import (
    Start,
    landmark_start,
    orthogonal_pairs,
    random_start,
)

__all__ = ["LayerFit", "fit_layer", "random_divergence"]

_SAMPLE = 3000  # tokens that k-means looks at
_HELD_ROWS = 32
_WARM_UP = 10

# A coordinate of a random particle of a map without a norm of its own.
_RANDOM_NORM = 1.5


class LayerFit(NamedTuple):
    """What was learned of a layer, with the divergence of its rows on held-out text."""

    positions: Tensor  # (heads, n_features, 2 dim + 2)
    tilt: Tensor  # (heads, dim)
    before: Tensor  # (heads,), KL at the start
    after: Tensor  # (heads,)
    random: Tensor  # (heads,), KL of orthogonal random features, as many
    steps: int


def some_queries(rows: Rows, count: int, *, generator: torch.Generator) -> Rows:
    """Keep some of the queries, the same of each sequence."""
    n = rows.q.shape[2]
    if n <= count:
        return rows
    chosen = torch.randperm(n, generator=generator)[:count]
    bias = None if rows.bias is None else rows.bias[:, :, chosen]
    return rows._replace(
        q=rows.q[:, :, chosen], query_mask=rows.query_mask[:, chosen], bias=bias
    )


def fit_layer(
    batches: Sequence[Rows],
    held_out: Sequence[Rows],
    settings: LineariseSettings,
    *,
    generator: torch.Generator,
    watch: Callable[[], None] = lambda: None,
) -> LayerFit:
    """Learn the particles of every head of a layer."""
    feature_map = as_positive_map(settings.feature_map)
    start = _start(batches, settings, feature_map, generator)
    few = [some_queries(rows, _HELD_ROWS, generator=generator) for rows in held_out]

    def judge(positions: Tensor, kind: str = settings.objective) -> Tensor:
        energy: AbstractImitation = imitations.build(
            kind, batches=few, feature_map=feature_map, tilt=start.tilt
        )
        with torch.no_grad():
            return energy.energy(Particles(positions))

    positions = start.positions
    if settings.shared:
        positions = positions[..., : positions.shape[-1] // 2].clone()
    before = judge(positions, "kl")
    best, steps = _descend(
        positions, start.tilt, feature_map, batches, judge, settings, generator, watch
    )
    after = judge(best, "kl")
    if settings.shared:
        best = torch.cat([best, best], dim=-1)
    random = random_divergence(few, settings.n_features, generator=generator)
    return LayerFit(best, start.tilt, before, after, random, steps)


def _start(
    batches: Sequence[Rows],
    settings: LineariseSettings,
    feature_map: AbstractFeatureMap,
    generator: torch.Generator,
) -> Start:
    parts = [[_flat(x, rows.key_mask) for x in (rows.q, rows.k)] for rows in batches]
    q, k = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    if q.shape[1] > _SAMPLE:
        chosen = torch.randperm(q.shape[1], generator=generator)[:_SAMPLE]
        q, k = q[:, chosen], k[:, chosen]
    if settings.from_landmarks:
        return landmark_start(q, k, settings.n_features, generator=generator)
    scale = 1.0 if feature_map.imitates_softmax else _RANDOM_NORM * q.shape[-1] ** -0.5
    return random_start(q, settings.n_features, scale=scale, generator=generator)


def _flat(x: Tensor, mask: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1, 2)[:, mask.flatten()]


def _descend(
    positions: Tensor,
    tilt: Tensor,
    feature_map: AbstractFeatureMap,
    batches: Sequence[Rows],
    judge: Callable[[Tensor], Tensor],
    settings: LineariseSettings,
    generator: torch.Generator,
    watch: Callable[[], None],
) -> tuple[Tensor, int]:
    """Move the particles; every head keeps the best it had on held-out text."""
    sampler = AdamLangevin(
        settings.step_size, inverse_temperature=settings.inverse_temperature
    )
    state = sampler.init(Particles(positions))
    best, score, idle = positions, judge(positions), 0
    order: list[int] = []
    for step in range(settings.steps):
        order = order or torch.randperm(len(batches), generator=generator).tolist()
        rows = some_queries(batches[order.pop()], settings.rows, generator=generator)
        energy = Hamiltonian(
            imitations.build(
                settings.objective, batches=[rows], feature_map=feature_map, tilt=tilt
            ),
            Riesz(0.0),
            settings.repulsion,
        )
        size = settings.step_size * ramp(step, settings.steps)
        state, _ = replace(sampler, step_size=size).step(
            state, energy, generator=generator
        )
        watch()
        if (step + 1) % settings.check_every and step + 1 < settings.steps:
            continue
        value = judge(state.particles.positions)
        gained = value < score
        best = torch.where(gained[:, None, None], state.particles.positions, best)
        score = torch.where(gained, value, score)
        idle = 0 if bool(gained.any()) else idle + 1
        if idle >= settings.patience:
            return best, step + 1
    return best, settings.steps


def ramp(step: int, steps: int) -> float:
    """Shape the steps: a short rise, then half a cosine down to nearly zero.

    Examples
    --------
    >>> [round(ramp(step, 100), 2) for step in (0, 10, 50, 99)]
    [0.1, 0.99, 0.51, 0.01]
    """
    rise = min(1.0, (step + 1) / _WARM_UP)
    return rise * (0.5 * (1 + math.cos(math.pi * step / steps)) + 0.01)


def random_divergence(
    batches: Sequence[Rows], n_features: int, *, generator: torch.Generator
) -> Tensor:
    """Measure the rows of FAVOR+ with orthogonal random features."""
    heads, dim = batches[0].q.shape[1], batches[0].q.shape[3]
    drawn = orthogonal_pairs(heads, n_features, dim, generator=generator)
    positions, tilt = (part.to(batches[0].q) for part in drawn)
    energy = RowDivergence(batches, Favor(), tilt)
    with torch.no_grad():
        return energy.energy(Particles(positions))
