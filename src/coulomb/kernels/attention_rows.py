"""Compiled steps of attention with exponential features, on one block of rows.

With `e = exp(w.x)` of queries and keys and a weight `c_j` of each key,
`a_i = e(q_i)' S / e(q_i)' z`, `S = sum_j e(k_j) c_j v_j'`, `z = sum_j e(k_j) c_j`. The
weight is `exp(-|k|^2 / 2)` up to a factor, or one over the sum of the features, or zero
where a mask removes the key.

The exponents of a query are shifted by their largest, which cancels; those of keys are
not. The passes forwards look at the largest exponents of keys; whoever calls throws the
result away if they leave the range in which nothing is lost, or if anything is not
finite.

Inputs are flat arrays with the distances of their sequences, heads and rows. A *group*
is a head of a sequence; the sequences of a head follow one another. The sums S are kept
in panels of 16 columns, `(group, panel, feature, 16)`.
"""

import numpy as np

from coulomb.kernels.gemm import PANEL, multiply
from coulomb.kernels.jit import SUMS, helper
from coulomb.kernels.math import exp, row_max

_f = np.float32
_ZERO, _ONE, _HALF, _HUGE = _f(0), _f(1), _f(0.5), _f(1e30)

# Rows of a block: its features and one copy of them stay in the second cache.
BLOCK = 96
WIDE = BLOCK + PANEL  # the distance of the rows of a triangle of products
_STEP = 24  # rows whose part of a triangle is taken as a rectangle


@helper(SUMS)
def row_stride(features):
    """Give the distance of rows of features; a power of two would share cache lines."""
    return features + PANEL


