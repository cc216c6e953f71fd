"""Compiled causal attention: a query sees the keys up to its own position.

Also the quadratic form of short sequences, in which one block is all there is and the
whole *square* of products takes the place of the lower triangle; and decoding, which
adds one token to the sums of those before it.

Inside a block the lower triangle of `e(q) e(k)'` is formed; what came before is in the
sums S and z. The pass back goes from the last span of a few blocks to the first; in
each, once forwards for the queries and once backwards for the keys. Only the sums
before each span are stored. `linear.py` tells how arrays are laid out.
"""

import math
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from coulomb.kernels.gemm import (
    PANEL,
    aligned,
    flip_panels,
    multiply,
    transpose_panels,
)
from coulomb.kernels.gemm import products as row_products
from coulomb.kernels.jit import SUMS, entry, helper
from coulomb.kernels.linear import (
    BLOCK,
    add_features,
    add_outer,
    after,
    back_sides,
    clear,
    feature_rows,
    finish_keys,
    grad_rows,
    group_rows,
    group_shape,
    key_features,
    key_weights,
    load_back,
    load_sides,
    longest,
    make_back_panels,
    make_sides,
    mask_rows,
    masked_rows,
    normalise,
    project,
    pull_rows,
    query_features,
    query_slopes,
    repeat_key_features,
    row_of,
    row_stride,
    rows_at,
    rows_of,
    rows_part,
    times_panels,
    weighted_rows,
)
from coulomb.kernels.math import exp, exp_row

_f = np.float32
_ZERO, _ONE, _HALF = _f(0), _f(1), _f(0.5)

SPAN = 6 * BLOCK
_WIDE = BLOCK + PANEL  # the distance of the rows of a triangle of products
_STEP = 24  # rows whose part of a triangle is taken as a rectangle


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
def _attend_block(place, features, v, out, sides, sums, shape, work):
    """Write numerators over normalisers of a block, and add its keys to S.

    `place` is whether it is a square, the first block, and the last.
    """
    square, first, last = place
    e_q, e_k = features
    inverses, weights = sides
    _, _, _, _, dim_v, n = shape
    values, products, key_panels = work
    rows = weights.shape[0]
    transpose_panels(e_k[0], e_k[1], e_k[2], rows, n, _ONE, key_panels)
    _triangle(square, e_q, key_panels, n, rows, products)
    weighted_rows(v, weights, dim_v, values)
    if first:
        clear(out, rows, dim_v)
    else:
        times_panels(e_q, rows, sums, n, dim_v, out)
    _mix_before(square, products, rows, values, dim_v, out)
    if not last:
        add_outer(e_k, n, rows, values, dim_v, sums)
    for r in range(rows):
        total, row = inverses[r], products[r * _WIDE :][:rows]
        for s in range(rows):
            total += row[s] * weights[s]
        inverses[r] = total
    normalise(out, dim_v, inverses)


