"""Baselines: orthogonal and importance-sampled features, multiple-kernel learning."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from scipy.linalg import solve
from scipy.optimize import nnls
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import (
    PAIRWISE_KERNEL_FUNCTIONS,
    euclidean_distances,
    pairwise_kernels,
)
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.preprocessing import LabelBinarizer
from sklearn.svm import SVC
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, validate_data
from threadpoolctl import threadpool_limits

from coulomb._support.checks import (
    check_count,
    check_member,
    check_memory,
    check_real,
    make_generator,
)
from coulomb._support.errors import ParameterError, ParameterTypeError, shown
from coulomb.dynamics.initial import Gaussian, Orthogonal, resamplers
from coulomb.estimators.base import (
    AbstractFourierSampler,
    _check_classes,
    describe_columns,
    draw_seed,
    encode_target,
)


@dataclass(eq=False, repr=False)
class OrthogonalSampler(AbstractFourierSampler):
    """Random Fourier features whose frequencies are orthogonal in blocks.

    Each block of p frequencies is `omega_k = sqrt(2 gamma) r_k q_k`, with q_k the
    columns of a uniformly random rotation and `r_k^2 ~ chi^2(p)` independent. Every
    frequency is N(0, 2 gamma I), so the kernel is unbiased for
    `exp(-gamma |z - z'|^2)`, with a smaller error than independent draws [1]_.

    Parameters
    ----------
    n_components
        How many features.
    gamma
        The bandwidth on the scaled inputs, or "scale": one over the number of columns
        that vary (without standardisation, `1 / (p Var(X))`).
    standardize
        Centre and scale each column first.
    random_state
        Seed, generator or None, as in scikit-learn.

    Attributes
    ----------
    random_weights_, random_offset_, feature_scale_
        Frequencies, phases and amplitudes of the features.
    mean_, scale_
        Location and scale of each column.
    gamma_
        The bandwidth in use.

    References
    ----------
    .. [1] Yu, Suresh, Choromanski, Holtmann-Rice, Kumar (2016), Orthogonal random
       features.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.array([[0.0, 1.0], [2.0, 1.5], [3.0, -1.0]])
    >>> sampler = OrthogonalSampler(4000, gamma=0.5, random_state=0).fit(X)
    >>> z = (X - X.mean(axis=0)) / X.std(axis=0)
    >>> exact = np.exp(-0.5 * np.sum((z[0] - z[1]) ** 2))
    >>> bool(abs(sampler.kernel(X)[0, 1] - exact) < 0.05)
    True
    """

    _supervised = False

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Learn the columns and draw the features.

        Parameters
        ----------
        X
            Dense or sparse data, shape `(n, p)`.
        y
            Ignored.
        sample_weight
            Weights of the rows in the means and scales of the columns.

        Returns
        -------
        OrthogonalSampler
            The estimator.
        """
        with self._all_or_nothing():
            self._fit_input(X, None, sample_weight)
            generator = make_generator(draw_seed(self.random_state))
            law = Orthogonal(2.0 * self.gamma_)
            return self._store_features(
                *self._draw_features(law, self.n_components, generator)
            )


_SELECTIONS = (*resamplers, "top")
_MAX_BISECTIONS = 200


@dataclass(eq=False, repr=False, kw_only=True)
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

    n_candidates: int = 10_000
    divergence: float = 0.005
    tol: float = 1e-10
    selection: str = "stratified"
    target: str = "auto"

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
            check_memory("n_candidates", 32 * X.shape[1] * self.n_candidates)
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


# Entries of one block of all the kernels together: 32 megabytes.
_BLOCK_ENTRIES = 2**22
_FOLDS = 5  # behind the probabilities
_TIGHT = 1e-8  # of the optimality conditions of the margin problem
# Sums in BLAS depend on its threads; one thread gives the same bits everywhere.
_one_thread = partial(threadpool_limits, limits=1, user_api="blas")
Kernel = str | Callable[[np.ndarray, np.ndarray], np.ndarray]


