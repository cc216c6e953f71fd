"""Attention inside packed sequences, each kind one step of autograd.

A core takes the states of tokens and gives what the heads give, side by side. Large
products are torch's; features and what happens inside a sequence are compiled loops in
the quadratic order, which is the cheaper one for sentences.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from coulomb.attention.layers.base import AbstractAttention
from coulomb.attention.layers.baselines import Linformer
from coulomb.attention.layers.kernel import AbstractFeatureAttention
from coulomb.features import AbstractFeatureMap
from coulomb.kernels import packed_attention as loops

if TYPE_CHECKING:
    from coulomb.attention.encoder.layout import Layout

# Products of features that may be as small as exp(-40) are far from underflow.
_SAFE_RANGE = 40.0
# Up to about this length the quadratic order is the cheaper one.
_LONGEST = 200

_NONE = np.empty(0, np.float32)


def as_array(x: Any) -> Any:
    """View a tensor as an array, None as an empty one; tuples item by item."""
    if isinstance(x, Tensor):
        return x.detach().contiguous().numpy()
    if isinstance(x, tuple):
        return tuple(map(as_array, x))
    return _NONE if x is None else x


def run(loop: Callable[..., Any], *arguments: Any) -> Any:
    """Call a compiled loop on tensors."""
    return loop(*map(as_array, arguments))


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Apply a step of autograd."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def weight_gradient(wanted: bool, grad: Tensor, x: Tensor) -> Tensor | None:
    """Multiply `grad' x`, if somebody wants it."""
    return grad.t().mm(x) if wanted else None


def _tracked(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in tensors
    )


def attend_features(
    layer: AbstractFeatureAttention, x: Tensor, layout: "Layout"
) -> Tensor | None:
    """Attend by features inside packed sequences, or give None where loops cannot."""
    particles, feature_map = layer.kernel()
    translated = loop_map(feature_map, layer.head_dim)
    shared = layer.qkv == "shared"
    weight = layer.v_proj_weight if shared else layer.in_proj_weight
    bias = layer.v_proj_bias if shared else layer.in_proj_bias
    long = layout.effective_length > _LONGEST
    if translated is None or weight is None or layer.causal or long:
        return None
    keys = layer.as_key_particles()
    positions = particles.positions, None if keys is None else keys.positions
    tensors = x, weight, bias, *positions
    keep = _tracked(*tensors)
    return apply(KernelCore, *tensors, particles.phases, translated, layout, keep)


def attend_softmax(
    layer: AbstractAttention, x: Tensor, layout: "Layout"
) -> Tensor | None:
    """Attend by softmax inside packed sequences, or give None where loops cannot."""
    long = layout.effective_length > _LONGEST
    joint = None if long else _project_joint(layer, x)
    if joint is None:
        return None
    return apply(SoftmaxCore, joint, layer.num_heads, layout, _tracked(joint))


def attend_mixtures(layer: Linformer, x: Tensor, layout: "Layout") -> Tensor | None:
    """Attend to mixtures inside packed sequences, or give None where loops cannot."""
    long = layout.longest > layer.max_length
    joint = None if long else _project_joint(layer, x)
    if joint is None:
        return None
    mixtures = layer.key_mixture, layer.value_mixture
    return apply(MixtureCore, joint, *mixtures, layer.num_heads, layout)


def _project_joint(layer: AbstractAttention, x: Tensor) -> Tensor | None:
    """Put queries, keys and values side by side, `(tokens, 3 width)`."""
    if layer.causal:
        return None
    if layer.qkv == "shared":
        assert layer.v_proj_weight is not None
        values = functional.linear(x, layer.v_proj_weight, layer.v_proj_bias)
        return torch.cat([x, x, values], dim=1)
    if layer.in_proj_weight is None:
        return None
    return functional.linear(x, layer.in_proj_weight, layer.in_proj_bias)


class LoopMap(NamedTuple):
    """A feature map as the compiled loops know it."""

    options: tuple[int, float, float]  # kind, inverse temperature, floor
    favor: bool  # keys weighted by exp(-|k|^2 / 2), not by one over a sum
    sloped: bool  # whether derivatives are not functions of the features

    @property
    def inverse_temperature(self) -> float:
        """What projections are multiplied with."""
        return self.options[1]


def loop_map(feature_map: AbstractFeatureMap, dim: int) -> LoopMap | None:
    """Translate a feature map; None for one that the loops do not know."""
    # Only what the class itself declares: a user's subclass may do something else.
    kind = vars(type(feature_map)).get("loop_code")
    if kind is None:
        return None
    scale = dim**-0.25 if feature_map.imitates_softmax else 1.0
    options = kind, scale / feature_map.temperature, feature_map.floor
    sloped = not feature_map.feature_gives_slope
    return LoopMap(options, feature_map.needs_shift, sloped)


class _Side(NamedTuple):
    """Columns of the states that meet particles: those of queries or of keys."""

    column: int  # the first
    positions: Tensor  # (heads, particles, head_dim)


class _Features(NamedTuple):
    """Features of queries and keys; keys empty where they are the queries."""

    q: Tensor  # (heads * tokens, features)
    k: Tensor
    slopes_q: Tensor
    slopes_k: Tensor
    weights: Tensor  # (heads * tokens,), of the keys


def _sides(
    positions: Tensor, keys: Tensor | None, columns: tuple[int, int]
) -> list[_Side]:
    """Give the sides of queries and keys; one where they are the same."""
    sides = [_Side(columns[0], positions)]
    if keys is not None or columns[0] != columns[1]:
        sides.append(_Side(columns[1], positions if keys is None else keys))
    return sides


def _project(x: Tensor, side: _Side) -> Tensor:
    """Project the heads of x on their particles."""
    heads, count, dim = side.positions.shape
    out = x.new_empty(heads, len(x), count)
    for head, positions in enumerate(side.positions):
        first = side.column + head * dim
        torch.mm(x[:, first : first + dim], positions.t(), out=out[head])
    return out.view(heads * len(x), count)


def _half_squares(x: Tensor, side: _Side, scale: float) -> Tensor:
    heads, _, dim = side.positions.shape
    parts = x[:, side.column : side.column + heads * dim].view(-1, heads, dim)
    return parts.square().sum(dim=-1).t().mul(scale**2 / 2).flatten()


def _features_forward(
    x: Tensor,
    sides: list[_Side],
    phases: Tensor | None,
    loop_map: LoopMap,
    layout: "Layout",
) -> _Features:
    """Evaluate features of the columns of x that hold queries and keys."""
    q = _project(x, sides[0])
    none, weights = q[:0], q.new_ones(len(q))
    shared = len(sides) == 1
    if loop_map.favor:
        scale = loop_map.inverse_temperature
        halves, about = _half_squares(x, sides[-1], scale), (scale, layout.bounds)
        if shared:
            if run(loops.favor_shared_rows, *about, q, halves, weights) < _SAFE_RANGE:
                return _Features(q, none, none, none, weights)
            q, weights = _project(x, sides[0]), q.new_ones(len(q))
        k = q.clone() if shared else _project(x, sides[1])
        run(loops.favor_rows, *about, q, k, halves)
        return _Features(q, k, none, none, weights)
    angles = q.new_zeros(len(sides[0].positions), 1) if phases is None else phases
    found = [q] if shared else [q, _project(x, sides[1])]
    slopes = [torch.empty_like(each) if loop_map.sloped else none for each in found]
    for features, slope in zip(found, slopes, strict=True):
        run(loops.map_rows, loop_map.options, angles, features, slope, weights)
    if shared:
        return _Features(q, none, slopes[0], none, weights)
    return _Features(q, found[1], slopes[0], slopes[1], weights)


def _features_backward(
    x: Tensor,
    sides: list[_Side],
    loop_map: LoopMap,
    features: _Features,
    grads: tuple[Tensor, Tensor, Tensor],
    grad_x: Tensor | None,
    grad_sides: list[_Side] | None,
) -> None:
    """Add the gradients of queries and keys to `grad_x`, of particles to `grad_sides`.

    What nobody wants is not computed.
    """
    grad_q, grad_k, grad_keys = grads
    heads, count, dim = sides[0].positions.shape
    none, favor = torch.zeros_like(grad_keys), loop_map.favor
    options, inverse_temperature = loop_map.options, loop_map.inverse_temperature
    # Keys are weighted by one over the sum of their features, unless by exp(-h_j).
    extras = none if favor else grad_keys * features.weights
    first = none if len(grad_k) else extras
    run(loops.pull_rows, options, features.q, features.slopes_q, first, grad_q)
    if len(grad_k):
        run(loops.pull_rows, options, features.k, features.slopes_k, extras, grad_k)
        if len(sides) == 1:
            grad_q += grad_k
    if favor and grad_x is not None:
        # h_j = |inverse_temperature k_j|^2 / 2.
        place = slice(sides[-1].column, sides[-1].column + heads * dim)
        sums = grad_keys.view(heads, -1).t().repeat_interleave(dim, dim=1)
        grad_x[:, place].addcmul_(x[:, place], sums, value=inverse_temperature**2)
    for number, (side, grad) in enumerate(zip(sides, (grad_q, grad_k), strict=False)):
        for head, part in enumerate(grad.view(heads, -1, count)):
            place = slice(side.column + head * dim, side.column + (head + 1) * dim)
            if grad_x is not None:
                grad_x[:, place].addmm_(part, side.positions[head])
            if grad_sides is not None:
                grad_sides[number].positions[head].addmm_(part.t(), x[:, place])


class KernelCore(torch.autograd.Function):
    """Kernel attention; queries and keys are slices of the states or projected."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        positions: Tensor,
        keys: Tensor | None,
        phases: Tensor | None,
        loop_map: LoopMap,
        layout: "Layout",
        keep: bool,
    ) -> Tensor:
        """Attend."""
        width, heads = x.shape[1], len(positions)
        joint = functional.linear(x, weight, bias)
        shared = len(weight) == width
        source, columns = (x, (0, 0)) if shared else (joint, (0, width))
        sides = _sides(positions, keys, columns)
        features = _features_forward(source, sides, phases, loop_map, layout)
        matrices = x.new_empty(heads * int(layout.offsets[-1]) if keep else 0)
        inverses, out = torch.empty_like(features.weights), torch.empty_like(x)
        places = layout.bounds, heads * layout.offsets
        kept = matrices, features.weights, inverses
        values = joint, 0 if shared else 2 * width
        run(loops.attend_features, features[:2], values, places, kept, out)
        if keep:
            tensors = x, weight, positions, keys, joint, matrices, inverses, out
            ctx.save_for_backward(*tensors, *features)
            ctx.about = columns, places, loop_map
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        x, weight, positions, keys, joint, matrices, inverses, out = saved[:8]
        features = _Features(*saved[8:])
        columns, places, loop_map = ctx.about
        needs, width = ctx.needs_input_grad, x.shape[1]
        shared = len(weight) == width
        grad_q, grad_k, grad_keys, grad_joint = map(
            torch.empty_like, (features.q, features.k, features.weights, joint)
        )
        kept = matrices, features.weights, inverses
        values = joint, 0 if shared else 2 * width
        grads = grad_q, grad_k, grad_joint, grad_keys
        operands = features[:2], values, places, kept
        run(loops.attend_features_back, *operands, out, grad, grads)
        grad_positions = torch.zeros_like(positions)
        grad_key_positions = None if keys is None else torch.zeros_like(keys)
        wanted = needs[3] or needs[4]
        grad_sides = (
            _sides(grad_positions, grad_key_positions, columns) if wanted else None
        )
        parts = loop_map, features, (grad_q, grad_k, grad_keys)
        sides = _sides(positions, keys, columns)
        if shared:
            grad_x = grad_joint.mm(weight) if needs[0] else None
            _features_backward(x, sides, *parts, grad_x, grad_sides)
        else:
            grad_joint[:, : 2 * width] = 0
            _features_backward(joint, sides, *parts, grad_joint, grad_sides)
            grad_x = grad_joint.mm(weight) if needs[0] else None
        grad_weight = weight_gradient(needs[1], grad_joint, x)
        grad_bias = grad_joint.sum(dim=0) if needs[2] else None
        found = grad_x, grad_weight, grad_bias, grad_positions, grad_key_positions
        return (*found, None, None, None, None)


