"""What the layers of an encoder see of texts, one layer at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from coulomb._support.errors import ParameterTypeError
from coulomb.linearise.objectives import Rows
from coulomb.linearise.pretrained import check_family, is_pretrained
from coulomb.linearise.stack import Batch, Call, Stack

__all__ = ["as_stack", "begin_all", "evaluating", "record", "text_length"]

States = list[tuple[Tensor, Call]]

_LONGEST = 512


def as_stack(model: nn.Module) -> Stack:
    """Find the blocks of an encoder with softmax attention.

    Parameters
    ----------
    model
        The encoder.

    Returns
    -------
    Stack
        Its blocks.
    """
    if not isinstance(model, nn.Module):
        raise ParameterTypeError(
            f"`model` must be a torch module; got {type(model).__name__}. Load a saved "
            "one with transformers.AutoModel.from_pretrained."
        )
    if is_pretrained(model):
        check_family(model)
    return Stack(model)


def text_length(model: Any, tokenizer: Any) -> int:
    """Tell how long texts may be that are learned from.

    Parameters
    ----------
    model, tokenizer
        As in `linearise`.

    Returns
    -------
    int
        The positions of the model, at most 512.
    """
    config = getattr(model, "config", None)
    count = int(getattr(config, "max_position_embeddings", _LONGEST))
    if getattr(config, "model_type", "") in ("roberta", "mpnet"):
        count -= 2  # their positions begin behind that of the padding
    return min(_LONGEST, count)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turn dropout off in the block, and every module back to its own mode after it.

    Parameters
    ----------
    model
        The model.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@torch.no_grad()
def begin_all(stack: Stack, batches: Sequence[Batch]) -> States:
    """Call the model up to its first block, for every batch.

    Parameters
    ----------
    stack
        The encoder.
    batches
        Keyword arguments of the model.

    Returns
    -------
    list
        Hidden states, and what else the blocks are called with.
    """
    return [stack.begin(batch) for batch in batches]


@torch.no_grad()
def record(stack: Stack, number: int, states: States) -> tuple[list[Rows], States]:
    """Run one block on all batches, and keep what its attention compares.

    Parameters
    ----------
    stack
        The encoder.
    number
        Which block.
    states
        From `begin_all`, or from the block before.

    Returns
    -------
    tuple
        Queries, keys and values of every batch, and the states for the next block.
    """
    rows, after = [], []
    site = stack.sites[number]
    for hidden, call in states:
        seen, following = stack.look(number, hidden, call)
        q, k, v = (part.contiguous() for part in site.project(seen.x))
        rows.append(Rows(q, k, v, seen.key_mask, seen.key_mask, seen.bias))
        after.append((following, call))
    return rows, after
