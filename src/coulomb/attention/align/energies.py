"""Energies of Phase A: minus a score of a model's outputs, as a function of particles.

A *view* says which outputs are scored: pooled sequences, labelled tokens, every layer,
every head. The dynamics is the estimators'; to it, these are objectives like others.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coulomb._support.errors import ParameterError, unknown_name
from coulomb._support.streams import make_generator
from coulomb.attention.align.batches import Batch, as_batch
from coulomb.attention.align.model_as_function import Network
from coulomb.attention.align.scores import AbstractScore, Rows, shuffled
from coulomb.features import Particles
from coulomb.objectives import AbstractObjective, Field

IGNORED = -100  # the label of tokens that have none, as in torch's cross-entropy
LEVELS = ("sequence", "token", "layer", "head")

Pool = str | Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class View:
    """Which output vectors are compared."""

    level: str = "sequence"
    pool: Pool = "mean"

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise unknown_name("level", self.level, LEVELS)
        if isinstance(self.pool, str) and self.pool not in ("mean", "cls"):
            raise unknown_name("pool", self.pool, ("mean", "cls"))

    def rows(
        self, outputs: Sequence[Tensor], batch: Batch, heads: int, *, pairwise: bool
    ) -> list[Rows]:
        """Pick the vectors out of a batch's outputs."""
        every = self.level in ("layer", "head")
        chosen = outputs if every else outputs[-1:]
        picked = [self._pick(out, batch, pairwise) for out in chosen]
        if self.level != "head":
            return picked
        return [
            rows._replace(features=_by_head(rows.features, heads)) for rows in picked
        ]

    def _pick(self, out: Tensor, batch: Batch, pairwise: bool) -> Rows:
        labels, mask = batch.labels, batch.key_mask
        by_token = self.level == "token" or (
            self.level != "sequence"
            and (labels.ndim == 3 or (labels.ndim == 2 and not _real(labels)))
        )
        if by_token:
            self._check_rows(labels, out, ("batch", "length"))
            if mask is None:
                mask = torch.ones(out.shape[:2], dtype=torch.bool, device=out.device)
            if pairwise:
                share = mask.to(out) / mask.sum(dim=-1, keepdim=True).clamp_min(1)
                return Rows(out, labels, share)
            kept = mask if _real(labels) else mask & (labels != IGNORED)
            return Rows(out[kept], labels[kept])
        self._check_rows(labels, out, ("batch",))
        return Rows(self._pooled(out, mask), labels)

    def _pooled(self, out: Tensor, mask: Tensor | None) -> Tensor:
        if out.ndim == 2:
            return out
        if callable(self.pool):
            return self.pool(out, mask)
        if self.pool == "cls":
            return out[:, 0]
        if mask is None:
            return out.mean(dim=1)
        weight = mask.to(out).unsqueeze(-1)
        return (weight * out).sum(dim=1) / weight.sum(dim=1).clamp_min(1)

    def _check_rows(self, labels: Tensor, out: Tensor, axes: tuple[str, ...]) -> None:
        n = len(axes)
        fits = labels.ndim >= n and out.ndim > n and labels.shape[:n] == out.shape[:n]
        if not fits:
            raise ParameterError(
                f"`labels` must begin with the axes ({', '.join(axes)}) of the outputs "
                f"at level {self.level!r}; got {tuple(labels.shape)} and outputs "
                f"{tuple(out.shape)}."
            )


class AbstractBatched(AbstractObjective):
    """An energy that is a mean over batches, of which a step sees one."""

    @abstractmethod
    def at(self, number: int) -> "AbstractBatched":
        """Give the energy of one batch."""

    @abstractmethod
    def forces(self, particles: Particles) -> tuple[Field, dict[str, Tensor]]:
        """Evaluate what moves the particles, and the other parameters that may move."""

    def field(self, particles: Particles) -> Field:
        return self.forces(particles)[0]


