"""One autograd function for every form: slabs, their gradients, the particles'."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coulomb.attention.ops import compiled
from coulomb.attention.ops.bidirectional import (
    linear_backward,
    linear_forward,
    quadratic_backward,
    quadratic_forward,
)
from coulomb.attention.ops.block_maps import BlockMap, block_map
from coulomb.attention.ops.blocks import Bucket, Cut, Plan, Saved, Slab, SlabGradients
from coulomb.attention.ops.causal import CHUNK, causal_backward, causal_forward
from coulomb.attention.ops.workspace import Workspace, borrowed_workspace
from coulomb.features import Particles


def cheaper_form(n: int, m: int, n_features: int, dim_v: int) -> str:
    """Compare the multiplications of the two orders of the product.

    Examples
    --------
    >>> [cheaper_form(n, n, 256, 64) for n in (64, 128)]
    ['quadratic', 'linear']
    """
    quadratic = n * m * (n_features + dim_v)
    return "quadratic" if quadratic < (n + m) * n_features * dim_v else "linear"


def full_precision(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Leave autocast, whose matrix products would accumulate in half precision."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


_Forward = Callable[[BlockMap, Slab, Tensor], Saved]
_Backward = Callable[[BlockMap, Slab, Saved, Tensor, Tensor, SlabGradients], None]


def _form(plan: Plan, q: Tensor, k: Tensor, v: Tensor, n_features: int) -> str:
    if plan.form != "auto":
        return plan.form
    if plan.causal:
        return "linear"
    return cheaper_form(q.shape[2], k.shape[2], n_features, v.shape[3])


def _choose(plan: Plan, features: BlockMap, slab: Slab) -> tuple[_Forward, _Backward]:
    n, m = slab.q.shape[2], slab.k.shape[2]
    form = _form(plan, slab.q, slab.k, slab.v, features.n_features(slab.k.shape[3]))
    if plan.causal:
        # Without chunks the causal form is its own quadratic dual.
        chunk = max(n, 1) if form == "quadratic" else CHUNK
        return partial(causal_forward, chunk=chunk, keep=plan.backward), causal_backward
    if form == "quadratic" and m > 0:
        return quadratic_forward, quadratic_backward
    return partial(linear_forward, keep=plan.keep), linear_backward


def _part(x: Tensor, cut: Cut, packed: bool) -> Tensor:
    # A view, except of a bucket.
    if isinstance(cut, Bucket):
        return x[cut.rows].transpose(1, 2)
    part = x[cut[0] : cut[1]]
    return part.transpose(0, 1).unsqueeze(0) if packed else part


def _put(part: Tensor, x: Tensor, cut: Cut) -> None:
    # What was written into a view is there already.
    if isinstance(cut, Bucket):
        x[cut.rows[cut.mask]] = part.transpose(1, 2)[cut.mask]


def _like(x: Tensor, last: int) -> Tensor:
    # In the memory order of `x`: a caller who splits heads by a transposed view joins
    # them again without a copy.
    if x.dim() == 4 and x.stride(1) < x.stride(2):
        batch, heads, length, _ = x.shape
        return x.new_empty(batch, length, heads, last).transpose(1, 2)
    return x.new_empty(*x.shape[:-1], last)


class FusedAttention(torch.autograd.Function):
    """Attention whose features exist one block at a time, forwards and backwards."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        phases: Tensor | None,
        key_mask: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        """Compute the output, slab by slab."""
        out = _like(q, v.shape[-1]).to(v.dtype)
        ctx.plan = plan
        form = "linear" if plan.packed else _form(plan, q, k, v, positions.shape[1])
        kind = compiled.kind_of(plan, form, q, k, v, positions)
        if kind is not None:
            operands = q, k, v, positions, key_mask
            ctx.state = compiled.forward(kind, plan, *operands, out)
            if ctx.state is not None:
                ctx.save_for_backward(q, k, v, positions, phases, key_mask, out)
                return out
        state = []
        with borrowed_workspace(positions.dtype, q.device) as work:
            for cut in plan.cuts:
                slab = _slab(q, k, v, key_mask, cut, plan)
                features = _features(plan, positions, phases, work, track=False)
                run, _ = _choose(plan, features, slab)
                part = _part(out, cut, plan.packed)
                state.append(run(features, slab, part))
                _put(part, out, cut)
        ctx.save_for_backward(q, k, v, positions, phases, key_mask, out)
        ctx.state = state
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Evaluate the features again and pull the gradient back."""
        work = borrowed_workspace(ctx.saved_tensors[3].dtype, grad.device)
        with full_precision(grad), work as arrays:
            return _backward(ctx, grad, arrays)


def _slab(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cut: Cut,
    plan: Plan,
) -> Slab:
    if isinstance(cut, Bucket):
        mask: Tensor | None = cut.mask
    else:
        mask = None if key_mask is None else key_mask[cut[0] : cut[1]]
    q, k, v = (_part(x, cut, plan.packed) for x in (q, k, v))
    return Slab(q, k, v, mask)


def _features(
    plan: Plan,
    positions: Tensor,
    phases: Tensor | None,
    work: Workspace,
    *,
    track: bool,
) -> BlockMap:
    return block_map(plan.feature_map, Particles(positions, phases), work, track=track)


def _backward(ctx: Any, grad: Tensor, work: Workspace) -> tuple[Tensor | None, ...]:
    q, k, v, positions, phases, key_mask, out = ctx.saved_tensors
    plan: Plan = ctx.plan
    track = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    grads = SlabGradients(*(torch.empty_like(x) for x in (q, k, v)))
    grad_positions = torch.zeros_like(positions) if track else None
    grad_phases = torch.zeros_like(phases) if track and phases is not None else None
    if isinstance(ctx.state, compiled.Kept):
        operands = q, k, v, positions
        known = key_mask, ctx.state, out, grad
        compiled.backward(plan.feature_map, operands, *known, grads, grad_positions)
        return (*grads, grad_positions, grad_phases, None, None)
    for cut, saved in zip(plan.cuts, ctx.state, strict=True):
        slab = _slab(q, k, v, key_mask, cut, plan)
        features = _features(plan, positions, phases, work, track=track)
        _, run = _choose(plan, features, slab)
        parts = SlabGradients(*(_part(x, cut, plan.packed) for x in grads))
        output, grad_output = (_part(x, cut, plan.packed) for x in (out, grad))
        if isinstance(cut, Bucket):
            # At padding stands some other token, whose gradient would count twice.
            padding = ~cut.mask[:, None, :, None]
            grad_output = grad_output.masked_fill(padding, 0)
        run(features, slab, saved, output, grad_output, parts)
        for each, whole in zip(parts, grads, strict=True):
            _put(each, whole, cut)
        for total, part in (
            (grad_positions, features.grad_positions),
            (grad_phases, features.grad_phases),
        ):
            if total is not None and part is not None:
                total += part
    return (*grads, grad_positions, grad_phases, None, None)
