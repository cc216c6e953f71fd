"""The encoder on packed tokens with compiled loops; importing this imports numba.

Each part is one step of autograd. Large products are torch's; what lies between two of
them is one compiled pass over the rows. `backward` computes only what is wanted;
gradients of gradients there are none.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from coulomb.attention.encoder import encoder, packed
from coulomb.attention.encoder.layout import Layout, TokenBatch
from coulomb.attention.encoder.packed import Dropout
from coulomb.attention.layers.base import AbstractAttention
from coulomb.attention.layers.baselines import Linformer, SoftmaxAttention
from coulomb.attention.layers.kernel import AbstractFeatureAttention, KernelAttention
from coulomb.attention.ops.api import kernel_attention
from coulomb.attention.ops.checks import as_array
from coulomb.attention.ops.compiled import attend_near
from coulomb.attention.ops.decoding import decode_step, init_state
from coulomb.features import DEFAULT_MAP, AbstractFeatureMap, Particles, feature_maps
from coulomb.kernels import packed_encoder as loops
from coulomb.kernels import particles as particle_system


class CompiledForm(packed.AbstractForm):
    """The encoder on packed tokens in compiled loops: the fast twin of `TorchForm`."""

    compiled = True

    def embed(self) -> Tensor:
        model = self.model
        places, norm = model.position_embedding, model.embedding_norm
        rows = None if places is None else places.weight
        tables = model.token_embedding.weight, rows, norm.weight, norm.bias
        dropout = self.dropout(0).at(model.dropout.p, packed.EMBEDDING)
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
            return apply(AddNorm, *matrix, *affine, norm.eps, dropout.at(rate, at))

        assert isinstance(layer.attention, AbstractAttention)
        x = add(out, x, layer.attention.out_proj, layer.attention_norm, encoder.BRANCH)
        inside = layer.ffn_norm(x) if pre else x
        drop = dropout.at(rate, encoder.INNER)
        inner, same = apply(Gelu, inside, widen.weight, widen.bias, drop)
        x = x if pre else same
        return add(inner, x, layer.narrow, layer.ffn_norm, encoder.OUTER)

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
        ctx.spare = packed.spare_gradient(table) if ctx.needs_input_grad[0] else None
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
    x = torch.zeros(1, 4, 2048, 32)
    sides = (torch.zeros(4, 64, 32), torch.zeros(4, 64)) * 2
    attend_near(x, x, x, (*sides, torch.zeros(4, 32)), (8, 0))
    x = torch.zeros(1, 4, 64)
    state = init_state(particles, DEFAULT_MAP, batch=1, heads=4, dim_v=64)
    decode_step(state, x, x, x, particles, DEFAULT_MAP)
    shape = encoder.EncoderSettings(8, 2, n_layers=1, width=8, ffn_width=8)
    rows: list[encoder.AttentionFactory] = [SoftmaxAttention, Linformer]
    rows += [
        partial(KernelAttention, qkv=qkv, feature_map=name, n_features=8)
        for name in feature_maps
        for qkv in ("shared", "learned")
        if feature_maps.build(name).loop_code is not None
    ]
    batch = TokenBatch(torch.arange(8), torch.tensor([0, 3, 8]))
    for row in rows:
        model = encoder.KernelEncoder(shape, row, generator=0)
        logits = packed.packed_logits(model, batch, dropout_seed=0)
        torch.autograd.grad(logits.sum(), model.token_embedding.weight)


# Products of features that may be as small as exp(-40) are far from underflow.
_SAFE_RANGE = 40.0
# Up to about this length the quadratic order is the cheaper one.
_LONGEST = 200


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
    wanted = any(t is not None and t.requires_grad for t in tensors)
    return wanted and torch.is_grad_enabled()


def attend_features(
    layer: AbstractFeatureAttention, x: Tensor, layout: Layout
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
    layer: AbstractAttention, x: Tensor, layout: Layout
) -> Tensor | None:
    """Attend by softmax inside packed sequences, or give None where loops cannot."""
    none = x.new_empty(0, 0)
    long = layout.effective_length > _LONGEST
    return None if long else _attend_joint(layer, x, layout, (none, none))


def attend_mixtures(layer: Linformer, x: Tensor, layout: Layout) -> Tensor | None:
    """Attend to mixtures inside packed sequences, or give None where loops cannot."""
    long = layout.longest > layer.max_length
    mixtures = layer.key_mixture, layer.value_mixture
    return None if long else _attend_joint(layer, x, layout, mixtures)


def _attend_joint(
    layer: AbstractAttention, x: Tensor, layout: Layout, mixtures: tuple[Tensor, Tensor]
) -> Tensor | None:
    joint = _project_joint(layer, x)
    if joint is None:
        return None
    tensors = joint, *mixtures
    return apply(SoftmaxCore, *tensors, layer.num_heads, layout, _tracked(*tensors))


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
    layout: Layout,
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
        layout: Layout,
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
        grad_sides = None
        if needs[3] or needs[4]:
            grad_sides = _sides(grad_positions, grad_key_positions, columns)
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
    """Softmax attention with queries, keys and values side by side.

    Or to mixtures of keys and values, Linformer's, of which there may be none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        joint: Tensor,
        keys: Tensor,
        values: Tensor,
        heads: int,
        layout: Layout,
        keep: bool,
    ) -> Tensor:
        """Attend."""
        width, rank = joint.shape[1] // 3, len(keys)
        wide = (rank + 7) // 8 * 8
        offsets = heads * (layout.bounds * wide if rank else layout.offsets)
        matrices = joint.new_empty(int(offsets[-1]) if keep else 0)
        mixed = joint.new_empty(2 * rank * heads * layout.count, width // heads)
        out, places = joint.new_empty(len(joint), width), (layout.bounds, offsets)
        about = heads, joint, (keys, values), places, (matrices, mixed)
        run(loops.attend_softmax, *about, out)
        ctx.save_for_backward(joint, keys, values, matrices, mixed, out)
        ctx.where = heads, places
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        joint, keys, values, *kept, out = ctx.saved_tensors
        heads, places = ctx.where
        grad_joint = torch.empty_like(joint)
        grads = torch.zeros_like(keys), torch.zeros_like(values)
        about = heads, joint, (keys, values), places, tuple(kept)
        run(loops.attend_softmax_back, *about, out, grad, grad_joint, grads)
        return grad_joint, *grads, None, None, None
