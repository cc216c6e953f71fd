"""Linearise an encoder: record, fit layer by layer, distil, and say what was kept."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from time import process_time
from typing import Any

import torch
from torch import nn

from coulomb._support.checks import check_count
from coulomb._support.errors import ParameterError, unknown_name
from coulomb._support.progress import progress_bar
from coulomb._support.streams import make_generator
from coulomb.linearise.corpus import Corpus, Tokenizer, make_corpus
from coulomb.linearise.distil import distil
from coulomb.linearise.fit import LayerFit, fit_layer
from coulomb.linearise.layers import LinearisedAttention, LinearisedHeads, check_heads
from coulomb.linearise.pretrained import is_pretrained, with_linearised_heads
from coulomb.linearise.recording import (
    KeptStates,
    as_stack,
    begin_all,
    evaluating,
    record,
    text_length,
)
from coulomb.linearise.report import LineariseReport, cosine_with, measure_speed
from coulomb.linearise.settings import LineariseSettings
from coulomb.linearise.stack import FAMILIES, Stack
from coulomb.linearise.start import orthogonal_pairs

__all__ = ["linearise"]

KeepExact = int | Sequence[int | tuple[int, int]]


def linearise(
    model: nn.Module,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    feature_map: str = "softmaxfeat",
    n_features: int = 64,
    objective: str = "kl",
    keep_exact: KeepExact = (),
    seed: int = 0,
    settings: LineariseSettings | None = None,
    measure: bool = True,
    progress: bool | None = None,
    **options: Any,
) -> nn.Module:
    """Learn linear attention for a pretrained encoder, without labels.

    The particles of every head learn `KL(p_i || s_i)` between the rows of softmax and
    of linear attention, layer by layer, on what the layers of the pretrained model see
    of a few hundred texts; then all of them move together for some steps, so that
    hidden states agree. No other weight changes.

    Parameters
    ----------
    model
        A BERT, RoBERTa, DistilBERT or MPNet of transformers, with any head; or a torch
        encoder with `torch.nn.MultiheadAttention`. It is left as it is.
    tokenizer
        The tokenizer of the model, or a function of a list of texts that returns the
        keyword arguments of the model.
    texts
        Unlabelled texts like those the model will read, some hundred.
    feature_map, n_features, objective
        As in `LineariseSettings`.
    keep_exact
        Layers, or pairs of a layer and a head, that keep softmax and its cost; or how
        many heads to keep, those that are learned worst.
    seed
        Of everything that is drawn.
    settings
        More settings; the arguments here are put in.
    measure
        Whether to time both encoders for the summary.
    progress
        Show a bar; None shows it on a terminal.
    **options
        Fields of `LineariseSettings`.

    Returns
    -------
    torch.nn.Module
        The same kind of model, in evaluation mode, with `linearise_summary`.

    Examples
    --------
    >>> encoder = nn.TransformerEncoder(
    ...     nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1
    ... )
    >>> def tokenizer(texts):
    ...     return {"src": torch.ones(len(texts), 6, 8)}
    >>> fast = linearise(
    ...     encoder, tokenizer, ["a b", "c d"] * 4, steps=2, distil_steps=0,
    ...     n_features=4, measure=False,
    ... )
    >>> fast.linearise_summary.n_texts
    8
    """
    chosen = _settings(settings, feature_map, n_features, objective, options)
    check_count("seed", seed, at_least=0)
    teacher = as_stack(model)
    corpus = make_corpus(
        tokenizer,
        texts,
        max_tokens=chosen.max_tokens,
        max_length=chosen.max_length or text_length(model, tokenizer),
        batch_tokens=chosen.batch_tokens,
        long_share=chosen.long_share,
        generator=make_generator(seed, 0),
    )
    begun = process_time()
    total = len(teacher.sites) * chosen.steps + chosen.distil_steps
    with (
        evaluating(model),
        progress_bar("learning heads", total, visible=progress) as advance,
    ):
        job = _Job(teacher, corpus, chosen, seed, advance)
        fits = job.fit()
        exact = _exact_heads(teacher, keep_exact, fits)
        student = job.student(fits, exact)
        learned = process_time() - begun
        report = job.report(student, fits, exact)
        begun = process_time()
        job.distil(student)
        report.seconds = learned + process_time() - begun
        report.cosine = cosine_with(job.held_out, student, chosen.pooling)
        if measure:
            report.speed = measure_speed(teacher, student, corpus.fit[-1])
    fast: Any = student.model
    fast.linearise_summary = report
    return fast


def _settings(
    settings: LineariseSettings | None,
    feature_map: str,
    n_features: int,
    objective: str,
    options: dict[str, Any],
) -> LineariseSettings:
    known = [f.name for f in fields(LineariseSettings)]
    for name in options:
        if name not in known:
            raise unknown_name("options", name, known)
    given: dict[str, Any] = {
        "feature_map": feature_map,
        "n_features": n_features,
        "objective": objective,
    }
    if settings is None:
        return LineariseSettings(**given, **options)
    usual = LineariseSettings()
    changed = {n: v for n, v in given.items() if v != getattr(usual, n)}
    return replace(settings, **changed, **options)


def _exact_heads(
    teacher: Stack, keep_exact: KeepExact, fits: list[LayerFit]
) -> list[tuple[int, ...]]:
    heads: list[list[int]] = [[] for _ in fits]
    if isinstance(keep_exact, int):
        check_count("keep_exact", keep_exact, at_least=0)
        worst = torch.stack([fit.after for fit in fits]).flatten()
        count = min(keep_exact, len(worst))
        width = len(fits[0].after)
        keep_exact = [
            (i // width, i % width) for i in worst.topk(count).indices.tolist()
        ]
    for entry in keep_exact:
        layer, head = entry if isinstance(entry, tuple) else (entry, None)
        if not 0 <= layer < len(fits):
            raise ParameterError(
                f"`keep_exact` must name layers from 0 to {len(fits) - 1}; got {layer}."
            )
        every = range(teacher.sites[layer].num_heads)
        heads[layer] += list(every) if head is None else [head]
    return [
        check_heads(part, site.num_heads)
        for part, site in zip(heads, teacher.sites, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class _Job:
    teacher: Stack
    corpus: Corpus
    settings: LineariseSettings
    seed: int
    advance: Callable[..., None]

    @cached_property
    def texts(self) -> KeptStates:
        return KeptStates(self.teacher, self.corpus.fit)

    @cached_property
    def held_out(self) -> KeptStates:
        return KeptStates(self.teacher, self.corpus.held_out)

    def fit(self) -> list[LayerFit]:
        """Learn layer by layer; only the hidden states between two are kept."""
        fit = begin_all(self.teacher, self.corpus.fit)
        held = begin_all(self.teacher, self.corpus.held_out)
        fits = []
        for number in range(len(self.teacher.sites)):
            rows, fit = record(self.teacher, number, fit)
            held_rows, held = record(self.teacher, number, held)
            if self.settings.distil_steps:
                self.texts.add(fit)
            self.held_out.add(held)
            note = f"layer {number}"
            fits.append(
                fit_layer(
                    rows,
                    held_rows,
                    self.settings,
                    generator=make_generator(self.seed, 1, number),
                    watch=partial(self.advance, note=note),
                )
            )
            self.advance(self.settings.steps - fits[-1].steps, note=note)
        return fits

    def student(self, fits: list[LayerFit], exact: list[tuple[int, ...]]) -> Stack:
        stack = _copy_with_heads(self.teacher, self.settings, exact)
        for heads, fit in zip(linearised_heads(stack.model), fits, strict=True):
            with torch.no_grad():
                heads.particles.copy_(fit.positions)
                heads.tilt.copy_(fit.tilt)
        return stack

    def report(
        self, student: Stack, fits: list[LayerFit], exact: list[tuple[int, ...]]
    ) -> LineariseReport:
        report = LineariseReport(
            self.settings.feature_map,
            self.settings.n_features,
            [list(heads) for heads in exact],
            before=[float(fit.before.mean()) for fit in fits],
            after=[float(fit.after.mean()) for fit in fits],
            random=[float(fit.random.mean()) for fit in fits],
            head_divergence=[fit.after.tolist() for fit in fits],
            n_texts=self.corpus.n_texts,
            n_held_out=self.corpus.n_held_out,
        )
        pooling = self.settings.pooling
        report.cosine_start = cosine_with(self.held_out, student, pooling)
        random = random_student(self.teacher, self.settings.n_features, self.seed)
        report.cosine_random = cosine_with(self.held_out, random, pooling)
        return report

    def distil(self, student: Stack) -> None:
        distil(
            student,
            self.texts,
            self.held_out,
            self.settings,
            generator=make_generator(self.seed, 2),
            watch=partial(self.advance, note="all layers"),
        )


def linearised_heads(model: nn.Module) -> list[LinearisedHeads]:
    """List the learned heads of a model, in the order of its layers.

    Parameters
    ----------
    model
        A linearised model.

    Returns
    -------
    list of LinearisedHeads
        One entry for each layer.
    """
    return [m for m in model.modules() if isinstance(m, LinearisedHeads)]


def random_student(teacher: Stack, n_features: int, seed: int) -> Stack:
    """Copy an encoder with FAVOR+ and orthogonal random features: the control."""
    settings = LineariseSettings(n_features, "favor")
    stack = _copy_with_heads(teacher, settings, [()] * len(teacher.sites))
    source = make_generator(seed, 3)
    for heads in linearised_heads(stack.model):
        sizes = heads.num_heads, n_features, heads.head_dim
        drawn = orthogonal_pairs(*sizes, generator=source)
        with torch.no_grad():
            heads.particles.copy_(drawn.positions)
            heads.tilt.copy_(drawn.tilt)
    return stack


def _copy_with_heads(
    teacher: Stack, settings: LineariseSettings, exact: Sequence[Sequence[int]]
) -> Stack:
    model = teacher.model
    kind: dict[str, Any] = {
        "n_features": settings.n_features,
        "feature_map": settings.feature_map,
    }
    if is_pretrained(model):
        return Stack(with_linearised_heads(model, exact_heads=exact, **kind).eval())
    fast = copy.deepcopy(model)
    for site, heads in zip(Stack(fast).sites, exact, strict=True):
        if not isinstance(site.module, nn.MultiheadAttention):
            raise ParameterError(
                f"`model` must have softmax attention, torch's or that of "
                f"{', '.join(FAMILIES)}; got {type(site.module).__name__}."
            )
        layer = LinearisedAttention(site.module, exact_heads=heads, **kind)
        fast.set_submodule(site.name, layer)
    for module in fast.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # it was decided for another layer
    return Stack(fast.eval())
