"""Has a chain mixed? R-hat and the effective sample size."""

import numpy as np

from coulomb._support.errors import ParameterError
from coulomb.theory.grids import FloatArray


def _check_chains(values: FloatArray) -> FloatArray:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] < 4:
        raise ParameterError(
            "`values` must have shape (chains, draws) with at least 4 draws; got "
            f"{values.shape}."
        )
    return values


def split_r_hat(values: FloatArray) -> float:
    """Compare the variance between half-chains with that inside them.

    `R^2 = ((n-1)/n W + B/n) / W` with `W` the mean variance of the half-chains and
    `B/n` the variance of their means. (Gelman et al., Bayesian Data Analysis, 3rd ed.)

    Parameters
    ----------
    values
        One observable, shape `(chains, draws)`.

    Returns
    -------
    float
        Near 1 if the chains agree; values above 1.01 ask for longer chains.

    Examples
    --------
    >>> chains = np.random.default_rng(0).normal(size=(4, 1000))
    >>> split_r_hat(chains) < 1.01, split_r_hat(chains + np.arange(4)[:, None]) > 1.5
    (True, True)
    """
    values = _check_chains(values)
    half = values.shape[1] // 2
    pieces = np.concatenate([values[:, :half], values[:, -half:]])
    within = float(pieces.var(axis=1, ddof=1).mean())
    if within == 0:
        return 1.0 if np.ptp(pieces) == 0 else float("inf")
    between = float(pieces.mean(axis=1).var(ddof=1))
    return float(np.sqrt((half - 1) / half + between / within))


def effective_sample_size(values: FloatArray) -> float:
    """Count the independent draws that would give the mean as well.

    `n_eff = chains * draws / (1 + 2 sum rho_t)`, the autocorrelations `rho_t` of all
    chains together, summed in pairs as long as they are positive and falling (Geyer).

    Parameters
    ----------
    values
        One observable, shape `(chains, draws)`.

    Returns
    -------
    float
        At most `chains * draws * log10(chains * draws)`.

    Examples
    --------
    >>> chains = np.random.default_rng(0).normal(size=(4, 1000))
    >>> 3000 < effective_sample_size(chains) < 5500
    True
    """
    values = _check_chains(values)
    chains, draws = values.shape
    centred = values - values.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, 2 * draws, axis=1)
    covariance = np.fft.irfft(np.abs(spectrum) ** 2, axis=1)[:, :draws] / draws
    within = float((covariance[:, 0] * draws / (draws - 1)).mean())
    total = within * (draws - 1) / draws
    if chains > 1:
        total += float(values.mean(axis=1).var(ddof=1))
    most = chains * draws * max(1.0, np.log10(chains * draws))
    if total == 0:
        return float(chains * draws)
    correlation = 1 - (within - covariance.mean(axis=0)) / total
    correlation[0] = 1.0
    even = draws - draws % 2
    pairs = correlation[:even].reshape(-1, 2).sum(axis=1)
    stop = int(np.argmax(pairs < 0)) if (pairs < 0).any() else pairs.size
    falling = np.minimum.accumulate(pairs[:stop])
    time = max(2 * float(falling.sum()) - 1, 1e-12)
    return float(min(chains * draws / time, most))
