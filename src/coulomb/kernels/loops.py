"""The compiled loops of the particle system.

They live in one file because numba decides by the age of a function's own file whether
its cached machine code is stale: loops that call each other must age together.

Conventions. Arrays are C-contiguous and hold one real type, float32 or float64. Data
and positions are transposed, one row per coordinate, and padded with zeros to a
multiple of `LANES`, so that the innermost loops run over long contiguous rows that
LLVM turns into vector instructions without a scalar remainder. Sums of a tile are kept
in the arrays' own type and added up in float64.
"""

import math
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

LANES = 32
BLOCK = 512  # particles whose forces are summed side by side
TILE = 1024  # samples or partners whose intermediate values stay in the first cache
SCRATCH = 1 << 17  # bytes of sines and cosines kept between the two passes

# Loops that write to an array they do not read never sum at the same time. LLVM would
# compile such a loop twice, vectorised and scalar, and choose by how many bytes after
# an input the output begins (a threshold that grows with the vector width); the two sum
# in different orders, so that the last bit would depend on addresses. Loops without a
# sum give equal bits either way, loops without a store need no choice, and for arrays
# updated in place LLVM asks whether two ranges truly overlap, which none here do.

# The law of the pair force, chosen once outside the loops.
LOG, INVERSE, INVERSE_SQUARE, LINEAR, POWER = range(5)

# Sums may be reordered, which vector registers need; infinities and nan stay defined.
_SUMS = {"contract", "nsz", "reassoc", "arcp"}
# Range reduction and rounding by a magic number are lost if terms are reordered.
_EXACT = {"contract", "nsz"}


def _entry(fastmath: set[str]) -> Any:
    """Compile what Python calls, and cache it where a folder can be written."""
    options: dict[str, Any] = {"nogil": True, "fastmath": fastmath}
    options |= {"error_model": "numpy"}

    def decorate(function: Any) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # numba found no such folder
            return numba.njit(**options)(function)

    return decorate


def _helper(fastmath: set[str]) -> Any:
    """Compile what only compiled code calls: not cached, no entry from Python."""
    return numba.njit(
        nogil=True,
        fastmath=fastmath,
        error_model="numpy",
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
    )


def _sincos(a: Any) -> Any:
    """Sine and cosine for |a| <= 1e4, accurate to two units in the last place of 1."""
    raise NotImplementedError


def _log(a: Any) -> Any:
    """Logarithm of a positive normal number."""
    raise NotImplementedError


def _exp(a: Any) -> Any:
    """Exponential, held inside the range of normal numbers."""
    raise NotImplementedError


@overload(_sincos, jit_options={"fastmath": _EXACT, "error_model": "numpy"})
def _sincos_overload(a: Any) -> Any:
    if a == types.float32:
        return _sincos32
    return _sincos64


# a = k pi + r with |r| <= pi/2: sine and cosine of r by near-minimax polynomials, and
# the same sign (-1)^k for both. The first part of pi is so short that its product with
# k is exact, with or without fused multiply-add.
_f = np.float32
_INV32, _MAGIC32 = _f(1 / math.pi), _f(1.5 * 2**23)
_PI32A, _PI32B = _f(3217 / 1024), _f(math.pi - 3217 / 1024)
_S0, _S1, _S2, _S3, _S4 = (
    _f(1),
    _f(-0.1666665794093739859),
    _f(0.00833305000286974371),
    _f(-0.0001980900472482457537),
    _f(2.605078280280485269e-6),
)
_C0, _C1, _C2, _C3, _C4, _C5 = (
    _f(1),
    _f(-0.4999999935479827124),
    _f(0.04166663613555196306),
    _f(-0.001388835997114609643),
    _f(0.00002476009335932656418),
    _f(-2.605036377907135723e-7),
)
_i, _31, _63 = np.int32, np.int32(31), np.int64(63)


def _sincos32(a: Any) -> Any:
    t = a * _INV32 + _MAGIC32
    k = t - _MAGIC32
    r = (a - k * _PI32A) - k * _PI32B
    u = r * r
    s = r * (_S0 + u * (_S1 + u * (_S2 + u * (_S3 + u * _S4))))
    c = _C0 + u * (_C1 + u * (_C2 + u * (_C3 + u * (_C4 + u * _C5))))
    # The last bit of t is that of k.
    sign = np.int32(np.float32(t).view(np.int32) << _31)
    s = np.int32(np.float32(s).view(np.int32) ^ sign).view(np.float32)
    c = np.int32(np.float32(c).view(np.int32) ^ sign).view(np.float32)
    return s, c


