"""Products of small float32 blocks that stay in the cache.

At the length of a sentence a call of BLAS costs more than the product it is for, and
loops that the compiler has to vectorise by itself reach half of what the processor can.
So the inner loops, over tiles that fit the registers, are written in vectors: of 16
numbers where the processor has AVX-512, else of eight (two registers on ARM). A sum has
the same order, and the same bits, at either width.

Arrays are contiguous; a block of one is an offset of its first number and the distances
from one row, and from one summand, to the next. Blocks that rows are summed over come
in *panels* of 16 columns.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from coulomb.kernels.runtime import SUMS, helper

_ZERO = np.float32(0)
_LANES = 8
PANEL = 16
_FEW_ROWS = 4  # of a tile of `mix` and `products`, for the length of a sentence
# Rows of a tile of `multiply`: their sums, two vectors each, and what is added stay in
# the registers, of which AVX-512 has twice as many.
_NARROW_ROWS, _WIDE_ROWS = 6, 8

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, _LANES)
_FAST = ("contract", "nsz", "reassoc")


def vector_width() -> int:
    """Give the numbers in a vector of `multiply`: 16 with AVX-512, else 8."""
    # Numba compiles for this processor unless it is told otherwise.
    asked = numba.config.CPU_FEATURES
    has = binding.get_host_cpu_features().get("avx512f", False)
    wide = has if asked is None else "+avx512f" in asked
    return 16 if wide else 8


_WIDE = vector_width() == 16


def _pointer(builder: Any, start: Any, offset: Any, vector: Any = _VECTOR) -> Any:
    """Point at the elements of a vector; `start` is where an array begins."""
    return builder.bitcast(builder.gep(start, [offset]), vector.as_pointer())


def _load(builder: Any, start: Any, offset: Any, vector: Any = _VECTOR) -> Any:
    return builder.load(_pointer(builder, start, offset, vector), align=4)


def _shuffle(builder: Any, x: Any, y: Any, order: list[int]) -> Any:
    picks = ir.Constant(ir.VectorType(_INT, len(order)), order)
    return builder.shuffle_vector(x, y, picks)


def _repeat(builder: Any, x: Any, vector: Any = _VECTOR) -> Any:
    none = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(none, x, ir.Constant(_INT, 0))
    return _shuffle(builder, first, none, [0] * vector.count)


def _accumulators(builder: Any, values: list[Any]) -> list[Any]:
    totals = [cgutils.alloca_once(builder, value.type) for value in values]
    for total, value in zip(totals, values, strict=True):
        builder.store(value, total)
    return totals


def _add_product(builder: Any, total: Any, x: Any, y: Any) -> None:
    product = builder.fmul(x, y, flags=_FAST)
    builder.store(builder.fadd(builder.load(total), product, flags=_FAST), total)


def _unpack(context: Any, builder: Any, signature: Any, arguments: Any) -> list[Any]:
    """Give where arrays begin, the elements of tuples, and numbers."""
    unpacked = []
    for kind, value in zip(signature.args, arguments, strict=True):
        if isinstance(kind, types.Array):
            unpacked.append(context.make_array(kind)(context, builder, value).data)
        elif isinstance(kind, types.BaseTuple):
            unpacked.append(cgutils.unpack_tuple(builder, value))
        else:
            unpacked.append(value)
    return unpacked


_ZEROS = ir.Constant(_VECTOR, [0.0] * _LANES)


def _clamped_rows(builder: Any, rows: list[Any], count: int) -> list[Any]:
    """Offsets of `count` rows; those beyond the last are the last again."""
    start, stride, first, n = rows
    last = builder.sub(n, ir.Constant(n.type, 1))
    offsets = []
    for r in range(count):
        row = builder.add(first, ir.Constant(first.type, r))
        row = builder.select(builder.icmp_signed("<", row, last), row, last)
        offsets.append(builder.add(start, builder.mul(row, stride)))
    return offsets


def _tile_intrinsic(n_rows: int, lanes: int) -> Any:
    """Make the function that sets a tile of rows by two vectors, or adds to it.

    `left` is where the rows of `a` begin, their distance, the first of the tile and how
    many there are, and `target` the same of `out`. `pair` holds where the two vectors
    of a row of `b` begin, and those of `out` after the beginning of its row; `along`
    the distances of summands in `a` and in `b`, and how many there are; `add` is
    whether to begin with what is there.
    """
    vector = ir.VectorType(_FLOAT, lanes)
    zeros = ir.Constant(vector, [0.0] * lanes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, out, left, target, pair, (step, stride, count), add = _unpack(
            context, builder, signature, arguments
        )
        rows = _clamped_rows(builder, left, n_rows)
        places = [
            _pointer(builder, out, builder.add(row, column), vector)
            for row in _clamped_rows(builder, target, n_rows)
            for column in pair[2:]
        ]
        totals = _accumulators(builder, [zeros] * len(places))
        with builder.if_then(add):
            for total, place in zip(totals, places, strict=True):
                builder.store(builder.load(place, align=4), total)
        with cgutils.for_range(builder, count) as loop:
            below = builder.mul(loop.index, stride)
            both = [
                _load(builder, b, builder.add(first, below), vector)
                for first in pair[:2]
            ]
            along = builder.mul(loop.index, step)
            for r, row in enumerate(rows):
                element = builder.load(builder.gep(a, [builder.add(row, along)]))
                weight = _repeat(builder, element, vector)
                for half in range(2):
                    _add_product(builder, totals[2 * r + half], weight, both[half])
        for total, place in zip(totals, places, strict=True):
            builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    def tile(typing, a, b, out, left, target, pair, along, add):
        return types.void(a, b, out, left, target, pair, along, add), generate

    return intrinsic(tile)


_tile = _tile_intrinsic(_NARROW_ROWS, _LANES)
_wide_tile = _tile_intrinsic(_WIDE_ROWS, PANEL)
_mix_tile = _tile_intrinsic(_FEW_ROWS, _LANES)


@intrinsic
def _dot_tile(typing, a, b, out, rows, others, outs, count):
    """Multiply four rows of `a` with two of `b`, over `count` columns.

    `rows` and `others` are offsets of the rows; `outs` of the eight results, those with
    the first row of `b` first. `count` is a multiple of eight.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, out, row, other, target, count = _unpack(
            context, builder, signature, arguments
        )
        totals = _accumulators(builder, [_ZEROS] * 2 * _FEW_ROWS)
        size = ir.Constant(row[0].type, _LANES)
        with cgutils.for_range(builder, builder.sdiv(count, size)) as loop:
            along = builder.mul(loop.index, size)
            pair = [_load(builder, b, builder.add(x, along)) for x in other]
            for r in range(_FEW_ROWS):
                left = _load(builder, a, builder.add(row[r], along))
                for half in range(2):
                    total = totals[half * _FEW_ROWS + r]
                    _add_product(builder, total, left, pair[half])
        # Eight sums over lanes, by three rounds of adding even lanes to odd ones.
        vectors = [builder.load(total) for total in totals]
        even, odd = list(range(0, 2 * _LANES, 2)), list(range(1, 2 * _LANES, 2))
        while len(vectors) > 1:
            vectors = [
                builder.fadd(
                    _shuffle(builder, x, y, even), _shuffle(builder, x, y, odd)
                )
                for x, y in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        for lane in range(_LANES):
            value = builder.extract_element(vectors[0], ir.Constant(_INT, lane))
            builder.store(value, builder.gep(out, [target[lane]]))
        return context.get_dummy_value()

    return types.void(a, b, out, rows, others, outs, count), generate


@helper(SUMS)
def aligned(size):
    """Make an array that begins at a cache line: no vector of it lies across two."""
    x = np.empty(size + PANEL, np.float32)
    skip = -(x.ctypes.data // 4) % PANEL
    return x[skip : skip + size]


@helper(SUMS)
def longest(bounds):
    """Give the length of the longest sequence."""
    most = 0
    for b in range(bounds.shape[0] - 1):
        most = max(most, bounds[b + 1] - bounds[b])
    return most


@helper(SUMS)
def _four_rows(i, n, start, stride):
    """Offsets of four rows from i on; those beyond the last are the last again."""
    r1, r2, r3 = min(i + 1, n - 1), min(i + 2, n - 1), min(i + 3, n - 1)
    left = start + i * stride, start + r1 * stride
    return (*left, start + r2 * stride, start + r3 * stride)


@helper(SUMS)
def _multiply(a, left, b, right, out, target, count, add):
    a0, ra, ka, n = left
    b0, pb, kb, panels = right
    o0, ro, po, _ = target
    along = (ka, kb, count)
    # A wide tile takes two panels; a last one alone is two narrow vectors.
    pairs = panels // 2 if _WIDE else 0
    for p in range(pairs):
        first, column = b0 + 2 * p * pb, 2 * p * po
        pair = (first, first + pb, column, column + po)
        for i in range(0, n, _WIDE_ROWS):
            _wide_tile(a, b, out, (a0, ra, i, n), (o0, ro, i, n), pair, along, add)
    for p in range(2 * pairs, panels):
        first, column = b0 + p * pb, p * po
        pair = (first, first + _LANES, column, column + _LANES)
        for i in range(0, n, _NARROW_ROWS):
            _tile(a, b, out, (a0, ra, i, n), (o0, ro, i, n), pair, along, add)


@helper(SUMS)
def _integers(a, b, c, d):
    # Else constants would be part of the types, and each call compiled by itself.
    return np.int64(a), np.int64(b), np.int64(c), np.int64(d)


@helper(SUMS)
def multiply(a, left, b, right, out, target, count, add):
    """Multiply: out[i, c] = sum_j a[i, j] b[j, c], or add that.

    `left` is the offset of `a`, the distances of its rows and of its summands and the
    number of rows; `right` the offset of `b`, the distances of its panels and of its
    rows and the number of panels; `target` the offset of `out` and the distances of its
    rows and panels; `count` the number of summands.
    """
    left = _integers(left[0], left[1], left[2], left[3])
    right = _integers(right[0], right[1], right[2], right[3])
    target = _integers(target[0], target[1], target[2], 0)
    _multiply(a, left, b, right, out, target, np.int64(count), bool(add))


@helper(SUMS)
def mix(weights, transposed, n, b, j0, cb, m, width, out, i0, co):
    """Mix rows: out[i0 + i, co + c] = sum_j weights[i, j] b[j0 + j, cb + c].

    Arrays are matrices, and `width` any number. With `transposed` it is
    `weights[j, i]`.
    """
    lw, lb, lo = weights.shape[1], b.shape[1], out.shape[1]
    across, along = (1, lw) if transposed else (lw, 1)
    most = width // PANEL * PANEL
    summands = (np.int64(along), np.int64(lb), np.int64(m))
    for i in range(0, n, _FEW_ROWS):
        left = (np.int64(0), np.int64(across), np.int64(i), np.int64(n))
        target = (np.int64(i0 * lo), np.int64(lo), np.int64(i), np.int64(n))
        for c in range(0, most, PANEL):
            first, column = j0 * lb + cb + c, co + c
            pair = (first, first + _LANES, column, column + _LANES)
            _mix_tile(weights, b, out, left, target, pair, summands, False)
    if most < width:
        for i in range(n):
            for c in range(most, width):
                total = _ZERO
                for j in range(m):
                    weight = weights[j, i] if transposed else weights[i, j]
                    total += weight * b[j0 + j, cb + c]
                out[i0 + i, co + c] = total


@helper(SUMS)
def products(a, i0, ca, n, b, j0, cb, m, width, half, out):
    """Multiply rows: out[i, j] = a[i0 + i, ca:] . b[j0 + j, cb:], `width` columns.

    With `half`, only where a tile reaches the diagonal or lies below it.
    """
    most, wide = width // _LANES * _LANES, out.shape[1]
    la, lb = a.shape[1], b.shape[1]
    for i in range(0, n, _FEW_ROWS):
        rows = _four_rows(i, n, i0 * la + ca, la)
        o0, o1, o2, o3 = _four_rows(i, n, 0, wide)
        for j in range(0, min(i + _FEW_ROWS, m) if half else m, 2):
            k = min(j + 1, m - 1)
            others = ((j0 + j) * lb + cb, (j0 + k) * lb + cb)
            outs = (o0 + j, o1 + j, o2 + j, o3 + j, o0 + k, o1 + k, o2 + k, o3 + k)
            _dot_tile(a, b, out, rows, others, outs, most)
    if most < width:
        for i in range(n):
            left = a[i0 + i, ca : ca + width]
            for j in range(m):
                right = b[j0 + j, cb : cb + width]
                for c in range(most, width):
                    out[i, j] += left[c] * right[c]


@helper(SUMS)
def transpose_panels(x, x0, rx, rows, columns, scale, out):
    """Write the transpose as panels: out[p, c, j] = scale x[16 p + j, c].

    The last panel may have fewer than 16 columns; others of it are not written.
    """
    for p in range(0, rows - PANEL + 1, PANEL):
        for c in range(columns):
            place = p * columns + c * PANEL
            for j in range(PANEL):
                out[place + j] = scale * x[x0 + (p + j) * rx + c]
    p = rows // PANEL * PANEL
    for j in range(rows - p):
        for c in range(columns):
            out[p * columns + c * PANEL + j] = scale * x[x0 + (p + j) * rx + c]


@helper(SUMS)
def copy_panels(x, x0, rx, rows, columns, out):
    """Write panels: out[p, r, j] = x[r, 16 p + j]."""
    for p in range(0, columns, PANEL):
        for r in range(rows):
            place = p * rows + r * PANEL
            for j in range(PANEL):
                out[place + j] = x[x0 + r * rx + p + j]


@helper(SUMS)
def flip_panels(x, n, columns, out):
    """Turn panels (panel, row, 16) into panels of the transpose."""
    for p in range(0, n, PANEL):
        for c in range(columns):
            source = (c // PANEL) * n * PANEL + p * PANEL + c % PANEL
            place = p * columns + c * PANEL
            for j in range(PANEL):
                out[place + j] = x[source + j * PANEL]
