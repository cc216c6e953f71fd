"""Compiled loops of the packed encoder: rows of tokens, attention inside sequences.

Sequences follow one another; sequence s has the rows `bounds[s] .. bounds[s + 1] - 1`.
Arrays are C-contiguous, numbers are float32. What a loop drops is a hash of a key and
the number of the element, so that the pass back knows it again.

Attention is in the quadratic order. Features of all heads are in one array of
`heads * tokens` rows. With features f, `N_ij = f(q_i).f(k_j) w_j / D_i`,
`D_i = sum_j f(q_i).f(k_j) w_j`, and the output is `N v`. A factor of f(q_i) cancels,
and one of f(k_j) goes into `w_j`. The matrices N are kept for the pass back, packed.
Their rows, and everything else that is gone through key by key, are padded to a
multiple of eight, so that few loops over the keys of a sentence have a scalar rest.
"""

import math

import numpy as np

from coulomb.kernels.gemm import longest, mix, products
from coulomb.kernels.math import exp, exp_row, log1p, row_max, row_min, sincos
from coulomb.kernels.runtime import EXACT, SUMS, entry, helper

_f, _u = np.float32, np.uint32
_FIRST, _SECOND = _u(0x7FEB352D), _u(0x846CA68B)
_16, _15 = _u(16), _u(15)
_ZERO, _ONE, _TWO, _HALF = _f(0), _f(1), _f(2), _f(0.5)
_LANES = 8


@helper(EXACT)
def _level(index, key):
    """Hash an element to one of 65536 levels."""
    x = _u(_u(index) + key)
    x = _u(_u(x ^ _u(x >> _16)) * _FIRST)
    x = _u(_u(_u(x ^ _u(x >> _15)) ^ key) * _SECOND)
    return _u(_u(x ^ _u(x >> _16)) >> _16)


@helper(SUMS)
def _drop_row(row, start, key, threshold, scale):
    """Drop elements of a row whose first is element `start` of the array."""
    base = _u(start)
    for c in range(row.shape[0]):
        kept = _level(base + _u(c), key) >= threshold
        row[c] = row[c] * scale if kept else _ZERO


@helper(SUMS)
def _norm_row(row, gain, shift, eps, out):
    """Normalise a row in place, write gain and shift applied to `out`."""
    width = row.shape[0]
    total = _ZERO
    for c in range(width):
        total += row[c]
    mean = total / _f(width)
    square = _ZERO
    for c in range(width):
        row[c] -= mean
        square += row[c] * row[c]
    scale = _f(1.0 / math.sqrt(square / _f(width) + eps))
    for c in range(width):
        row[c] *= scale
        out[c] = row[c] * gain[c] + shift[c]
    return scale


@helper(SUMS)
def _norm_row_back(grad, normal, scale, gain, grad_gain, grad_shift, out):
    """Pull a gradient back through `_norm_row`; add to those of gain and shift."""
    width = grad.shape[0]
    first, second = _ZERO, _ZERO
    for c in range(width):
        g = grad[c] * gain[c]
        first += g
        second += g * normal[c]
    for c in range(width):
        grad_gain[c] += grad[c] * normal[c]
        grad_shift[c] += grad[c]
    first /= _f(width)
    second /= _f(width)
    for c in range(width):
        out[c] = scale * (grad[c] * gain[c] - first - normal[c] * second)


@entry(SUMS)
def add_rows(y, bias, residual, gain, shift, eps, drop, out, scales):
    """Out = norm(residual + drop(y + bias)); `y` becomes what the norm gave.

    Without a gain there is no norm, and `y` is left as it was.
    """
    key, threshold, scale = _u(drop[0]), _u(drop[1]), _f(drop[2])
    width = y.shape[1]
    for t in range(y.shape[0]):
        row, old, new = y[t], residual[t], out[t]
        for c in range(width):
            row[c] += bias[c]
        if threshold:
            _drop_row(row, t * width, key, threshold, scale)
        if gain.shape[0]:
            for c in range(width):
                row[c] += old[c]
            scales[t] = _norm_row(row, gain, shift, eps, new)
        else:
            for c in range(width):
                new[c] = row[c] + old[c]


