"""What a training run is made of: the encoder, its tokens, its random streams."""

import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from coulomb._support.checks import make_generator
from coulomb._support.errors import ParameterError
from coulomb.attention.encoder.encoder import (
    AttentionFactory,
    EncoderSettings,
    KernelEncoder,
)
from coulomb.attention.layers.baselines import Linformer, Performer, SoftmaxAttention
from coulomb.attention.layers.kernel import KernelAttention
from coulomb.dynamics.initial import Gaussian, Orthogonal
from coulomb.features import feature_maps
from coulomb.text.data import Corpus
from coulomb.text.pretrained import PretrainedEncoder, begin_encoder, choose_attention
from coulomb.text.settings import TextSettings, find_variant
from coulomb.text.tokens import TokenRows, Vocabulary, encode_split

Encoder = KernelEncoder | PretrainedEncoder
# Paths of the random streams that belong to one seed.
MODEL, ORDER, DROPOUT, WORDS, ALIGN, BATCHES = range(6)


_LAYERS, _PARAMETERS = 1000, 10**10  # beyond them a configuration is a mistake


def uses_windows(settings: TextSettings, kind: str) -> bool:
    """Say whether heads look at windows beside a token."""
    row = find_variant(settings.model.attention)
    chosen = row.phase_a in ("align", "control") and settings.align.start == "chosen"
    windows = row.phase_a == "strew" or (chosen and kind == "token")
    return windows and settings.model.positions == "learned"


def attention_factory(settings: TextSettings, kind: str) -> AttentionFactory:
    """Make what builds the attention layers of a row."""
    model = settings.model
    row = find_variant(model.attention)
    if row.layer == "softmax":
        return SoftmaxAttention
    if row.layer == "performer":
        return partial(
            Performer, n_features=model.n_features, redraw_every=model.redraw_every
        )
    if row.layer == "linformer":
        return partial(
            Linformer, max_length=model.max_length, rank=model.linformer_rank
        )
    tempered = feature_maps.build(row.feature_map).tempered
    options = {"temperature": model.feature_temperature} if tempered else {}
    feature_map = feature_maps.build(row.feature_map, **options)
    head_dim = model.width // model.n_heads
    variance = model.start_norm**2 / head_dim
    if feature_map.imitates_softmax or not variance:
        variance = 1.0
    law = (Gaussian if row.law == "gaussian" else Orthogonal)(variance)
    return partial(
        KernelAttention,
        feature_map=feature_map,
        n_features=model.n_features,
        qkv=row.qkv,
        start=law,
        tied=not uses_windows(settings, kind),
    )


def build_model(
    settings: TextSettings, *, vocab_size: int, n_classes: int, kind: str
) -> KernelEncoder:
    """Draw an encoder."""
    known = {part.name for part in fields(EncoderSettings)}
    shared = {name: x for name, x in vars(settings.model).items() if name in known}
    shape = EncoderSettings(vocab_size, n_classes, head=kind, **shared)
    asked = settings.model
    rows = vocab_size + asked.max_length + 4 * asked.width + 2 * asked.ffn_width
    if asked.n_layers > _LAYERS or asked.n_layers * rows * asked.width > _PARAMETERS:
        raise ParameterError(
            f"`n_layers`, `width`, `ffn_width`, `max_length` and the vocabulary must "
            f"make at most {_PARAMETERS:.0e} parameters in {_LAYERS} layers; got "
            f"{asked.n_layers}, {asked.width}, {asked.ffn_width}, {asked.max_length} "
            f"and {vocab_size}."
        )
    generator = make_generator(settings.train.seed, MODEL)
    attention = attention_factory(settings, kind)
    return KernelEncoder(shape, attention, generator=generator)


@dataclass(frozen=True, eq=False)
class Setup:
    """The encoder with the vocabulary it meets, and the splits in its numbers."""

    settings: TextSettings
    corpus: Corpus
    full: Encoder
    model: Encoder
    kept: Tensor
    unknown: int
    rows: dict[str, TokenRows]
    attention: str = ""
    notes: tuple[str, ...] = ()

    @property
    def scratch(self) -> KernelEncoder:
        """The encoder of a run without a pretrained one, which alone has a Phase A."""
        assert isinstance(self.model, KernelEncoder)
        return self.model

    def trimmed(self, full: Encoder) -> Encoder:
        """Copy an encoder, with the embeddings of the tokens that the splits have."""
        return trim_vocabulary(full, self.kept)[0]

    def whole(self) -> dict[str, Tensor]:
        """Give the weights of the encoder over the whole vocabulary."""
        restore_vocabulary(self.model, self.full, self.kept)
        state = self.full.state_dict()
        weights = {name: x.detach().clone() for name, x in state.items()}
        if self.settings.train.rare_tokens:
            table = weights[table_of(self.full)]
            other = torch.ones(len(table), dtype=torch.bool)
            other[self.kept] = False
            table[other] = table[self.kept[self.unknown]].clone()
        return weights


