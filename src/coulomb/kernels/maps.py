"""Compiled feature maps, row by row, up to factors that attention does not see.

Rows are projections `a` of tokens on the particles of a head, `heads * tokens` of them,
C-contiguous float32, and become features in place.
"""

from typing import Any

import numpy as np

from coulomb.kernels.loops import _SUMS, _entry, _exp, _helper, _sincos

_f = np.float32
_ZERO, _ONE, _TWO = _f(0), _f(1), _f(2)

# Feature maps, chosen once outside the loops.
SOFTMAX, ELU, SOFTPLUS, SIGMOID2, COS2, FAVOR = range(6)


@_helper(_SUMS)
def _log1p(t: Any) -> Any:
    """log(1 + t) = 2 artanh(t / (2 + t)) for t from 0 to 1."""
    z = t / (_TWO + t)
    u = z * z
    tail = _f(1 / 9) + u * (_f(1 / 11) + u * _f(1 / 13))
    tail = _f(1 / 3) + u * (_f(1 / 5) + u * (_f(1 / 7) + u * tail))
    return _TWO * z * (_ONE + u * tail)


# Without the promise that there is no nan, a maximum is taken one by one. With a nan in
# the row it is wrong, and what is computed from row and maximum is nan all the same.
@_helper(_SUMS | {"nnan"})
def row_max(row: Any) -> Any:
    """Give the largest element."""
    top = row[0]
    for c in range(row.shape[0]):
        top = row[c] if row[c] > top else top
    return top


@_helper(_SUMS | {"nnan"})
def _row_min(row: Any) -> Any:
    low = row[0]
    for c in range(row.shape[0]):
        low = row[c] if row[c] < low else low
    return low


@_helper(_SUMS)
def exp_row(row: Any, scale: Any) -> Any:
    """Make a row `exp(scale (a - max a))`, and give one over its sum."""
    top, total = row_max(row), _ZERO
    for c in range(row.shape[0]):
        row[c] = _exp(scale * (row[c] - top))
        total += row[c]
    return _ONE / total


@_helper(_SUMS)
def _softplus_row(row: Any, cold: Any, floor: Any, slope: Any) -> Any:
    total = _ZERO
    for c in range(row.shape[0]):
        a = cold * row[c]
        t = _exp(-abs(a))
        row[c] = max(a, _ZERO) + _log1p(t) + floor
        slope[c] = cold * (_ONE if a > _ZERO else t) / (_ONE + t)
        total += row[c]
    return _ONE / total


@_helper(_SUMS)
def _sigmoid_row(row: Any, cold: Any, slope: Any) -> Any:
    # A common factor keeps the features of a very negative row from vanishing.
    low, total = min(cold * row_max(row), _ZERO), _ZERO
    for c in range(row.shape[0]):
        a = cold * row[c]
        t = _exp(-abs(a))
        part = _ONE / (_ONE + t)
        share = part * _exp(min(a, _ZERO) - low)
        row[c] = share * share
        slope[c] = cold * _TWO * row[c] * part * (t if a > _ZERO else _ONE)
        total += row[c]
    return _ONE / total


@_helper(_SUMS)
def _elu_row(row: Any, cold: Any, floor: Any) -> Any:
    total = _ZERO
    for c in range(row.shape[0]):
        a = cold * row[c]
        row[c] = max(_ONE + a if a > _ZERO else _exp(a), floor)
        total += row[c]
    return _ONE / total


@_helper(_SUMS)
def _cosine_row(row: Any, phases: Any, slope: Any) -> Any:
    total = _ZERO
    for c in range(row.shape[0]):
        sine, cosine = _sincos(row[c] + phases[c])
        row[c] = cosine * cosine
        slope[c] = -_TWO * sine * cosine
        total += row[c]
    return _ONE / total


