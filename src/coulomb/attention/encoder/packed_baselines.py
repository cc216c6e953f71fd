"""Softmax attention and Linformer inside packed sequences, each one step of autograd.

Both take queries, keys and values side by side, and give what the heads give.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coulomb.attention.encoder.layout import Layout
from coulomb.attention.encoder.packed_functions import array
from coulomb.kernels import packed_attention as loops
from coulomb.kernels import packed_mixtures as mixture_loops


class SoftmaxCore(torch.autograd.Function):
    """Softmax attention with queries, keys and values side by side."""

    @staticmethod
    def forward(
        ctx: Any, joint: Tensor, heads: int, layout: Layout, keep: bool
    ) -> Tensor:
        """Attend."""
        matrices = joint.new_empty(heads * int(layout.offsets[-1]) if keep else 0)
        out = joint.new_empty(len(joint), joint.shape[1] // 3)
        loops.attend_softmax(
            *(heads, array(joint)),
            (layout.bounds, heads * layout.offsets),
            *(array(matrices), array(out)),
        )
        if keep:
            ctx.save_for_backward(joint, matrices, out)
            ctx.heads, ctx.layout = heads, layout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        joint, matrices, out = ctx.saved_tensors
        layout, grad_joint = ctx.layout, torch.empty_like(joint)
        loops.attend_softmax_back(
            *(ctx.heads, array(joint)),
            (layout.bounds, ctx.heads * layout.offsets),
            *(array(t) for t in (matrices, out, grad, grad_joint)),
        )
        return grad_joint, None, None, None


class MixtureCore(torch.autograd.Function):
    """Softmax attention to learned mixtures of keys and values: Linformer."""

    @staticmethod
    def forward(
        ctx: Any,
        joint: Tensor,
        keys: Tensor,
        values: Tensor,
        heads: int,
        layout: Layout,
    ) -> Tensor:
        """Attend."""
        tokens, width, rank = len(joint), joint.shape[1] // 3, len(keys)
        mixed = joint.new_empty(2 * rank * heads * layout.count, width // heads)
        shares = joint.new_empty(heads * tokens, (rank + 7) // 8 * 8)
        out = joint.new_empty(tokens, width)
        mixture_loops.attend_mixtures(
            *(heads, (array(keys), array(values)), array(joint), layout.bounds),
            *(array(mixed), array(shares), array(out)),
        )
        ctx.save_for_backward(joint, keys, values, mixed, shares, out)
        ctx.heads, ctx.layout = heads, layout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        joint, keys, values, mixed, shares, out = ctx.saved_tensors
        grad_joint = torch.empty_like(joint)
        grads = joint.new_zeros(keys.shape), joint.new_zeros(values.shape)
        mixture_loops.attend_mixtures_back(
            *(ctx.heads, (array(keys), array(values)), array(joint)),
            *(ctx.layout.bounds, array(mixed), array(shares), array(out)),
            *(array(grad), array(grad_joint), tuple(map(array, grads))),
        )
        return grad_joint, *grads, None, None