@entry(SUMS)
def add_rows_back(grad, normal, scales, gain, drop, grad_sums, grad_residual, grad_y):
    """Pull a gradient back through `add_rows`; sums are those of bias, gain, shift."""
    key, threshold, scale = _u(drop[0]), _u(drop[1]), _f(drop[2])
    width = grad.shape[1]
    bias_sum, gain_sum, shift_sum = grad_sums[0], grad_sums[1], grad_sums[2]
    for t in range(grad.shape[0]):
        kept, passed = grad_residual[t], grad_y[t]
        if gain.shape[0]:
            parts = normal[t], scales[t], gain, gain_sum, shift_sum
            _norm_row_back(grad[t], *parts, kept)
        else:
            whole = grad[t]
            for c in range(width):
                kept[c] = whole[c]
        for c in range(width):
            passed[c] = kept[c]
        if threshold:
            _drop_row(passed, t * width, key, threshold, scale)
        for c in range(width):
            bias_sum[c] += passed[c]


@entry(SUMS)
def embed_rows(
    token_ids, positions, table, places, gain, shift, eps, drop, out, normal, scales
):
    """Out = drop(norm(table[id] + places[position])); `places` may be empty."""
    key, threshold, scale = _u(drop[0]), _u(drop[1]), _f(drop[2])
    width = table.shape[1]
    for t in range(token_ids.shape[0]):
        row, new, word = normal[t], out[t], table[token_ids[t]]
        if places.shape[0]:
            place = places[positions[t]]
            for c in range(width):
                row[c] = word[c] + place[c]
        else:
            for c in range(width):
                row[c] = word[c]
        scales[t] = _norm_row(row, gain, shift, eps, new)
        if threshold:
            _drop_row(new, t * width, key, threshold, scale)


@entry(SUMS)
def embed_rows_back(
    grad,
    token_ids,
    positions,
    normal,
    scales,
    gain,
    drop,
    grad_table,
    grad_places,
    grad_sums,
):
    """Pull a gradient back through `embed_rows`, adding to rows of both tables."""
    key, threshold, scale = _u(drop[0]), _u(drop[1]), _f(drop[2])
    width = grad.shape[1]
    gain_sum, shift_sum = grad_sums[0], grad_sums[1]
    row, back = np.empty(width, _f), np.empty(width, _f)
    for t in range(grad.shape[0]):
        given = grad[t]
        for c in range(width):
            row[c] = given[c]
        if threshold:
            _drop_row(row, t * width, key, threshold, scale)
        parts = normal[t], scales[t], gain, gain_sum, shift_sum
        _norm_row_back(row, *parts, back)
        if grad_table.shape[0]:
            word = grad_table[token_ids[t]]
            for c in range(width):
                word[c] += back[c]
        if grad_places.shape[0]:
            place = grad_places[positions[t]]
            for c in range(width):
                place[c] += back[c]


# erf(x / sqrt(2)) = 1 - (a_1 t + ... + a_5 t^5) exp(-x^2 / 2), t = 1 / (1 + p |x|):
# Abramowitz and Stegun 7.1.26, within 1.5e-7.
_P = _f(0.3275911 / math.sqrt(2))
_A1, _A2, _A3 = _f(0.254829592), _f(-0.284496736), _f(1.421413741)
_A4, _A5 = _f(-1.453152027), _f(1.061405429)
_DENSITY = _f(1 / math.sqrt(2 * math.pi))