@_entry(_SUMS)
def map_rows(about: Any, phases: Any, a: Any, slopes: Any, weights: Any) -> None:
    """Turn projections into features; `weights` becomes one over their sums.

    `slopes` becomes the derivatives in the projections, for the maps in which those are
    not functions of the features; it is not written if it is empty.
    """
    kind, cold, floor = about[0], _f(about[1]), _f(about[2])
    tokens = a.shape[0] // phases.shape[0]
    spare = np.empty(a.shape[1], _f)
    for r in range(a.shape[0]):
        row = a[r]
        slope = slopes[r] if slopes.shape[0] else spare
        if kind == SOFTMAX:
            weights[r] = exp_row(row, cold)
        elif kind == ELU:
            weights[r] = _elu_row(row, cold, floor)
        elif kind == SOFTPLUS:
            weights[r] = _softplus_row(row, cold, floor, slope)
        elif kind == SIGMOID2:
            weights[r] = _sigmoid_row(row, cold, slope)
        else:
            weights[r] = _cosine_row(row, phases[r // tokens], slope)


@_entry(_SUMS)
def pull_rows(about: Any, features: Any, slopes: Any, extras: Any, grad: Any) -> None:
    """Turn gradients of features, plus a constant in each row, into projections'."""
    kind, cold, floor = about[0], _f(about[1]), _f(about[2])
    width = features.shape[1]
    for r in range(features.shape[0]):
        row, g, extra = features[r], grad[r], extras[r]
        if kind in (SOFTMAX, FAVOR):
            for c in range(width):
                g[c] = cold * row[c] * (g[c] + extra)
        elif kind == ELU:
            for c in range(width):
                s = cold * (_ONE if row[c] > _ONE else row[c])
                g[c] = (s if row[c] > floor else _ZERO) * (g[c] + extra)
        else:
            slope = slopes[r]
            for c in range(width):
                g[c] = slope[c] * (g[c] + extra)


@_entry(_SUMS)
def favor_rows(cold: Any, bounds: Any, q: Any, k: Any, halves: Any) -> None:
    """Turn projections into exponential features, none of which overflows.

    `f(k_j) = exp(a_j - h_j - s)` and `f(q_i) = exp(a_i + s - r_i)` with the largest
    exponent s of each feature over the keys of a sequence and r_i over features: every
    query has a feature of one at which some key has one.
    """
    width, cold, tokens = q.shape[1], _f(cold), bounds[-1]
    top = np.empty(width, _f)
    for begin in range(0, q.shape[0], tokens):
        for s in range(bounds.shape[0] - 1):
            i0, i1 = begin + bounds[s], begin + bounds[s + 1]
            for j in range(i0, i1):
                row, half = k[j], halves[j]
                for c in range(width):
                    row[c] = cold * row[c] - half
                    top[c] = row[c] if j == i0 or row[c] > top[c] else top[c]
            for i in range(i0, i1):
                row, other = q[i], k[i]
                for c in range(width):
                    row[c] = cold * row[c] + top[c]
                    other[c] = _exp(other[c] - top[c])
                high = row_max(row)
                for c in range(width):
                    row[c] = _exp(row[c] - high)


@_entry(_SUMS)
def favor_shared_rows(cold: Any, bounds: Any, a: Any, halves: Any, weights: Any) -> Any:
    """Turn projections into exponential features where queries are keys.

    `f_i = exp(a_i - max a_i)` for both, and the weight of a key is `exp(max a_j - h_j)`
    over the largest of its sequence. Give the largest range of exponents in a row: no
    product of two rows is below `exp(-range)`, so that nothing is lost while that is a
    normal number.
    """
    cold, tokens, widest = _f(cold), bounds[-1], _ZERO
    for r in range(a.shape[0]):
        row = a[r]
        top, low = row_max(row), _row_min(row)
        widest = max(widest, cold * (top - low))
        weights[r] = cold * top - halves[r]
        for c in range(row.shape[0]):
            row[c] = _exp(cold * (row[c] - top))
    for begin in range(0, a.shape[0], tokens):
        for s in range(bounds.shape[0] - 1):
            i0, i1 = begin + bounds[s], begin + bounds[s + 1]
            top = weights[i0] if i0 < i1 else _ZERO
            for i in range(i0, i1):
                top = max(top, weights[i])
            for i in range(i0, i1):
                weights[i] = _exp(weights[i] - top)
    return widest
