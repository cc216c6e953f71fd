"""Compiled loops for exponential maps in float32, where nothing leaves the range."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coulomb.attention.ops.blocks import Plan, SlabGradients
from coulomb.attention.ops.traceable import must_be_plain
from coulomb.features import AbstractFeatureMap, Favor, SoftmaxFeatures
from coulomb.kernels import available
from coulomb.kernels.torch_threads import over_torch_threads, threads_for

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

_Placed = tuple[np.ndarray[Any, Any], tuple[int, ...]]


class Kept(NamedTuple):
    """What the loops keep for the pass back."""

    kind: str
    arrays: tuple[np.ndarray[Any, Any], ...]  # as the loops want them; some empty


def kind_of(
    plan: Plan, form: str, q: Tensor, k: Tensor, v: Tensor, positions: Tensor
) -> str | None:
    """Say which loops know this problem, if they are worth their import."""
    if (
        plan.packed
        or type(plan.feature_map) not in (Favor, SoftmaxFeatures)
        or q.device.type != "cpu"
        or any(x.dtype != torch.float32 for x in (q, k, v, positions))
        or any(x.stride(-1) != 1 for x in (q, k, v))
        or any(size % 16 for size in (q.shape[3], v.shape[3], positions.shape[1]))
        or min(q.shape[2], k.shape[2]) == 0
        or (q.numel() + k.numel()) * positions.shape[1] < _FEWEST
        or not available()
    ):
        return None
    if form == "linear":
        return "causal" if plan.causal else form
    # The loops know squares of one block.
    fits = q.shape[2] == k.shape[2] <= _LONGEST_SQUARE and not plan.causal
    return form if fits else None


def _placed(x: Tensor) -> _Placed:
    size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    flat = x.detach().as_strided((size,), (1,))
    return flat.numpy(), x.stride()[:3]


class _Problem(NamedTuple):
    about: tuple[bool, float, bool]
    inputs: tuple[Any, ...]
    shape: tuple[int, ...]

    @property
    def groups(self) -> int:
        return self.shape[0] * len(self.inputs[3]) // (self.shape[3] * self.shape[5])


def _problem(
    kind: str,
    feature_map: AbstractFeatureMap | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    key_mask: Tensor | None,
) -> _Problem:
    scale = 1.0
    if isinstance(feature_map, SoftmaxFeatures):
        scale = 1.0 / feature_map.temperature
    mask = np.empty(0, np.bool_)
    if key_mask is not None:
        mask = _array(key_mask).reshape(-1)
    particles = _array(positions).reshape(-1)
    shape = (len(q), q.shape[2], k.shape[2], q.shape[3], v.shape[3], positions.shape[1])
    inputs = (*map(_placed, (q, k, v)), particles, mask)
    about = isinstance(feature_map, Favor), scale, kind == "quadratic"
    return _Problem(about, inputs, shape)


def _threads(units: int, problem: _Problem, products: int) -> int:
    _, n, m, dim, dim_v, features = problem.shape
    work = problem.groups * (n + m) * features * (dim + dim_v) * products
    return threads_for(units, work / _PER_SECOND)


def _loops(kind: str) -> Any:
    if kind == "linear":
        from coulomb.kernels import linear as _attention_linear

        return _attention_linear
    from coulomb.kernels import causal as _attention_causal

    return _attention_causal


def forward(
    kind: str,
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    key_mask: Tensor | None,
    out: Tensor,
) -> Kept | None:
    """Compute the output."""
    loops = _loops(kind)
    problem = _problem(kind, plan.feature_map, q, k, v, positions, key_mask)
    _, n, m, _, dim_v, features = problem.shape
    groups = problem.groups
    row = features + 16 if plan.keep else 0
    sizes = [n * row, m * row, n, m]
    if kind != "linear":
        later = (n - 1) // loops.SPAN if plan.backward else 0
        sizes += [later * features * (dim_v + 1)]
    else:
        sizes += [features * dim_v, features]
    kept = tuple(np.empty(groups * size, np.float32) for size in sizes)
    target = _placed(out)
    exact: list[bool] = []

    def work(first: int, end: int) -> None:
        limit = np.float32(_SAFE_RANGE)
        exact.append(loops.attend(*problem, kept, target, limit, first, end))

    over_torch_threads(work, groups, _threads(groups, problem, 1))
    return Kept(kind, kept) if all(exact) else None


def backward(
    feature_map: AbstractFeatureMap | None,
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    key_mask: Tensor | None,
    kept: Kept,
    out: Tensor,
    grad: Tensor,
    grads: SlabGradients,
    grad_positions: Tensor | None,
) -> None:
    """Pull a gradient back."""
    loops = _loops(kept.kind)
    problem = _problem(kept.kind, feature_map, *operands, key_mask)
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    outputs = _placed(out), _placed(grad)
    none = np.empty(0, np.float32)
    particles = none if grad_positions is None else grad_positions.view(-1).numpy()
    targets = (*map(_placed, grads), particles)
    # The sequences of a head add to the same particles, one after the other.
    step = 1 if grad_positions is None else problem.shape[0]

    def work(first: int, end: int) -> None:
        span = first * step, end * step
        loops.attend_back(*problem, kept.arrays, outputs, targets, *span)

    units = problem.groups // step
    over_torch_threads(work, units, _threads(units, problem, 2))


def decodes(feature_map: AbstractFeatureMap | None, *tensors: Tensor) -> bool:
    """Say whether the loops can add one token to a state."""
    if type(feature_map) not in (Favor, SoftmaxFeatures) or must_be_plain(tensors[0]):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    if tensors[4].numel() < _FEWEST_DECODED or tensors[0].device.type != "cpu":
        return False
    return all(x.dtype == torch.float32 for x in tensors) and available()


def decode(
    feature_map: AbstractFeatureMap,
    token: tuple[Tensor, Tensor, Tensor],
    positions: Tensor,
    state: tuple[Tensor, Tensor],
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Add one token to a state and attend to all tokens so far."""
    from coulomb.kernels import decode as loops

    scale = 1.0
    if isinstance(feature_map, SoftmaxFeatures):
        scale = 1.0 / feature_map.temperature
    about = isinstance(feature_map, Favor), scale
    # Heads that share their particles do not get a copy each.
    particles = _array(positions[:1] if positions.stride(0) == 0 else positions)
    before = _array(state[0]), _array(state[1])
    sums, shift, out = (torch.empty(x.shape, dtype=x.dtype) for x in (*state, token[2]))
    after, target = (sums.numpy(), shift.numpy()), out.numpy()
    arrays = _array(token[0]), _array(token[1]), _array(token[2])

    def work(first: int, end: int) -> None:
        loops.decode(about, particles, arrays, before, after, target, first, end)

    groups, seconds = out.shape[0] * out.shape[1], before[0].size / _DECODED_PER_SECOND
    over_torch_threads(work, groups, threads_for(groups, seconds))
    return out, (sums, shift)


def _array(x: Tensor) -> np.ndarray[Any, Any]:
    if x.requires_grad:
        x = x.detach()
    array: np.ndarray[Any, Any] = x.contiguous().numpy()
    return array


def warm_up() -> None:
    """Compile the loops, or load them from numba's cache, before they are needed."""
    from coulomb.attention.ops.api import kernel_attention
    from coulomb.attention.ops.decoding import decode_step, init_state
    from coulomb.features import Particles

    particles = Particles(torch.zeros(4, 128, 64))
    for causal in (False, True):
        x = torch.zeros(1, 4, 2048, 64, requires_grad=True)
        out = kernel_attention(x, x, x, particles, "favor", causal=causal)
        torch.autograd.grad(out.sum(), x)
    x = torch.zeros(1, 4, 64)
    state = init_state(particles, "favor", batch=1, heads=4, dim_v=64)
    decode_step(state, x, x, x, particles, "favor")
