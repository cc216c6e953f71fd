"""Accuracy against the number of features, on vectors and in attention."""

from collections.abc import Mapping, Sequence
from typing import Any

from coulomb.experiments.base import (
    AbstractExperiment,
    Outcome,
    Settings,
    experiments,
)
from coulomb.experiments.methods import run_synthetic
from coulomb.experiments.records import Job
from coulomb.experiments.synthetic import BUDGETS, shorten, synthetic_job
from coulomb.experiments.text import SMALL, TOY, run_text, text_constants, text_rows

ROWS: tuple[Job, ...] = (
    {"method": "fixed", "constants": "paper"},
    {"method": "fixed", "constants": "default"},
    {"method": "importance", "constants": "paper"},
    {"method": "importance", "constants": "default"},
    {"method": "langevin", "constants": "paper", "strength": 0.5},
    {"method": "langevin", "constants": "default"},
)


@experiments.add("budget")
class Budget(AbstractExperiment):
    """Accuracy against D from 16 to 256; with `tasks`, against M per head too."""

    title = "Accuracy against the number of features"

    def plan(self, settings: Settings) -> list[Job]:
        noises: Sequence[float] = (0.1, 1.0)
        budgets, trials = BUDGETS, 10
        if settings.preset == "smoke":
            noises, budgets, trials = (1.0,), (16, 64), 2
        elif settings.preset == "full":
            trials = 20
        jobs = [
            synthetic_job(
                row, trial=trial, noise=noise, level=level, n_components=budget
            )
            for level, noise in enumerate(noises)
            for trial in range(trials)
            for budget in budgets
            for row in ROWS
        ]
        return shorten(jobs, settings) + _heads(settings)

    def run(self, job: Job, settings: Settings) -> Sequence[Outcome]:
        if "task" in job:
            return run_text(job, settings)
        return run_synthetic(job)

    def constants(self, job: Job) -> Mapping[str, Any]:
        return text_constants(job) if "task" in job else {}


def _heads(settings: Settings) -> list[Job]:
    """Vary the particles of each head in attention, for the tasks that are named."""
    tasks, budgets, changes = settings.tasks, BUDGETS, Job()
    seeds = 3 if settings.preset == "paper" else 5
    if settings.preset == "smoke":
        tasks, budgets, changes, seeds = tasks or (TOY,), (4, 8), SMALL, 2
    return [
        {
            "task": task,
            **row,
            "n_components": budget,
            "changes": changes | {"n_features": budget},
            "seed": seed,
            "trial": seed,
        }
        for task in tasks
        for seed in range(seeds)
        for budget in budgets
        for row in text_rows(("vanilla-softmaxfeat", "kernel-softmaxfeat"))
    ]
