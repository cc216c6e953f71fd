"""Batches: what a model is called with, and what its outputs are compared with."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from coulomb._support.errors import ParameterError, ParameterTypeError

# Names that may hold the labels and the mask of a batch given as a mapping.
_LABELS = ("labels", "label")
_MASKS = ("key_mask", "attention_mask")


class Batch(NamedTuple):
    """What the model is called with, which tokens are real, and the target."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    key_mask: Tensor | None  # (batch, length), True = real token
    labels: Tensor


def as_batch(item: Any) -> Batch:
    """Read a batch given as `(inputs, labels)`, with a mask, or as a mapping.

    Examples
    --------
    >>> import torch
    >>> as_batch((torch.ones(2, 3), torch.tensor([0, 1]))).labels
    tensor([0, 1])
    """
    if isinstance(item, Batch):
        return item
    if isinstance(item, Mapping):
        words = dict(item)
        name = next((name for name in _LABELS if name in words), None)
        if name is None:
            raise ParameterError(
                f"`batches` must hold 'labels'; got the names {sorted(words)}."
            )
        labels = words.pop(name)
        mask = next((words[name] for name in _MASKS if name in words), None)
        return Batch((), words, None if mask is None else mask.bool(), labels)
    if isinstance(item, tuple | list) and len(item) in (2, 3):
        inputs, *between, labels = item
        mask = between[0] if between else None
        words = {} if mask is None else {"key_mask": mask}
        return Batch((inputs,), words, mask, labels)
    raise ParameterTypeError(
        "`batches` must hold (inputs, labels), (inputs, key_mask, labels) or mappings; "
        f"got {type(item).__name__}."
    )


def as_batches(batches: Iterable[Any]) -> Sequence[Any]:
    """Make batches that can be asked for by number."""
    indexed = hasattr(batches, "__getitem__") and hasattr(batches, "__len__")
    if isinstance(batches, Tensor | Mapping) or not (
        indexed or hasattr(batches, "__iter__")
    ):
        raise ParameterTypeError(
            "`batches` must be a sequence of batches, or give one when iterated; got "
            f"{type(batches).__name__}."
        )
    found: Sequence[Any] = batches if indexed else list(batches)  # type: ignore[assignment]
    if not len(found):
        raise ParameterError("`batches` must hold at least one batch; got none.")
    return found
