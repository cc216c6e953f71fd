"""Compiled linear attention with exponential features, and its steps on blocks of rows.

With `e = exp(w.x + o)` of queries and keys and a weight `c_j` of each key,
`a_i = e(q_i)' S / e(q_i)' z`, `S = sum_j e(k_j) c_j v_j'`, `z = sum_j e(k_j) c_j`. The
weight is `exp(-|k|^2 / 2)` up to a factor, or one over the sum of the features, times a
weight that was given; or zero where a mask removes the key.

The exponents of a query are shifted by their largest, which cancels; those of keys are
not. The passes forwards look at the largest exponents of keys; whoever calls throws the
result away if they leave the range in which nothing is lost, or if anything is not
finite.

Inputs are flat arrays with the beginnings of their sequences and the distances of heads
and of rows. A *group* is a head of a sequence; the sequences of a head follow one
another. *Rows* are a flat array, where its first row begins, and the distance of rows.
The sums S are kept in panels of 16 columns, `(group, panel, feature, 16)`. A *side* is
what queries or keys meet: the particles of a head in panels, and their offsets, which
may be empty.
"""

import numpy as np

from coulomb.kernels.gemm import (
    PANEL,
    aligned,
    copy_panels,
    flip_panels,
    multiply,
    transpose_panels,
)
from coulomb.kernels.jit import SUMS, entry, helper
from coulomb.kernels.math import exp, row_max

_f = np.float32
_ZERO, _ONE, _HALF, _HUGE = _f(0), _f(1), _f(0.5), _f(1e30)

# Rows of a block: its features and one copy of them stay in the second cache.
BLOCK = 96


@helper(SUMS)
def rows_at(x, offset, stride):
    """Rows of a flat array."""
    # Else constants would be part of the types, and each call compiled by itself.
    return x, np.int64(offset), np.int64(stride)


