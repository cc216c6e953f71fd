"""What an experiment is: a plan of jobs, and a way to run one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from coulomb._support.checks import Registry
from coulomb._support.errors import unknown_name
from coulomb.experiments.records import Job

PRESETS = ("smoke", "paper", "full")


@dataclass(frozen=True)
class Outcome:
    """What a job found for one row on one split.

    Parameters
    ----------
    metrics
        Numbers by name; they depend on the job alone.
    seconds
        Times by name; they depend on the machine.
    split
        Where the metrics were measured.
    control
        None for the row itself, "norm-matched" or "noise-only" for its controls.
    extra
        Further plain data, such as curves.
    """

    metrics: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)
    split: str = "test"
    control: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """What a user chooses about a plan, and what is no part of a job's identity.

    Parameters
    ----------
    preset
        "smoke", "paper" or "full".
    tasks
        Text data sets, for the experiments that use text.
    data_dir
        Folder of the data sets; jobs do not depend on where it is.
    only
        Some of the plan: for names of entries of a job the values that count.

    Examples
    --------
    >>> plan = [{"method": "fixed", "seed": 0}, {"method": "fixed", "seed": 1}]
    >>> Settings(only={"seed": ("0",)}).chosen(plan)
    [{'method': 'fixed', 'seed': 0}]
    """

    preset: str = "paper"
    tasks: tuple[str, ...] = ()
    data_dir: Path | None = None
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise unknown_name("preset", self.preset, PRESETS)

    def chosen(self, plan: Sequence[Job]) -> list[Job]:
        """Take the jobs of a plan that were asked for.

        Parameters
        ----------
        plan
            All jobs.

        Returns
        -------
        list of dict
            Those with one of the values of `only` in every entry it names.
        """
        jobs = list(plan)
        for name, values in self.only.items():
            there = {str(job.get(name)): None for job in plan if name in job}
            if not there:
                raise unknown_name("only", name, {key for job in plan for key in job})
            for value in values:
                if value not in there:
                    raise unknown_name(f"only {name}", value, list(there))
            jobs = [job for job in jobs if str(job.get(name)) in values]
        return jobs


class Clock:
    """Wall-clock and CPU time since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = perf_counter(), process_time()

    def seconds(self) -> dict[str, float]:
        """Give the seconds that a record keeps."""
        wall, cpu = perf_counter() - self._wall, process_time() - self._cpu
        return {"total": wall, "cpu": cpu}


class AbstractExperiment(ABC):
    """One table or figure of the paper."""

    title: str
    """What the experiment shows, as the title of a figure."""

    @abstractmethod
    def plan(self, settings: Settings) -> list[Job]:
        """List the jobs.

        Parameters
        ----------
        settings
            The preset and the tasks.

        Returns
        -------
        list of dict
            Plain data; every job is there once.
        """

    @abstractmethod
    def run(self, job: Job, settings: Settings) -> Sequence[Outcome]:
        """Do one job.

        Parameters
        ----------
        job
            One of the plan.
        settings
            For the data folder.

        Returns
        -------
        sequence of Outcome
            One for each row and split; the metrics depend on the job alone.
        """

    def constants(self, job: Job) -> Mapping[str, Any]:
        """Write out the constants that a job names, where they may change with us.

        Parameters
        ----------
        job
            One of the plan.

        Returns
        -------
        mapping
            Plain data. They are part of the job's key: records that were made with
            other constants are not taken for this job's.
        """
        return {}

    def extras(self, settings: Settings) -> dict[str, Callable[[], Any]]:
        """Name further files beside the records; most experiments have none.

        Parameters
        ----------
        settings
            The preset.

        Returns
        -------
        dict
            For each file name what computes its content, plain data for JSON.
        """
        return {}


experiments: Registry[AbstractExperiment] = Registry("name")
