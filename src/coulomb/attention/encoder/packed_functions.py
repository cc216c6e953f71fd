"""Parts of the encoder on packed tokens, each one step of autograd.

Large products are torch's; what lies between two of them is one compiled pass over the
rows. `backward` pulls the gradient of the output back to every tensor of `forward`, and
computes only what is wanted; gradients of gradients there are none.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from coulomb.attention.encoder.dropout import Dropout
from coulomb.attention.encoder.layout import Layout
from coulomb.attention.encoder.packed_gradients import spare_gradient
from coulomb.kernels import encoder_rows as loops

Floats = NDArray[np.float32]

_NONE: Floats = np.empty(0, np.float32)


def array(x: Tensor | None) -> Floats:
    """View a tensor as an array; none as an empty one."""
    if x is None:
        return _NONE
    found: Floats = x.detach().contiguous().numpy()
    return found


def drop_words(dropout: Dropout | None) -> tuple[int, int, float]:
    """Give a place's dropout as numbers for the compiled loops."""
    return (0, 0, 1.0) if dropout is None else (*dropout, dropout.scale)


def bias_of(bias: Tensor | None, width: int) -> Floats:
    """Give a bias, zeros if there is none."""
    return np.zeros(width, np.float32) if bias is None else array(bias)


def weight_gradient(wanted: bool, grad: Tensor, x: Tensor) -> Tensor | None:
    """Multiply `grad' x`, if somebody wants it."""
    return grad.t().mm(x) if wanted else None


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
        words = drop_words(dropout)
        where = token_ids.numpy(), layout.embedded.numpy()
        arrays = [array(x) for x in (table, rows, gain, shift)]
        loops.embed_rows(
            *(*where, *arrays, eps, words),
            *(array(x) for x in (out, normal, scales)),
        )
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
        loops.embed_rows_back(
            *(array(grad), token_ids.numpy(), ctx.layout.embedded.numpy()),
            *(array(x) for x in (normal, scales, gain)),
            *(ctx.words, array(tables[0]), array(tables[1]), array(sums)),
        )
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
        words = drop_words(dropout)
        loops.add_rows(
            *(array(normal), bias_of(bias, len(weight)), array(residual)),
            *(array(gain), array(shift), eps, words, array(out), array(scales)),
        )
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
    loops.add_rows_back(
        *(array(x) for x in (grad, normal, scales, gain)),
        words,
        *(array(x) for x in (sums, kept, passed)),
    )
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
        words = [drop_words(dropout) for dropout in dropouts]
        slope = x.mm(widen.t())
        inner = torch.empty_like(slope)
        loops.gelu_rows(array(slope), array(widen_bias), words[0], array(inner))
        normal = inner.mm(narrow.t())
        out, scales = torch.empty_like(normal), x.new_empty(len(x))
        other = x if residual is None else residual
        loops.add_rows(
            *(array(t) for t in (normal, narrow_bias, other, gain, shift)),
            *(eps, words[1], array(out), array(scales)),
        )
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
        loops.slope_rows(array(grad_inner), array(slope), array(total))
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
        ctx: Any, x: Tensor, weights: Floats, bounds: NDArray[np.int64]
    ) -> Tensor:
        """Average the states of sequences."""
        out = x.new_empty(len(bounds) - 1, x.shape[1])
        loops.pool_rows(array(x), weights, bounds, array(out))
        ctx.weights, ctx.bounds = weights, bounds
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out = grad.new_empty(len(ctx.weights), grad.shape[1])
        loops.pool_rows_back(array(grad), ctx.weights, ctx.bounds, array(out))
        return out, None, None
