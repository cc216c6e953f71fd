"""Statistics of repeated measurements: means, p-values and straight lines."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr, stdtrit

from coulomb._support.errors import ParameterError

FloatArray = NDArray[np.float64]


class Difference(NamedTuple):
    """A mean over repetitions, of paired differences as a rule."""

    mean: float
    standard_error: float  # NaN for a single repetition
    n: int

    @property
    def distinct(self) -> bool:
        """Whether zero lies more than two standard errors away."""
        return self.n > 1 and abs(self.mean) > 2 * self.standard_error

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean, by Student's distribution."""
        reach = float(stdtrit(self.n - 1, 0.975)) * self.standard_error
        return self.mean - reach, self.mean + reach


def mean_difference(values: Iterable[float]) -> Difference:
    """Average differences, with the standard error of the mean.

    Examples
    --------
    >>> mean_difference([0.1, 0.3])
    Difference(mean=0.2, standard_error=0.1, n=2)
    """
    found = np.array(list(values), dtype=np.float64)
    if not found.size:
        return Difference(math.nan, math.nan, 0)
    error = standard_error(found) if found.size > 1 else math.nan
    return Difference(round(float(found.mean()), 12), round(error, 12), found.size)


def standard_error(values: FloatArray) -> float:
    """Give the standard error of the mean of at least two values."""
    return float(values.std(ddof=1) / math.sqrt(values.size))


def paired_p_value(difference: Difference) -> float:
    """Give the two-sided p-value of Student's paired test.

    Examples
    --------
    >>> round(paired_p_value(Difference(1.0, 1.0, 2)), 3)
    0.5
    """
    if difference.n < 2:
        return math.nan
    if difference.standard_error == 0:
        return 0.0 if difference.mean else 1.0
    t = abs(difference.mean) / difference.standard_error
    return float(2 * stdtr(difference.n - 1, -t))


def prediction_p_value(value: float, others: Sequence[float]) -> float:
    """Tell how likely a value that belongs to the others is so large or larger.

    One-sided, by Student's prediction interval `mean + t sd sqrt(1 + 1/n)`.

    Examples
    --------
    >>> round(prediction_p_value(1.0, [0.0, 2.0]), 3)
    0.5
    """
    n = len(others)
    spread = float(np.std(others, ddof=1)) * math.sqrt(1 + 1 / n)
    excess = value - float(np.mean(others))
    if spread == 0:
        return 0.0 if excess > 0 else 1.0
    return float(stdtr(n - 1, -excess / spread))


def permutation_p_value(value: float, shuffled: Sequence[float]) -> float:
    """Tell how likely a shuffle is to reach the value, which counts as one of them.

    Examples
    --------
    >>> permutation_p_value(2.0, [0.0, 1.0, 3.0])
    0.5
    """
    return (1 + sum(each >= value for each in shuffled)) / (1 + len(shuffled))


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
    nuisance: Sequence[FloatArray] = (),
) -> Fit:
    """Fit `y = slope x + intercept + sum_i c_i nuisance_i` by weighted least squares.

    If the points scatter more than their errors say, the error of the slope grows to
    match; then its interval uses Student's distribution.

    Examples
    --------
    >>> fit = fit_line(np.arange(4.0), 2 * np.arange(4.0) + 1, np.full(4, 0.1))
    >>> round(fit.slope, 6), round(fit.intercept, 6)
    (2.0, 1.0)
    """
    design = np.stack([x, np.ones_like(x), *nuisance], axis=1) / errors[:, None]
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
    quantile = ndtri(0.975) if misfit <= 1 else stdtrit(free, 0.975)
    slope, reach = float(coefficients[0]), float(quantile) * error
    return Fit(slope, error, float(coefficients[1]), slope - reach, slope + reach)


def fit_power(n: FloatArray, values: FloatArray, errors: FloatArray) -> Fit:
    """Fit `values = c n^slope` on logarithmic axes, weighted by known errors.

    Examples
    --------
    >>> n = np.array([1.0, 2.0, 4.0, 8.0])
    >>> round(fit_power(n, 3 * n**-0.5, 0.01 * n**-0.5).slope, 6)
    -0.5
    """
    return fit_line(np.log(n), np.log(values), errors / values)


class PowerLaw(NamedTuple):
    """`t = c n^gamma`, with the 95 % interval of gamma."""

    exponent: float
    standard_error: float
    low: float
    high: float
    prefactor: float
    sigma_log: float
    n: int


def fit_power_law(n: Sequence[float], values: Sequence[float]) -> PowerLaw:
    """Fit `t = c n^gamma` by least squares on logarithmic axes, errors unknown.

    Examples
    --------
    >>> law = fit_power_law([1, 2, 4, 8], [3.0, 6.0, 12.0, 24.0])
    >>> round(law.exponent, 6), round(law.prefactor, 6)
    (1.0, 3.0)
    """
    if len(n) < 3:
        raise ParameterError(f"`n` must have at least 3 sizes for a fit; got {len(n)}.")
    x, y = np.log(n), np.log(values)
    # Errors below any scatter: it is the scatter that says how sure the slope is.
    fit = fit_line(x, y, np.full(len(n), 1e-12))
    residuals = y - (fit.intercept + fit.slope * x)
    return PowerLaw(
        fit.slope,
        fit.standard_error,
        fit.low,
        fit.high,
        math.exp(fit.intercept),
        float(np.sqrt((residuals**2).mean())),
        len(n),
    )
