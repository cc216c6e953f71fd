"""Who attends to whom in every layer and head: what `Neighbours` looks at."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coulomb.attention.encoder.batches import TokenBatch
from coulomb.attention.encoder.encoder import KernelEncoder
from coulomb.attention.encoder.layout import make_layout
from coulomb.attention.encoder.packed import _layers, _parts, call_around
from coulomb.attention.layers.kernel import AbstractAttention

__all__ = ["PackedWeights"]


@dataclass(frozen=True)
class PackedWeights:
    """Attention weights for `align(..., objective=Neighbours(...), output="")`.

    Batches are `(TokenBatch, labels)` with labels `(sequences, longest)`, -100 at
    padding.

    Examples
    --------
    >>> from coulomb.attention import EncoderSettings, KernelAttention
    >>> from coulomb.attention.align.batches import as_batch
    >>> model = KernelEncoder(EncoderSettings(100, 2), KernelAttention, generator=0)
    >>> tokens = TokenBatch(torch.tensor([5, 7, 9]), torch.tensor([0, 2, 3]))
    >>> batch = as_batch((tokens, torch.tensor([[0, 1], [0, -100]])))
    >>> PackedWeights()(model, dict(model.named_parameters()), batch).shape
    torch.Size([2, 2, 8])
    """

    def __call__(
        self, model: nn.Module, parameters: dict[str, Tensor], batch: Any
    ) -> Tensor:
        """Evaluate the encoder with other parameters, up to its last attention."""
        return call_around(_Shown(model), parameters, batch)


class _Shown(nn.Module):
    """An encoder that gives its attention weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: TokenBatch) -> Tensor:
        model = self.model
        assert isinstance(model, KernelEncoder)
        layout, parts = make_layout(model, batch), _parts(model, batch)
        x = parts.embed(model, batch.token_ids, layout, None)
        shown = []
        for number, layer in enumerate(layers := _layers(model)):
            inside = layer.attention_norm(x) if layer.pre_norm else x
            attention = layer.attention
            assert isinstance(attention, AbstractAttention)
            padded, mask = layout.pad(inside)
            q, k, _ = attention.project(padded, padded, padded)
            shown.append(attention.weights(q, k, mask, causal=attention.causal))
            if number + 1 < len(layers):
                out = parts.attend(attention, inside, layout, None, 0)
                x = parts.finish(layer, x, out, None, 0)
        return torch.cat(shown, dim=1).transpose(1, 2).flatten(2)
