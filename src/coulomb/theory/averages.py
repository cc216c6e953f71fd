"""Cell averages of a singular kernel.

`g_ij = mean over both cells of g(|w - w'|)`: finite for every `s < d`, and the
interaction energy of a piecewise constant density is exact with it.
"""

import itertools
import math

import numpy as np
import torch

from coulomb._support.errors import ParameterError
from coulomb.interactions import AbstractInteraction, Riesz
from coulomb.theory.grids import FloatArray

# Offsets up to _NEAR cells take more nodes; beyond, g is nearly polynomial.
_NEAR, _NODES_NEAR, _NODES_FAR = 8, 12, 4
_NODES_RADIAL, _NODES_ANGLE = 48, 24


def check_continuum(interaction: AbstractInteraction, dim: int) -> None:
    """Refuse interactions whose continuum energy is infinite.

    Examples
    --------
    >>> check_continuum(Riesz(s=1.0), 1)
    Traceback (most recent call last):
    coulomb._support.errors.ParameterError: `interaction` must have s < d or a ...
    """
    if not isinstance(interaction, Riesz) or interaction.truncation:
        return
    if interaction.s >= dim:
        raise ParameterError(
            f"`interaction` must have s < d or a truncation; got {interaction!r} in "
            f"d = {dim}. For s >= d the continuum energy of every measure with a "
            "density is infinite, so the mean-field and large-deviation statements "
            "hold for s < d or for the truncated kernel with fixed eps."
        )


def radial(interaction: AbstractInteraction, distance: FloatArray) -> FloatArray:
    """Evaluate `g(r)` on numpy arrays."""
    values = interaction.radial(torch.from_numpy(np.ascontiguousarray(distance)))
    return np.asarray(values.numpy(), dtype=np.float64)


def cell_averages(
    interaction: AbstractInteraction,
    shape: tuple[int, ...],
    spacing: tuple[float, ...],
) -> FloatArray:
    """Average `g` over pairs of cells, for every offset `k >= 0` between them.

    `g_k = int prod_a (1 - |t_a|) g(|h (k + t)|) dt` over `[-1, 1]^d`. Where the cells
    touch, the corner at distance zero is integrated in coordinates `w = r (1, u)` with
    `r = z^m`, which makes the integrand smooth for every `s < d`.

    Examples
    --------
    >>> table = cell_averages(Riesz(s=0), (3,), (1.0,))  # int (1 - |t|)(-log |t|) dt
    >>> bool(abs(table[0] - 1.5) < 1e-10)
    True
    """
    check_continuum(interaction, len(shape))
    table = _far_averages(interaction, shape, spacing)
    near = [range(min(count, _NEAR + 1)) for count in shape]
    for offset in itertools.product(*near):
        table[offset] = _near_average(interaction, offset, spacing)
    return table


def _far_averages(
    interaction: AbstractInteraction,
    shape: tuple[int, ...],
    spacing: tuple[float, ...],
) -> FloatArray:
    nodes, weights = _hat_rule(_NODES_FAR)
    table = np.zeros(shape)
    offsets = [np.arange(count, dtype=np.float64) for count in shape]
    for choice in itertools.product(range(nodes.size), repeat=len(shape)):
        square = np.zeros(shape)
        for axis, (index, width) in enumerate(zip(choice, spacing, strict=True)):
            along = (width * (offsets[axis] + nodes[index])) ** 2
            square += along.reshape([-1 if a == axis else 1 for a in range(len(shape))])
        weight = math.prod(weights[index] for index in choice)
        table += weight * radial(interaction, np.sqrt(square))
    return table


def _hat_rule(count: int) -> tuple[FloatArray, FloatArray]:
    """Gauss nodes for `int (1 - |t|) f(t) dt` over [-1, 1], never at zero."""
    points, weights = _gauss(0.0, 1.0, count)
    hat = weights * (1 - points)
    return np.concatenate([-points, points]), np.concatenate([hat, hat])


