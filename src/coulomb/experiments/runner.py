"""Running jobs: any number of workers, any joblib backend, any number of attempts."""

import json
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from joblib import Parallel, delayed
from threadpoolctl import threadpool_limits

from coulomb._support.archive import write_whole
from coulomb._support.errors import CoulombError
from coulomb._support.progress import progress_bar
from coulomb._version import __version__
from coulomb.experiments.base import Settings, experiments
from coulomb.experiments.records import (
    FILE,
    Job,
    Record,
    append_records,
    cut_torn_line,
    environment,
    job_key,
    load_records,
)


@dataclass(frozen=True)
class Account:
    """What a call of `run_experiment` did."""

    planned: int
    found: int
    done: int
    failures: tuple[str, ...] = ()


def run_experiment(
    name: str,
    out: Path,
    settings: Settings | None = None,
    *,
    n_jobs: int | None = None,
    progress: bool | None = None,
) -> Account:
    """Run the jobs of an experiment that have no record yet.

    Every finished job adds its records to `OUT/NAME/records.jsonl` at once, so that an
    interruption loses only the jobs under way. Metrics do not depend on the number of
    workers, on the backend or on the order in which jobs finish.
    """
    settings = settings or Settings()
    experiment = experiments.build(name)
    folder = Path(out) / name
    path = folder / FILE
    plan = settings.chosen(experiment.plan(settings))
    cut_torn_line(path)
    known = {record.key for record in load_records(path)}
    missing = [
        job
        for job in plan
        if job_key(name, job, experiment.constants(job)) not in known
    ]
    failures = []
    with progress_bar(name, len(plan), visible=progress) as advance:
        advance(len(plan) - len(missing))
        for result in _results(name, missing, settings, n_jobs):
            if isinstance(result, str):
                failures.append(result)
            else:
                append_records(path, result)
            advance()
    for file, make in experiment.extras(settings).items():
        if not (folder / file).exists():
            with one_thread():
                text = json.dumps(make(), allow_nan=False)
            write_whole(folder / file, partial(_write, text))
    found = len(plan) - len(missing)
    return Account(len(plan), found, len(missing) - len(failures), tuple(failures))


def run_job(name: str, job: Job, settings: Settings) -> list[Record]:
    """Run one job on one thread and make its records."""
    experiment = experiments.build(name)
    with one_thread():
        outcomes = experiment.run(job, settings)
    return [
        Record(
            experiment=name,
            job=job | {"control": outcome.control},
            key=job_key(name, job, experiment.constants(job)),
            split=outcome.split,
            metrics=outcome.metrics,
            seconds=outcome.seconds,
            environment=environment(),
            version=__version__,
            extra=outcome.extra,
        )
        for outcome in outcomes
    ]


@contextmanager
def one_thread() -> Iterator[None]:
    """Hold numpy, scipy, torch and scikit-learn to one thread while the block runs.

    Examples
    --------
    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(limits=1):
            yield
    finally:
        torch.set_num_threads(threads)


def _results(
    name: str, jobs: Sequence[Job], settings: Settings, n_jobs: int | None
) -> Iterator[list[Record] | str]:
    if not jobs:
        return
    work = Parallel(n_jobs=n_jobs, return_as="generator_unordered")
    results = work(delayed(_attempt)(name, job, settings) for job in jobs)
    try:
        yield from results
    finally:
        results.close()  # ends the workers when the caller stops early


def _attempt(name: str, job: Job, settings: Settings) -> list[Record] | str:
    """Keep one broken job from ending hundreds of others."""
    try:
        return run_job(name, job, settings)
    except CoulombError as error:
        return f"{job}: {error}"
    except Exception:
        return f"{job}: {traceback.format_exc()}"


def _write(text: str, path: Path) -> None:
    path.write_text(text)
