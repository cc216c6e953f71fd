"""The quadratic twin of every form: slow, and correct at a glance.

Tests compare values and gradients of `coulomb.attention.ops.api` with these.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from coulomb._support.checks import sequence_bounds
from coulomb.attention.ops import checks
from coulomb.attention.ops.checks import FeatureMap, check_inputs
from coulomb.attention.ops.traceable import feature_pair
from coulomb.features import Particles

# Products of features that are formed at one time.
_ELEMENTS = 1 << 24


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
    checks.check_mask(key_mask, phi_k)
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
    feature_map: FeatureMap,
    key_mask: Tensor | None = None,
    *,
    key_particles: Particles | None = None,
    key_log_weight: Tensor | None = None,
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
    key_particles, key_log_weight
        As in `kernel_attention`.
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
    options = key_mask, key_particles, key_log_weight
    inputs = check_inputs((q, k, k), particles, feature_map, *options)
    phi_q, phi_k, logs = feature_pair(inputs._replace(causal=causal))
    products = phi_q @ phi_k.transpose(-1, -2)
    if logs is not None and k.shape[2]:
        highest = logs.cummax(dim=-1).values
        highest = highest if causal else highest[..., -1:]
        factors = logs.unsqueeze(-2) - highest.unsqueeze(-1)
        if causal:
            future = torch.ones_like(factors, dtype=torch.bool).triu(1)
            factors = factors.masked_fill(future, -torch.inf)
        products = products * factors.exp()
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


def _log_products(logs_q: Any, logs_k: Any) -> Tensor:
    # log sum_m exp(a_im + b_jm): as a product of matrices if none of its entries
    # vanishes, otherwise in logarithms, a few rows at a time.
    tops = [x.detach().amax(dim=-1, keepdim=True) for x in (logs_q, logs_k)]
    left, right = (logs_q - tops[0]).exp(), (logs_k - tops[1]).exp()
    factors = left @ right.transpose(-1, -2)
    if (factors > torch.finfo(factors.dtype).tiny ** 0.5).all():
        return factors.log() + tops[0] + tops[1].transpose(-1, -2)
    size = logs_k.numel() // max(logs_q.shape[0], 1)
    step = max(1, _ELEMENTS // max(size, 1))

    def products(rows: Tensor) -> Tensor:
        return torch.logsumexp(rows.unsqueeze(-2) + logs_k.unsqueeze(-3), dim=-1)

    parts = torch.split(logs_q, step, dim=-2)
    if len(parts) == 1:
        return products(logs_q)
    return torch.cat(
        [checkpoint(products, part, use_reentrant=False) for part in parts], dim=-2
    )


def kernel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    particles: Particles,
    feature_map: FeatureMap,
    key_mask: Tensor | None = None,
    *,
    key_particles: Particles | None = None,
    key_log_weight: Tensor | None = None,
    offsets: tuple[Tensor, Tensor] | None = None,
    causal: bool = False,
) -> Tensor:
    """Evaluate all features as they are defined, then `A v`.

    Maps with logarithms are taken in logarithms, in which nothing leaves the range.

    Examples
    --------
    >>> x = torch.zeros(1, 1, 2, 3)
    >>> kernel_attention(x, x, x + 1, Particles(torch.ones(4, 3)), "favor").shape
    torch.Size([1, 1, 2, 3])
    """
    options = key_mask, key_particles, key_log_weight, offsets
    inputs = check_inputs((q, k, v), particles, feature_map, *options).cast()
    inputs = inputs.with_offset_columns()
    phi, values = inputs.feature_map, inputs.v
    sides = inputs.particles, inputs.key_particles or inputs.particles
    pairs = tuple(zip(inputs[:2], sides, strict=True))
    weights = torch.zeros_like(inputs.k[..., :1])
    if inputs.log_weight is not None and k.shape[2]:
        weights = inputs.log_weight - inputs.log_weight.amax(dim=2, keepdim=True)
    if not phi.has_log_features:
        phi_q, phi_k = (phi(*each) for each in pairs)
        out = linear_attention(
            phi_q, phi_k * weights.exp(), values, key_mask, causal=causal
        )
        return out.to(v.dtype)
    logs = _log_products(*(phi.log_features(*each) for each in pairs))
    logs = logs + weights.transpose(-1, -2)
    hidden = torch.zeros_like(logs, dtype=torch.bool)
    if key_mask is not None:
        hidden = hidden | ~key_mask[:, None, None, :]
    if causal:
        hidden = hidden | torch.ones_like(hidden).triu(1)
    # Not minus infinity: a row without a key would have no gradient but NaN.
    rows = logs.masked_fill(hidden, torch.finfo(logs.dtype).min).softmax(dim=-1)
    return (rows.masked_fill(hidden, 0) @ values).to(v.dtype)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    particles: Particles,
    feature_map: FeatureMap,
    cu_seqlens: Tensor,
    *,
    key_particles: Particles | None = None,
    key_log_weight: Tensor | None = None,
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
        weight = key_log_weight
        if weight is not None:
            weight = weight[start:stop].t().unsqueeze(0)
        out = kernel_attention(
            *(a, b, c, particles, feature_map),
            key_particles=key_particles,
            key_log_weight=weight,
            causal=causal,
        )
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)