class SoftmaxCore(torch.autograd.Function):
    """Softmax attention with queries, keys and values side by side."""

    @staticmethod
    def forward(
        ctx: Any, joint: Tensor, heads: int, layout: "Layout", keep: bool
    ) -> Tensor:
        """Attend."""
        matrices = joint.new_empty(heads * int(layout.offsets[-1]) if keep else 0)
        out = joint.new_empty(len(joint), joint.shape[1] // 3)
        places = layout.bounds, heads * layout.offsets
        run(loops.attend_softmax, heads, joint, places, matrices, out)
        if keep:
            ctx.save_for_backward(joint, matrices, out)
            ctx.where = heads, places
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        joint, matrices, out = ctx.saved_tensors
        heads, places = ctx.where
        grad_joint, kept = torch.empty_like(joint), (matrices, out)
        run(loops.attend_softmax_back, heads, joint, places, *kept, grad, grad_joint)
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
        layout: "Layout",
    ) -> Tensor:
        """Attend."""
        tokens, width, rank = len(joint), joint.shape[1] // 3, len(keys)
        mixed = joint.new_empty(2 * rank * heads * layout.count, width // heads)
        shares = joint.new_empty(heads * tokens, (rank + 7) // 8 * 8)
        out = joint.new_empty(tokens, width)
        about = heads, (keys, values), joint, layout.bounds
        run(loops.attend_mixtures, *about, mixed, shares, out)
        ctx.save_for_backward(joint, keys, values, mixed, shares, out)
        ctx.heads, ctx.layout = heads, layout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        joint, keys, values, mixed, shares, out = ctx.saved_tensors
        grad_joint = torch.empty_like(joint)
        grads = joint.new_zeros(keys.shape), joint.new_zeros(values.shape)
        about = ctx.heads, (keys, values), joint, ctx.layout.bounds
        kept = mixed, shares, out
        run(loops.attend_mixtures_back, *about, *kept, grad, grad_joint, grads)
        return grad_joint, *grads, None, None
