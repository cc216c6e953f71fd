"""One token of recurrent attention with exponential features, compiled.

Arrays are C-contiguous float32: queries, keys and values `(batch, heads, dim)`, sums
`(batch, heads, dim_v + 1, features)` and shifts `(batch, heads, features)`. Positions
are those of each head, or of one for all.
"""

import math
from typing import Any

import numpy as np

from coulomb.kernels.loops import _SUMS, _entry, _exp, _helper

_f = np.float32
_ZERO, _ONE, _HALF = _f(0), _f(1), _f(0.5)


@_helper(_SUMS)
def _project(
    positions: Any, head: Any, scale: Any, q: Any, k: Any, a_q: Any, a_k: Any
) -> None:
    dim = q.shape[0]
    for c in range(a_q.shape[0]):
        row, left, right = positions[head, c], _ZERO, _ZERO
        for d in range(dim):
            left += row[d] * q[d]
            right += row[d] * k[d]
        a_q[c], a_k[c] = scale * left, scale * right


# As long as there is no nan; with one, everything is nan all the same.
@_helper(_SUMS | {"nnan"})
def _largest(row: Any) -> Any:
    top = row[0]
    for c in range(row.shape[0]):
        top = max(top, row[c])
    return top


@_helper(_SUMS)
def _softmax(row: Any, scale: Any) -> None:
    top, total = _largest(row), _ZERO
    for c in range(row.shape[0]):
        row[c] = _exp(row[c] - top)
        total += row[c]
    inverse = scale / total
    for c in range(row.shape[0]):
        row[c] *= inverse


@_helper(_SUMS | {"nnan"})
def _favor(k: Any, a_q: Any, a_k: Any, shift: Any, higher: Any, factors: Any) -> None:
    """Turn exponents into features of query and key, at a shift that may rise."""
    half = _ZERO
    for d in range(k.shape[0]):
        half += k[d] * k[d]
    half = _HALF * half + _f(0.5 * math.log(a_q.shape[0]))
    for c in range(a_q.shape[0]):
        key = a_k[c] - half
        higher[c] = max(shift[c], key)
        factors[c] = _exp(shift[c] - higher[c])
        a_k[c] = _exp(key - higher[c])
        a_q[c] += higher[c]
    _softmax(a_q, _ONE)


@_helper(_SUMS)
def _step(old: Any, factors: Any, phi_q: Any, phi_k: Any, value: Any, new: Any) -> Any:
    """Add the token to a row of the sums; give the product with the query."""
    total = _ZERO
    for c in range(old.shape[0]):
        new[c] = old[c] * factors[c] + value * phi_k[c]
    for c in range(old.shape[0]):
        total += new[c] * phi_q[c]
    return total


@_entry(_SUMS)
def decode(
    about: Any,
    positions: Any,
    token: Any,
    state: Any,
    after: Any,
    out: Any,
    first: Any,
    end: Any,
) -> None:
    """Add one token to the states from `first` to `end`; attend to all tokens so far.

    `about` is whether the map is favor and the factor of the particles; `token` holds
    q, k and v, `state` and `after` sums and shifts.
    """
    favor, scale = about[0], _f(about[1])
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
