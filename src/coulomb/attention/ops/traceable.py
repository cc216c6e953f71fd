"""The same forms in plain differentiable torch, without loops.

Used where an autograd function of our own cannot go: under `torch.compile`,
`torch.export`, `torch.func` and tracing. No branch depends on a length, so that lengths
may stay symbolic.
"""

import torch
from torch import Tensor
from torch.nn import functional

from coulomb.attention.ops.block_maps import ABSENT
from coulomb.features import AbstractFeatureMap, Favor, Particles, projections

_CHUNK = 64


def must_be_plain(x: Tensor) -> bool:
    """Say whether someone is tracing or transforming the present call."""
    return (
        x.is_meta
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
    )


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


def _key_exponents(
    feature_map: Favor, k: Tensor, particles: Particles, key_mask: Tensor | None
) -> Tensor:
    exponents = feature_map.exponents(k, particles)
    if key_mask is None:
        return exponents
    return exponents.masked_fill(~key_mask[:, None, :, None], ABSENT)


def feature_pair(
    q: Tensor,
    k: Tensor,
    particles: Particles,
    feature_map: AbstractFeatureMap,
    key_mask: Tensor | None,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Evaluate the features of queries and keys so that nothing overflows."""
    if key_mask is not None:
        k = k.masked_fill(~key_mask[:, None, :, None], 0)
    if not isinstance(feature_map, Favor):
        return feature_map(q, particles), feature_map(k, particles), None
    exponents = _key_exponents(feature_map, k, particles, key_mask)
    products = projections(q, particles)
    if causal:
        highest = exponents.detach().amax(dim=-1, keepdim=True)
        phi_k = (exponents - highest).exp()
        return products.softmax(dim=-1), phi_k, highest.squeeze(-1)
    highest = exponents.detach().amax(dim=-2, keepdim=True)
    return (products + highest).softmax(dim=-1), (exponents - highest).exp(), None


def bidirectional(
    phi_q: Tensor, phi_k: Tensor, values: Tensor, *, quadratic: bool
) -> Tensor:
    """Sum over all keys."""
    if quadratic:
        return (phi_q @ phi_k.transpose(-1, -2)) @ values
    return phi_q @ (phi_k.transpose(-1, -2) @ values)


def causal_sums(
    phi_q: Tensor,
    phi_k: Tensor,
    values: Tensor,
    logs: Tensor | None,
    *,
    quadratic: bool,
) -> Tensor:
    """Sum over the keys up to each position, all chunks at once."""
    length = phi_q.shape[2]
    whole = quadratic or torch.compiler.is_exporting()
    if logs is not None:
        logs = _chunked(logs.unsqueeze(-1), ABSENT, whole=whole).squeeze(-1)
    phi_q, phi_k, values = (_chunked(x, whole=whole) for x in (phi_q, phi_k, values))
    products = phi_q @ phi_k.transpose(-1, -2)  # (batch, heads, chunks, row, row)
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
    rows, chunks = phi_q.shape[3], phi_q.shape[2]
    peaks = weights.amax(dim=-1)  # (.., chunks) of weights (.., chunks, rows)
    # The reference of row i is the largest weight up to i, so that no factor exceeds 1
    # and the largest is 1.
    reference = _running_maximum(weights.flatten(2)).view_as(weights)
    inside = weights.unsqueeze(-2) - reference.unsqueeze(-1)  # (.., chunks, i, j)
    future = torch.ones(rows, rows, dtype=torch.bool, device=weights.device).triu(1)
    inside = inside.masked_fill(future, -torch.inf).exp()
    ends = functional.pad(reference[..., -1], (1, 0), value=ABSENT)[..., :-1]
    between = peaks.unsqueeze(-2) - ends.unsqueeze(-1)  # (.., chunk, earlier chunk)
    past = torch.ones(chunks, chunks, dtype=torch.bool, device=weights.device).tril(-1)
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


def _chunked(x: Tensor, value: float = 0.0, *, whole: bool) -> Tensor:
    if whole:
        return x.unsqueeze(2)
    batch, heads, length, dim = x.shape
    chunks = (length + _CHUNK - 1) // _CHUNK
    padded = functional.pad(x, (0, 0, 0, chunks * _CHUNK - length), value=value)
    return padded.view(batch, heads, chunks, _CHUNK, dim)
