"""Compiled attention with exponential features: linear, causal, square and decoding.

With `e = exp(w.x + o)` of queries and keys and a weight `c_j` of each key,
`a_i = e(q_i)' S / e(q_i)' z`, `S = sum_j e(k_j) c_j v_j'`, `z = sum_j e(k_j) c_j`. The
weight is `exp(-|k|^2 / 2)` up to a factor, or one over the sum of the features, times a
weight that was given; or zero where a mask removes the key.

The exponents of a query are shifted by their largest, which cancels; those of keys are
not. The passes forwards look at the largest exponents of keys; whoever calls throws the
result away if they leave the range in which nothing is lost, or if anything is not
finite.

*Causal*: as in `attention.ops.blocked`; a *span* is a few blocks, before which the sums
are stored. *Square*: the quadratic form of short sequences, in which one block is all
there is and the whole square of products takes the place of the triangle.

Inputs are flat arrays with the beginnings of their sequences and the distances of heads
and of rows. A *group* is a head of a sequence; the sequences of a head follow one
another. *Rows* are a flat array, where its first row begins, and the distance of rows.
The sums S are kept in panels of 16 columns, `(panel, feature, 16)`; a *state* is z and
S. A *side* is what queries or keys meet: the particles of a head in panels, and their
offsets, which may be empty.
"""

import math
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from coulomb.kernels.gemm import (
    PANEL,
    aligned,
    copy_panels,
    flip_panels,
    longest,
    multiply,
    transpose_panels,
)
from coulomb.kernels.gemm import products as row_products
from coulomb.kernels.math import exp, exp_row, row_max, row_size
from coulomb.kernels.runtime import SUMS, entry, helper

_f = np.float32
_ZERO, _ONE, _HALF, _HUGE = _f(0), _f(1), _f(0.5), _f(1e30)

# Orders of the products, chosen once outside the loops.
LINEAR, CAUSAL, SQUARE = range(3)

# Rows of a block: its features and one copy of them stay in the second cache.
BLOCK = 96
SPAN = 6 * BLOCK
_WIDE = BLOCK + PANEL  # the distance of the rows of a triangle of products
_STEP = 24  # rows whose part of a triangle is taken as a rectangle


@helper(SUMS)
def rows_at(x, offset, stride):
    """Rows of a flat array."""
    # Else constants would be part of the types, and each call compiled by itself.
    return x, np.int64(offset), np.int64(stride)


