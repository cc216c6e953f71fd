"""Straight lines through measurements, with the error of their slope."""

from typing import NamedTuple

import numpy as np
from scipy import stats

from coulomb._support.errors import ParameterError
from coulomb.theory.grids import FloatArray


class Fit(NamedTuple):
    """A slope with its error."""

    slope: float
    standard_error: float
    intercept: float
    low: float  # 95 % confidence interval of the slope
    high: float


def fit_line(
    x: FloatArray,
    y: FloatArray,
    errors: FloatArray,
    *,
    nuisance: FloatArray | None = None,
) -> Fit:
    """Fit `y = slope x + intercept (+ c * nuisance)` by weighted least squares.

    If the points scatter more than their errors say, the error of the slope grows to
    match; then its interval uses Student's distribution.

    Examples
    --------
    >>> fit = fit_line(np.arange(4.0), 2 * np.arange(4.0) + 1, np.full(4, 0.1))
    >>> round(fit.slope, 6), round(fit.intercept, 6)
    (2.0, 1.0)
    """
    columns = [x, np.ones_like(x)] + ([] if nuisance is None else [nuisance])
    design = np.stack(columns, axis=1) / errors[:, None]
    free = x.size - design.shape[1]
    if free < 1:
        raise ParameterError(
            f"`counts` must have at least {design.shape[1] + 1} values for a fit; got "
            f"{x.size}."
        )
    scale = np.linalg.norm(design, axis=0)
    inverse = np.linalg.inv((design / scale).T @ (design / scale))
    coefficients = (inverse @ (design / scale).T @ (y / errors)) / scale
    misfit = float((((y / errors) - design @ coefficients) ** 2).sum()) / free
    error = float(np.sqrt(inverse[0, 0] * max(1.0, misfit)) / scale[0])
    quantile = stats.norm.ppf(0.975) if misfit <= 1 else stats.t.ppf(0.975, free)
    slope, reach = float(coefficients[0]), float(quantile) * error
    return Fit(slope, error, float(coefficients[1]), slope - reach, slope + reach)


def fit_power(n: FloatArray, values: FloatArray, errors: FloatArray) -> Fit:
    """Fit `values = c n^slope` on logarithmic axes.

    Examples
    --------
    >>> n = np.array([1.0, 2.0, 4.0, 8.0])
    >>> round(fit_power(n, 3 * n**-0.5, 0.01 * n**-0.5).slope, 6)
    -0.5
    """
    return fit_line(np.log(n), np.log(values), errors / values)
