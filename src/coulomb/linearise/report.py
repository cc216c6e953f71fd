"""What was kept: the summary a linearised model carries."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from coulomb.linearise.distil import pool
from coulomb.linearise.recording import KeptStates
from coulomb.linearise.stack import Batch, Stack

__all__ = ["LineariseReport", "cosine_with", "measure_speed"]


@dataclass
class LineariseReport:
    """What was kept of an encoder, measured on text its particles were not moved by.

    Parameters
    ----------
    feature_map, n_features
        Of every head.
    exact_heads
        For each layer, the heads that keep softmax.
    before, after, random
        For each layer, the mean KL of attention rows from the teacher's: at the start,
        learned, and of FAVOR+ with as many orthogonal random features.
    head_divergence
        For each layer and head, the KL after learning.
    cosine, cosine_start, cosine_random
        Mean cosine of embeddings with the teacher's: learned, at the start, and random.
    n_texts, n_held_out
        Texts that were drawn, and those of them that were only looked at.
    seconds
        Processor time of learning.
    speed
        For each length, seconds of the softmax encoder and of this one.
    """

    feature_map: str
    n_features: int
    exact_heads: list[list[int]]
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    random: list[float] = field(default_factory=list)
    head_divergence: list[list[float]] = field(default_factory=list)
    cosine: float = float("nan")
    cosine_start: float = float("nan")
    cosine_random: float = float("nan")
    n_texts: int = 0
    n_held_out: int = 0
    seconds: float = 0.0
    speed: dict[int, tuple[float, float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Give the numbers as plain data for JSON."""
        data = dict(vars(self))
        data["speed"] = {str(n): list(pair) for n, pair in self.speed.items()}
        return data

    def __str__(self) -> str:
        exact = sum(map(len, self.exact_heads))
        lines = [
            f"{self.feature_map}, {self.n_features} features per head"
            + (f", {exact} heads exact" if exact else "")
            + f"; {self.n_texts} texts ({self.n_held_out} held out), "
            f"{self.seconds:.0f} s of processor time",
            f"cosine with the softmax embedding, held out: {self.cosine:.4f} "
            f"(start {self.cosine_start:.4f}, random features "
            f"{self.cosine_random:.4f})",
            "layer   KL start   learned    random",
        ]
        rows = zip(self.before, self.after, self.random, strict=True)
        for number, (before, after, random) in enumerate(rows):
            lines.append(f"{number:5d}{before:11.4f}{after:10.4f}{random:10.4f}")
        for length, (slow, fast) in self.speed.items():
            lines.append(
                f"{length:5d} tokens: {1e3 * slow:.0f} ms with softmax, "
                f"{1e3 * fast:.0f} ms linear, {slow / fast:.2f} times as fast"
            )
        return "\n".join(lines)


@torch.no_grad()
def cosine_with(texts: KeptStates, student: Stack, pooling: str | None) -> float:
    """Average the cosine of an encoder's embeddings with the teacher's, over texts."""
    cosines: list[Tensor] = []
    for number, batch in enumerate(texts.batches):
        mask = student.tokens(batch)
        ends = [texts.of(number)[-1], student(*student.begin(batch))[-1]]
        if not student.batch_first:
            ends = [end.transpose(0, 1) for end in ends]
        theirs, ours = (pool(end, mask, pooling or "mean") for end in ends)
        cosines.append((theirs * ours).sum(dim=-1))
    return float(torch.cat(cosines).mean())


@torch.no_grad()
def measure_speed(
    teacher: Stack,
    student: Stack,
    batch: Batch,
    lengths: tuple[int, ...] = (128, 512, 2048),
    *,
    repeats: int = 3,
    clock: Callable[[], float] = perf_counter,
) -> dict[int, tuple[float, float]]:
    """Time the blocks of both encoders on one text without padding.

    Hidden states of a real text are tiled to the length, so that lengths beyond the
    positions of the model can be measured too. The two take turns; the best of the
    repeats counts.
    """
    first = {name: value[:1] for name, value in batch.items()}
    count = int(teacher.tokens(first).sum())
    first = {name: value[:, :count] for name, value in first.items()}
    starts = [stack.begin(first) for stack in (teacher, student)]
    given = [(*call.arguments, *call.keywords.values()) for _, call in starts]
    if any(isinstance(value, Tensor) for values in given for value in values):
        return {}
    speed = {}
    for length in lengths:
        best = [float("inf"), float("inf")]
        for turn in range(repeats + 1):
            for which, stack in enumerate((teacher, student)):
                hidden, call = starts[which]
                axis = 1 if stack.batch_first else 0
                times = [1, 1, 1]
                times[axis] = -(-length // count)
                tiled = hidden.repeat(*times).narrow(axis, 0, length)
                begun = clock()
                stack(tiled, call)
                if turn:  # the first warms up
                    best[which] = min(best[which], clock() - begun)
        speed[length] = (best[0], best[1])
    return speed
