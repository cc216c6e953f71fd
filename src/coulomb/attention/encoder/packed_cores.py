"""Attention inside packed sequences, each kind one step of autograd.

A core takes the states of tokens and gives what the heads give, side by side. Large
products are torch's; features and what happens inside a sequence are compiled loops in
the quadratic order, which is the cheaper one for sentences.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coulomb.attention.encoder.layout import Layout
from coulomb.attention.encoder.packed_functions import array, weight_gradient
from coulomb.features import (
    AbstractFeatureMap,
    Elu,
    Favor,
    SoftmaxFeatures,
    Softplus,
    SquaredCosine,
    SquaredSigmoid,
)
from coulomb.kernels import maps
from coulomb.kernels import packed_attention as loops

_KINDS: dict[type[AbstractFeatureMap], int] = {
    SoftmaxFeatures: maps.SOFTMAX,
    Elu: maps.ELU,
    Softplus: maps.SOFTPLUS,
    SquaredSigmoid: maps.SIGMOID2,
    SquaredCosine: maps.COS2,
    Favor: maps.FAVOR,
}
# Maps whose derivative is not a function of the feature.
_SLOPED = (maps.SOFTPLUS, maps.SIGMOID2, maps.COS2)
# Products of features that may be as small as exp(-40) are far from underflow.
_SAFE_RANGE = 40.0


class MapNumbers(NamedTuple):
    """A feature map as the compiled loops know it."""

    kind: int
    cold: float  # what projections are multiplied with
    floor: float


def map_numbers(feature_map: AbstractFeatureMap, dim: int) -> MapNumbers | None:
    """Translate a feature map."""
    kind = _KINDS.get(type(feature_map))
    if kind is None:
        return None
    if kind == maps.FAVOR:
        return MapNumbers(kind, dim**-0.25, 0.0)
    cold = 1 / getattr(feature_map, "temperature", 1.0)
    return MapNumbers(kind, cold, getattr(feature_map, "floor", 0.0))


class _Features(NamedTuple):
    """Features of queries and keys; keys empty where they are the queries."""

    q: Tensor  # (heads * tokens, features)
    k: Tensor
    slopes_q: Tensor
    slopes_k: Tensor
    weights: Tensor  # (heads * tokens,), of the keys


def _sides(positions: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Give what meets queries and what meets keys: untied particles have two halves."""
    if positions.shape[2] == dim:
        return positions, positions
    return positions[..., :dim], positions[..., dim:]


def _project(x: Tensor, first: int, positions: Tensor) -> Tensor:
    """Project the heads of x, from column `first` on, on their particles."""
    heads, count, dim = positions.shape
    out = x.new_empty(heads, len(x), count)
    for head in range(heads):
        part = x[:, first + head * dim : first + (head + 1) * dim]
        torch.mm(part, positions[head].t(), out=out[head])
    return out.view(heads * len(x), count)


def _half_squares(x: Tensor, first: int, positions: Tensor, scale: float) -> Tensor:
    heads, _, dim = positions.shape
    parts = x[:, first : first + heads * dim].view(-1, heads, dim)
    return parts.square().sum(dim=-1).t().mul(scale**2 / 2).flatten()


def _evaluate(
    x: Tensor,
    columns: tuple[int, int],
    sides: tuple[Tensor, Tensor],
    phases: Tensor | None,
    numbers: MapNumbers,
    layout: Layout,
) -> _Features:
    """Evaluate features of the columns of x that hold queries and keys."""
    asking, asked = sides
    q = _project(x, columns[0], asking)
    none, weights = q[:0], q.new_ones(len(q))
    shared = columns[0] == columns[1] and asking is asked
    if numbers.kind == maps.FAVOR:
        halves = _half_squares(x, columns[1], asked, numbers.cold)
        about = numbers.cold, layout.bounds
        if shared:
            arrays = map(array, (q, halves, weights))
            if maps.favor_shared_rows(*about, *arrays) < _SAFE_RANGE:
                return _Features(q, none, none, none, weights)
            q, weights = _project(x, columns[0], asking), q.new_ones(len(q))
        k = q.clone() if shared else _project(x, columns[1], asked)
        maps.favor_rows(*about, *map(array, (q, k, halves)))
        return _Features(q, k, none, none, weights)
    heads = len(asking)
    angles = np.zeros((heads, 1), np.float32) if phases is None else array(phases)
    sloped = numbers.kind in _SLOPED
    slopes_q = torch.empty_like(q) if sloped else none
    maps.map_rows(tuple(numbers), angles, *map(array, (q, slopes_q, weights)))
    if shared:
        return _Features(q, none, slopes_q, none, weights)
    k = _project(x, columns[1], asked)
    slopes_k = torch.empty_like(k) if sloped else none
    maps.map_rows(tuple(numbers), angles, *map(array, (k, slopes_k, weights)))
    return _Features(q, k, slopes_q, slopes_k, weights)


