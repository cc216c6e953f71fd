"""Records do not depend on workers, backends or interruptions."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from coulomb._support.errors import ParameterError
from coulomb.experiments import Settings, load_records
from coulomb.experiments.base import AbstractExperiment, Outcome, experiments
from coulomb.experiments.records import FILE
from coulomb.experiments.runner import run_experiment

# Jobs of vectors and of text, learned ones with their controls among them.
SMOKE = Settings(
    "smoke",
    only={
        "constants": ("default",),
        "method": ("fixed", "langevin", "vanilla-softmaxfeat"),
    },
)
NAME = "budget"
CODE = f"""
import sys
from pathlib import Path
from coulomb.experiments import Settings
from coulomb.experiments.runner import run_experiment
run_experiment("budget", Path(sys.argv[1]), Settings("smoke", only={SMOKE.only!r}))
"""


def numbers(folder):
    """Everything that must not depend on how the jobs were run."""
    return [(r.job, r.key, r.split, r.metrics, r.extra) for r in load_records(folder)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequential")
    run_experiment(NAME, folder, SMOKE, n_jobs=1)
    return numbers(folder / NAME)


@pytest.mark.slow
def test_two_workers_give_the_same_records(tmp_path, expected):
    account = run_experiment(NAME, tmp_path, SMOKE, n_jobs=2)
    assert account.failures == ()
    assert numbers(tmp_path / NAME) == expected


@pytest.mark.slow
def test_a_dask_cluster_gives_the_same_records_though_a_worker_dies(
    tmp_path, expected, capfd
):
    """Real processes: one is killed as soon as there is a record. One bar shows all."""
    distributed = pytest.importorskip("distributed")
    path = tmp_path / NAME / FILE
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=":0"
    ) as cluster:
        with distributed.Client(cluster) as client:
            victim = next(iter(client.run(os.getpid).values()))

        def kill():
            while not path.exists():
                time.sleep(0.02)
            os.kill(victim, signal.SIGKILL)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        address = cluster.scheduler_address
        options = {"scheduler": address, "progress": True}
        account = run_experiment(NAME, tmp_path, SMOKE, **options)
        killer.join(timeout=60)
    assert account.failures == ()
    said = capfd.readouterr().err
    assert said.count(f"{account.planned}/{account.planned}") == 1
    assert "Dask's dashboard: http://" in said
    assert numbers(tmp_path / NAME) == expected
    account = run_experiment(NAME, tmp_path, SMOKE, scheduler="local:1")
    assert (account.found, account.done) == (account.planned, 0)


@pytest.mark.parametrize("scheduler", ["local:none", "local:0", "tcp://127.0.0.1:9"])
def test_a_scheduler_that_is_none_is_refused(tmp_path, scheduler, monkeypatch):
    dask = pytest.importorskip("dask")
    pytest.importorskip("distributed")
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "100ms"}),
        pytest.raises(ParameterError, match="`scheduler` must be"),
    ):
        run_experiment(NAME, tmp_path, SMOKE, scheduler=scheduler)


@pytest.mark.slow
def test_killed_and_started_again(tmp_path, expected):
    path = tmp_path / NAME / FILE
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = subprocess.Popen([sys.executable, "-c", CODE, tmp_path], env=environment)
    began = time.monotonic()
    try:
        while not (path.exists() and path.read_bytes().count(b"\n") >= 5):
            assert running.poll() is None
            assert time.monotonic() < began + 120
            time.sleep(0.02)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    kept = load_records(path)
    assert 0 < len(kept) < len(expected)
    account = run_experiment(NAME, tmp_path, SMOKE)
    assert account.found > 0
    assert account.found + account.done == account.planned
    assert numbers(tmp_path / NAME) == expected


class Breaks(AbstractExperiment):
    """Its second job fails until a file is there."""

    title = "Breaks"

    def plan(self, settings):
        return [{"method": "m", "constants": "default", "seed": i} for i in range(3)]

    def run(self, job, settings):
        if job["seed"] == 1 and not (settings.data_dir / "mended").exists():
            raise ZeroDivisionError("on purpose")
        return [Outcome({"value": float(job["seed"])})]


@pytest.fixture
def breaking(monkeypatch):
    monkeypatch.setitem(experiments._factories, "breaks", Breaks)
    return "breaks"


def test_a_broken_job_ends_no_other_and_is_tried_again(tmp_path, breaking):
    settings = Settings("smoke", data_dir=tmp_path)
    account = run_experiment(breaking, tmp_path, settings)
    assert (account.done, len(account.failures)) == (2, 1)
    assert "on purpose" in account.failures[0]
    (tmp_path / "mended").touch()
    account = run_experiment(breaking, tmp_path, settings)
    assert (account.found, account.done, account.failures) == (2, 1, ())
    values = [r.metrics["value"] for r in load_records(tmp_path / breaking)]
    assert sorted(values) == [0.0, 1.0, 2.0]


def test_an_interrupt_keeps_what_is_done(tmp_path, monkeypatch):
    class Stops(Breaks):
        def run(self, job, settings):
            if job["seed"] == 2:
                raise KeyboardInterrupt
            return [Outcome({"value": 1.0})]

    monkeypatch.setitem(experiments._factories, "breaks", Stops)
    with pytest.raises(KeyboardInterrupt):
        run_experiment("breaks", tmp_path, Settings("smoke", data_dir=tmp_path))
    assert len(load_records(tmp_path / "breaks")) == 2
