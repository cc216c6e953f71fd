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

__all__ = [
    "join_pairs",
    "mean_key_row",
    "paired_attention",
    "paired_features",
    "paired_weights",
]

# Features of one block of tokens, all heads: what stays in the cache.
_BLOCK_BYTES = 1 << 20


def join_pairs(w: Tensor, a: Tensor, u: Tensor, b: Tensor) -> Tensor:
    """Put the four parts of particles side by side.

    Parameters
    ----------
    w, a
        Rows for queries, shape `(heads, n, dim)`, and their offsets, `(heads, n)`.
    u, b
        The same for keys.

    Returns
    -------
    Tensor
        Positions, shape `(heads, n, 2 dim + 2)`.

    Examples
    --------
    >>> row, offset = torch.ones(1, 4, 3), torch.zeros(1, 4)
    >>> join_pairs(row, offset, row, offset).shape
    torch.Size([1, 4, 8])
    """
    return torch.cat([w, a.unsqueeze(-1), u, b.unsqueeze(-1)], dim=-1)


def mean_key_row(positions: Tensor) -> Tensor:
    """Average the rows for keys, `mean_l u_l`.

    Parameters
    ----------
    positions
        Particles, shape `(heads, n, 2 dim + 2)`.

    Returns
    -------
    Tensor
        Shape `(heads, dim)`.
    """
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

    Parameters
    ----------
    q, k
        Queries and keys, shape `(batch, heads, n, dim)`.
    positions
        Particles, shape `(heads, n_features, 2 dim + 2)`.
    tilt
        `t`, shape `(heads, dim)`; the mean of the key rows is added to it.
    feature_map
        `f`.
    key_mask
        Shape `(batch, n)`, True = real token; None if all are.

    Returns
    -------
    tuple
        Features of queries and of keys, those of padding zero. The keys of a sequence
        are scaled by one factor that cancels in attention.

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

    Parameters
    ----------
    q, k, positions, tilt, feature_map, key_mask
        As in `paired_features`.

    Returns
    -------
    Tensor
        Shape `(batch, heads, n, m)`; zero where there is no real key.

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

    Parameters
    ----------
    q, k
        As in `paired_features`.
    v
        Values, shape `(batch, heads, n, dim_v)`.
    positions, tilt, feature_map, key_mask
        As in `paired_features`.

    Returns
    -------
    Tensor
        Shape `(batch, heads, n, dim_v)`; zero for queries that see no real key.

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
        positions = positions / feature_map.temperature
        return _softmax_form(q, k, values, positions, tilt, key_mask).to(v.dtype)
    phi_q, phi_k = paired_features(q, k, positions, tilt, feature_map, key_mask)
    return linear_attention(phi_q, phi_k, values, key_mask).to(v.dtype)


def _softmax_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    tilt: Tensor,
    key_mask: Tensor | None,
) -> Tensor:
    # phi(q)' G / phi(q)' z = softmax(log phi(q) + log z) (G / z): a mean, over
    # features, of mean values. Nothing is left to divide by.
    dim = q.shape[-1]
    for_queries, for_keys = positions.chunk(2, dim=-1)
    weight = _key_weight(k, tilt, key_mask)
    step = _block_length(q, positions.shape[-2])
    sums: Tensor | None = None
    weighted = torch.cat([v * weight, weight], dim=-1)
    for start in range(0, k.shape[-2], step):
        phi = _logits(k[..., start : start + step, :], for_keys, dim).softmax(dim=-1)
        block = phi.transpose(-1, -2) @ weighted[..., start : start + step, :]
        sums = block if sums is None else sums + block
    assert sums is not None  # attention over no token at all has no shape to return
    total = sums[..., -1:].clamp_min(torch.finfo(sums.dtype).tiny)
    means = sums[..., :-1] / total
    offset = total.log().transpose(-1, -2)
    outs = [
        (_logits(q[..., start : start + step, :], for_queries, dim) + offset)
        .softmax(dim=-1)
        .matmul(means)
        for start in range(0, q.shape[-2], step)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-2)


def _logits(x: Tensor, rows: Tensor, dim: int) -> Tensor:
    return x @ rows[..., :dim].transpose(-1, -2) + rows[..., dim].unsqueeze(-2)


def _block_length(x: Tensor, n_features: int) -> int:
    if (
        torch.is_grad_enabled()
        or x.device.type != "cpu"
        or torch.compiler.is_compiling()
    ):
        return max(1, x.shape[-2])
    row = x.shape[0] * x.shape[1] * n_features * x.element_size()
    return max(64, _BLOCK_BYTES // max(row, 1))
