"""The encoder on packed tokens with compiled loops; importing this imports numba.

Each part is one step of autograd. Large products are torch's; what lies between two of
them is one compiled pass over the rows. `backward` computes only what is wanted;
gradients of gradients there are none.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from coulomb.attention.encoder.dropout import (
    BRANCH,
    EMBEDDING,
    INNER,
    OUTER,
    Dropout,
)
from coulomb.attention.encoder.encoder import (
    AttentionFactory,
    EncoderSettings,
    KernelEncoder,
)
from coulomb.attention.encoder.layout import Layout, TokenBatch
from coulomb.attention.encoder.packed import (
    AbstractForm,
    packed_logits,
    spare_gradient,
)
from coulomb.attention.layers.base import AbstractAttention
from coulomb.attention.layers.baselines import Linformer, SoftmaxAttention
from coulomb.attention.layers.kernel import KernelAttention
from coulomb.attention.layers.packed_cores import apply, run, weight_gradient
from coulomb.kernels import encoder_rows as loops


class CompiledForm(AbstractForm):
    """The encoder on packed tokens in compiled loops: the fast twin of `TorchForm`."""

    compiled = True

    def embed(self) -> Tensor:
        model = self.model
        places, norm = model.position_embedding, model.embedding_norm
        return apply(
            Embed,
            model.token_embedding.weight,
            None if places is None else places.weight,
            *(*_affine(norm), self.token_ids.contiguous(), self.layout, norm.eps),
            self.dropout(0).at(EMBEDDING, model.dropout.p),
        )

    def finish(self, number: int, x: Tensor, out: Tensor) -> Tensor:
        layer, dropout = self.layer(number), self.dropout(number)
        branch, inner, outer = (
            dropout.at(place, layer.dropout.p) for place in (BRANCH, INNER, OUTER)
        )
        assert isinstance(layer.attention, AbstractAttention)
        pre, project = layer.pre_norm, layer.attention.out_proj
        norm = (None, None) if pre else _affine(layer.attention_norm)
        x = apply(
            AddNorm,
            *(out, x, project.weight, project.bias, *norm, layer.attention_norm.eps),
            branch,
        )
        inside, residual = (layer.ffn_norm(x), x) if pre else (x, None)
        norm = (None, None) if pre else _affine(layer.ffn_norm)
        widen, narrow = layer.widen, layer.narrow
        return apply(
            FeedForward,
            *(inside, residual, widen.weight, widen.bias, narrow.weight, narrow.bias),
            *(*norm, layer.ffn_norm.eps, (inner, outer)),
        )

    def weighted_sums(self, x: Tensor, weights: NDArray[np.float64]) -> Tensor:
        return apply(Pool, x, weights.astype(np.float32), self.layout.bounds)


def _affine(norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    return norm.weight, norm.bias


def _drop_words(dropout: Dropout | None) -> tuple[int, int, float]:
    """Give a place's dropout as numbers for the compiled loops."""
    return (0, 0, 1.0) if dropout is None else (*dropout, dropout.scale)


class Embed(torch.autograd.Function):
    """`drop(norm(table[id] + places[position]))`."""

    @staticmethod
    def forward(
        ctx: Any,
        table: Tensor,
        places: Tensor | None,
        gain: Tensor,
        shift: Tensor,
        token_ids: Tensor,
        layout: Layout,
        eps: float,
        dropout: Dropout | None,
    ) -> Tensor:
        """Look tokens up and normalise them."""
        out = table.new_empty(len(token_ids), table.shape[1])
        normal, scales = torch.empty_like(out), out.new_empty(len(out))
        rows = places if places is not None else table[:0]
        words = _drop_words(dropout)
        inputs = token_ids, layout.embedded, table, rows, gain, shift, eps, words
        run(loops.embed_rows, *inputs, out, normal, scales)
        ctx.save_for_backward(token_ids, normal, scales, gain)
        ctx.words, ctx.layout = words, layout
        ctx.shapes = table.shape, None if places is None else places.shape
        ctx.spare = spare_gradient(table) if ctx.needs_input_grad[0] else None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        token_ids, normal, scales, gain = ctx.saved_tensors
        # A second backward pass through the same graph must not share it.
        spare, ctx.spare = ctx.spare, None
        shapes = [
            shape if shape and wanted else (0, len(gain))
            for shape, wanted in zip(ctx.shapes, ctx.needs_input_grad, strict=False)
        ]
        tables = [gain.new_zeros(shapes[0]) if spare is None else spare]
        tables.append(gain.new_zeros(shapes[1]))
        sums = gain.new_zeros(2, len(gain))
        inputs = token_ids, ctx.layout.embedded, normal, scales, gain, ctx.words
        run(loops.embed_rows_back, grad, *inputs, *tables, sums)
        found = [table if len(table) else None for table in tables]
        return (*found, sums[0], sums[1], None, None, None, None)


