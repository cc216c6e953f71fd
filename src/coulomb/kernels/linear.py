"""Compiled linear attention: every query sees every real key.

`_attention_rows.py` tells what is computed, and how arrays are laid out.
"""

import numpy as np

from coulomb.kernels.attention_rows import (
    BLOCK,
    all_finite,
    finish_keys,
    grad_rows,
    half_squares,
    key_features,
    key_row,
    key_slopes,
    mask_rows,
    masked_rows,
    project,
    pull_rows,
    query_row,
    row_stride,
    start,
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


@helper(SUMS)
def _sum_keys(favor, k, v, mask, shape, group, work, kept):
    """Sum over the keys of a group; give the largest exponent and the range of c."""
    batch, _, m, dim, dim_v, n = shape
    panels, values, alive, scratch = work
    features, weights, sums, z = kept
    k0, v0, spread, top = start(k, group, batch), start(v, group, batch), _ZERO, _ZERO
    if favor:
        least, most = half_squares(k, mask, group, batch, m, dim, weights)
        spread = max(most - least, _ZERO)
        for j in range(m):
            weights[j] = exp(least - weights[j])
    stride = row_stride(n)
    for r0 in range(0, m, BLOCK):
        rows = min(BLOCK, m - r0)
        if not mask_rows(mask, group, batch, r0, rows, m, alive):
            weights[r0 : r0 + rows] = _ZERO
            continue
        e, e0 = (features, r0 * stride) if features.shape[0] else (scratch, 0)
        project(k, k0 + r0 * k[1][2], rows, dim, panels, e, e0, n)
        part = weights[r0 : r0 + rows]
        top = max(top, key_features(favor, e, e0, n, rows, part, alive, z))
        weighted_rows(v, v0 + r0 * v[1][2], part, rows, dim_v, values)
        right = (0, PANEL, dim_v, dim_v // PANEL)
        target = (0, PANEL, n * PANEL)
        multiply(e, (e0, 1, stride, n), values, right, sums, target, rows, True)
    return top, spread


@helper(SUMS)
def _apply_queries(q, out, shape, group, work, kept):
    """Apply the sums to the queries of a group; give whether all was finite."""
    batch, length, _, dim, dim_v, n = shape
    panels, scratch = work
    features, inverses, sums, z = kept
    q0, o0 = start(q, group, batch), start(out, group, batch)
    stride, finite = row_stride(n), True
    for r0 in range(0, length, BLOCK):
        rows = min(BLOCK, length - r0)
        e, e0 = (features, r0 * stride) if features.shape[0] else (scratch, 0)
        project(q, q0 + r0 * q[1][2], rows, dim, panels, e, e0, n)
        for r in range(rows):
            good, total = query_row(e, e0 + r * stride, n, z)
            finite &= good
            # A query that no key answers gets zero.
            inverses[r0 + r] = _ONE / total if total > _ZERO else _ZERO
        right = (0, n * PANEL, PANEL, dim_v // PANEL)
        begin = o0 + r0 * out[1][2]
        target = (begin, out[1][2], PANEL)
        multiply(e, (e0, stride, 1, rows), sums, right, out[0], target, n, False)
        for r in range(rows):
            place, inverse = begin + r * out[1][2], inverses[r0 + r]
            row = out[0][place : place + dim_v]
            for c in range(dim_v):
                row[c] *= inverse
    return finite


@entry(SUMS)
def attend(options, inputs, shape, kept, out, limit, first, end):
    """Attend in the groups from `first` to `end`; give whether nothing was lost.

    `about` is whether weights are favor's and the factor of the particles; `inputs`
    holds q, k, v, each with its distances, the particles and the mask, which may be
    empty; `shape` is the batch, queries, keys, dim, dim_v and features. `kept` receives
    features of queries and keys (if not empty), one over the normalisers, weights, S
    and z.
    """
    favor, scale = options[0], _f(options[1])
    q, k, v, positions, mask = inputs
    batch, length, m, dim, dim_v, n = shape
    e_q, e_k, inverses, weights, sums, z = kept
    stride, size = row_stride(n), n * dim_v
    panels = np.empty(n * dim, _f)
    values, alive = np.empty(BLOCK * dim_v, _f), np.empty(BLOCK, np.bool_)
    scratch = np.empty(BLOCK * stride, _f)
    for group in range(first, end):
        if group == first or group % batch == 0:
            transpose_panels(
                positions, group // batch * n * dim, dim, n, dim, scale, panels
            )
            if not all_finite(panels):
                return False
        total, part = z[group * n : (group + 1) * n], sums[group * size :][:size]
        total[:], part[:] = _ZERO, _ZERO
        own = weights[group * m : (group + 1) * m]
        kept_k = e_k[group * m * stride :][: m * stride] if e_k.shape[0] else e_k
        work = (panels, values, alive, scratch)
        high, spread = _sum_keys(
            favor, k, v, mask, shape, group, work, (kept_k, own, part, total)
        )
        if not high + spread < limit:
            return False
        own = inverses[group * length : (group + 1) * length]
        kept_q = (
            e_q[group * length * stride :][: length * stride] if e_q.shape[0] else e_q
        )
        held = (kept_q, own, part, total)
        if not _apply_queries(q, out, shape, group, (panels, scratch), held):
            return False
    return True


@helper(SUMS)
def _pull_queries(q, out, grad, grad_q, shape, group, work, kept, results):
    """Pull back through the queries of a group, and add to the gradients of S and z."""
    batch, length, _, dim, dim_v, n = shape
    scale, panels, turned_sums, position_panels, scratch, slopes, small = work
    features, inverses, z = kept
    grad_sums, grad_z, grad_positions = results
    g_rows, dots = small
    stride = row_stride(n)
    q0, o0 = start(q, group, batch), start(out, group, batch)
    g0, gq0 = start(grad, group, batch), start(grad_q, group, batch)
    ones = np.ones(n, _f)
    for r0 in range(0, length, BLOCK):
        rows = min(BLOCK, length - r0)
        e, e0, place = features, r0 * stride, q0 + r0 * q[1][2]
        if not features.shape[0]:
            e, e0 = scratch, 0
            project(q, place, rows, dim, panels, e, e0, n)
            for r in range(rows):
                query_row(e, r * stride, n, ones)
        begin = (o0 + r0 * out[1][2], g0 + r0 * grad[1][2])
        part = inverses[r0 : r0 + rows]
        grad_rows(out, grad, begin, part, rows, dim_v, small)
        right = (0, PANEL, dim_v, dim_v // PANEL)
        target = (0, PANEL, n * PANEL)
        multiply(e, (e0, 1, stride, n), g_rows, right, grad_sums, target, rows, True)
        right = (0, dim_v * PANEL, PANEL, n // PANEL)
        target = (0, stride, PANEL)
        left = (0, dim_v, 1, rows)
        multiply(g_rows, left, turned_sums, right, slopes, target, dim_v, False)
        for r in range(rows):
            slope, own = slopes[r * stride :][:n], e[e0 + r * stride :][:n]
            dot = dots[r]
            for c in range(n):
                grad_z[c] += dot * own[c]
                slope[c] = scale * own[c] * (slope[c] + dot * z[c])
        pull_rows(
            q, place, grad_q, gq0 + r0 * grad_q[1][2], rows, dim, n, slopes,
            position_panels, grad_positions,
        )  # fmt: skip


@helper(SUMS)
def _pull_keys(favor, k, v, grad_k, grad_v, shape, group, work, kept, results):
    """Pull back through the keys and values of a group."""
    batch, _, m, dim, dim_v, n = shape
    scale, panels, turned_sums, position_panels, scratch, slopes, small = work
    features, weights = kept
    grad_sums, grad_z, grad_positions = results
    values, keys, totals = small
    stride = row_stride(n)
    k0, v0 = start(k, group, batch), start(v, group, batch)
    gk0, gv0 = start(grad_k, group, batch), start(grad_v, group, batch)
    flip_panels(grad_sums, n, dim_v, turned_sums)
    for r0 in range(0, m, BLOCK):
        rows = min(BLOCK, m - r0)
        own = weights[r0 : r0 + rows]
        e, e0, place = features, r0 * stride, k0 + r0 * k[1][2]
        gk, gv = gk0 + r0 * grad_k[1][2], gv0 + r0 * grad_v[1][2]
        if not own.max() > _ZERO:
            for r in range(rows):
                grad_k[0][gk + r * grad_k[1][2] :][:dim] = _ZERO
                grad_v[0][gv + r * grad_v[1][2] :][:dim_v] = _ZERO
            continue
        if not features.shape[0]:
            e, e0 = scratch, 0
            project(k, place, rows, dim, panels, e, e0, n)
            for r in range(rows):
                if own[r] > _ZERO:
                    key_row(e, r * stride, n)
        masked_rows(v, v0 + r0 * v[1][2], own, rows, dim_v, values)
        masked_rows(k, place, own, rows, dim, keys)
        for r in range(rows):
            if not own[r] > _ZERO:
                e[e0 + r * stride :][:n] = _ZERO
        right = (0, n * PANEL, PANEL, dim_v // PANEL)
        target = (gv, grad_v[1][2], PANEL)
        multiply(
            e, (e0, stride, 1, rows), grad_sums, right, grad_v[0], target, n, False
        )
        right = (0, dim_v * PANEL, PANEL, n // PANEL)
        left, target = (0, dim_v, 1, rows), (0, stride, PANEL)
        multiply(values, left, turned_sums, right, slopes, target, dim_v, False)
        key_slopes(favor, scale, e, e0, n, rows, own, grad_z, slopes, totals)
        pull_rows(
            (keys, (0, 0, dim)), 0, grad_k, gk, rows, dim, n, slopes,
            position_panels, grad_positions,
        )  # fmt: skip
        finish_keys(favor, own, totals, keys, (grad_k, gk, dim), (grad_v, gv, dim_v))


@entry(SUMS)
def attend_back(options, inputs, shape, kept, outputs, grads, first, end):
    """Pull a gradient back in the groups from `first` to `end`.

    `outputs` holds the output and its gradient, `grads` those of q, k and v, each with
    its distances, and of the particles, which may be empty. The particles of a head
    belong to one thread: with a gradient of theirs, `first` and `end` are multiples of
    the batch.
    """
    favor, scale = options[0], _f(options[1])
    q, k, v, positions, _ = inputs
    batch, length, m, dim, dim_v, n = shape
    e_q, e_k, inverses, weights, sums, z = kept
    grad_q, grad_k, grad_v, grad_positions = grads
    stride, size = row_stride(n), n * dim_v
    panels, position_panels = np.empty(n * dim, _f), np.empty(n * dim, _f)
    turned_sums, grad_sums, grad_z = (
        np.empty(size, _f),
        np.empty(size, _f),
        np.empty(n, _f),
    )
    scratch, slopes = np.empty(BLOCK * stride, _f), np.empty(BLOCK * stride, _f)
    rows = np.empty(BLOCK * dim_v, _f)
    dots, keys = np.empty(BLOCK, _f), np.empty(BLOCK * dim, _f)
    for group in range(first, end):
        begin = group // batch * n * dim
        if group == first or group % batch == 0:
            transpose_panels(positions, begin, dim, n, dim, scale, panels)
            copy_panels(positions, begin, dim, n, dim, position_panels)
        own = grad_positions
        if own.shape[0]:
            own = own[begin : begin + n * dim]
        flip_panels(sums[group * size :][:size], n, dim_v, turned_sums)
        grad_sums[:], grad_z[:] = _ZERO, _ZERO
        results = (grad_sums, grad_z, own)
        work = (scale, panels, turned_sums, position_panels, scratch, slopes)
        kept_q = (
            e_q[group * length * stride :][: length * stride] if e_q.shape[0] else e_q
        )
        _pull_queries(
            q, outputs[0], outputs[1], grad_q, shape, group,
            (*work, (rows, dots)),
            (kept_q, inverses[group * length :][:length], z[group * n :][:n]),
            results,
        )  # fmt: skip
        kept_k = e_k[group * m * stride :][: m * stride] if e_k.shape[0] else e_k
        _pull_keys(
            favor, k, v, grad_k, grad_v, shape, group, (*work, (rows, keys, dots)),
            (kept_k, weights[group * m :][:m]), results,
        )  # fmt: skip