def _gauss(low: float, high: float, count: int) -> tuple[FloatArray, FloatArray]:
    points, weights = np.polynomial.legendre.leggauss(count)
    width = 0.5 * (high - low)
    return low + width * (points + 1), width * weights


def _near_average(
    interaction: AbstractInteraction,
    offset: tuple[int, ...],
    spacing: tuple[float, ...],
) -> float:
    """Sum the halves [k-1, k] and [k, k+1] of every axis, each mirrored to p >= 0."""
    total = 0.0
    for halves in itertools.product((-1, 1), repeat=len(offset)):
        lows, slopes = [], []
        for k, half in zip(offset, halves, strict=True):
            low = k if half > 0 or k == 0 else k - 1
            rising = half < 0 and k > 0  # the hat grows towards k
            lows.append(low)
            slopes.append(1.0 if rising else -1.0)
        if max(lows) == 0:
            total += _corner_integral(interaction, spacing, slopes)
        else:
            total += _cell_integral(interaction, spacing, lows, slopes)
    return total


def _hat(position: FloatArray, slope: float) -> FloatArray:
    return position if slope > 0 else 1 - position


def _cell_integral(
    interaction: AbstractInteraction,
    spacing: tuple[float, ...],
    lows: list[int],
    slopes: list[float],
) -> float:
    nodes, weights = _gauss(0.0, 1.0, _NODES_NEAR)
    axes = np.meshgrid(*[nodes] * len(lows), indexing="ij")
    factors = np.meshgrid(*[weights] * len(lows), indexing="ij")
    weight = np.ones_like(axes[0])
    square = np.zeros_like(axes[0])
    for axis, factor, width, low, slope in zip(
        axes, factors, spacing, lows, slopes, strict=True
    ):
        weight *= factor * _hat(axis, slope)
        square += (width * (low + axis)) ** 2
    return float((weight * radial(interaction, np.sqrt(square))).sum())


def _corner_integral(
    interaction: AbstractInteraction, spacing: tuple[float, ...], slopes: list[float]
) -> float:
    """Integrate over the unit cell whose corner is at distance zero."""
    if len(spacing) == 1:
        return _ray(interaction, [np.ones(1)], spacing, slopes, np.ones(1))
    angles, weights = _gauss(0.0, 1.0, _NODES_ANGLE)
    ones = np.ones_like(angles)
    return _ray(interaction, [ones, angles], spacing, slopes, weights) + _ray(
        interaction, [angles, ones], spacing, slopes, weights
    )


def _ray(
    interaction: AbstractInteraction,
    direction: list[FloatArray],
    spacing: tuple[float, ...],
    slopes: list[float],
    weights: FloatArray,
) -> float:
    """Integrate along rays `r * direction`, 0 < r < 1, with the Jacobian `r^(d-1)`."""
    dim = len(spacing)
    length = np.sqrt(
        sum((width * part) ** 2 for width, part in zip(spacing, direction, strict=True))
    )
    truncation = interaction.truncation if isinstance(interaction, Riesz) else 0.0
    exponent = interaction.s if isinstance(interaction, Riesz) else 0.0
    power = max(1.0, 4 / (dim - exponent)) if exponent < dim else 4.0
    kink = np.minimum(1.0, truncation / length)
    points, gauss = _gauss(0.0, 1.0, _NODES_RADIAL)
    inner = kink[:, None] * points
    start = (kink ** (1 / power))[:, None]
    root = start + (1 - start) * points
    pieces = [(inner, kink[:, None] * gauss)] if truncation else []
    pieces.append((root**power, (1 - start) * gauss * power * root ** (power - 1)))
    total = 0.0
    for r, measure in pieces:
        value = measure * r ** (dim - 1) * radial(interaction, r * length[:, None])
        for part, slope in zip(direction, slopes, strict=True):
            value = value * _hat(r * part[:, None], slope)
        total += float(weights @ value.sum(axis=1))
    return total
