"""The encoder on sequences without padding."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from coulomb._support.errors import unknown_name
from coulomb.attention.encoder import packed_traceable as plain
from coulomb.attention.encoder.batches import TokenBatch
from coulomb.attention.encoder.encoder import EncoderLayer, KernelEncoder
from coulomb.attention.encoder.layout import Layout, make_layout
from coulomb.attention.layers.kernel import AbstractAttention
from coulomb.kernels import available

__all__ = ["PackedHeads", "packed_logits"]

_POOLS = ("mean", "cls", "none")


def packed_logits(
    model: KernelEncoder, batch: TokenBatch, *, dropout_seed: int | None = None
) -> Tensor:
    """Evaluate the encoder on tokens that follow one another, without padding.

    The value and the gradients of `padded_logits`, at a cost that knows no padding.
    Float32 on the CPU runs in compiled loops where numba is there; gradients can be
    taken once, not of gradients.

    Parameters
    ----------
    model
        The encoder, around any attention layer. Whether it is in training mode matters
        only to a Performer, which then draws its features anew when due.
    batch
        The sequences.
    dropout_seed
        A number that decides what dropout drops: the same number, the same elements,
        on every call. None drops nothing. Attention layers that are not of this package
        drop by torch's own generator.

    Returns
    -------
    Tensor
        Logits, `(sequences, classes)`, or `(tokens, classes)` from a token head.

    Examples
    --------
    >>> from coulomb.attention import EncoderSettings, KernelAttention
    >>> model = KernelEncoder(EncoderSettings(100, 2), KernelAttention, generator=0)
    >>> batch = TokenBatch(torch.tensor([5, 7, 9]), torch.tensor([0, 2, 3]))
    >>> packed_logits(model, batch).shape
    torch.Size([2, 2])
    """
    layout = make_layout(model, batch)
    parts = _parts(model, batch)
    x = parts.embed(model, batch.token_ids, layout, dropout_seed)
    for number, layer in enumerate(_layers(model)):
        place = plain.PER_LAYER * number
        out = _attend(parts, layer, x, layout, dropout_seed, place)
        x = parts.finish(layer, x, out, dropout_seed, place)
    states = model.final_norm(x)
    if model.settings.head == "sequence":
        states = parts.pool(model, states, layout)
    logits: Tensor = model.head(states)
    return logits


@dataclass(frozen=True)
class PackedHeads:
    """What Phase A looks at, without padding: `align(..., evaluate=PackedHeads())`.

    Batches are then `(TokenBatch, labels)`. Each attention layer shows what its heads
    give, pooled, instead of a padded array: one vector per sequence, with labels
    `(sequences,)`, or with `pool="none"` one per token, with labels `(1, tokens)`.

    Parameters
    ----------
    pool
        "mean" over the tokens of a sequence, "cls" for its first, or "none".

    Examples
    --------
    >>> from coulomb.attention import EncoderSettings, KernelAttention, align
    >>> model = KernelEncoder(EncoderSettings(100, 2), KernelAttention, generator=0)
    >>> batch = TokenBatch(torch.tensor([5, 7, 9]), torch.tensor([0, 2, 3]))
    >>> batches = [(batch, torch.tensor([0, 1]))]
    >>> result = align(
    ...     model, batches, held_out=None, evaluate=PackedHeads(), max_steps=1
    ... )
    >>> result.positions.shape
    torch.Size([2, 2, 256, 64])
    """

    pool: str = "mean"

    def __post_init__(self) -> None:
        if self.pool not in _POOLS:
            raise unknown_name("pool", self.pool, _POOLS)

    def __call__(
        self, model: nn.Module, parameters: dict[str, Tensor], batch: Any
    ) -> Tensor:
        """Evaluate the encoder with other parameters, up to its last attention."""
        return call_around(_Watched(model, self), parameters, batch)

    def see(self, heads: Tensor, layout: Layout) -> Tensor:
        """Pool what heads give.

        Parameters
        ----------
        heads
            Shape `(tokens, width)`.
        layout
            Where sequences are.

        Returns
        -------
        Tensor
            Shape `(sequences, width)`, or `(1, tokens, width)` without pooling.
        """
        if self.pool == "none":
            return heads.unsqueeze(0)
        if self.pool == "cls":
            return heads[layout.cu_seqlens[:-1]]
        sums = heads.new_zeros(layout.count, heads.shape[1])
        counts = layout.cu_seqlens.diff().clamp_min(1).to(heads).unsqueeze(1)
        return sums.index_add(0, layout.owners, heads) / counts


def call_around(around: nn.Module, parameters: dict[str, Tensor], batch: Any) -> Tensor:
    """Call a module that holds an encoder as `model`, with other parameters of it."""
    named = {f"model.{name}": value for name, value in parameters.items()}
    given: Tensor = functional_call(around, named, batch.arguments)
    return given


class _Watched(nn.Module):
    """An encoder whose output projections are shown what `PackedHeads` sees."""

    def __init__(self, model: nn.Module, view: PackedHeads) -> None:
        super().__init__()
        self.model = model
        self.view = view

    def forward(self, batch: TokenBatch) -> Tensor:
        model = self.model
        assert isinstance(model, KernelEncoder)
        layout, parts = make_layout(model, batch), _parts(model, batch)
        x = parts.embed(model, batch.token_ids, layout, None)
        seen = x
        for number, layer in enumerate(layers := _layers(model)):
            out = _attend(parts, layer, x, layout, None, 0)
            seen = self.view.see(out, layout)
            if isinstance(layer.attention, AbstractAttention):
                # `align` listens to what enters this module.
                layer.attention.out_proj(seen)
            if number + 1 < len(layers):
                x = parts.finish(layer, x, out, None, 0)
        return seen


class _Parts(Protocol):
    """The parts of the encoder on packed tokens: a module that has them."""

    def embed(
        self, model: KernelEncoder, token_ids: Tensor, layout: Layout, seed: int | None
    ) -> Tensor: ...

    def attend(
        self, layer: nn.Module, x: Tensor, layout: Layout, seed: int | None, place: int
    ) -> Tensor: ...

    def finish(
        self, layer: EncoderLayer, x: Tensor, out: Tensor, seed: int | None, place: int
    ) -> Tensor: ...

    def pool(self, model: KernelEncoder, x: Tensor, layout: Layout) -> Tensor: ...


def _parts(model: KernelEncoder, batch: TokenBatch) -> _Parts:
    if not _can_be_fast(model, batch):
        return plain
    # Only here: it imports numba.
    from coulomb.attention.encoder import packed_compiled as fast

    return fast


def _layers(model: KernelEncoder) -> list[EncoderLayer]:
    return [layer for layer in model.layers if isinstance(layer, EncoderLayer)]


def _attend(
    parts: _Parts,
    layer: EncoderLayer,
    x: Tensor,
    layout: Layout,
    seed: int | None,
    place: int,
) -> Tensor:
    inside = layer.attention_norm(x) if layer.pre_norm else x
    return parts.attend(layer.attention, inside, layout, seed, place)


def _can_be_fast(model: KernelEncoder, batch: TokenBatch) -> bool:
    """Say whether the compiled loops know every part of the model."""
    ids = batch.token_ids
    return (
        ids.dtype == torch.int64
        and ids.device.type == "cpu"
        and len(ids) > 0
        and _simple(model.token_embedding, nn.Embedding)
        and _simple(model.embedding_norm, nn.LayerNorm)
        and all(_known(layer) for layer in _layers(model))
        and available()
    )


def _known(layer: EncoderLayer) -> bool:
    attention = layer.attention
    if not isinstance(attention, AbstractAttention):
        return False
    linears = attention.out_proj, layer.widen, layer.narrow
    norms = layer.attention_norm, layer.ffn_norm
    return all(_simple(part, nn.Linear) for part in linears) and all(
        _simple(part, nn.LayerNorm) for part in norms
    )


def _simple(part: nn.Module, kind: type[nn.Module]) -> bool:
    """Say whether a part is torch's own, in float32 on the CPU, not one's own kind."""
    weight = getattr(part, "weight", None)
    return (
        type(part) is kind
        and isinstance(weight, Tensor)
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
    )