@helper(SUMS)
def start(x, group, batch):
    """Where the rows of a group begin; `x` holds an array and its distances."""
    return (group % batch) * x[1][0] + (group // batch) * x[1][1]


@helper(SUMS)
def _alive(mask, group, batch, j, m):
    return mask.shape[0] == 0 or mask[(group % batch) * m + j]


# A nan in an input is in all exponents of its row: the first element tells.
@helper(SUMS | {"nnan"})
def _largest_size(row):
    top = _ZERO
    for c in range(row.shape[0]):
        top = max(top, abs(row[c]))
    return top


@helper(SUMS)
def query_row(e, e0, n, z):
    """Take exponentials over the largest; give if all is finite, and row . z."""
    row, total = e[e0 : e0 + n], _ZERO
    top = row_max(row)
    finite = abs(row[0]) < _HUGE and top < _HUGE
    for c in range(n):
        row[c] = exp(row[c] - top)
        total += row[c] * z[c]
    return finite, total


@helper(SUMS)
def key_row(e, e0, n):
    """Take exponentials; give the size of the largest exponent, and their sum."""
    row, total = e[e0 : e0 + n], _ZERO
    top = _largest_size(row) if abs(row[0]) < _HUGE else _f(np.inf)
    for c in range(n):
        row[c] = exp(row[c])
        total += row[c]
    return top, total


@helper(SUMS)
def all_finite(x):
    """Say whether there is no nan and no infinity."""
    total = _ZERO
    for c in range(x.shape[0]):
        total += x[c] * _ZERO
    return total == _ZERO


@helper(SUMS)
def half_squares(k, mask, group, batch, m, dim, halves):
    """Write |k_j|^2 / 2 of a group; give the least and the largest."""
    rows, k0, least, most = k[0], start(k, group, batch), _f(np.inf), _f(-np.inf)
    for j in range(m):
        half = _ZERO
        if _alive(mask, group, batch, j, m):
            place = k0 + j * k[1][2]
            row = rows[place : place + dim]
            for c in range(dim):
                half += row[c] * row[c]
            half *= _HALF
            least, most = min(least, half), max(most, half)
        halves[j] = half
    return least, most


@helper(SUMS)
def project(x, x0, rows, dim, panels, e, e0, n):
    """Project rows on the particles, in panels."""
    left, right = (x0, x[1][2], 1, rows), (0, dim * PANEL, PANEL, n // PANEL)
    multiply(x[0], left, panels, right, e, (e0, row_stride(n), PANEL), dim, False)


@helper(SUMS)
def weighted_rows(x, x0, weights, rows, dim, out):
    """Copy rows times their weights; what a mask removes may be anything, even nan."""
    for r in range(rows):
        place, weight = x0 + r * x[1][2], weights[r]
        for c in range(dim):
            product = weight * x[0][place + c]
            out[r * dim + c] = product if weight > _ZERO else _ZERO


@helper(SUMS)
def add_features(e, e0, n, weight, z):
    """Add the features of a row, times its weight, to z."""
    row = e[e0 : e0 + n]
    for c in range(n):
        z[c] += weight * row[c]


@helper(SUMS)
def key_features(favor, e, e0, n, rows, weights, alive, z):
    """Turn exponents of keys into features; add to z; give the largest exponent."""
    top, stride = _ZERO, row_stride(n)
    for r in range(rows):
        place = e0 + r * stride
        if not alive[r]:
            e[place : place + n] = _ZERO
            weights[r] = _ZERO
            continue
        largest, total = key_row(e, place, n)
        top = max(top, largest)
        if not favor:
            weights[r] = _ONE / total
        add_features(e, place, n, weights[r], z)
    return top


@helper(SUMS)
def mask_rows(mask, group, batch, r0, rows, m, out):
    """Write which keys of a block there are; give whether there are any."""
    some = False
    for r in range(rows):
        out[r] = _alive(mask, group, batch, r0 + r, m)
        some |= out[r]
    return some


@helper(SUMS)
def grad_rows(out, grad, place, inverses, rows, dim, work):
    """Differentiate the ratio: rows g / D, and -(g . out) / D."""
    g_rows, dots = work
    o0, g0 = place
    for r in range(rows):
        inverse, total = inverses[r], _ZERO
        y = out[0][o0 + r * out[1][2] :][:dim]
        g = grad[0][g0 + r * grad[1][2] :][:dim]
        row = g_rows[r * dim : (r + 1) * dim]
        for c in range(dim):
            row[c] = g[c] * inverse
        for c in range(dim):
            total -= row[c] * y[c]
        dots[r] = total


@helper(SUMS)
def pull_rows(
    x, place, grad_x, target, rows, dim, n, slopes, position_panels, grad_positions
):
    """Turn gradients of exponents into those of inputs and, if wanted, particles."""
    stride = row_stride(n)
    right = (0, n * PANEL, PANEL, dim // PANEL)
    goal = (target, grad_x[1][2], PANEL)
    left = (0, stride, 1, rows)
    multiply(slopes, left, position_panels, right, grad_x[0], goal, n, False)
    if grad_positions.shape[0]:
        right = (place, PANEL, x[1][2], dim // PANEL)
        left = (0, 1, stride, n)
        goal = (0, dim, PANEL)
        multiply(slopes, left, x[0], right, grad_positions, goal, rows, True)


@helper(SUMS)
def key_slopes(favor, scale, e, e0, n, rows, weights, grad_z, slopes, totals):
    """Turn gradients of the features of keys into those of their exponents."""
    stride = row_stride(n)
    for r in range(rows):
        slope, own = slopes[r * stride :][:n], e[e0 + r * stride :][:n]
        weight, total = weights[r], _ZERO
        for c in range(n):
            slope[c] = weight * own[c] * (slope[c] + grad_z[c])
            total += slope[c]
        totals[r] = total
        if not favor:
            less = total * weight
            for c in range(n):
                slope[c] = scale * (slope[c] - less * own[c])


@helper(SUMS)
def masked_rows(x, x0, weights, rows, dim, out):
    """Copy rows; what a mask removes becomes zero."""
    for r in range(rows):
        place, alive = x0 + r * x[1][2], weights[r] > _ZERO
        for c in range(dim):
            out[r * dim + c] = x[0][place + c] if alive else _ZERO


@helper(SUMS)
def finish_keys(favor, weights, totals, keys, for_keys, for_values):
    """Put the weights of keys into the gradients of keys and values."""
    grad_k, gk, dim = for_keys
    grad_v, gv, dim_v = for_values
    for r in range(weights.shape[0]):
        row, weight = grad_v[0][gv + r * grad_v[1][2] :][:dim_v], weights[r]
        for c in range(dim_v):
            row[c] *= weight
        if favor:
            row, total = grad_k[0][gk + r * grad_k[1][2] :][:dim], totals[r]
            key = keys[r * dim : (r + 1) * dim]
            for c in range(dim):
                row[c] -= total * key[c]


@helper(SUMS)
def triangle(square, a, a0, stride, panels, count, rows, out):
    """Multiply rows: out[r, s] = a_r . b_s for s <= r, else zero, unless `square`."""
    for p in range(0, rows, PANEL):
        r = 0 if square else p
        left = (a0 + r * stride, stride, 1, rows - r)
        right = (p * count, 0, PANEL, 1)
        target = (r * WIDE + p, WIDE, 0)
        multiply(a, left, panels, right, out, target, count, False)
    if not square:
        for r in range(rows):
            out[r * WIDE + r + 1 : r * WIDE + rows] = _ZERO


@helper(SUMS)
def mix_before(square, products, rows, b, right, out, target):
    """Add the sum over s <= r, or all s, of products[r, s] b_s to row r."""
    o0, ro, po = target
    for i in range(0, rows, _STEP):
        end = min(i + _STEP, rows)
        left, goal = (i * WIDE, WIDE, 1, end - i), (o0 + i * ro, ro, po)
        count = rows if square else end
        multiply(products, left, b, right, out, goal, count, True)


@helper(SUMS)
def mix_after(square, products, rows, b, right, out, target):
    """Add the sum over r >= s, or all r, of products[r, s] b_r to row s."""
    o0, ro, po = target
    b0, pb, kb, panels = right
    for i in range(0, rows, _STEP):
        r = 0 if square else i
        left = (r * WIDE + i, 1, WIDE, min(_STEP, rows - i))
        along, goal = (b0 + r * kb, pb, kb, panels), (o0 + i * ro, ro, po)
        multiply(products, left, b, along, out, goal, rows - r, True)


@helper(SUMS)
def clear(out, target, rows, columns):
    """Make rows zero."""
    for r in range(rows):
        place = target[0] + r * target[1]
        out[place : place + columns] = _ZERO
