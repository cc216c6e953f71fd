"""Multiple-kernel learning over Gaussian bandwidths."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
from scipy.optimize import nnls
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics.pairwise import euclidean_distances
from sklearn.svm import SVC
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from coulomb._support.checks import check_member, check_real
from coulomb._support.errors import ParameterError, ParameterTypeError
from coulomb.estimators.base import describe_columns, encode_target

# Entries of one block of all the kernels together: 32 megabytes.
_BLOCK_ENTRIES = 2**22
_METHODS = ("alignf", "uniform")


class MultipleKernelClassifier(ClassifierMixin, BaseEstimator):
    """A support vector machine on a learned mixture of Gaussian kernels.

    The kernel is `K = sum_m v_m exp(-gamma_m |x - x'|^2)`, with v >= 0 and sum 1. The
    weights maximise the alignment of the centred kernel with the centred labels [1]_,

        max_{v >= 0} <H K H, Y Y'> / |H K H|,

    a convex problem: `min_{v >= 0} v'Mv - 2 v'a` up to scale, where
    `M_ml = <H K_m H, H K_l H>` and `a_m = <H K_m H, Y Y'>`.

    Parameters
    ----------
    gammas
        The bandwidths.
    C
        Regularisation of the support vector machine.
    standardize
        Centre and scale each column first.
    method
        "alignf" as above, or "uniform" for equal weights.

    Attributes
    ----------
    kernel_weights_
        The weights v, one per bandwidth.
    gammas_
        The bandwidths in use.
    classes_
        The labels seen in `fit`.
    svc_
        The fitted support vector machine on the mixed kernel.
    mean_, scale_
        Location and scale of each column; zeros and ones without standardisation.

    Notes
    -----
    The paper takes the weights from MEMO of MKLpy, which maximises margin over radius.
    MKLpy needs packages that are no longer maintained; the alignment problem is convex
    too, and has one answer. MKLpy's normalisation of the kernels changes nothing here:
    a Gaussian kernel has a unit diagonal.

    References
    ----------
    .. [1] Cortes, Mohri, Rostamizadeh (2012), Algorithms for learning kernels based on
       centered alignment.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(120, 2))
    >>> y = np.where(X[:, 0] * X[:, 1] > 0, "same", "other")
    >>> model = MultipleKernelClassifier().fit(X[:80], y[:80])
    >>> bool(model.score(X[80:], y[80:]) > 0.8), model.kernel_weights_.shape
    (True, (6,))
    """

    def __init__(
        self,
        gammas: Sequence[float] = (0.1, 0.3, 0.7, 1.0, 1.3, 1.6),
        *,
        C: float = 1.0,
        standardize: bool = False,
        method: str = "alignf",
    ) -> None:
        self.gammas = gammas
        self.C = C
        self.standardize = standardize
        self.method = method

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
        self.gammas_ = _check_gammas(self.gammas)
        check_real("C", self.C, above=0)
        check_member("method", self.method, _METHODS)
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        weight = np.ones(X.shape[0])
        labels = encode_target(y, weight, target="classes")
        columns = describe_columns(X, weight, standardize=self.standardize)
        self.mean_, self.scale_ = columns.mean, columns.scale
        self._X = (X - self.mean_) / self.scale_
        self.kernel_weights_ = self._learn_weights(labels)
        self.svc_ = SVC(kernel="precomputed", C=self.C).fit(self._mix(self._X), y)
        self.classes_ = self.svc_.classes_
        return self

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
        return self._mix((X - self.mean_) / self.scale_)

    def _learn_weights(self, labels: np.ndarray) -> np.ndarray:
        if self.method == "uniform":
            return np.full(len(self.gammas_), 1.0 / len(self.gammas_))
        return solve_alignment(*_alignment_problem(self._X, self.gammas_, labels))

    def _mix(self, X: np.ndarray) -> np.ndarray:
        mixed = np.empty((X.shape[0], self._X.shape[0]))
        for rows, kernels in _kernel_blocks(X, self._X, self.gammas_):
            np.einsum("m,mij->ij", self.kernel_weights_, kernels, out=mixed[rows])
        return mixed


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
    X: np.ndarray, gammas: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`M` and `a` of the alignment problem; no n by n matrix is formed."""
    blocks = _kernel_blocks(X, X, gammas)
    means = np.concatenate([kernels.mean(axis=2) for _, kernels in blocks], axis=1)
    totals = means.mean(axis=1)
    products = np.zeros((len(gammas), len(gammas)))
    targets = np.zeros(len(gammas))
    for rows, kernels in _kernel_blocks(X, X, gammas):
        kernels -= means[:, rows, None]
        kernels -= (means - totals[:, None])[:, None, :]
        flat = kernels.reshape(len(gammas), -1)
        products += flat @ flat.T
        targets += np.sum((kernels @ labels) * labels[rows], axis=(1, 2))
    return products, targets


def _kernel_blocks(
    X: np.ndarray, Z: np.ndarray, gammas: np.ndarray
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield blocks of rows of all Gaussian kernels, shape `(m, rows, len(Z))`."""
    size = max(1, _BLOCK_ENTRIES // (len(gammas) * len(Z)))
    for start in range(0, len(X), size):
        rows = slice(start, start + size)
        with np.errstate(over="ignore", invalid="ignore"):
            distances = euclidean_distances(X[rows], Z, squared=True)
        if not np.isfinite(distances).all():
            raise ParameterError(
                "`X` holds values whose squared distances overflow; use "
                "`standardize=True` or rescale the columns."
            )
        if X is Z:
            # The expansion |x|^2 - 2 x.z + |z|^2 leaves rounding on the diagonal.
            distances[np.arange(len(distances)), start + np.arange(len(distances))] = 0
        yield rows, np.exp(-gammas[:, None, None] * distances)


def _check_gammas(gammas: Any) -> np.ndarray:
    if isinstance(gammas, str) or not np.iterable(gammas):
        raise ParameterTypeError(
            f"`gammas` must be a sequence of numbers; got {gammas!r}."
        )
    values = [check_real("gammas", gamma, above=0) for gamma in gammas]
    if not values:
        raise ParameterError("`gammas` must hold at least one bandwidth; got none.")
    return np.array(values)
