"""Seconds against the number of samples, and the power laws through them."""

from collections.abc import Sequence

from coulomb.experiments.base import (
    AbstractExperiment,
    Outcome,
    Settings,
    experiments,
)
from coulomb.experiments.methods import run_synthetic
from coulomb.experiments.records import Job
from coulomb.experiments.synthetic import shorten, synthetic_job

SIZES: tuple[int, ...] = (100, 500, 1000, 2000, 3000, 4000, 10_000, 20_000)
ROWS: tuple[Job, ...] = (
    {"method": "logistic", "constants": "paper"},
    {"method": "svm", "constants": "paper", "gamma": 0.5},
    {"method": "fixed", "constants": "paper", "head": "liblinear"},
    {"method": "multiple-kernels", "constants": "paper"},
    {"method": "importance", "constants": "paper", "head": "liblinear"},
    {"method": "langevin", "constants": "paper", "strength": 0.5, "head": "liblinear"},
    {"method": "langevin", "constants": "default", "head": "liblinear"},
)
_LARGE = 10_000  # from here on the paper's constants take a minute
# The kernel matrices of more rows take gigabytes.
_MOST_ROWS_MULTIPLE = {"smoke": 500, "paper": 10_000, "full": 20_000}


@experiments.add("runtime")
class Runtime(AbstractExperiment):
    """Wall-clock and CPU seconds of every method, features to prediction.

    [CPM tab:runtime-observed, tab:powerlaw-summary]
    """

    title = "Seconds against the number of samples"

    def plan(self, settings: Settings) -> list[Job]:
        sizes, trials = SIZES, 2
        if settings.preset == "smoke":
            sizes, trials = (100, 200, 400), 1
        elif settings.preset == "full":
            trials = 5
        most = _MOST_ROWS_MULTIPLE[settings.preset]
        # The long jobs come first, so that workers end together.
        jobs = [
            synthetic_job(row, trial=trial, noise=1.0, n_samples=size)
            for size in reversed(sizes)
            for row in reversed(ROWS)
            for trial in range(trials if size < _LARGE else max(1, trials // 2))
            if row["method"] != "multiple-kernels" or size <= most
        ]
        return shorten(jobs, settings)

    def run(self, job: Job, settings: Settings) -> Sequence[Outcome]:
        return run_synthetic(job)
