"""A query sees the keys up to its own position: exact, chunk by chunk.

Inside a chunk the lower triangle of `phi(q) phi(k)'` is formed; what came before is in
the sums `[G z]`. Features, and all that concerns single chunks only, are computed for a
block of several chunks at once.

The backward pass goes from the last span of a few blocks to the first; in each, once
forwards for the queries, with the same sums, and once backwards for the keys, with the
sums of what comes after. Only the sums before each span are stored.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from coulomb.attention.ops.block_maps import BlockMap, Pull
from coulomb.attention.ops.blocks import (
    Saved,
    Slab,
    SlabGradients,
    block_length,
    blocks,
    grad_rows,
    groups,
    join_heads,
    key_rows,
    raise_shift,
    rows,
    write,
    write_key_gradients,
    write_ratio,
    zero_sums,
)

# Longer chunks cost more products inside, shorter ones more rounds.
CHUNK = 64
# Features of a span are kept while it is differentiated; the sums before it are kept
# from the forward pass, a quarter of the size of its values.
SPAN = 512


class _Block(NamedTuple):
    number: int
    start: int
    stop: int
    chunks: int

    def split(self, x: Tensor) -> Tensor:
        """View rows `(groups, rows, d)` as chunks `(groups * chunks, rows, d)`."""
        return x.view(x.shape[0] * self.chunks, -1, x.shape[2])

    def parts(self) -> list[slice]:
        """Give the rows of each chunk, counted from the start of the block."""
        step = (self.stop - self.start) // self.chunks
        return [slice(i * step, (i + 1) * step) for i in range(self.chunks)]

    def triangle(self, left: Tensor, right: Tensor, like: BlockMap) -> Tensor:
        """Multiply the rows of each chunk; `(groups * chunks, rows, rows)`."""
        left, right = self.split(left), self.split(right)
        out = like.work.get("products", left.shape[0], left.shape[1], left.shape[1])
        return torch.bmm(left, right.transpose(1, 2), out=out)


def _cut(slab: Slab, n_features: int, chunk: int) -> list[_Block]:
    # Blocks of whole chunks, and one shorter chunk at the end. Chunks that had to be
    # shortened are blocks by themselves, because a shift is common to a block.
    length = slab.q.shape[2]
    many = block_length(slab, n_features) // chunk if chunk == CHUNK else 1
    whole = length // chunk * chunk
    cuts = [
        _Block(number, start, stop, (stop - start) // chunk)
        for number, (start, stop) in enumerate(blocks(whole, chunk * max(many, 1)))
    ]
    return cuts if whole == length else [*cuts, _Block(len(cuts), whole, length, 1)]


def _spans(cuts: list[_Block]) -> list[list[_Block]]:
    spans: list[list[_Block]] = []
    for cut in cuts:
        if not spans or cut.stop - spans[-1][0].start > SPAN:
            spans.append([])
        spans[-1].append(cut)
    return spans


def _forward(
    features: BlockMap, slab: Slab, out: Tensor, chunk: int, keep: bool
) -> tuple[Saved, bool]:
    work = features.work
    sums = zero_sums(slab, features)
    shift: Tensor | None = None
    normaliser = work.zeros(groups(slab), slab.q.shape[2], 1)
    shifts: list[Tensor] = []
    states: list[Tensor] = []
    cuts = _cut(slab, sums.shape[2], chunk)
    first = {span[0].number for span in _spans(cuts)} if keep else set()
    for cut in cuts:
        _, start, stop, _ = cut
        if cut.number in first:
            states.append(sums.clone())
        keys, values, dead = key_rows(slab, start, stop, work)
        phi_k, higher = features.keys(keys, dead, shift)
        raise_shift(sums, shift, higher)
        shift = higher
        if shift is not None:
            shifts.append(shift)
        phi_q = features.queries(rows(slab.q, start, stop, work), shift)
        products = cut.triangle(phi_q, phi_k, features).tril_()
        block = work.get("outputs", *values.shape)
        torch.bmm(products, cut.split(values), out=cut.split(block))
        for part in cut.parts():
            block[:, part].baddbmm_(phi_q[:, part], sums.transpose(1, 2))
            sums.baddbmm_(values[:, part].transpose(1, 2), phi_k[:, part])
        write_ratio(block, out[:, :, start:stop], normaliser[:, start:stop])
    saved = Saved(normaliser, shifts=shifts or None, chunk=chunk, states=states)
    return saved, not shifts or _in_range(normaliser, slab)


def _in_range(normaliser: Tensor, slab: Slab) -> bool:
    # A row whose keys are all far below a later key of its block has lost digits.
    lost = normaliser < torch.finfo(normaliser.dtype).tiny ** 0.5
    lost |= normaliser.isinf()
    if slab.mask is not None:
        seen = slab.mask.cumsum(dim=1).bool()[:, None, :, None]
        lost &= join_heads(seen.expand(-1, slab.q.shape[1], -1, -1))
    return not bool(lost.any())


def causal_forward(
    features: BlockMap,
    slab: Slab,
    out: Tensor,
    *,
    chunk: int = CHUNK,
    keep: bool = True,
) -> Saved:
    """Attend to the past, `a_i = phi(q_i)' G_i / phi(q_i)' z_i` with sums up to i.

    A shift is common to a block. Should a later key of a block dwarf the earlier ones
    beyond the range of the numbers, blocks are shortened, at last to one row.
    """
    while True:
        saved, exact = _forward(features, slab, out, chunk, keep)
        if exact or chunk == 1:
            return saved
        chunk = max(1, min(chunk, slab.q.shape[2]) // 8)


def causal_backward(
    features: BlockMap,
    slab: Slab,
    saved: Saved,
    out: Tensor,
    grad: Tensor,
    grads: SlabGradients,
) -> None:
    """Pull the gradient back through the causal form."""
    later = zero_sums(slab, features)  # sums of phi(q_i) and the gradient of its ratio
    spans = _spans(_cut(slab, later.shape[2], saved.chunk))
    shift: Tensor | None = None
    for index in reversed(range(len(spans))):
        records = _span_queries(features, slab, saved, out, grad, grads, index, spans)
        for record in reversed(records):
            lower = saved.shifts[record.cut.number] if saved.shifts else None
            raise_shift(later, lower, shift)
            shift = lower
            _block_keys(features, record, later, grads)


class _Record(NamedTuple):
    cut: _Block
    phi_q: Tensor
    phi_k: Tensor
    values: Tensor
    dead: Tensor | None
    grad_block: Tensor
    pull: Pull


def _span_queries(
    features: BlockMap,
    slab: Slab,
    saved: Saved,
    out: Tensor,
    grad: Tensor,
    grads: SlabGradients,
    index: int,
    spans: list[list[_Block]],
) -> list[_Record]:
    work = features.work
    assert saved.states is not None
    sums = saved.states[index].clone()  # a backward pass may be repeated
    first = spans[index][0].number
    shift = saved.shifts[first - 1] if saved.shifts and first else None
    records: list[_Record] = []
    for slot, cut in enumerate(spans[index]):
        _, start, stop, _ = cut
        work.slot = slot
        keys, values, dead = key_rows(slab, start, stop, work)
        higher = saved.shifts[cut.number] if saved.shifts else None
        raise_shift(sums, shift, higher)
        shift = higher
        phi_k, pull_k = features.record_keys(keys, dead, shift)
        phi_q, pull = features.record_queries(rows(slab.q, start, stop, work), shift)
        grad_block = grad_rows(out, grad, saved.normaliser, start, stop, work)
        records.append(_Record(cut, phi_q, phi_k, values, dead, grad_block, pull_k))
        work.slot = 0
        products = cut.triangle(grad_block, values, features).tril_()
        grad_phi = work.get("grad_features", *phi_q.shape)
        torch.bmm(products, cut.split(phi_k), out=cut.split(grad_phi))
        for part in cut.parts():
            grad_phi[:, part].baddbmm_(grad_block[:, part], sums)
            sums.baddbmm_(values[:, part].transpose(1, 2), phi_k[:, part])
        write(pull(grad_phi), grads.q, start, stop)
    return records


def _block_keys(
    features: BlockMap, record: _Record, later: Tensor, grads: SlabGradients
) -> None:
    work = features.work
    cut, phi_q, phi_k, values, dead, grad_block, pull = record
    products = cut.triangle(values, grad_block, features).triu_()
    grad_phi = work.get("grad_features", *phi_k.shape)
    torch.bmm(products, cut.split(phi_q), out=cut.split(grad_phi))
    products = cut.triangle(phi_k, phi_q, features).triu_()
    grad_values = work.get("grad_values", *grad_block.shape)
    torch.bmm(products, cut.split(grad_block), out=cut.split(grad_values))
    for part in reversed(cut.parts()):
        grad_phi[:, part].baddbmm_(values[:, part], later)
        grad_values[:, part].baddbmm_(phi_k[:, part], later.transpose(1, 2))
        later.baddbmm_(grad_block[:, part].transpose(1, 2), phi_q[:, part])
    grad_keys, grad_values = pull(grad_phi), grad_values[..., :-1]
    write_key_gradients(grads, grad_keys, grad_values, dead, cut.start, cut.stop)
