"""Obviously correct float64 twins of the compiled loops."""

import numpy as np

from coulomb.kernels.particles import index_directions


def fourier_potential(x, targets, positions, scale):
    waves = np.exp(1j * positions @ x.T)  # (N, n)
    return -scale * np.sum(np.abs(waves @ targets) ** 2, axis=1)


def numerical_gradient(function, positions, width=1e-6):
    gradient = np.zeros_like(positions)
    for j in range(positions.shape[1]):
        shift = np.zeros_like(positions)
        shift[:, j] = width
        gradient[:, j] = function(positions + shift) - function(positions - shift)
    return gradient / (2 * width)


def fourier_gradient(x, targets, positions, scale):
    gradient = np.zeros_like(positions)
    for k, w in enumerate(positions):
        cos, sin = np.cos(x @ w), np.sin(x @ w)
        for y in targets.T:
            inner = y * ((y @ sin) * cos - (y @ cos) * sin)
            gradient[k] -= 2 * scale * inner @ x
    return gradient


def radial(r, s):
    if s == 0:
        return -np.log(r)
    return r**-s if s > 0 else -(r**-s)


def riesz(positions, s, truncation):
    """Explicit double sum, including the rule for coincident particles."""
    n, p = positions.shape
    potential, gradient = np.zeros(n), np.zeros((n, p))
    directions = index_directions(n, p)
    factor = abs(s) if s else 1.0
    for k in range(n):
        for other in range(n):
            if other == k:
                continue
            gap = positions[k] - positions[other]
            r = np.linalg.norm(gap)
            if r > 0:
                potential[k] += radial(max(r, truncation), s)
                if r >= truncation:
                    gradient[k] -= factor * r ** (-s - 2.0) * gap
                continue
            if truncation > 0:
                potential[k] += radial(truncation, s)
            else:
                potential[k] += np.inf if s >= 0 else 0.0
            away = directions[k] - directions[other]
            size = factor * max(truncation, 1e-6) ** (-s - 1.0)
            gradient[k] -= size * away / np.linalg.norm(away)
    return potential / max(1, n - 1), gradient / max(1, n - 1)


def langevin(
    positions,
    noise,
    step_sizes,
    x,
    targets,
    *,
    scale,
    batches=None,
    prior_precision=0.0,
    rates=None,
    strength=0.0,
    s=0.0,
    truncation=0.0,
    clip=np.inf,
    radius=np.inf,
    mask=None,
):
    drifts, moves = [], []
    mask = np.ones_like(positions) if mask is None else mask
    for m, step in enumerate(step_sizes):
        chosen = slice(None) if batches is None else batches[m]
        drift = fourier_gradient(x[chosen], targets[chosen], positions, scale)
        drift += np.reshape(prior_precision, (-1, 1)) * positions
        if strength:
            drift += strength * riesz(positions, s, truncation)[1]
        drift *= mask
        length = np.linalg.norm(drift, axis=1, keepdims=True)
        drift *= np.minimum(1, clip / np.maximum(length, 1e-300))
        drift *= step if rates is None else step * rates[:, None]
        moved = positions - drift
        if noise is not None:
            moved = moved + mask * noise[m]
        length = np.linalg.norm(moved, axis=1, keepdims=True)
        moved = moved * np.minimum(1, radius / np.maximum(length, 1e-300))
        drifts.append(np.mean(np.sum(drift**2, axis=1)))
        moves.append(np.mean(np.sum((moved - positions) ** 2, axis=1)))
        positions = moved
    return positions, np.array(drifts), np.array(moves)