@helper(SUMS)
def rows_of(x, place):
    """Rows of an array with its distances; `place` is a group, the batch and a row."""
    array, starts, (head, stride) = x
    group, batch, r0 = place
    offset = starts[group % batch] + (group // batch) * head + r0 * stride
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
def part_of(x, group, size):
    """Take what belongs to a group, or nothing of nothing."""
    return x[group * size : (group + 1) * size] if x.shape[0] else x


@helper(SUMS)
def rows_part(x, rows, size):
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
def longest(bounds):
    """Give the length of the longest sequence."""
    most = 0
    for b in range(bounds.shape[0] - 1):
        most = max(most, bounds[b + 1] - bounds[b])
    return most


@helper(SUMS)
def group_shape(bounds, group, sizes):
    """Give the batch, queries and keys of a group, dim, dim_v and features."""
    batch = bounds[0].shape[0] - 1
    first, end = group_rows(bounds[0], group)
    begin, stop = group_rows(bounds[1], group)
    return batch, end - first, stop - begin, sizes[0], sizes[1], sizes[2]


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
def make_sides(particles, size, n):
    """Make room for what queries and keys meet; the same if they meet the same."""
    _, key_positions, offsets, key_offsets = particles
    queries = (aligned(size), aligned(n if offsets.shape[0] else 0))
    if key_positions.shape[0] == 0:
        return queries, queries
    return queries, (aligned(size), aligned(n if key_offsets.shape[0] else 0))


@helper(SUMS)
def _load_side(positions, offsets, head, sizes, scale, side):
    panels, shifts = side
    dim, n = sizes
    transpose_panels(positions, head * n * dim, dim, n, dim, scale, panels)
    for c in range(shifts.shape[0]):
        shifts[c] = scale * offsets[head * n + c]
    return all_finite(panels) and all_finite(shifts)


@helper(SUMS)
def load_sides(particles, head, sizes, scale, sides):
    """Write the particles of a head as panels; give if all are finite."""
    positions, key_positions, offsets, key_offsets = particles
    finite = _load_side(positions, offsets, head, sizes, scale, sides[0])
    if key_positions.shape[0]:
        finite &= _load_side(key_positions, key_offsets, head, sizes, scale, sides[1])
    return finite


@helper(SUMS)
def project(x, rows, side, dim, n, e):
    """Write the exponents of rows."""
    panels, offsets = side
    if offsets.shape[0] == 0:
        times_panels(x, rows, panels, dim, n, e)
        return
    for r in range(rows):
        row_of(e, r, n)[:] = offsets
    left, right = (x[1], x[2], 1, rows), (0, dim * PANEL, PANEL, n // PANEL)
    multiply(x[0], left, panels, right, e[0], (e[1], e[2], PANEL), dim, True)


# A nan in an input is in all exponents of its row: the first element tells.
@helper(SUMS | {"nnan"})
def _largest_size(row):
    top = _ZERO
    for c in range(row.shape[0]):
        top = max(top, abs(row[c]))
    return top


@helper(SUMS)
def query_row(row, z):
    """Take exponentials over the largest; give if all is finite, and row . z."""
    top, total = row_max(row), _ZERO
    finite = abs(row[0]) < _HUGE and top < _HUGE
    for c in range(row.shape[0]):
        row[c] = exp(row[c] - top)
        total += row[c] * z[c]
    return finite, total


@helper(SUMS)
def query_features(e, n, z, totals):
    """Turn exponents of queries into features, write e . z; give if all is finite."""
    finite = True
    for r in range(totals.shape[0]):
        good, totals[r] = query_row(row_of(e, r, n), z)
        finite &= good
    return finite


@helper(SUMS)
def key_row(row):
    """Take exponentials; give the size of the largest exponent, and their sum."""
    top = _largest_size(row) if abs(row[0]) < _HUGE else _f(np.inf)
    total = _ZERO
    for c in range(row.shape[0]):
        row[c] = exp(row[c])
        total += row[c]
    return top, total


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
    """Turn exponents of keys into features; add to z; give the largest exponent."""
    top = _ZERO
    for r in range(weights.shape[0]):
        row = row_of(e, r, n)
        if not alive[r]:
            row[:] = _ZERO
            weights[r] = _ZERO
            continue
        largest, total = key_row(row)
        top = max(top, largest)
        if not favor:
            weights[r] /= total
        _add_row(row, weights[r], z)
    return top


@helper(SUMS)
def repeat_key_features(e, n, weights):
    """Turn exponents of keys into features once more."""
    for r in range(weights.shape[0]):
        row = row_of(e, r, n)
        if weights[r] > _ZERO:
            key_row(row)
        else:
            row[:] = _ZERO


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
def weighted_rows(x, weights, dim, out):
    """Copy rows times their weights; what a mask removes may be anything, even nan."""
    for r in range(weights.shape[0]):
        row, new, weight = row_of(x, r, dim), row_of(out, r, dim), weights[r]
        for c in range(dim):
            product = weight * row[c]
            new[c] = product if weight > _ZERO else _ZERO


@helper(SUMS)
def masked_rows(x, weights, dim, out):
    """Copy rows; what a mask removes becomes zero."""
    for r in range(weights.shape[0]):
        row, new, alive = row_of(x, r, dim), row_of(out, r, dim), weights[r] > _ZERO
        for c in range(dim):
            new[c] = row[c] if alive else _ZERO


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
def _sum_keys(favor, shape, keys, work, kept, held):
    """Sum over the keys of a group; give the largest exponent plus the range of c."""
    _, _, m, dim, dim_v, n = shape
    k, v, alive, given, weights = keys
    side, scratch, values = work
    sums, z = held
    sums[:], z[:], top = _ZERO, _ZERO, _ZERO
    spread = key_weights(favor, k, alive, dim, given, weights)
    for r0 in range(0, m, BLOCK):
        rows = min(BLOCK, m - r0)
        own, real = weights[r0 : r0 + rows], alive[r0 : r0 + rows]
        if not real.any():
            own[:] = _ZERO
            continue
        e = feature_rows(kept, scratch, r0, n)
        project(after(k, r0), rows, side, dim, n, e)
        top = max(top, key_features(favor, e, n, own, real, z))
        weighted_rows(after(v, r0), own, dim_v, values)
        add_outer(e, n, rows, values, dim_v, sums)
    return top + spread


@helper(SUMS)
def _apply_queries(shape, queries, work, kept, held):
    """Apply the sums to the queries of a group; give whether all was finite."""
    _, length, _, dim, dim_v, n = shape
    q, out, inverses = queries
    side, scratch, _ = work
    sums, z = held
    finite = True
    for r0 in range(0, length, BLOCK):
        own, block = inverses[r0 : min(r0 + BLOCK, length)], after(out, r0)
        rows = own.shape[0]
        e = feature_rows(kept, scratch, r0, n)
        project(after(q, r0), rows, side, dim, n, e)
        finite &= query_features(e, n, z, own)
        times_panels(e, rows, sums, n, dim_v, block)
        normalise(block, dim_v, own)
    return finite


@entry(SUMS)
def attend(options, inputs, shape, kept, out, limit, first, end):
    """Attend in the groups from `first` to `end`; give whether nothing was lost.

    `options` is whether weights are favor's and the factor of the particles. `inputs`
    holds q, k, v, each with its places; positions and offsets of what queries and of
    what keys meet; the mask and logarithms of weights of the keys. The last seven may
    be empty: keys without positions meet what queries meet. `shape` is where the
    sequences of queries and of keys begin and end among the rows of a head, and dim,
    dim_v and features. `kept` receives features of queries and keys (if not empty), one
    over the normalisers, weights, S and z.
    """
    favor, scale = options[0], _f(options[1])
    q, k, v, particles, mask, given = inputs
    bounds, sizes = shape
    dim, dim_v, n = sizes
    e_q, e_k, inverses, weights, sums, z = kept
    stride, batch = row_stride(n), bounds[0].shape[0] - 1
    query_side, key_side = sides = make_sides(particles, n * dim, n)
    values = rows_at(aligned(BLOCK * dim_v), 0, dim_v)
    scratch, alive = aligned(BLOCK * stride), np.empty(longest(bounds[1]), np.bool_)
    for group in range(first, end):
        begins = group == first or group % batch == 0
        if begins and not load_sides(particles, group // batch, (dim, n), scale, sides):
            return False
        place, own_shape = (group, batch, 0), group_shape(bounds, group, sizes)
        rows, key_rows = group_rows(bounds[0], group), group_rows(bounds[1], group)
        held = part_of(sums, group, n * dim_v), part_of(z, group, n)
        real = alive[: key_rows[1] - key_rows[0]]
        mask_rows(mask, bounds[1][group % batch], real)
        keys = (
            rows_of(k, place),
            rows_of(v, place),
            real,
            rows_part(given, key_rows, 1),
            rows_part(weights, key_rows, 1),
        )
        features, work = rows_part(e_k, key_rows, stride), (key_side, scratch, values)
        if not _sum_keys(favor, own_shape, keys, work, features, held) < limit:
            return False
        own = rows_of(q, place), rows_of(out, place)
        queries = (*own, rows_part(inverses, rows, 1))
        features, work = rows_part(e_q, rows, stride), (query_side, scratch, values)
        if not _apply_queries(own_shape, queries, work, features, held):
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
def finish_keys(kind, e, k, weights, grads, shape, grad_z, work, particles):
    """Pull gradients of features back to keys; put weights into those of values.

    `kind` as in `key_slopes`. `grads` are the rows of both, those of values still
    without their weights, and those of the weights that were given.
    """
    _, _, _, dim, dim_v, n = shape
    favor = kind[0]
    grad_k, grad_v, grad_given = grads
    slopes, keys, totals = work
    key_slopes(kind, e, n, weights, grad_z, slopes, totals)
    for r in range(grad_given.shape[0]):
        grad_given[r] = totals[r]
    masked_rows(k, weights, dim, keys)
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
def _pull_queries(scale, shape, queries, kept, held, work, results, particles):
    """Pull back through the queries of a group, and add to the gradients of S and z."""
    _, length, _, dim, dim_v, n = shape
    q, out, grad, grad_q, inverses = queries
    sum_panels, z = held
    side, scratch, slopes, g, dots = work
    grad_sums, grad_z = results
    ones = np.ones(n, _f)
    for r0 in range(0, length, BLOCK):
        own, x = inverses[r0 : min(r0 + BLOCK, length)], after(q, r0)
        rows = own.shape[0]
        e = feature_rows(kept, scratch, r0, n)
        if not kept.shape[0]:
            project(x, rows, side, dim, n, e)
            query_features(e, n, ones, dots[:rows])
        grad_rows(after(out, r0), after(grad, r0), own, dim_v, g, dots)
        add_outer(e, n, rows, g, dim_v, grad_sums)
        times_panels(g, rows, sum_panels, dim_v, n, slopes)
        add_features(e, n, dots[:rows], grad_z)
        query_slopes(scale, e, n, dots[:rows], z, slopes)
        pull_rows(x, after(grad_q, r0), rows, dim, n, slopes, particles)


@helper(SUMS)
def _pull_keys(kind, shape, keys, kept, sum_panels, work, results, particles):
    """Pull back through the keys and values of a group."""
    _, _, m, dim, dim_v, n = shape
    k, v, grad_k, grad_v, grad_given, weights = keys
    side, scratch, slopes, values, copies, totals = work
    grad_sums, grad_z = results
    flip_panels(grad_sums, n, dim_v, sum_panels)
    for r0 in range(0, m, BLOCK):
        own, x = weights[r0 : min(r0 + BLOCK, m)], after(k, r0)
        rows, given = own.shape[0], grad_given[r0 : r0 + own.shape[0]]
        grads = (after(grad_k, r0), after(grad_v, r0), given)
        if not own.max() > _ZERO:
            clear(grads[0], rows, dim)
            clear(grads[1], rows, dim_v)
            given[:] = _ZERO
            continue
        e = feature_rows(kept, scratch, r0, n)
        if not kept.shape[0]:
            project(x, rows, side, dim, n, e)
            repeat_key_features(e, n, own)
        masked_rows(after(v, r0), own, dim_v, values)
        times_panels(e, rows, grad_sums, n, dim_v, grads[1])
        times_panels(values, rows, sum_panels, dim_v, n, slopes)
        small = (slopes, copies, totals)
        finish_keys(kind, e, x, own, grads, shape, grad_z, small, particles)


@helper(SUMS)
def make_back_panels(particles, size):
    """Make room for the positions of both sides in panels, or of one if it is both."""
    queries = aligned(size)
    return queries, aligned(size) if particles[1].shape[0] else queries


@helper(SUMS)
def load_back(particles, head, sizes, panels):
    """Write the positions of a head, which gradients are multiplied with, as panels."""
    dim, n = sizes
    positions, key_positions = particles[0], particles[1]
    copy_panels(positions, head * n * dim, dim, n, dim, panels[0])
    if key_positions.shape[0]:
        copy_panels(key_positions, head * n * dim, dim, n, dim, panels[1])


@helper(SUMS)
def back_sides(panels, grads, head, sizes):
    """Give positions in panels with the gradients of the particles, for both sides."""
    size, n = sizes[0] * sizes[1], sizes[1]
    queries = (panels[0], part_of(grads[0], head, size), part_of(grads[2], head, n))
    return queries, (
        panels[1],
        part_of(grads[1], head, size),
        part_of(grads[3], head, n),
    )


@entry(SUMS)
def attend_back(options, inputs, shape, kept, outputs, grads, first, end):
    """Pull a gradient back in the groups from `first` to `end`.

    `outputs` holds the output and its gradient, `grads` those of q, k and v, each with
    its places, of positions and offsets of what queries and keys meet, and of the
    logarithms of weights; the last five may be empty. The particles of a head belong to
    one thread: with a gradient of theirs, `first` and `end` are multiples of the batch.
    """
    favor, scale = options[0], _f(options[1])
    q, k, v, particles, _, given = inputs
    out, grad = outputs
    bounds, sizes = shape
    dim, dim_v, n = sizes
    e_q, e_k, inverses, weights, sums, z = kept
    grad_q, grad_k, grad_v, grad_particles, grad_given = grads
    stride, size, batch = row_stride(n), n * dim_v, bounds[0].shape[0] - 1
    query_side, key_side = sides = make_sides(particles, n * dim, n)
    panels = make_back_panels(particles, n * dim)
    sum_panels, grad_sums = aligned(size), aligned(size)
    slopes = rows_at(aligned(BLOCK * stride), 0, stride)
    values = rows_at(aligned(BLOCK * dim_v), 0, dim_v)
    copies = rows_at(aligned(BLOCK * dim), 0, dim)
    dots = aligned(BLOCK)
    grad_z, scratch = aligned(n), aligned(BLOCK * stride)
    for_queries = (query_side, scratch, slopes, values, dots)
    for_keys = (key_side, scratch, slopes, values, copies, dots)
    results, kind = (grad_sums, grad_z), (favor, scale, given.shape[0])
    for group in range(first, end):
        head = group // batch
        if group == first or group % batch == 0:
            load_sides(particles, head, (dim, n), scale, sides)
            load_back(particles, head, (dim, n), panels)
        pulled = back_sides(panels, grad_particles, head, (dim, n))
        flip_panels(part_of(sums, group, size), n, dim_v, sum_panels)
        place, own_shape = (group, batch, 0), group_shape(bounds, group, sizes)
        rows, key_rows = group_rows(bounds[0], group), group_rows(bounds[1], group)
        grad_sums[:], grad_z[:] = _ZERO, _ZERO
        own = rows_of(q, place), rows_of(out, place)
        goals = rows_of(grad, place), rows_of(grad_q, place)
        queries = (*own, *goals, rows_part(inverses, rows, 1))
        features = rows_part(e_q, rows, stride)
        held = (sum_panels, part_of(z, group, n))
        _pull_queries(
            scale, own_shape, queries, features, held, for_queries, results, pulled[0]
        )
        own = rows_of(k, place), rows_of(v, place)
        goals = rows_of(grad_k, place), rows_of(grad_v, place)
        both = rows_part(grad_given, key_rows, 1), rows_part(weights, key_rows, 1)
        keys = (*own, *goals, *both)
        features = rows_part(e_k, key_rows, stride)
        _pull_keys(
            kind, own_shape, keys, features, sum_panels, for_keys, results, pulled[1]
        )
