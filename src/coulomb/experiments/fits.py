"""Power laws through the seconds of `runtime`."""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from coulomb._support.errors import ParameterError
from coulomb.experiments.records import Job, Record
from coulomb.experiments.summary import row_title, select, summarise


class PowerLaw(NamedTuple):
    """`t = c n^gamma`, with the 95 % interval of gamma."""

    exponent: float
    standard_error: float
    low: float
    high: float
    prefactor: float
    sigma_log: float
    n: int


def fit_power_law(n: Sequence[float], seconds: Sequence[float]) -> PowerLaw:
    """Fit `t = c n^gamma` by least squares on logarithmic axes.

    Examples
    --------
    >>> law = fit_power_law([1, 2, 4, 8], [3.0, 6.0, 12.0, 24.0])
    >>> round(law.exponent, 6), round(law.prefactor, 6)
    (1.0, 3.0)
    """
    if len(n) < 3:
        raise ParameterError(f"`n` must have at least 3 sizes for a fit; got {len(n)}.")
    fit = stats.linregress(np.log(n), np.log(seconds))
    free = len(n) - 2
    reach = float(stats.t.ppf(0.975, free)) * float(fit.stderr)
    residuals = np.log(seconds) - (fit.intercept + fit.slope * np.log(n))
    return PowerLaw(
        float(fit.slope),
        float(fit.stderr),
        float(fit.slope) - reach,
        float(fit.slope) + reach,
        math.exp(fit.intercept),
        float(np.sqrt((residuals**2).mean())),
        len(n),
    )


def power_laws(
    records: Sequence[Record], metric: str = "seconds.total"
) -> list[dict[str, Any]]:
    """Fit a power law in the number of samples to every row of `runtime`."""
    curves: dict[str, tuple[Job, dict[float, float]]] = {}
    for each in summarise(select(records, control=None), metric):
        row = {k: v for k, v in each.row.items() if k != "n_samples"}
        name = json.dumps(row, sort_keys=True)
        curves.setdefault(name, (row, {}))[1][each.row["n_samples"]] = each.mean
    found = []
    for row, curve in curves.values():
        if len(curve) >= 3:
            sizes = sorted(curve)
            law = fit_power_law(sizes, [curve[size] for size in sizes])
            found.append({**row, "title": row_title(row), **law._asdict()})
    return found
