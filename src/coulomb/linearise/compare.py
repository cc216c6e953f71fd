"""What is kept of softmax attention: the report of a model, a table of kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support.checks import check_count
from coulomb._support.progress import progress_bar
from coulomb._support.streams import make_generator
from coulomb.features import (
    DEFAULT_MAP,
    SOFTMAX_KERNEL_MAP,
    CustomMap,
    Particles,
    as_feature_map,
    projections,
)
from coulomb.linearise.distil import pool
from coulomb.linearise.fit import (
    LineariseSettings,
    OutputError,
    RowDivergence,
    fit_layer,
    orthogonal_favor,
    untilted,
)
from coulomb.linearise.heads import HeadParticles, as_positive_map
from coulomb.linearise.teacher import (
    Batch,
    Recording,
    Rows,
    Stack,
    Tokenizer,
    as_teacher,
    evaluating,
    make_corpus,
)

_ROWS = 32


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
def cosine_with(texts: Recording, student: Stack, pooling: str | None) -> float:
    """Average the cosine of an encoder's embeddings with the teacher's, over texts."""
    cosines: list[Tensor] = []
    for number, batch in enumerate(texts.batches):
        mask = student.tokens(batch)
        ends = [texts.states(number)[-1], student(*student.begin(batch))[-1]]
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
    stacks = teacher, student
    starts = [stack.begin(first) for stack in stacks]
    given = [(*call.arguments, *call.keywords.values()) for _, call in starts]
    if any(isinstance(value, Tensor) for values in given for value in values):
        return {}
    speed = {}
    for length in lengths:
        places = torch.arange(length, device=starts[0][0].device) % count
        best = [float("inf"), float("inf")]
        for turn in range(repeats + 1):
            for which, (hidden, call) in enumerate(starts):
                tiled = hidden.index_select(int(teacher.batch_first), places)
                begun = clock()
                stacks[which](tiled, call)
                if turn:  # the first warms up
                    best[which] = min(best[which], clock() - begun)
        speed[length] = (best[0], best[1])
    return speed


@dataclass
class KernelTable:
    """Errors against softmax attention on held-out text.

    Parameters
    ----------
    methods
        Names of the kinds of features, with their number where they have one.
    divergence
        For each method, KL of attention rows by layer and head.
    output_error
        For each method, relative error of attention's output by layer and head.
    """

    methods: list[str]
    divergence: dict[str, list[list[float]]]
    output_error: dict[str, list[list[float]]]

    def by_layer(self, method: str, which: str = "divergence") -> list[float]:
        """Average over the heads.

        Parameters
        ----------
        method
            One of `methods`.
        which
            "divergence" or "output_error".

        Returns
        -------
        list of float
            One number for each layer.
        """
        layers = getattr(self, which)[method]
        return [sum(heads) / len(heads) for heads in layers]

    def worst_heads(self, method: str, count: int) -> list[tuple[int, int, float]]:
        """List the heads best kept exact: those with the largest divergence.

        Parameters
        ----------
        method
            One of `methods`.
        count
            How many.

        Returns
        -------
        list
            Layer, head and divergence, the worst first.
        """
        heads = [
            (layer, head, value)
            for layer, values in enumerate(self.divergence[method])
            for head, value in enumerate(values)
        ]
        return sorted(heads, key=lambda entry: -entry[2])[:count]

    def as_dict(self) -> dict[str, Any]:
        """Give the numbers as plain data for JSON."""
        return dict(vars(self))


def kernel_table(
    model: nn.Module,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    n_features: Sequence[int] = (16, 64, 256),
    steps: int = 100,
    max_tokens: int = 12_000,
    seed: int = 0,
    progress: bool | None = None,
) -> KernelTable:
    """Compare learned, random and fixed features with softmax attention.

    Real queries and keys of the model are recorded on the texts. Learned particles and
    random features are judged on a tenth of the texts that is held out.

    Parameters
    ----------
    model, tokenizer, texts
        As in `linearise`.
    n_features
        Numbers of features to compare.
    steps
        Steps of the learned particles in each layer.
    max_tokens
        Tokens that are recorded.
    seed
        Of everything that is drawn.
    progress
        Show a bar; None shows it on a terminal.

    Returns
    -------
    KernelTable
        Errors by method, layer and head.
    """
    counts = [check_count("n_features", n) for n in n_features]
    teacher = as_teacher(model)
    settings = LineariseSettings(steps=steps, max_tokens=max_tokens)
    source = make_generator(seed, 0)
    corpus = make_corpus(model, tokenizer, texts, settings, generator=source)
    table = KernelTable([], {}, {})
    total = len(teacher.sites)
    with (
        evaluating(model),
        progress_bar("comparing kernels", total, visible=progress) as advance,
    ):
        parts = [Recording(teacher, part, 0).layers() for part in corpus[:2]]
        for number, (rows, held_out) in enumerate(zip(*parts, strict=True)):
            source = make_generator(seed, 4, number)
            few = [part.some_queries(_ROWS, generator=source) for part in held_out]
            _, heads, _, dim = few[0].q.shape
            nothing, eye = torch.zeros(heads, 1, dim), torch.eye(dim)
            _add(table, "uniform", few, untilted(nothing, as_positive_map(DEFAULT_MAP)))
            plain = untilted(eye.expand(heads, dim, dim), CustomMap(_elu_plus_one))
            _add(table, "elu + 1", few, plain)
            softmax = as_feature_map(SOFTMAX_KERNEL_MAP)
            for count in counts:
                normal = torch.randn(heads, count, dim, generator=source)
                _add(table, f"FAVOR+ {count}", few, untilted(normal, softmax))
                drawn = orthogonal_favor(heads, count, dim, generator=source)
                _add(table, f"orthogonal {count}", few, drawn)
                chosen = replace(settings, n_features=count)
                again = make_generator(seed, 1, number)
                fit = fit_layer(rows, held_out, chosen, generator=again)
                _add(table, f"learned {count}", few, fit.particles)
            advance(note=f"layer {number}")
    table.methods = list(table.divergence)
    return table


def _add(
    table: KernelTable, method: str, few: list[Rows], particles: HeadParticles
) -> None:
    kl = RowDivergence.measure(few, particles)
    error = OutputError.measure(few, particles).sqrt()
    table.divergence.setdefault(method, []).append(kl.tolist())
    table.output_error.setdefault(method, []).append(error.tolist())


def _elu_plus_one(x: Tensor, particles: Particles) -> Tensor:
    return 1 + functional.elu(projections(x, particles))