class AddNorm(torch.autograd.Function):
    """`norm(residual + drop(x W' + b))`, without a norm where there is no gain."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gain: Tensor | None,
        shift: Tensor | None,
        eps: float,
        dropout: Dropout | None,
    ) -> Tensor:
        """Project, add, normalise."""
        normal = x.mm(weight.t())
        out, scales = torch.empty_like(normal), x.new_empty(len(x))
        words = _drop_words(dropout)
        bias = normal.new_zeros(len(weight)) if bias is None else bias
        inputs = normal, bias, residual, gain, shift, eps, words
        run(loops.add_rows, *inputs, out, scales)
        ctx.save_for_backward(x, weight, normal, scales, gain)
        ctx.words = words
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, normal, scales, gain = ctx.saved_tensors
        needs = ctx.needs_input_grad
        passed, kept, sums = _add_norm_back(grad, normal, scales, gain, ctx.words)
        grad_x = passed.mm(weight) if needs[0] else None
        grad_weight = weight_gradient(needs[2], passed, x)
        norm = (None, None) if gain is None else (sums[1], sums[2])
        grad_bias = sums[0] if needs[3] else None
        return (grad_x, kept, grad_weight, grad_bias, *norm, None, None)


def _add_norm_back(
    grad: Tensor,
    normal: Tensor,
    scales: Tensor,
    gain: Tensor | None,
    words: tuple[int, int, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients of the projection, of the residual, and sums of parameters."""
    kept = torch.empty_like(normal)
    passed, sums = torch.empty_like(kept), kept.new_zeros(3, kept.shape[1])
    run(loops.add_rows_back, grad, normal, scales, gain, words, sums, kept, passed)
    return passed, kept, sums


class FeedForward(torch.autograd.Function):
    """`norm(residual + drop(drop(gelu(x W' + b)) V' + c))`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        widen: Tensor,
        widen_bias: Tensor,
        narrow: Tensor,
        narrow_bias: Tensor,
        gain: Tensor | None,
        shift: Tensor | None,
        eps: float,
        dropouts: tuple[Dropout | None, Dropout | None],
    ) -> Tensor:
        """Apply the feed-forward network, add, normalise."""
        words = [_drop_words(dropout) for dropout in dropouts]
        slope = x.mm(widen.t())
        inner = torch.empty_like(slope)
        run(loops.gelu_rows, slope, widen_bias, words[0], inner)
        normal = inner.mm(narrow.t())
        out, scales = torch.empty_like(normal), x.new_empty(len(x))
        other = x if residual is None else residual
        inputs = normal, narrow_bias, other, gain, shift, eps, words[1]
        run(loops.add_rows, *inputs, out, scales)
        tensors = x, widen, narrow, slope, inner, normal, scales, gain
        ctx.save_for_backward(*tensors)
        ctx.words, ctx.own = words[1], residual is None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, widen, narrow, slope, inner, normal, scales, gain = ctx.saved_tensors
        needs = ctx.needs_input_grad
        passed, kept, sums = _add_norm_back(grad, normal, scales, gain, ctx.words)
        grad_inner = passed.mm(narrow)
        grad_narrow = weight_gradient(needs[4], passed, inner)
        total = grad.new_zeros(len(widen))
        run(loops.slope_rows, grad_inner, slope, total)
        grad_widen = weight_gradient(needs[2], grad_inner, x)
        grad_x = None
        if needs[0]:
            grad_x = kept.addmm_(grad_inner, widen) if ctx.own else grad_inner.mm(widen)
        norm = (None, None) if gain is None else (sums[1], sums[2])
        linear = grad_widen, total, grad_narrow, sums[0]
        return (grad_x, None if ctx.own else kept, *linear, *norm, None, None)


class Pool(torch.autograd.Function):
    """`sum_t w_t x_t` over the tokens of each sequence."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: NDArray[np.float32], bounds: NDArray[np.int64]
    ) -> Tensor:
        """Average the states of sequences."""
        out = x.new_empty(len(bounds) - 1, x.shape[1])
        run(loops.pool_rows, x, weights, bounds, out)
        ctx.weights, ctx.bounds = weights, bounds
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out = grad.new_empty(len(ctx.weights), grad.shape[1])
        run(loops.pool_rows_back, grad, ctx.weights, ctx.bounds, out)
        return out, None, None


def warm_up() -> None:
    """Compile the loops, or load them from numba's cache, before they are needed."""
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