def set_up(
    corpus: Corpus,
    settings: TextSettings,
    vocabulary: Vocabulary,
    folder: Path | None = None,
) -> Setup:
    """Tokenise a corpus and draw the encoder, or load a pretrained one."""
    names = dict.fromkeys(("train", "validation", corpus.reported_on))
    kind, most = corpus.kind, settings.model.max_length
    encode = partial(encode_split, vocabulary, kind=kind, max_length=most)
    rows = {name: encode(corpus.split(name)) for name in names}
    full: Encoder
    notes: tuple[str, ...] = ()
    attention = settings.model.attention
    if settings.model.encoder:
        attention, notes = choose_attention(settings, rows["train"])
        full = begin_encoder(settings, corpus, attention, folder)
    elif corpus.kind == "number":
        raise ParameterError(
            "`target` must be classes for an encoder that is trained from scratch; got "
            "number. Give `--encoder`, or pip install 'coulomb[minilm]'."
        )
    else:
        sizes = {"vocab_size": vocabulary.size, "n_classes": len(corpus.classes)}
        full = build_model(settings, kind=kind, **sizes)
    always = torch.tensor([vocabulary.unknown])
    if settings.train.rare_tokens:
        counts = torch.bincount(rows["train"].token_ids, minlength=vocabulary.size)
        seen = torch.nonzero(counts > settings.train.rare_tokens).flatten()
    else:
        seen = torch.cat([part.token_ids for part in rows.values()])
    model, kept = trim_vocabulary(full, torch.cat([seen, always]))
    unknown = int(torch.searchsorted(kept, always))
    numbered = {name: part.renumber(kept, unknown) for name, part in rows.items()}
    told = attention, notes
    return Setup(settings, corpus, full, model, kept, unknown, numbered, *told)


def table_of(model: Encoder) -> str:
    """Name the embeddings of tokens."""
    return "token_embedding.weight" if isinstance(model, KernelEncoder) else model.table


def embeddings_of(model: Encoder) -> nn.Embedding:
    """Give the embeddings of tokens."""
    found = model.get_submodule(table_of(model).removesuffix(".weight"))
    assert isinstance(found, nn.Embedding)
    return found


def _put(model: Encoder, name: str, embeddings: nn.Embedding) -> None:
    parent, _, last = name.removesuffix(".weight").rpartition(".")
    setattr(model.get_submodule(parent), last, embeddings)


def trim_vocabulary(model: Encoder, token_ids: Tensor) -> tuple[Encoder, Tensor]:
    """Copy an encoder, with embeddings only of the tokens that occur.

    A row that no batch contains has no gradient, so Adam never moves it: training the
    copy and `restore_vocabulary` give what training the whole would, at a smaller cost
    for each step. That is not so where weight decay acts on the embeddings, which
    shrinks every row; leave them out of it, in Adam and in AdamW.

    Examples
    --------
    >>> from coulomb.attention import EncoderSettings, KernelAttention
    >>> model = KernelEncoder(EncoderSettings(100, 2), KernelAttention, generator=0)
    >>> trimmed, kept = trim_vocabulary(model, torch.tensor([7, 5, 7]))
    >>> kept, trimmed.settings.vocab_size
    (tensor([5, 7]), 2)
    """
    kept = torch.unique(token_ids)
    size, full, name = model.settings.vocab_size, embeddings_of(model), table_of(model)
    if not len(kept) or int(kept[0]) < 0 or int(kept[-1]) >= size:
        raise ParameterError(
            f"`token_ids` must hold at least one id, all from 0 to {size - 1}; got "
            f"{len(kept)} different ones."
        )
    _put(model, name, nn.Embedding(1, 1))  # so that the table is not copied
    try:
        trimmed = copy.deepcopy(model)
    finally:
        _put(model, name, full)
    weight = full.weight.detach()[kept.to(full.weight.device)]
    few = nn.Embedding(len(kept), weight.shape[1], _weight=weight)
    few.weight.requires_grad_(full.weight.requires_grad)
    _put(trimmed, name, few)
    trimmed.settings = replace(model.settings, vocab_size=len(kept))
    return trimmed, kept


def restore_vocabulary(trimmed: Encoder, model: Encoder, kept: Tensor) -> None:
    """Write what a trimmed copy learned into the whole encoder.

    Examples
    --------
    >>> from coulomb.attention import EncoderSettings, KernelAttention
    >>> model = KernelEncoder(EncoderSettings(100, 2), KernelAttention, generator=0)
    >>> trimmed, kept = trim_vocabulary(model, torch.tensor([7, 5]))
    >>> _ = trimmed.token_embedding.weight.data.fill_(3.0)
    >>> restore_vocabulary(trimmed, model, kept)
    >>> model.token_embedding.weight[7, 0].item()
    3.0
    """
    state, name = trimmed.state_dict(), table_of(model)
    whole = embeddings_of(model).weight.detach().clone()
    whole[kept.to(whole.device)] = state[name].to(whole)
    model.load_state_dict({**state, name: whole})
