"""Compiled loops for exponential maps in float32, where nothing leaves the range."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coulomb.attention.ops.blocked import Problem
from coulomb.attention.ops.checks import must_be_traceable
from coulomb.features import AbstractFeatureMap
from coulomb.kernels import available
from coulomb.kernels.threads import over_torch_threads, threads_for

# Exponents of keys smaller than this give sums, and gradients, far from the ends of
# float32; what is lost of a query, exp(-87) of its largest feature, is then nothing.
_SAFE_RANGE = 32.0
# The longest sequence whose products are formed in one block.
_LONGEST_SQUARE = 96
# Fewer multiplications than this are not worth importing the loops for.
_FEWEST = 1 << 23
_FEWEST_DECODED = 1 << 15
# What one thread does in a second, roughly.
_PER_SECOND = 4e10
_DECODED_PER_SECOND = 2.5e9

_Array = np.ndarray[Any, Any]


class Kept(NamedTuple):
    """What the loops keep for the pass back."""

    kind: str
    arrays: tuple[_Array, ...]  # as the loops want them; some empty


def _knows(feature_map: AbstractFeatureMap) -> bool:
    return feature_map.exponential and available()


def kind_of(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, positions: Tensor
) -> str | None:
    """Say which loops know this problem, if they are worth their import."""
    if (
        q.dim() != 4
        or q.device.type != "cpu"
        or (q.numel() + k.numel()) * positions.shape[1] < _FEWEST
        or min(q.shape[2], k.shape[2]) == 0
        or any(size % 16 for size in (q.shape[3], v.shape[3], positions.shape[1]))
        or any(x.dtype != torch.float32 for x in (q, k, v, positions))
        or any(x.stride(-1) != 1 for x in (q, k, v))
        or not _knows(problem.feature_map)
    ):
        return None
    if problem.form == "linear":
        return "causal" if problem.causal else "linear"
    # The loops know squares of one block.
    fits = q.shape[2] == k.shape[2] <= _LONGEST_SQUARE and not problem.causal
    return "quadratic" if fits else None


def _array(x: Tensor) -> _Array:
    array: _Array = x.detach().contiguous().numpy()
    return array


def _placed(x: Tensor) -> tuple[_Array, tuple[int, ...]]:
    size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    flat = x.detach().as_strided((size,), (1,))
    return flat.numpy(), x.stride()[:3]


class _Call(NamedTuple):
    # What the loops are called with.
    options: tuple[bool, float, bool]
    inputs: tuple[Any, ...]
    shape: tuple[int, ...]

    def run(self, work: Any, units: int, products: int) -> None:
        batch, n, m, dim, dim_v, features = self.shape
        groups = batch * len(self.inputs[3]) // (dim * features)
        size = groups * (n + m) * features * (dim + dim_v) * products
        over_torch_threads(work, units, _threads(units, size))


def _threads(units: int, size: int) -> int:
    return threads_for(units, size / _PER_SECOND)


# Queries, keys, values, positions and the key mask.
_Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def _call(
    kind: str, feature_map: AbstractFeatureMap, operands: _Operands
) -> tuple[Any, _Call]:
    q, k, v, positions, key_mask = operands
    if kind == "linear":
        from coulomb.kernels import linear as loops
    else:
        from coulomb.kernels import causal as loops  # type: ignore[no-redef]

    mask = np.empty(0, np.bool_)
    if key_mask is not None:
        mask = _array(key_mask).reshape(-1)
    particles = _array(positions).reshape(-1)
    shape = (len(q), q.shape[2], k.shape[2], q.shape[3], v.shape[3], positions.shape[1])
    inputs = (*map(_placed, (q, k, v)), particles, mask)
    options = (*_options(feature_map), kind == "quadratic")
    return loops, _Call(options, inputs, shape)


def _options(feature_map: AbstractFeatureMap) -> tuple[bool, float]:
    return feature_map.needs_shift, 1.0 / feature_map.temperature


def forward(problem: Problem, operands: _Operands, out: Tensor) -> Kept | None:
    """Compute the output; None if the loops do not know the problem, or lost digits."""
    kind = kind_of(problem, *operands[:4])
    if kind is None:
        return None
    loops, call = _call(kind, problem.feature_map, operands)
    _, n, m, _, dim_v, features = call.shape
    groups = out.shape[0] * out.shape[1]
    row = features + 16 if problem.keep else 0
    sizes = [n * row, m * row, n, m]
    if kind != "linear":
        later = (n - 1) // loops.SPAN if problem.backward else 0
        sizes += [later * features * (dim_v + 1)]
    else:
        sizes += [features * dim_v, features]
    kept = tuple(torch.empty(groups * size).numpy() for size in sizes)
    target = _placed(out)
    exact: list[bool] = []

    def work(first: int, end: int) -> None:
        limit = np.float32(_SAFE_RANGE)
        exact.append(loops.attend(*call, kept, target, limit, first, end))

    call.run(work, groups, 1)
    return Kept(kind, kept) if all(exact) else None


def backward(
    feature_map: AbstractFeatureMap,
    operands: _Operands,
    kept: Kept,
    out: Tensor,
    grad: Tensor,
    grads: Sequence[Tensor],
    grad_positions: Tensor | None,
) -> None:
    """Pull a gradient back."""
    loops, call = _call(kept.kind, feature_map, operands)
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    outputs = _placed(out), _placed(grad)
    none = np.empty(0, np.float32)
    particles = none if grad_positions is None else grad_positions.view(-1).numpy()
    targets = (*map(_placed, grads), particles)
    # The sequences of a head add to the same particles, one after the other.
    batch, heads = operands[0].shape[:2]
    step = 1 if grad_positions is None else batch

    def work(first: int, end: int) -> None:
        part = first * step, end * step
        loops.attend_back(*call, kept.arrays, outputs, targets, *part)

    call.run(work, batch * heads // step, 2)


def decodes(feature_map: AbstractFeatureMap, *tensors: Tensor) -> bool:
    """Say whether the loops can add one token to a state."""
    if tensors[4].numel() < _FEWEST_DECODED or tensors[0].device.type != "cpu":
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    if must_be_traceable(tensors[0]) or any(x.dtype != torch.float32 for x in tensors):
        return False
    return _knows(feature_map)


def decode(
    feature_map: AbstractFeatureMap,
    token: tuple[Tensor, Tensor, Tensor],
    positions: Tensor,
    state: tuple[Tensor, Tensor],
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Add one token to a state and attend to all tokens so far."""
    from coulomb.kernels import causal as loops

    # Heads that share their particles do not get a copy each.
    particles = _array(positions[:1] if positions.stride(0) == 0 else positions)
    before = _array(state[0]), _array(state[1])
    sums, shift, out = (torch.empty(x.shape, dtype=x.dtype) for x in (*state, token[2]))
    after, target = (sums.numpy(), shift.numpy()), out.numpy()
    options, arrays = _options(feature_map), tuple(map(_array, token))

    def work(first: int, end: int) -> None:
        loops.decode(options, particles, arrays, before, after, target, first, end)

    groups, seconds = out.shape[0] * out.shape[1], before[0].size / _DECODED_PER_SECOND
    over_torch_threads(work, groups, threads_for(groups, seconds))
    return out, (sums, shift)
