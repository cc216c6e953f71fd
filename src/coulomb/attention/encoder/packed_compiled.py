"""The encoder on packed tokens with compiled loops; importing this imports numba.

The functions are those of `_packed_plain`, where their arguments are described.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb.attention.encoder import packed_traceable as plain
from coulomb.attention.encoder.dropout import drop, make_dropout
from coulomb.attention.encoder.encoder import (
    AttentionFactory,
    EncoderLayer,
    EncoderSettings,
    KernelEncoder,
)
from coulomb.attention.encoder.layout import Layout
from coulomb.attention.encoder.packed_baselines import MixtureCore, SoftmaxCore
from coulomb.attention.encoder.packed_cores import KernelCore, map_numbers
from coulomb.attention.encoder.packed_functions import AddNorm, Embed, FeedForward, Pool
from coulomb.attention.encoder.packed_traceable import (
    ATTENDED,
    BRANCH,
    EMBEDDING,
    INNER,
    OUTER,
)
from coulomb.attention.layers.baselines import Linformer, Performer, SoftmaxAttention
from coulomb.attention.layers.kernel import AbstractAttention, KernelAttention
from coulomb.features import Favor

# Up to about this length the quadratic order is the cheaper one.
_LONGEST = 200


def _tracked(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in tensors
    )


def _kernel_heads(
    layer: KernelAttention | Performer, x: Tensor, layout: Layout
) -> Tensor | None:
    """Attend with features, or give None where the loops cannot."""
    feature_map = Favor() if isinstance(layer, Performer) else layer.feature_map
    numbers = map_numbers(feature_map, layer.head_dim)
    shared = layer.qkv == "shared"
    weight = layer.v_proj_weight if shared else layer.in_proj_weight
    bias = layer.v_proj_bias if shared else layer.in_proj_bias
    long = layout.effective_length > _LONGEST
    if numbers is None or weight is None or layer.causal or long:
        return None
    if isinstance(layer, Performer):
        layer.count_pass()
    phases = None if isinstance(layer, Performer) else layer.phases
    keep = _tracked(x, weight, bias, layer.particles)
    particles = layer.particles, phases
    return _apply(KernelCore, x, weight, bias, *particles, numbers, layout, keep)


def _joint(layer: AbstractAttention, x: Tensor) -> Tensor | None:
    """Put queries, keys and values side by side, `(tokens, 3 width)`."""
    if layer.qkv == "shared":
        assert layer.v_proj_weight is not None
        values = functional.linear(x, layer.v_proj_weight, layer.v_proj_bias)
        return torch.cat([x, x, values], dim=1)
    if layer.in_proj_weight is None:
        return None
    return functional.linear(x, layer.in_proj_weight, layer.in_proj_bias)


def _baseline_heads(
    layer: SoftmaxAttention | Linformer, x: Tensor, layout: Layout
) -> Tensor | None:
    """Attend with softmax, or give None where the loops cannot."""
    if isinstance(layer, Linformer):
        fits = layout.longest <= layer.max_length
    else:
        fits = layout.effective_length <= _LONGEST
    joint = _joint(layer, x) if fits and not layer.causal else None
    if joint is None:
        return None
    if isinstance(layer, Linformer):
        mixtures = layer.key_mixture, layer.value_mixture
        return _apply(MixtureCore, joint, *mixtures, layer.num_heads, layout)
    return _apply(SoftmaxCore, joint, layer.num_heads, layout, _tracked(joint))


def attend(
    layer: nn.Module, x: Tensor, layout: Layout, seed: int | None, place: int
) -> Tensor:
    """Attend inside every sequence, up to the output projection."""
    out = None
    if type(layer) is KernelAttention or type(layer) is Performer:
        out = _kernel_heads(layer, x, layout)
        if out is not None:
            return drop(out, make_dropout(seed, place + ATTENDED, layer.dropout))
    elif type(layer) is SoftmaxAttention or type(layer) is Linformer:
        drops = seed is not None and layer.dropout > 0
        out = None if drops else _baseline_heads(layer, x, layout)
    return plain.attend(layer, x, layout, seed, place) if out is None else out


def finish(
    layer: EncoderLayer, x: Tensor, out: Tensor, seed: int | None, place: int
) -> Tensor:
    """Do what a layer of the encoder does after attention."""
    pre, rate = layer.pre_norm, layer.dropout.p
    branch, inner, outer = (
        make_dropout(seed, place + which, rate) for which in (BRANCH, INNER, OUTER)
    )
    assert isinstance(layer.attention, AbstractAttention)
    project = layer.attention.out_proj
    norm = (None, None) if pre else _affine(layer.attention_norm)
    x = _apply(
        AddNorm,
        *(out, x, project.weight, project.bias, *norm, layer.attention_norm.eps),
        branch,
    )
    inside, residual = (layer.ffn_norm(x), x) if pre else (x, None)
    norm = (None, None) if pre else _affine(layer.ffn_norm)
    widen, narrow = layer.widen, layer.narrow
    return _apply(
        FeedForward,
        *(inside, residual, widen.weight, widen.bias, narrow.weight, narrow.bias),
        *(*norm, layer.ffn_norm.eps, (inner, outer)),
    )


def _affine(norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    return norm.weight, norm.bias


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    out: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


def embed(
    model: KernelEncoder, token_ids: Tensor, layout: Layout, seed: int | None
) -> Tensor:
    """Look tokens up."""
    places, norm = model.position_embedding, model.embedding_norm
    return _apply(
        Embed,
        model.token_embedding.weight,
        None if places is None else places.weight,
        *(*_affine(norm), token_ids.contiguous(), layout, norm.eps),
        make_dropout(seed, EMBEDDING, model.dropout.p),
    )


def pool(model: KernelEncoder, x: Tensor, layout: Layout) -> Tensor:
    """Average the states of each sequence with the weights of the encoder."""
    if callable(model.settings.pooling):
        return plain.pool(model, x, layout)
    weights = layout.pooling_weights(model).astype(np.float32)
    return _apply(Pool, x, weights, layout.bounds)


def warm_up() -> None:
    """Compile the loops, or load them from numba's cache, before they are needed."""
    from coulomb.attention.encoder.batches import TokenBatch
    from coulomb.attention.encoder.packed import packed_logits

    shape = EncoderSettings(8, 2, n_layers=1, width=8, ffn_width=8)
    rows: list[AttentionFactory] = [
        partial(KernelAttention, qkv="shared", feature_map="favor", n_features=8),
        partial(KernelAttention, feature_map="favor", n_features=8),
        partial(KernelAttention, feature_map="cos2", n_features=8),
        SoftmaxAttention,
        Linformer,
    ]
    batch = TokenBatch(torch.arange(8), torch.tensor([0, 3, 8]))
    for row in rows:
        model = KernelEncoder(shape, row, generator=0)
        logits = packed_logits(model, batch, dropout_seed=0)
        torch.autograd.grad(logits.sum(), model.token_embedding.weight)
