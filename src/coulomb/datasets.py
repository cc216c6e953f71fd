"""The synthetic problem of the paper, with its Bayes accuracy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, ndtr
from sklearn.model_selection import train_test_split

from coulomb._support.checks import check_count, check_real, check_seed
from coulomb._support.errors import ParameterError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class SyntheticProblem:
    """Inputs, labels and what is known about them.

    Parameters
    ----------
    X
        The fixed design, shape `(n, p)`.
    y
        Labels -1 and +1 of one trial, shape `(n,)`.
    probability
        `P(y = +1 | x)` of each row, the logit noise integrated out.
    train, test
        Rows of the 70/30 split, the same for every trial and noise.
    """

    X: Floats
    y: Integers
    probability: Floats
    train: Integers
    test: Integers

    @property
    def bayes_accuracy(self) -> float:
        """The accuracy on the test rows that no classifier exceeds in expectation."""
        return bayes_accuracy(self.probability[self.test])


def make_synthetic(
    n_samples: int = 400,
    n_features: int = 5,
    *,
    noise: float = 0.1,
    seed: int = 42,
    trial: int = 0,
) -> SyntheticProblem:
    """Draw the paper's nonlinear classification problem.

    `P(y_i = +1) = sigmoid(log_odds(x_i) + noise xi_i)`, `xi_i ~ N(0, 1)`. The design
    depends on `seed` alone, the labels on `seed` and `trial`; trials of different
    noise use the same random numbers, so that noise levels are compared in pairs.

    Parameters
    ----------
    n_samples
        Rows n, at least 2.
    n_features
        Columns p, at least 5.
    noise
        Standard deviation of the noise on the logit.
    seed
        Fixes the design and the weights of the columns beyond five.
    trial
        Which labels.

    Returns
    -------
    SyntheticProblem
        Inputs, labels, probabilities and the split.

    Examples
    --------
    >>> problem = make_synthetic(noise=1.0)
    >>> problem.X.shape, len(problem.train), round(problem.bayes_accuracy, 3)
    ((400, 5), 280, 0.739)
    """
    n = check_count("n_samples", n_samples, at_least=2)
    p = check_count("n_features", n_features, at_least=5)
    noise = check_real("noise", noise, at_least=0)
    seed = check_seed("seed", seed)
    trial = check_count("trial", trial, at_least=0)
    design = np.random.default_rng(seed)
    X = design.normal(size=(n, p))
    logits = log_odds(X, design.normal(scale=0.3, size=p - 5))
    labels = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(trial,)))
    noisy = expit(logits + noise * labels.normal(size=n))
    y = np.where(labels.uniform(size=n) < noisy, 1, -1)
    train, test = train_test_split(np.arange(n), test_size=0.3, random_state=0)
    return SyntheticProblem(X, y, positive_probability(logits, noise), train, test)


def log_odds(X: Floats, extra: Floats) -> Floats:
    """Compute the log-odds of the label +1 before noise.

    `1.5 sin(pi x1) + 0.8 x2^2 - x3 x4 + 0.5 sin(3 x5) + x_{6:p} . w`

    [CPM subsec:nonlinear-synth-cls]

    Parameters
    ----------
    X
        Inputs, shape `(n, p)`, p at least 5.
    extra
        Weights w of the columns beyond five, shape `(p - 5,)`.

    Returns
    -------
    ndarray
        Shape `(n,)`.

    Examples
    --------
    >>> log_odds(np.array([[0.5, 1.0, 1.0, 1.0, 0.0]]), np.empty(0)).round(6).tolist()
    [1.3]
    """
    x1, x2, x3, x4, x5 = X[:, :5].T
    waves = 1.5 * np.sin(np.pi * x1) + 0.5 * np.sin(3.0 * x5)
    signal: Floats = waves + 0.8 * x2**2 - x3 * x4 + X[:, 5:] @ extra
    return signal


def positive_probability(logits: ArrayLike, noise: float) -> Floats:
    """Integrate the logit noise out: `E sigmoid(l + noise xi)`, `xi ~ N(0, 1)`.

    Small noise: the trapezoidal rule over xi. Large noise: a sigmoid is the law of a
    logistic variable L, so the same number is `E Phi((l - L) / noise)`, by the
    trapezoidal rule over L. Both integrands are analytic, so both are exact to
    rounding.

    Parameters
    ----------
    logits
        Log-odds without noise.
    noise
        Standard deviation of the noise.

    Returns
    -------
    ndarray
        Probabilities, in the shape of `logits`.

    Examples
    --------
    >>> positive_probability([0.0, 2.0], 0.0).round(4).tolist()
    [0.5, 0.8808]
    """
    centre = np.asarray(logits, dtype=np.float64)
    small = noise <= 1.0
    nodes = np.arange(-9.0, 9.01, 0.125) if small else np.arange(-40.0, 40.01, 0.25)
    weights = np.exp(-0.5 * nodes**2) if small else expit(nodes) * expit(-nodes)
    integral = np.zeros_like(centre)
    # One node at a time: a grid of rows by nodes would not fit for many rows.
    for node, weight in zip(nodes, weights / weights.sum(), strict=True):
        shifted = centre + noise * node if small else (centre - node) / noise
        integral += weight * (expit(shifted) if small else ndtr(shifted))
    return integral


def expected_accuracy(predictions: ArrayLike, probability: ArrayLike) -> float:
    """Average the chance that each prediction is right.

    `mean_i (p_i if prediction_i = +1 else 1 - p_i)`: the accuracy without the noise of
    the test labels.

    Parameters
    ----------
    predictions
        Labels -1 and +1.
    probability
        `P(y = +1 | x)` of the same rows.

    Returns
    -------
    float
        The expected accuracy.

    Examples
    --------
    >>> round(expected_accuracy([1, -1], [0.9, 0.4]), 12)
    0.75
    """
    labels, chance = np.asarray(predictions), np.asarray(probability, dtype=np.float64)
    if labels.shape != chance.shape:
        raise ParameterError(
            f"`predictions` has shape {labels.shape}, `probability` {chance.shape}; "
            "give both for the same rows."
        )
    if not np.isin(labels, (-1, 1)).all():
        raise ParameterError("`predictions` must hold the labels -1 and +1.")
    return float(np.where(labels == 1, chance, 1.0 - chance).mean())


def bayes_accuracy(probability: ArrayLike) -> float:
    """Average the chance that the better label is right, `mean_i max(p_i, 1 - p_i)`.

    Parameters
    ----------
    probability
        `P(y = +1 | x)` of some rows.

    Returns
    -------
    float
        The accuracy of the best classifier on these rows.

    Examples
    --------
    >>> round(bayes_accuracy([0.9, 0.4]), 12)
    0.75
    """
    chance = np.asarray(probability, dtype=np.float64)
    return float(np.maximum(chance, 1.0 - chance).mean())
