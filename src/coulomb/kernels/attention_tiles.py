"""Compiled products of blocks that stay in the cache, for attention.

Arrays are flat float32 arrays; a block is an offset and the distances from one row, and
from one summand, to the next. The right-hand side comes in *panels* of 16 columns. The
innermost loop, over a tile that fits the registers, is written in vectors of eight.

Numba looks only at the age of the file whose loops it cached: whoever changes this file
touches `_attention_linear.py` and `_attention_causal.py` too.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from coulomb.kernels.loops import _SUMS, _helper

_ROWS, _LANES = 6, 8
PANEL = 2 * _LANES

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, _LANES)
_FAST = ("contract", "nsz", "reassoc")


def _pointer(builder: Any, start: Any, offset: Any, lanes: int) -> Any:
    if lanes:
        offset = builder.add(offset, ir.Constant(offset.type, lanes))
    return builder.bitcast(builder.gep(start, [offset]), _VECTOR.as_pointer())


def _repeat(builder: Any, x: Any) -> Any:
    none = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(none, x, ir.Constant(_INT, 0))
    picks = ir.Constant(ir.VectorType(_INT, _LANES), [0] * _LANES)
    return builder.shuffle_vector(first, none, picks)


def _fill_tile(
    context: Any, builder: Any, signature: Any, arguments: Any, add: bool
) -> Any:
    a, b, out = (
        context.make_array(kind)(context, builder, value).data
        for kind, value in zip(signature.args[:3], arguments[:3], strict=True)
    )
    row, target, (step, first, stride, count) = (
        cgutils.unpack_tuple(builder, given) for given in arguments[3:]
    )
    zero = ir.Constant(_VECTOR, [0.0] * _LANES)
    places = [
        _pointer(builder, out, target[r], half * _LANES)
        for r in range(_ROWS)
        for half in range(2)
    ]
    totals = [cgutils.alloca_once(builder, _VECTOR) for _ in places]
    for total, place in zip(totals, places, strict=True):
        builder.store(builder.load(place, align=4) if add else zero, total)
    with cgutils.for_range(builder, count) as loop:
        where = builder.add(first, builder.mul(loop.index, stride))
        pair = [
            builder.load(_pointer(builder, b, where, half * _LANES), align=4)
            for half in range(2)
        ]
        along = builder.mul(loop.index, step)
        for r in range(_ROWS):
            element = builder.load(builder.gep(a, [builder.add(row[r], along)]))
            weight = _repeat(builder, element)
            for half in range(2):
                total = totals[2 * r + half]
                product = builder.fmul(weight, pair[half], flags=_FAST)
                both = builder.fadd(builder.load(total), product, flags=_FAST)
                builder.store(both, total)
    for total, place in zip(totals, places, strict=True):
        builder.store(builder.load(total), place, align=4)
    return context.get_dummy_value()


@intrinsic
def _set_tile(
    typing: Any, a: Any, b: Any, out: Any, rows: Any, outs: Any, step: Any
) -> Any:
    """Give a tile of 6 by 16: rows at offsets `outs` of sums over rows of `b`.

    `rows` holds six offsets into `a`; `step` the distance from one summand of `a` to
    the next, the offset into `b`, the distance of its rows, and how many there are.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _fill_tile(context, builder, signature, arguments, add=False)

    return types.void(a, b, out, rows, outs, step), generate


@intrinsic
def _add_tile(
    typing: Any, a: Any, b: Any, out: Any, rows: Any, outs: Any, step: Any
) -> Any:
    """Add to a tile of 6 by 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _fill_tile(context, builder, signature, arguments, add=True)

    return types.void(a, b, out, rows, outs, step), generate


@_helper(_SUMS)
def _multiply(
    a: Any,
    a0: Any,
    ra: Any,
    ka: Any,
    n: Any,
    b: Any,
    b0: Any,
    pb: Any,
    kb: Any,
    panels: Any,
    out: Any,
    o0: Any,
    ro: Any,
    po: Any,
    count: Any,
    add: Any,
) -> None:
    for p in range(panels):
        step = (ka, b0 + p * pb, kb, count)
        start = o0 + p * po
        for i in range(0, n, _ROWS):
            r1, r2, r3 = min(i + 1, n - 1), min(i + 2, n - 1), min(i + 3, n - 1)
            r4, r5 = min(i + 4, n - 1), min(i + 5, n - 1)
            rows = (
                a0 + i * ra,
                a0 + r1 * ra,
                a0 + r2 * ra,
                a0 + r3 * ra,
                a0 + r4 * ra,
                a0 + r5 * ra,
            )
            outs = (
                start + i * ro,
                start + r1 * ro,
                start + r2 * ro,
                start + r3 * ro,
                start + r4 * ro,
                start + r5 * ro,
            )
            if add:
                _add_tile(a, b, out, rows, outs, step)
            else:
                _set_tile(a, b, out, rows, outs, step)


@_helper(_SUMS)
def multiply(
    a: Any, left: Any, b: Any, right: Any, out: Any, target: Any, count: Any, add: Any
) -> None:
    """Multiply: out[i, c] = sum_j a[i, j] b[j, c], or add that.

    `left` is the offset of `a`, the distances of its rows and of its summands and the
    number of rows; `right` the offset of `b`, the distances of its panels and of its
    rows and the number of panels; `target` the offset of `out` and the distances of its
    rows and panels; `count` the number of summands.
    """
    # Else constants would be part of the types, and each call compiled by itself.
    _multiply(
        a,
        np.int64(left[0]),
        np.int64(left[1]),
        np.int64(left[2]),
        np.int64(left[3]),
        b,
        np.int64(right[0]),
        np.int64(right[1]),
        np.int64(right[2]),
        np.int64(right[3]),
        out,
        np.int64(target[0]),
        np.int64(target[1]),
        np.int64(target[2]),
        np.int64(count),
        bool(add),
    )


@_helper(_SUMS)
def turn(
    x: Any, x0: Any, rx: Any, rows: Any, columns: Any, scale: Any, out: Any
) -> None:
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


@_helper(_SUMS)
def panels_of(x: Any, x0: Any, rx: Any, rows: Any, columns: Any, out: Any) -> None:
    """Write panels: out[p, r, j] = x[r, 16 p + j]."""
    for p in range(0, columns, PANEL):
        for r in range(rows):
            place = p * rows + r * PANEL
            for j in range(PANEL):
                out[place + j] = x[x0 + r * rx + p + j]
