"""The continuum limit and large deviations, measured on particles."""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

from coulomb._support.archive import plain
from coulomb._support.stats import Fit
from coulomb._support.streams import make_generator
from coulomb.experiments.base import AbstractExperiment, Outcome, Settings, experiments
from coulomb.experiments.records import Job
from coulomb.interactions import Riesz
from coulomb.theory import (
    GapSettings,
    ImportanceSettings,
    Interval,
    MeanField,
    Scaling,
    deviation_curve,
    equilibrium,
    evolve,
    free_energy_curve,
    mean_field_gap,
    parse_expression,
)

_START = "exp(-10*(x-0.4)**2)"
# V, s and truncation: the log gas, and a Riesz gas with s >= d that is truncated.
_GASES: tuple[Job, ...] = (
    {"method": "log", "potential": "2*x**2", "s": 0.0, "truncation": 0.0},
    {"method": "riesz", "potential": "cos(3*x)", "s": 1.0, "truncation": 0.1},
)
# At speed N with beta_N = N, and at speed beta_N = N^2.
_SPEEDS: tuple[Job, ...] = (
    {
        "method": "speed N",
        "power": 1.0,
        "strength": 0.5,
        "observable": "cos(x)",
        "delta": 0.25,
        "bridges": 0,
    },
    {
        "method": "speed beta",
        "power": 2.0,
        "strength": 0.2,
        "observable": "x",
        "delta": 0.5,
        "bridges": 6,
    },
)


@experiments.add("meanfield")
class MeanFieldLimit(AbstractExperiment):
    """How fast particles approach the McKean-Vlasov equation.

    [CPM thm:main-mckean-vlasov]
    """

    title = "Particles against their continuum limit"

    def plan(self, settings: Settings) -> list[Job]:
        small = settings.preset == "smoke"
        counts = (8, 16, 32) if small else (16, 32, 64, 128, 256)
        trials = {"smoke": 1, "paper": 3, "full": 10}[settings.preset]
        common = {
            "constants": "default",
            "counts": list(counts),
            "replicas": 3 if small else 16,
            "cells": 40 if small else 200,
            "time": 0.1 if small else 0.3,
            "step_size": 1e-2 if small else 2e-3,
        }
        return [
            common | gas | {"trial": trial, "seed": trial}
            for gas in _GASES
            for trial in range(trials)
        ]

    def run(self, job: Job, settings: Settings) -> Sequence[Outcome]:
        began = perf_counter()
        found = solve_mean_field(job)
        gap, rest, flow = found["gap"], found["equilibrium"], found["flow"]
        metrics = _exponent("w1", gap.first_exponent)
        metrics |= _exponent("w2", gap.second_exponent)
        metrics |= _exponent("observable", gap.observable_exponent)
        fall = -np.diff(flow.free_energies)
        metrics |= {
            "w1_last": float(gap.first[-1]),
            "free_energy_at_rest": float(rest.free_energy),
            "free_energy_rises": float((fall < -1e-10).sum()),
        }
        extra = plain({"counts": gap.counts, "w1": gap.first, "w2": gap.second})
        return [Outcome(metrics, {"total": perf_counter() - began}, "", None, extra)]

    def extras(self, settings: Settings) -> dict[str, Callable[[], Any]]:
        job = self.plan(settings)[0]
        return {"meanfield.json": lambda: plain(solve_mean_field(job))}


@experiments.add("deviations")
class LargeDeviations(AbstractExperiment):
    """How fast deviations of the empirical kernel become rare.

    [CPM thm:main-ldp]
    """

    title = "Large deviations against their rate"

    def plan(self, settings: Settings) -> list[Job]:
        small = settings.preset == "smoke"
        trials = {"smoke": 1, "paper": 3, "full": 10}[settings.preset]
        common = {
            "constants": "default",
            "potential": "x**2",
            "beta": 1.0,
            "size": 3.0,
            "cells": 60 if small else 300,
            "configurations": 200 if small else 4000,
        }
        counts = {
            1.0: (4, 8, 16) if small else (8, 16, 32, 64),
            2.0: (2, 3, 4, 5),
        }
        return [
            common
            | speed
            | {"counts": list(counts[speed["power"]]), "trial": trial, "seed": trial}
            for speed in _SPEEDS
            for trial in range(trials)
        ]

    def run(self, job: Job, settings: Settings) -> Sequence[Outcome]:
        began = perf_counter()
        found = measure_deviations(job)
        curve, energy = found["deviations"], found["free_energy"]
        metrics = {
            "slope": curve.fit.slope,
            "slope_error": curve.fit.standard_error,
            "rate": float(curve.rate),
            "prediction_error": float(
                curve.log_probabilities[-1] - curve.predictions[-1]
            ),
            "free_energy": float(energy.values[-1]),
            "free_energy_error": float(energy.standard_errors[-1]),
            "free_energy_limit": float(energy.limit),
        }
        extra = plain(
            {
                "counts": curve.counts,
                "log_probabilities": curve.log_probabilities,
                "predictions": curve.predictions,
            }
        )
        return [Outcome(metrics, {"total": perf_counter() - began}, "", None, extra)]

    def extras(self, settings: Settings) -> dict[str, Callable[[], Any]]:
        job = self.plan(settings)[0]
        return {"deviations.json": lambda: plain(measure_deviations(job))}


def solve_mean_field(job: Job) -> dict[str, Any]:
    """Solve the continuum and run particles against it."""
    grid = Interval(-1.0, 1.0, job["cells"])
    system = MeanField(
        grid,
        parse_expression(job["potential"], 1),
        Riesz(s=job["s"], truncation=job["truncation"]),
        1.0,
        2.0,
    )
    first = parse_expression(_START, 1)(torch.from_numpy(grid.points)).numpy()
    gap = mean_field_gap(
        system,
        first,
        job["time"],
        job["counts"],
        parse_expression("cos(x)", 1),
        settings=GapSettings(
            step_size=job["step_size"], replicas=job["replicas"], clip=50.0
        ),
        generator=make_generator(job["seed"]),
    )
    return {
        "points": grid.points,
        "equilibrium": equilibrium(system),
        "flow": evolve(system, first, job["time"] * np.array([0.1, 0.3, 1.0])),
        "gap": gap,
    }


def measure_deviations(job: Job) -> dict[str, Any]:
    """Estimate probabilities of rare deviations, and the free energy."""
    system = MeanField(
        Interval(-job["size"], job["size"], job["cells"]),
        parse_expression(job["potential"], 1),
        Riesz(),
        job["strength"],
        1.0,
    )
    shared: dict[str, Any] = {
        "scaling": Scaling(job["beta"], power=job["power"]),
        "settings": ImportanceSettings(job["configurations"], bridges=job["bridges"]),
    }
    draw = partial(make_generator, job["seed"])
    return {
        "deviations": deviation_curve(
            system,
            parse_expression(job["observable"], 1),
            job["delta"],
            job["counts"],
            generator=draw(0),
            **shared,
        ),
        "free_energy": free_energy_curve(
            system, job["counts"], generator=draw(1), **shared
        ),
    }


def _exponent(name: str, fit: Fit | None) -> dict[str, float]:
    if fit is None:
        return {}
    return {f"{name}_exponent": fit.slope, f"{name}_error": fit.standard_error}
