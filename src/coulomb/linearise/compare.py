"""How well features of one kind or another give softmax attention, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    projections,
)
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
    Rows,
    Tokenizer,
    as_teacher,
    evaluating,
    record_texts,
)

_ROWS = 32


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
    settings = LineariseSettings(steps=steps, max_tokens=max_tokens, distil_steps=0)
    source = make_generator(seed, 0)
    parts = record_texts(teacher, tokenizer, texts, settings, generator=source)
    table = KernelTable([], {}, {})
    total = len(teacher.sites)
    with (
        evaluating(model),
        progress_bar("comparing kernels", total, visible=progress) as advance,
    ):
        layers = zip(*(part.layers() for part in parts), strict=True)
        for number, (rows, held_out) in enumerate(layers):
            source = make_generator(seed, 4, number)
            few = [part.some_queries(_ROWS, generator=source) for part in held_out]
            _, heads, _, dim = few[0].q.shape
            nothing, eye = torch.zeros(heads, 1, dim), torch.eye(dim)
            _add(table, "uniform", few, untilted(nothing, as_positive_map(DEFAULT_MAP)))
            plain = untilted(eye.expand(heads, dim, dim), CustomMap(_elu_plus_one))
            _add(table, "elu + 1", few, plain)
            softmax = as_positive_map(SOFTMAX_KERNEL_MAP)
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
