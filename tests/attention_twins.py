"""The quadratic twins of attention: slow, and correct at a glance."""

import torch
from torch.utils.checkpoint import checkpoint

from coulomb._support.checks import sequence_bounds
from coulomb.attention import attention_weights
from coulomb.attention.ops.checks import check_inputs

# Products of features that are formed at one time.
_ELEMENTS = 1 << 24


def linear_attention(phi_q, phi_k, v, key_mask=None, *, causal=False):
    """Multiply the attention matrix with the values, `A v`."""
    return attention_weights(phi_q, phi_k, key_mask, causal=causal) @ v


def _log_products(logs_q, logs_k):
    # log sum_m exp(a_im + b_jm): as a product of matrices if none of its entries
    # vanishes, otherwise in logarithms, a few rows at a time.
    tops = [x.detach().amax(dim=-1, keepdim=True) for x in (logs_q, logs_k)]
    left, right = (logs_q - tops[0]).exp(), (logs_k - tops[1]).exp()
    factors = left @ right.transpose(-1, -2)
    if (factors > torch.finfo(factors.dtype).tiny ** 0.5).all():
        return factors.log() + tops[0] + tops[1].transpose(-1, -2)
    size = logs_k.numel() // max(logs_q.shape[0], 1)
    step = max(1, _ELEMENTS // max(size, 1))

    def products(rows):
        return torch.logsumexp(rows.unsqueeze(-2) + logs_k.unsqueeze(-3), dim=-1)

    parts = torch.split(logs_q, step, dim=-2)
    if len(parts) == 1:
        return products(logs_q)
    return torch.cat(
        [checkpoint(products, part, use_reentrant=False) for part in parts], dim=-2
    )


def kernel_attention(
    q,
    k,
    v,
    particles,
    feature_map,
    key_mask=None,
    *,
    key_particles=None,
    key_log_weight=None,
    offsets=None,
    causal=False,
):
    """Evaluate all features as they are defined, then `A v`.

    Maps with logarithms are taken in logarithms, in which nothing leaves the range.
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
    q,
    k,
    v,
    particles,
    feature_map,
    cu_seqlens,
    *,
    key_particles=None,
    key_log_weight=None,
    causal=False,
):
    """Treat each sequence by itself."""
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