_INV64, _MAGIC64 = 1 / math.pi, 1.5 * 2.0**52
_PI64A = round(math.pi * 2**38) / 2**38
# pi to twice the precision: the double nearest to pi and what it lacks.
_PI64B = (math.pi - _PI64A) + 1.2246467991473532e-16


def _sincos64(a: Any) -> Any:
    t = a * _INV64 + _MAGIC64
    k = t - _MAGIC64
    r = (a - k * _PI64A) - k * _PI64B
    u = r * r
    s = 1.604816401695955655e-10 + u * -7.374333879364098877e-13
    s = 2.755731660699526414e-6 + u * (-2.505188181197630128e-8 + u * s)
    s = 0.00833333333328269506 + u * (-0.0001984126982484557299 + u * s)
    s = r + r * u * (-0.1666666666666607174 + u * s)
    c = -1.146289879946699379e-11 + u * 4.608943481704137454e-14
    c = -2.755731638877400328e-7 + u * (2.087656172381245955e-9 + u * c)
    c = -0.001388888888877285143 + u * (0.00002480158727739087775 + u * c)
    c = 1.0 + u * (-0.499999999999999742 + u * (0.04166666666666387846 + u * c))
    sign = np.float64(t).view(np.int64) << _63
    s = np.int64(np.float64(s).view(np.int64) ^ sign).view(np.float64)
    c = np.int64(np.float64(c).view(np.int64) ^ sign).view(np.float64)
    return s, c


@overload(_log, jit_options={"fastmath": _EXACT, "error_model": "numpy"})
def _log_overload(a: Any) -> Any:
    if a == types.float32:
        return _log32
    return _log64


# log(2^e m) = e log 2 + 2 artanh((m - 1) / (m + 1)) with m between sqrt(1/2) and
# sqrt(2), where the series of artanh gains three bits and a half with every term.
_SQRT_HALF32, _23, _52 = np.int32(0x3F3504F3), np.int32(23), np.int64(52)
_SQRT_HALF64 = np.int64(0x3FE6A09E667F3BCD)
_LN2, _ONE32, _TWO32 = _f(math.log(2)), _f(1), _f(2)
_T3, _T5, _T7, _T9 = _f(1 / 3), _f(1 / 5), _f(1 / 7), _f(1 / 9)


def _log32(a: Any) -> Any:
    bits = np.float32(a).view(np.int32)
    e = np.int32(np.int32(bits - _SQRT_HALF32) >> _23)
    m = np.int32(bits - np.int32(e << _23)).view(np.float32)
    z = (m - _ONE32) / (m + _ONE32)
    u = z * z
    series = _ONE32 + u * (_T3 + u * (_T5 + u * (_T7 + u * _T9)))
    return np.float32(e) * _LN2 + _TWO32 * z * series


def _log64(a: Any) -> Any:
    bits = np.float64(a).view(np.int64)
    e = (bits - _SQRT_HALF64) >> _52
    m = np.int64(bits - (e << _52)).view(np.float64)
    z = (m - 1.0) / (m + 1.0)
    u = z * z
    series = 1 / 17 + u * (1 / 19 + u * (1 / 21 + u * (1 / 23)))
    series = 1 / 9 + u * (1 / 11 + u * (1 / 13 + u * (1 / 15 + u * series)))
    series = 1.0 + u * (1 / 3 + u * (1 / 5 + u * (1 / 7 + u * series)))
    return np.float64(np.int32(e)) * math.log(2.0) + 2.0 * z * series


@overload(_exp, jit_options={"fastmath": _EXACT, "error_model": "numpy"})
def _exp_overload(a: Any) -> Any:
    if a == types.float32:
        return _exp32
    return _exp64


# exp(k log 2 + r) = 2^k exp(r) with |r| <= log(2) / 2: the Taylor series, and k added
# to the exponent bits.
_LOG2E32, _LOW32, _HIGH32 = _f(1 / math.log(2)), _f(-87), _f(88)
_LN2A32 = _f(355 / 512)
_LN2B32 = _f(math.log(2) - 355 / 512)
_MAGIC32_BITS = np.int32(_MAGIC32.view(np.int32))
_LN2A64 = round(math.log(2) * 2**40) / 2**40
_LN2B64 = (math.log(2) - _LN2A64) + 2.3190468138462996e-17
_MAGIC64_BITS = np.int64(np.float64(_MAGIC64).view(np.int64))
_E2, _E3, _E4, _E5, _E6, _E7 = (_f(1 / math.factorial(k)) for k in range(2, 8))


