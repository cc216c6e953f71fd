"""Elementary functions that LLVM turns into vector instructions, and rows of them."""

import math

import numpy as np
from numba import types
from numba.extending import overload

from coulomb.kernels.runtime import EXACT, SUMS, entry, helper

_f = np.float32
_ZERO, _ONE, _TWO = _f(0), _f(1), _f(2)


def sincos(a):
    """Sine and cosine for |a| <= 1e4, accurate to two units in the last place of 1."""
    raise NotImplementedError


def log(a):
    """Logarithm of a positive normal number."""
    raise NotImplementedError


def exp(a):
    """Exponential, held inside the range of normal numbers."""
    raise NotImplementedError


def _overload_by_type(stub, single, double):
    @overload(stub, jit_options={"fastmath": EXACT, "error_model": "numpy"})
    def choose(a):
        return single if a == types.float32 else double


# a = k pi + r with |r| <= pi/2: sine and cosine of r by near-minimax polynomials, and
# the same sign (-1)^k for both. The first part of pi is so short that its product with
# k is exact, with or without fused multiply-add.
_INV32, _MAGIC32 = _f(1 / math.pi), _f(1.5 * 2**23)
_PI32A, _PI32B = _f(3217 / 1024), _f(math.pi - 3217 / 1024)
_S1, _S2, _S3, _S4 = (
    _f(-0.1666665794093739859),
    _f(0.00833305000286974371),
    _f(-0.0001980900472482457537),
    _f(2.605078280280485269e-6),
)
_C1, _C2, _C3, _C4, _C5 = (
    _f(-0.4999999935479827124),
    _f(0.04166663613555196306),
    _f(-0.001388835997114609643),
    _f(0.00002476009335932656418),
    _f(-2.605036377907135723e-7),
)
_31, _63 = np.int32(31), np.int64(63)
_POSITIVE, _LEAST = np.int32(2**31 - 1), np.int32(-(2**31))


def _sincos32(a):
    t = a * _INV32 + _MAGIC32
    k = t - _MAGIC32
    r = (a - k * _PI32A) - k * _PI32B
    u = r * r
    s = r * (_ONE + u * (_S1 + u * (_S2 + u * (_S3 + u * _S4))))
    c = _ONE + u * (_C1 + u * (_C2 + u * (_C3 + u * (_C4 + u * _C5))))
    # The last bit of t is that of k.
    sign = np.int32(np.float32(t).view(np.int32) << _31)
    s = np.int32(np.float32(s).view(np.int32) ^ sign).view(np.float32)
    c = np.int32(np.float32(c).view(np.int32) ^ sign).view(np.float32)
    return s, c


_INV64, _MAGIC64 = 1 / math.pi, 1.5 * 2.0**52
_PI64A = round(math.pi * 2**38) / 2**38
# pi to twice the precision: the double nearest to pi and what it lacks.
_PI64B = (math.pi - _PI64A) + 1.2246467991473532e-16


def _sincos64(a):
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


# log(2^e m) = e log 2 + 2 artanh((m - 1) / (m + 1)) with m between sqrt(1/2) and
# sqrt(2), where the series of artanh gains three bits and a half with every term.
_SQRT_HALF32, _23, _52 = np.int32(0x3F3504F3), np.int32(23), np.int64(52)
_SQRT_HALF64 = np.int64(0x3FE6A09E667F3BCD)
_LN2 = _f(math.log(2))
_T3, _T5, _T7, _T9 = _f(1 / 3), _f(1 / 5), _f(1 / 7), _f(1 / 9)


def _log32(a):
    bits = np.float32(a).view(np.int32)
    e = np.int32(np.int32(bits - _SQRT_HALF32) >> _23)
    m = np.int32(bits - np.int32(e << _23)).view(np.float32)
    z = (m - _ONE) / (m + _ONE)
    u = z * z
    series = _ONE + u * (_T3 + u * (_T5 + u * (_T7 + u * _T9)))
    return np.float32(e) * _LN2 + _TWO * z * series


def _log64(a):
    bits = np.float64(a).view(np.int64)
    e = (bits - _SQRT_HALF64) >> _52
    m = np.int64(bits - (e << _52)).view(np.float64)
    z = (m - 1.0) / (m + 1.0)
    u = z * z
    series = 1 / 17 + u * (1 / 19 + u * (1 / 21 + u * (1 / 23)))
    series = 1 / 9 + u * (1 / 11 + u * (1 / 13 + u * (1 / 15 + u * series)))
    series = 1.0 + u * (1 / 3 + u * (1 / 5 + u * (1 / 7 + u * series)))
    return np.float64(np.int32(e)) * math.log(2.0) + 2.0 * z * series


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


def _exp32(a):
    a = min(max(a, _LOW32), _HIGH32)
    t = a * _LOG2E32 + _MAGIC32
    k = t - _MAGIC32
    r = (a - k * _LN2A32) - k * _LN2B32
    tail = _E4 + r * (_E5 + r * (_E6 + r * _E7))
    power = _ONE + r * (_ONE + r * (_E2 + r * (_E3 + r * tail)))
    lift = np.int32((np.float32(t).view(np.int32) - _MAGIC32_BITS) << _23)
    return np.int32(np.float32(power).view(np.int32) + lift).view(np.float32)


def _exp64(a):
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


_overload_by_type(sincos, _sincos32, _sincos64)
_overload_by_type(log, _log32, _log64)
_overload_by_type(exp, _exp32, _exp64)


@entry(EXACT)
def sincos_row(a, sine, cosine):
    """Fill `sine` and `cosine` with the values at `a`."""
    for i in range(a.shape[0]):
        sine[i], cosine[i] = sincos(a[i])


@helper(SUMS)
def log1p(t):
    """log(1 + t) = 2 artanh(t / (2 + t)) for t from 0 to 1."""
    z = t / (_TWO + t)
    u = z * z
    tail = _f(1 / 9) + u * (_f(1 / 11) + u * _f(1 / 13))
    tail = _f(1 / 3) + u * (_f(1 / 5) + u * (_f(1 / 7) + u * tail))
    return _TWO * z * (_ONE + u * tail)


# LLVM takes the largest of numbers one by one, that of integers in vectors, which is
# seven times as fast. A nan with the sign of a positive number is larger than infinity.
@helper(EXACT)
def _ordered(bits):
    """Turn the bits of a number into an integer that grows with it, and back."""
    return np.int32(bits ^ np.int32(np.int32(bits >> _31) & _POSITIVE))


@helper(EXACT)
def row_size(row):
    """Give the largest magnitude, or what is not finite."""
    top = np.int32(0)
    for c in range(row.shape[0]):
        bits = np.int32(np.float32(row[c]).view(np.int32) & _POSITIVE)
        top = bits if bits > top else top
    return np.int32(top).view(np.float32)


@helper(EXACT)
def row_max(row):
    """Give the largest element."""
    top = _LEAST
    for c in range(row.shape[0]):
        bits = _ordered(np.float32(row[c]).view(np.int32))
        top = bits if bits > top else top
    return np.int32(_ordered(top)).view(np.float32)


@helper(EXACT)
def row_min(row):
    """Give the least element."""
    low = _POSITIVE
    for c in range(row.shape[0]):
        bits = _ordered(np.float32(row[c]).view(np.int32))
        low = bits if bits < low else low
    return np.int32(_ordered(low)).view(np.float32)


@helper(SUMS)
def exp_row(row, scale):
    """Make a row `exp(scale (a - max a))`, and give its sum."""
    top, total = row_max(row), _ZERO
    for c in range(row.shape[0]):
        row[c] = exp(scale * (row[c] - top))
        total += row[c]
    return total
