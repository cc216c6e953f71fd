"""An encoder as a stack of blocks that can be run one at a time.

The blocks are called as the model calls them: what the first one receives beside the
hidden states (masks, position biases) is caught once per batch and used for all.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coulomb._support.errors import ParameterError
from coulomb.attention import AbstractAttention

__all__ = ["Call", "Seen", "Site", "Stack", "real_tokens"]

# Self-attention of transformers, with the names of its projections.
PROJECTIONS = {
    "BertSelfAttention": ("query", "key", "value"),
    "RobertaSelfAttention": ("query", "key", "value"),
    "DistilBertSelfAttention": ("q_lin", "k_lin", "v_lin"),
    "MPNetSelfAttention": ("q", "k", "v"),
    "LinearisedMPNetSelfAttention": ("q", "k", "v"),
}
FAMILIES = ("BERT", "DistilBERT", "MPNet", "RoBERTa")

Batch = Mapping[str, Tensor]


class Seen(NamedTuple):
    """What an attention layer received."""

    x: Tensor  # (batch, n, dim)
    key_mask: Tensor  # (batch, n), True = real token
    bias: Tensor | None  # added to the scores
    projected: tuple[Tensor, ...] = ()  # what q, k and v are views of, where it is seen


class Call(NamedTuple):
    """What a block is called with beside the hidden states."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Site:
    """One attention layer of an encoder."""

    name: str
    module: nn.Module

    @property
    def num_heads(self) -> int:
        """How many heads it has."""
        for name in ("num_attention_heads", "n_heads", "num_heads"):
            if hasattr(self.module, name):
                return int(getattr(self.module, name))
        raise AttributeError(f"{type(self.module).__name__} tells no number of heads")

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries, keys and values."""
        module: Any = self.module
        if isinstance(module, AbstractAttention):
            return module.project(x, x, x)
        if isinstance(module, nn.MultiheadAttention):
            joint = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias)
            return self.split(joint.chunk(3, dim=-1))
        return self.split([part(x) for part in self.projections])

    @property
    def projections(self) -> list[nn.Module]:
        """The layers that make queries, keys and values, where there are such."""
        names = PROJECTIONS.get(type(self.module).__name__, ())
        return [getattr(self.module, name) for name in names]

    def split(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """View projections by head."""
        shape = (*parts[0].shape[:-1], self.num_heads, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        return q, k, v

    def project_seen(self, seen: "Seen") -> tuple[Tensor, Tensor, Tensor]:
        """Make queries, keys and values, or take those the layer has made."""
        return self.split(seen.projected) if seen.projected else self.project(seen.x)


def is_attention(module: nn.Module) -> bool:
    """Tell whether a module is self-attention that can be linearised."""
    if isinstance(module, AbstractAttention):
        return hasattr(module, "coulomb")
    ours_or_theirs = type(module).__module__.startswith(("transformers.", "coulomb."))
    return type(module) is nn.MultiheadAttention or (
        ours_or_theirs and type(module).__name__ in PROJECTIONS
    )


class _Reached(Exception):
    """Carries what the first block was called with."""

    def __init__(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        super().__init__()
        self.arguments, self.keywords = arguments, keywords


class Stack(nn.Module):
    """The blocks of an encoder, run one after the other.

    Examples
    --------
    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> stack = Stack(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    >>> [site.name for site in stack.sites]
    ['layers.0.self_attn', 'layers.1.self_attn', 'layers.2.self_attn']
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        name, blocks = _find_blocks(model)
        self.blocks = blocks
        # A tuple hides the model from torch: its parameters are not the stack's.
        self._model = (model,)
        self.sites = [
            Site(f"{name}.{number}.{inner}", module)
            for number, block in enumerate(blocks)
            for inner, module in block.named_modules()
            if is_attention(module)
        ]

    @property
    def model(self) -> nn.Module:
        """The encoder the blocks belong to."""
        return self._model[0]

    @property
    def batch_first(self) -> bool:
        """Whether hidden states are `(batch, n, dim)`."""
        return bool(getattr(self.sites[0].module, "batch_first", True))

    def begin(self, batch: Batch) -> tuple[Tensor, Call]:
        """Call the model up to its first block."""

        def stop(_: nn.Module, arguments: tuple[Any, ...], keywords: Any) -> None:
            raise _Reached(arguments, dict(keywords))

        handle = self.blocks[0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with plain_layers():
                self.model(**self._on_device(batch))
        except _Reached as reached:
            arguments, keywords = reached.arguments, reached.keywords
        else:
            raise ParameterError(
                "`model` must call its own blocks; got "
                f"{type(self.model).__name__}, which called none of them."
            )
        finally:
            handle.remove()
        if arguments:
            return arguments[0], Call(arguments[1:], keywords)
        first = next(iter(inspect.signature(self.blocks[0].forward).parameters))
        return keywords.pop(first), Call((), keywords)

    def _on_device(self, batch: Batch) -> Batch:
        place = next(self.model.parameters()).device
        return {name: value.to(place) for name, value in batch.items()}

    def run(self, number: int, hidden: Tensor, call: Call) -> Tensor:
        """Call one block."""
        with plain_layers():
            out = self.blocks[number](hidden, *call.arguments, **call.keywords)
        return out[0] if isinstance(out, tuple) else out

    def look(self, number: int, hidden: Tensor, call: Call) -> tuple[Seen, Tensor]:
        """Call one block, and keep what its attention layer received."""
        caught: list[Seen] = []
        made: dict[nn.Module, Tensor] = {}
        site = self.sites[number]
        module = site.module

        def keep(_: nn.Module, arguments: tuple[Any, ...], keywords: Any) -> None:
            signature = inspect.signature(module.forward)
            bound = signature.bind_partial(*arguments, **keywords)
            caught.append(_seen(module, bound.arguments))

        def keep_projected(layer: nn.Module, _: Any, out: Tensor) -> None:
            made[layer] = out

        handles = [module.register_forward_pre_hook(keep, with_kwargs=True)]
        handles += [
            layer.register_forward_hook(keep_projected) for layer in site.projections
        ]
        try:
            after = self.run(number, hidden, call)
        finally:
            for handle in handles:
                handle.remove()
        projected = tuple(made[layer] for layer in site.projections)
        return caught[0]._replace(projected=projected), after

    def forward(self, hidden: Tensor, call: Call) -> list[Tensor]:
        """Call all blocks."""
        states = []
        for number in range(len(self.blocks)):
            hidden = self.run(number, hidden, call)
            states.append(hidden)
        return states

    def tokens(self, batch: Batch) -> Tensor:
        """Tell which tokens of a batch are real."""
        if "attention_mask" in batch:
            return self._on_device(batch)["attention_mask"].bool()
        hidden, call = self.begin(batch)
        return self.look(0, hidden, call)[0].key_mask


def _find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(sum(map(is_attention, b.modules())) == 1 for b in module)
    }
    if len(found) != 1:
        raise ParameterError(
            "`model` must be an encoder with one list of blocks that have one "
            "attention layer each, torch's or that of "
            f"{', '.join(FAMILIES)}; got {type(model).__name__} with {len(found)} such "
            "lists."
        )
    return next(iter(found.items()))


def _seen(module: nn.Module, arguments: Mapping[str, Any]) -> Seen:
    if isinstance(module, nn.MultiheadAttention | AbstractAttention):
        x, padding = arguments["query"], arguments.get("key_padding_mask")
        if arguments.get("attn_mask") is not None or arguments.get("is_causal"):
            raise ParameterError(
                "`model` must be an encoder whose tokens all see each other; got a "
                "layer that is called with `attn_mask`."
            )
        x = x if module.batch_first else x.transpose(0, 1)
        if padding is not None and padding.is_floating_point():
            padding = padding < 0
        key_mask = None if padding is None else ~padding
        return Seen(x, _or_all(key_mask, x), None)
    x = arguments["hidden_states"]
    mask = arguments.get("attention_mask")
    key_mask = None if mask is None else real_tokens(mask)
    return Seen(x, _or_all(key_mask, x), arguments.get("position_bias"))


def _or_all(key_mask: Tensor | None, x: Tensor) -> Tensor:
    if key_mask is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return key_mask.expand(x.shape[:2])


def real_tokens(mask: Tensor) -> Tensor:
    """Read the padding out of a mask of transformers.

    Examples
    --------
    >>> real_tokens(torch.tensor([[[[0.0, -3e38]]]]))
    tensor([[ True, False]])
    """
    if mask.dim() == 2:
        return mask.bool()
    keys = mask[:, 0, -1]
    if keys.is_floating_point():
        return keys > torch.finfo(keys.dtype).min / 4
    return keys.bool()


@contextmanager
def plain_layers() -> Iterator[None]:
    """Keep torch's encoder layers from going around their attention layer."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
