"""Particles with a row for queries and a row for keys, and attention with them.

A particle is `(w, a, u, b)` in `R^(2d + 2)`: `phi_m(q) = f(w_m . q + a_m)` of a query
and `exp((t + mean_l u_l) . k) f(u_m . k + b_m)` of a key, where `f` is any feature map
and `t` is the head's tilt. A tilt is exact for softmax: with the mean query `c`,
`exp(q . k) = exp(c . k) exp((q - c) . k)`, so that the features have to imitate centred
queries only. It moves with the mean of the key rows, which features that are normalised
over the particles do not see otherwise.
"""

import torch
from torch import Tensor

from coulomb.attention import linear_attention
from coulomb.features import AbstractFeatureMap, Particles, SoftmaxFeatures
from coulomb.linearise.blockwise import blockwise_attention

__all__ = [
    "join_pairs",
    "mean_key_row",
    "paired_attention",
    "paired_features",
    "paired_weights",
]


def join_pairs(w: Tensor, a: Tensor, u: Tensor, b: Tensor) -> Tensor:
    """Put the four parts of particles side by side.

    Examples
    --------
    >>> row, offset = torch.ones(1, 4, 3), torch.zeros(1, 4)
    >>> join_pairs(row, offset, row, offset).shape
    torch.Size([1, 4, 8])
    """
    return torch.cat([w, a.unsqueeze(-1), u, b.unsqueeze(-1)], dim=-1)


def mean_key_row(positions: Tensor) -> Tensor:
    """Average the rows for keys, `mean_l u_l`."""
    half = positions.shape[-1] // 2
    return positions[..., half:-1].mean(dim=-2)


def paired_features(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    tilt: Tensor,
    feature_map: AbstractFeatureMap,
    key_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Evaluate the features of queries and keys.

    Examples
    --------
    >>> x = torch.zeros(1, 1, 3, 2)
    >>> phi, _ = paired_features(
    ...     x, x, torch.ones(1, 4, 6), torch.zeros(1, 2), SoftmaxFeatures()
    ... )
    >>> phi[0, 0, 0]
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    for_queries, for_keys = positions.chunk(2, dim=-1)
    weight = _key_weight(k, tilt + mean_key_row(positions), key_mask)
    if feature_map.imitates_softmax:
        scale = q.shape[-1] ** -0.25
        q, k = q * scale, k * scale
    phi_q = feature_map(_lift(q), Particles(for_queries))
    phi_k = feature_map(_lift(k), Particles(for_keys))
    return phi_q, phi_k * weight


def _lift(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)


def _key_weight(k: Tensor, tilt: Tensor, key_mask: Tensor | None) -> Tensor:
    exponent = k @ tilt.unsqueeze(-1)  # (batch, heads, n, 1)
    if key_mask is not None:
        hidden = ~key_mask[:, None, :, None]
        exponent = exponent.masked_fill(hidden, torch.finfo(k.dtype).min)
    weight = (exponent - exponent.detach().amax(dim=-2, keepdim=True)).exp()
    # In a sequence of padding alone every exponent is the largest.
    return weight if key_mask is None else weight.masked_fill(hidden, 0)


def paired_weights(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    tilt: Tensor,
    feature_map: AbstractFeatureMap,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Write out the rows, `phi(q_i) . phi(k_j) / sum_l phi(q_i) . phi(k_l)`.

    The slow twin of `paired_attention`, and what is compared with the teacher's rows.

    Examples
    --------
    >>> x = torch.zeros(1, 1, 2, 3)
    >>> paired_weights(
    ...     x, x, torch.ones(1, 4, 8), torch.zeros(1, 3), SoftmaxFeatures()
    ... )
    tensor([[[[0.5000, 0.5000],
              [0.5000, 0.5000]]]])
    """
    phi_q, phi_k = paired_features(q, k, positions, tilt, feature_map, key_mask)
    products = phi_q @ phi_k.transpose(-1, -2)
    total = products.sum(dim=-1, keepdim=True)
    return products / total.clamp_min(torch.finfo(products.dtype).tiny)


def paired_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    tilt: Tensor,
    feature_map: AbstractFeatureMap,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attend in linear time with paired particles.

    Examples
    --------
    >>> x, v = torch.zeros(1, 1, 3, 2), torch.tensor([1.0, 2.0, 6.0]).view(1, 1, 3, 1)
    >>> paired_attention(
    ...     x, x, v, torch.ones(1, 4, 6), torch.zeros(1, 2), SoftmaxFeatures()
    ... ).flatten()
    tensor([3., 3., 3.])
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k, values = (x.to(dtype) for x in (q, k, v))
    positions, tilt = positions.to(dtype), tilt.to(dtype)
    if key_mask is not None:  # whatever stands in the padding, infinities too
        hidden = ~key_mask[:, None, :, None]
        k, values = k.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
    if isinstance(feature_map, SoftmaxFeatures):
        tilt = tilt + mean_key_row(positions)
        if feature_map.temperature != 1.0:
            positions = positions / feature_map.temperature
        plain = _must_be_plain(q, k, values, positions)
        form = _softmax_form if plain else blockwise_attention
        return form(q, k, values, positions, tilt, key_mask).to(v.dtype)
    phi_q, phi_k = paired_features(q, k, positions, tilt, feature_map, key_mask)
    return linear_attention(phi_q, phi_k, values, key_mask).to(v.dtype)


def _must_be_plain(*operands: Tensor) -> bool:
    # Whoever differentiates, traces or transforms cannot look into reused arrays.
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    return (
        wanted
        or operands[0].device.type != "cpu"
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
    )


def _softmax_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    tilt: Tensor,
    key_mask: Tensor | None,
) -> Tensor:
    # As in `blockwise_attention`, in operations that can be differentiated. Heads
    # first: one product of each head, and no particles repeated for every sequence.
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    for_queries, for_keys = positions.chunk(2, dim=-1)
    flat = k.reshape(len(k), -1, k.shape[-1]).transpose(1, 2)
    exponent = torch.bmm(tilt.unsqueeze(1), flat).view(*k.shape[:3], 1)
    if key_mask is not None:
        hidden = ~key_mask.unsqueeze(-1)
        exponent = exponent.masked_fill(hidden, torch.finfo(k.dtype).min)
    weight = (exponent - exponent.detach().amax(dim=-2, keepdim=True)).exp()
    if key_mask is not None:
        weight = weight.masked_fill(hidden, 0)
    phi = _logits(k, for_keys).softmax(dim=-1)
    sums = phi.transpose(-1, -2) @ torch.cat([v * weight, weight], dim=-1)
    total = sums[..., -1:].clamp_min(torch.finfo(sums.dtype).tiny)
    offset = total.log().transpose(-1, -2)
    phi = (_logits(q, for_queries) + offset).softmax(dim=-1)
    return (phi @ (sums[..., :-1] / total)).transpose(0, 1)


def _by_head(x: Tensor, columns: Tensor) -> Tensor:
    flat = x.reshape(x.shape[0], -1, x.shape[-1])
    return torch.bmm(flat, columns).view(*x.shape[:-1], -1)


def _logits(x: Tensor, rows: Tensor) -> Tensor:
    dim = x.shape[-1]
    offset = rows[..., dim][:, None, None, :]
    return _by_head(x, rows[..., :dim].transpose(-1, -2)) + offset
