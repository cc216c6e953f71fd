"""The synthetic problem: experiments on it, and their methods.

Accuracy against noise, against the strength of the repulsion and against the number of
features; seconds against the number of samples.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
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
from coulomb.experiments.base import (
    AbstractExperiment,
    Clock,
    Outcome,
    Settings,
    experiments,
)
from coulomb.experiments.records import PLANS, Job
from coulomb.experiments.text import (
    BOTH,
    SMALL,
    TOY,
    run_text,
    text_constants,
    text_jobs,
    text_rows,
)
from coulomb.interactions import Riesz

DESIGN = 42  # the paper's seed of X
FIRST_FRESH = 7000  # designs from here on no constant of the defaults was chosen on
STRENGTHS: tuple[float, ...] = (0.0, 0.2, 0.5, 0.8, 1.0, 1.5)
RIESZ = 1.0  # the paper does not say which exponent its Riesz panel has
BUDGETS: tuple[int, ...] = (16, 32, 64, 128, 256)
SIZES: tuple[int, ...] = (100, 500, 1000, 2000, 3000, 4000, 10_000, 20_000)
LEARNED = "langevin"
GAMMA = 0.5  # the paper's bandwidth
_GRID = {"gamma": np.logspace(-3, 1, 13)}
_WALL = 0.999  # of the radius: a particle beyond sits on the wall
_LARGE = 10_000  # from here on the paper's constants take a minute
# The kernel matrices of more rows take gigabytes.
_MOST_ROWS_MULTIPLE = {"smoke": 500, "paper": 10_000, "full": 20_000}

NOISE_ROWS: tuple[Job, ...] = tuple(PLANS["synthetic"]["noise"])
BUDGET_ROWS: tuple[Job, ...] = tuple(
    row
    for row in NOISE_ROWS
    if row["method"] in ("fixed", "importance", "langevin") and row.get("strength") != 0
)
RUNTIME_ROWS: tuple[Job, ...] = tuple(PLANS["synthetic"]["runtime"])


def synthetic_job(
    row: Job, *, trial: int, noise: float, level: int = 0, **more: object
) -> Job:
    """Complete a row to a job; rows of one trial and level share their seed.

    Examples
    --------
    >>> job = synthetic_job({"method": "logistic"}, trial=2, noise=0.1, level=3)
    >>> job["seed"], job["n_samples"]
    (3002, 400)
    """
    common = {
        "n_samples": 400,
        "n_features": 5,
        "n_components": 200,
        "design": DESIGN,
        "noise": noise,
        "trial": trial,
        "seed": 1000 * level + trial,
    }
    return common | row | more


def _sweep(
    rows: Sequence[Job],
    trials: int,
    noises: Mapping[int, float],  # by level
    name: str = "n_components",
    values: Sequence[Any] = (200,),
) -> list[Job]:
    """List every row at every noise, trial and value of an entry."""
    return [
        synthetic_job(row, trial=trial, noise=noise, level=level, **{name: value})
        for level, noise in noises.items()
        for trial in range(trials)
        for value in values
        for row in rows
    ]


def _powers(powers: Sequence[int]) -> dict[int, float]:
    return {power + 5: 10.0**power for power in powers}


class _AbstractSynthetic(AbstractExperiment):
    @abstractmethod
    def jobs(self, preset: str) -> list[Job]:
        """List the jobs on the synthetic problem."""

    def plan(self, settings: Settings) -> list[Job]:
        jobs = self.jobs(settings.preset)
        if settings.preset != "smoke":
            return jobs
        # The long runs of the paper's constants are cut short.
        long = {"method": LEARNED, "constants": "paper"}.items()
        return [job | {"max_iter": 50} if long <= job.items() else job for job in jobs]

    def run(self, job: Job, settings: Settings) -> Sequence[Outcome]:
        return run_synthetic(job)


@experiments.add("noise")
class Noise(_AbstractSynthetic):
    """Accuracy, F1 and seconds against the noise on the logit.

    The `full` preset adds ten columns and, for every trial, a design of its own.
    [CPM fig:supp-noise-sweep]
    """

    title = "Accuracy against noise"

    def jobs(self, preset: str) -> list[Job]:
        if preset == "smoke":
            return _sweep(NOISE_ROWS, 2, _powers((0, 1)))
        columns = (5, 10) if preset == "full" else (5,)
        jobs = _sweep(NOISE_ROWS, 10, _powers(range(-5, 6)), "n_features", columns)
        if preset == "full":
            fresh = _sweep(NOISE_ROWS, 20, {20: 0.1}) + _sweep(
                NOISE_ROWS, 20, {20: 1.0}
            )
            jobs += [job | {"design": FIRST_FRESH + job["trial"]} for job in fresh]
        return jobs


@experiments.add("strength")
class Strength(_AbstractSynthetic):
    """Accuracy against the strength of the repulsion, log and Riesz.

    [CPM fig:supp-lambda-sweep]
    """

    title = "Accuracy against the strength of the repulsion"

    def jobs(self, preset: str) -> list[Job]:
        powers: Sequence[int] = range(-5, 6) if preset == "full" else (-3, 0, 3)
        strengths, trials = STRENGTHS, 10
        if preset == "smoke":
            powers, strengths, trials = (0,), (0.0, 0.5), 2
        rows: list[Job] = [{"method": "fixed", "constants": each} for each in BOTH]
        rows += [
            {"method": LEARNED, "constants": constants}
            | {"strength": strength, "exponent": exponent}
            for constants in BOTH
            for exponent in (0.0, RIESZ)
            for strength in strengths
            if strength or not exponent  # without strength the exponent is nothing
        ]
        return _sweep(rows, trials, _powers(powers))


@experiments.add("budget")
class Budget(_AbstractSynthetic):
    """Accuracy against D from 16 to 256; with `tasks`, against M per head too."""

    title = "Accuracy against the number of features"

    def jobs(self, preset: str) -> list[Job]:
        if preset == "smoke":
            return _sweep(BUDGET_ROWS, 2, {0: 1.0}, values=(16, 64))
        trials = 20 if preset == "full" else 10
        return _sweep(BUDGET_ROWS, trials, {0: 0.1, 1: 1.0}, values=BUDGETS)

    def plan(self, settings: Settings) -> list[Job]:
        # The particles of each head in attention vary too, for tasks that are named.
        tasks, budgets, changes = settings.tasks, BUDGETS, Job()
        seeds = 3 if settings.preset == "paper" else 5
        if settings.preset == "smoke":
            tasks, budgets, changes, seeds = tasks or (TOY,), (4, 8), SMALL, 2
        rows = [
            row | {"n_components": budget, "changes": changes | {"n_features": budget}}
            for budget in budgets
            for row in text_rows(("vanilla-softmaxfeat", "kernel-softmaxfeat"))
        ]
        heads = [job for task in tasks for job in text_jobs(task, seeds, rows)]
        return super().plan(settings) + heads

    def run(self, job: Job, settings: Settings) -> Sequence[Outcome]:
        return run_text(job, settings) if "task" in job else run_synthetic(job)

    def constants(self, job: Job) -> Mapping[str, Any]:
        return text_constants(job) if "task" in job else {}


@experiments.add("runtime")
class Runtime(_AbstractSynthetic):
    """Wall-clock and CPU seconds of every method, features to prediction.

    [CPM tab:runtime-observed, tab:powerlaw-summary]
    """

    title = "Seconds against the number of samples"

    def jobs(self, preset: str) -> list[Job]:
        sizes, trials = SIZES, 5 if preset == "full" else 2
        if preset == "smoke":
            sizes, trials = (100, 200, 400), 1
        jobs = _sweep(RUNTIME_ROWS, trials, {0: 1.0}, "n_samples", sizes)
        # The long jobs come first, so that workers end together.
        return [
            job
            for job in sorted(jobs, key=lambda job: -job["n_samples"])
            if job["n_samples"] < _LARGE or job["trial"] < max(1, trials // 2)
            if job["method"] != "multiple-kernels"
            or job["n_samples"] <= _MOST_ROWS_MULTIPLE[preset]
        ]


def run_synthetic(job: Job) -> list[Outcome]:
    """Fit one method on one trial of the synthetic problem, with its controls."""
    problem = make_synthetic(
        job["n_samples"],
        job["n_features"],
        noise=job["noise"],
        seed=job["design"],
        trial=job["trial"],
    )
    if job["method"] != LEARNED:
        return [_score(problem, build_model(job))]
    sampler = build_sampler(job)
    makers: dict[str | None, Callable[..., CoulombSampler]] = {
        None: sampler.fit,
        "norm-matched": lambda X, y: sampler.control(job["seed"]),
        "noise-only": lambda X, y: sampler.noise_control(job["seed"]),
    }
    outcomes = []
    for control, make in makers.items():
        model = _Learned(make, _head(job))
        outcomes.append(_score(problem, model, control))
        outcomes[-1].metrics.update(_describe(model.sampler))
    return outcomes


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


class _Learned:
    """A linear machine on the features of a sampler, which is made by `fit`."""

    def __init__(self, make: Callable[..., CoulombSampler], head: Any) -> None:
        self.make, self.head = make, head

    def fit(self, X: Any, y: Any) -> "_Learned":
        self.sampler = self.make(X, y)
        self.head.fit(self.sampler.transform(X), y)
        return self

    def predict(self, X: Any) -> Any:
        return self.head.predict(self.sampler.transform(X))


def _score(
    problem: SyntheticProblem, model: Any, control: str | None = None
) -> Outcome:
    X, y, test = problem.X, problem.y, problem.test
    clock = Clock()
    predicted = model.fit(X[problem.train], y[problem.train]).predict(X[test])
    seconds = clock.seconds()
    metrics = {
        "accuracy": float((predicted == y[test]).mean()),
        "f1": float(f1_score(y[test], predicted, zero_division=0)),
        "expected_accuracy": expected_accuracy(predicted, problem.probability[test]),
        "bayes_accuracy": problem.bayes_accuracy,
    }
    return Outcome(metrics, seconds, control=control)


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


_WHOLE: dict[str, Callable[[Job], Any]] = {
    "logistic": lambda job: LogisticRegression(),
    "svm": lambda job: SVC(gamma=job["gamma"]),
    "svm-cv": lambda job: GridSearchCV(SVC(), _GRID, cv=5),
    "multiple-kernels": lambda job: MultipleKernelClassifier(),
    "multiple-margin": lambda job: MultipleKernelClassifier(method="margin"),
}
_FEATURES = ("fixed", "orthogonal", "importance")


def build_model(job: Job) -> Any:
    """Make the classifier of a row that is not learned by particles.

    Examples
    --------
    >>> build_model({"method": "svm", "gamma": 0.5}).gamma
    0.5
    """
    method = job["method"]
    if method in _WHOLE:
        return _WHOLE[method](job)
    if method not in _FEATURES:
        raise unknown_name("method", method, [*_WHOLE, *_FEATURES, LEARNED])
    common = {"n_components": job["n_components"], "random_state": job["seed"]}
    raw: dict[str, Any] = {"gamma": GAMMA, "standardize": False}  # the paper's scaling
    ours = job["constants"] == "default"
    if method == "orthogonal":
        features: Any = OrthogonalSampler(**common, **raw)
    elif method == "importance":
        features = ImportanceSampler(**common, **({} if ours else raw))
    elif ours:
        features = CoulombSampler(**common, max_iter=0)
    else:
        features = RBFSampler(**common, gamma=GAMMA)
    return make_pipeline(features, _head(job))
