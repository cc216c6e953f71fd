"""Every query sees every real key: the linear form and its quadratic dual."""

import torch
from torch import Tensor

from coulomb.attention.ops.block_maps import ABSENT, BlockMap
from coulomb.attention.ops.blocks import (
    Saved,
    Slab,
    SlabGradients,
    block_length,
    blocks,
    grad_rows,
    groups,
    key_rows,
    raise_shift,
    rows,
    write,
    write_key_gradients,
    write_product,
    write_ratio,
    zero_sums,
)
from coulomb.attention.ops.workspace import FRESH, Workspace


def _key_count(slab: Slab) -> int:
    # Padding at the end is not even looked at, so that more of it changes nothing,
    # not even the order of the sums. Elsewhere the question would stall the device.
    length = slab.k.shape[2]
    if slab.mask is None or slab.mask.device.type != "cpu":
        return length
    real = slab.mask.any(dim=0).nonzero()
    return int(real[-1]) + 1 if len(real) else min(length, 1)


_Kept = list[tuple[Tensor, Tensor | None]]


def _sum_keys(
    features: BlockMap, slab: Slab, kept: _Kept | None
) -> tuple[Tensor, Tensor | None]:
    work = features.work
    sums = zero_sums(slab, features)
    shift: Tensor | None = None
    for start, stop in blocks(_key_count(slab), block_length(slab, sums.shape[2])):
        keys, values, dead = key_rows(slab, start, stop, work)
        work.slot = 0 if kept is None else FRESH
        phi, higher = features.keys(keys, dead, shift)
        work.slot = 0
        raise_shift(sums, shift, higher)
        shift = higher
        if kept is not None:
            kept.append((phi, shift))
        sums.baddbmm_(values.transpose(1, 2), phi)
    return sums, shift