def _exp32(a: Any) -> Any:
    a = min(max(a, _LOW32), _HIGH32)
    t = a * _LOG2E32 + _MAGIC32
    k = t - _MAGIC32
    r = (a - k * _LN2A32) - k * _LN2B32
    tail = _E4 + r * (_E5 + r * (_E6 + r * _E7))
    power = _ONE32 + r * (_ONE32 + r * (_E2 + r * (_E3 + r * tail)))
    lift = np.int32((np.float32(t).view(np.int32) - _MAGIC32_BITS) << _23)
    return np.int32(np.float32(power).view(np.int32) + lift).view(np.float32)


def _exp64(a: Any) -> Any:
    a = min(max(a, -708.0), 709.0)
    t = a * (1 / math.log(2.0)) + _MAGIC64
    k = t - _MAGIC64
    r = (a - k * _LN2A64) - k * _LN2B64
    tail = 1 / 39916800 + r * (1 / 479001600 + r * (1 / 6227020800))
    tail = 1 / 40320 + r * (1 / 362880 + r * (1 / 3628800 + r * tail))
    tail = 1 / 120 + r * (1 / 720 + r * (1 / 5040 + r * tail))
    power = 1.0 + r * (1.0 + r * (0.5 + r * (1 / 6 + r * (1 / 24 + r * tail))))
    lift = (np.float64(t).view(np.int64) - _MAGIC64_BITS) << _52
    return np.int64(np.float64(power).view(np.int64) + lift).view(np.float64)


@_entry(_EXACT)
def sincos_row(a: Any, sine: Any, cosine: Any) -> None:
    """Fill `sine` and `cosine` with the values at `a`."""
    for i in range(a.shape[0]):
        sine[i], cosine[i] = _sincos(a[i])


@_helper(_EXACT)
def _angles(w: Any, k: Any, tile: Any, m: Any, a: Any, b: Any) -> None:
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


@_helper(_SUMS)
def _weighted_rows(g: Any, h: Any, tile: Any, m: Any, k: Any, total: Any) -> None:
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


@_helper(_SUMS)
def _sincos_tile(angles: Any, m: Any, k: Any, t: Any, waves: Any) -> None:
    """Sine and cosine of a tile."""
    for i in range(m):
        waves[k, t, 0, i], waves[k, t, 1, i] = _sincos(angles[i])


@_helper(_SUMS)
def _weighted_sums(y: Any, j: Any, m: Any, k: Any, t: Any, waves: Any) -> Any:
    """Add up a tile weighted by target j."""
    zero = waves.dtype.type(0)
    s_sum, c_sum = zero, zero
    for i in range(m):
        s_sum += y[j, i] * waves[k, t, 0, i]
        c_sum += y[j, i] * waves[k, t, 1, i]
    return s_sum, c_sum


@_helper(_SUMS)
def _responses(
    y: Any, m: Any, k: Any, t: Any, waves: Any, total: Any, out: Any
) -> None:
    """out[i] = sum_c y[c, i] (S_c cosine[i] - C_c sine[i])."""
    real = out.dtype.type
    s_sum, c_sum = real(total[k, 0, 0]), real(total[k, 0, 1])
    for i in range(m):
        out[i] = y[0, i] * (s_sum * waves[k, t, 1, i] - c_sum * waves[k, t, 0, i])
    for j in range(1, y.shape[0]):
        s_sum, c_sum = real(total[k, j, 0]), real(total[k, j, 1])
        for i in range(m):
            out[i] += y[j, i] * (s_sum * waves[k, t, 1, i] - c_sum * waves[k, t, 0, i])


@_entry(_SUMS)
def fourier_range(
    first: Any,
    end: Any,
    positions: Any,
    x: Any,
    y: Any,
    n: Any,
    scale: Any,
    potential: Any,
    gradient: Any,
) -> None:
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


@_helper(_SUMS)
def _squared_distances(w: Any, rows: Any, start: Any, m: Any, out: Any) -> None:
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


@_helper(_SUMS)
def _pair_forces(r2: Any, m: Any, law: Any, s: Any, floor: Any, out: Any) -> Any:
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
            out[i] = _exp(half * _log(r2[i])) if r2[i] >= low else zero
    return count


@_helper(_SUMS)
def _pair_energies(r2: Any, m: Any, law: Any, s: Any, eps2: Any, out: Any) -> None:
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
            out[i] = minus_half * _log(q) if q > zero else top
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
            out[i] = sign * _exp(half * _log(q)) if q > zero else top


