"""Compiled attention to near keys exactly, and by features to all others.

What `linearise.heads.near_attention` computes, without gradients, and softmax attention
in short sequences. Keys and their features lie in panels, 16 keys side by side, so that
products with rows of queries are taken from either; queries are taken 16 at a time from
where the panels of their near keys end.
"""

import math

import numpy as np

from coulomb.kernels.gemm import PANEL, aligned, longest, multiply, transpose_panels
from coulomb.kernels.linear_attention import (
    after,
    copy_rows,
    group_rows,
    load_side,
    make_side,
    mask_rows,
    project,
    query_row,
    row_of,
    row_stride,
    rows_at,
    rows_of,
    times_panels,
)
from coulomb.kernels.math import exp, exp_row, row_max, row_min, row_size
from coulomb.kernels.runtime import SUMS, entry, helper

_f = np.float32
_ZERO, _ONE, _LOW, _HUGE = _f(0), _f(1), _f(-1e30), _f(1e30)
_TINY, _FEW = np.finfo(_f).tiny, _f(64) * np.finfo(_f).eps

# Rows of queries whose features are evaluated together.
_BLOCK = 6 * PANEL
# Exponents of keys smaller than this have sums far from the ends of float32.
_SAFE_RANGE = _f(64)


@helper(SUMS)
def _panels_of(n):
    return (n + PANEL - 1) // PANEL * PANEL


@helper(SUMS)
def _load_panels(x, length, dim, panels):
    """Write rows as panels, and zeros after the last."""
    whole = length // PANEL * PANEL
    panels[whole * dim :] = _ZERO
    transpose_panels(x[0], x[1], x[2], length, dim, _ONE, panels)


@helper(SUMS)
def _key_weights(panels, tilt, absent, weights):
    """Write `exp(tilt . k - top)`, zero for keys that are absent; give the top."""
    dim, count = tilt.shape[0], weights.shape[0] // PANEL
    weights[:] = absent
    right = (0, dim * PANEL, PANEL, count)
    multiply(tilt, (0, dim, 1, 1), panels, right, weights, (0, 0, PANEL), dim, True)
    top = row_max(weights)
    for j in range(weights.shape[0]):
        weights[j] = exp(weights[j] - top) if absent[j] == _ZERO else _ZERO
    return top


@helper(SUMS)
def _larger(a, b):
    return a if a > b else b


# LLVM vectorises loops over all numbers of some panels, but not loops over the 16
# numbers of a key inside of loops over particles, unless eight particles are taken at
# once.


@helper(SUMS)
def _exp_all(x):
    for c in range(x.shape[0]):
        x[c] = exp(x[c])


@helper(SUMS)
def _panel_sums(x, start, n, sums):
    """Write the sums of the columns of a panel."""
    for j in range(PANEL):
        sums[j] = _ZERO
    for m in range(start, start + n * PANEL, 8 * PANEL):
        for j in range(PANEL):
            i, k = m + j, m + j + 4 * PANEL
            a = (x[i] + x[i + PANEL]) + (x[i + 2 * PANEL] + x[i + 3 * PANEL])
            b = (x[k] + x[k + PANEL]) + (x[k + 2 * PANEL] + x[k + 3 * PANEL])
            sums[j] += a + b


@helper(SUMS)
def _add_dots(x, start, n, weights, first, z):
    """Add the products of a panel with weights of its columns."""
    for m in range(n):
        total, place = _ZERO, start + m * PANEL
        for j in range(PANEL):
            total += x[place + j] * weights[first + j]
        z[m] += total


@helper(SUMS)
def _weigh_values(v, rows, dim_v, weights, first, values):
    for r in range(rows):
        weight, source, place = weights[first + r], v[1] + r * v[2], r * dim_v
        for c in range(dim_v):
            values[place + c] = weight * v[0][source + c]


