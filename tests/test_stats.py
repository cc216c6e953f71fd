"""Means, p-values and fitted lines."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import ttest_rel

from coulomb._support.errors import ParameterError
from coulomb._support.stats import (
    Difference,
    fit_line,
    fit_power,
    fit_power_law,
    mean_difference,
    paired_p_value,
    permutation_p_value,
    prediction_p_value,
)

LEARNED = [0.71, 0.72, 0.69, 0.74]
VANILLA = [0.66, 0.68, 0.67, 0.66]


def test_p_values_are_those_of_the_paired_t_test():
    pairs = zip(LEARNED, VANILLA, strict=True)
    difference = mean_difference(a - b for a, b in pairs)
    assert paired_p_value(difference) == pytest.approx(
        ttest_rel(LEARNED, VANILLA).pvalue
    )
    assert math.isnan(paired_p_value(Difference(0.1, math.nan, 1)))
    assert paired_p_value(Difference(0.0, 0.0, 3)) == 1.0


def test_a_prediction_interval_errs_as_often_as_it_says():
    """2000 draws at 5 %: four standard errors are 0.02."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2000, 6, generator=generator, dtype=torch.float64).tolist()
    wrong = sum(prediction_p_value(row[0], row[1:]) < 0.05 for row in draws)
    four_errors = 4 * math.sqrt(0.05 * 0.95 / 2000)
    assert abs(wrong / 2000 - 0.05) < four_errors


def test_no_spread():
    assert prediction_p_value(1.0, [0.5, 0.5]) == 0
    assert prediction_p_value(0.5, [0.5, 0.5]) == 1


def test_a_permutation_test_counts_ties_and_the_value_itself():
    """A statistic that ignores the labels ties with every shuffle: its p-value is 1."""
    assert permutation_p_value(0.5, [0.5, 0.5, 0.5]) == 1
    assert permutation_p_value(0.5, [0.5, 0.4, 0.6]) == 0.75
    assert permutation_p_value(1.0, [0.0] * 19) == 0.05


def test_fits_recover_lines_with_their_errors(rng):
    """The pull of the slope over many fits has mean 0 and variance 1."""
    x, errors = np.arange(6.0), np.full(6, 0.3)
    pulls = []
    for _ in range(400):
        fit = fit_line(x, 2 * x - 1 + 0.3 * rng.normal(size=6), errors)
        pulls.append((fit.slope - 2) / fit.standard_error)
    assert abs(np.mean(pulls)) < 5 / math.sqrt(400)
    assert np.var(pulls) < 1.15  # errors grow with the misfit, never shrink
    n = np.array([1.0, 2.0, 4.0, 8.0])
    assert fit_power(n, 3 * n**-0.5, 0.1 * n**-0.5).slope == pytest.approx(-0.5)
    with pytest.raises(ParameterError, match="at least 4 values"):
        fit_line(n[:3], n[:3], n[:3], nuisance=[n[:3] ** 2])


def test_power_laws_are_found_again_with_their_interval():
    """The 95 % interval covers the exponent in most of 200 draws (s.e. 1.5 %)."""
    rng = np.random.default_rng(0)
    n = np.array([100, 500, 1000, 2000, 4000, 10_000])
    covered = 0
    for _ in range(200):
        law = fit_power_law(n, 0.01 * n**0.7 * np.exp(0.2 * rng.normal(size=6)))
        covered += law.low < 0.7 < law.high
    assert abs(covered / 200 - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 200)
    with pytest.raises(ParameterError, match="at least 3 sizes"):
        fit_power_law([1, 2], [1.0, 2.0])
