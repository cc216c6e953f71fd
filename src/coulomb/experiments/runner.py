"""Running jobs: any number of workers, here or on a cluster, any number of attempts.

`write_sample` invents the records instead: to try pages and tables on, never to be
believed.
"""

import json
import math
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed
from threadpoolctl import threadpool_limits

from coulomb._support.archive import write_bytes, write_json
from coulomb._support.errors import CoulombError, ParameterError
from coulomb._support.progress import progress_bar
from coulomb._version import __version__
from coulomb.experiments.base import Settings, experiments
from coulomb.experiments.records import (
    FILE,
    Job,
    Record,
    append_records,
    environment,
    job_key,
    load_records,
)

INVENTED = "invented"  # the version that records of `write_sample` bear


@dataclass(frozen=True)
class RunCounts:
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
    scheduler: str | None = None,
    progress: bool | None = None,
) -> RunCounts:
    """Run the jobs of an experiment that have no record yet.

    Every finished job adds its records to `OUT/NAME/records.jsonl` at once, so that an
    interruption loses only the jobs under way. Metrics do not depend on the number of
    workers, on the backend or on the order in which jobs finish. `scheduler` is the
    address of a Dask cluster, or "local:N" for one of N processes.
    """
    settings = settings or Settings()
    experiment = experiments.build(name)
    folder = Path(out) / name
    path = folder / FILE
    plan = settings.chosen(experiment.plan(settings))
    known = {record.key for record in load_records(folder)}
    missing = [
        job
        for job in plan
        if job_key(name, job, experiment.constants(job)) not in known
    ]
    failures = []
    with progress_bar(name, len(plan), visible=progress) as advance:
        advance(len(plan) - len(missing))
        for result in _results(name, missing, settings, n_jobs, scheduler):
            if isinstance(result, str):
                failures.append(result)
            else:
                append_records(path, result)
            advance()
    for file, make in experiment.extras(settings).items():
        if not (folder / file).exists():
            with one_thread():
                text = json.dumps(make(), allow_nan=False)
            write_bytes(folder / file, text.encode())
    found = len(plan) - len(missing)
    return RunCounts(len(plan), found, len(missing) - len(failures), tuple(failures))


def run_job(name: str, job: Job, settings: Settings) -> list[Record]:
    """Run one job on one thread and make its records."""
    experiment = experiments.build(name)
    mark = {"preset": "smoke"} if settings.preset == "smoke" else {}
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
            extra=outcome.extra | mark,
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
    name: str,
    jobs: Sequence[Job],
    settings: Settings,
    n_jobs: int | None,
    scheduler: str | None,
) -> Iterator[list[Record] | str]:
    if not jobs:
        return
    if scheduler is not None:
        yield from _cluster_results(name, jobs, settings, scheduler)
        return
    work = Parallel(n_jobs=n_jobs, return_as="generator_unordered")
    results = work(delayed(_attempt)(name, job, settings) for job in jobs)
    try:
        yield from results
    finally:
        results.close()  # ends the workers when the caller stops early


def _cluster_results(
    name: str, jobs: Sequence[Job], settings: Settings, scheduler: str
) -> Iterator[list[Record] | str]:
    """Run jobs on a Dask cluster; those of a worker that dies run on another."""
    with dask_client(scheduler) as client:
        print(f"Dask's dashboard: {client.dashboard_link}", file=sys.stderr)
        futures = {
            client.submit(_attempt, name, job, settings, pure=False): job
            for job in jobs
        }
        from distributed import as_completed

        for future in as_completed(futures):
            job = futures.pop(future)
            error = future.exception()
            yield future.result() if error is None else f"{job}: {error}"


@contextmanager
def dask_client(scheduler: str) -> Iterator[Any]:
    """Connect to a Dask cluster, or start one of processes on this machine."""
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise ParameterError(
            "`scheduler` needs its extra: pip install 'coulomb[dask]'."
        ) from error
    here, _, count = scheduler.partition(":")
    if here == "local":
        if not count.isdecimal() or not 0 < int(count[:9]) <= 1024:
            raise ParameterError(
                "`scheduler` must be local:N, N processes up to 1024, or the address "
                f"of a Dask scheduler; got {scheduler!r:.60}."
            )
        options = {"n_workers": int(count), "threads_per_worker": 1}
        with (
            LocalCluster(**options, dashboard_address=":0") as cluster,
            Client(cluster) as client,
        ):
            yield client
        return
    try:
        client = Client(scheduler)  # waits as long as Dask is configured to
    except (OSError, ValueError) as error:
        raise ParameterError(
            f"`scheduler` must be the address of a Dask scheduler that runs, such as "
            f"tcp://host:8786, or local:N; got {scheduler!r}: {error}"
        ) from error
    with client:
        yield client


def _attempt(name: str, job: Job, settings: Settings) -> list[Record] | str:
    """Keep one broken job from ending hundreds of others."""
    try:
        return run_job(name, job, settings)
    except CoulombError as error:
        return f"{job}: {error}"
    except Exception:
        return f"{job}: {traceback.format_exc()}"


def write_sample(
    out: Path, names: Iterable[str] = ("noise", "strength", "budget", "runtime")
) -> None:
    """Write invented records of the smoke plans, in the shape real ones have.

    Examples
    --------
    >>> import tempfile
    >>> from coulomb.experiments.records import load_experiments
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_sample(folder, ["noise"])
    >>> sorted({record.version for record in load_experiments(folder)["noise"]})
    ['invented']
    """
    for name in names:
        folder = Path(out) / name
        plan = experiments.build(name).plan(Settings("smoke"))
        records = [record for job in plan for record in _invent(name, job)]
        (folder / FILE).unlink(missing_ok=True)
        append_records(folder / FILE, records)
        for file, make in experiments.build(name).extras(Settings("smoke")).items():
            write_json(folder / file, make())


def _invent(name: str, job: Job) -> list[Record]:
    """Draw records of a job: accuracies below the best possible, lower for controls."""
    key = job_key(name, job)
    rng = np.random.default_rng(int(key, 16))
    learned = job.get("method") == "langevin"
    best = 0.5 + 0.26 / (1 + float(job.get("noise", 1.0)) / 5)
    records = []
    for control in (None, "norm-matched", "noise-only") if learned else (None,):
        accuracy = best - 0.02 - 0.03 * (control is not None) - 0.01 * rng.normal()
        drawn = dict.fromkeys(("accuracy", "f1"), accuracy + 0.02 * rng.normal())
        metrics = drawn | {"expected_accuracy": accuracy, "bayes_accuracy": best}
        seconds = {"total": math.exp(rng.normal()), "cpu": math.exp(rng.normal())}
        row = job | {"control": control}
        about = (environment(), INVENTED)
        records.append(Record(name, row, key, "test", metrics, seconds, *about))
    return records