@helper(SUMS)
def _load_keys(v, length, side, tilt, sizes, own, work):
    """Write the features of keys, sum them and their products with the values.

    Features are not divided by their sums over the particles, but the weights of the
    keys are. Gives the logarithm of what all weights have been divided by, and whether
    the features are far from the ends of float32.
    """
    positions, offsets = side
    dim, dim_v, n = sizes
    panels, features, absent, weights, z, sums = own
    sums_of_keys, values = work
    top = _key_weights(panels, tilt, absent, weights)
    z[:], sums[:], size, finite = _ZERO, _ZERO, n * PANEL, True
    for p in range(0, weights.shape[0], 2 * PANEL):
        count = min(2, (weights.shape[0] - p) // PANEL)
        some = features[p * n :][: count * size]
        for begin in range(0, count * size, size):
            some[begin : begin + size] = offsets
        right, goal = (p * dim, dim * PANEL, PANEL, count), (0, PANEL, size)
        multiply(positions, (0, dim, 1, n), panels, right, some, goal, dim, True)
        finite &= row_size(some) < _SAFE_RANGE
        _exp_all(some)
        for first in range(p, p + count * PANEL, PANEL):
            start, rows = (first - p) * n, min(PANEL, length - first)
            _panel_sums(some, start, n, sums_of_keys)
            for j in range(PANEL):
                weights[first + j] /= sums_of_keys[j]
            _add_dots(some, start, n, weights, first, z)
            _weigh_values(after(v, first), rows, dim_v, weights, first, values)
            left, right = (start, PANEL, 1, n), (0, PANEL, dim_v, dim_v // PANEL)
            multiply(some, left, values, right, sums, (0, PANEL, size), rows, True)
    return top, finite


@helper(SUMS)
def _write_band(shift, window, absent, band):
    """Write zero where the key in a column is there, and near the query in a row."""
    width = absent.shape[0]
    for r in range(PANEL):
        row = band[r * width :][:width]
        for c in range(width):
            row[c] = absent[c] if abs(r + shift - c) <= window else _LOW


@helper(SUMS)
def _score_row(scores, scale, mask):
    for c in range(scores.shape[0]):
        scores[c] = scale * scores[c] + mask[c]


@helper(SUMS)
def _near_part(products, weights, mask):
    """Weigh the products with near keys, and sum them."""
    total = _ZERO
    for c in range(products.shape[0]):
        products[c] = weights[c] * products[c] if mask[c] == _ZERO else _ZERO
        total += products[c]
    return total


@helper(SUMS)
def _weigh_row(scores, products, top, factor):
    """Turn scores and products into weights of the values; give their sum."""
    total = _ZERO
    for c in range(scores.shape[0]):
        scores[c] = exp(scores[c] - top) - factor * products[c]
        total += scores[c]
    return total


@helper(SUMS)
def _scale_row(row, factor):
    for c in range(row.shape[0]):
        row[c] *= factor


@helper(SUMS)
def _mix_values(scores, width, keys, v, start, block, rows, columns, add):
    """Add the values of some keys, or write them, with the weights of rows."""
    left, goal = (0, width, 1, rows), (block[1], block[2], PANEL)
    right = (v[1] + start * v[2], PANEL, v[2], columns // PANEL)
    multiply(scores, left, v[0], right, block[0], goal, keys, add)


@helper(SUMS)
def _attend_exactly(q, v, out, length, sizes, panels, absent, work):
    """Attend by softmax to the keys of some panels; give whether nothing overflowed."""
    dim, dim_v, _ = sizes
    scores, totals = work
    width, finite = absent.shape[0], True
    scale, right = _ONE / _f(math.sqrt(dim)), (0, dim * PANEL, PANEL, width // PANEL)
    for first in range(0, length, PANEL):
        rows, x, block = min(PANEL, length - first), after(q, first), after(out, first)
        left = (x[1], x[2], 1, rows)
        goal = (0, width, PANEL)
        multiply(x[0], left, panels, right, scores, goal, dim, False)
        for r in range(rows):
            row = scores[r * width :][:width]
            _score_row(row, scale, absent)
            totals[r] = exp_row(row, _ONE)
            finite &= totals[r] < _HUGE
        keys = min(width, length)
        _mix_values(scores, width, keys, v, 0, block, rows, dim_v, False)
        for r in range(rows):
            _scale_row(row_of(block, r, dim_v), _ONE / totals[r])
    return finite


@helper(SUMS)
def _near_panels(first, rows, length, window):
    """Give where the panels begin that near keys of some queries lie in; how many."""
    start = max(0, first - window) // PANEL
    last = min(length - 1, first + rows - 1 + window) // PANEL
    return start * PANEL, last - start + 1


@helper(SUMS)
def _attend_block(e, x, v, block, about, sizes, own, work):
    """Attend from at most 16 queries, whose features are in rows."""
    dim, dim_v, n = sizes
    panels, features, _, weights, _, sums = own
    scores, products, band, totals, tops = work
    rows, start, count, keys, top = about
    width, goal = count * PANEL, (0, count * PANEL, PANEL)
    right = (start * dim, dim * PANEL, PANEL, count)
    multiply(x[0], (x[1], x[2], 1, rows), panels, right, scores, goal, dim, False)
    right = (start * n, n * PANEL, PANEL, count)
    multiply(e[0], (e[1], e[2], 1, rows), features, right, products, goal, n, False)
    times_panels(e, rows, sums, n, dim_v, block)
    scale, own_weights = _ONE / _f(math.sqrt(dim)), weights[start:][:width]
    for r in range(rows):
        row, share = scores[r * width :][:width], products[r * width :][:width]
        mask, total = band[r * width :][:width], totals[r]
        _score_row(row, scale, mask)
        factor, highest = _ZERO, row_max(row)
        # Below rounding nothing is left for keys outside of the band.
        if not total - _near_part(share, own_weights, mask) <= _FEW * total:
            lift = tops[r] + top
            highest = _larger(lift, highest)
            factor = exp(lift - highest)
        total = factor * total + _weigh_row(row, share, highest, factor)
        _scale_row(row_of(block, r, dim_v), factor)
        totals[r] = _ONE / _larger(total, _TINY)
    _mix_values(scores, width, keys, v, start, block, rows, dim_v, True)
    for r in range(rows):
        _scale_row(row_of(block, r, dim_v), totals[r])


@helper(SUMS)
def _attend_near(q, v, out, length, side, top, sizes, window, own, work):
    """Attend to near keys exactly, and by features to all others.

    Gives whether the features of the queries are finite.
    """
    e, scores, products, band, all_totals, all_tops = work
    dim, n, absent = sizes[0], sizes[2], own[2]
    shift, width, finite, t = -1, -1, True, 0
    while t < length:
        # The first part of all is shorter, so that the keys near those that follow
        # begin where a panel does.
        short = window % PANEL if t == 0 else 0
        end, x = min(length, t + (short if short else _BLOCK)), after(q, t)
        all_totals[:], all_tops[:] = _ZERO, _LOW
        if n:
            project(x, end - t, side, dim, n, e)
            for r in range(end - t):
                row = row_of(e, r, n)
                good, all_totals[r], all_tops[r] = query_row(row, own[4])
                finite &= good
        for first in range(t, end, PANEL):
            i, rows = first - t, min(PANEL, end - first)
            start, count = _near_panels(first, rows, length, window)
            gone = absent[start:][: count * PANEL]
            there = row_min(gone) == _ZERO
            if shift != first - start or width != count * PANEL or not there:
                width = count * PANEL
                _write_band(first - start, window, gone, band)
                shift = first - start if there else -1
            about = rows, start, count, min(width, length - start), top
            given = scores, products, band, all_totals[i:], all_tops[i:]
            block = after(out, first)
            ends = after(e, i), after(x, i)
            _attend_block(*ends, v, block, about, sizes, own, given)
        t = end
    return finite


@entry(SUMS)
def attend_near(inputs, shape, out, first, end):
    """Attend in the groups from `first` to `end`; give whether nothing overflowed.

    `inputs` holds q, k, v, each with its places; particles and offsets of queries, and
    of keys, and what exponents of keys are tilted by, all empty if there are none; and
    the mask of the keys, which may be empty. `shape` is where sequences begin and end
    among those of a head; dim, dim_v and features; how far near keys are, and how long
    a sequence is at most whose keys are all near.
    """
    q, k, v, particles, tilts, mask = inputs
    bounds, sizes, window, exact_length = shape
    dim, dim_v, n = sizes
    batch, most, masked = bounds.shape[0] - 1, longest(bounds), mask.shape[0] > 0
    room = _panels_of(most)
    widest = max(2 * window + 2 * PANEL, _panels_of(exact_length))
    widest = PANEL * min(room, widest)
    all_alive, real = np.empty(most, np.bool_), np.empty(most, _f)
    all_panels, features = aligned(room * dim), aligned(room * n)
    all_absent, weights = aligned(room), aligned(room)
    copies = (
        aligned(most * dim if masked else 0),
        aligned(most * dim_v if masked else 0),
    )
    z, sums, offsets = aligned(n), aligned(n * dim_v), aligned(n * PANEL)
    values = aligned(PANEL * dim_v)
    scores, totals, tops = aligned(widest), aligned(_BLOCK), aligned(_BLOCK)
    e = rows_at(aligned(_BLOCK * row_stride(n)), 0, row_stride(n))
    work = e, scores, aligned(widest), aligned(widest), totals, tops
    (queries, keys), side = particles, make_side(particles[0], n * dim, n)
    finite = True
    for group in range(first, end):
        head, place, rows = group // batch, (group, batch), group_rows(bounds, group)
        length, extent = rows[1] - rows[0], 0
        alive = all_alive[:length]
        mask_rows(mask, bounds[group % batch], alive)
        all_absent[:] = _LOW
        for j in range(length):
            extent = j + 1 if alive[j] else extent
            all_absent[j], real[j] = (_ZERO, _ONE) if alive[j] else (_LOW, _ZERO)
        x, y, target = rows_of(k, place), rows_of(v, place), rows_of(out, place)
        if masked:
            copied = rows_at(copies[0], 0, dim), rows_at(copies[1], 0, dim_v)
            copy_rows(x, real[:length], False, dim, copied[0])
            copy_rows(y, real[:length], False, dim_v, copied[1])
            x, y = copied
        exact = extent <= max(exact_length, window + 1)
        there = _panels_of(max(1, extent) if exact else length)
        absent, panels = all_absent[:there], all_panels[: there * dim]
        _load_panels(x, min(there, length), dim, panels)
        own = panels, features, absent, weights[:there], z, sums
        asked = rows_of(q, place)
        if exact:
            given = scores, totals
            finite &= _attend_exactly(
                asked, y, target, length, sizes, panels, absent, given
            )
            continue
        top = _ZERO
        if n:
            finite &= load_side(queries, head, sizes, _ONE, side)
            tilt = tilts[head * dim : (head + 1) * dim]
            for m in range(n):
                offsets[m * PANEL : (m + 1) * PANEL] = keys[1][head * n + m]
            given = keys[0][head * n * dim :][: n * dim], offsets
            parts = totals[:PANEL], values
            top, good = _load_keys(y, length, given, tilt, sizes, own, parts)
            finite &= good
        finite &= _attend_near(
            asked, y, target, length, side, top, sizes, window, own, work
        )
    return finite
