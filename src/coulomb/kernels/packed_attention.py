"""Compiled loops of attention inside short sequences, in the quadratic order.

Sequences follow one another; sequence s has the rows `bounds[s] .. bounds[s + 1] - 1`.
Features of all heads are in one array of `heads * tokens` rows.

With features f, `N_ij = f(q_i).f(k_j) w_j / D_i`, `D_i = sum_j f(q_i).f(k_j) w_j`, and
the output is `N v`. A factor of f(q_i) cancels, and one of f(k_j) goes into `w_j`. The
matrices N are kept for the pass back, packed. Their rows, and everything else that is
gone through key by key, are padded to a multiple of eight, so that few loops over the
keys of a sentence have a scalar rest.
"""

import math
from typing import Any

import numpy as np

from coulomb.kernels.loops import _SUMS, _entry, _helper
from coulomb.kernels.maps import exp_row
from coulomb.kernels.packed_blocks import mix, products

_f = np.float32
_ZERO, _ONE = _f(0), _f(1)
_LANES = 8


@_helper(_SUMS)
def _padded(n: Any) -> Any:
    return (n + _LANES - 1) // _LANES * _LANES


@_helper(_SUMS)
def _blocks(bounds: Any) -> Any:
    """Two square blocks for the longest sequence, and two rows."""
    longest = 0
    for s in range(bounds.shape[0] - 1):
        longest = max(longest, bounds[s + 1] - bounds[s])
    wide = _padded(longest)
    return (
        np.zeros((longest, wide), _f),
        np.zeros((longest, wide), _f),
        np.zeros(wide, _f),
        np.zeros(wide, _f),
    )


@_helper(_SUMS)
def _matrix(matrices: Any, offset: Any, head: Any, n: Any, spare: Any) -> Any:
    """Where N of a head and a sequence is kept, or a spare block."""
    if matrices.shape[0] == 0:
        return spare
    columns = _padded(n)
    begin = offset + head * n * columns
    return matrices[begin : begin + n * columns].reshape(n, columns)


@_helper(_SUMS)
def _take(x: Any, i0: Any, n: Any, out: Any) -> None:
    """Copy n elements, zero up to the padded length."""
    for j in range(n):
        out[j] = x[i0 + j]
    for j in range(n, _padded(n)):
        out[j] = _ZERO


@_helper(_SUMS)
def weigh(row: Any, weights: Any, n: Any, out: Any) -> Any:
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


@_helper(_SUMS)
def dot(a: Any, b: Any) -> Any:
    """Multiply two rows."""
    total = _ZERO
    for c in range(a.shape[0]):
        total += a[c] * b[c]
    return total


@_entry(_SUMS)
def attend_features(
    features: Any,
    values: Any,
    places: Any,
    kept: Any,
    out: Any,
) -> None:
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
    scratch, spare, weights, _ = _blocks(bounds)
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
            block = _matrix(matrices, offsets[s], head, n, spare)
            for i in range(n):
                inverses[i0 + i] = weigh(scratch[i], weights, n, block[i])
            mix(block, False, n, v, t0, cv + column, n, dim, out, t0, column)


@_helper(_SUMS)
def _pull_row(
    row: Any,
    known: Any,
    mean: Any,
    inverse: Any,
    weights: Any,
    n: Any,
    extras: Any,
) -> None:
    """Turn a row of dN into one of the gradient of the products.

    `extras[j]` is lowered by w_j times the gradient of w_j.
    """
    for j in range(_padded(n)):
        g = row[j] - mean
        extras[j] -= g * known[j]
        row[j] = g * inverse * weights[j]


@_entry(_SUMS)
def attend_features_back(
    features: Any,
    values: Any,
    places: Any,
    kept: Any,
    out: Any,
    grad: Any,
    grads: Any,
) -> None:
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
    scratch, spare, weights, extras = _blocks(bounds)
    for head in range(heads):
        c0 = head * dim
        for s in range(bounds.shape[0] - 1):
            t0, n = bounds[s], bounds[s + 1] - bounds[s]
            i0 = head * tokens + t0
            block = _matrix(matrices, offsets[s], head, n, spare)
            mix(block, True, n, grad, t0, c0, n, dim, grad_v, t0, cv + c0)
            products(grad, t0, c0, n, v, t0, cv + c0, n, dim, False, scratch)
            _take(key_weights, i0, n, weights)
            for j in range(n):
                extras[j] = _ZERO
            for i in range(n):
                mean = dot(grad[t0 + i, c0 : c0 + dim], out[t0 + i, c0 : c0 + dim])
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


@_entry(_SUMS)
def attend_softmax(
    heads: Any, joint: Any, places: Any, matrices: Any, out: Any
) -> None:
    """Softmax attention; `joint` has queries, keys and values side by side."""
    bounds, offsets = places
    width = out.shape[1]
    dim = width // heads
    scale = _f(1.0 / math.sqrt(dim))
    scratch, spare, ones, _ = _blocks(bounds)
    for head in range(heads):
        q = head * dim
        k, v = width + q, 2 * width + q
        for s in range(bounds.shape[0] - 1):
            t0, n = bounds[s], bounds[s + 1] - bounds[s]
            block = _matrix(matrices, offsets[s], head, n, spare)
            products(joint, t0, q, n, joint, t0, k, n, dim, False, scratch)
            for j in range(_padded(n)):
                ones[j] = _ONE if j < n else _ZERO
            for i in range(n):
                row = scratch[i, : _padded(n)]
                for j in range(n, _padded(n)):
                    row[j] = row[0]
                exp_row(row, scale)
                weigh(row, ones, n, block[i])
            mix(block, False, n, joint, t0, v, n, dim, out, t0, q)


@_entry(_SUMS)
def attend_softmax_back(
    heads: Any,
    joint: Any,
    places: Any,
    matrices: Any,
    out: Any,
    grad: Any,
    grad_joint: Any,
) -> None:
    """Pull a gradient back through `attend_softmax`."""
    bounds, offsets = places
    width = out.shape[1]
    dim = width // heads
    scale = _f(1.0 / math.sqrt(dim))
    scratch, spare, _, _ = _blocks(bounds)
    for head in range(heads):
        q = head * dim
        k, v = width + q, 2 * width + q
        for s in range(bounds.shape[0] - 1):
            t0, n = bounds[s], bounds[s + 1] - bounds[s]
            block = _matrix(matrices, offsets[s], head, n, spare)
            mix(block, True, n, grad, t0, q, n, dim, grad_joint, t0, v)
            products(grad, t0, q, n, joint, t0, v, n, dim, False, scratch)
            for i in range(n):
                mean = dot(grad[t0 + i, q : q + dim], out[t0 + i, q : q + dim])
                row, known = scratch[i], block[i]
                for j in range(_padded(n)):
                    row[j] = scale * known[j] * (row[j] - mean)
            mix(scratch, False, n, joint, t0, k, n, dim, grad_joint, t0, q)
            mix(scratch, True, n, joint, t0, q, n, dim, grad_joint, t0, k)