@dataclass(frozen=True, eq=False)
class ModelAlignment(AbstractBatched):
    """Minus the mean score of a model's outputs over batches.

    `E(w) = -(1/B) sum_b mean_layers A(F_b(w), Y_b)`, a number shared by all groups
    `(layers, heads)` of particles.
    """

    network: Network
    score: AbstractScore
    view: View
    batches: Sequence[Any]
    numbers: tuple[int, ...]
    shuffle: int | None = None

    def energy(self, particles: Particles) -> Tensor:
        parts = [self.score_batch(particles, number) for number in self.numbers]
        return -torch.stack(parts).mean()

    def score_batch(self, particles: Particles, number: int) -> Tensor:
        """Score one batch."""
        return self.score_rows(self.rows(particles, number))

    def rows(self, particles: Particles, number: int) -> list[Rows]:
        """Evaluate the model on one batch and pick what is compared."""
        batch = as_batch(self.batches[number])
        outputs = self.network(particles.positions, batch)
        heads = particles.positions.shape[1]
        pairwise = self.score.pairwise
        picked = self.view.rows(outputs, batch, heads, pairwise=pairwise)
        if self.shuffle is not None:
            picked = shuffled(picked, make_generator(self.shuffle, number), pairwise)
        return picked

    def score_rows(self, picked: Sequence[Rows]) -> Tensor:
        """Average the score over layers and groups."""
        values = []
        for rows in picked:
            if rows.features.shape[-2] < 2:
                values.append(0 * rows.features.sum())
            else:
                values.append(self.score(rows).mean())
        return torch.stack(values).mean()

    def at(self, number: int) -> "ModelAlignment":
        return replace(self, numbers=(number,))

    def on(self, batches: Sequence[Any]) -> "ModelAlignment":
        """Give the same energy on other data."""
        return replace(self, batches=batches, numbers=tuple(range(len(batches))))

    def forces(self, particles: Particles) -> tuple[Field, dict[str, Tensor]]:
        free = {
            name: value.detach().requires_grad_(True)
            for name, value in self.network.free.items()
        }
        objective = replace(self, network=replace(self.network, free=free))
        positions = particles.positions.detach().requires_grad_(True)
        moving = particles._replace(positions=positions)
        leaves = (positions, *free.values())
        sums = [torch.zeros_like(leaf) for leaf in leaves]
        energy = positions.new_zeros(())
        with torch.enable_grad():
            for number in self.numbers:
                part = -objective.score_batch(moving, number) / len(self.numbers)
                grads = torch.autograd.grad(part, leaves, allow_unused=True)
                for total, grad in zip(sums, grads, strict=True):
                    if grad is not None:
                        total += grad
                energy += part.detach()
        potential = energy.expand(positions.shape[:-1])
        field = Field(potential, particles.n_particles * sums[0])
        return field, dict(zip(free, sums[1:], strict=True))


@dataclass(frozen=True, eq=False)
class NoAlignment(AbstractBatched):
    """No attraction at all: what is left is repulsion and noise.

    Examples
    --------
    >>> NoAlignment().energy(Particles(torch.ones(2, 3, 1)))
    tensor([0., 0.])
    """

    def energy(self, particles: Particles) -> Tensor:
        return particles.positions.new_zeros(particles.positions.shape[:-2])

    def at(self, number: int) -> "NoAlignment":
        return self

    def forces(self, particles: Particles) -> tuple[Field, dict[str, Tensor]]:
        still = torch.zeros_like(particles.positions)
        return Field(still[..., 0], still), {}


@dataclass(frozen=True, eq=False)
class Evaluated(AbstractObjective):
    """An energy that was evaluated where the particles are."""

    known: Field

    def energy(self, particles: Particles) -> Tensor:
        return self.known.potential.mean(dim=-1)

    def field(self, particles: Particles) -> Field:
        return self.known


def _real(labels: Tensor) -> bool:
    return labels.is_floating_point()


def _by_head(features: Tensor, heads: int) -> Tensor:
    split = features.reshape(*features.shape[:-1], heads, -1)
    return split.movedim(-2, 0)  # (heads, *groups, n, dim)
