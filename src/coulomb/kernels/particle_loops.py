"""The compiled loops of the particle system.

Arrays are C-contiguous and hold one real type, float32 or float64. Data and positions
are transposed, one row per coordinate, and padded with zeros to a multiple of `LANES`,
so that the innermost loops run over long contiguous rows that LLVM turns into vector
instructions without a scalar remainder. Sums of a tile are kept in the arrays' own type
and added up in float64.
"""

import math

import numpy as np

from coulomb.kernels.math import exp, log, sincos
from coulomb.kernels.runtime import EXACT, SUMS, entry, helper

LANES = 32
BLOCK = 512  # particles whose forces are summed side by side
TILE = 1024  # samples or partners whose intermediate values stay in the first cache
SCRATCH = 1 << 17  # bytes of sines and cosines kept between the two passes

# The law of the pair force, chosen once outside the loops.
LOG, INVERSE, INVERSE_SQUARE, LINEAR, POWER = range(5)


@helper(EXACT)
def _angles(w, k, tile, m, a, b):
    """a[i] = sum_j w[k, j] tile[j, i], and the same with k + 1 for b.

    Two particles share every load of a sample. Three coordinates at a time: with four,
    LLVM would need more checks that arrays do not overlap than it is willing to make.
    """
    p = w.shape[1]
    lead = (p - 1) % 3 + 1
    w0, v0 = w[k, 0], w[k + 1, 0]
    if lead == 1:
        for i in range(m):
            a[i] = w0 * tile[0, i]
            b[i] = v0 * tile[0, i]
    elif lead == 2:
        w1, v1 = w[k, 1], w[k + 1, 1]
        for i in range(m):
            a[i] = w0 * tile[0, i] + w1 * tile[1, i]
            b[i] = v0 * tile[0, i] + v1 * tile[1, i]
    else:
        w1, v1, w2, v2 = w[k, 1], w[k + 1, 1], w[k, 2], w[k + 1, 2]
        for i in range(m):
            a[i] = w0 * tile[0, i] + w1 * tile[1, i] + w2 * tile[2, i]
            b[i] = v0 * tile[0, i] + v1 * tile[1, i] + v2 * tile[2, i]
    for j in range(lead, p, 3):
        w0, w1, w2 = w[k, j], w[k, j + 1], w[k, j + 2]
        v0, v1, v2 = w[k + 1, j], w[k + 1, j + 1], w[k + 1, j + 2]
        for i in range(m):
            x0, x1, x2 = tile[j, i], tile[j + 1, i], tile[j + 2, i]
            a[i] = a[i] + w0 * x0 + w1 * x1 + w2 * x2
            b[i] = b[i] + v0 * x0 + v1 * x1 + v2 * x2


@helper(SUMS)
def _weighted_rows(g, h, tile, m, k, total):
    """total[k, j] += sum_i g[i] tile[j, i], and the same with h for k + 1."""
    p = total.shape[1]
    lead = (p - 1) % 4 + 1
    zero = g.dtype.type(0)
    for j in range(lead):
        t0, u0 = zero, zero
        for i in range(m):
            t0 += g[i] * tile[j, i]
            u0 += h[i] * tile[j, i]
        total[k, j] += t0
        total[k + 1, j] += u0
    for j in range(lead, p, 4):
        t0, t1, t2, t3 = zero, zero, zero, zero
        u0, u1, u2, u3 = zero, zero, zero, zero
        for i in range(m):
            x0, x1, x2, x3 = tile[j, i], tile[j + 1, i], tile[j + 2, i], tile[j + 3, i]
            t0 += g[i] * x0
            t1 += g[i] * x1
            t2 += g[i] * x2
            t3 += g[i] * x3
            u0 += h[i] * x0
            u1 += h[i] * x1
            u2 += h[i] * x2
            u3 += h[i] * x3
        total[k, j] += t0
        total[k, j + 1] += t1
        total[k, j + 2] += t2
        total[k, j + 3] += t3
        total[k + 1, j] += u0
        total[k + 1, j + 1] += u1
        total[k + 1, j + 2] += u2
        total[k + 1, j + 3] += u3


@helper(SUMS)
def _sincos_tile(angles, m, k, t, waves):
    """Sine and cosine of a tile."""
    for i in range(m):
        waves[k, t, 0, i], waves[k, t, 1, i] = sincos(angles[i])


