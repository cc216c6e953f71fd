"""Compiled causal attention: a query sees the keys up to its own position.

Also the quadratic form of short sequences, in which one block is all there is and the
whole *square* of products takes the place of the lower triangle.

Inside a block the lower triangle of `e(q) e(k)'` is formed; what came before is in the
sums S and z. The pass back goes from the last span of a few blocks to the first; in
each, once forwards for the queries and once backwards for the keys. Only the sums
before each span are stored. `_attention_rows.py` tells how arrays are laid out.
"""

import numpy as np

from coulomb.kernels.attention_rows import (
    BLOCK,
    WIDE,
    add_features,
    all_finite,
    clear,
    finish_keys,
    grad_rows,
    half_squares,
    key_features,
    key_row,
    key_slopes,
    mask_rows,
    masked_rows,
    mix_after,
    mix_before,
    project,
    pull_rows,
    query_row,
    row_stride,
    start,
    triangle,
    weighted_rows,
)
from coulomb.kernels.gemm import (
    PANEL,
    copy_panels,
    flip_panels,
    multiply,
    transpose_panels,
)
from coulomb.kernels.jit import SUMS, entry, helper
from coulomb.kernels.math import exp

_f = np.float32
_ZERO, _ONE = _f(0), _f(1)

SPAN = 6 * BLOCK


