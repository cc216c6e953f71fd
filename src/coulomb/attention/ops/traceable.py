"""The same forms in plain differentiable torch, without loops.

Used where an autograd function of our own cannot go: under `torch.compile`,
`torch.export`, `torch.func` and tracing. No branch depends on a length, so that lengths
may stay symbolic.
"""

import torch
from torch import Tensor
from torch.nn import functional

from coulomb.attention.ops.block_maps import ABSENT
from coulomb.attention.ops.checks import Inputs
from coulomb.features import projections

_ROWS = 64


def ratio(sums: Tensor) -> Tensor:
    """Divide all columns by the last; zero where there is nothing to divide by."""
    normaliser = sums[..., -1:]
    # One division by infinity makes the output zero, and every gradient with it.
    return sums[..., :-1] / normaliser.masked_fill(normaliser == 0, torch.inf)


def values_with_ones(v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Append a column of ones, and multiply by the mask."""
    values = functional.pad(v, (0, 1), value=1.0)
    if key_mask is None:
        return values
    return values.masked_fill(~key_mask[:, None, :, None], 0)


def feature_pair(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Evaluate features so that nothing overflows, and the logarithms of key weights.

    The features of key j are yet to be multiplied by the exponential of its entry in
    the third result, shape `(batch, heads, m)`, unless that is None.
    """
    q, k, _, log_weight, key_mask, particles, key_particles, phi, causal = inputs.cast()
    dead = None if key_mask is None else ~key_mask[:, None, :, None]
    if dead is not None:
        k = k.masked_fill(dead, 0)
        if log_weight is not None:
            log_weight = log_weight.masked_fill(dead, ABSENT)
    key_particles = key_particles or particles
    exponents = phi.log_features(k, key_particles) if phi.needs_shift else None
    if exponents is None:
        weights = None if log_weight is None else log_weight.squeeze(-1)
        return phi(q, particles), phi(k, key_particles), weights
    if log_weight is not None:
        exponents = exponents + log_weight
    if dead is not None:
        exponents = exponents.masked_fill(dead, ABSENT)
    products = projections(q, particles) / phi.temperature
    if causal:
        highest = exponents.detach().amax(dim=-1, keepdim=True)
        phi_k = (exponents - highest).exp()
        return products.softmax(dim=-1), phi_k, highest.squeeze(-1)
    if k.shape[2] == 0:
        return products.exp(), exponents, None
    highest = exponents.detach().amax(dim=-2, keepdim=True)
    return (products + highest).softmax(dim=-1), (exponents - highest).exp(), None


def attend(inputs: Inputs, *, quadratic: bool) -> Tensor:
    """Attend."""
    phi_q, phi_k, logs = feature_pair(inputs)
    values = values_with_ones(inputs.v.to(phi_k.dtype), inputs.key_mask)
    if inputs.causal:
        sums = _causal_sums(phi_q, phi_k, values, logs, quadratic=quadratic)
        return ratio(sums).to(inputs.v.dtype)
    if logs is not None and logs.shape[-1]:
        logs = logs - logs.detach().amax(dim=-1, keepdim=True)
        values = values * logs.exp().unsqueeze(-1)
    if quadratic:
        sums = (phi_q @ phi_k.transpose(-1, -2)) @ values
    else:
        sums = phi_q @ (phi_k.transpose(-1, -2) @ values)
    return ratio(sums).to(inputs.v.dtype)


def _causal_sums(
    phi_q: Tensor,
    phi_k: Tensor,
    values: Tensor,
    logs: Tensor | None,
    *,
    quadratic: bool,
) -> Tensor:
    # Sums over the keys up to each position, all blocks at once.
    length = phi_q.shape[2]
    whole = quadratic or torch.compiler.is_exporting()
    if logs is not None:
        logs = _blocks(logs.unsqueeze(-1), ABSENT, whole=whole).squeeze(-1)
    phi_q, phi_k, values = (_blocks(x, whole=whole) for x in (phi_q, phi_k, values))
    products = phi_q @ phi_k.transpose(-1, -2)  # (batch, heads, blocks, row, row)
    if logs is None:
        states = phi_k.transpose(-1, -2) @ values
        before = states.cumsum(dim=2) - states
        sums = products.tril() @ values + phi_q @ before
    else:
        sums = _weighted_sums(phi_q, phi_k, values, products, logs)
    return sums.flatten(2, 3)[:, :, :length]


def _weighted_sums(
    phi_q: Tensor, phi_k: Tensor, values: Tensor, products: Tensor, weights: Tensor
) -> Tensor:
    rows, blocks = phi_q.shape[3], phi_q.shape[2]
    peaks = weights.amax(dim=-1)  # (.., blocks) of weights (.., blocks, rows)
    # The reference of row i is the largest weight up to i, so that no factor exceeds 1
    # and the largest is 1.
    reference = _running_maximum(weights.flatten(2)).view_as(weights)
    inside = weights.unsqueeze(-2) - reference.unsqueeze(-1)  # (.., blocks, i, j)
    future = torch.ones(rows, rows, dtype=torch.bool, device=weights.device).triu(1)
    inside = inside.masked_fill(future, -torch.inf).exp()
    ends = functional.pad(reference[..., -1], (1, 0), value=ABSENT)[..., :-1]
    between = peaks.unsqueeze(-2) - ends.unsqueeze(-1)  # (.., block, earlier block)
    past = torch.ones(blocks, blocks, dtype=torch.bool, device=weights.device).tril(-1)
    between = between.masked_fill(~past, -torch.inf).exp()
    factors = (weights - peaks.unsqueeze(-1)).exp().unsqueeze(-1)
    states = phi_k.transpose(-1, -2) @ (values * factors)
    before = (between @ states.flatten(3)).view_as(states)
    carried = (ends.unsqueeze(-1) - reference).exp().unsqueeze(-1)
    return (products * inside) @ values + (phi_q @ before) * carried


def _running_maximum(x: Tensor) -> Tensor:
    if not torch.compiler.is_exporting():
        return x.cummax(dim=2).values
    # ONNX knows no running maximum, and an exported program is quadratic anyway.
    length = x.shape[2]
    later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    return x.unsqueeze(2).masked_fill(later, ABSENT).amax(dim=-1)


def _blocks(x: Tensor, value: float = 0.0, *, whole: bool) -> Tensor:
    if whole:
        return x.unsqueeze(2)
    batch, heads, length, dim = x.shape
    blocks = (length + _ROWS - 1) // _ROWS
    padded = functional.pad(x, (0, 0, 0, blocks * _ROWS - length), value=value)
    return padded.view(batch, heads, blocks, _ROWS, dim)