@helper(SUMS)
def _weighted_sums(y, j, m, k, t, waves):
    """Add up a tile weighted by target j."""
    zero = waves.dtype.type(0)
    s_sum, c_sum = zero, zero
    for i in range(m):
        s_sum += y[j, i] * waves[k, t, 0, i]
        c_sum += y[j, i] * waves[k, t, 1, i]
    return s_sum, c_sum


@helper(SUMS)
def _responses(y, m, k, t, waves, total, out):
    """out[i] = sum_c y[c, i] (S_c cosine[i] - C_c sine[i])."""
    real = out.dtype.type
    s_sum, c_sum = real(total[k, 0, 0]), real(total[k, 0, 1])
    for i in range(m):
        out[i] = y[0, i] * (s_sum * waves[k, t, 1, i] - c_sum * waves[k, t, 0, i])
    for j in range(1, y.shape[0]):
        s_sum, c_sum = real(total[k, j, 0]), real(total[k, j, 1])
        for i in range(m):
            out[i] += y[j, i] * (s_sum * waves[k, t, 1, i] - c_sum * waves[k, t, 0, i])


@entry(SUMS)
def fourier_range(first, end, positions, x, y, n, scale, potential, gradient):
    """Potential and gradient of the particles ``first .. end - 1``.

    `x` and `y` are in tiles, shape (tiles, coordinates, samples). Two passes over the
    samples, a few particles at a time: the first leaves sines and cosines in a scratch
    that the second cache holds, the second weighs them by the sums. Particles go in
    pairs, and `first` is even so that the pairs are always the same.
    """
    p, c, tiles, width = x.shape[1], y.shape[1], x.shape[0], x.shape[2]
    real = positions.dtype.type
    pairs = SCRATCH // (4 * positions.itemsize * max(1, tiles * width))
    block = 2 * max(1, min(8, pairs))
    waves = np.zeros((block, tiles, 2, width), positions.dtype)
    row = np.zeros((2, width), positions.dtype)
    even, odd = row[0], row[1]
    w = np.zeros((block, p), positions.dtype)
    total = np.empty((block, c, 2))
    slope = np.empty((block, p))
    for base in range(first, end, block):
        here = min(block, end - base)
        for b in range(here):
            for j in range(p):
                w[b, j] = positions[j, base + b]
        total[:] = 0.0
        slope[:] = 0.0
        for t in range(tiles):
            x_tile, y_tile = x[t], y[t]
            # Simple loops run in steps of LANES, sines in steps of 8.
            left = n - t * width
            m = min(width, (left + LANES - 1) // LANES * LANES)
            m8 = min(width, (left + 7) // 8 * 8)
            for b in range(here):
                if b % 2 == 0:
                    _angles(w, b, x_tile, m, even, odd)
                angles = odd if b % 2 else even
                _sincos_tile(angles, m8, b, t, waves)
                for j in range(c):
                    s_sum, c_sum = _weighted_sums(y_tile, j, m, b, t, waves)
                    total[b, j, 0] += s_sum
                    total[b, j, 1] += c_sum
        for t in range(tiles):
            x_tile, y_tile = x[t], y[t]
            m = min(width, (n - t * width + LANES - 1) // LANES * LANES)
            for b in range(here):
                g = odd if b % 2 else even
                _responses(y_tile, m, b, t, waves, total, g)
                if b % 2 == 1 or b == here - 1:
                    _weighted_rows(even, odd, x_tile, m, b - b % 2, slope)
        for b in range(here):
            energy = 0.0
            for j in range(c):
                energy += total[b, j, 0] ** 2 + total[b, j, 1] ** 2
            potential[base + b] = real(-scale * energy)
            for j in range(p):
                gradient[base + b, j] = real(-2.0 * scale * slope[b, j])


@helper(SUMS)
def _squared_distances(w, rows, start, m, out):
    """out[i] = sum_j (w[j] - rows[j, start + i])^2, four coordinates at a time."""
    p = w.shape[0]
    lead = (p - 1) % 4 + 1
    x0 = rows[0, start : start + m]
    v0 = w[0]
    for i in range(m):
        out[i] = (v0 - x0[i]) * (v0 - x0[i])
    for j in range(1, lead):
        x0 = rows[j, start : start + m]
        v0 = w[j]
        for i in range(m):
            out[i] += (v0 - x0[i]) * (v0 - x0[i])
    for j in range(lead, p, 4):
        x0 = rows[j, start : start + m]
        x1 = rows[j + 1, start : start + m]
        x2 = rows[j + 2, start : start + m]
        x3 = rows[j + 3, start : start + m]
        v0, v1, v2, v3 = w[j], w[j + 1], w[j + 2], w[j + 3]
        for i in range(m):
            d0, d1, d2, d3 = v0 - x0[i], v1 - x1[i], v2 - x2[i], v3 - x3[i]
            out[i] += d0 * d0 + d1 * d1 + d2 * d2 + d3 * d3


@helper(SUMS)
def _pair_forces(r2, m, law, s, floor, out):
    """Fill `out` with r^(-s-2), 0 below the floor; count coincident partners."""
    real = r2.dtype.type
    zero, one, half = real(0), real(1), real(-0.5 * (s + 2.0))
    tiny, low = real(floor[0]), real(floor[1])
    count = zero  # of the type of r2, so that it stays in the same vector registers
    if law == LOG:
        for i in range(m):
            count += one if r2[i] < tiny else zero
            out[i] = one / r2[i] if r2[i] >= low else zero
    elif law == INVERSE:
        for i in range(m):
            count += one if r2[i] < tiny else zero
            out[i] = one / (r2[i] * math.sqrt(r2[i])) if r2[i] >= low else zero
    elif law == INVERSE_SQUARE:
        for i in range(m):
            count += one if r2[i] < tiny else zero
            out[i] = one / (r2[i] * r2[i]) if r2[i] >= low else zero
    elif law == LINEAR:
        for i in range(m):
            count += one if r2[i] < tiny else zero
            out[i] = one / math.sqrt(r2[i]) if r2[i] >= low else zero
    else:
        for i in range(m):
            count += one if r2[i] < tiny else zero
            out[i] = exp(half * log(r2[i])) if r2[i] >= low else zero
    return count


@helper(SUMS)
def _pair_energies(r2, m, law, s, eps2, out):
    """Fill `out` with g_s(max(r, eps)); infinite at 0 for s >= 0 and eps = 0."""
    real = r2.dtype.type
    zero, one, half = real(0), real(1), real(-0.5 * s)
    low = real(eps2)
    top = real(np.inf) if s >= 0.0 else zero
    sign = one if s >= 0.0 else -one
    if law == LOG:
        minus_half = real(-0.5)
        for i in range(m):
            q = max(r2[i], low)
            out[i] = minus_half * log(q) if q > zero else top
    elif law == INVERSE:
        for i in range(m):
            q = max(r2[i], low)
            out[i] = one / math.sqrt(q) if q > zero else top
    elif law == INVERSE_SQUARE:
        for i in range(m):
            q = max(r2[i], low)
            out[i] = one / q if q > zero else top
    elif law == LINEAR:
        for i in range(m):
            out[i] = -math.sqrt(max(r2[i], low))
    else:
        for i in range(m):
            q = max(r2[i], low)
            out[i] = sign * exp(half * log(q)) if q > zero else top


@helper(SUMS)
def _weighted_differences(f, w, rows, start, m, total):
    """total[j] += sum_i f[i] (w[j] - rows[j, start + i]), four at a time."""
    p = w.shape[0]
    lead = (p - 1) % 4 + 1
    zero = f.dtype.type(0)
    for j in range(lead):
        x0 = rows[j, start : start + m]
        v0 = w[j]
        t0 = zero
        for i in range(m):
            t0 += f[i] * (v0 - x0[i])
        total[j] += t0
    for j in range(lead, p, 4):
        x0 = rows[j, start : start + m]
        x1 = rows[j + 1, start : start + m]
        x2 = rows[j + 2, start : start + m]
        x3 = rows[j + 3, start : start + m]
        v0, v1, v2, v3 = w[j], w[j + 1], w[j + 2], w[j + 3]
        t0, t1, t2, t3 = zero, zero, zero, zero
        for i in range(m):
            t0 += f[i] * (v0 - x0[i])
            t1 += f[i] * (v1 - x1[i])
            t2 += f[i] * (v2 - x2[i])
            t3 += f[i] * (v3 - x3[i])
        total[j] += t0
        total[j + 1] += t1
        total[j + 2] += t2
        total[j + 3] += t3


@helper(SUMS)
def _log_block(first, end, rows, n, floor, acc):
    """Log forces on a block of particles in up to five coordinates; count coincidences.

    The same sums as `_squared_distances`, `_pair_forces` and `_weighted_differences`
    with the loops exchanged: one partner at a time meets the whole block, so that every
    number of a pair stays in a register.
    """
    p = rows.shape[0]
    real = rows.dtype.type
    zero, one = real(0), real(1)
    tiny, low = real(floor[0]), real(floor[1])
    m = end - first
    blank = acc[5, :m]
    a0, a1, a2, a3, a4 = acc[0, :m], acc[1, :m], acc[2, :m], acc[3, :m], acc[4, :m]
    x0 = rows[0, first:end]
    x1 = rows[1, first:end] if p > 1 else blank
    x2 = rows[2, first:end] if p > 2 else blank
    x3 = rows[3, first:end] if p > 3 else blank
    x4 = rows[4, first:end] if p > 4 else blank
    acc[:] = zero
    count = zero
    for k in range(n):
        v0 = rows[0, k]
        v1 = rows[1, k] if p > 1 else zero
        v2 = rows[2, k] if p > 2 else zero
        v3 = rows[3, k] if p > 3 else zero
        v4 = rows[4, k] if p > 4 else zero
        near = zero
        for i in range(m):
            d0, d1, d2 = x0[i] - v0, x1[i] - v1, x2[i] - v2
            d3, d4 = x3[i] - v3, x4[i] - v4
            r2 = d0 * d0 + d1 * d1 + d2 * d2 + d3 * d3 + d4 * d4
            near += one if r2 < tiny else zero
            f = one / r2 if r2 >= low else zero
            a0[i] += f * d0
            a1[i] += f * d1
            a2[i] += f * d2
            a3[i] += f * d3
            a4[i] += f * d4
        count += near
    return count


@helper(EXACT)
def _push_apart(k, r2, start, m, tiny, directions, push, total):
    """Add the unit vector away from every coincident partner, times `push`."""
    p = total.shape[0]
    for i in range(m):
        other = start + i
        if r2[i] < tiny and other != k:
            norm = 0.0
            for j in range(p):
                norm += (directions[k, j] - directions[other, j]) ** 2
            for j in range(p):
                gap = directions[k, j] - directions[other, j]
                total[j] += push * gap / math.sqrt(norm)


@entry(SUMS)
def riesz_range(first, end, rows, n, pair_law, directions, gradient):
    """Mean pair gradient at the particles ``first .. end - 1``.

    `rows` are the positions, transposed. `pair_law` holds the number of the law, s, two
    squared distances (below the first a pair is coincident, below the second it exerts
    no force) and how strongly coincident particles are pushed apart.
    """
    law, s, floor, push = pair_law
    p = rows.shape[0]
    real = rows.dtype.type
    padded = min(rows.shape[1], (n + LANES - 1) // LANES * LANES)
    r2 = np.empty(TILE, rows.dtype)
    f = np.empty(TILE, rows.dtype)
    w = np.empty(p, rows.dtype)
    total = np.empty(p)
    tiny = real(floor[0])
    mean = 1.0 / max(1, n - 1)
    factor = abs(s) if s != 0.0 else 1.0
    if law == LOG and p <= 5 and n <= BLOCK:
        acc = np.empty((6, BLOCK), rows.dtype)
        if _log_block(first, end, rows, n, floor, acc) == end - first:
            # Nobody coincides but each with itself.
            for k in range(first, end):
                for j in range(p):
                    gradient[k, j] = real(-mean * np.float64(acc[j, k - first]))
            return
    for k in range(first, end):
        for j in range(p):
            w[j] = rows[j, k]
        total[:] = 0.0
        for start in range(0, padded, TILE):
            m = min(TILE, padded - start)
            live = min(m, n - start)
            _squared_distances(w, rows, start, m, r2)
            for i in range(live, m):
                r2[i] = real(1)
            coincident = _pair_forces(r2, m, law, s, floor, f)
            for i in range(live, m):
                f[i] = real(0)
            own = start <= k and k < start + m
            if own:
                f[k - start] = real(0)
            _weighted_differences(f, w, rows, start, m, total)
            if coincident > (1 if own else 0):
                _push_apart(k, r2, start, live, tiny, directions, push / factor, total)
        for j in range(p):
            gradient[k, j] = real(-mean * factor * total[j])


@entry(SUMS)
def riesz_energy_range(first, end, rows, n, law, s, eps, potential):
    """Mean pair potential of the particles ``first .. end - 1``."""
    p = rows.shape[0]
    real = rows.dtype.type
    r2 = np.empty(TILE, rows.dtype)
    g = np.empty(TILE, rows.dtype)
    w = np.empty(p, rows.dtype)
    for k in range(first, end):
        for j in range(p):
            w[j] = rows[j, k]
        energy = 0.0
        for start in range(0, n, TILE):
            m = min(TILE, n - start)
            _squared_distances(w, rows, start, m, r2)
            _pair_energies(r2, m, law, s, eps * eps, g)
            if start <= k and k < start + m:
                g[k - start] = real(0)
            part = real(0)
            for i in range(m):
                part += g[i]
            energy += part
        potential[k] = real(energy / max(1, n - 1))


@helper(EXACT)
def _gather(rows, targets, batch, x, y):
    """Lay out the samples of a batch in tiles; the padding stays zero."""
    width = x.shape[2]
    for i in range(batch.shape[0]):
        sample, t, lane = batch[i], i // width, i % width
        for j in range(x.shape[1]):
            x[t, j, lane] = rows[sample, j]
        for j in range(y.shape[1]):
            y[t, j, lane] = targets[sample, j]


@helper(EXACT)
def _move(first, end, here, there, drift, noise, step, walls, accounts):
    """There = P(here - step rate clip(drift) + noise), particle by particle."""
    rates, mask, clip, radius = walls
    drift_squares, move_squares = accounts
    p = here.shape[0]
    new = np.empty(p)
    for k in range(first, end):
        size = 0.0
        for j in range(p):
            if mask.size:
                drift[k, j] *= mask[k, j]
            size += np.float64(drift[k, j]) ** 2
        factor = clip / math.sqrt(size) if size > clip * clip else 1.0
        pace = step * rates[k] * factor
        norm = 0.0
        for j in range(p):
            new[j] = here[j, k] - pace * drift[k, j]
            if noise.size:
                new[j] += noise[k, j] * (mask[k, j] if mask.size else 1.0)
            norm += new[j] ** 2
        outside = norm > radius * radius
        moved = 0.0
        for j in range(p):
            # Divided first: particles on one axis then meet the wall at the very same
            # point, and coincide instead of being one rounding error apart.
            there[j, k] = new[j] / math.sqrt(norm) * radius if outside else new[j]
            moved += (np.float64(there[j, k]) - np.float64(here[j, k])) ** 2
        drift_squares[k] = size * pace * pace
        move_squares[k] = moved


@entry(SUMS)
def langevin_range(
    first, end, step_from, step_to, buffers, n, data, pairs, batches, field, moves
):
    """Make steps ``step_from .. step_to - 1`` of the particles ``first .. end - 1``.

    Step m reads all positions from ``buffers[m % 2]`` and writes those of the range to
    the other buffer. An empty `batches`, `noise` or `mask` means none. `field` holds
    space for the gradients of both potentials, and whether it has those of step zero.
    """
    rows, targets, x, y, scale = data
    strength, pair_law, directions = pairs
    gradient, force, known = field
    noise, step_sizes, rates, mask, precision, clip, radius, squares = moves
    p = buffers.shape[1]
    potential = np.empty(n, buffers.dtype)
    drift = np.empty((n, p), buffers.dtype)
    size, samples = batches.shape[1], rows.shape[0]
    if size:
        samples = size
        width = min(TILE, (size + LANES - 1) // LANES * LANES)
        tiles = (size + width - 1) // width
        x = np.zeros((tiles, p, width), buffers.dtype)
        y = np.zeros((tiles, y.shape[1], width), buffers.dtype)
    for m in range(step_from, step_to):
        here, there = buffers[m % 2], buffers[1 - m % 2]
        if size:
            _gather(rows, targets, batches[m], x, y)
        if scale != 0.0 and not (known and m == 0):
            fourier_range(first, end, here, x, y, samples, scale, potential, gradient)
        if strength != 0.0 and not (known and m == 0):
            riesz_range(first, end, here, n, pair_law, directions, force)
        for k in range(first, end):
            for j in range(p):
                drift[k, j] = (
                    (gradient[k, j] if scale != 0.0 else 0.0)
                    + precision[k] * here[j, k]
                    + strength * force[k, j]
                )
        pushes = noise[m] if noise.size else noise[0]
        walls = (rates, mask, clip, radius)
        accounts = (squares[0, m], squares[1, m])
        _move(first, end, here, there, drift, pushes, step_sizes[m], walls, accounts)