@helper(SUMS)
def _attend_group(options, shape, sides, kept, work):
    """Attend in one group; give the largest exponent of keys, and if all was finite."""
    favor, square = options
    _, length, _, dim, dim_v, n = shape
    q, k, v, out, alive, given = sides
    kept_q, kept_k, inverses, weights, states = kept
    (query_side, key_side), scratch_q, scratch_k, sums, z, small = work
    top, size, finite = _ZERO, n * (dim_v + 1), True
    spread = key_weights(favor, k, alive, dim, given, weights)
    sums[:], z[:] = _ZERO, _ZERO
    for r0 in range(0, length, BLOCK):
        end = min(r0 + BLOCK, length)
        if states.shape[0] and r0 and r0 % SPAN == 0:
            state = states[(r0 // SPAN - 1) * size :][:size]
            state[:n], state[n:] = z, sums
        e_q = feature_rows(kept_q, scratch_q, r0, n)
        e_k = feature_rows(kept_k, scratch_k, r0, n)
        project(after(q, r0), end - r0, query_side, dim, n, e_q)
        finite &= query_features(e_q, n, z, inverses[r0:end])
        project(after(k, r0), end - r0, key_side, dim, n, e_k)
        own = weights[r0:end]
        top = max(top, key_features(favor, e_k, n, own, alive[r0:end], z))
        _attend_block(
            (square, r0 == 0, end == length),
            (e_q, e_k),
            after(v, r0),
            after(out, r0),
            (inverses[r0:end], own),
            sums,
            shape,
            small,
        )
    return top + spread, finite


@entry(SUMS)
def attend(options, inputs, shape, kept, out, limit, first, end):
    """Attend in the groups from `first` to `end`; give whether nothing was lost.

    Arguments as in `linear.attend`, but `options` says in the end whether it is a
    square, of at most one block; `shape` has in the end where the states of sequences
    begin and end, one for each span but the first; and `kept` receives features, one
    over the normalisers, weights, and z and S before these spans (if not empty).
    """
    favor, scale, square = options[0], _f(options[1]), options[2]
    q, k, v, particles, mask, given = inputs
    bounds, sizes, spans = shape
    dim, dim_v, n = sizes
    e_q, e_k, inverses, weights, states = kept
    stride, batch = row_stride(n), bounds[0].shape[0] - 1
    all_alive = np.empty(longest(bounds[1]), np.bool_)
    scratch_q, scratch_k = aligned(BLOCK * stride), aligned(BLOCK * stride)
    sums, z = aligned(n * dim_v), aligned(n)
    values = rows_at(aligned(BLOCK * dim_v), 0, dim_v)
    small = (values, aligned(BLOCK * _WIDE), aligned(BLOCK * n))
    both = make_sides(particles, n * dim, n)
    work = (both, scratch_q, scratch_k, sums, z, small)
    for group in range(first, end):
        begins = group == first or group % batch == 0
        if begins and not load_sides(particles, group // batch, (dim, n), scale, both):
            return False
        rows, later = group_rows(bounds[0], group), group_rows(spans, group)
        own = (
            rows_part(e_q, rows, stride),
            rows_part(e_k, rows, stride),
            rows_part(inverses, rows, 1),
            rows_part(weights, rows, 1),
            rows_part(states, later, n * (dim_v + 1)),
        )
        alive = all_alive[: rows[1] - rows[0]]
        mask_rows(mask, bounds[1][group % batch], alive)
        place, own_shape = (group, batch, 0), group_shape(bounds, group, sizes)
        left = rows_of(q, place), rows_of(k, place)
        right = rows_of(v, place), rows_of(out, place)
        sides = (*left, *right, alive, rows_part(given, rows, 1))
        top, finite = _attend_group((favor, square), own_shape, sides, own, work)
        if not (finite and top < limit):
            return False
    return True


@helper(SUMS)
def _grad_products(square, v, weights, g, dots, dim, work):
    """Write the gradient of the products of a block: g_r . v_s + c_r for s <= r."""
    values, value_panels, products = work
    rows = weights.shape[0]
    masked_rows(v, weights, dim, values)
    transpose_panels(values[0], 0, dim, rows, dim, _ONE, value_panels)
    _triangle(square, g, value_panels, dim, rows, products)
    for r in range(rows):
        end = rows if square else r + 1
        for s in range(r * _WIDE, r * _WIDE + end):
            products[s] += dots[r]


@helper(SUMS)
def _span_queries(options, shape, queries, features, own, held, work, particles):
    """Pull back through the queries of a span, from its first block to its last."""
    square, scale, first = options
    _, _, _, dim, dim_v, n = shape
    q, v, out, grad, grad_q = queries
    inverses, weights = own
    sums, z = held
    slopes, sum_panels, g_rows, all_dots, small = work
    values, _, products = small
    size = weights.shape[0]
    for r0 in range(0, size, BLOCK):
        end = min(r0 + BLOCK, size)
        rows, part, dots = end - r0, weights[r0:end], all_dots[r0:end]
        e_q, e_k = after(features[0], r0), after(features[1], r0)
        g, above = after(g_rows, r0), inverses[r0:end]
        grad_rows(after(out, r0), after(grad, r0), above, dim_v, g, dots)
        _grad_products(square, after(v, r0), part, g, dots, dim_v, small)
        for r in range(rows):
            row = products[r * _WIDE :][:rows]
            for s in range(rows):
                row[s] *= part[s]
        if first and r0 == 0:
            clear(slopes, rows, n)
        else:
            flip_panels(sums, n, dim_v, sum_panels)
            times_panels(g, rows, sum_panels, dim_v, n, slopes)
        _mix_before(square, products, rows, e_k, n, slopes)
        query_slopes(scale, e_q, n, dots, z, slopes)
        pull_rows(after(q, r0), after(grad_q, r0), rows, dim, n, slopes, particles)
        if end == size:
            break
        add_features(e_k, n, part, z)
        for r in range(rows):
            row, weight = row_of(values, r, dim_v), part[r]
            for c in range(dim_v):
                row[c] *= weight
        add_outer(e_k, n, rows, values, dim_v, sums)


@helper(SUMS)
def _span_keys(options, shape, keys, features, weights, held, work, spare, particles):
    """Pull back through the keys of a span, from its last block to its first."""
    kind, square, first, last = options
    _, _, _, _, dim_v, n = shape
    k, v, grad_k, grad_v, grad_given = keys
    grad_sums, grad_z = held
    slopes, sum_panels, g_rows, all_dots, small = work
    copies, totals, key_panels = spare
    values, _, products = small
    size = weights.shape[0]
    for b in range((size + BLOCK - 1) // BLOCK - 1, -1, -1):
        r0, end = b * BLOCK, min((b + 1) * BLOCK, size)
        rows, part, dots = end - r0, weights[r0:end], all_dots[r0:end]
        e_q, e_k = after(features[0], r0), after(features[1], r0)
        g, given = after(g_rows, r0), grad_given[r0:end]
        grads = (after(grad_k, r0), after(grad_v, r0), given)
        _grad_products(square, after(v, r0), part, g, dots, dim_v, small)
        if last and end == size:
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
        finish_keys(kind, e_k, x, part, grads, shape, grad_z, tools, particles)
        if first and r0 == 0:
            break
        add_outer(e_q, n, rows, g, dim_v, grad_sums)
        add_features(e_q, n, dots, grad_z)


@entry(SUMS)
def attend_back(options, inputs, shape, kept, outputs, grads, first, end):
    """Pull a gradient back; arguments as in `linear.attend_back` and `attend`."""
    favor, scale, square = options[0], _f(options[1]), options[2]
    q, k, v, particles, _, given = inputs
    bounds, sizes, spans = shape
    dim, dim_v, n = sizes
    e_q, e_k, inverses, weights, states = kept
    grad_q, grad_k, grad_v, grad_particles, grad_given = grads
    stride, size, batch = row_stride(n), n * (dim_v + 1), bounds[0].shape[0] - 1
    sums, grad_sums = aligned(n * dim_v), aligned(n * dim_v)
    z, grad_z, ones = aligned(n), aligned(n), np.ones(n, _f)
    deep = 0 if e_q.shape[0] else min(SPAN, longest(bounds[0]))
    scratch_q, scratch_k = aligned(deep * stride), aligned(deep * stride)
    values = rows_at(aligned(BLOCK * dim_v), 0, dim_v)
    small = (values, aligned(BLOCK * dim_v), aligned(BLOCK * _WIDE))
    slopes = rows_at(aligned(BLOCK * stride), 0, stride)
    g_rows, dots = rows_at(aligned(SPAN * dim_v), 0, dim_v), aligned(SPAN)
    work = (slopes, aligned(n * dim_v), g_rows, dots, small)
    copies = rows_at(aligned(BLOCK * dim), 0, dim)
    spare = (copies, aligned(BLOCK), aligned(BLOCK * n))
    both = make_sides(particles, n * dim, n)
    panels = make_back_panels(particles, n * dim)
    key_kind = (favor, scale, given.shape[0])
    for group in range(first, end):
        head = group // batch
        if group == first or group % batch == 0:
            load_sides(particles, head, (dim, n), scale, both)
            load_back(particles, head, (dim, n), panels)
        pulled = back_sides(panels, grad_particles, head, (dim, n))
        own_shape, rows = (
            group_shape(bounds, group, sizes),
            group_rows(bounds[0], group),
        )
        kept_q, kept_k = rows_part(e_q, rows, stride), rows_part(e_k, rows, stride)
        before = rows_part(states, group_rows(spans, group), size)
        grad_sums[:], grad_z[:], length = _ZERO, _ZERO, rows[1] - rows[0]
        for s in range((length + SPAN - 1) // SPAN - 1, -1, -1):
            t0, t1 = s * SPAN, min((s + 1) * SPAN, length)
            if s:
                state = before[(s - 1) * size :][:size]
                z[:], sums[:] = state[:n], state[n:]
            else:
                z[:], sums[:] = _ZERO, _ZERO
            place, part = (group, batch, t0), (rows[0] + t0, rows[0] + t1)
            own = rows_part(weights, part, 1)
            x, y, value = rows_of(q, place), rows_of(k, place), rows_of(v, place)
            features = (
                feature_rows(kept_q, scratch_q, t0, n),
                feature_rows(kept_k, scratch_k, t0, n),
            )
            if deep:
                project(x, t1 - t0, both[0], dim, n, features[0])
                project(y, t1 - t0, both[1], dim, n, features[1])
                query_features(features[0], n, ones, dots[: t1 - t0])
                repeat_key_features(features[1], n, own)
            sides = rows_of(outputs[0], place), rows_of(outputs[1], place)
            queries = (x, value, *sides, rows_of(grad_q, place))
            rest = (rows_part(inverses, part, 1), own)
            kind, held = (square, scale, s == 0), (sums, z)
            _span_queries(
                kind, own_shape, queries, features, rest, held, work, pulled[0]
            )
            goals = rows_of(grad_k, place), rows_of(grad_v, place)
            keys = (y, value, *goals, rows_part(grad_given, part, 1))
            ends, held = (key_kind, square, s == 0, t1 == length), (grad_sums, grad_z)
            _span_keys(
                ends, own_shape, keys, features, own, held, work, spare, pulled[1]
            )


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


@entry(SUMS)
def decode(options, shape, positions, token, state, new_state, out, first, end):
    """Add one token to the states from `first` to `end`; attend to all tokens so far.

    `options` is whether the map is favor and the factor of the particles; `shape` is
    batch, heads, heads with particles of their own, dim, dim_v and features. The others
    are addresses: `token` holds q, k and v, `state` and `new_state` sums and shifts.
    """
    favor, scale = options[0], _f(options[1])
    batch, heads, particles, dim, dim_v, n = shape
    groups = batch * heads
    rows = carray(_at(positions), (particles * n, dim))
    q, k = carray(_at(token[0]), (groups, dim)), carray(_at(token[1]), (groups, dim))
    v, target = (
        carray(_at(token[2]), (groups, dim_v)),
        carray(_at(out), (groups, dim_v)),
    )
    sums = carray(_at(state[0]), (groups, dim_v + 1, n))
    new_sums = carray(_at(new_state[0]), (groups, dim_v + 1, n))
    shift, higher = (
        carray(_at(state[1]), (groups, n)),
        carray(_at(new_state[1]), (groups, n)),
    )
    both, angles = np.empty((2, dim), _f), np.empty((n, 2), _f)
    a_q, a_k, factors = aligned(n), aligned(n), np.ones(n, _f)
    for group in range(first, end):
        both[0], both[1] = q[group], k[group]
        own = group % heads % particles * n
        row_products(rows, own, 0, n, both, 0, 0, 2, dim, False, angles)
        for c in range(n):
            a_q[c], a_k[c] = scale * angles[c, 0], scale * angles[c, 1]
        if favor:
            _favor(k[group], a_q, a_k, shift[group], higher[group], factors)
        else:
            higher[group] = shift[group]
            _softmax(a_q, _ONE)
            _softmax(a_k, _f(math.sqrt(n)))
        old, new = sums[group], new_sums[group]
        normaliser = _step(old[dim_v], factors, a_q, a_k, _ONE, new[dim_v])
        # Without a key there is nothing to divide by, and the output is zero.
        inverse = _ONE / normaliser if normaliser != _ZERO else _ZERO
        for c in range(dim_v):
            total = _step(old[c], factors, a_q, a_k, v[group, c], new[c])
            target[group, c] = total * inverse
