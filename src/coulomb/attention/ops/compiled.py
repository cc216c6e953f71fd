"""Compiled loops for exponential maps in float32, where nothing leaves the range."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coulomb.attention.ops.blocked import Problem
from coulomb.attention.ops.checks import NO_ARRAY, Inputs, as_array, must_be_traceable
from coulomb.attention.ops.tuning import BLOCK
from coulomb.features import AbstractFeatureMap
from coulomb.kernels import available
from coulomb.kernels.runtime import over_torch_threads, threads_for

# Exponents of keys smaller than this give sums, and gradients, far from the ends of
# float32; what is lost of a query, exp(-87) of its largest feature, is then nothing.
_SAFE_RANGE = 32.0
# The longest sequence whose products are formed in one block.
LONGEST_SQUARE = BLOCK
# Fewer multiplications than this are not worth importing the loops for.
_FEWEST = 1 << 22
_FEWEST_DECODED = 1 << 15
# What one thread does in a second, roughly.
_PER_SECOND = 4e10
_DECODED_PER_SECOND = 2.5e9

_Array = np.ndarray[Any, Any]
Token = tuple[Tensor, Tensor, Tensor]


class Kept(NamedTuple):
    """What the loops keep for the pass back."""

    kind: str
    arrays: tuple[_Array, ...]  # as the loops want them; some empty


def _knows(feature_map: AbstractFeatureMap) -> bool:
    return feature_map.exponential and available()


def knows(inputs: Inputs) -> bool:
    """Say whether there are loops for a problem that are worth their import."""
    (q, k, v), positions = inputs[:3], inputs.particles.positions
    return (
        (q.numel() + k.numel()) * positions.shape[1] >= _FEWEST
        and q.device.type == "cpu"
        and min(q.shape[-2], k.shape[-2], *q.shape[:2]) > 0
        and not any(size % 16 for size in (q.shape[-1], v.shape[-1]))
        and positions.shape[1] % 16 == 0
        and all(x is None or x.dtype == torch.float32 for x in inputs.tensors)
        and all(x.stride(-1) == 1 for x in (q, k, v))
        and _knows(inputs.feature_map)
    )


class _Rows(NamedTuple):
    # Where sequences of queries or keys begin and end among the rows of a head.
    bounds: _Array
    packed: bool

    def place(self, x: Tensor) -> tuple[_Array, _Array, tuple[int, int]]:
        """Give numbers, where sequences begin, and the distances of heads and rows."""
        size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        flat = x.detach().as_strided((size,), (1,)).numpy()
        if self.packed:
            row, head, _ = x.stride()
            return flat, self.bounds[:-1] * row, (head, row)
        sequence, head, row, _ = x.stride()
        return flat, np.arange(len(self.bounds) - 1) * sequence, (head, row)


def _rows(problem: Problem, x: Tensor) -> _Rows:
    if problem.bounds is None:
        return _Rows(np.arange(len(x) + 1) * x.shape[2], packed=False)
    return _Rows(np.array([0, *(end for _, end in problem.bounds)]), packed=True)


class _Call(NamedTuple):
    # What the loops are called with.
    loops: Any
    heads: int
    sides: tuple[_Rows, _Rows]
    options: tuple[bool, float, int]
    inputs: tuple[Any, ...]
    shape: tuple[Any, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self[3:]

    @property
    def tokens(self) -> tuple[int, int]:
        """Queries and keys of a head, in all sequences."""
        return int(self.shape[0][0][-1]), int(self.shape[0][1][-1])

    def run(self, work: Any, units: int, products: int) -> None:
        dim, dim_v, features = self.shape[1]
        size = self.heads * sum(self.tokens) * features * (dim + dim_v) * products
        over_torch_threads(work, units, threads_for(units, size / _PER_SECOND))


def _loops() -> Any:
    # Only here: this imports numba.
    from coulomb.kernels import linear_attention

    return linear_attention


def _call(
    kind: str, problem: Problem, tensors: Sequence[Any], key_mask: Tensor | None
) -> _Call:
    q, k, v, log_weight, positions, offsets, key_positions, key_offsets = tensors
    loops, sides = _loops(), (_rows(problem, q), _rows(problem, k))
    lengths = np.diff(sides[0].bounds)
    # A state for each sequence or, if causal, for each span but the first.
    if kind == "linear":
        states = np.ones_like(lengths)
    else:
        states = np.maximum(lengths - 1, 0) // loops.SPAN
    bounds = *(side.bounds for side in sides), np.concatenate([[0], states.cumsum()])
    sizes = q.shape[-1], v.shape[-1], positions.shape[1]
    mask = np.empty(0, np.bool_) if key_mask is None else as_array(key_mask).reshape(-1)
    particles = (positions, offsets), (key_positions, key_offsets)
    inputs = (
        *(sides[0].place(q), sides[1].place(k), sides[1].place(v)),
        tuple(tuple(as_array(x).reshape(-1) for x in side) for side in particles),
        mask,
        _by_head(log_weight),
    )
    order = {"linear": loops.LINEAR, "causal": loops.CAUSAL, "quadratic": loops.SQUARE}
    options = (*_options(problem.feature_map), order[kind])
    return _Call(loops, q.shape[1], sides, options, inputs, (bounds, sizes))


def _by_head(x: Tensor | None) -> _Array:
    # (batch, heads, m, 1) or packed (tokens, heads, 1): all rows of a head in turn.
    array: _Array = as_array(None if x is None else x.transpose(0, 1)).reshape(-1)
    return array


def _options(feature_map: AbstractFeatureMap) -> tuple[bool, float]:
    return feature_map.needs_shift, 1.0 / feature_map.temperature


def forward(
    kind: str,
    problem: Problem,
    tensors: Sequence[Any],
    key_mask: Tensor | None,
    out: Tensor,
) -> Kept | None:
    """Compute the output; None if digits were lost.

    The kind is `"linear"`, `"causal"`, or `"quadratic"` for sequences of one block.
    """
    call = _call(kind, problem, tensors, key_mask)
    dim_v, features = call.shape[1][1:]
    n, m = call.tokens
    row = features + 16 if problem.keep else 0
    states = int(call.shape[0][2][-1]) if problem.backward else 0
    sizes = n * row, m * row, n, m, states * features * (dim_v + 1)
    kept = tuple(torch.empty(call.heads * size).numpy() for size in sizes)
    target = call.sides[0].place(out)
    exact: list[bool] = []

    def work(first: int, end: int) -> None:
        limit = np.float32(_SAFE_RANGE)
        loops = call.loops
        exact.append(loops.attend(*call.arguments, kept, target, limit, first, end))

    call.run(work, call.heads * (len(call.sides[0].bounds) - 1), 1)
    return Kept(kind, kept) if all(exact) else None


def backward(
    kept: Kept,
    problem: Problem,
    tensors: Sequence[Any],
    key_mask: Tensor | None,
    outputs: tuple[Tensor, Tensor],
    grads: Sequence[Any],
) -> None:
    """Pull a gradient back into zeros: of q, k, v, weights and both sides."""
    call = _call(kept.kind, problem, tensors, key_mask)
    out, grad = outputs
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    queries, keys = call.sides
    given = None if grads[3] is None else torch.empty(grads[3].transpose(0, 1).shape)
    positions, offsets, key_positions, key_offsets = grads[4:]
    if tensors[6] is None:
        key_positions = positions
    particles = (positions, offsets), (key_positions, key_offsets)
    targets = (
        queries.place(grads[0]),
        keys.place(grads[1]),
        keys.place(grads[2]),
        tuple(
            tuple(NO_ARRAY if x is None else x.view(-1).numpy() for x in side)
            for side in particles
        ),
        NO_ARRAY if given is None else given.view(-1).numpy(),
    )
    # The sequences of a head add to the same particles, one after the other.
    sequences = len(queries.bounds) - 1
    step = 1 if positions is None else sequences
    places = queries.place(out), queries.place(grad)

    def work(first: int, end: int) -> None:
        part = first * step, end * step
        loops = call.loops
        loops.attend_back(*call.arguments, kept.arrays, places, targets, *part)

    call.run(work, sequences * call.heads // step, 2)
    if given is not None:
        grads[3].copy_(given.transpose(0, 1))


def attend_near(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    particles: Sequence[Tensor],
    reach: tuple[int, int],
    key_mask: Tensor | None = None,
    bounds: Sequence[int] | None = None,
) -> Tensor | None:
    """Attend to near keys, and by features to others, without gradients.

    `(batch, heads, n, dim)` or, with the bounds of sequences, `(tokens, heads, dim)`.
    `particles` are positions and offsets of queries and of keys, and tilts; or nothing.
    `reach` is the window, and the longest sequence whose keys are all near. None where
    there is no loop, it is not worth its import, or anything overflowed.
    """
    tensors, features = (q, k, v, *particles), 0
    if particles:
        features = particles[1].shape[-1]
    if (
        not decodable(tensors)
        or q.numel() * (features + min(2 * reach[0], q.shape[-2])) < _FEWEST
        or v.shape[-1] % 16
        or features % 16
        or any(x.stride(-1) != 1 for x in (q, k, v))
        or must_be_traceable(q)
        or not available()
    ):
        return None
    from coulomb.kernels.near_attention import attend_near

    # In the order of the projections, so that heads are joined without a copy.
    out = v if bounds is not None else v.transpose(1, 2)
    out = torch.empty(out.shape)
    out = out if bounds is not None else out.transpose(1, 2)
    rows = np.arange(len(q) + 1) * q.shape[2] if bounds is None else np.array(bounds)
    side, heads = _Rows(rows, packed=bounds is not None), q.shape[1]
    given = [as_array(x.contiguous()).reshape(-1) for x in particles] or [NO_ARRAY] * 5
    sizes = q.shape[-1], v.shape[-1], features
    mask = np.empty(0, np.bool_) if key_mask is None else as_array(key_mask).reshape(-1)
    ends = (given[0], given[1]), (given[2], given[3])
    inputs = *(side.place(x) for x in (q, k, v)), ends, given[4], mask
    shape, target = (side.bounds, sizes, *reach), side.place(out)
    finite: list[bool] = []

    def work(first: int, end: int) -> None:
        finite.append(attend_near(inputs, shape, target, first, end))

    groups = heads * (len(rows) - 1)
    size = q[..., 0].numel() * (q.shape[-1] + v.shape[-1]) * (3 * features + 64)
    over_torch_threads(work, groups, threads_for(groups, size / _PER_SECOND))
    return out if all(finite) else None


def decodable(tensors: Sequence[Tensor]) -> bool:
    """Say whether compiled decoding takes such tensors."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    return all(x.is_cpu and x.dtype == torch.float32 for x in tensors)