def _pull(
    x: Tensor,
    columns: tuple[int, int],
    sides: tuple[Tensor, Tensor],
    numbers: MapNumbers,
    features: _Features,
    grads: tuple[Tensor, Tensor, Tensor],
    grad_x: Tensor | None,
    wanted: bool,
) -> Tensor | None:
    """Add the gradient of queries and keys to `grad_x`; give that of the particles.

    What nobody wants is not computed.
    """
    grad_q, grad_k, grad_keys = grads
    heads, count, dim = sides[0].shape
    about, none = tuple(numbers), torch.zeros_like(grad_keys)
    tied, favor = sides[0] is sides[1], numbers.kind == maps.FAVOR
    shared = columns[0] == columns[1] and tied
    # Keys are weighted by one over the sum of their features, unless by exp(-h_j).
    extras = none if favor else grad_keys * features.weights
    first = none if len(grad_k) else extras
    arrays = (array(t) for t in (features.q, features.slopes_q, first, grad_q))
    maps.pull_rows(about, *arrays)
    if len(grad_k):
        arrays = (array(t) for t in (features.k, features.slopes_k, extras, grad_k))
        maps.pull_rows(about, *arrays)
        if shared:
            grad_q += grad_k
    if favor and grad_x is not None:
        # h_j = cold^2 |k_j|^2 / 2.
        start, stop = columns[1], columns[1] + heads * dim
        sums = grad_keys.view(heads, -1).t().repeat_interleave(dim, dim=1)
        grad_x[:, start:stop].addcmul_(x[:, start:stop], sums, value=numbers.cold**2)
    totals = [torch.zeros_like(side) for side in (sides[:1] if tied else sides)]
    pairs = [(columns[0], sides[0], totals[0], grad_q)]
    if not shared:
        pairs.append((columns[1], sides[1], totals[-1], grad_k))
    for column, positions, total, grad in pairs:
        for head, part in enumerate(grad.view(heads, -1, count)):
            place = slice(column + head * dim, column + (head + 1) * dim)
            if grad_x is not None:
                grad_x[:, place].addmm_(part, positions[head])
            if wanted:
                total[head].addmm_(part.t(), x[:, place])
    return torch.cat(totals, dim=2) if wanted else None


class KernelCore(torch.autograd.Function):
    """Kernel attention; queries and keys are slices of the states or projected."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        positions: Tensor,
        phases: Tensor | None,
        numbers: MapNumbers,
        layout: Layout,
        keep: bool,
    ) -> Tensor:
        """Attend."""
        width = x.shape[1]
        joint = _linear(x, weight, bias)
        shared = len(weight) == width
        source, columns = (x, (0, 0)) if shared else (joint, (0, width))
        heads = len(positions)
        sides = _sides(positions, width // heads)
        features = _evaluate(source, columns, sides, phases, numbers, layout)
        size = heads * int(layout.offsets[-1]) if keep else 0
        matrices = x.new_empty(size)
        inverses, out = torch.empty_like(features.weights), torch.empty_like(x)
        loops.attend_features(
            (array(features.q), array(features.k)),
            (array(joint), 0 if shared else 2 * width),
            (layout.bounds, heads * layout.offsets),
            tuple(map(array, (matrices, features.weights, inverses))),
            array(out),
        )
        if keep:
            tensors = x, weight, positions, joint, matrices, inverses, out
            ctx.save_for_backward(*tensors, *features)
            ctx.numbers, ctx.layout = numbers, layout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, positions, joint, matrices, inverses, out = ctx.saved_tensors[:7]
        features = _Features(*ctx.saved_tensors[7:])
        layout, needs, width = ctx.layout, ctx.needs_input_grad, x.shape[1]
        shared, heads = len(weight) == width, len(positions)
        grad_q, grad_k = torch.empty_like(features.q), torch.empty_like(features.k)
        grad_keys = torch.empty_like(features.weights)
        grad_joint = torch.empty_like(joint)
        loops.attend_features_back(
            (array(features.q), array(features.k)),
            (array(joint), 0 if shared else 2 * width),
            (layout.bounds, heads * layout.offsets),
            tuple(map(array, (matrices, features.weights, inverses))),
            *(array(out), array(grad)),
            tuple(map(array, (grad_q, grad_k, grad_joint, grad_keys))),
        )
        sides = _sides(positions, width // heads)
        parts = sides, ctx.numbers, features, (grad_q, grad_k, grad_keys)
        if shared:
            grad_x = grad_joint.mm(weight) if needs[0] else None
            moved = _pull(x, (0, 0), *parts, grad_x, needs[3])
        else:
            grad_joint[:, : 2 * width] = 0
            moved = _pull(joint, (0, width), *parts, grad_joint, needs[3])
            grad_x = grad_joint.mm(weight) if needs[0] else None
        grad_weight = weight_gradient(needs[1], grad_joint, x)
        grad_bias = grad_joint.sum(dim=0) if needs[2] else None
        return (grad_x, grad_weight, grad_bias, moved, None, None, None, None)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.mm(weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