@helper(SUMS)
def _gelu_row(row, bias, out):
    """Out = gelu(row + bias), and `row` becomes the slope there."""
    for c in range(row.shape[0]):
        x = row[c] + bias[c]
        t = _ONE / (_ONE + _P * abs(x))
        bell = exp(-_HALF * x * x)
        tail = t * (_A1 + t * (_A2 + t * (_A3 + t * (_A4 + t * _A5)))) * bell * _HALF
        share = tail if x < _ZERO else _ONE - tail
        out[c] = x * share
        row[c] = share + x * bell * _DENSITY


@entry(SUMS)
def gelu_rows(h, bias, drop, out):
    """Out = drop(gelu(h + bias)); `h` becomes the slope of that."""
    key, threshold, scale = _u(drop[0]), _u(drop[1]), _f(drop[2])
    width = h.shape[1]
    for t in range(h.shape[0]):
        row, new = h[t], out[t]
        _gelu_row(row, bias, new)
        if threshold:
            base = _u(t * width)
            for c in range(width):
                kept = _level(base + _u(c), key) >= threshold
                factor = scale if kept else _ZERO
                new[c] *= factor
                row[c] *= factor


@entry(SUMS)
def slope_rows(grad, slope, total):
    """Multiply a gradient with slopes in place, and add up its rows."""
    for t in range(grad.shape[0]):
        row, factor = grad[t], slope[t]
        for c in range(grad.shape[1]):
            row[c] *= factor[c]
            total[c] += row[c]


@entry(SUMS)
def pool_rows(x, weights, bounds, out):
    """Add up weights[t] x[t] over the rows of each sequence."""
    for s in range(out.shape[0]):
        total = out[s]
        for c in range(x.shape[1]):
            total[c] = _ZERO
        for t in range(bounds[s], bounds[s + 1]):
            row, weight = x[t], weights[t]
            for c in range(x.shape[1]):
                total[c] += weight * row[c]


@entry(SUMS)
def pool_rows_back(grad, weights, bounds, out):
    """Pull a gradient back through `pool_rows`."""
    for s in range(grad.shape[0]):
        row = grad[s]
        for t in range(bounds[s], bounds[s + 1]):
            new, weight = out[t], weights[t]
            for c in range(grad.shape[1]):
                new[c] = weight * row[c]


@helper(SUMS)
def _padded(n):
    return (n + _LANES - 1) // _LANES * _LANES


@helper(SUMS)
def _blocks(bounds, rank):
    """Two blocks for the longest sequence, square or `rank` wide, and two rows."""
    most = longest(bounds)
    wide = _padded(rank if rank else most)
    return (
        np.zeros((most, wide), _f),
        np.zeros((most, wide), _f),
        np.zeros(wide, _f),
        np.zeros(wide, _f),
    )


@helper(SUMS)
def _matrix(matrices, offset, head, shape, spare):
    """Where N of a head and a sequence is kept, or a spare block."""
    if matrices.shape[0] == 0:
        return spare
    n, columns = shape[0], _padded(shape[1])
    begin = offset + head * n * columns
    return matrices[begin : begin + n * columns].reshape(n, columns)


@helper(SUMS)
def _take(x, i0, n, out):
    """Copy n elements, zero up to the padded length."""
    for j in range(n):
        out[j] = x[i0 + j]
    for j in range(n, _padded(n)):
        out[j] = _ZERO


@helper(SUMS)
def _weigh(row, weights, n, out):
    """Write row times weights over their sum; give one over the sum, or zero."""
    total = _ZERO
    for j in range(_padded(n)):
        out[j] = row[j] * weights[j]
    for j in range(_padded(n)):
        total += out[j]
    # A query that no key answers gets zero.
    inverse = _ONE / total if total > _ZERO else _ZERO
    for j in range(_padded(n)):
        out[j] *= inverse
    return inverse


@helper(SUMS)
def _dot(a, b, i, c0, width):
    """Multiply row i of two matrices, `width` columns from c0 on."""
    left, right, total = a[i, c0 : c0 + width], b[i, c0 : c0 + width], _ZERO
    for c in range(width):
        total += left[c] * right[c]
    return total


