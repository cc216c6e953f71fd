"""One autograd function for every form: blocks, their gradients, the particles'."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coulomb.attention.ops import compiled
from coulomb.attention.ops.block_maps import (
    BlockMap,
    Side,
    Workspace,
    block_map,
    borrowed_workspace,
)
from coulomb.attention.ops.blocked import (
    Block,
    BlockIndex,
    Gradients,
    Problem,
    Saved,
    causal_backward,
    causal_forward,
    linear_backward,
    linear_forward,
    quadratic_backward,
    quadratic_forward,
)
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


_Forward = Callable[[BlockMap, Block, Problem], Saved]
_Backward = Callable[[BlockMap, Block, Saved, Gradients], None]


def _choose(
    problem: Problem, features: BlockMap, block: Block
) -> tuple[_Forward, _Backward]:
    if problem.causal:
        return causal_forward, causal_backward
    (n, m), form = (x.shape[2] for x in block[:2]), problem.form
    if form == "auto":
        n_features = features.n_features(block.k.shape[3])
        form = cheaper_form(n, m, n_features, block.v.shape[3])
    if form == "quadratic" and m > 0:
        return quadratic_forward, quadratic_backward
    return linear_forward, linear_backward


def _empty_output(q: Tensor, v: Tensor) -> Tensor:
    # In the memory order of `q`: a caller who splits heads by a transposed view joins
    # them again without a copy.
    if q.dim() == 4 and q.stride(1) < q.stride(2):
        batch, heads, length, _ = q.shape
        return v.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    return v.new_empty(*q.shape[:-1], v.shape[-1])


def _sides(particles: tuple[Tensor | None, ...], *, track: bool) -> tuple[Side, Side]:
    positions, phases, key_positions, key_phases = particles
    assert positions is not None
    queries = Side(Particles(positions, phases), track=track)
    if key_positions is None:
        return queries, queries
    return queries, Side(Particles(key_positions, key_phases), track=track)


class FusedAttention(torch.autograd.Function):
    """Attention whose features exist one block at a time, forwards and backwards."""

    @staticmethod
    def forward(
        ctx: Any,
        problem: Problem,
        key_mask: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_weight: Tensor | None,
        *particles: Tensor | None,
    ) -> Tensor:
        """Compute the output, block by block."""
        out = _empty_output(q, v)
        ctx.problem = problem
        tensors = key_mask, q, k, v, log_weight, *particles
        if log_weight is None and particles[2] is None:
            assert particles[0] is not None
            operands = q, k, v, particles[0], key_mask
            ctx.state = compiled.forward(problem, *operands, out)
            if ctx.state is not None:
                ctx.save_for_backward(*tensors, out)
                return out
        ctx.state = []
        sides = _sides(particles, track=False)
        with borrowed_workspace(sides[0].particles.positions.dtype, q.device) as work:
            for index in problem.blocks:
                block = _block(tensors, index, out, work)
                features = block_map(problem.feature_map, sides, work)
                saved = _choose(problem, features, block)[0](features, block, problem)
                if not saved.exact and features.retry:
                    features = block_map(problem.feature_map, sides, work, logs=True)
                    run = _choose(problem, features, block)[0]
                    saved = run(features, block, problem)._replace(logs=True)
                index.put(block.out, out)
                ctx.state.append(saved)
        ctx.save_for_backward(*tensors, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Evaluate the features again and pull the gradient back."""
        *tensors, out = ctx.saved_tensors
        key_mask, q, k, v, log_weight, *particles = tensors
        grads: list[Any] = [
            x if x is None else torch.empty_like(x) for x in (q, k, v, log_weight)
        ]
        track = any(ctx.needs_input_grad[6:])
        sides = _sides(tuple(particles), track=track)
        with full_precision(grad):
            if isinstance(ctx.state, compiled.Kept):
                operands = q, k, v, particles[0], key_mask
                outputs = out, grad, grads[:3]
                compiled.backward(
                    ctx.problem, operands, ctx.state, *outputs, sides[0].grads[0]
                )
            else:
                _pull_blocks(ctx.problem, ctx.state, tensors, out, grad, grads, sides)
        own = sides[1].grads if particles[2] is not None else (None, None)
        return (None, None, *grads, *sides[0].grads, *own)


def _block(tensors: Any, index: BlockIndex, out: Tensor, work: Workspace) -> Block:
    mask, q, k, v, log_weight = tensors[:5]
    if index.rows is not None:
        mask = index.mask
    elif mask is not None:
        mask = mask[index.start : index.stop]
    weight = None if log_weight is None else index.take(log_weight)
    q, k, v, out = (index.take(x) for x in (q, k, v, out))
    return Block(q, k, v, weight, mask, out, work)


def _pull_blocks(
    problem: Problem,
    state: list[Saved],
    tensors: list[Tensor | None],
    out: Tensor,
    grad: Tensor,
    grads: list[Any],
    sides: tuple[Side, Side],
) -> None:
    track = any(x is not None for x in sides[0].grads)
    with borrowed_workspace(sides[0].particles.positions.dtype, grad.device) as work:
        for index, saved in zip(problem.blocks, state, strict=True):
            block = _block(tensors, index, out, work)
            own = _sides(tuple(tensors[5:]), track=track)
            features = block_map(
                problem.feature_map, own, work, record=True, logs=saved.logs
            )
            parts: list[Any] = [None if x is None else index.take(x) for x in grads]
            grad_out = index.take(grad)
            if index.rows is not None and index.mask is not None:
                # At padding stands some other token, whose gradient would count twice.
                grad_out = grad_out.masked_fill(~index.mask[:, None, :, None], 0)
            run = _choose(problem, features, block)[1]
            run(features, block, saved, Gradients(grad_out, *parts))
            for part, whole in zip(parts, grads, strict=True):
                if part is not None:
                    index.put(part, whole)
            for side, each in zip(
                dict.fromkeys(sides), dict.fromkeys(own), strict=True
            ):
                side.add(each)
