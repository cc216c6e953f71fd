"""Compiled feature maps, row by row, up to factors that attention does not see.

Rows are projections `a` of tokens on the particles of a head, `heads * tokens` of them,
C-contiguous float32, and become features in place.
"""

import numpy as np

from coulomb.kernels.jit import SUMS, entry, helper
from coulomb.kernels.math import exp, exp_row, log1p, row_max, row_min, sincos

_f = np.float32
_ZERO, _ONE, _TWO = _f(0), _f(1), _f(2)

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
