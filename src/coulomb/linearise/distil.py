"""All particles together: the student's hidden states against the teacher's."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from coulomb.dynamics.langevin import AdamLangevin
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.linearise.fit import LineariseSettings, ramp
from coulomb.linearise.heads import LinearisedHeads
from coulomb.linearise.teacher import Batch, Recording, Stack
from coulomb.objectives import AbstractObjective

_HELD_BATCHES = 4


def pool(hidden: Tensor, mask: Tensor, kind: str = "mean") -> Tensor:
    """Make unit embeddings from hidden states.

    Examples
    --------
    >>> hidden = torch.tensor([[[3.0, 4.0], [9.0, 9.0]]])
    >>> pool(hidden, torch.tensor([[True, False]]))
    tensor([[0.6000, 0.8000]])
    """
    if kind == "first":
        return functional.normalize(hidden[:, 0], dim=-1)
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return functional.normalize((hidden * weights).sum(dim=1), dim=-1)


@dataclass(frozen=True, eq=False)
class Distillation(AbstractObjective):
    """Relative squared error of hidden states, and one minus the cosine of embeddings.

    `mean_l |h_l - h*_l|^2 / |h*_l|^2 + 1 - cos(e, e*)`, over real tokens.
    """

    student: Stack
    batch: Batch
    targets: Sequence[Tensor]
    pooling: str | None = "mean"

    def energy(self, particles: Particles) -> Tensor:
        targets = self.targets
        names = particle_names(self.student)
        parameters = dict(zip(names, particles.positions.unbind(), strict=True))
        with torch.no_grad():
            begun = self.student.begin(self.batch)
            mask = self.student.tokens(self.batch)
        states = functional_call(self.student, parameters, begun)
        weights = mask.unsqueeze(-1).to(targets[0].dtype)
        parts = [
            ((state - target) * weights).square().sum()
            / (target * weights).square().sum()
            for state, target in zip(states, targets, strict=True)
        ]
        total = torch.stack(parts).mean()
        if self.pooling is not None:
            ends = states[-1], targets[-1]
            ours, theirs = (pool(end, mask, self.pooling) for end in ends)
            total = total + 1 - (ours * theirs).sum(dim=-1).mean()
        return total


def particle_names(stack: Stack) -> list[str]:
    """List the parameters that hold learned particles, in the order of the blocks."""
    return [
        f"{name}.particles"
        for name, module in stack.named_modules()
        if isinstance(module, LinearisedHeads) and module.learned_heads
    ]


def distil(
    student: Stack,
    texts: Recording,
    held_out: Recording,
    settings: LineariseSettings,
    *,
    generator: torch.Generator,
    watch: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """Move the particles of all layers so that hidden states agree."""
    names = particle_names(student)
    if not names or not settings.distil_steps:
        return math.nan, math.nan
    sampler = AdamLangevin(settings.distil_step_size, decay=(0.9, 0.98))
    positions = torch.stack([student.get_parameter(n).detach() for n in names])
    state = sampler.init(Particles(positions))

    def energy(part: Recording, number: int) -> Distillation:
        batch, targets = part.batches[number], part.states(number)
        return Distillation(student, batch, targets, settings.pooling)

    count = len(held_out.batches)
    few = [
        energy(held_out, number)
        for number in range(0, count, max(1, count // _HELD_BATCHES))
    ]

    def judge(particles: Particles) -> float:
        with torch.no_grad():
            return float(torch.stack([part.energy(particles) for part in few]).mean())

    before = judge(state.particles)
    counts = torch.tensor([len(next(iter(b.values()))) for b in texts.batches])
    # Between one vote for each batch and one for each text: both kinds must be kept.
    weights = counts.double().sqrt()
    for step in range(settings.distil_steps):
        chosen = int(torch.multinomial(weights, 1, generator=generator))
        size = settings.distil_step_size * ramp(step, settings.distil_steps)
        state, _ = replace(sampler, step_size=size).step(
            state, Hamiltonian(energy(texts, chosen)), generator=generator
        )
        watch()
    after = judge(state.particles)
    best = state.particles.positions if after < before else positions
    with torch.no_grad():
        for name, part in zip(names, best, strict=True):
            student.get_parameter(name).copy_(part)
    return before, after