@helper(SUMS)
def rows_of(x, place):
    """Rows of an array with its distances; `place` is a group and the batch."""
    array, starts, (head, stride) = x
    group, batch = place
    offset = starts[group % batch] + (group // batch) * head
    return rows_at(array, offset, stride)


@helper(SUMS)
def after(x, count):
    """Rows after the first `count`."""
    return x[0], x[1] + count * x[2], x[2]


@helper(SUMS)
def row_of(x, r, columns):
    """One of some rows."""
    return x[0][x[1] + r * x[2] :][:columns]


@helper(SUMS)
def _part(x, rows, size):
    """Take what belongs to some rows, first and end, or nothing of nothing."""
    return x[rows[0] * size : rows[1] * size] if x.shape[0] else x


@helper(SUMS)
def group_rows(bounds, group):
    """Rows of a group where the sequences of each head follow one another."""
    batch = bounds.shape[0] - 1
    head, sequence = group // batch, group % batch
    before = head * bounds[batch]
    return before + bounds[sequence], before + bounds[sequence + 1]


@helper(SUMS)
def row_stride(features):
    """Give the distance of rows of features; a power of two would share cache lines."""
    return features + PANEL


@helper(SUMS)
def feature_rows(kept, scratch, r0, n):
    """Where the features of a block are: among those kept, if any are."""
    stride = row_stride(n)
    if kept.shape[0]:
        return rows_at(kept, r0 * stride, stride)
    return rows_at(scratch, 0, stride)


@helper(SUMS)
def clear(x, rows, columns):
    """Make rows zero."""
    for r in range(rows):
        row_of(x, r, columns)[:] = _ZERO


@helper(SUMS)
def times_panels(x, rows, panels, count, columns, out):
    """Multiply rows, `count` numbers each, with a matrix in panels."""
    left, right = (x[1], x[2], 1, rows), (0, count * PANEL, PANEL, columns // PANEL)
    multiply(x[0], left, panels, right, out[0], (out[1], out[2], PANEL), count, False)


@helper(SUMS)
def add_outer(e, n, rows, x, columns, sums):
    """Add sum_r e_r x_r' to sums in panels."""
    left, right = (e[1], 1, e[2], n), (x[1], PANEL, x[2], columns // PANEL)
    multiply(e[0], left, x[0], right, sums, (0, PANEL, n * PANEL), rows, True)


@helper(SUMS)
def make_side(given, size, n):
    """Make room for what queries or keys meet."""
    return aligned(size), aligned(n if given[1].shape[0] else 0)


@helper(SUMS)
def _make_sides(particles, size, n):
    """Make room for what queries and keys meet; the same if they meet the same."""
    queries = keys = make_side(particles[0], size, n)
    if particles[1][0].shape[0]:
        keys = make_side(particles[1], size, n)
    return queries, keys


@helper(SUMS)
def load_side(given, head, sizes, scale, side):
    """Write the particles of a head as panels; give whether they are finite."""
    panels, shifts = side
    dim, _, n = sizes
    transpose_panels(given[0], head * n * dim, dim, n, dim, scale, panels)
    for c in range(shifts.shape[0]):
        shifts[c] = scale * given[1][head * n + c]
    return all_finite(panels) and all_finite(shifts)


@helper(SUMS)
def _load_sides(particles, head, sizes, scale, sides):
    """Write the particles of a head as panels; give if all are finite."""
    finite = load_side(particles[0], head, sizes, scale, sides[0])
    if particles[1][0].shape[0]:
        finite &= load_side(particles[1], head, sizes, scale, sides[1])
    return finite


@helper(SUMS)
def project(x, rows, side, dim, n, e):
    """Write the exponents of rows."""
    panels, offsets = side
    begun = offsets.shape[0] > 0
    if begun:
        for r in range(rows):
            row_of(e, r, n)[:] = offsets
    left, right = (x[1], x[2], 1, rows), (0, dim * PANEL, PANEL, n // PANEL)
    multiply(x[0], left, panels, right, e[0], (e[1], e[2], PANEL), dim, begun)


@helper(SUMS)
def query_row(row, z):
    """Take exponentials over the largest; give if all is finite, row . z, and that."""
    top, total = row_max(row), _ZERO
    finite = abs(row[0]) < _HUGE and top < _HUGE
    for c in range(row.shape[0]):
        row[c] = exp(row[c] - top)
        total += row[c] * z[c]
    return finite, total, top


@helper(SUMS)
def query_features(e, n, z, totals):
    """Turn exponents of queries into features, write e . z; give if all is finite."""
    finite = True
    for r in range(totals.shape[0]):
        good, totals[r], _ = query_row(row_of(e, r, n), z)
        finite &= good
    return finite


@helper(SUMS)
def _weighted_key_row(row, weight, z):
    """Take exponentials and add them to z."""
    for c in range(row.shape[0]):
        row[c] = exp(row[c])
        z[c] += weight * row[c]


@helper(SUMS)
def _summed_key_row(row):
    """Take exponentials; give their sum."""
    total = _ZERO
    for c in range(row.shape[0]):
        row[c] = exp(row[c])
        total += row[c]
    return total


@helper(SUMS)
def _add_row(row, weight, z):
    for c in range(row.shape[0]):
        z[c] += weight * row[c]


@helper(SUMS)
def add_features(e, n, weights, z):
    """Add the features of rows, times their weights, to z."""
    for r in range(weights.shape[0]):
        _add_row(row_of(e, r, n), weights[r], z)


@helper(SUMS)
def key_features(favor, e, n, weights, alive, z):
    """Turn exponents of keys into features, add to z; give the largest exponent."""
    peak = _ZERO
    for r in range(weights.shape[0]):
        row = row_of(e, r, n)
        if not alive[r]:
            row[:] = _ZERO
            weights[r] = _ZERO
            continue
        size = row_size(row)
        # What is not finite is larger than what any number is compared with.
        peak = max(peak, size if size < _HUGE else _HUGE)
        if favor:
            _weighted_key_row(row, weights[r], z)
        else:
            weights[r] /= _summed_key_row(row)
            _add_row(row, weights[r], z)
    return peak


@helper(SUMS)
def repeat_key_features(e, n, weights):
    """Turn exponents of keys into features once more."""
    for r in range(weights.shape[0]):
        row = row_of(e, r, n)
        for c in range(n):
            row[c] = exp(row[c]) if weights[r] > _ZERO else _ZERO


@helper(SUMS)
def all_finite(x):
    """Say whether there is no nan and no infinity."""
    total = _ZERO
    for c in range(x.shape[0]):
        total += x[c] * _ZERO
    return total == _ZERO


@helper(SUMS)
def mask_rows(mask, start, alive):
    """Write which keys of a sequence there are."""
    for j in range(alive.shape[0]):
        alive[j] = mask.shape[0] == 0 or mask[start + j]


@helper(SUMS)
def key_weights(favor, k, alive, dim, given, weights):
    """Write weights, favor's with exp(-|k|^2 / 2), over the largest.

    `given` holds logarithms of weights, or nothing. Gives the range of logarithms.
    """
    if not favor and given.shape[0] == 0:
        weights[:] = _ONE
        return _ZERO
    least, most = _f(np.inf), _f(-np.inf)
    for j in range(weights.shape[0]):
        less = _ZERO
        if alive[j]:
            if favor:
                row = row_of(k, j, dim)
                for c in range(dim):
                    less += row[c] * row[c]
                less *= _HALF
            if given.shape[0]:
                less -= given[j]
            least, most = min(least, less), max(most, less)
        weights[j] = less
    for j in range(weights.shape[0]):
        weights[j] = exp(least - weights[j])
    return max(most - least, _ZERO)


@helper(SUMS)
def copy_rows(x, weights, weighted, dim, out):
    """Copy rows, times their weights; what a mask removes may be nan, and is zero."""
    for r in range(weights.shape[0]):
        row, new, alive = row_of(x, r, dim), row_of(out, r, dim), weights[r] > _ZERO
        weight = weights[r] if weighted else _ONE
        for c in range(dim):
            product = weight * row[c]
            new[c] = product if alive else _ZERO


@helper(SUMS)
def normalise(out, dim, totals):
    """Divide rows by totals, which become one over themselves."""
    for r in range(totals.shape[0]):
        # A query that no key answers gets zero.
        inverse = _ONE / totals[r] if totals[r] > _ZERO else _ZERO
        row, totals[r] = row_of(out, r, dim), inverse
        for c in range(dim):
            row[c] *= inverse


@helper(SUMS)
def _attend_linear(favor, sizes, data, own, sides, work):
    """Sum over the keys of a group, then apply the sums to its queries."""
    dim, dim_v, n = sizes
    q, k, v, out, alive, given = data
    kept_q, kept_k, inverses, weights, states = own
    scratch, _, values, state = work[:4]
    # Sums are written where they are kept, if they are.
    if states.shape[0]:
        state = states
    z, sums = state[:n], state[n:]
    state[:], peak, finite = _ZERO, _ZERO, True
    spread = key_weights(favor, k, alive, dim, given, weights)
    for r0 in range(0, weights.shape[0], BLOCK):
        part, real = weights[r0 : r0 + BLOCK], alive[r0 : r0 + BLOCK]
        rows = part.shape[0]
        if not real.any():
            part[:] = _ZERO
            continue
        e = feature_rows(kept_k, scratch, r0, n)
        project(after(k, r0), rows, sides[1], dim, n, e)
        peak = max(peak, key_features(favor, e, n, part, real, z))
        copy_rows(after(v, r0), part, True, dim_v, values)
        add_outer(e, n, rows, values, dim_v, sums)
    for r0 in range(0, inverses.shape[0], BLOCK):
        part, block = inverses[r0 : r0 + BLOCK], after(out, r0)
        rows = part.shape[0]
        e = feature_rows(kept_q, scratch, r0, n)
        project(after(q, r0), rows, sides[0], dim, n, e)
        finite &= query_features(e, n, z, part)
        times_panels(e, rows, sums, n, dim_v, block)
        normalise(block, dim_v, part)
    return peak + spread, finite


@helper(SUMS)
def _triangle(square, a, panels, count, rows, out):
    """Multiply rows: out[r, s] = a_r . b_s for s <= r, else zero, unless `square`."""
    for p in range(0, rows, PANEL):
        r = 0 if square else p
        left, right = (a[1] + r * a[2], a[2], 1, rows - r), (p * count, 0, PANEL, 1)
        target = (r * _WIDE + p, _WIDE, 0)
        multiply(a[0], left, panels, right, out, target, count, False)
    if not square:
        for r in range(rows):
            out[r * _WIDE + r + 1 : r * _WIDE + rows] = _ZERO


@helper(SUMS)
def _mix_before(square, products, rows, b, columns, out):
    """Add the sum over s <= r, or all s, of products[r, s] b_s to row r."""
    right = (b[1], PANEL, b[2], columns // PANEL)
    for i in range(0, rows, _STEP):
        end = min(i + _STEP, rows)
        left = (i * _WIDE, _WIDE, 1, end - i)
        goal = (out[1] + i * out[2], out[2], PANEL)
        count = rows if square else end
        multiply(products, left, b[0], right, out[0], goal, count, True)


@helper(SUMS)
def _mix_after(square, products, rows, b, columns, out):
    """Add the sum over r >= s, or all r, of products[r, s] b_r to row s."""
    for i in range(0, rows, _STEP):
        r = 0 if square else i
        left = (r * _WIDE + i, 1, _WIDE, min(_STEP, rows - i))
        right = (b[1] + r * b[2], PANEL, b[2], columns // PANEL)
        goal = (out[1] + i * out[2], out[2], PANEL)
        multiply(products, left, b[0], right, out[0], goal, rows - r, True)


@helper(SUMS)
def _add_dot(total, a, b):
    for c in range(a.shape[0]):
        total += a[c] * b[c]
    return total


@helper(SUMS)
def _attend_causal(options, sizes, data, own, sides, work):
    """Attend block by block; give the largest exponent of keys, if all is finite."""
    favor, square = options
    dim, dim_v, n = sizes
    q, k, v, out, alive, given = data
    kept_q, kept_k, inverses, weights, states = own
    scratch_q, scratch_k, values, state, products, key_panels = work
    length, size, finite = weights.shape[0], n * (dim_v + 1), True
    spread = key_weights(favor, k, alive, dim, given, weights)
    state[:], peak = _ZERO, _ZERO
    z, sums = state[:n], state[n:]
    for r0 in range(0, length, BLOCK):
        end = min(r0 + BLOCK, length)
        if states.shape[0] and r0 and r0 % SPAN == 0:
            states[(r0 // SPAN - 1) * size :][:size] = state
        e_q = feature_rows(kept_q, scratch_q, r0, n)
        e_k = feature_rows(kept_k, scratch_k, r0, n)
        project(after(q, r0), end - r0, sides[0], dim, n, e_q)
        finite &= query_features(e_q, n, z, inverses[r0:end])
        project(after(k, r0), end - r0, sides[1], dim, n, e_k)
        part, totals, block = weights[r0:end], inverses[r0:end], after(out, r0)
        peak = max(peak, key_features(favor, e_k, n, part, alive[r0:end], z))
        rows = end - r0
        transpose_panels(e_k[0], e_k[1], e_k[2], rows, n, _ONE, key_panels)
        _triangle(square, e_q, key_panels, n, rows, products)
        copy_rows(after(v, r0), part, True, dim_v, values)
        if r0 == 0:
            clear(block, rows, dim_v)
        else:
            times_panels(e_q, rows, sums, n, dim_v, block)
        _mix_before(square, products, rows, values, dim_v, block)
        if end < length:
            add_outer(e_k, n, rows, values, dim_v, sums)
        for r in range(rows):
            totals[r] = _add_dot(totals[r], products[r * _WIDE :][:rows], part)
        normalise(block, dim_v, totals)
    return peak + spread, finite


@helper(SUMS)
def _own_parts(kept, bounds, group, sizes):
    """Give the keys of a group, first and end, and what is kept of it."""
    e_q, e_k, inverses, weights, states = kept
    _, dim_v, n = sizes
    rows, key_rows = group_rows(bounds[0], group), group_rows(bounds[1], group)
    return key_rows, (
        _part(e_q, rows, row_stride(n)),
        _part(e_k, key_rows, row_stride(n)),
        _part(inverses, rows, 1),
        _part(weights, key_rows, 1),
        _part(states, group_rows(bounds[2], group), n * (dim_v + 1)),
    )


@entry(SUMS)
def attend(options, inputs, shape, kept, out, limit, first, end):
    """Attend in the groups from `first` to `end`; give whether nothing was lost.

    `options` is whether weights are favor's, the factor of the particles and the order
    of the products. `inputs` holds q, k, v, each with its places; positions and offsets
    of what queries and of what keys meet; the mask and logarithms of weights of the
    keys. The last six may be empty: keys without positions meet what queries meet.
    `shape` is where the sequences of queries and of keys, and their states, begin and
    end among those of a head; and dim, dim_v and features. `kept` receives features of
    queries and keys (if not empty), one over the normalisers, weights, and states (if
    not empty): one for a sequence, or if causal one before each span but the first.
    """
    favor, scale, kind = options[0], _f(options[1]), options[2]
    q, k, v, particles, mask, given = inputs
    bounds, sizes = shape
    dim, dim_v, n = sizes
    stride, batch, size = row_stride(n), bounds[0].shape[0] - 1, n * (dim_v + 1)
    all_alive = np.empty(longest(bounds[1]), np.bool_)
    sides = _make_sides(particles, n * dim, n)
    work = (
        aligned(BLOCK * stride),
        aligned(BLOCK * stride),
        rows_at(aligned(BLOCK * dim_v), 0, dim_v),
        aligned(size),
        aligned(BLOCK * _WIDE),
        aligned(BLOCK * n),
    )
    for group in range(first, end):
        begins = group == first or group % batch == 0
        if begins and not _load_sides(particles, group // batch, sizes, scale, sides):
            return False
        key_rows, own = _own_parts(kept, bounds, group, sizes)
        alive = all_alive[: key_rows[1] - key_rows[0]]
        mask_rows(mask, bounds[1][group % batch], alive)
        place = (group, batch)
        data = (
            rows_of(q, place),
            rows_of(k, place),
            rows_of(v, place),
            rows_of(out, place),
            alive,
            _part(given, key_rows, 1),
        )
        if kind == LINEAR:
            top, finite = _attend_linear(favor, sizes, data, own, sides, work)
        else:
            about = (favor, kind == SQUARE)
            top, finite = _attend_causal(about, sizes, data, own, sides, work)
        if not (finite and top < limit):
            return False
    return True


@helper(SUMS)
def grad_rows(out, grad, inverses, dim, g_rows, dots):
    """Differentiate the ratio: rows g / D, and -(g . out) / D."""
    for r in range(inverses.shape[0]):
        inverse, total = inverses[r], _ZERO
        y, g, row = row_of(out, r, dim), row_of(grad, r, dim), row_of(g_rows, r, dim)
        for c in range(dim):
            row[c] = g[c] * inverse
        for c in range(dim):
            total -= row[c] * y[c]
        dots[r] = total


@helper(SUMS)
def query_slopes(scale, e, n, dots, z, slopes):
    """Turn gradients of the features of queries into those of their exponents."""
    for r in range(dots.shape[0]):
        slope, own, dot = row_of(slopes, r, n), row_of(e, r, n), dots[r]
        for c in range(n):
            slope[c] = scale * own[c] * (slope[c] + dot * z[c])


@helper(SUMS)
def _share(given, row, weight):
    """Give what features are multiplied with so that they sum to one."""
    if given == 0:
        return weight
    total = _ZERO
    for c in range(row.shape[0]):
        total += row[c]
    return _ONE / total if total > _ZERO else _ZERO


@helper(SUMS)
def key_slopes(kind, e, n, weights, grad_z, slopes, totals):
    """Turn gradients of the features of keys into those of their exponents.

    `kind` is whether weights are favor's, the factor of the particles and how many
    weights were given.
    """
    favor, scale, given = kind
    for r in range(weights.shape[0]):
        slope, own = row_of(slopes, r, n), row_of(e, r, n)
        weight, total = weights[r], _ZERO
        for c in range(n):
            slope[c] = weight * own[c] * (slope[c] + grad_z[c])
            total += slope[c]
        totals[r] = total
        if not favor:
            less = total * _share(given, own, weight)
            for c in range(n):
                slope[c] = scale * (slope[c] - less * own[c])


@helper(SUMS)
def pull_rows(x, grad_x, rows, dim, n, slopes, particles):
    """Turn gradients of exponents into those of inputs and, if wanted, particles.

    `particles` holds positions in panels, and gradients of positions and offsets.
    """
    position_panels, grad_positions, grad_offsets = particles
    times_panels(slopes, rows, position_panels, n, dim, grad_x)
    if grad_positions.shape[0]:
        left, right = (slopes[1], 1, slopes[2], n), (x[1], PANEL, x[2], dim // PANEL)
        goal = (0, dim, PANEL)
        multiply(slopes[0], left, x[0], right, grad_positions, goal, rows, True)
    if grad_offsets.shape[0]:
        for r in range(rows):
            _add_row(row_of(slopes, r, n), _ONE, grad_offsets)


@helper(SUMS)
def finish_keys(kind, e, k, weights, grads, sizes, grad_z, work, particles):
    """Pull gradients of features back to keys; put weights into those of values.

    `kind` as in `key_slopes`. `grads` are the rows of both, those of values still
    without their weights, and those of the weights that were given.
    """
    dim, dim_v, n = sizes
    favor = kind[0]
    grad_k, grad_v, grad_given = grads
    slopes, keys, totals = work
    key_slopes(kind, e, n, weights, grad_z, slopes, totals)
    for r in range(grad_given.shape[0]):
        grad_given[r] = totals[r]
    copy_rows(k, weights, False, dim, keys)
    pull_rows(keys, grad_k, weights.shape[0], dim, n, slopes, particles)
    for r in range(weights.shape[0]):
        row, weight = row_of(grad_v, r, dim_v), weights[r]
        for c in range(dim_v):
            row[c] *= weight
        if favor:
            row, key, total = row_of(grad_k, r, dim), row_of(keys, r, dim), totals[r]
            for c in range(dim):
                row[c] -= total * key[c]


@helper(SUMS)
def _pull_linear(options, sizes, data, own, sides, work, pulled):
    """Pull back through the queries of a group, then through its keys and values."""
    favor, scale, _, given = options
    dim, dim_v, n = sizes
    q, k, v, out, grad, grad_q, grad_k, grad_v, grad_given = data
    kept_q, kept_k, inverses, weights, state = own
    scratch, _, values, grad_state, slopes, sum_panels, copies, dots = work[:8]
    z, grad_z, grad_sums = state[:n], grad_state[:n], grad_state[n:]
    flip_panels(state[n:], n, dim_v, sum_panels)
    ones = np.ones(n, _f)
    for r0 in range(0, inverses.shape[0], BLOCK):
        part, x = inverses[r0 : r0 + BLOCK], after(q, r0)
        rows = part.shape[0]
        e = feature_rows(kept_q, scratch, r0, n)
        if not kept_q.shape[0]:
            project(x, rows, sides[0], dim, n, e)
            query_features(e, n, ones, dots[:rows])
        grad_rows(after(out, r0), after(grad, r0), part, dim_v, values, dots)
        add_outer(e, n, rows, values, dim_v, grad_sums)
        times_panels(values, rows, sum_panels, dim_v, n, slopes)
        add_features(e, n, dots[:rows], grad_z)
        query_slopes(scale, e, n, dots[:rows], z, slopes)
        pull_rows(x, after(grad_q, r0), rows, dim, n, slopes, pulled[0])
    flip_panels(grad_sums, n, dim_v, sum_panels)
    for r0 in range(0, weights.shape[0], BLOCK):
        part, x = weights[r0 : r0 + BLOCK], after(k, r0)
        rows = part.shape[0]
        grads = (after(grad_k, r0), after(grad_v, r0), grad_given[r0 : r0 + rows])
        if not part.max() > _ZERO:
            clear(grads[0], rows, dim)
            clear(grads[1], rows, dim_v)
            grads[2][:] = _ZERO
            continue
        e = feature_rows(kept_k, scratch, r0, n)
        if not kept_k.shape[0]:
            project(x, rows, sides[1], dim, n, e)
            repeat_key_features(e, n, part)
        copy_rows(after(v, r0), part, False, dim_v, values)
        times_panels(e, rows, grad_sums, n, dim_v, grads[1])
        times_panels(values, rows, sum_panels, dim_v, n, slopes)
        small, kind = (slopes, copies, dots), (favor, scale, given)
        finish_keys(kind, e, x, part, grads, sizes, grad_z, small, pulled[1])


@helper(SUMS)
def _grad_products(square, v, weights, g, dots, dim, values, work):
    """Write the gradient of the products of a block: g_r . v_s + c_r for s <= r."""
    value_panels, products = work
    rows = weights.shape[0]
    copy_rows(v, weights, False, dim, values)
    transpose_panels(values[0], 0, dim, rows, dim, _ONE, value_panels)
    _triangle(square, g, value_panels, dim, rows, products)
    for r in range(rows):
        end = rows if square else r + 1
        for s in range(r * _WIDE, r * _WIDE + end):
            products[s] += dots[r]


@helper(SUMS)
def _span_queries(options, sizes, span, features, data, own, work, pulled):
    """Pull back through the queries of a span, from its first block to its last."""
    _, scale, square, _ = options
    dim, dim_v, n = sizes
    q, _, v, out, grad, grad_q = data[:6]
    inverses, weights = own[2:4]
    values, _, slopes, sum_panels, _, all_dots, g_rows, small, _, state = work[2:]
    products, (t0, t1), z, sums = small[1], span, state[:n], state[n:]
    for r0 in range(t0, t1, BLOCK):
        end = min(r0 + BLOCK, t1)
        rows, part, dots = end - r0, weights[r0:end], all_dots[r0 - t0 : end - t0]
        e_q, e_k = after(features[0], r0 - t0), after(features[1], r0 - t0)
        g, above = after(g_rows, r0 - t0), inverses[r0:end]
        grad_rows(after(out, r0), after(grad, r0), above, dim_v, g, dots)
        _grad_products(square, after(v, r0), part, g, dots, dim_v, values, small)
        for r in range(rows):
            row = products[r * _WIDE :][:rows]
            for s in range(rows):
                row[s] *= part[s]
        if r0 == 0:
            clear(slopes, rows, n)
        else:
            flip_panels(sums, n, dim_v, sum_panels)
            times_panels(g, rows, sum_panels, dim_v, n, slopes)
        _mix_before(square, products, rows, e_k, n, slopes)
        query_slopes(scale, e_q, n, dots, z, slopes)
        pull_rows(after(q, r0), after(grad_q, r0), rows, dim, n, slopes, pulled)
        if end == t1:
            break
        add_features(e_k, n, part, z)
        for r in range(rows):
            row, weight = row_of(values, r, dim_v), part[r]
            for c in range(dim_v):
                row[c] *= weight
        add_outer(e_k, n, rows, values, dim_v, sums)


@helper(SUMS)
def _span_keys(options, sizes, span, features, data, own, work, pulled):
    """Pull back through the keys of a span, from its last block to its first."""
    favor, scale, square, some_given = options
    _, dim_v, n = sizes
    _, k, v, _, _, _, grad_k, grad_v, grad_given = data
    weights, kind = own[3], (favor, scale, some_given)
    values, grad_state, slopes, sum_panels, copies, all_dots, g_rows = work[2:9]
    small, (totals, key_panels) = work[9], work[10]
    products, (t0, t1) = small[1], span
    grad_z, grad_sums = grad_state[:n], grad_state[n:]
    for b in range((t1 - t0 + BLOCK - 1) // BLOCK - 1, -1, -1):
        r0, end = t0 + b * BLOCK, min(t0 + (b + 1) * BLOCK, t1)
        rows, part, dots = end - r0, weights[r0:end], all_dots[r0 - t0 : end - t0]
        e_q, e_k = after(features[0], r0 - t0), after(features[1], r0 - t0)
        g, given = after(g_rows, r0 - t0), grad_given[r0:end]
        grads = (after(grad_k, r0), after(grad_v, r0), given)
        _grad_products(square, after(v, r0), part, g, dots, dim_v, values, small)
        if end == weights.shape[0]:
            clear(slopes, rows, n)
            clear(grads[1], rows, dim_v)
        else:
            flip_panels(grad_sums, n, dim_v, sum_panels)
            times_panels(values, rows, sum_panels, dim_v, n, slopes)
            times_panels(e_k, rows, grad_sums, n, dim_v, grads[1])
        _mix_after(square, products, rows, e_q, n, slopes)
        transpose_panels(e_k[0], e_k[1], e_k[2], rows, n, _ONE, key_panels)
        _triangle(square, e_q, key_panels, n, rows, products)
        _mix_after(square, products, rows, g, dim_v, grads[1])
        tools, x = (slopes, copies, totals), after(k, r0)
        finish_keys(kind, e_k, x, part, grads, sizes, grad_z, tools, pulled)
        if r0 == 0:
            break
        add_outer(e_q, n, rows, g, dim_v, grad_sums)
        add_features(e_q, n, dots, grad_z)


@helper(SUMS)
def _pull_causal(options, sizes, data, own, sides, work, pulled):
    """Pull back through a group, from its last span to its first."""
    dim, dim_v, n = sizes
    kept_q, kept_k, _, weights, states = own
    dots, state, size, length = work[7], work[11], n * (dim_v + 1), weights.shape[0]
    ones = np.ones(n, _f)
    for s in range((length + SPAN - 1) // SPAN - 1, -1, -1):
        t0, t1 = s * SPAN, min((s + 1) * SPAN, length)
        if s:
            state[:] = states[(s - 1) * size :][:size]
        else:
            state[:] = _ZERO
        features = (
            feature_rows(kept_q, work[0], t0, n),
            feature_rows(kept_k, work[1], t0, n),
        )
        if not kept_q.shape[0]:
            project(after(data[0], t0), t1 - t0, sides[0], dim, n, features[0])
            project(after(data[1], t0), t1 - t0, sides[1], dim, n, features[1])
            query_features(features[0], n, ones, dots[: t1 - t0])
            repeat_key_features(features[1], n, weights[t0:t1])
        about = (options, sizes, (t0, t1), features, data, own, work)
        _span_queries(*about, pulled[0])
        _span_keys(*about, pulled[1])


@helper(SUMS)
def _load_back(given, head, sizes, panels):
    """Write the positions of a head, which gradients are multiplied with, as panels."""
    dim, _, n = sizes
    if given[0].shape[0]:
        copy_panels(given[0], head * n * dim, dim, n, dim, panels)


@helper(SUMS)
def _back_side(panels, grads, head, sizes):
    """Give positions in panels, with the gradients of the particles of a head."""
    place, (dim, _, n) = (head, head + 1), sizes
    return panels, _part(grads[0], place, n * dim), _part(grads[1], place, n)


@entry(SUMS)
def attend_back(options, inputs, shape, kept, outputs, grads, first, end):
    """Pull a gradient back in the groups from `first` to `end`.

    `outputs` holds the output and its gradient, `grads` those of q, k and v, each with
    its places, of positions and offsets of what queries and keys meet, and of the
    logarithms of weights; the last five may be empty. The particles of a head belong to
    one thread: with a gradient of theirs, `first` and `end` are multiples of the batch.
    """
    scale, kind = _f(options[1]), options[2]
    q, k, v, particles, _, given = inputs
    bounds, sizes = shape
    dim, dim_v, n = sizes
    grad_q, grad_k, grad_v, grad_particles, grad_given = grads
    stride, size, batch = row_stride(n), n * (dim_v + 1), bounds[0].shape[0] - 1
    about = (options[0], scale, kind == SQUARE, given.shape[0])
    sides = _make_sides(particles, n * dim, n)
    query_panels = key_panels = aligned(n * dim)
    if particles[1][0].shape[0]:
        key_panels = aligned(n * dim)
    # Features of a span are used twice, those of a block of the linear form once.
    deep = BLOCK if kind == LINEAR else min(SPAN, longest(bounds[0]))
    deep = 0 if kept[0].shape[0] else deep
    wide = BLOCK if kind == LINEAR else SPAN
    grad_state, state = aligned(size), aligned(size)
    work = (
        aligned(deep * stride),
        aligned(deep * stride),
        rows_at(aligned(BLOCK * dim_v), 0, dim_v),
        grad_state,
        rows_at(aligned(BLOCK * stride), 0, stride),
        aligned(n * dim_v),
        rows_at(aligned(BLOCK * dim), 0, dim),
        aligned(wide),
        rows_at(aligned(wide * dim_v), 0, dim_v),
        (aligned(BLOCK * dim_v), aligned(BLOCK * _WIDE)),
        (aligned(BLOCK), aligned(BLOCK * n)),
        state,
    )
    for group in range(first, end):
        head, place = group // batch, (group, batch)
        if group == first or group % batch == 0:
            _load_sides(particles, head, sizes, scale, sides)
            _load_back(particles[0], head, sizes, query_panels)
            _load_back(particles[1], head, sizes, key_panels)
        pulled = (
            _back_side(query_panels, grad_particles[0], head, sizes),
            _back_side(key_panels, grad_particles[1], head, sizes),
        )
        key_rows, own = _own_parts(kept, bounds, group, sizes)
        data = (
            rows_of(q, place),
            rows_of(k, place),
            rows_of(v, place),
            rows_of(outputs[0], place),
            rows_of(outputs[1], place),
            rows_of(grad_q, place),
            rows_of(grad_k, place),
            rows_of(grad_v, place),
            _part(grad_given, key_rows, 1),
        )
        grad_state[:] = _ZERO
        if kind == LINEAR:
            _pull_linear(about, sizes, data, own, sides, work, pulled)
        else:
            _pull_causal(about, sizes, data, own, sides, work, pulled)


# Decoding. To make arrays of tensors, and to take them apart again, would take as long
# as the loop: it gets their addresses. All are contiguous float32: queries, keys and
# values `(batch, heads, dim)`, sums `(batch, heads, dim_v + 1, features)` and shifts
# `(batch, heads, features)`. Positions are those of each head, or of one for all.


@intrinsic
def _at(typing, address):
    """Turn an address into a pointer to float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = context.get_value_type(signature.return_type)
        return builder.inttoptr(arguments[0], kind)

    return types.CPointer(types.float32)(types.int64), generate


@helper(SUMS)
def _softmax(row, scale):
    inverse = scale / exp_row(row, _ONE)
    for c in range(row.shape[0]):
        row[c] *= inverse


@helper(SUMS | {"nnan"})
def _favor(k, a_q, a_k, shift, higher, factors):
    """Turn exponents into features of query and key, at a shift that may rise."""
    half = _ZERO
    for d in range(k.shape[0]):
        half += k[d] * k[d]
    half = _HALF * half + _f(0.5 * math.log(a_q.shape[0]))
    for c in range(a_q.shape[0]):
        key = a_k[c] - half
        higher[c] = max(shift[c], key)
        factors[c] = exp(shift[c] - higher[c])
        a_k[c] = exp(key - higher[c])
        a_q[c] += higher[c]
    _softmax(a_q, _ONE)


@helper(SUMS)
def _step(old, factors, phi_q, phi_k, value, new):
    """Add the token to a row of the sums; give the product with the query."""
    total = _ZERO
    for c in range(old.shape[0]):
        new[c] = old[c] * factors[c] + value * phi_k[c]
    for c in range(old.shape[0]):
        total += new[c] * phi_q[c]
    return total


@helper(SUMS)
def _step_in_place(row, factors, phi_q, phi_k, value):
    """Do the same where the sums are: the loop above would find that arrays overlap."""
    total = _ZERO
    for c in range(row.shape[0]):
        row[c] = row[c] * factors[c] + value * phi_k[c]
    for c in range(row.shape[0]):
        total += row[c] * phi_q[c]
    return total


@helper(SUMS)
def _copy(old, new):
    for c in range(old.shape[0]):
        new[c] = old[c]


@entry(SUMS)
def decode(options, shape, positions, token, state, new_state, out, first, end):
    """Add one token to the states from `first` to `end`; attend to all tokens so far.

    `options` is whether the map is favor and the factor of the particles; `shape` is
    batch, heads, heads with particles of their own, dim, dim_v and features. The others
    are addresses: `token` holds q, k and v, `state` and `new_state`, which may be the
    same, sums and shifts.
    """
    favor, scale = options[0], _f(options[1])
    batch, heads, particles, dim, dim_v, n = shape
    groups = batch * heads
    rows = carray(_at(positions), (particles * n, dim))
    q, k = carray(_at(token[0]), (groups, dim)), carray(_at(token[1]), (groups, dim))
    v = carray(_at(token[2]), (groups, dim_v))
    target = carray(_at(out), (groups, dim_v))
    sums = carray(_at(state[0]), (groups, dim_v + 1, n))
    new_sums = carray(_at(new_state[0]), (groups, dim_v + 1, n))
    shift = carray(_at(state[1]), (groups, n))
    higher = carray(_at(new_state[1]), (groups, n))
    both, angles = np.empty((2, dim), _f), np.empty((n, 2), _f)
    a_q, a_k, before, factors = aligned(n), aligned(n), aligned(n), np.ones(n, _f)
    moved = state[0] != new_state[0]
    for group in range(first, end):
        both[0], both[1] = q[group], k[group]
        own = group % heads % particles * n
        row_products(rows, own, 0, n, both, 0, 0, 2, dim, False, angles)
        for c in range(n):
            a_q[c], a_k[c] = scale * angles[c, 0], scale * angles[c, 1]
        _copy(shift[group], before)
        if favor:
            _favor(k[group], a_q, a_k, before, higher[group], factors)
        else:
            _copy(before, higher[group])
            _softmax(a_q, _ONE)
            _softmax(a_k, _f(math.sqrt(n)))
        old, new = sums[group], new_sums[group]
        inverse = _ZERO
        for i in range(dim_v + 1):
            c = i - 1 if i else dim_v  # first the normaliser
            value = v[group, c] if i else _ONE
            if moved:
                total = _step(old[c], factors, a_q, a_k, value, new[c])
            else:
                total = _step_in_place(new[c], factors, a_q, a_k, value)
            if i:
                target[group, c] = total * inverse
            elif total != _ZERO:  # else no key is there, and the output is zero
                inverse = _ONE / total