@helper(SUMS)
def _softmax_rows(scores, n, m, scale, ones, out):
    """Write the softmax over m columns of n rows; `out` may be the same block."""
    for j in range(_padded(m)):
        ones[j] = _ONE if j < m else _ZERO
    for i in range(n):
        row = scores[i, : _padded(m)]
        for j in range(m, _padded(m)):
            row[j] = row[0]
        exp_row(row, scale)
        _weigh(row, ones, m, out[i])


@helper(SUMS)
def _softmax_rows_back(known, grad, out, i0, c0, dim, n, m, scale, rows):
    """Turn gradients of rows of the softmax, `known`, into those of scores."""
    for i in range(n):
        mean = _dot(grad, out, i0 + i, c0, dim)
        row, share = rows[i], known[i]
        for j in range(_padded(m)):
            row[j] = scale * share[j] * (row[j] - mean)


@entry(SUMS)
def attend_features(features, values, places, kept, out):
    """Attend inside every sequence with given features.

    `features` holds those of queries and of keys, the latter empty if they are the
    same; `values` an array and its first column.
    """
    q, k = features
    v, cv = values
    bounds, offsets = places
    matrices, key_weights, inverses = kept
    tokens = v.shape[0]
    heads = q.shape[0] // tokens
    dim = out.shape[1] // heads
    same = k.shape[0] == 0
    scratch, spare, weights, _ = _blocks(bounds, 0)
    for head in range(heads):
        column = head * dim
        for s in range(bounds.shape[0] - 1):
            t0, n = bounds[s], bounds[s + 1] - bounds[s]
            i0 = head * tokens + t0
            other = q if same else k
            products(q, i0, 0, n, other, i0, 0, n, q.shape[1], same, scratch)
            if same:
                for i in range(n):
                    for j in range(i):
                        scratch[j, i] = scratch[i, j]
            _take(key_weights, i0, n, weights)
            block = _matrix(matrices, offsets[s], head, (n, n), spare)
            for i in range(n):
                inverses[i0 + i] = _weigh(scratch[i], weights, n, block[i])
            mix(block, False, n, v, t0, cv + column, n, dim, out, t0, column)


@helper(SUMS)
def _pull_row(row, known, mean, inverse, weights, n, extras):
    """Turn a row of dN into one of the gradient of the products.

    `extras[j]` is lowered by w_j times the gradient of w_j.
    """
    for j in range(_padded(n)):
        g = row[j] - mean
        extras[j] -= g * known[j]
        row[j] = g * inverse * weights[j]


@entry(SUMS)
def attend_features_back(features, values, places, kept, out, grad, grads):
    """Pull a gradient back through `attend_features`.

    `grads` holds those of the features of queries and keys (the latter empty if they
    are the same), of the values, and of minus the logarithm of w_j, for each key.
    """
    q, k = features
    v, cv = values
    bounds, offsets = places
    matrices, key_weights, inverses = kept
    grad_q, grad_k, grad_v, grad_keys = grads
    tokens, width = v.shape[0], q.shape[1]
    heads = q.shape[0] // tokens
    dim = out.shape[1] // heads
    same = k.shape[0] == 0
    scratch, spare, weights, extras = _blocks(bounds, 0)
    for head in range(heads):
        c0 = head * dim
        for s in range(bounds.shape[0] - 1):
            t0, n = bounds[s], bounds[s + 1] - bounds[s]
            i0 = head * tokens + t0
            block = _matrix(matrices, offsets[s], head, (n, n), spare)
            mix(block, True, n, grad, t0, c0, n, dim, grad_v, t0, cv + c0)
            products(grad, t0, c0, n, v, t0, cv + c0, n, dim, False, scratch)
            _take(key_weights, i0, n, weights)
            for j in range(n):
                extras[j] = _ZERO
            for i in range(n):
                mean = _dot(grad, out, t0 + i, c0, dim)
                inverse = inverses[i0 + i]
                _pull_row(scratch[i], block[i], mean, inverse, weights, n, extras)
            for j in range(n):
                grad_keys[i0 + j] = extras[j]
            if same:
                for i in range(n):
                    for j in range(i + 1):
                        both = scratch[i, j] + scratch[j, i]
                        scratch[i, j] = both
                        scratch[j, i] = both
            else:
                mix(scratch, True, n, q, i0, 0, n, width, grad_k, i0, 0)
            other = q if same else k
            mix(scratch, False, n, other, i0, 0, n, width, grad_q, i0, 0)


