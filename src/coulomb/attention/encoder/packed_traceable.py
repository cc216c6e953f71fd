"""The encoder on packed tokens with torch's own operations: the twin of the fast form.

Only attention knows where sequences begin and end; everything else works on tokens.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb.attention.encoder.dropout import drop, make_dropout
from coulomb.attention.encoder.encoder import EncoderLayer, KernelEncoder
from coulomb.attention.encoder.layout import Layout
from coulomb.attention.layers.baselines import Linformer, Performer, SoftmaxAttention
from coulomb.attention.layers.kernel import AbstractAttention, KernelAttention
from coulomb.attention.ops.api import packed_attention
from coulomb.features import Favor, Particles

# Numbers of the places that drop, counted from the layer's first.
EMBEDDING, PER_LAYER = 0, 4
ATTENDED, BRANCH, INNER, OUTER = range(1, 5)


def attend(
    layer: nn.Module, x: Tensor, layout: Layout, seed: int | None, place: int
) -> Tensor:
    """Attend inside every sequence, up to the output projection."""
    if not isinstance(layer, AbstractAttention):
        return _foreign(layer, x, layout, seed)
    parts = layer.project(*[x.unsqueeze(0)] * 3)
    q, k, v = (part.squeeze(0).transpose(0, 1) for part in parts)
    if type(layer) is KernelAttention:
        particles, feature_map = layer.as_particles(), layer.feature_map
    elif type(layer) is Performer:
        layer.count_pass()
        particles, feature_map = Particles(layer.particles), Favor()
        q, k = q * layer.head_dim**-0.25, k * layer.head_dim**-0.25
    else:
        return _padded(layer, q, k, v, layout, seed, place).flatten(1)
    out = packed_attention(
        q, k, v, particles, feature_map, layout.cu_seqlens, causal=layer.causal
    )
    return drop(out.flatten(1), make_dropout(seed, place + ATTENDED, layer.dropout))


def _padded(
    layer: AbstractAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    seed: int | None,
    place: int,
) -> Tensor:
    padded, mask = layout.pad(torch.stack([q, k, v], dim=1))
    q, k, v = padded.permute(2, 0, 3, 1, 4)  # (batch, heads, longest, head_dim)
    dropout = make_dropout(seed, place + ATTENDED, layer.dropout)
    if dropout is not None and type(layer) is SoftmaxAttention:
        out = drop(layer.weights(q, k, mask, causal=layer.causal), dropout) @ v
    elif dropout is not None and type(layer) is Linformer:
        # It drops what its mixtures receive, as torch's function does.
        keys, values = layer.mixtures(k, mask, causal=layer.causal)
        logits = q @ (keys @ k).transpose(-1, -2) / math.sqrt(layer.head_dim)
        out = drop(logits.softmax(dim=-1), dropout) @ (values @ v)
    else:
        with _mode(layer, seed is not None):
            out = layer.attend(q, k, v, mask, causal=layer.causal)
    return layout.unpad(out.transpose(1, 2))


def _foreign(layer: nn.Module, x: Tensor, layout: Layout, seed: int | None) -> Tensor:
    padded, mask = layout.pad(x)
    words = {"key_padding_mask": ~mask, "need_weights": False}
    with _mode(layer, seed is not None):
        out: Tensor = layer(padded, padded, padded, **words)[0]
    return layout.unpad(out)


@contextmanager
def _mode(layer: nn.Module, train: bool) -> Iterator[None]:
    before = layer.training
    layer.train(train)
    try:
        yield
    finally:
        layer.train(before)


def finish(
    layer: EncoderLayer, x: Tensor, out: Tensor, seed: int | None, place: int
) -> Tensor:
    """Do what a layer of the encoder does after attention."""

    def dropped(y: Tensor, which: int) -> Tensor:
        return drop(y, make_dropout(seed, place + which, layer.dropout.p))

    if isinstance(layer.attention, AbstractAttention):
        # Not called as a module: `align` listens to that, in `PackedHeads`.
        out = layer.attention.out_proj.forward(out)
    x = x + dropped(out, BRANCH)
    x = x if layer.pre_norm else layer.attention_norm(x)
    inside = layer.ffn_norm(x) if layer.pre_norm else x
    inner = dropped(functional.gelu(layer.widen(inside)), INNER)
    x = x + dropped(layer.narrow(inner), OUTER)
    return x if layer.pre_norm else layer.ffn_norm(x)


def embed(
    model: KernelEncoder, token_ids: Tensor, layout: Layout, seed: int | None
) -> Tensor:
    """Look tokens up."""
    x = model.token_embedding(token_ids)
    if model.position_embedding is not None:
        x = x + model.position_embedding(layout.embedded)
    x = model.embedding_norm(x)
    return drop(x, make_dropout(seed, EMBEDDING, model.dropout.p))


def pool(model: KernelEncoder, x: Tensor, layout: Layout) -> Tensor:
    """Average the states of each sequence with the weights of the encoder."""
    if callable(model.settings.pooling):
        return model.pool(*layout.pad(x))
    weights = torch.from_numpy(layout.pooling_weights(model)).to(x)
    sums = x.new_zeros(layout.count, x.shape[1])
    return sums.index_add(0, layout.owners, weights.unsqueeze(1) * x)
