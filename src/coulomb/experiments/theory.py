"""The continuum limit and large deviations, measured on particles."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

from coulomb._support.archive import plain
from coulomb._support.checks import make_generator
from coulomb._support.stats import Fit
from coulomb.experiments.base import AbstractExperiment, Outcome, Settings, experiments
from coulomb.experiments.records import PLANS, Job
from coulomb.interactions import Riesz
from coulomb.theory import (
    FlowSettings,
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
_ANY_STEP = FlowSettings(refuse_rises=False)
_ROUNDING = 1e-12  # of a free energy of order one, summed over cells


class _AbstractTheory(AbstractExperiment):
    file: str  # of the whole result of the first job

    @abstractmethod
    def rows(self, small: bool) -> list[Job]:
        """List the jobs of one trial."""

    @abstractmethod
    def solve(self, job: Job) -> dict[str, Any]:
        """Do the work of a job."""

    @abstractmethod
    def describe(self, found: dict[str, Any]) -> tuple[dict[str, float], Any]:
        """Pick the metrics of what was found, and curves."""

    def plan(self, settings: Settings) -> list[Job]:
        trials = {"smoke": 1, "paper": 3, "full": 10}[settings.preset]
        return [
            row | {"trial": trial, "seed": trial}
            for row in self.rows(settings.preset == "smoke")
            for trial in range(trials)
        ]

    def run(self, job: Job, settings: Settings) -> Sequence[Outcome]:
        began = perf_counter()
        metrics, curves = self.describe(self.solve(job))
        seconds = {"total": perf_counter() - began}
        return [Outcome(metrics, seconds, "", None, plain(curves))]

    def extras(self, settings: Settings) -> dict[str, Callable[[], Any]]:
        job = self.plan(settings)[0]
        return {self.file: lambda: plain(self.solve(job))}


@experiments.add("meanfield")
class MeanFieldLimit(_AbstractTheory):
    """How fast particles approach the McKean-Vlasov equation.

    [CPM thm:main-mckean-vlasov]
    """

    title = "Particles against their continuum limit"
    file = "meanfield.json"

    def rows(self, small: bool) -> list[Job]:
        plan = PLANS["meanfield"]
        return [plan["smoke" if small else "paper"] | gas for gas in plan["gases"]]

    def solve(self, job: Job) -> dict[str, Any]:
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
            "free": evolve(system, first, [job["time"]], settings=_ANY_STEP),
            "gap": gap,
        }

    def describe(self, found: dict[str, Any]) -> tuple[dict[str, float], Any]:
        gap = found["gap"]
        metrics = _exponent("w1", gap.first_exponent)
        metrics |= _exponent("w2", gap.second_exponent)
        metrics |= _exponent("observable", gap.observable_exponent)
        rises = np.diff(found["free"].free_energies)
        metrics |= {
            "w1_last": float(gap.first[-1]),
            "free_energy_at_rest": float(found["equilibrium"].free_energy),
            "free_energy_rises": float((rises > _ROUNDING).sum()),
            "largest_rise": float(rises.max()),
            "free_steps": float(rises.size),
        }
        return metrics, {"counts": gap.counts, "w1": gap.first, "w2": gap.second}


@experiments.add("deviations")
class LargeDeviations(_AbstractTheory):
    """How fast deviations of the empirical kernel become rare.

    [CPM thm:main-ldp]
    """

    title = "Large deviations against their rate"
    file = "deviations.json"

    def rows(self, small: bool) -> list[Job]:
        plan = PLANS["deviations"]
        common = plan["common"] | plan["smoke" if small else "paper"]
        return [
            common | speed["row"] | (speed["small"] if small else {})
            for speed in plan["speeds"]
        ]

    def solve(self, job: Job) -> dict[str, Any]:
        system = MeanField(
            Interval(-job["size"], job["size"], job["cells"]),
            parse_expression(job["potential"], 1),
            Riesz(),
            job["strength"],
            1.0,
        )
        shared: dict[str, Any] = {
            "scaling": Scaling(job["beta"], power=job["power"]),
            "settings": ImportanceSettings(
                job["configurations"], bridges=job["bridges"]
            ),
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

    def describe(self, found: dict[str, Any]) -> tuple[dict[str, float], Any]:
        curve, energy = found["deviations"], found["free_energy"]
        last = curve.log_probabilities[-1] - curve.predictions[-1]
        metrics = {
            "slope": curve.fit.slope,
            "slope_error": curve.fit.standard_error,
            "rate": float(curve.rate),
            "prediction_error": float(last),
            "free_energy": float(energy.values[-1]),
            "free_energy_error": float(energy.standard_errors[-1]),
            "free_energy_limit": float(energy.limit),
        }
        kept = ("counts", "log_probabilities", "predictions")
        return metrics, {name: getattr(curve, name) for name in kept}


def _exponent(name: str, fit: Fit | None) -> dict[str, float]:
    if fit is None:
        return {}
    return {f"{name}_exponent": fit.slope, f"{name}_error": fit.standard_error}
