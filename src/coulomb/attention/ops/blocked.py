"""Attention in blocks that fit the cache: linear, quadratic and causal form.

A problem is cut into blocks of a few sequences, a block into blocks of rows. Values
carry a last column of ones, so that one product gives numerator and normaliser:
`phi(q)' [G z]` with `[G z] = sum_j phi(k_j) [v_j 1]'`. A mask multiplies `[v_j 1]`,
which is the same number as multiplying `phi(k_j)` at a quarter of the cost.

The causal form is exact: inside each part of a block of rows the lower triangle of
`phi(q) phi(k)'` is formed, and what came before is in the sums `[G z]`. Its backward
pass goes from the last few blocks to the first; in each, once forwards for the queries,
with the same sums, and once backwards for the keys, with the sums of what comes after.
Only the sums before every few blocks are stored.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coulomb.attention.ops.block_maps import (
    ABSENT,
    BlockMap,
    ExponentialMap,
    Kept,
    KeyRows,
    Pull,
    Workspace,
)
from coulomb.features import AbstractFeatureMap

# Rows whose triangle is formed: more cost more products, fewer more rounds.
TRIANGLE = 64
# Features of so many rows are kept while they are differentiated; the sums before them
# are kept from the forward pass, a quarter of the size of their values.
_STORED_EVERY = 512
# A block has at least this many sequences times heads: fewer do not occupy the cores,
# more would leave each too short a block of rows in the cache.
_GROUPS = 8
# Short sequences share a block, as long as its features stay in the cache.
_BLOCK_ELEMENTS = 1 << 19


class BlockIndex(NamedTuple):
    """The sequences of a block: a range of the batch, or packed tokens."""

    start: int
    stop: int
    # Several packed sequences of about the same length: the token at each place,
    # (sequences, longest), any one at padding; and True = real token.
    rows: Tensor | None = None
    mask: Tensor | None = None

    def take(self, x: Any) -> Any:
        """Give `(batch, heads, length, dim)`, a view except of several sequences."""
        if x is None:
            return None
        if self.rows is not None:
            return x[self.rows].transpose(1, 2)
        part = x[self.start : self.stop]
        return part.transpose(0, 1).unsqueeze(0) if x.dim() == 3 else part

    def put(self, part: Tensor | None, x: Any) -> None:
        """Write back what is not a view and therefore not there already."""
        if part is not None and self.rows is not None and self.mask is not None:
            x[self.rows[self.mask]] = part.transpose(1, 2)[self.mask]


class Problem(NamedTuple):
    """How attention is cut into blocks, and in which form each is computed."""

    feature_map: AbstractFeatureMap
    causal: bool
    form: str  # "linear", "quadratic", or "auto" for the cheaper of each block
    bounds: tuple[tuple[int, int], ...] | None  # of packed sequences
    backward: bool  # whether there will be a backward pass
    keep: bool  # whether features are few enough to be kept for it

    def blocks(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None, n_features: int
    ) -> tuple[BlockIndex, ...]:
        """Cut a problem into blocks of a few sequences."""
        if self.bounds is None:
            return _batch_blocks(k, key_mask, n_features)
        return _packed_blocks(self.bounds, q, n_features)


def _batch_blocks(
    k: Tensor, key_mask: Tensor | None, n_features: int
) -> tuple[BlockIndex, ...]:
    batch, heads, length = k.shape[:3]
    if k.device.type != "cpu":
        step = batch
    else:
        if key_mask is not None:
            # Not the padded length: more padding must not change the sums.
            length = int(key_mask.sum(dim=1).max()) if batch else 0
        few = _BLOCK_ELEMENTS // max(heads * length * n_features, 1)
        step = max(1, _GROUPS // max(heads, 1), few)
    starts = range(0, batch, max(step, 1))
    return tuple(BlockIndex(start, min(start + step, batch)) for start in starts)


def _packed_blocks(
    bounds: tuple[tuple[int, int], ...], q: Tensor, n_features: int
) -> tuple[BlockIndex, ...]:
    # Short sequences share a block with those of about their length; long ones, whose
    # features fill the cache, are blocks by themselves.
    row = max(q.shape[1] * n_features, 1)
    blocks: list[BlockIndex] = []
    together: list[tuple[int, int]] = []
    for bound in sorted(bounds, key=lambda bound: bound[1] - bound[0]):
        longest = bound[1] - bound[0]
        if together and (len(together) + 1) * longest * row > _BLOCK_ELEMENTS:
            blocks.append(_packed_block(together, q.device))
            together = []
        together.append(bound)
    if together:
        blocks.append(_packed_block(together, q.device))
    return tuple(blocks)


def _packed_block(bounds: list[tuple[int, int]], device: torch.device) -> BlockIndex:
    if len(bounds) == 1:
        return BlockIndex(*bounds[0])
    starts, stops = torch.tensor(bounds, device=device).unbind(1)
    longest = bounds[-1][1] - bounds[-1][0]
    return BlockIndex(0, 0, *padding(starts, stops, longest))


def padding(starts: Tensor, stops: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Give the token at each place of each sequence, and which places are real."""
    steps = torch.arange(max_length, device=starts.device)
    rows = starts.unsqueeze(1) + steps
    mask = rows < stops.unsqueeze(1)
    return rows.masked_fill(~mask, 0), mask


