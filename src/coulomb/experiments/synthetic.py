"""Figures on the synthetic problem: accuracy against noise, strength and budget."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from coulomb.experiments.base import (
    AbstractExperiment,
    Outcome,
    Settings,
    experiments,
)
from coulomb.experiments.frames import record_frames
from coulomb.experiments.methods import run_synthetic
from coulomb.experiments.records import FRAMES, Job

DESIGN = 42  # the paper's seed of X
FIRST_FRESH = 7000  # designs from here on no constant of the defaults was chosen on
STRENGTHS: tuple[float, ...] = (0.0, 0.2, 0.5, 0.8, 1.0, 1.5)
RIESZ = 1.0  # the paper does not say which exponent its Riesz panel has
BUDGETS: tuple[int, ...] = (16, 32, 64, 128, 256)

# Rows of the paper's first figure, then ours; "constants" say whose settings are used.
ROWS: tuple[Job, ...] = (
    {"method": "logistic", "constants": "paper"},
    {"method": "svm", "constants": "paper", "gamma": 0.5},
    {"method": "svm", "constants": "paper", "gamma": 0.01},
    {"method": "svm", "constants": "paper", "gamma": 100.0},
    {"method": "svm-cv", "constants": "default"},
    {"method": "fixed", "constants": "paper"},
    {"method": "fixed", "constants": "default"},
    {"method": "orthogonal", "constants": "paper"},
    {"method": "multiple-kernels", "constants": "paper"},
    {"method": "importance", "constants": "paper"},
    {"method": "importance", "constants": "default"},
    {"method": "langevin", "constants": "paper", "strength": 0.5},
    {"method": "langevin", "constants": "paper", "strength": 0.0},
    {"method": "langevin", "constants": "default"},
)


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


def shorten(jobs: list[Job], settings: Settings) -> list[Job]:
    """Cut the long runs of the paper's constants short in the preset "smoke"."""
    if settings.preset != "smoke":
        return jobs
    long = {"method": "langevin", "constants": "paper"}.items()
    return [job | {"max_iter": 50} if long <= job.items() else job for job in jobs]


@experiments.add("noise")
class Noise(AbstractExperiment):
    """Accuracy, F1 and seconds against the noise on the logit.

    The `full` preset adds ten columns and, for every trial, a design of its own.
    [CPM fig:supp-noise-sweep]
    """

    title = "Accuracy against noise"

    def plan(self, settings: Settings) -> list[Job]:
        powers, trials = range(-5, 6), 10
        variants: list[Job] = [{}]
        if settings.preset == "smoke":
            powers, trials = range(2), 2
        elif settings.preset == "full":
            variants += [{"n_features": 10}]
        jobs = [
            synthetic_job(row, trial=trial, noise=10.0**power, level=power + 5, **more)
            for more in variants
            for power in powers
            for trial in range(trials)
            for row in ROWS
        ]
        if settings.preset == "full":
            jobs += [
                synthetic_job(
                    row, trial=trial, noise=noise, level=20, design=FIRST_FRESH + trial
                )
                for noise in (0.1, 1.0)
                for trial in range(20)
                for row in ROWS
            ]
        return shorten(jobs, settings)

    def run(self, job: Job, settings: Settings) -> Sequence[Outcome]:
        return run_synthetic(job)

    def extras(self, settings: Settings) -> dict[str, Callable[[], Any]]:
        if settings.preset == "smoke":
            return {FRAMES: partial(record_frames, 20, steps=(100, 50))}
        return {FRAMES: record_frames}


@experiments.add("strength")
class Strength(AbstractExperiment):
    """Accuracy against the strength of the repulsion, log and Riesz.

    [CPM fig:supp-lambda-sweep]
    """

    title = "Accuracy against the strength of the repulsion"

    def plan(self, settings: Settings) -> list[Job]:
        powers: Sequence[int] = (-3, 0, 3)
        strengths, trials = STRENGTHS, 10
        if settings.preset == "smoke":
            powers, strengths, trials = (0,), (0.0, 0.5), 2
        elif settings.preset == "full":
            powers = range(-5, 6)
        rows: list[Job] = [
            {"method": "fixed", "constants": constants}
            for constants in ("paper", "default")
        ]
        rows += [
            {
                "method": "langevin",
                "constants": constants,
                "strength": strength,
                "exponent": exponent,
            }
            for constants in ("paper", "default")
            for exponent in (0.0, RIESZ)
            for strength in strengths
            if strength or not exponent  # without strength the exponent is nothing
        ]
        jobs = [
            synthetic_job(row, trial=trial, noise=10.0**power, level=power + 5)
            for power in powers
            for trial in range(trials)
            for row in rows
        ]
        return shorten(jobs, settings)

    def run(self, job: Job, settings: Settings) -> Sequence[Outcome]:
        return run_synthetic(job)
