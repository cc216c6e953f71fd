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

__all__ = [
    "KeptStates",
    "as_stack",
    "begin_all",
    "evaluating",
    "record",
    "text_length",
]

States = list[tuple[Tensor, Call]]

_LONGEST = 512

# The teacher's hidden states of all blocks; those of more texts are made again.
_KEPT_BYTES = 3 << 27


class KeptStates:
    """Hidden states after every block, of as many batches as there is room for."""

    def __init__(
        self, stack: Stack, batches: Sequence[Batch], most_bytes: int = _KEPT_BYTES
    ) -> None:
        self.stack, self.batches = stack, batches
        self.most_bytes = most_bytes
        self._states: dict[int, list[Tensor]] = {}

    def add(self, states: States) -> None:
        """Keep the states after a block, of every batch in its turn."""
        if not self._states:
            room = float(self.most_bytes)
            for number, (hidden, _) in enumerate(states):
                room -= len(self.stack.blocks) * hidden.numel() * hidden.element_size()
                if room >= 0:
                    self._states[number] = []
        for number, kept in self._states.items():
            kept.append(states[number][0])

    @torch.no_grad()
    def of(self, number: int) -> list[Tensor]:
        """Give the states of a batch, or make them again."""
        kept = self._states.get(number, [])
        if len(kept) == len(self.stack.blocks):
            return kept
        states: list[Tensor] = self.stack(*self.stack.begin(self.batches[number]))
        return states


def as_stack(model: nn.Module) -> Stack:
    """Find the blocks of an encoder with softmax attention."""
    if not isinstance(model, nn.Module):
        raise ParameterTypeError(
            f"`model` must be a torch module; got {type(model).__name__}. Load a saved "
            "one with transformers.AutoModel.from_pretrained."
        )
    if is_pretrained(model):
        check_family(model)
    return Stack(model)


def text_length(model: Any, tokenizer: Any) -> int:
    """Tell how long texts may be that are learned from."""
    config = getattr(model, "config", None)
    count = int(getattr(config, "max_position_embeddings", _LONGEST))
    if getattr(config, "model_type", "") in ("roberta", "mpnet"):
        count -= 2  # their positions begin behind that of the padding
    return min(_LONGEST, count)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turn dropout off in the block, and every module back to its own mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@torch.no_grad()
def begin_all(stack: Stack, batches: Sequence[Batch]) -> States:
    """Call the model up to its first block, for every batch."""
    return [stack.begin(batch) for batch in batches]


@torch.no_grad()
def record(stack: Stack, number: int, states: States) -> tuple[list[Rows], States]:
    """Run one block on all batches, and keep what its attention compares."""
    rows, after = [], []
    site = stack.sites[number]
    for hidden, call in states:
        seen, following = stack.look(number, hidden, call)
        # Head after head: one product evaluates the features of a head's tokens.
        q, k, v = (
            part.transpose(0, 1).contiguous().transpose(0, 1)
            for part in site.project_seen(seen)
        )
        rows.append(Rows(q, k, v, seen.key_mask, seen.key_mask, seen.bias))
        after.append((following, call))
    return rows, after