# Softmax attention, `softmax(q k' / sqrt(dim)) v` inside packed sequences, or attention
# to a few learned mixtures, `softmax(q (E k)' / sqrt(dim)) F v`, where E and F have one
# row for each mixture and one column for each position; without rows there are none.
# Queries, keys and values stand side by side. For the pass back, the mixtures `E k` and
# `F v` of each head and sequence are kept, and the softmax.


@helper(SUMS)
def _partners(rank, joint, mixed, own, given):
    """Give what queries meet: an array, and where keys and values begin in it."""
    t0, n, k, v = own
    if rank:
        zero, m0 = np.int64(0), np.int64(given)
        return mixed, (m0, zero), (m0 + rank, zero), rank
    return joint, (t0, k), (t0, v), n


@entry(SUMS)
def attend_softmax(heads, joint, mixtures, places, kept, out):
    """Attend; `kept` receives the softmax, unless it is empty, and the mixtures."""
    keys, values = mixtures
    bounds, offsets = places
    matrices, mixed = kept
    rank, width, count = keys.shape[0], out.shape[1], bounds.shape[0] - 1
    dim = width // heads
    scale = _f(1.0 / math.sqrt(dim))
    scratch, spare, ones, _ = _blocks(bounds, rank)
    for head in range(heads):
        q = head * dim
        k, v = width + q, 2 * width + q
        for s in range(count):
            t0, n = bounds[s], bounds[s + 1] - bounds[s]
            m0 = 2 * rank * (head * count + s)
            if rank:
                mix(keys, False, rank, joint, t0, k, n, dim, mixed, m0, 0)
                mix(values, False, rank, joint, t0, v, n, dim, mixed, m0 + rank, 0)
            b, k0, v0, m = _partners(rank, joint, mixed, (t0, n, k, v), m0)
            block = _matrix(matrices, offsets[s], head, (n, m), spare)
            products(joint, t0, q, n, b, k0[0], k0[1], m, dim, False, scratch)
            _softmax_rows(scratch, n, m, scale, ones, block)
            mix(block, False, n, b, v0[0], v0[1], m, dim, out, t0, q)


@helper(SUMS)
def _pull_mixture(mixture, pulled, joint, own, grad_joint, side, grad):
    """Pull the gradient of mixed keys, or values, back to tokens and to the mixture."""
    t0, n, column = own[0], own[1], own[2 + side]
    rank, dim = pulled.shape
    mix(mixture, True, n, pulled, 0, 0, rank, dim, grad_joint, t0, column)
    products(pulled, 0, 0, rank, joint, t0, column, n, dim, False, grad)


@helper(SUMS)
def _add(block, n, total):
    for r in range(total.shape[0]):
        row, new = total[r], block[r]
        for j in range(n):
            row[j] += new[j]


