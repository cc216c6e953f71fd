"""How well features of one kind or another give softmax attention, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support.checks import check_count
from coulomb._support.progress import progress_bar
from coulomb._support.streams import make_generator
from coulomb.features import (
    AbstractFeatureMap,
    CustomMap,
    Favor,
    Particles,
    projections,
)
from coulomb.linearise.corpus import Tokenizer, make_corpus
from coulomb.linearise.fit import fit_layer, some_queries
from coulomb.linearise.layers import as_positive_map
from coulomb.linearise.objectives import OutputError, RowDivergence, Rows
from coulomb.linearise.pairs import join_pairs, mean_key_row
from coulomb.linearise.recording import (
    as_stack,
    begin_all,
    evaluating,
    record,
    text_length,
)
from coulomb.linearise.settings import LineariseSettings
from coulomb.linearise.start import orthogonal_pairs

__all__ = ["KernelTable", "kernel_table"]

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
    teacher = as_stack(model)
    settings = LineariseSettings(steps=steps, max_tokens=max_tokens)
    corpus = make_corpus(
        tokenizer,
        texts,
        max_tokens=max_tokens,
        max_length=text_length(model, tokenizer),
        batch_tokens=settings.batch_tokens,
        long_share=settings.long_share,
        generator=make_generator(seed, 0),
    )
    table = KernelTable([], {}, {})
    total = len(teacher.sites)
    with (
        evaluating(model),
        progress_bar("comparing kernels", total, visible=progress) as advance,
    ):
        fit, held = (begin_all(teacher, part) for part in corpus[:2])
        for number in range(total):
            rows, fit = record(teacher, number, fit)
            held_rows, held = record(teacher, number, held)
            _compare_layer(table, rows, held_rows, counts, settings, seed, number)
            advance(note=f"layer {number}")
    table.methods = list(table.divergence)
    return table


def _compare_layer(
    table: KernelTable,
    rows: list[Rows],
    held_out: list[Rows],
    counts: list[int],
    settings: LineariseSettings,
    seed: int,
    number: int,
) -> None:
    source = make_generator(seed, 4, number)
    few = [some_queries(part, _ROWS, generator=source) for part in held_out]
    heads, dim = few[0].q.shape[1], few[0].q.shape[3]

    def add(name: str, *features: Any) -> None:
        kl, error = _errors(few, *features)
        table.divergence.setdefault(name, []).append(kl.tolist())
        table.output_error.setdefault(name, []).append(error.tolist())

    def fixed(rows: Tensor, feature_map: AbstractFeatureMap, name: str) -> None:
        offset = rows.new_zeros(rows.shape[:2])
        positions = join_pairs(rows, offset, rows, offset)
        add(name, positions, -mean_key_row(positions), feature_map)

    fixed(few[0].q.new_zeros(heads, 1, dim), as_positive_map("elu"), "uniform")
    eye = torch.eye(dim).to(few[0].q).expand(heads, dim, dim)
    fixed(eye, CustomMap(_elu_plus_one), "elu + 1")
    for count in counts:
        normal = torch.randn(heads, count, dim, generator=source)
        fixed(normal.to(eye), Favor(), f"FAVOR+ {count}")
        drawn = orthogonal_pairs(heads, count, dim, generator=source)
        add(f"orthogonal {count}", *(part.to(eye) for part in drawn), Favor())
        learned = fit_layer(
            rows,
            held_out,
            LineariseSettings(count, steps=settings.steps),
            generator=make_generator(seed, 1, number),
        )
        feature_map = as_positive_map(settings.feature_map)
        add(f"learned {count}", learned.positions, learned.tilt, feature_map)


def _errors(
    few: list[Rows], positions: Tensor, tilt: Tensor, feature_map: AbstractFeatureMap
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        kl = RowDivergence(few, feature_map, tilt).energy(Particles(positions))
        squared = OutputError(few, feature_map, tilt).energy(Particles(positions))
    return kl, squared.sqrt()


def _elu_plus_one(x: Tensor, particles: Particles) -> Tensor:
    return 1 + functional.elu(projections(x, particles))