@helper(SUMS)
def _attend_block(options, v, v0, rows, dim_v, n, features, work, kept):
    """Write numerators over normalisers of a block, and add its keys to S.

    `about` is whether it is a square, the first block, and the last.
    """
    square, first, last = options
    e_q, q0, e_k, k0 = features
    values, products, turned_keys = work
    inverses, weights, sums, out, o0, ro = kept
    stride = row_stride(n)
    transpose_panels(e_k, k0, stride, rows, n, _ONE, turned_keys)
    triangle(square, e_q, q0, stride, turned_keys, n, rows, products)
    weighted_rows(v, v0, weights, rows, dim_v, values)
    right, target = (0, n * PANEL, PANEL, dim_v // PANEL), (o0, ro, PANEL)
    if first:
        clear(out, target, rows, dim_v)
    else:
        multiply(e_q, (q0, stride, 1, rows), sums, right, out, target, n, False)
    right = (0, PANEL, dim_v, dim_v // PANEL)
    mix_before(square, products, rows, values, right, out, target)
    if not last:
        target = (0, PANEL, n * PANEL)
        multiply(e_k, (k0, 1, stride, n), values, right, sums, target, rows, True)
    for r in range(rows):
        total, row = inverses[r], products[r * WIDE :][:rows]
        for s in range(rows):
            total += row[s] * weights[s]
        # A query that no key answers gets zero.
        inverse = _ONE / total if total > _ZERO else _ZERO
        inverses[r] = inverse
        place = o0 + r * ro
        for c in range(place, place + dim_v):
            out[c] *= inverse


@helper(SUMS)
def _attend_group(options, inputs, shape, group, out, work, kept):
    """Attend in one group; give the largest exponent of keys, and if all was finite."""
    favor, square = options
    q, k, v, _, mask = inputs
    batch, length, _, dim, dim_v, n = shape
    panels, alive, scratch_q, scratch_k, sums, z, small = work
    kept_q, kept_k, inverses, weights, states = kept
    q0, k0, v0 = start(q, group, batch), start(k, group, batch), start(v, group, batch)
    o0, stride = start(out, group, batch), row_stride(n)
    high, spread, size, finite = _ZERO, _ZERO, n * (dim_v + 1), True
    if favor:
        least, most = half_squares(k, mask, group, batch, length, dim, weights)
        spread = max(most - least, _ZERO)
        for j in range(length):
            weights[j] = exp(least - weights[j])
    sums[:], z[:] = _ZERO, _ZERO
    for r0 in range(0, length, BLOCK):
        rows = min(BLOCK, length - r0)
        if states.shape[0] and r0 and r0 % SPAN == 0:
            state = states[(r0 // SPAN - 1) * size :][:size]
            state[:n], state[n:] = z, sums
        e_q, eq0 = (kept_q, r0 * stride) if kept_q.shape[0] else (scratch_q, 0)
        e_k, ek0 = (kept_k, r0 * stride) if kept_k.shape[0] else (scratch_k, 0)
        project(q, q0 + r0 * q[1][2], rows, dim, panels, e_q, eq0, n)
        own, part = inverses[r0 : r0 + rows], weights[r0 : r0 + rows]
        for r in range(rows):
            good, own[r] = query_row(e_q, eq0 + r * stride, n, z)
            finite &= good
        mask_rows(mask, group, batch, r0, rows, length, alive)
        project(k, k0 + r0 * k[1][2], rows, dim, panels, e_k, ek0, n)
        largest = key_features(favor, e_k, ek0, n, rows, part, alive, z)
        high = max(high, largest)
        features = (e_q, eq0, e_k, ek0)
        target = (own, part, sums, out[0], o0 + r0 * out[1][2], out[1][2])
        spot, place = (square, r0 == 0, r0 + rows == length), v0 + r0 * v[1][2]
        _attend_block(spot, v, place, rows, dim_v, n, features, small, target)
    return high + spread, finite


@helper(SUMS)
def _part(x, group, size):
    """Take what belongs to a group, or nothing of nothing."""
    return x[group * size : (group + 1) * size] if x.shape[0] else x


@entry(SUMS)
def attend(options, inputs, shape, kept, out, limit, first, end):
    """Attend in the groups from `first` to `end`; give whether nothing was lost.

    Arguments as in `_attention_linear.attend`, but `about` says in the end whether it
    is a square, of at most one block, and `kept` receives features, one over the
    normalisers, weights, and z and S before each span but the first (if not empty).
    """
    favor, scale = options[0], _f(options[1])
    batch, length, _, dim, dim_v, n = shape
    e_q, e_k, inverses, weights, states = kept
    stride = row_stride(n)
    panels, alive = np.empty(n * dim, _f), np.empty(BLOCK, np.bool_)
    scratch_q, scratch_k = np.empty(BLOCK * stride, _f), np.empty(BLOCK * stride, _f)
    sums, z = np.empty(n * dim_v, _f), np.empty(n, _f)
    small = (
        np.empty(BLOCK * dim_v, _f),
        np.empty(BLOCK * WIDE, _f),
        np.empty(BLOCK * n, _f),
    )
    work = (panels, alive, scratch_q, scratch_k, sums, z, small)
    later = (length - 1) // SPAN  # spans after the first
    for group in range(first, end):
        if group == first or group % batch == 0:
            transpose_panels(
                inputs[3], group // batch * n * dim, dim, n, dim, scale, panels
            )
            if not all_finite(panels):
                return False
        own = (
            _part(e_q, group, length * stride),
            _part(e_k, group, length * stride),
            _part(inverses, group, length),
            _part(weights, group, length),
            _part(states, group, later * n * (dim_v + 1)),
        )
        kind = (favor, options[2])
        top, finite = _attend_group(kind, inputs, shape, group, out, work, own)
        if not (finite and top < limit):
            return False
    return True


@helper(SUMS)
def _grad_products(square, v, v0, weights, g, dots, rows, dim, work):
    """Write the gradient of the products of a block: g_r . v_s + c_r for s <= r."""
    values, turned_values, products = work
    masked_rows(v, v0, weights, rows, dim, values)
    transpose_panels(values, 0, dim, rows, dim, _ONE, turned_values)
    triangle(square, g, 0, dim, turned_values, dim, rows, products)
    for r in range(rows):
        end = rows if square else r + 1
        for s in range(r * WIDE, r * WIDE + end):
            products[s] += dots[r]


@helper(SUMS)
def _span_queries(problem, group, span, spots, work, kept, results):
    """Pull back through the queries of a span, from its first block to its last."""
    (square, scale, q, v), shape, (out, grad, grad_q) = problem
    batch, _, _, dim, dim_v, n = shape
    e_q, e_k, shift = spots
    position_panels, slopes, turned_sums, rows_of, dots_of, small = work
    inverses, weights, sums, z = kept
    values, _, products = small
    q0, v0, o0 = (
        start(q, group, batch),
        start(v, group, batch),
        start(out, group, batch),
    )
    g0, gq0, stride = (
        start(grad, group, batch),
        start(grad_q, group, batch),
        row_stride(n),
    )
    for r0 in range(span[0], span[1], BLOCK):
        rows, e0, i0 = min(BLOCK, span[1] - r0), (r0 - shift) * stride, r0 - span[0]
        g, dots, part = rows_of[i0 * dim_v :], dots_of[i0:], weights[r0 : r0 + rows]
        begin = (o0 + r0 * out[1][2], g0 + r0 * grad[1][2])
        grad_rows(out, grad, begin, inverses[r0 : r0 + rows], rows, dim_v, (g, dots))
        place = v0 + r0 * v[1][2]
        _grad_products(square, v, place, part, g, dots, rows, dim_v, small)
        for r in range(rows):
            row = products[r * WIDE :][:rows]
            for s in range(rows):
                row[s] *= part[s]
        target = (0, stride, PANEL)
        if r0 == 0:
            clear(slopes, target, rows, n)
        else:
            flip_panels(sums, n, dim_v, turned_sums)
            left, right = (0, dim_v, 1, rows), (0, dim_v * PANEL, PANEL, n // PANEL)
            multiply(g, left, turned_sums, right, slopes, target, dim_v, False)
        right = (e0, PANEL, stride, n // PANEL)
        mix_before(square, products, rows, e_k, right, slopes, target)
        for r in range(rows):
            slope, own, dot = (
                slopes[r * stride :][:n],
                e_q[e0 + r * stride :][:n],
                dots[r],
            )
            for c in range(n):
                slope[c] = scale * own[c] * (slope[c] + dot * z[c])
        spot = q0 + r0 * q[1][2]
        goal = gq0 + r0 * grad_q[1][2]
        pull_rows(q, spot, grad_q, goal, rows, dim, n, slopes, position_panels, results)
        if r0 + rows == span[1]:
            break
        for r in range(rows):
            add_features(e_k, e0 + r * stride, n, part[r], z)
            for c in range(r * dim_v, (r + 1) * dim_v):
                values[c] *= part[r]
        right, target = (0, PANEL, dim_v, dim_v // PANEL), (0, PANEL, n * PANEL)
        multiply(e_k, (e0, 1, stride, n), values, right, sums, target, rows, True)


@helper(SUMS)
def _span_keys(favor, problem, group, span, spots, work, kept, results):
    """Pull back through the keys of a span, from its last block to its first."""
    (square, scale, k, v), shape, (grad_k, grad_v) = problem
    batch, length, _, dim, dim_v, n = shape
    e_q, e_k, shift = spots
    position_panels, slopes, turned_sums, rows_of, dots_of, small = work
    weights, grad_sums, grad_z, keys, totals, turned_keys = kept
    values, _, products = small
    k0, v0, stride = start(k, group, batch), start(v, group, batch), row_stride(n)
    gk0, gv0 = start(grad_k, group, batch), start(grad_v, group, batch)
    blocks = (span[1] - span[0] + BLOCK - 1) // BLOCK
    for b in range(blocks - 1, -1, -1):
        r0 = span[0] + b * BLOCK
        rows, e0, i0 = min(BLOCK, span[1] - r0), (r0 - shift) * stride, b * BLOCK
        g, dots, part = rows_of[i0 * dim_v :], dots_of[i0:], weights[r0 : r0 + rows]
        last, place = r0 + rows == length, v0 + r0 * v[1][2]
        _grad_products(square, v, place, part, g, dots, rows, dim_v, small)
        target = (0, stride, PANEL)
        if last:
            clear(slopes, target, rows, n)
        else:
            flip_panels(grad_sums, n, dim_v, turned_sums)
            left, right = (0, dim_v, 1, rows), (0, dim_v * PANEL, PANEL, n // PANEL)
            multiply(values, left, turned_sums, right, slopes, target, dim_v, False)
        right = (e0, PANEL, stride, n // PANEL)
        mix_after(square, products, rows, e_q, right, slopes, target)
        key_slopes(favor, scale, e_k, e0, n, rows, part, grad_z, slopes, totals)
        transpose_panels(e_k, e0, stride, rows, n, _ONE, turned_keys)
        triangle(square, e_q, e0, stride, turned_keys, n, rows, products)
        gv = gv0 + r0 * grad_v[1][2]
        right = (0, n * PANEL, PANEL, dim_v // PANEL)
        target = (gv, grad_v[1][2], PANEL)
        left = (e0, stride, 1, rows)
        if last:
            clear(grad_v[0], target, rows, dim_v)
        else:
            multiply(e_k, left, grad_sums, right, grad_v[0], target, n, False)
        right = (0, PANEL, dim_v, dim_v // PANEL)
        mix_after(square, products, rows, g, right, grad_v[0], target)
        place, gk = k0 + r0 * k[1][2], gk0 + r0 * grad_k[1][2]
        masked_rows(k, place, part, rows, dim, keys)
        own = (keys, (0, 0, dim))
        pull_rows(own, 0, grad_k, gk, rows, dim, n, slopes, position_panels, results)
        finish_keys(favor, part, totals, keys, (grad_k, gk, dim), (grad_v, gv, dim_v))
        if r0 == 0:
            break
        target = (0, PANEL, n * PANEL)
        multiply(e_q, (e0, 1, stride, n), g, right, grad_sums, target, rows, True)
        for r in range(rows):
            add_features(e_q, e0 + r * stride, n, dots[r], grad_z)


@helper(SUMS)
def _span_features(inputs, shape, group, span, panels, spots, own):
    """Evaluate the features of a span again."""
    q, k, _, _, _ = inputs
    batch, _, _, dim, _, n = shape
    e_q, e_k, _ = spots
    stride, rows, ones = row_stride(n), span[1] - span[0], np.ones(n, _f)
    q0 = start(q, group, batch) + span[0] * q[1][2]
    k0 = start(k, group, batch) + span[0] * k[1][2]
    project(q, q0, rows, dim, panels, e_q, 0, n)
    project(k, k0, rows, dim, panels, e_k, 0, n)
    for r in range(rows):
        query_row(e_q, r * stride, n, ones)
        if own[span[0] + r] > _ZERO:
            key_row(e_k, r * stride, n)
        else:
            e_k[r * stride :][:n] = _ZERO


@entry(SUMS)
def attend_back(options, inputs, shape, kept, outputs, grads, first, end):
    """Pull a gradient back; arguments as in `_attention_linear.attend_back`."""
    favor, scale = options[0], _f(options[1])
    q, k, v, positions, _ = inputs
    batch, length, _, dim, dim_v, n = shape
    e_q, e_k, inverses, weights, states = kept
    grad_q, grad_k, grad_v, grad_positions = grads
    stride, size = row_stride(n), n * (dim_v + 1)
    panels, position_panels = np.empty(n * dim, _f), np.empty(n * dim, _f)
    sums, grad_sums = np.empty(n * dim_v, _f), np.empty(n * dim_v, _f)
    z, grad_z = np.empty(n, _f), np.empty(n, _f)
    deep = 0 if e_q.shape[0] else min(SPAN, length)
    scratch_q, scratch_k = np.empty(deep * stride, _f), np.empty(deep * stride, _f)
    small = (
        np.empty(BLOCK * dim_v, _f),
        np.empty(BLOCK * dim_v, _f),
        np.empty(BLOCK * WIDE, _f),
    )
    work = (
        position_panels,
        np.empty(BLOCK * stride, _f),
        np.empty(n * dim_v, _f),
        np.empty(SPAN * dim_v, _f),
        np.empty(SPAN, _f),
        small,
    )
    keys, totals = np.empty(BLOCK * dim, _f), np.empty(BLOCK, _f)
    turned_keys = np.empty(BLOCK * n, _f)
    spans = (length + SPAN - 1) // SPAN
    for group in range(first, end):
        begin = group // batch * n * dim
        if group == first or group % batch == 0:
            transpose_panels(positions, begin, dim, n, dim, scale, panels)
            copy_panels(positions, begin, dim, n, dim, position_panels)
        own = _part(grad_positions, group // batch, n * dim)
        weight = _part(weights, group, length)
        grad_sums[:], grad_z[:] = _ZERO, _ZERO
        for s in range(spans - 1, -1, -1):
            span = (s * SPAN, min((s + 1) * SPAN, length))
            if s:
                state = states[(group * (spans - 1) + s - 1) * size :][:size]
                z[:], sums[:] = state[:n], state[n:]
            else:
                z[:], sums[:] = _ZERO, _ZERO
            kept_q, kept_k = (
                _part(e_q, group, length * stride),
                _part(e_k, group, length * stride),
            )
            spots = (kept_q, kept_k, 0)
            if deep:
                spots = (scratch_q, scratch_k, span[0])
                _span_features(inputs, shape, group, span, panels, spots, weight)
            problem = (
                (options[2], scale, q, v),
                shape,
                (outputs[0], outputs[1], grad_q),
            )
            sides = (_part(inverses, group, length), weight, sums, z)
            _span_queries(problem, group, span, spots, work, sides, own)
            keyed = ((options[2], scale, k, v), shape, (grad_k, grad_v))
            others = (weight, grad_sums, grad_z, keys, totals, turned_keys)
            _span_keys(favor, keyed, group, span, spots, work, others, own)
