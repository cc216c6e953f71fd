"""What a training run is made of: the encoder, its tokens, its random streams."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coulomb._support.streams import make_generator
from coulomb.attention.encoder.encoder import EncoderSettings, KernelEncoder
from coulomb.text.corpora import Corpus
from coulomb.text.optimiser import restore_vocabulary, trim_vocabulary
from coulomb.text.settings import TextSettings
from coulomb.text.tokens import TokenRows, Vocabulary, encode_split
from coulomb.text.variants import attention_factory

# Paths of the random streams that belong to one seed.
MODEL, ORDER, DROPOUT, WORDS, ALIGN, BATCHES = range(6)


def build_model(
    settings: TextSettings, *, vocab_size: int, n_classes: int, kind: str
) -> KernelEncoder:
    """Draw an encoder."""
    shape = EncoderSettings(
        vocab_size,
        n_classes,
        n_layers=settings.n_layers,
        width=settings.width,
        n_heads=settings.n_heads,
        ffn_width=settings.ffn_width,
        dropout=settings.dropout,
        max_length=settings.max_length,
        positions=settings.positions,
        norm=settings.norm,
        pooling=settings.pooling,
        head=kind,
    )
    generator = make_generator(settings.seed, MODEL)
    attention = attention_factory(settings, kind)
    return KernelEncoder(shape, attention, generator=generator)


@dataclass(frozen=True, eq=False)
class Setup:
    """The encoder with the vocabulary it meets, and the splits in its numbers."""

    settings: TextSettings
    corpus: Corpus
    full: KernelEncoder
    model: KernelEncoder
    kept: Tensor
    unknown: int
    rows: dict[str, TokenRows]

    def whole(self) -> dict[str, Tensor]:
        """Give the weights of the encoder over the whole vocabulary."""
        restore_vocabulary(self.model, self.full, self.kept)
        state = self.full.state_dict()
        weights = {name: x.detach().clone() for name, x in state.items()}
        if self.settings.rare_tokens:
            table = weights["token_embedding.weight"]
            other = torch.ones(len(table), dtype=torch.bool)
            other[self.kept] = False
            table[other] = table[self.kept[self.unknown]].clone()
        return weights


def set_up(corpus: Corpus, settings: TextSettings, vocabulary: Vocabulary) -> Setup:
    """Tokenise a corpus and draw the encoder."""
    names = dict.fromkeys(("train", "validation", corpus.reported_on))
    rows = {
        name: encode_split(
            vocabulary,
            corpus.split(name),
            kind=corpus.kind,
            max_length=settings.max_length,
        )
        for name in names
    }
    full = build_model(
        settings,
        vocab_size=vocabulary.size,
        n_classes=len(corpus.classes),
        kind=corpus.kind,
    )
    always = torch.tensor([vocabulary.unknown])
    if settings.rare_tokens:
        counts = torch.bincount(rows["train"].token_ids, minlength=vocabulary.size)
        seen = torch.nonzero(counts > settings.rare_tokens).flatten()
    else:
        seen = torch.cat([part.token_ids for part in rows.values()])
    model, kept = trim_vocabulary(full, torch.cat([seen, always]))
    unknown = int(torch.searchsorted(kept, always))
    numbered = {name: part.renumber(kept, unknown) for name, part in rows.items()}
    return Setup(settings, corpus, full, model, kept, unknown, numbered)


def describe_environment() -> dict[str, Any]:
    """Tell what a run was computed with."""
    import platform
    from importlib.metadata import version

    from coulomb._version import __version__

    packages = ("torch", "numpy", "scikit-learn", "tokenizers", "safetensors", "numba")
    return {
        "coulomb": __version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        **{name: version(name) for name in packages},
    }