def decoder(
    feature_map: AbstractFeatureMap,
    token: Token,
    positions: Tensor,
    state: tuple[Tensor, Tensor],
) -> Callable[[Token, Tensor, Tensor], Tensor] | None:
    """Prepare to add a token to a state, written to another one or to itself.

    None if the loops cannot, or are not worth it; `decode_step` has looked at shapes.
    """
    sums, shift = (x.contiguous() for x in state)
    if sums.numel() < _FEWEST_DECODED or must_be_traceable(sums):
        return None
    if not (decodable((*token, positions, *state)) and _knows(feature_map)):
        return None
    loops = _loops()
    # Heads that share their particles do not get a copy each.
    positions = positions[0] if positions.stride(0) == 0 else positions
    positions = positions.contiguous()
    batch, heads, dim = token[0].shape
    groups, owners = batch * heads, 1 if positions.dim() == 2 else heads
    sizes = (batch, heads, owners, dim, token[2].shape[2], sums.shape[3])
    about = _options(feature_map), sizes, positions.data_ptr()
    old = sums.data_ptr(), shift.data_ptr()
    threads = threads_for(groups, sums.numel() / _DECODED_PER_SECOND)

    def step(token: Token, new_sums: Tensor, new_shift: Tensor) -> Tensor:
        q, k, v = (x.contiguous() for x in token)
        out = torch.empty_like(v)
        places = q.data_ptr(), k.data_ptr(), v.data_ptr()
        new = new_sums.data_ptr(), new_shift.data_ptr()
        arguments = *about, places, old, new, out.data_ptr()
        if threads == 1:
            loops.decode(*arguments, 0, groups)
        else:
            over_torch_threads(partial(loops.decode, *arguments), groups, threads)
        return out

    # The addresses above are good as long as these live.
    step.owners = positions, sums, shift  # type: ignore[attr-defined]
    return step
