"""The quadratic twin of every form: slow, and correct at a glance.

Tests compare values and gradients of `coulomb.attention.ops.api` with these.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from coulomb.attention.ops.checks import check_mask, head_particles, sequence_bounds
from coulomb.attention.ops.traceable import feature_pair
from coulomb.features import AbstractFeatureMap, Particles, as_feature_map

_Map = str | AbstractFeatureMap | Callable[[Tensor, Particles], Tensor]


def attention_weights(
    phi_q: Tensor,
    phi_k: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """Write the attention matrix out, `A_ij = phi(q_i).phi(k_j) / phi(q_i).z`.

    Parameters
    ----------
    phi_q, phi_k
        Features, shapes `(batch, heads, n, n_features)` and
        `(batch, heads, m, n_features)`.
    key_mask
        Shape `(batch, m)`, True = real token; None if all are.
    causal
        Whether query i sees the keys j <= i only.

    Returns
    -------
    Tensor
        Shape `(batch, heads, n, m)`; rows sum to one, or to zero without a real key.

    Examples
    --------
    >>> phi = torch.ones(1, 1, 2, 3)
    >>> attention_weights(phi, phi, causal=True)
    tensor([[[[1.0000, 0.0000],
              [0.5000, 0.5000]]]])
    """
    check_mask(key_mask, phi_k)
    return _normalised(phi_q @ phi_k.transpose(-1, -2), key_mask, causal)


def _normalised(products: Tensor, key_mask: Tensor | None, causal: bool) -> Tensor:
    if key_mask is not None:
        products = products.masked_fill(~key_mask[:, None, None, :], 0)
    if causal:
        products = products.tril()
    total = products.sum(dim=-1, keepdim=True)
    return torch.where(total == 0, 0, products / torch.where(total == 0, 1, total))


def kernel_weights(
    q: Tensor,
    k: Tensor,
    particles: Particles,
    feature_map: _Map,
    key_mask: Tensor | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """Write out the attention matrix that `kernel_attention` implies.

    Parameters
    ----------
    q, k
        Queries `(batch, heads, n, dim)` and keys `(batch, heads, m, dim)`.
    particles, feature_map
        As in `kernel_attention`.
    key_mask
        Shape `(batch, m)`, True = real token; None if all are.
    causal
        Whether query i sees the keys j <= i only.

    Returns
    -------
    Tensor
        Shape `(batch, heads, n, m)`.

    Examples
    --------
    >>> x = torch.zeros(1, 1, 2, 3)
    >>> kernel_weights(x, x, Particles(torch.ones(4, 3)), "favor")
    tensor([[[[0.5000, 0.5000],
              [0.5000, 0.5000]]]])
    """
    check_mask(key_mask, k)
    particles = head_particles(particles, q.shape[1], q)
    dtype = particles.positions.dtype
    phi_q, phi_k, logs = feature_pair(
        q.to(dtype),
        k.to(dtype),
        particles,
        as_feature_map(feature_map),
        key_mask,
        causal=causal,
    )
    products = phi_q @ phi_k.transpose(-1, -2)
    if logs is not None:
        reference = logs.cummax(dim=-1).values
        factors = logs.unsqueeze(-2) - reference.unsqueeze(-1)
        future = torch.ones_like(factors, dtype=torch.bool).triu(1)
        products = products * factors.masked_fill(future, -torch.inf).exp()
    return _normalised(products, key_mask, causal)


def linear_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """Multiply the attention matrix with the values, `A v`.

    Examples
    --------
    >>> phi, v = torch.ones(1, 1, 2, 3), torch.tensor([[[[1.0], [3.0]]]])
    >>> linear_attention(phi, phi, v).flatten()
    tensor([2., 2.])
    """
    return attention_weights(phi_q, phi_k, key_mask, causal=causal) @ v


def kernel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    particles: Particles,
    feature_map: _Map,
    key_mask: Tensor | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """Evaluate all features as they are defined, without a stabiliser, then `A v`.

    Examples
    --------
    >>> x = torch.zeros(1, 1, 2, 3)
    >>> kernel_attention(x, x, x + 1, Particles(torch.ones(4, 3)), "favor").shape
    torch.Size([1, 1, 2, 3])
    """
    feature_map = as_feature_map(feature_map)
    particles = head_particles(particles, q.shape[1], q)
    phi_q, phi_k = feature_map(q, particles), feature_map(k, particles)
    return linear_attention(phi_q, phi_k, v, key_mask, causal=causal)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    particles: Particles,
    feature_map: _Map,
    cu_seqlens: Tensor,
    *,
    causal: bool = False,
) -> Tensor:
    """Treat each sequence by itself.

    Examples
    --------
    >>> x = torch.zeros(3, 1, 2)
    >>> bounds = torch.tensor([0, 1, 3])
    >>> packed_attention(x, x, x, Particles(torch.ones(4, 2)), "elu", bounds).shape
    torch.Size([3, 1, 2])
    """
    outputs = []
    for start, stop in sequence_bounds(cu_seqlens, q.shape[0]):
        a, b, c = (x[start:stop].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = kernel_attention(a, b, c, particles, feature_map, causal=causal)
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)
