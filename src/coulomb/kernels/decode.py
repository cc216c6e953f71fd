"""One token of recurrent attention with exponential features, compiled.

Arrays are C-contiguous float32: queries, keys and values `(batch, heads, dim)`, sums
`(batch, heads, dim_v + 1, features)` and shifts `(batch, heads, features)`. Positions
are those of each head, or of one for all.
"""

import math

import numpy as np

from coulomb.kernels.jit import SUMS, entry, helper
from coulomb.kernels.math import exp, exp_row

_f = np.float32
_ZERO, _ONE, _HALF = _f(0), _f(1), _f(0.5)


@helper(SUMS)
def _project(positions, head, scale, q, k, a_q, a_k):
    dim = q.shape[0]
    for c in range(a_q.shape[0]):
        row, left, right = positions[head, c], _ZERO, _ZERO
        for d in range(dim):
            left += row[d] * q[d]
            right += row[d] * k[d]
        a_q[c], a_k[c] = scale * left, scale * right


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
def decode(options, positions, token, state, after, out, first, end):
    """Add one token to the states from `first` to `end`; attend to all tokens so far.

    `about` is whether the map is favor and the factor of the particles; `token` holds
    q, k and v, `state` and `after` sums and shifts.
    """
    favor, scale = options[0], _f(options[1])
    q, k, v = token
    sums, shift = state
    new_sums, new_shift = after
    particles, n, _ = positions.shape
    _, heads, dim_v = v.shape
    a_q, a_k, factors = np.empty(n, _f), np.empty(n, _f), np.ones(n, _f)
    for group in range(first, end):
        b, h = group // heads, group % heads
        key = k[b, h]
        _project(positions, h % particles, scale, q[b, h], key, a_q, a_k)
        if favor:
            _favor(key, a_q, a_k, shift[b, h], new_shift[b, h], factors)
        else:
            new_shift[b, h] = shift[b, h]
            _softmax(a_q, _ONE)
            _softmax(a_k, _f(math.sqrt(n)))
        old, new = sums[b, h], new_sums[b, h]
        normaliser = _step(old[dim_v], factors, a_q, a_k, _ONE, new[dim_v])
        # Without a key there is nothing to divide by, and the output is zero.
        inverse = _ONE / normaliser if normaliser != _ZERO else _ZERO
        for c in range(dim_v):
            total = _step(old[c], factors, a_q, a_k, v[b, h, c], new[c])
            out[b, h, c] = total * inverse
