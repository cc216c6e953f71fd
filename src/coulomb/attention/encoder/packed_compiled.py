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

from coulomb.attention.encoder.encoder import (
    AttentionFactory,
    EncoderSettings,
    KernelEncoder,
)
from coulomb.attention.encoder.layout import Layout, TokenBatch
from coulomb.attention.encoder.packed import (
    BRANCH,
    EMBEDDING,
    INNER,
    OUTER,
    AbstractForm,
    Dropout,
    packed_logits,
    spare_gradient,
)
from coulomb.attention.layers.base import AbstractAttention
from coulomb.attention.layers.baselines import Linformer, SoftmaxAttention
from coulomb.attention.layers.kernel import KernelAttention
from coulomb.attention.layers.packed_cores import apply, run, weight_gradient
from coulomb.attention.ops.api import kernel_attention
from coulomb.attention.ops.decoding import decode_step, init_state
from coulomb.features import DEFAULT_MAP, Particles, feature_maps
from coulomb.kernels import encoder_rows as loops
from coulomb.kernels import particles as particle_system


class CompiledForm(AbstractForm):
    """The encoder on packed tokens in compiled loops: the fast twin of `TorchForm`."""

    compiled = True

    def embed(self) -> Tensor:
        model = self.model
        places, norm = model.position_embedding, model.embedding_norm
        rows = None if places is None else places.weight
        tables = model.token_embedding.weight, rows, norm.weight, norm.bias
        dropout = self.dropout(0).at(EMBEDDING, model.dropout.p)
        inputs = self.token_ids.contiguous(), self.layout, norm.eps, dropout
        return apply(Embed, *tables, *inputs)

    def finish(self, number: int, x: Tensor, out: Tensor) -> Tensor:
        layer, dropout = self.layer(number), self.dropout(number)
        pre, rate, widen = layer.pre_norm, layer.dropout.p, layer.widen

        def add(
            x: Tensor, residual: Tensor, linear: nn.Module, norm: nn.LayerNorm, at: int
        ) -> Tensor:
            affine = (None, None) if pre else (norm.weight, norm.bias)
            matrix = x, residual, linear.weight, linear.bias
            return apply(AddNorm, *matrix, *affine, norm.eps, dropout.at(at, rate))

        assert isinstance(layer.attention, AbstractAttention)
        x = add(out, x, layer.attention.out_proj, layer.attention_norm, BRANCH)
        inside = layer.ffn_norm(x) if pre else x
        drop = dropout.at(INNER, rate)
        inner, same = apply(Gelu, inside, widen.weight, widen.bias, drop)
        return add(inner, x if pre else same, layer.narrow, layer.ffn_norm, OUTER)

    def weighted_sums(self, x: Tensor, weights: NDArray[np.float64]) -> Tensor:
        return apply(Pool, x, weights.astype(np.float32), self.layout.bounds)


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
        needs, kept = ctx.needs_input_grad, torch.empty_like(normal)
        passed, sums = torch.empty_like(kept), kept.new_zeros(3, kept.shape[1])
        saved = normal, scales, gain, ctx.words
        run(loops.add_rows_back, grad, *saved, sums, kept, passed)
        grad_x = passed.mm(weight) if needs[0] else None
        grad_weight = weight_gradient(needs[2], passed, x)
        norm = (None, None) if gain is None else (sums[1], sums[2])
        grad_bias = sums[0] if needs[3] else None
        return (grad_x, kept, grad_weight, grad_bias, *norm, None, None)


class Gelu(torch.autograd.Function):
    """`drop(gelu(x W' + b))`, and x, whose gradient a product then adds to."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor]:
        """Project and apply the function."""
        slope = x.mm(weight.t())
        out = torch.empty_like(slope)
        run(loops.gelu_rows, slope, bias, _drop_words(dropout), out)
        ctx.save_for_backward(x, weight, slope)
        ctx.set_materialize_grads(False)
        return out, x

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, grad_same: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, weight, slope = ctx.saved_tensors
        needs, total = ctx.needs_input_grad, grad.new_zeros(len(weight))
        grad, grad_x = grad.clone(), None
        run(loops.slope_rows, grad, slope, total)
        if grad_same is not None:
            grad_x = grad_same.addmm(grad, weight)
        elif needs[0]:
            grad_x = grad.mm(weight)
        return grad_x, weight_gradient(needs[1], grad, x), total, None


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


def compile_loops() -> None:
    """Compile all loops of the project, or load them from the cache."""
    particle_system.compile_loops()
    particles = Particles(torch.zeros(4, 128, 64))
    for causal in (False, True):
        x = torch.zeros(1, 4, 2048, 64, requires_grad=True)
        out = kernel_attention(x, x, x, particles, DEFAULT_MAP, causal=causal)
        torch.autograd.grad(out.sum(), x)
    x = torch.zeros(1, 4, 64)
    state = init_state(particles, DEFAULT_MAP, batch=1, heads=4, dim_v=64)
    decode_step(state, x, x, x, particles, DEFAULT_MAP)
    shape = EncoderSettings(8, 2, n_layers=1, width=8, ffn_width=8)
    rows: list[AttentionFactory] = [
        *(
            partial(KernelAttention, qkv=qkv, feature_map=name, n_features=8)
            for name in feature_maps
            for qkv in ("shared", "learned")
            if feature_maps.build(name).loop_code is not None
        ),
        SoftmaxAttention,
        Linformer,
    ]
    batch = TokenBatch(torch.arange(8), torch.tensor([0, 3, 8]))
    for row in rows:
        model = KernelEncoder(shape, row, generator=0)
        logits = packed_logits(model, batch, dropout_seed=0)
        torch.autograd.grad(logits.sum(), model.token_embedding.weight)