@_helper(_SUMS)
def _weighted_differences(
    f: Any, w: Any, rows: Any, start: Any, m: Any, total: Any
) -> None:
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


@_helper(_SUMS)
def _log_block(first: Any, end: Any, rows: Any, n: Any, floor: Any, acc: Any) -> Any:
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


@_helper(_EXACT)
def _push_apart(
    k: Any,
    r2: Any,
    start: Any,
    m: Any,
    tiny: Any,
    directions: Any,
    push: Any,
    total: Any,
) -> None:
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


@_entry(_SUMS)
def riesz_range(
    first: Any,
    end: Any,
    rows: Any,
    n: Any,
    law: Any,
    s: Any,
    floor: Any,
    push: Any,
    directions: Any,
    gradient: Any,
) -> None:
    """Mean pair gradient at the particles ``first .. end - 1``.

    `rows` are the positions, transposed. `floor` holds two squared distances: below
    the first a pair is coincident, below the second it exerts no force.
    """
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


@_entry(_SUMS)
def riesz_energy_range(
    first: Any, end: Any, rows: Any, n: Any, law: Any, s: Any, eps: Any, potential: Any
) -> None:
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


@_helper(_EXACT)
def _gather(rows: Any, targets: Any, batch: Any, x: Any, y: Any) -> None:
    """Lay out the samples of a batch in tiles; the padding stays zero."""
    width = x.shape[2]
    for i in range(batch.shape[0]):
        sample, t, lane = batch[i], i // width, i % width
        for j in range(x.shape[1]):
            x[t, j, lane] = rows[sample, j]
        for j in range(y.shape[1]):
            y[t, j, lane] = targets[sample, j]


@_helper(_EXACT)
def _move(
    first: Any,
    end: Any,
    here: Any,
    there: Any,
    drift: Any,
    noise: Any,
    step: Any,
    rates: Any,
    mask: Any,
    clip: Any,
    radius: Any,
    drift_squares: Any,
    move_squares: Any,
) -> None:
    """There = P(here - step rate clip(drift) + noise), particle by particle."""
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


@_entry(_SUMS)
def langevin_range(
    first: Any,
    end: Any,
    step_from: Any,
    step_to: Any,
    buffers: Any,
    n_particles: Any,
    rows: Any,
    targets: Any,
    x: Any,
    y: Any,
    scale: Any,
    batches: Any,
    noise: Any,
    step_sizes: Any,
    rates: Any,
    mask: Any,
    precision: Any,
    strength: Any,
    law: Any,
    s: Any,
    floor: Any,
    push: Any,
    directions: Any,
    clip: Any,
    radius: Any,
    drift_squares: Any,
    move_squares: Any,
) -> None:
    """Make steps ``step_from .. step_to - 1`` of the particles ``first .. end - 1``.

    Step m reads all positions from ``buffers[m % 2]`` and writes those of the range to
    the other buffer. An empty `batches`, `noise` or `mask` means none.
    """
    p = buffers.shape[1]
    potential = np.empty(n_particles, buffers.dtype)
    drift = np.zeros((n_particles, p), buffers.dtype)
    force = np.zeros((n_particles, p), buffers.dtype)
    size = batches.shape[1]
    n = rows.shape[0]
    if size:
        n = size
        width = min(TILE, (size + LANES - 1) // LANES * LANES)
        tiles = (size + width - 1) // width
        x = np.zeros((tiles, p, width), buffers.dtype)
        y = np.zeros((tiles, y.shape[1], width), buffers.dtype)
    for m in range(step_from, step_to):
        here, there = buffers[m % 2], buffers[1 - m % 2]
        if size:
            _gather(rows, targets, batches[m], x, y)
        if scale != 0.0:
            fourier_range(first, end, here, x, y, n, scale, potential, drift)
        if strength != 0.0:
            riesz_range(
                first,
                end,
                here,
                n_particles,
                law,
                s,
                floor,
                push,
                directions,
                force,
            )
        for k in range(first, end):
            for j in range(p):
                drift[k, j] = (
                    (drift[k, j] if scale != 0.0 else 0.0)
                    + precision[k] * here[j, k]
                    + strength * force[k, j]
                )
        _move(
            first,
            end,
            here,
            there,
            drift,
            noise[m] if noise.size else noise[0],
            step_sizes[m],
            rates,
            mask,
            clip,
            radius,
            drift_squares[m],
            move_squares[m],
        )
