"""Random features chosen by importance sampling, after Sinha and Duchi."""

from typing import Any, Self

import numpy as np
import torch

from coulomb._support.checks import check_count, check_member, check_real
from coulomb._support.errors import ParameterError
from coulomb._support.streams import make_generator
from coulomb.dynamics.initial import Gaussian
from coulomb.dynamics.resampling import resamplers
from coulomb.estimators.base import (
    AbstractFourierSampler,
    draw_seed,
    encode_target,
)

_SELECTIONS = (*resamplers, "top")
_MAX_BISECTIONS = 200


class ImportanceSampler(AbstractFourierSampler):
    """Random Fourier features reweighted by their alignment with the labels.

    Out of N candidates omega_k ~ N(0, 2 gamma I), b_k ~ U(0, 2 pi), solve

        max_q sum_k q_k a_k  over the simplex,  N |q - 1/N|^2 <= rho,
        a_k = |sum_i w_i Y_i phi_k(x_i)|^2 / (sum_i w_i)^2,  phi = sqrt(2) cos,

    with centred labels Y, then draw D of them from q [1]_. The left side of the
    constraint is the chi-square divergence of q from the uniform law, so
    `divergence = rho / N` bounds `|q - 1/N|^2`, and at most about `1 / divergence`
    candidates carry the kernel. The scale of `a` does not matter.

    Parameters
    ----------
    n_components
        How many features are kept, D.
    n_candidates
        How many are drawn to choose from, N.
    divergence
        The radius `rho / N`: 0 keeps the uniform law, 1 allows all mass on one.
    tol
        Relative tolerance on the divergence of the solution.
    gamma
        The bandwidth on the scaled inputs, or "scale": one over the number of columns
        that vary (without standardisation, `1 / (p Var(X))`).
    standardize
        Centre and scale each column first.
    selection
        How the D are drawn from q, with equal weights: "stratified", "systematic" or
        "multinomial"; "top" takes the D heaviest, weighted by q.
    target
        Whether `y` holds "classes" or a "number"; "auto" takes numbers if there are
        fractions or very many different values.
    random_state
        Seed, generator or None, as in scikit-learn.

    Attributes
    ----------
    weights_
        The solution q, shape `(n_candidates,)`.
    alignments_
        The scores a, shape `(n_candidates,)`.
    selected_
        Which candidates were kept, shape `(n_components,)`.
    effective_sample_size_
        `1 / sum_k q_k^2`.
    random_weights_, random_offset_, feature_scale_
        Frequencies, phases and amplitudes of the features.
    mean_, scale_
        Location and scale of each column.
    gamma_
        The bandwidth in use.

    Notes
    -----
    The authors' code leaves binary labels uncentred; centring takes away the reward
    for frequency zero and changes nothing for balanced classes.

    References
    ----------
    .. [1] Sinha, Duchi (2016), Learning kernels with random features.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(200, 2))
    >>> y = X[:, 0] * X[:, 1] > 0
    >>> sampler = ImportanceSampler(50, n_candidates=1000, random_state=0).fit(X, y)
    >>> sampler.transform(X).shape, round(sampler.effective_sample_size_)
    ((200, 50), 167)
    """

    def __init__(
        self,
        n_components: int = 100,
        *,
        n_candidates: int = 10_000,
        divergence: float = 0.005,
        tol: float = 1e-10,
        gamma: str | float = "scale",
        standardize: bool = True,
        selection: str = "stratified",
        target: str = "auto",
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.n_candidates = n_candidates
        self.divergence = divergence
        self.tol = tol
        self.gamma = gamma
        self.standardize = standardize
        self.selection = selection
        self.target = target
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Score the candidates against the labels and keep some.

        Parameters
        ----------
        X
            Dense or sparse data, shape `(n, p)`.
        y
            Labels or numbers, shape `(n,)`.
        sample_weight
            Weights of the rows; an integer weight equals repeating the row.

        Returns
        -------
        ImportanceSampler
            The estimator.
        """
        with self._all_or_nothing():
            self._check_settings()
            X, y, weight = self._fit_input(X, y, sample_weight)
            labels = encode_target(y, weight, target=self.target)
            generator = make_generator(draw_seed(self.random_state))
            weights, offset = self._draw_features(
                Gaussian(2.0 * self.gamma_), self.n_candidates, generator
            )
            self.alignments_ = self._align(X, labels, weight, weights, offset)
            self.weights_ = solve_chi_square(
                self.alignments_, self.divergence, tol=self.tol
            )
            self.effective_sample_size_ = float(1.0 / np.sum(self.weights_**2))
            chosen, mass = self._select(generator)
            self.selected_ = chosen
            return self._store_features(weights[:, chosen], offset[chosen], mass=mass)

    def _check_settings(self) -> None:
        check_count("n_candidates", self.n_candidates)
        check_real("divergence", self.divergence, at_least=0)
        check_real("tol", self.tol, above=0)
        check_member("selection", self.selection, _SELECTIONS)
        if self.selection == "top" and self.n_components > self.n_candidates:
            raise ParameterError(
                f"`n_components` = {self.n_components} exceeds `n_candidates` = "
                f"{self.n_candidates}; draw more candidates or another `selection`."
            )

    def _align(
        self,
        X: Any,
        labels: np.ndarray,
        weight: np.ndarray,
        weights: np.ndarray,
        offset: np.ndarray,
    ) -> np.ndarray:
        """`a_k = |sum_i w_i Y_i phi_k(x_i)|^2 / (sum_i w_i)^2`."""
        shares = labels * (weight / weight.sum())[:, None]
        sums = np.zeros((self.n_candidates, labels.shape[1]))
        for rows, cosines in self._cosines(X, self._embed(weights), offset):
            sums += cosines.T @ shares[rows].astype(cosines.dtype)
        return 2.0 * np.sum(sums**2, axis=1)

    def _select(self, generator: torch.Generator) -> tuple[np.ndarray, Any]:
        count, weights = self.n_components, self.weights_
        if self.selection != "top":
            draw = resamplers.build(self.selection)
            drawn = draw(torch.from_numpy(weights), count, generator=generator)
            return drawn.numpy(), None
        heaviest = np.argsort(-weights, kind="stable")[:count]
        return heaviest, weights[heaviest] / weights[heaviest].sum()


def solve_chi_square(
    alignments: np.ndarray, divergence: float, *, tol: float = 1e-10
) -> np.ndarray:
    """Maximise `sum_k q_k a_k` over the simplex with `|q - 1/N|^2 <= divergence`.

    The solution is `q_k = (a_k - t)_+ / sum_l (a_l - t)_+`, with the level t at which
    the constraint is tight: in closed form while every candidate has mass, by
    bisection below. It never violates the constraint.

    Examples
    --------
    >>> solve_chi_square(np.array([3.0, 2.0, 1.0]), 2 / 9).round(4).tolist()
    [0.6667, 0.3333, 0.0]
    """
    gaps = np.max(alignments) - np.asarray(alignments, dtype=np.float64)
    count, widest = gaps.shape[0], gaps.max()
    if widest == 0 or divergence == 0:
        return np.full(count, 1.0 / count)
    gaps = gaps / widest  # in [0, 1], so that any unit of the scores serves
    best = gaps == 0
    radius = divergence * count
    if count / best.sum() - 1.0 <= radius:
        return best / best.sum()
    depth = float(gaps.mean() + gaps.std() / np.sqrt(radius))
    if depth < 1.0:
        depth = _bisect_depth(gaps, radius, tol)
    mass = np.maximum(depth - gaps, 0.0)
    return mass / mass.sum()


def _bisect_depth(gaps: np.ndarray, radius: float, tol: float) -> float:
    """Find where the divergence, which falls with the depth, meets the radius."""
    low, high = 0.0, 1.0
    for _ in range(_MAX_BISECTIONS):
        depth = 0.5 * (low + high)
        if depth in (low, high):
            break
        mass = np.maximum(depth - gaps, 0.0)
        found = mass.var() / mass.mean() ** 2
        if found > radius:
            low = depth
        else:
            high = depth
            if radius - found <= tol * radius:
                break
    return high
