"""Recurrent decoding: one token at a time, at a cost that knows no context length."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from coulomb._support.checks import check_count, check_memory
from coulomb._support.errors import ParameterError
from coulomb.attention.ops import checks, compiled, traceable
from coulomb.attention.ops.block_maps import ABSENT
from coulomb.attention.ops.checks import FeatureMap
from coulomb.features import AbstractFeatureMap, Particles, as_feature_map


class AttentionState(NamedTuple):
    """What the keys and values so far amount to.

    The features of the keys are divided by `exp(shift)`, and those of the queries
    multiplied by it: it cancels. It is the largest exponent of each feature so far
    for maps whose features may overflow, and zero for the others.
    """

    sums: Tensor  # (batch, heads, dim_v + 1, n_features), [G z]'
    shift: Tensor  # (batch, heads, n_features)

    @property
    def values(self) -> Tensor:
        """`G = sum_j phi(k_j) v_j'`, shape `(batch, heads, n_features, dim_v)`."""
        return self.sums[..., :-1, :].transpose(-1, -2)

    @property
    def normaliser(self) -> Tensor:
        """`z = sum_j phi(k_j)`, shape `(batch, heads, n_features)`."""
        return self.sums[..., -1, :]


def _raise_shift(state: AttentionState, exponents: Tensor) -> AttentionState:
    # The same state at a shift that is nowhere below the exponents.
    higher = torch.maximum(state.shift, exponents)
    factors = (state.shift - higher).exp().unsqueeze(2)
    return AttentionState(state.sums * factors, higher)


def init_state(
    particles: Particles,
    feature_map: FeatureMap,
    *,
    batch: int,
    heads: int,
    dim_v: int,
) -> AttentionState:
    """Make the state before the first token.

    Parameters
    ----------
    particles, feature_map
        As in `kernel_attention`.
    batch, heads, dim_v
        The shape of what will be decoded.

    Returns
    -------
    AttentionState
        Zeros, at least float32, on the particles' device.

    Examples
    --------
    >>> state = init_state(
    ...     Particles(torch.ones(4, 2)), "elu", batch=1, heads=2, dim_v=3
    ... )
    >>> state.values.shape
    torch.Size([1, 2, 4, 3])
    """
    feature_map = as_feature_map(feature_map)
    checks.check_particles(particles)
    positions = particles.positions
    for name, count in {"batch": batch, "heads": heads, "dim_v": dim_v}.items():
        check_count(name, count, at_least=0 if name == "batch" else 1)
    if positions.dim() == 3 and positions.shape[0] != heads:
        raise ParameterError(
            f"`heads` must be {positions.shape[0]}, as many as `particles` has groups; "
            f"got {heads}."
        )
    n_features = feature_map.n_features(particles.n_particles)
    dtype = torch.promote_types(positions.dtype, torch.float32)
    shape = (batch, heads, dim_v + 1, n_features)
    check_memory("batch, heads and dim_v", 8 * math.prod(shape))
    sums = torch.zeros(shape, dtype=dtype, device=positions.device)
    level = ABSENT if feature_map.needs_shift else 0.0
    return AttentionState(sums, torch.full_like(sums[..., 0, :], level))


def prefill(
    k: Tensor,
    v: Tensor,
    particles: Particles,
    feature_map: FeatureMap,
    key_mask: Tensor | None = None,
    *,
    state: AttentionState | None = None,
) -> AttentionState:
    """Add a whole prefix of keys and values to the state at once.

    Parameters
    ----------
    k
        Keys, shape `(batch, heads, length, dim)`.
    v
        Values, shape `(batch, heads, length, dim_v)`.
    particles, feature_map
        What keys meet, and the map, as in `kernel_attention`.
    key_mask
        Shape `(batch, length)`, True = real token; None if all are.
    state
        What came before; None for nothing.

    Returns
    -------
    AttentionState
        The state after the prefix.

    Examples
    --------
    >>> k, v = torch.zeros(1, 1, 5, 2), torch.ones(1, 1, 5, 3)
    >>> state = prefill(k, v, Particles(torch.ones(4, 2)), "softmaxfeat")
    >>> state.normaliser  # five keys of 1/2 each
    tensor([[[2.5000, 2.5000, 2.5000, 2.5000]]])
    """
    checks.check_operands(("k", "k", "v"), (k, k, v))
    checks.check_mask(key_mask, k)
    feature_map = as_feature_map(feature_map)
    with checks.full_precision(k):
        if state is None:
            batch, heads, _, dim_v = v.shape
            state = init_state(
                particles, feature_map, batch=batch, heads=heads, dim_v=dim_v
            )
        particles = checks.head_particles(particles, k)
        _check_state(state, feature_map, particles, v)
        if not k.shape[2]:
            return state
        dtype = particles.positions.dtype
        if key_mask is not None:
            k = k.masked_fill(~key_mask[:, None, :, None], 0)
        values = traceable.values_with_ones(v.to(dtype), key_mask)
        phi = _evaluation(feature_map)(k.to(dtype), particles)
        if feature_map.needs_shift:
            if key_mask is not None:
                phi = phi.masked_fill(~key_mask[:, None, :, None], ABSENT)
            state = _raise_shift(state, phi.detach().amax(dim=2))
            phi = (phi - state.shift.unsqueeze(2)).exp()
        sums = state.sums + values.transpose(-1, -2) @ phi
        return AttentionState(sums, state.shift)


def _check_state(
    state: AttentionState,
    feature_map: AbstractFeatureMap,
    particles: Particles,
    v: Tensor,
) -> None:
    """Refuse a state of other particles, or of another batch."""
    n_features = feature_map.n_features(particles.n_particles)
    shape = (*v.shape[:2], v.shape[-1] + 1, n_features)
    if not isinstance(state, AttentionState) or state.sums.shape != shape:
        found = tuple(state.sums.shape) if hasattr(state, "sums") else state
        raise ParameterError(
            f"`state` must have sums of shape {shape}, for the batch, heads, values "
            f"and features of this call; got {found}. Begin with `init_state`."
        )


def _evaluation(feature_map: AbstractFeatureMap) -> Callable[..., Any]:
    return feature_map.log_features if feature_map.needs_shift else feature_map


def _fits(
    state: object, token: tuple[Tensor, Tensor, Tensor], positions: Tensor
) -> bool:
    # Whether shapes are as they should be; if not, the plain form finds the words.
    if not all(isinstance(x, Tensor) and x.dim() == 3 for x in token):
        return False
    if not isinstance(state, AttentionState):
        return False
    (batch, heads, dim), n = token[0].shape, state[1].shape[-1]
    return (
        token[1].shape == token[0].shape
        and token[2].shape[:2] == (batch, heads)
        and positions.shape in ((n, dim), (heads, n, dim))
        and state[0].shape == (batch, heads, token[2].shape[2] + 1, n)
        and state[1].shape == (batch, heads, n)
    )


def decode_step(
    state: AttentionState,
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    particles: Particles,
    feature_map: FeatureMap,
    *,
    key_particles: Particles | None = None,
) -> tuple[Tensor, AttentionState]:
    """Add one token to the state and attend to all tokens so far.

    `G <- G + phi(k_t) v_t'`, `z <- z + phi(k_t)`, `a_t = phi(q_t)' G / phi(q_t)' z`:
    row t of `kernel_attention(..., causal=True)`.

    Parameters
    ----------
    state
        The state before the token; it is not changed.
    q_t, k_t
        Query and key of the token, shape `(batch, heads, dim)`.
    v_t
        Its value, shape `(batch, heads, dim_v)`.
    particles, feature_map, key_particles
        As in `kernel_attention`.

    Returns
    -------
    tuple
        The output, shape `(batch, heads, dim_v)`, and the state after the token.

    Examples
    --------
    >>> particles = Particles(torch.ones(4, 2))
    >>> state = init_state(particles, "favor", batch=1, heads=1, dim_v=1)
    >>> for value in (1.0, 3.0):
    ...     x, v = torch.ones(1, 1, 2), torch.full((1, 1, 1), value)
    ...     out, state = decode_step(state, x, x, v, particles, "favor")
    ...     print(out.item())
    1.0
    2.0
    """
    token = q_t, k_t, v_t
    feature_map = as_feature_map(feature_map)
    if key_particles is None and _fits(state, token, particles.positions):
        step = compiled.decoder(feature_map, token, particles.positions, state)
        if step is not None:
            sums, shift = torch.empty_like(state[0]), torch.empty_like(state[1])
            return step(token, sums, shift), AttentionState(sums, shift)
    checks.check_operands(("q_t", "k_t", "v_t"), token, ("batch", "heads", "dim"))
    with checks.full_precision(q_t):
        queries, keys = checks.side_particles(particles, key_particles, q_t)
        _check_state(state, feature_map, queries, v_t)
        positions = queries.positions
        values = functional.pad(v_t.to(positions.dtype), (0, 1), value=1.0)
        evaluate = _evaluation(feature_map)
        rows = torch.stack([q_t, k_t], dim=2).to(positions.dtype)
        if keys is None:
            query, key = evaluate(rows, queries).unbind(dim=2)
        else:
            query = evaluate(rows[:, :, :1], queries).squeeze(2)
            key = evaluate(rows[:, :, 1:], keys).squeeze(2)
        if feature_map.needs_shift:
            state = _raise_shift(state, key.detach())
            query, key = (query + state.shift).softmax(-1), (key - state.shift).exp()
        sums = torch.addcmul(state.sums, values.unsqueeze(-1), key.unsqueeze(2))
        # A product and a sum: BLAS is slow for batches of matrices times one vector.
        out = traceable.ratio((sums * query.unsqueeze(2)).sum(dim=-1))
        return out.to(v_t.dtype), AttentionState(sums, state.shift)


class Decoder:
    """Decode in less time: checks are made once, and the state is overwritten.

    Parameters
    ----------
    state, particles, feature_map
        As in `decode_step`; the state is copied.

    Examples
    --------
    >>> particles = Particles(torch.ones(4, 2))
    >>> state = init_state(particles, "favor", batch=1, heads=1, dim_v=1)
    >>> x = torch.ones(1, 1, 2)
    >>> Decoder(state, particles, "favor").step(x, x, torch.ones(1, 1, 1))
    tensor([[[1.]]])
    """

    def __init__(
        self, state: AttentionState, particles: Particles, feature_map: FeatureMap
    ) -> None:
        self.state = AttentionState(*(x.detach().clone() for x in state))
        self._about = particles, as_feature_map(feature_map)
        self._step: Any = None
        self._shapes: tuple[torch.Size, ...] | None = None  # that the step is for

    def step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor) -> Tensor:
        """Add one token and give its output.

        Parameters
        ----------
        q_t, k_t, v_t
            As in `decode_step`.
        """
        token = q_t, k_t, v_t
        shapes = q_t.shape, k_t.shape, v_t.shape
        if shapes == self._shapes and compiled.decodable(token):
            out: Tensor = self._step(token, *self.state)
            return out
        out, state = decode_step(self.state, *token, *self._about)
        self.state = AttentionState(*(x.detach().contiguous() for x in state))
        (positions, _), feature_map = self._about
        self._step = compiled.decoder(feature_map, token, positions, self.state)
        self._shapes = None if self._step is None else shapes
        return out