def _fold(sums: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    # With exponential features, phi(q)' G / phi(q)' z = softmax(log phi(q) + log z)
    # (G / z): a mean, over features, of mean values. Nothing is left to divide by.
    weights = sums[:, -1:]
    absent = weights == 0
    logarithms = weights.log().masked_fill_(absent, ABSENT)
    offset = logarithms if shift is None else logarithms.add_(shift)
    weights = weights.masked_fill(absent, torch.inf)
    return sums.div_(weights), weights, offset


def linear_forward(
    features: BlockMap, slab: Slab, out: Tensor, *, keep: bool = False
) -> Saved:
    """Sum keys, `[G z] = sum_j phi(k_j) [v_j 1]'`, then apply to the queries."""
    work = features.work
    keep = keep and features.exponential
    kept_queries: list[Tensor] | None = [] if keep else None
    kept_keys: _Kept | None = [] if keep else None
    sums, shift = _sum_keys(features, slab, kept_keys)
    cuts = blocks(slab.q.shape[2], block_length(slab, sums.shape[2]))
    if features.exponential:
        means, weights, offset = _fold(sums, shift)
        columns = means[:, :-1].transpose(1, 2)
        for start, stop in cuts:
            work.slot = 0 if kept_queries is None else FRESH
            phi = features.queries(rows(slab.q, start, stop, work), offset)
            work.slot = 0
            if kept_queries is not None:
                kept_queries.append(phi)
            write_product(phi, columns, out[:, :, start:stop])
        shifts = [offset] if shift is None else [offset, shift]
        return Saved(
            sums=means,
            weights=weights,
            shifts=shifts,
            queries=kept_queries,
            keys=kept_keys,
        )
    normaliser = work.zeros(groups(slab), slab.q.shape[2], 1)
    for start, stop in cuts:
        phi = features.queries(rows(slab.q, start, stop, work), shift)
        block = work.get("outputs", phi.shape[0], phi.shape[1], sums.shape[1])
        torch.bmm(phi, sums.transpose(1, 2), out=block)
        write_ratio(block, out[:, :, start:stop], normaliser[:, start:stop])
    return Saved(normaliser, sums)


def _at_shift(
    phi: Tensor, shift: Tensor | None, higher: Tensor | None, work: Workspace
) -> Tensor:
    if shift is None or higher is None or shift is higher:
        return phi
    return torch.mul(phi, (shift - higher).exp_(), out=work.get("keys", *phi.shape))


def linear_backward(
    features: BlockMap,
    slab: Slab,
    saved: Saved,
    out: Tensor,
    grad: Tensor,
    grads: SlabGradients,
) -> None:
    """Pull the gradient back through the linear form, evaluating features again."""
    work = features.work
    sums = saved.sums
    assert sums is not None
    offset, shift = (*(saved.shifts or ()), None, None)[:2]
    grad_sums = torch.zeros_like(sums)
    step = block_length(slab, sums.shape[2])
    for i, (start, stop) in enumerate(blocks(slab.q.shape[2], step)):
        phi, pull = features.record_queries(
            rows(slab.q, start, stop, work),
            offset,
            None if saved.queries is None else saved.queries[i],
        )
        grad_block = grad_rows(out, grad, saved.normaliser, start, stop, work)
        grad_sums.baddbmm_(grad_block.transpose(1, 2), phi)
        grad_phi = work.get("grad_features", *phi.shape)
        torch.bmm(grad_block, sums, out=grad_phi)
        write(pull(grad_phi), grads.q, start, stop)
    if saved.weights is not None:
        grad_sums.div_(saved.weights)
    columns = grad_sums[:, :-1].transpose(1, 2)
    count = _key_count(slab)
    for i, (start, stop) in enumerate(blocks(count, step)):
        keys, values, dead = key_rows(slab, start, stop, work)
        known = None if saved.keys is None else _at_shift(*saved.keys[i], shift, work)
        phi, pull = features.record_keys(keys, dead, shift, known)
        grad_phi = work.get("grad_features", *phi.shape)
        torch.bmm(values, grad_sums, out=grad_phi)
        grad_values = torch.bmm(phi, columns)
        write_key_gradients(grads, pull(grad_phi), grad_values, dead, start, stop)
    grads.k[:, :, count:] = 0
    grads.v[:, :, count:] = 0


def quadratic_forward(features: BlockMap, slab: Slab, out: Tensor) -> Saved:
    """Multiply in the other order, `(phi(q) phi(k)') [v 1]`: cheaper for few keys."""
    work = features.work
    count = _key_count(slab)
    keys, values, dead = key_rows(slab, 0, count, work)
    phi_k, shift = features.keys(keys, dead, None)
    normaliser = work.zeros(groups(slab), slab.q.shape[2], 1)
    for start, stop in blocks(slab.q.shape[2], block_length(slab, phi_k.shape[2])):
        phi_q = features.queries(rows(slab.q, start, stop, work), shift)
        products = work.get("products", phi_q.shape[0], stop - start, count)
        torch.bmm(phi_q, phi_k.transpose(1, 2), out=products)
        block = work.get("outputs", *products.shape[:2], values.shape[2])
        torch.bmm(products, values, out=block)
        write_ratio(block, out[:, :, start:stop], normaliser[:, start:stop])
    shifts = None if shift is None else [shift]
    return Saved(normaliser, shifts=shifts)


def quadratic_backward(
    features: BlockMap,
    slab: Slab,
    saved: Saved,
    out: Tensor,
    grad: Tensor,
    grads: SlabGradients,
) -> None:
    """Pull the gradient back through the quadratic form."""
    work = features.work
    shift = saved.shifts[0] if saved.shifts else None
    count = _key_count(slab)
    keys, values, dead = key_rows(slab, 0, count, work)
    phi_k, pull_k = features.record_keys(keys, dead, shift)
    grad_phi_k = torch.zeros_like(phi_k)
    grad_values = torch.zeros_like(values)
    for start, stop in blocks(slab.q.shape[2], block_length(slab, phi_k.shape[2])):
        phi_q, pull_q = features.record_queries(rows(slab.q, start, stop, work), shift)
        grad_block = grad_rows(out, grad, saved.normaliser, start, stop, work)
        products = work.get("products", phi_q.shape[0], stop - start, count)
        torch.bmm(phi_q, phi_k.transpose(1, 2), out=products)
        grad_values.baddbmm_(products.transpose(1, 2), grad_block)
        torch.bmm(grad_block, values.transpose(1, 2), out=products)
        grad_phi_k.baddbmm_(products.transpose(1, 2), phi_q)
        grad_phi_q = work.get("grad_features", *phi_q.shape)
        torch.bmm(products, phi_k, out=grad_phi_q)
        write(pull_q(grad_phi_q), grads.q, start, stop)
    write_key_gradients(
        grads, pull_k(grad_phi_k), grad_values[..., :-1], dead, 0, count
    )
    grads.k[:, :, count:] = 0
    grads.v[:, :, count:] = 0
