"""What a model says of a split: probabilities, tags, metrics."""

from typing import Any

import torch
from torch import Tensor

from coulomb.attention.encoder.encoder import KernelEncoder
from coulomb.attention.encoder.packed import packed_logits
from coulomb.text.corpora import Split
from coulomb.text.metrics import (
    classification_metrics,
    entity_metrics,
    word_metrics,
)
from coulomb.text.tokens import TokenRows

_TOKENS = 8192  # that are evaluated together


def log_probabilities(model: KernelEncoder, rows: TokenRows) -> Tensor:
    """Evaluate a model on all texts, without dropout."""
    by_token = model.settings.head == "token"
    # Texts of like length together: attention that pads inside wastes least.
    order = rows.lengths.argsort(stable=True)
    size = int(rows.offsets[-1]) if by_token else len(rows)
    out = torch.empty(size, model.settings.n_classes)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for some in _batches(rows, order):
                logits = packed_logits(model, rows.batch(some)).log_softmax(dim=-1)
                out[_places(rows, some) if by_token else some] = logits
    finally:
        model.train(training)
    return out


def _batches(rows: TokenRows, order: Tensor) -> list[Tensor]:
    if not len(order):
        return []
    group = rows.lengths[order].cumsum(0) // _TOKENS
    sizes: list[int] = torch.bincount(group).tolist()
    return list(torch.split(order, [size for size in sizes if size]))


def _places(rows: TokenRows, some: Tensor) -> Tensor:
    spans = [torch.arange(int(rows.offsets[i]), int(rows.offsets[i + 1])) for i in some]
    return torch.cat(spans)


def word_classes(rows: TokenRows, scores: Tensor, missing: int) -> list[list[int]]:
    """Give every word the class of its first token."""
    assert rows.first is not None
    assert rows.word_offsets is not None
    best = scores.argmax(dim=-1)
    chosen = torch.full_like(rows.first, missing)
    there = rows.first >= 0
    chosen[there] = best[rows.first[there]]
    lengths: list[int] = rows.word_offsets.diff().tolist()
    return [part.tolist() for part in torch.split(chosen, lengths)]


def outside(classes: tuple[Any, ...]) -> int:
    """Find the class of words that belong to nothing."""
    return classes.index("O") if "O" in classes else 0


def judged_by(kind: str, classes: tuple[Any, ...]) -> str:
    """Name the metric that chooses the checkpoint.

    Examples
    --------
    >>> judged_by("token", ("O", "B-PER", "I-PER"))
    'entity_f1'
    >>> judged_by("token", ("NOUN", "VERB"))
    'accuracy'
    """
    marked = any(str(name).startswith(("B-", "I-")) for name in classes)
    return "entity_f1" if kind == "token" and marked else "accuracy"


def score_split(
    model: KernelEncoder, rows: TokenRows, split: Split, classes: tuple[Any, ...]
) -> dict[str, Any]:
    """Compute the metrics of a model on a split with labels."""
    scores = log_probabilities(model, rows)
    assert split.labels is not None
    if model.settings.head == "sequence":
        return dict(classification_metrics(split.labels, scores.exp().numpy()))
    guesses = word_classes(rows, scores, outside(classes))

    def named(tags: Any) -> list[list[str]]:
        return [[str(classes[tag]) for tag in row] for row in tags]

    marked = judged_by("token", classes) == "entity_f1"
    metrics = entity_metrics if marked else word_metrics
    return metrics(named(split.labels), named(guesses))
