"""The synthetic problem: design, split, labels, probabilities."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import norm
from sklearn.model_selection import train_test_split

from coulomb._support.errors import ParameterError, ParameterTypeError
from coulomb.datasets import (
    bayes_accuracy,
    expected_accuracy,
    log_odds,
    make_synthetic,
    positive_probability,
)


def test_split_is_scikit_learns():
    for n in (2, 7, 101, 400):
        problem = make_synthetic(n)
        train, test = train_test_split(np.arange(n), test_size=0.3, random_state=0)
        np.testing.assert_array_equal(problem.train, train)
        np.testing.assert_array_equal(problem.test, test)


def test_only_labels_change_with_trial_and_noise():
    base = make_synthetic(n_features=8)
    for other in (
        make_synthetic(n_features=8, trial=1),
        make_synthetic(n_features=8, noise=50.0),
    ):
        np.testing.assert_array_equal(other.X, base.X)
        np.testing.assert_array_equal(other.train, base.train)
        assert (other.y != base.y).any()
    again = make_synthetic(n_features=8)
    np.testing.assert_array_equal(again.y, base.y)
    np.testing.assert_array_equal(
        make_synthetic(n_features=8, trial=1).probability, base.probability
    )
    assert (make_synthetic(n_features=8, seed=1).X != base.X).all()


def test_labels_and_types():
    problem = make_synthetic(50, 6)
    assert problem.X.shape == (50, 6)
    assert set(problem.y) == {-1, 1}


@pytest.mark.parametrize("noise", [0.1, 1.0, 10.0, 1e5])
def test_labels_follow_their_probability(noise):
    trials = 400
    labels = np.stack([make_synthetic(noise=noise, trial=t).y for t in range(trials)])
    chance = make_synthetic(noise=noise).probability
    error = (labels == 1).mean(axis=0) - chance
    z = error / np.sqrt(chance * (1 - chance) / trials)
    # the mean square of 400 independent z has standard error (2 / 400)^1/2
    assert abs(np.mean(z**2) - 1) < 4 * np.sqrt(2 / 400)


def test_extra_columns_enter_linearly():
    X = np.zeros((1, 7))
    X[0, 5:] = 1.0, 2.0
    assert log_odds(X, np.array([0.3, -0.1])) == pytest.approx(0.1)


def test_extra_weights_have_their_spread():
    problem = make_synthetic(400, 105, noise=0.0)
    logits = np.log(problem.probability / (1 - problem.probability))
    base = log_odds(problem.X[:, :5], np.empty(0))
    weights, *_ = np.linalg.lstsq(problem.X[:, 5:], logits - base, rcond=None)
    # 100 weights of variance 0.09 estimate it with relative error (2 / 100)^1/2
    assert abs(np.mean(weights**2) / 0.09 - 1) < 4 * np.sqrt(2 / 100)


@pytest.mark.parametrize("noise", [1e-5, 0.3, 0.999, 1.001, 5.0, 40.0])
@pytest.mark.parametrize("logit", [-8.0, -0.7, 0.0, 2.5, 20.0])
def test_probability_against_quadrature(noise, logit):
    exact, _ = quad(
        lambda xi: norm.pdf(xi) * expit(logit + noise * xi),
        -12,
        12,
        points=[np.clip(-logit / noise, -12, 12)],
        epsabs=1e-13,
        epsrel=1e-12,
        limit=400,
    )
    assert positive_probability(logit, noise) == pytest.approx(exact, abs=1e-11)


@pytest.mark.parametrize("noise", [1e3, 1e5])
def test_probability_under_great_noise(noise):
    # E sigmoid(l + s xi) -> Phi(l / sqrt(s^2 + pi^2 / 3)), to order s^-4
    logit = np.array([-300.0, 0.0, 5.0, 800.0])
    limit = norm.cdf(logit / np.sqrt(noise**2 + np.pi**2 / 3))
    np.testing.assert_allclose(positive_probability(logit, noise), limit, atol=1e-11)


def test_probability_is_smooth_where_the_rules_meet():
    logit = np.linspace(-30, 30, 61)
    left = positive_probability(logit, 1.0)
    right = positive_probability(logit, np.nextafter(1.0, 2.0))
    np.testing.assert_allclose(left, right, atol=1e-14)


def test_probability_is_symmetric_and_has_its_shape():
    logit = np.linspace(-5, 5, 12).reshape(3, 4)
    for noise in (0.0, 0.5, 7.0, 1e5):
        chance = positive_probability(logit, noise)
        assert chance.shape == (3, 4)
        np.testing.assert_allclose(chance + positive_probability(-logit, noise), 1.0)


@pytest.mark.parametrize(
    "noise, published",
    [(1e-5, 0.768), (0.1, 0.768), (1.0, 0.742), (10.0, 0.560), (100.0, 0.506)],
)
def test_population_bayes_accuracy(noise, published):
    problem = make_synthetic(100_000, noise=noise, seed=7)
    best = np.maximum(problem.probability, 1 - problem.probability)
    standard_error = best.std() / np.sqrt(len(best))
    # half a unit of the last printed digit, and four standard errors
    assert abs(best.mean() - published) < 5e-4 + 4 * standard_error


def test_bayes_accuracy_on_the_test_design():
    # measured before the library was written, default_rng(42)
    for p, noise, expected in [
        (5, 0.1, 0.763),
        (5, 1.0, 0.739),
        (10, 0.1, 0.800),
        (10, 1.0, 0.774),
    ]:
        problem = make_synthetic(n_features=p, noise=noise)
        assert problem.bayes_accuracy == pytest.approx(expected, abs=6e-4)


def test_no_prediction_beats_bayes():
    problem = make_synthetic()
    chance = problem.probability
    best = np.where(chance > 0.5, 1, -1)
    assert expected_accuracy(best, chance) == pytest.approx(bayes_accuracy(chance))
    for trial in range(5):
        guess = make_synthetic(trial=trial).y
        assert expected_accuracy(guess, chance) < bayes_accuracy(chance)
        assert expected_accuracy(-guess, chance) == pytest.approx(
            1 - expected_accuracy(guess, chance)
        )


def test_predictions_are_checked():
    with pytest.raises(ParameterError, match=r"shape \(2,\).*same rows"):
        expected_accuracy([1, -1], [0.5])
    with pytest.raises(ParameterError, match="labels -1 and"):
        expected_accuracy([0, 1], [0.5, 0.5])


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"n_features": 4}, ParameterError, "`n_features` must be at least 5; got 4"),
        ({"n_samples": 1}, ParameterError, "`n_samples` must be at least 2"),
        ({"noise": -1.0}, ParameterError, "`noise` must be at least 0; got -1.0"),
        ({"noise": np.nan}, ParameterError, "`noise` must be finite"),
        ({"seed": -1}, ParameterError, "`seed` must be at least 0"),
        ({"trial": 0.5}, ParameterTypeError, "`trial` must be a whole number"),
    ],
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        make_synthetic(**settings)
