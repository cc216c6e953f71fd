"""One autograd function for every form: blocks, their gradients, the particles'."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coulomb.attention.ops import blocked, compiled
from coulomb.attention.ops.block_maps import Side, Workspace, borrowed, make_map
from coulomb.attention.ops.blocked import Block, BlockIndex, Gradients, Problem
from coulomb.attention.ops.checks import full_precision
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


def _form(problem: Problem, block: Block, n_features: int) -> blocked.Form:
    n, m, form = block.q.shape[2], block.k.shape[2], problem.form
    if problem.causal:
        return blocked.CAUSAL
    if form == "auto":
        form = cheaper_form(n, m, n_features, block.v.shape[3])
    return blocked.QUADRATIC if form == "quadratic" and m > 0 else blocked.LINEAR


def _empty_output(q: Tensor, v: Tensor) -> Tensor:
    # In the memory order of `q`: a caller who splits heads by a transposed view joins
    # them again without a copy.
    if q.dim() == 4 and q.stride(1) < q.stride(2):
        batch, heads, length, _ = q.shape
        return v.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    return v.new_empty(*q.shape[:-1], v.shape[-1])


def _sides(tensors: Sequence[Any], *, track: bool = False) -> tuple[Side, Side]:
    queries = Side(Particles(*tensors[4:6]), track=track)
    if tensors[6] is None:
        return queries, queries
    return queries, Side(Particles(*tensors[6:8]), track=track)


class FusedAttention(torch.autograd.Function):
    """Attention whose features exist one block at a time, forwards and backwards.

    The tensors are those of `Inputs.tensors`.
    """

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, key_mask: Tensor | None, *tensors: Any
    ) -> Tensor:
        """Compute the output, block by block."""
        q, k, v, log_weight, positions, _, key_positions, _ = tensors
        out = _empty_output(q, v)
        ctx.problem, ctx.state = problem, None
        if log_weight is None and key_positions is None:
            operands = q, k, v, positions, key_mask
            ctx.state = compiled.forward(problem, operands, out)
        if ctx.state is None:
            ctx.state, sides = [], _sides(tensors)
            with borrowed(positions.dtype, q.device) as work:
                for index in problem.blocks:
                    block = _block(tensors, key_mask, index, out, work)
                    features = make_map(problem.feature_map, sides, work)
                    form = _form(problem, block, features.n_features)
                    saved = form.forward(features, block, problem)
                    if not saved.exact and features.retry:
                        features = make_map(problem.feature_map, sides, work, logs=True)
                        saved = form.forward(features, block, problem)
                    index.put(block.out, out)
                    ctx.state.append(saved)
        ctx.save_for_backward(key_mask, *tensors, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Evaluate the features again and pull the gradient back."""
        key_mask, *tensors, out = ctx.saved_tensors
        problem: Problem = ctx.problem
        grads: list[Any] = [
            x if x is None else torch.empty_like(x) for x in tensors[:4]
        ]
        track = any(ctx.needs_input_grad[6:])
        sides = _sides(tensors, track=track)
        own = (None, None) if tensors[6] is None else sides[1].grads
        results = (None, None, *grads, *sides[0].grads, *own)
        dtype = sides[0].particles.positions.dtype
        with full_precision(grad), borrowed(dtype, grad.device) as work:
            if isinstance(ctx.state, compiled.Kept):
                operands = *tensors[:3], tensors[4], key_mask
                outputs = out, grad, grads[:3], sides[0].grads[0]
                compiled.backward(problem.feature_map, operands, ctx.state, *outputs)
                return results
            for index, saved in zip(problem.blocks, ctx.state, strict=True):
                block = _block(tensors, key_mask, index, out, work)
                parts = _sides(tensors, track=track)
                options = {"record": True, "logs": saved.logs}
                features = make_map(problem.feature_map, parts, work, **options)
                targets = Gradients(*(index.take(x) for x in (grad, *grads)))
                if index.mask is not None:
                    # At padding stands some other token, that would count twice.
                    padding = ~index.mask[:, None, :, None]
                    grad_out = targets.out.masked_fill(padding, 0)
                    targets = targets._replace(out=grad_out)
                form = _form(problem, block, features.n_features)
                form.backward(features, block, saved, targets)
                for target, whole in zip(targets[1:], grads, strict=True):
                    index.put(target, whole)
                for side, part in zip(sides, parts, strict=True):
                    side.add(part)
        return results


def _block(
    tensors: Sequence[Any], mask: Any, index: BlockIndex, out: Tensor, work: Workspace
) -> Block:
    if index.rows is not None:
        mask = index.mask
    elif mask is not None:
        mask = mask[index.start : index.stop]
    q, k, v, log_weight = (index.take(x) for x in tensors[:4])
    return Block(q, k, v, log_weight, mask, index.take(out), work)
