"""Compiled loops of softmax attention to a few learned mixtures of keys and values.

`softmax(q (E k)' / sqrt(dim)) F v` inside packed sequences, where E and F have one row
for each mixture and one column for each position. `joint` has queries, keys and values
side by side. For the pass back, the mixtures `E k` and `F v` of each head and sequence
are kept, and the softmax, whose rows are padded to a multiple of eight.
"""

import math
from typing import Any

import numpy as np

from coulomb.kernels.loops import _SUMS, _entry, _helper
from coulomb.kernels.maps import exp_row
from coulomb.kernels.packed_attention import dot, weigh
from coulomb.kernels.packed_blocks import mix, products

_f = np.float32
_ZERO, _ONE = _f(0), _f(1)


@_entry(_SUMS)
def attend_mixtures(
    heads: Any,
    mixtures: Any,
    joint: Any,
    bounds: Any,
    mixed: Any,
    shares: Any,
    out: Any,
) -> None:
    """Attend to mixtures; `mixed` and `shares` receive what the pass back needs."""
    keys, values = mixtures
    rank, width, tokens = keys.shape[0], out.shape[1], out.shape[0]
    dim, wide, count = width // heads, shares.shape[1], bounds.shape[0] - 1
    scale = _f(1.0 / math.sqrt(dim))
    real = np.zeros(wide, _f)
    for r in range(rank):
        real[r] = _ONE
    for head in range(heads):
        q = head * dim
        k, v = width + q, 2 * width + q
        for s in range(count):
            t0, n = bounds[s], bounds[s + 1] - bounds[s]
            i0, m0 = head * tokens + t0, 2 * rank * (head * count + s)
            mix(keys, False, rank, joint, t0, k, n, dim, mixed, m0, 0)
            mix(values, False, rank, joint, t0, v, n, dim, mixed, m0 + rank, 0)
            block = shares[i0 : i0 + n]
            products(joint, t0, q, n, mixed, m0, 0, rank, dim, False, block)
            for i in range(n):
                row = block[i]
                for r in range(rank, wide):
                    row[r] = row[0]
                exp_row(row, scale)
                weigh(row, real, rank, row)
            mix(block, False, n, mixed, m0 + rank, 0, rank, dim, out, t0, q)


@_helper(_SUMS)
def _add(block: Any, n: Any, total: Any) -> None:
    for r in range(total.shape[0]):
        row, new = total[r], block[r]
        for j in range(n):
            row[j] += new[j]


@_entry(_SUMS)
def attend_mixtures_back(
    heads: Any,
    mixtures: Any,
    joint: Any,
    bounds: Any,
    mixed: Any,
    shares: Any,
    out: Any,
    grad: Any,
    grad_joint: Any,
    grad_mixtures: Any,
) -> None:
    """Pull a gradient back through `attend_mixtures`, adding to that of E and F."""
    keys, values = mixtures
    grad_keys, grad_values = grad_mixtures
    rank, width, tokens = keys.shape[0], out.shape[1], out.shape[0]
    dim, wide, count = width // heads, shares.shape[1], bounds.shape[0] - 1
    scale = _f(1.0 / math.sqrt(dim))
    longest = 0
    for s in range(count):
        longest = max(longest, bounds[s + 1] - bounds[s])
    scratch = np.zeros((longest, wide), _f)
    pulled, spare = np.empty((rank, dim), _f), np.empty((rank, longest), _f)
    for head in range(heads):
        q = head * dim
        k, v = width + q, 2 * width + q
        for s in range(count):
            t0, n = bounds[s], bounds[s + 1] - bounds[s]
            i0, m0 = head * tokens + t0, 2 * rank * (head * count + s)
            block = shares[i0 : i0 + n]
            mix(block, True, rank, grad, t0, q, n, dim, pulled, 0, 0)
            mix(values, True, n, pulled, 0, 0, rank, dim, grad_joint, t0, v)
            products(pulled, 0, 0, rank, joint, t0, v, n, dim, False, spare)
            _add(spare, n, grad_values)
            products(grad, t0, q, n, mixed, m0 + rank, 0, rank, dim, False, scratch)
            for i in range(n):
                mean = dot(grad[t0 + i, q : q + dim], out[t0 + i, q : q + dim])
                row, known = scratch[i], block[i]
                for r in range(wide):
                    row[r] = scale * known[r] * (row[r] - mean)
            mix(scratch, False, n, mixed, m0, 0, rank, dim, grad_joint, t0, q)
            mix(scratch, True, rank, joint, t0, q, n, dim, pulled, 0, 0)
            mix(keys, True, n, pulled, 0, 0, rank, dim, grad_joint, t0, k)
            products(pulled, 0, 0, rank, joint, t0, k, n, dim, False, spare)
            _add(spare, n, grad_keys)
