"""Texts as batches of similar length, with long ones among them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coulomb._support.errors import ParameterError, ParameterTypeError

__all__ = ["Corpus", "make_corpus"]

Batch = Mapping[str, Tensor]
Tokenizer = Callable[..., Any]

# A text of a plain function's tokenizer has about one token for so many characters.
_CHARACTERS = 4


class Corpus(NamedTuple):
    """Batches to learn from, and batches to look at."""

    fit: list[Batch]
    held_out: list[Batch]
    n_texts: int
    n_held_out: int


def make_corpus(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    max_tokens: int,
    max_length: int,
    batch_tokens: int,
    long_share: float,
    generator: torch.Generator,
) -> Corpus:
    """Draw texts, hold a tenth out, join some to long ones, and cut into batches."""
    texts = check_texts(texts)
    order = torch.randperm(len(texts), generator=generator).tolist()
    sizes = _sizes(tokenizer, [texts[i] for i in order], max_length)
    kept: list[tuple[str, int]] = []
    total = 0
    for i, size in zip(order, sizes, strict=True):
        if kept and total + size > max_tokens:
            continue
        kept.append((texts[i], size))
        total += size
    if len(kept) < 4:
        raise ParameterError(
            "`max_tokens` must have room for four texts at least; got "
            f"{max_tokens} for texts of up to {max(sizes)} tokens."
        )
    n_held = max(1, len(kept) // 10)
    parts = []
    for part in (kept[n_held:], kept[:n_held]):
        joined = _joined(part, max_length, long_share)
        parts.append(_batches(tokenizer, joined, max_length, batch_tokens))
    return Corpus(parts[0], parts[1], len(kept), n_held)


def check_texts(texts: Sequence[str]) -> list[str]:
    """Take texts as a list, or say what is wrong with them."""
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise ParameterTypeError(
            f"`texts` must be a sequence of strings; got {type(texts).__name__}."
        )
    shown = [text for text in texts if text.strip()]
    if len(shown) < 4:
        raise ParameterError(
            f"`texts` must have at least 4 texts that are not blank; got {len(shown)}."
        )
    return shown


def _theirs(tokenizer: Tokenizer) -> bool:
    return hasattr(tokenizer, "pad") and hasattr(tokenizer, "model_max_length")


def _sizes(tokenizer: Tokenizer, texts: list[str], max_length: int) -> list[int]:
    if not _theirs(tokenizer):
        return [min(max_length, 2 + len(text) // _CHARACTERS) for text in texts]
    ids = tokenizer(texts, truncation=True, max_length=max_length, padding=False)
    return [len(row) for row in ids["input_ids"]]


def _joined(
    part: list[tuple[str, int]], max_length: int, share: float
) -> list[tuple[str, int]]:
    total = sum(size for _, size in part)
    long = [pair for pair in part if pair[1] > max_length // 4]
    missing = share * total - sum(size for _, size in long)
    short = [pair for pair in part if pair[1] <= max_length // 4]
    made = []
    while missing > 0 and len(short) > 1:
        words, length = short.pop()
        while short and length < max_length:
            text, size = short.pop()
            words, length = f"{words} {text}", length + size
        made.append((words, min(length, max_length)))
        missing -= length
    return short + long + made


def _batches(
    tokenizer: Tokenizer,
    part: list[tuple[str, int]],
    max_length: int,
    batch_tokens: int,
) -> list[Batch]:
    part = sorted(part, key=lambda pair: pair[1])
    groups: list[list[str]] = []
    group: list[str] = []
    for text, size in part:
        if group and (len(group) + 1) * size > batch_tokens:
            groups.append(group)
            group = []
        group.append(text)
    groups.append(group)
    return [encode(tokenizer, group, max_length) for group in groups]


def encode(tokenizer: Tokenizer, texts: list[str], max_length: int) -> Batch:
    """Make the keyword arguments of the model for some texts."""
    if not _theirs(tokenizer):
        return dict(tokenizer(texts))
    return dict(
        tokenizer(
            texts,
            truncation=True,
            max_length=max_length,
            padding=True,
            return_tensors="pt",
        )
    )
