"""The methods of the paper's synthetic study, each with its constants and ours."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC, LinearSVC

from coulomb._support.errors import unknown_name
from coulomb.datasets import SyntheticProblem, expected_accuracy, make_synthetic
from coulomb.estimators import (
    CoulombSampler,
    ImportanceSampler,
    MultipleKernelClassifier,
    OrthogonalSampler,
)
from coulomb.experiments.base import Outcome
from coulomb.experiments.records import Job
from coulomb.interactions import Riesz

LEARNED = "langevin"
GAMMA = 0.5  # the paper's bandwidth
_GRID = {"gamma": np.logspace(-3, 1, 13)}
_WALL = 0.999  # of the radius: a particle beyond sits on the wall


def run_synthetic(job: Job) -> list[Outcome]:
    """Fit one method on one trial of the synthetic problem, with its controls."""
    problem = make_synthetic(
        job["n_samples"],
        job["n_features"],
        noise=job["noise"],
        seed=job["design"],
        trial=job["trial"],
    )
    if job["method"] == LEARNED:
        return _run_learned(job, problem)
    return [_score(problem, lambda X, y: build_model(job).fit(X, y))]


def build_model(job: Job) -> Any:
    """Make the classifier of a row that is not learned by particles.

    Examples
    --------
    >>> build_model({"method": "svm", "gamma": 0.5}).gamma
    0.5
    """
    if job["method"] not in _MODELS:
        raise unknown_name("method", job["method"], [*_MODELS, LEARNED])
    return _MODELS[job["method"]](job)


def build_sampler(job: Job) -> CoulombSampler:
    """Make the sampler of a learned row."""
    changes: dict[str, Any] = {"random_state": job["seed"]}
    if "strength" in job:
        changes["interaction_strength"] = job["strength"]
    if "max_iter" in job:
        changes["max_iter"] = job["max_iter"]
    if "exponent" in job:
        changes["interaction"] = Riesz(s=job["exponent"])
    if job["constants"] == "paper":
        return CoulombSampler.paper(job["n_components"], **changes)
    return CoulombSampler(job["n_components"], **changes)


def _run_learned(job: Job, problem: SyntheticProblem) -> list[Outcome]:
    samplers: dict[str | None, CoulombSampler] = {}

    def learn(X: Any, y: Any) -> CoulombSampler:
        samplers[None] = build_sampler(job).fit(X, y)
        return samplers[None]

    def norm_matched(X: Any, y: Any) -> CoulombSampler:
        return samplers[None].control(job["seed"])

    def blind(X: Any, y: Any) -> CoulombSampler:
        return samplers[None].noise_control(job["seed"])

    makers = {None: learn, "norm-matched": norm_matched, "noise-only": blind}
    outcomes = []
    for control, make in makers.items():

        def fit(X: Any, y: Any, make: Callable[..., Any] = make) -> Any:
            sampler = make(X, y)
            samplers["last"] = sampler
            return _Fitted(sampler, _head(job).fit(sampler.transform(X), y))

        found = _score(problem, fit)
        found.metrics.update(_describe(samplers["last"]))
        outcomes.append(
            Outcome(found.metrics, found.seconds, found.split, control, found.extra)
        )
    return outcomes


class _Fitted:
    def __init__(self, sampler: CoulombSampler, head: Any) -> None:
        self.sampler, self.head = sampler, head

    def predict(self, X: Any) -> Any:
        return self.head.predict(self.sampler.transform(X))


def _score(problem: SyntheticProblem, fit: Callable[[Any, Any], Any]) -> Outcome:
    X, y, test = problem.X, problem.y, problem.test
    wall, cpu = time.perf_counter(), time.process_time()
    model = fit(X[problem.train], y[problem.train])
    predicted = model.predict(X[test])
    seconds = {
        "total": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
    }
    metrics = {
        "accuracy": float((predicted == y[test]).mean()),
        "f1": float(f1_score(y[test], predicted, zero_division=0)),
        "expected_accuracy": expected_accuracy(predicted, problem.probability[test]),
        "bayes_accuracy": problem.bayes_accuracy,
    }
    return Outcome(metrics, seconds)


def _describe(sampler: CoulombSampler) -> dict[str, float]:
    """Say where the features ended: their norms, and the share on the wall."""
    norms = np.linalg.norm(sampler.random_weights_, axis=0)
    found = {"mean_norm": float(norms.mean())}
    radius = getattr(sampler.domain, "radius", None)
    if radius is not None:
        found["on_wall"] = float((norms > _WALL * radius).mean())
    return found


class _QuickLinear(LinearSVC):  # type: ignore[misc]
    def fit(self, X: Any, y: Any) -> Any:
        with warnings.catch_warnings():
            # Its limit of sweeps is the usual one; the times of the paper show that
            # nobody waited for more.
            warnings.simplefilter("ignore", ConvergenceWarning)
            return super().fit(X, y)


def _head(job: Job) -> Any:
    """Choose libsvm's linear machine, or liblinear's where rows are many."""
    if job.get("head") == "liblinear":
        return _QuickLinear(loss="hinge", random_state=job["seed"])
    return SVC(kernel="linear")


def _on_features(job: Job, sampler: Any) -> Any:
    return make_pipeline(sampler, _head(job))


def _fixed(job: Job) -> Any:
    if job["constants"] == "default":
        return _on_features(
            job,
            CoulombSampler(job["n_components"], max_iter=0, random_state=job["seed"]),
        )
    return _on_features(
        job,
        RBFSampler(
            gamma=GAMMA, n_components=job["n_components"], random_state=job["seed"]
        ),
    )


def _importance(job: Job) -> Any:
    scaling: dict[str, Any] = {}
    if job["constants"] == "paper":
        scaling = {"gamma": GAMMA, "standardize": False}
    return _on_features(
        job, ImportanceSampler(job["n_components"], random_state=job["seed"], **scaling)
    )


def _orthogonal(job: Job) -> Any:
    return _on_features(
        job,
        OrthogonalSampler(
            job["n_components"],
            gamma=GAMMA,
            standardize=False,
            random_state=job["seed"],
        ),
    )


_MODELS: dict[str, Callable[[Job], Any]] = {
    "logistic": lambda job: LogisticRegression(),
    "svm": lambda job: SVC(gamma=job["gamma"]),
    "svm-cv": lambda job: GridSearchCV(SVC(), _GRID, cv=5),
    "fixed": _fixed,
    "orthogonal": _orthogonal,
    "multiple-kernels": lambda job: MultipleKernelClassifier(),
    "importance": _importance,
}