@entry(SUMS)
def attend_softmax_back(
    heads, joint, mixtures, places, kept, out, grad, grad_joint, grad_mixtures
):
    """Pull a gradient back through `attend_softmax`, adding to that of E and F."""
    keys, values = mixtures
    grad_keys, grad_values = grad_mixtures
    bounds, offsets = places
    matrices, mixed = kept
    rank, width, count = keys.shape[0], out.shape[1], bounds.shape[0] - 1
    dim = width // heads
    scale = _f(1.0 / math.sqrt(dim))
    scratch, nothing, _, _ = _blocks(bounds, rank)
    pulled, spare = np.empty((2 * rank, dim), _f), np.empty((rank, longest(bounds)), _f)
    for head in range(heads):
        q = head * dim
        k, v = width + q, 2 * width + q
        for s in range(count):
            t0, n = bounds[s], bounds[s + 1] - bounds[s]
            own, m0 = (t0, n, k, v), 2 * rank * (head * count + s)
            b, k0, v0, m = _partners(rank, joint, mixed, own, m0)
            goal, gk, gv, _ = _partners(rank, grad_joint, pulled, own, 0)
            block = _matrix(matrices, offsets[s], head, (n, m), nothing)
            mix(block, True, m, grad, t0, q, n, dim, goal, gv[0], gv[1])
            products(grad, t0, q, n, b, v0[0], v0[1], m, dim, False, scratch)
            _softmax_rows_back(block, grad, out, t0, q, dim, n, m, scale, scratch)
            mix(scratch, False, n, b, k0[0], k0[1], m, dim, grad_joint, t0, q)
            mix(scratch, True, m, joint, t0, q, n, dim, goal, gk[0], gk[1])
            if rank:
                _pull_mixture(keys, pulled[:rank], joint, own, grad_joint, 0, spare)
                _add(spare, n, grad_keys)
                _pull_mixture(values, pulled[rank:], joint, own, grad_joint, 1, spare)
                _add(spare, n, grad_values)


# Feature maps, row by row, up to factors that attention does not see. Rows are
# projections `a` of tokens on the particles of a head, `heads * tokens` of them,
# C-contiguous float32, and become features in place.

# Feature maps, chosen once outside the loops.
SOFTMAX, ELU, SOFTPLUS, SIGMOID2, COS2, FAVOR = range(6)


@helper(SUMS)
def _softplus_row(row, inverse_temperature, floor, slope):
    total = _ZERO
    for c in range(row.shape[0]):
        a = inverse_temperature * row[c]
        t = exp(-abs(a))
        row[c] = max(a, _ZERO) + log1p(t) + floor
        slope[c] = inverse_temperature * (_ONE if a > _ZERO else t) / (_ONE + t)
        total += row[c]
    return _ONE / total


@helper(SUMS)
def _sigmoid_row(row, inverse_temperature, slope):
    # A common factor keeps the features of a very negative row from vanishing.
    low, total = min(inverse_temperature * row_max(row), _ZERO), _ZERO
    for c in range(row.shape[0]):
        a = inverse_temperature * row[c]
        t = exp(-abs(a))
        part = _ONE / (_ONE + t)
        share = part * exp(min(a, _ZERO) - low)
        row[c] = share * share
        slope[c] = (
            inverse_temperature * _TWO * row[c] * part * (t if a > _ZERO else _ONE)
        )
        total += row[c]
    return _ONE / total


@helper(SUMS)
def _elu_row(row, inverse_temperature, floor):
    total = _ZERO
    for c in range(row.shape[0]):
        a = inverse_temperature * row[c]
        row[c] = max(_ONE + a if a > _ZERO else exp(a), floor)
        total += row[c]
    return _ONE / total


@helper(SUMS)
def _cosine_row(row, phases, slope):
    total = _ZERO
    for c in range(row.shape[0]):
        sine, cosine = sincos(row[c] + phases[c])
        row[c] = cosine * cosine
        slope[c] = -_TWO * sine * cosine
        total += row[c]
    return _ONE / total