class _Kernels:
    """All kernels of a mixture, in blocks of rows, each with a mean diagonal of one."""

    def __init__(self, gammas: Any, kernels: Any, X: np.ndarray) -> None:
        self.gammas = _check_gammas(gammas) if kernels is None else None
        self._given: list[Kernel] = [] if kernels is None else _check_kernels(kernels)
        self.size = len(self._given) if self.gammas is None else len(self.gammas)
        self._scales = np.ones(self.size)
        if self._given:
            diagonals = np.empty((self.size, len(X)))
            for rows, found in self.blocks(X, X):
                places = np.arange(rows.start, rows.start + found.shape[1])
                diagonals[:, rows] = found[:, np.arange(len(places)), places]
            if not (diagonals >= 0).all() or not diagonals.any(axis=1).all():
                raise ParameterError(
                    "`kernels` must have diagonals of at least 0, and not all 0; got "
                    f"means of {diagonals.mean(axis=1)}."
                )
            self._scales = 1 / diagonals.mean(axis=1)

    def blocks(
        self, X: np.ndarray, Z: np.ndarray
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield blocks of rows of all kernels, shape `(m, rows, len(Z))`."""
        size = max(1, _BLOCK_ENTRIES // (self.size * len(Z)))
        for start in range(0, len(X), size):
            rows = slice(start, min(start + size, len(X)))
            if self.gammas is None:
                parts = [self._evaluate(each, X[rows], Z) for each in self._given]
                yield rows, np.stack(parts) * self._scales[:, None, None]
            else:
                yield rows, _gaussians(X[rows], Z, self.gammas, start if X is Z else -1)

    @staticmethod
    def _evaluate(kernel: Kernel, X: np.ndarray, Z: np.ndarray) -> np.ndarray:
        if isinstance(kernel, str):
            return np.asarray(pairwise_kernels(X, Z, metric=kernel))
        found = np.asarray(kernel(X, Z), dtype=np.float64)
        if found.shape != (len(X), len(Z)) or not np.isfinite(found).all():
            raise ParameterError(
                f"`kernels` must give finite matrices of shape ({len(X)}, {len(Z)}) "
                f"here; got {found.shape} of {kernel!r}."
            )
        return found

    def mix(self, weights: np.ndarray, X: np.ndarray, Z: np.ndarray) -> np.ndarray:
        """Evaluate the mixture of all kernels."""
        mixed = np.empty((X.shape[0], Z.shape[0]))
        for rows, kernels in self.blocks(X, Z):
            np.einsum("m,mij->ij", weights, kernels, out=mixed[rows])
        return mixed


@dataclass(eq=False, repr=False)
class _MultipleKernels(BaseEstimator):
    """What the classifier and the regressor share: the columns and the mixture."""

    gammas: Sequence[float] = (0.1, 0.3, 0.7, 1.0, 1.3, 1.6)
    _: KW_ONLY
    standardize: bool = False
    method: str = "alignf"
    kernels: Sequence[Kernel] | None = None

    def _learn(self, X: np.ndarray, y: Any, target: str) -> np.ndarray:
        """Learn the weights of the kernels; give the mixed kernel of the data."""
        weight = np.ones(X.shape[0])
        labels = encode_target(y, weight, target=target)
        columns = describe_columns(X, weight, standardize=self.standardize)
        self.mean_, self.scale_ = columns.mean, columns.scale
        self._X = (X - self.mean_) / self.scale_
        self._kernels = _Kernels(self.gammas, self.kernels, self._X)
        self.gammas_ = self._kernels.gammas
        weights = np.full(self._kernels.size, 1.0 / self._kernels.size)
        if self.method == "alignf":
            weights = solve_alignment(
                *_alignment_problem(self._kernels, self._X, labels)
            )
        elif self.method == "margin":
            # One column of signs for two classes, one for each of more.
            signed = LabelBinarizer(neg_label=-1).fit_transform(y).T.astype(float)
            parts = [self._margins(weights, signs) for signs in signed]
            weights = np.mean(parts, axis=0)
        self.kernel_weights_ = weights
        return self._kernels.mix(weights, self._X, self._X)

    def _margins(self, weights: np.ndarray, signs: np.ndarray) -> np.ndarray:
        """Weigh kernels by the squared margin each has at the solution for their mean.

        That is `gamma' Y K_m Y gamma`, scaled to sum one.
        """
        mixed = self._kernels.mix(weights, self._X, self._X)
        pulls = signs * solve_margin(mixed, signs, self.regularization)
        margins = np.zeros(self._kernels.size)
        for rows, kernels in self._kernels.blocks(self._X, self._X):
            margins += (kernels @ pulls) @ pulls[rows]
        margins = np.maximum(margins, 0.0)
        # Where all rows are alike there is no margin, but for rounding.
        found = margins.sum() > len(signs) * np.finfo(float).eps
        return margins / margins.sum() if found else weights

    def kernel(self, X: Any) -> np.ndarray:
        """Evaluate the mixed kernel against the training data.

        Parameters
        ----------
        X
            Data, shape `(n, p)`.

        Returns
        -------
        ndarray
            Shape `(n, n_train)`.
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        with _one_thread():
            scaled = (X - self.mean_) / self.scale_
            return self._kernels.mix(self.kernel_weights_, scaled, self._X)


@dataclass(eq=False, repr=False, kw_only=True)
class MultipleKernelClassifier(ClassifierMixin, _MultipleKernels):
    """A support vector machine on a learned mixture of kernels.

    The kernel is `K = sum_m v_m K_m`, with v >= 0 and sum 1, by default of Gaussian
    kernels `exp(-gamma_m |x - x'|^2)`. The weights maximise the alignment of the
    centred kernel with the centred labels [1]_,

        max_{v >= 0} <H K H, Y Y'> / |H K H|,

    a convex problem: `min_{v >= 0} v'Mv - 2 v'a` up to scale, where
    `M_ml = <H K_m H, H K_l H>` and `a_m = <H K_m H, Y Y'>`. Or they are the squared
    margins of the kernels at the solution of [2]_

        min (1 - r) g' Y K Y g + r |g|^2,  g >= 0 of sum one in each of two classes,

    for K the mean of the kernels; more classes are taken one against the rest, and
    their weights averaged.

    Parameters
    ----------
    gammas
        The bandwidths; not used if kernels are given.
    C
        Regularisation of the support vector machine.
    standardize
        Centre and scale each column first.
    method
        "alignf" and "margin" as above, or "uniform" for equal weights.
    kernels
        Instead of Gaussian ones: functions that give the matrix `k(X, Z)`, positive
        semi-definite, or names that `sklearn.metrics.pairwise` knows. Each is scaled
        to a mean diagonal of one.
    regularization
        `r` of "margin", in (0, 1].
    probability
        Whether `predict_proba` is wanted: five more machines learn on parts of the
        data, and a logistic regression on what they say of the rest.

    Attributes
    ----------
    kernel_weights_
        The weights v, one per kernel.
    gammas_
        The bandwidths in use, or None.
    classes_
        The labels seen in `fit`.
    svc_
        The fitted support vector machine on the mixed kernel.
    mean_, scale_
        Location and scale of each column; zeros and ones without standardisation.

    Notes
    -----
    The paper takes the weights from MEMO of MKLpy, which maximises the margin with the
    least effort; "margin" is the convex problem of EasyMKL behind it. It is the dual
    of a machine with the kernel `(1 - r) K + r I` and no slack, and solved as such.
    MKLpy's normalisation of the kernels changes nothing for Gaussian ones, which have
    a unit diagonal.

    References
    ----------
    .. [1] Cortes, Mohri, Rostamizadeh (2012), Algorithms for learning kernels based on
       centered alignment.
    .. [2] Aiolli, Donini (2015), EasyMKL: a scalable multiple kernel learning
       algorithm.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(120, 2))
    >>> y = np.where(X[:, 0] * X[:, 1] > 0, "same", "other")
    >>> model = MultipleKernelClassifier().fit(X[:80], y[:80])
    >>> bool(model.score(X[80:], y[80:]) > 0.8), model.kernel_weights_.shape
    (True, (6,))
    """

    C: float = 1.0
    regularization: float = 0.1
    probability: bool = False

    def fit(self, X: Any, y: Any) -> Self:
        """Learn the weights of the kernels, then the machine.

        Parameters
        ----------
        X
            Data, shape `(n, p)`.
        y
            Class labels, shape `(n,)`.

        Returns
        -------
        MultipleKernelClassifier
            The estimator.
        """
        check_real("C", self.C, above=0)
        check_real("regularization", self.regularization, above=0, at_most=1)
        check_member("method", self.method, ("alignf", "margin", "uniform"))
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        _check_classes(y)
        with _one_thread():
            mixed = self._learn(X, y, "classes")
            self.svc_ = SVC(kernel="precomputed", C=self.C).fit(mixed, y)
            self.classes_ = self.svc_.classes_
            if self.probability:
                self._odds = self._calibrate(mixed, y)
        return self

    def _calibrate(self, kernel: np.ndarray, y: np.ndarray) -> LogisticRegression:
        """Regress the classes on what machines say of rows that they did not see."""
        rarest = int(np.unique(y, return_counts=True)[1].min())
        if rarest < 2:
            raise ParameterError(
                "`probability` must be False where a class has a single sample; got "
                "True."
            )
        folds = StratifiedKFold(min(_FOLDS, rarest))
        held_out = cross_val_predict(
            clone(self.svc_), kernel, y, cv=folds, method="decision_function"
        )
        return LogisticRegression().fit(_as_columns(held_out), y)

    def decision_function(self, X: Any) -> np.ndarray:
        """Evaluate the signed distance to each class boundary.

        Parameters
        ----------
        X
            Data, shape `(n, p)`.

        Returns
        -------
        ndarray
            Shape `(n,)` for two classes, `(n, n_classes)` for more.
        """
        kernel = self.kernel(X)
        return self.svc_.decision_function(kernel)

    def predict(self, X: Any) -> np.ndarray:
        """Predict class labels.

        Parameters
        ----------
        X
            Data, shape `(n, p)`.

        Returns
        -------
        ndarray
            Labels, shape `(n,)`.
        """
        kernel = self.kernel(X)
        return self.svc_.predict(kernel)

    @available_if(lambda self: self.probability)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> np.ndarray:
        """Estimate the probability of every class; needs `probability=True`.

        Parameters
        ----------
        X
            Data, shape `(n, p)`.

        Returns
        -------
        ndarray
            Shape `(n, n_classes)`, in the order of `classes_`.
        """
        decisions = self.decision_function(X)
        return self._odds.predict_proba(_as_columns(decisions))


@dataclass(eq=False, repr=False, kw_only=True)
class MultipleKernelRegressor(RegressorMixin, _MultipleKernels):
    """Kernel ridge regression on a learned mixture of kernels.

    The kernel is that of `MultipleKernelClassifier`, its weights those that maximise
    the alignment with the centred target; the machine minimises
    `|y - mean(y) - K c|^2 + alpha c'K c`.

    Parameters
    ----------
    gammas
        The bandwidths; not used if kernels are given.
    alpha
        The penalty, positive.
    standardize
        Centre and scale each column first.
    method
        "alignf", or "uniform" for equal weights.
    kernels
        Instead of Gaussian ones, as in the classifier.

    Attributes
    ----------
    kernel_weights_
        The weights v, one per kernel.
    gammas_
        The bandwidths in use, or None.
    intercept_, dual_coef_
        The mean of the target, and c.
    mean_, scale_
        Location and scale of each column; zeros and ones without standardisation.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(120, 2))
    >>> y = np.sin(2 * X[:, 0]) + X[:, 1]
    >>> model = MultipleKernelRegressor(alpha=0.01).fit(X[:80], y[:80])
    >>> bool(model.score(X[80:], y[80:]) > 0.8)
    True
    """

    alpha: float = 1.0

    def fit(self, X: Any, y: Any) -> Self:
        """Learn the weights of the kernels, then the machine.

        Parameters
        ----------
        X
            Data, shape `(n, p)`.
        y
            Numbers, shape `(n,)`.

        Returns
        -------
        MultipleKernelRegressor
            The estimator.
        """
        check_real("alpha", self.alpha, above=0)
        check_member("method", self.method, ("alignf", "uniform"))
        X, y = validate_data(
            self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2
        )
        with _one_thread():
            mixed = self._learn(X, y, "number")
            self.intercept_ = float(np.mean(y))
            mixed[np.diag_indices_from(mixed)] += self.alpha
            self.dual_coef_ = solve(mixed, y - self.intercept_, assume_a="pos")
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Predict the target.

        Parameters
        ----------
        X
            Data, shape `(n, p)`.

        Returns
        -------
        ndarray
            Shape `(n,)`.
        """
        kernel = self.kernel(X)
        with _one_thread():
            return kernel @ self.dual_coef_ + self.intercept_


def _as_columns(decisions: np.ndarray) -> np.ndarray:
    return decisions.reshape(len(decisions), -1)


def solve_margin(
    kernel: np.ndarray, signs: np.ndarray, regularization: float
) -> np.ndarray:
    """Solve `min (1 - r) g'YKYg + r |g|^2`, g >= 0 of sum one in each class.

    The nearest points of two hulls are the dual of a machine without slack, up to
    scale; its bound C is more than any multiplier can reach.

    Examples
    --------
    >>> solve_margin(np.eye(3), np.array([1.0, 1.0, -1.0]), 0.5).round(6).tolist()
    [0.5, 0.5, 1.0]
    """
    matrix = (1 - regularization) * kernel
    matrix[np.diag_indices_from(matrix)] += regularization
    bound = 10 * len(signs) / regularization
    machine = SVC(kernel="precomputed", C=bound, tol=_TIGHT).fit(matrix, signs)
    pulls = np.zeros(len(signs))
    pulls[machine.support_] = np.abs(machine.dual_coef_[0])
    return 2 * pulls / pulls.sum()


def solve_alignment(products: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Solve `min_{v >= 0} v'Mv - 2 v'a` and scale v to sum 1.

    With `M = R'R` this is non-negative least squares, `min |Rv - R^-T a|`.

    Examples
    --------
    >>> solve_alignment(np.eye(2), np.array([3.0, 1.0])).tolist()
    [0.75, 0.25]
    """
    norms = np.sqrt(np.diag(products))
    # A kernel that is constant on the data has no direction, and gets no weight.
    inverse = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0)
    values, vectors = np.linalg.eigh(products * np.outer(inverse, inverse))
    # Kernels of near bandwidths are near copies: drop the directions of rounding.
    kept = values > len(values) * np.finfo(float).eps * values[-1]
    roots, vectors = np.sqrt(values[kept]), vectors[:, kept]
    aims = vectors.T @ (targets * inverse) / roots
    weights = nnls(roots[:, None] * vectors.T, aims)[0] * inverse
    if not weights.any():
        return np.full(len(targets), 1.0 / len(targets))
    return weights / weights.sum()