class Gradients(NamedTuple):
    """The gradient of the output, and where those of the inputs are written."""

    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    log_weight: Tensor | None


class Saved(NamedTuple):
    """What the backward pass of a block needs beside its inputs and outputs."""

    normaliser: Tensor | None  # (groups, n, 1), infinite where no key is real
    sums: Tensor | None = None  # (groups, dim_v + 1, features)
    weights: Tensor | None = None  # (groups, 1, features), what sums were divided by
    shifts: list[Tensor] | None = None
    triangle: int = 0
    states: list[Tensor] | None = None  # sums before every few blocks, if causal
    kept: Kept | None = None
    exact: bool = True  # whether nothing was lost to underflow
    logs: bool = False  # whether features were taken in logarithms


class Form(NamedTuple):
    """An order of the products, forwards and backwards."""

    forward: Callable[[BlockMap, "Block", Problem], Saved]
    backward: Callable[[BlockMap, "Block", Saved, Gradients], None]


def _ranges(length: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def _join_heads(x: Tensor) -> Tensor:
    # The sequences of a head follow one another, so that one matrix product evaluates
    # the features of all of them.
    return x.transpose(0, 1).flatten(0, 1)


def _split_heads(rows: Tensor, like: Tensor) -> Tensor:
    batch, heads = like.shape[:2]
    return rows.view(heads, batch, *rows.shape[1:]).transpose(0, 1)


def _raise_shift(sums: Tensor, shift: Tensor | None, higher: Tensor | None) -> None:
    # Rescale sums over keys from one shift to another, at least as high.
    if shift is not None and higher is not None:
        sums.mul_((shift - higher).exp_())


class Block(NamedTuple):
    """A few sequences with all their heads, and where the output goes."""

    q: Tensor  # (batch, heads, n, dim)
    k: Tensor  # (batch, heads, m, dim)
    v: Tensor  # (batch, heads, m, dim_v)
    log_weight: Tensor | None  # (batch, heads, m, 1)
    mask: Tensor | None  # (batch, m), True = real token
    out: Tensor  # (batch, heads, n, dim_v)
    work: Workspace

    @property
    def groups(self) -> int:
        """The sequences times the heads."""
        return self.q.shape[0] * self.q.shape[1]

    def key_count(self) -> int:
        """Give the length without padding at the end, which is not even looked at."""
        # More of it changes nothing then, not even the order of the sums. Elsewhere the
        # question would stall the device.
        length = self.k.shape[2]
        if self.mask is None or self.mask.device.type != "cpu":
            return length
        real = self.mask.any(dim=0).nonzero()
        return int(real[-1]) + 1 if len(real) else min(length, 1)

    def row_count(self, n_features: int) -> int:
        """Choose how many rows to work on, so that features stay in the cache."""
        elements = 1 << 19 if self.q.device.type == "cpu" else 1 << 26
        rows = elements // (self.groups * max(n_features, 1))
        return min(max(32, rows // 32 * 32), 4096)

    def zero_sums(self, features: BlockMap) -> Tensor:
        """Start `[G z]'`; BLAS is fastest with the features in the last axis."""
        return self.work.zeros(self.groups, self.v.shape[-1] + 1, features.n_features)

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Take rows, heads and batch as one axis, in the working precision."""
        return _join_heads(x[:, :, start:stop]).to(self.work.dtype)

    def key_rows(self, start: int, stop: int) -> KeyRows:
        """Take keys and values; what the mask removes is zero."""
        keys = self.rows(self.k, start, stop)
        heads, dim_v = self.v.shape[1], self.v.shape[3]
        values = self.work.get("values", self.groups, stop - start, dim_v + 1)
        _split_heads(values, self.v)[..., :dim_v] = self.v[:, :, start:stop]
        values[..., dim_v] = 1
        log_weight = self.log_weight
        if log_weight is not None:
            log_weight = self.rows(log_weight, start, stop)
        if self.mask is None:
            return KeyRows(keys, values, None, log_weight)
        dead = ~self.mask[:, None, start:stop, None].expand(-1, heads, -1, -1)
        dead = _join_heads(dead)
        if log_weight is not None:
            log_weight = log_weight.masked_fill(dead, ABSENT)
        # Also the keys: padding may hold anything, and NaN times zero is NaN.
        keys, values = keys.masked_fill(dead, 0), values.masked_fill_(dead, 0)
        return KeyRows(keys, values, dead, log_weight)

    def write_ratio(self, sums: Tensor, normaliser: Tensor, start: int) -> None:
        """Divide numerators by normalisers; zero where there is nothing to divide."""
        stop = start + sums.shape[1]
        out, total = self.out[:, :, start:stop], normaliser[:, start:stop]
        total.copy_(sums[..., -1:])
        # One division by infinity makes the output zero, and every gradient with it.
        total.masked_fill_(total == 0, torch.inf)
        torch.div(_split_heads(sums, out)[..., :-1], _split_heads(total, out), out=out)

    def grad_rows(
        self, grads: Gradients, normaliser: Tensor | None, start: int, stop: int
    ) -> Tensor:
        """Differentiate the ratio: `g / D` of the numerator, `-(g . out) / D` of D."""
        g = self.rows(grads.out, start, stop)
        y = self.rows(self.out, start, stop)
        result = self.work.get("grad_sums", g.shape[0], g.shape[1], g.shape[2] + 1)
        total = 1.0 if normaliser is None else normaliser[:, start:stop]
        torch.div(g, total, out=result[..., :-1])
        torch.sum(result[..., :-1] * y, dim=-1, out=result[..., -1])
        result[..., -1].neg_()
        return result

    def in_range(self, normaliser: Tensor, *, causal: bool) -> bool:
        """Say whether the normaliser of every query that sees a key kept its digits."""
        lost = normaliser < torch.finfo(normaliser.dtype).tiny ** 0.5
        lost |= normaliser.isinf()
        if self.mask is not None:
            seen = self.mask.cumsum(dim=1).bool()
            seen = (seen if causal else seen[:, -1:])[:, None, :, None]
            lost &= _join_heads(seen.expand(-1, self.q.shape[1], -1, -1))
        return self.k.shape[2] == 0 or not bool(lost.any())


def _write(rows: Tensor, target: Tensor, start: int) -> None:
    part = target[:, :, start : start + rows.shape[1]]
    part.copy_(_split_heads(rows, part))


def _write_key_gradients(
    grads: Gradients, rows: KeyRows, keys: Tensor, values: Tensor, start: int
) -> None:
    # Masked tokens get zero. Features of a removed key have no gradient, but its values
    # do.
    if grads.log_weight is not None:
        weight = rows.values[..., -1:]
        _write(
            (values * rows.values).sum(dim=-1, keepdim=True), grads.log_weight, start
        )
        values = values * weight
    values = values[..., : grads.v.shape[3]]
    if rows.dead is not None:
        keys = keys.masked_fill(rows.dead, 0)
        values = values.masked_fill(rows.dead, 0)
    _write(keys, grads.k, start)
    _write(values, grads.v, start)


def _clear_padding(grads: Gradients, count: int) -> None:
    for grad in (grads.k, grads.v, grads.log_weight):
        if grad is not None:
            grad[:, :, count:] = 0


def linear_forward(features: BlockMap, block: Block, problem: Problem) -> Saved:
    """Sum keys, `[G z] = sum_j phi(k_j) [v_j 1]'`, then apply to the queries."""
    work = block.work
    sums = block.zero_sums(features)
    step = block.row_count(sums.shape[2])
    shift: Tensor | None = None
    for start, stop in _ranges(block.key_count(), step):
        rows = block.key_rows(start, stop)
        # Those of normalised maps stay: only the weights of their keys have a shift.
        kept = features.kept if not features.map.normalised else None
        earlier = list((kept or {}).values())
        phi, higher, _ = features.keys(rows, shift, start)
        for part in (sums, *earlier):
            _raise_shift(part, shift, higher)
        shift = higher
        sums.baddbmm_(rows.values.transpose(1, 2), phi)
    ranges = _ranges(block.q.shape[2], step)
    if isinstance(features, ExponentialMap):
        return _mean_of_means(features, block, sums, shift, ranges)
    normaliser = work.zeros(block.groups, block.q.shape[2], 1)
    for start, stop in ranges:
        phi, _ = features.queries(block.rows(block.q, start, stop), shift, start)
        outputs = work.get("outputs", phi.shape[0], phi.shape[1], sums.shape[1])
        torch.bmm(phi, sums.transpose(1, 2), out=outputs)
        block.write_ratio(outputs, normaliser, start)
    exact = not features.retry or block.in_range(normaliser, causal=False)
    shifts = None if shift is None else [shift, shift]
    return Saved(normaliser, sums, None, shifts, exact=exact, logs=features.logs)


def _mean_of_means(
    features: ExponentialMap,
    block: Block,
    sums: Tensor,
    shift: Tensor | None,
    ranges: list[tuple[int, int]],
) -> Saved:
    # phi(q)' G / phi(q)' z = softmax(log phi(q) + log z) (G / z): nothing is left to
    # divide by, and no column of ones to multiply.
    least, most = sums[:, -1].aminmax(dim=-1)
    lost = (least < torch.finfo(sums.dtype).tiny ** 0.5) & (most > 0)
    weights = sums[:, -1:].masked_fill(sums[:, -1:] == 0, 1.0)
    offset = weights.log() if shift is None else weights.log().add_(shift)
    columns = sums.div_(weights)[:, :-1].transpose(1, 2)
    for start, stop in ranges:
        phi, _ = features.queries(block.rows(block.q, start, stop), offset, start)
        out = block.out[:, :, start:stop]
        if len(out) == 1 and out.dtype == phi.dtype:
            torch.bmm(phi, columns, out=out[0])
        else:
            out.copy_(_split_heads(torch.bmm(phi, columns), out))
    shifts = [offset] if shift is None else [offset, shift]
    asks = features.retry and not lost.is_meta  # which has no values
    exact = not (asks and bool(lost.any()))
    return Saved(None, sums, weights, shifts, exact=exact, kept=features.kept)


def linear_backward(
    features: BlockMap, block: Block, saved: Saved, grads: Gradients
) -> None:
    """Pull the gradient back through the linear form, evaluating features again."""
    sums = saved.sums
    assert sums is not None
    offset, shift = (*(saved.shifts or ()), None, None)[:2]
    grad_sums = torch.zeros_like(sums)
    step = block.row_count(sums.shape[2])
    for start, stop in _ranges(block.q.shape[2], step):
        phi, pull = features.queries(block.rows(block.q, start, stop), offset, start)
        grad_rows = block.grad_rows(grads, saved.normaliser, start, stop)
        grad_sums.baddbmm_(grad_rows.transpose(1, 2), phi)
        grad_phi = block.work.get("grad_features", *phi.shape)
        torch.bmm(grad_rows, sums, out=grad_phi)
        _write(pull(grad_phi), grads.q, start)
    if saved.weights is not None:
        grad_sums.div_(saved.weights)
    columns = grad_sums if grads.log_weight is not None else grad_sums[:, :-1]
    columns = columns.transpose(1, 2)
    count = block.key_count()
    for start, stop in _ranges(count, step):
        rows = block.key_rows(start, stop)
        phi, _, pull = features.keys(rows, shift, start)
        grad_phi = block.work.get("grad_features", *phi.shape)
        torch.bmm(rows.values, grad_sums, out=grad_phi)
        grad_values = torch.bmm(phi, columns)
        _write_key_gradients(grads, rows, pull(grad_phi), grad_values, start)
    _clear_padding(grads, count)


def quadratic_forward(features: BlockMap, block: Block, problem: Problem) -> Saved:
    """Multiply in the other order, `(phi(q) phi(k)') [v 1]`: cheaper for few keys."""
    work = block.work
    count = block.key_count()
    rows = block.key_rows(0, count)
    phi_k, shift, _ = features.keys(rows, None, 0)
    normaliser = work.zeros(block.groups, block.q.shape[2], 1)
    for start, stop in _ranges(block.q.shape[2], block.row_count(phi_k.shape[2])):
        phi_q, _ = features.queries(block.rows(block.q, start, stop), shift, start)
        products = work.get("products", phi_q.shape[0], stop - start, count)
        torch.bmm(phi_q, phi_k.transpose(1, 2), out=products)
        outputs = work.get("outputs", *products.shape[:2], rows.values.shape[2])
        torch.bmm(products, rows.values, out=outputs)
        block.write_ratio(outputs, normaliser, start)
    exact = not features.retry or block.in_range(normaliser, causal=False)
    shifts = None if shift is None else [shift]
    about = None, None, shifts, 0, None, features.kept
    return Saved(normaliser, *about, exact=exact, logs=features.logs)


def quadratic_backward(
    features: BlockMap, block: Block, saved: Saved, grads: Gradients
) -> None:
    """Pull the gradient back through the quadratic form."""
    work = block.work
    shift = saved.shifts[0] if saved.shifts else None
    count = block.key_count()
    rows = block.key_rows(0, count)
    phi_k, _, pull_k = features.keys(rows, shift, 0)
    grad_phi_k = torch.zeros_like(phi_k)
    grad_values = torch.zeros_like(rows.values)
    for start, stop in _ranges(block.q.shape[2], block.row_count(phi_k.shape[2])):
        phi_q, pull_q = features.queries(block.rows(block.q, start, stop), shift, start)
        grad_rows = block.grad_rows(grads, saved.normaliser, start, stop)
        products = work.get("products", phi_q.shape[0], stop - start, count)
        torch.bmm(phi_q, phi_k.transpose(1, 2), out=products)
        grad_values.baddbmm_(products.transpose(1, 2), grad_rows)
        torch.bmm(grad_rows, rows.values.transpose(1, 2), out=products)
        grad_phi_k.baddbmm_(products.transpose(1, 2), phi_q)
        grad_phi_q = work.get("grad_features", *phi_q.shape)
        torch.bmm(products, phi_k, out=grad_phi_q)
        _write(pull_q(grad_phi_q), grads.q, start)
    _write_key_gradients(grads, rows, pull_k(grad_phi_k), grad_values, 0)
    _clear_padding(grads, count)


class _RowBlock(NamedTuple):
    # Rows of a causal form: a few triangles after one another.
    number: int
    start: int
    stop: int
    triangles: int

    def split(self, x: Tensor) -> Tensor:
        """View rows `(groups, rows, d)` as `(groups * triangles, rows, d)`."""
        return x.view(x.shape[0] * self.triangles, -1, x.shape[2])

    def parts(self) -> list[slice]:
        """Give the rows of each triangle, counted from the start of the block."""
        step = (self.stop - self.start) // self.triangles
        return [slice(i * step, (i + 1) * step) for i in range(self.triangles)]

    def products(self, left: Tensor, right: Tensor, work: Workspace) -> Tensor:
        """Multiply the rows of each triangle; `(groups * triangles, rows, rows)`."""
        left, right = self.split(left), self.split(right)
        out = work.get("products", left.shape[0], left.shape[1], left.shape[1])
        return torch.bmm(left, right.transpose(1, 2), out=out)


def _row_blocks(block: Block, n_features: int, rows: int) -> list[list[_RowBlock]]:
    # Blocks of whole triangles and one shorter at the end, by the sums that are stored.
    # Triangles that had to be shortened are blocks by themselves, because a shift is
    # common to a block.
    length = block.q.shape[2]
    many = block.row_count(n_features) // rows if rows == TRIANGLE else 1
    whole = length // rows * rows
    blocks = [
        _RowBlock(number, start, stop, (stop - start) // rows)
        for number, (start, stop) in enumerate(_ranges(whole, rows * max(many, 1)))
    ]
    if whole != length:
        blocks.append(_RowBlock(len(blocks), whole, length, 1))
    stored: list[list[_RowBlock]] = []
    for each in blocks:
        if not stored or each.stop - stored[-1][0].start > _STORED_EVERY:
            stored.append([])
        stored[-1].append(each)
    return stored


def _causal_forward(
    features: BlockMap, block: Block, triangle: int, keep: bool
) -> Saved:
    work = block.work
    sums = block.zero_sums(features)
    shift: Tensor | None = None
    normaliser = work.zeros(block.groups, block.q.shape[2], 1)
    shifts: list[Tensor] = []
    states: list[Tensor] = []
    for blocks in _row_blocks(block, sums.shape[2], triangle):
        if keep:
            states.append(sums.clone())
        for each in blocks:
            rows = block.key_rows(each.start, each.stop)
            phi_k, higher, _ = features.keys(rows, shift, each.start)
            _raise_shift(sums, shift, higher)
            shift = higher
            if shift is not None:
                shifts.append(shift)
            queries = block.rows(block.q, each.start, each.stop)
            phi_q, _ = features.queries(queries, shift, each.start)
            products = each.products(phi_q, phi_k, work).tril_()
            outputs = work.get("outputs", *rows.values.shape)
            torch.bmm(products, each.split(rows.values), out=each.split(outputs))
            for part in each.parts():
                outputs[:, part].baddbmm_(phi_q[:, part], sums.transpose(1, 2))
                sums.baddbmm_(rows.values[:, part].transpose(1, 2), phi_k[:, part])
            block.write_ratio(outputs, normaliser, each.start)
    exact = True
    if shifts or features.retry:
        # A row whose keys are all far below a later key of its block has lost digits.
        exact = block.in_range(normaliser, causal=True)
    about = shifts or None, triangle, states, features.kept
    return Saved(normaliser, None, None, *about, exact=exact, logs=features.logs)


def causal_forward(features: BlockMap, block: Block, problem: Problem) -> Saved:
    """Attend to the past, `a_i = phi(q_i)' G_i / phi(q_i)' z_i` with sums up to i.

    A shift is common to a block of rows. Should a later key of a block dwarf the
    earlier ones beyond the range of the numbers, blocks are shortened, at last to one
    row.
    """
    n = block.q.shape[2]
    # One triangle of everything is the quadratic form.
    triangle = max(n, 1) if problem.form == "quadratic" else TRIANGLE
    while True:
        saved = _causal_forward(features, block, triangle, problem.backward)
        if saved.exact or features.retry or triangle == 1:
            return saved
        triangle = max(1, min(triangle, n) // 8)


class _Recorded(NamedTuple):
    rows: _RowBlock
    phi_q: Tensor
    phi_k: Tensor
    keys: KeyRows
    grad_rows: Tensor
    pull: Pull


def causal_backward(
    features: BlockMap, block: Block, saved: Saved, grads: Gradients
) -> None:
    """Pull the gradient back through the causal form."""
    later = block.zero_sums(features)  # sums of phi(q_i) and the gradient of its ratio
    stored = _row_blocks(block, later.shape[2], saved.triangle)
    shift: Tensor | None = None
    for index in reversed(range(len(stored))):
        records = _pull_causal_queries(
            features, block, saved, grads, stored[index], index
        )
        for record in reversed(records):
            lower = saved.shifts[record.rows.number] if saved.shifts else None
            _raise_shift(later, lower, shift)
            shift = lower
            _pull_causal_keys(block.work, record, later, grads)


def _pull_causal_queries(
    features: BlockMap,
    block: Block,
    saved: Saved,
    grads: Gradients,
    blocks: list[_RowBlock],
    index: int,
) -> list[_Recorded]:
    work = block.work
    assert saved.states is not None
    sums = saved.states[index].clone()  # a backward pass may be repeated
    first = blocks[0].number
    shift = saved.shifts[first - 1] if saved.shifts and first else None
    records: list[_Recorded] = []
    for slot, each in enumerate(blocks):
        number, start, stop, _ = each
        work.slot = slot
        rows = block.key_rows(start, stop)
        higher = saved.shifts[number] if saved.shifts else None
        _raise_shift(sums, shift, higher)
        shift = higher
        phi_k, _, pull_k = features.keys(rows, shift, start)
        phi_q, pull = features.queries(block.rows(block.q, start, stop), shift, start)
        grad_rows = block.grad_rows(grads, saved.normaliser, start, stop)
        records.append(_Recorded(each, phi_q, phi_k, rows, grad_rows, pull_k))
        work.slot = 0
        products = each.products(grad_rows, rows.values, work).tril_()
        grad_phi = work.get("grad_features", *phi_q.shape)
        torch.bmm(products, each.split(phi_k), out=each.split(grad_phi))
        for part in each.parts():
            grad_phi[:, part].baddbmm_(grad_rows[:, part], sums)
            sums.baddbmm_(rows.values[:, part].transpose(1, 2), phi_k[:, part])
        _write(pull(grad_phi), grads.q, start)
    return records


def _pull_causal_keys(
    work: Workspace, record: _Recorded, later: Tensor, grads: Gradients
) -> None:
    each, phi_q, phi_k, rows, grad_rows, pull = record
    products = each.products(rows.values, grad_rows, work).triu_()
    grad_phi = work.get("grad_features", *phi_k.shape)
    torch.bmm(products, each.split(phi_q), out=each.split(grad_phi))
    products = each.products(phi_k, phi_q, work).triu_()
    grad_values = work.get("grad_values", *grad_rows.shape)
    torch.bmm(products, each.split(grad_rows), out=each.split(grad_values))
    for part in reversed(each.parts()):
        grad_phi[:, part].baddbmm_(rows.values[:, part], later)
        grad_values[:, part].baddbmm_(phi_k[:, part], later.transpose(1, 2))
        later.baddbmm_(grad_rows[:, part].transpose(1, 2), phi_q[:, part])
    _write_key_gradients(grads, rows, pull(grad_phi), grad_values, each.start)


LINEAR = Form(linear_forward, linear_backward)
QUADRATIC = Form(quadratic_forward, quadratic_backward)
CAUSAL = Form(causal_forward, causal_backward)