@entry(SUMS)
def map_rows(options, phases, a, slopes, weights):
    """Turn projections into features; `weights` becomes one over their sums.

    `slopes` becomes the derivatives in the projections, for the maps in which those are
    not functions of the features; it is not written if it is empty.
    """
    kind, inverse_temperature, floor = options[0], _f(options[1]), _f(options[2])
    tokens = a.shape[0] // phases.shape[0]
    spare = np.empty(a.shape[1], _f)
    for r in range(a.shape[0]):
        row = a[r]
        slope = slopes[r] if slopes.shape[0] else spare
        if kind == SOFTMAX:
            weights[r] = _ONE / exp_row(row, inverse_temperature)
        elif kind == ELU:
            weights[r] = _elu_row(row, inverse_temperature, floor)
        elif kind == SOFTPLUS:
            weights[r] = _softplus_row(row, inverse_temperature, floor, slope)
        elif kind == SIGMOID2:
            weights[r] = _sigmoid_row(row, inverse_temperature, slope)
        else:
            weights[r] = _cosine_row(row, phases[r // tokens], slope)


@entry(SUMS)
def pull_rows(options, features, slopes, extras, grad):
    """Turn gradients of features, plus a constant in each row, into projections'."""
    kind, inverse_temperature, floor = options[0], _f(options[1]), _f(options[2])
    width = features.shape[1]
    for r in range(features.shape[0]):
        row, g, extra = features[r], grad[r], extras[r]
        if kind in (SOFTMAX, FAVOR):
            for c in range(width):
                g[c] = inverse_temperature * row[c] * (g[c] + extra)
        elif kind == ELU:
            for c in range(width):
                s = inverse_temperature * (_ONE if row[c] > _ONE else row[c])
                g[c] = (s if row[c] > floor else _ZERO) * (g[c] + extra)
        else:
            slope = slopes[r]
            for c in range(width):
                g[c] = slope[c] * (g[c] + extra)


@entry(SUMS)
def favor_rows(inverse_temperature, bounds, q, k, halves):
    """Turn projections into exponential features, none of which overflows.

    `f(k_j) = exp(a_j - h_j - s)` and `f(q_i) = exp(a_i + s - r_i)` with the largest
    exponent s of each feature over the keys of a sequence and r_i over features: every
    query has a feature of one at which some key has one.
    """
    width, inverse_temperature, tokens = q.shape[1], _f(inverse_temperature), bounds[-1]
    top = np.empty(width, _f)
    for begin in range(0, q.shape[0], tokens):
        for s in range(bounds.shape[0] - 1):
            i0, i1 = begin + bounds[s], begin + bounds[s + 1]
            for j in range(i0, i1):
                row, half = k[j], halves[j]
                for c in range(width):
                    row[c] = inverse_temperature * row[c] - half
                    top[c] = row[c] if j == i0 or row[c] > top[c] else top[c]
            for i in range(i0, i1):
                row, other = q[i], k[i]
                for c in range(width):
                    row[c] = inverse_temperature * row[c] + top[c]
                    other[c] = exp(other[c] - top[c])
                high = row_max(row)
                for c in range(width):
                    row[c] = exp(row[c] - high)


@entry(SUMS)
def favor_shared_rows(inverse_temperature, bounds, a, halves, weights):
    """Turn projections into exponential features where queries are keys.

    `f_i = exp(a_i - max a_i)` for both, and the weight of a key is `exp(max a_j - h_j)`
    over the largest of its sequence. Give the largest range of exponents in a row: no
    product of two rows is below `exp(-range)`, so that nothing is lost while that is a
    normal number.
    """
    inverse_temperature, tokens, widest = _f(inverse_temperature), bounds[-1], _ZERO
    for r in range(a.shape[0]):
        row = a[r]
        top, low = row_max(row), row_min(row)
        widest = max(widest, inverse_temperature * (top - low))
        weights[r] = inverse_temperature * top - halves[r]
        for c in range(row.shape[0]):
            row[c] = exp(inverse_temperature * (row[c] - top))
    for begin in range(0, a.shape[0], tokens):
        for s in range(bounds.shape[0] - 1):
            i0, i1 = begin + bounds[s], begin + bounds[s + 1]
            top = weights[i0] if i0 < i1 else _ZERO
            for i in range(i0, i1):
                top = max(top, weights[i])
            for i in range(i0, i1):
                weights[i] = exp(weights[i] - top)
    return widest
