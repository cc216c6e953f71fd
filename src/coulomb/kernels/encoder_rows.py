"""Compiled loops over the rows of packed states: sums, norms, dropout, GELU.

Arrays are C-contiguous, rows are tokens, numbers are float32. What a loop drops is a
hash of a key and the number of the element, so that the pass back knows it again.
"""

import math

import numpy as np

from coulomb.kernels.jit import EXACT, SUMS, entry, helper
from coulomb.kernels.math import exp

_f, _u = np.float32, np.uint32
_FIRST, _SECOND = _u(0x7FEB352D), _u(0x846CA68B)
_16, _15 = _u(16), _u(15)
_ZERO, _ONE, _HALF = _f(0), _f(1), _f(0.5)


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
