"""Compiled products of short blocks of rows.

At the length of a sentence a call of BLAS costs more than the product it is for, and
loops that the compiler has to vectorise by itself reach half of what the processor can.
So the two inner loops, over tiles that fit the registers, are written in vectors of
eight. Blocks are rows of C-contiguous float32 arrays, from some row and column on.

Numba looks only at the age of the file whose loops it cached: whoever changes this file
touches `_packed_attention.py` and `_packed_mixtures.py` too.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from coulomb.kernels.loops import _SUMS, _helper

_ZERO = np.float32(0)
_ROWS, _LANES = 4, 8
COLUMNS = 2 * _LANES  # of a tile of `mix`

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, _LANES)
_FAST = ("contract", "nsz", "reassoc")


def _pointer(builder: Any, start: Any, offset: Any, *, lanes: int = 0) -> Any:
    """Point at the elements of a vector; `start` is where an array begins."""
    if lanes:
        offset = builder.add(offset, ir.Constant(offset.type, lanes))
    return builder.bitcast(builder.gep(start, [offset]), _VECTOR.as_pointer())


def _load(builder: Any, start: Any, offset: Any, *, lanes: int = 0) -> Any:
    return builder.load(_pointer(builder, start, offset, lanes=lanes), align=4)


def _shuffle(builder: Any, x: Any, y: Any, order: list[int]) -> Any:
    picks = ir.Constant(ir.VectorType(_INT, len(order)), order)
    return builder.shuffle_vector(x, y, picks)


def _repeat(builder: Any, x: Any) -> Any:
    none = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(none, x, ir.Constant(_INT, 0))
    return _shuffle(builder, first, none, [0] * _LANES)


def _accumulators(builder: Any, count: int) -> list[Any]:
    zero = ir.Constant(_VECTOR, [0.0] * _LANES)
    places = [cgutils.alloca_once(builder, _VECTOR) for _ in range(count)]
    for place in places:
        builder.store(zero, place)
    return places


def _add_product(builder: Any, total: Any, x: Any, y: Any) -> None:
    product = builder.fmul(x, y, flags=_FAST)
    builder.store(builder.fadd(builder.load(total), product, flags=_FAST), total)


def _starts(context: Any, builder: Any, signature: Any, arguments: Any) -> list[Any]:
    """Where the arrays among the arguments begin."""
    return [
        context.make_array(kind)(context, builder, value).data
        for kind, value in zip(signature.args, arguments, strict=True)
        if isinstance(kind, types.Array)
    ]


@intrinsic
def _mix_tile(
    typing: Any, weights: Any, b: Any, out: Any, rows: Any, outs: Any, step: Any
) -> Any:
    """Give a tile of 4 by 16: rows at offsets `outs` of sums over rows of `b`.

    `rows` holds four offsets into `weights`; `step` the distance from one weight to the
    next, the offset into `b`, the distance from one of its rows to the next, and how
    many there are.
    """
    signature = types.void(weights, b, out, rows, outs, step)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        w_start, b_start, out_start = _starts(context, builder, signature, arguments)
        row, target, (step, first, stride, count) = (
            cgutils.unpack_tuple(builder, given) for given in arguments[3:]
        )
        totals = _accumulators(builder, 2 * _ROWS)
        with cgutils.for_range(builder, count) as loop:
            place = builder.add(first, builder.mul(loop.index, stride))
            left = _load(builder, b_start, place)
            right = _load(builder, b_start, place, lanes=_LANES)
            along = builder.mul(loop.index, step)
            for r in range(_ROWS):
                where = builder.gep(w_start, [builder.add(row[r], along)])
                weight = _repeat(builder, builder.load(where))
                _add_product(builder, totals[2 * r], weight, left)
                _add_product(builder, totals[2 * r + 1], weight, right)
        for r in range(_ROWS):
            for half in range(2):
                value = builder.load(totals[2 * r + half])
                place = _pointer(builder, out_start, target[r], lanes=half * _LANES)
                builder.store(value, place, align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _dot_tile(
    typing: Any, a: Any, b: Any, out: Any, rows: Any, others: Any, outs: Any, count: Any
) -> Any:
    """Multiply four rows of `a` with two of `b`, over `count` columns.

    `rows` and `others` are offsets of the rows; `outs` of the eight results, those with
    the first row of `b` first. `count` is a multiple of eight.
    """
    signature = types.void(a, b, out, rows, others, outs, count)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a_start, b_start, out_start = _starts(context, builder, signature, arguments)
        row, other, target = (
            cgutils.unpack_tuple(builder, given) for given in arguments[3:6]
        )
        totals = _accumulators(builder, 2 * _ROWS)
        size = ir.Constant(row[0].type, _LANES)
        with cgutils.for_range(builder, builder.sdiv(arguments[6], size)) as loop:
            along = builder.mul(loop.index, size)
            pair = [_load(builder, b_start, builder.add(x, along)) for x in other]
            for r in range(_ROWS):
                left = _load(builder, a_start, builder.add(row[r], along))
                for half in range(2):
                    _add_product(builder, totals[half * _ROWS + r], left, pair[half])
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
            builder.store(value, builder.gep(out_start, [target[lane]]))
        return context.get_dummy_value()

    return signature, generate


@_helper(_SUMS)
def products(
    a: Any,
    i0: Any,
    ca: Any,
    n: Any,
    b: Any,
    j0: Any,
    cb: Any,
    m: Any,
    width: Any,
    half: Any,
    out: Any,
) -> None:
    """Multiply rows: out[i, j] = a[i0 + i, ca:] . b[j0 + j, cb:], `width` columns.

    With `half`, only where a tile reaches the diagonal or lies below it.
    """
    most, wide = width // _LANES * _LANES, out.shape[1]
    la, lb = a.shape[1], b.shape[1]
    for i in range(0, n, _ROWS):
        r0, r1, r2, r3 = i, min(i + 1, n - 1), min(i + 2, n - 1), min(i + 3, n - 1)
        base = i0 * la + ca
        rows = (base + r0 * la, base + r1 * la, base + r2 * la, base + r3 * la)
        o0, o1, o2, o3 = r0 * wide, r1 * wide, r2 * wide, r3 * wide
        for j in range(0, min(i + _ROWS, m) if half else m, 2):
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


@_helper(_SUMS)
def mix(
    weights: Any,
    turned: Any,
    n: Any,
    b: Any,
    j0: Any,
    cb: Any,
    m: Any,
    width: Any,
    out: Any,
    i0: Any,
    co: Any,
) -> None:
    """Mix rows: out[i0 + i, co + c] = sum_j weights[i, j] b[j0 + j, cb + c].

    With `turned` it is `weights[j, i]`.
    """
    lw, lb, lo = weights.shape[1], b.shape[1], out.shape[1]
    across, along = (1, lw) if turned else (lw, 1)
    most = width // COLUMNS * COLUMNS
    for i in range(0, n, _ROWS):
        r1, r2, r3 = min(i + 1, n - 1), min(i + 2, n - 1), min(i + 3, n - 1)
        rows = (i * across, r1 * across, r2 * across, r3 * across)
        base = i0 * lo + co
        for c in range(0, most, COLUMNS):
            start = base + c
            outs = (start + i * lo, start + r1 * lo, start + r2 * lo, start + r3 * lo)
            step = (along, j0 * lb + cb + c, lb, m)
            _mix_tile(weights, b, out, rows, outs, step)
    if most < width:
        for i in range(n):
            for c in range(most, width):
                total = _ZERO
                for j in range(m):
                    weight = weights[j, i] if turned else weights[i, j]
                    total += weight * b[j0 + j, cb + c]
                out[i0 + i, co + c] = total