def _alignment_problem(
    source: _Kernels, X: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`M` and `a` of the alignment problem; no n by n matrix is formed."""
    blocks = source.blocks(X, X)
    means = np.concatenate([kernels.mean(axis=2) for _, kernels in blocks], axis=1)
    totals = means.mean(axis=1)
    products = np.zeros((source.size, source.size))
    targets = np.zeros(source.size)
    for rows, kernels in source.blocks(X, X):
        kernels -= means[:, rows, None]
        kernels -= (means - totals[:, None])[:, None, :]
        flat = kernels.reshape(source.size, -1)
        products += flat @ flat.T
        targets += np.sum((kernels @ labels) * labels[rows], axis=(1, 2))
    return products, targets


def _gaussians(
    X: np.ndarray, Z: np.ndarray, gammas: np.ndarray, diagonal: int
) -> np.ndarray:
    """Evaluate all Gaussian kernels; row i is the row `diagonal + i` of Z, or -1."""
    with np.errstate(over="ignore", invalid="ignore"):
        distances = euclidean_distances(X, Z, squared=True)
    if not np.isfinite(distances).all():
        raise ParameterError(
            "`X` holds values whose squared distances overflow; use "
            "`standardize=True` or rescale the columns."
        )
    if diagonal >= 0:
        # The expansion |x|^2 - 2 x.z + |z|^2 leaves rounding on the diagonal.
        distances[np.arange(len(X)), diagonal + np.arange(len(X))] = 0
    return np.exp(-gammas[:, None, None] * distances)


def _check_kernels(kernels: Any) -> list[Kernel]:
    if isinstance(kernels, str) or not np.iterable(kernels):
        raise ParameterTypeError(
            "`kernels` must be a sequence of functions or names, or None; got "
            f"{shown(kernels)}."
        )
    found = list(kernels)
    for kernel in found:
        if isinstance(kernel, str):
            check_member("kernels", kernel, PAIRWISE_KERNEL_FUNCTIONS)
        elif not callable(kernel):
            raise ParameterTypeError(
                f"`kernels` must hold functions or names; got {shown(kernel)}."
            )
    if not found:
        raise ParameterError("`kernels` must hold at least one kernel; got none.")
    return found


def _check_gammas(gammas: Any) -> np.ndarray:
    if isinstance(gammas, str) or not np.iterable(gammas):
        raise ParameterTypeError(
            f"`gammas` must be a sequence of numbers; got {shown(gammas)}."
        )
    values = [check_real("gammas", gamma, above=0) for gamma in gammas]
    if not values:
        raise ParameterError("`gammas` must hold at least one bandwidth; got none.")
    return np.array(values)
