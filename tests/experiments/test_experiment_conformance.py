"""Every experiment: its smoke plan runs, repeats itself and goes on from a stop."""

import json

import pytest

from coulomb._support.errors import ParameterError
from coulomb.experiments import Settings, experiments, load_records
from coulomb.experiments.base import PRESETS
from coulomb.experiments.records import FILE, job_key
from coulomb.experiments.runner import run_experiment, run_job
from coulomb.experiments.summary import experiment_tables
from coulomb.experiments.text import text_constants, text_settings
from coulomb.report.sections.synthetic import budget_section
from coulomb.text.settings import PRESETS as PRESETS_OF_TEXT
from coulomb.text.settings import preset

NAMES = sorted(experiments)
SYNTHETIC = ("noise", "strength", "budget", "runtime")
SMOKE = Settings("smoke")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("smoke")


def test_all_experiments_are_there():
    assert NAMES == [
        "budget", "deviations", "meanfield", "noise", "phase-a", "runtime", "strength",
        "text",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preset", PRESETS)
def test_plans_are_plain_and_without_repetition(name, preset):
    experiment = experiments.build(name)
    jobs = experiment.plan(Settings(preset, ("rotten_tomatoes",)))
    assert json.loads(json.dumps(jobs, allow_nan=False)) == jobs
    assert len({job_key(name, job) for job in jobs}) == len(jobs)
    assert all({"method", "constants", "seed", "trial"} <= set(job) for job in jobs)
    if name in (*SYNTHETIC, "text"):
        readings = {"paper-plain", "paper-main"} if name == "text" else set()
        found = {job["constants"] for job in jobs}
        assert found - readings == {"paper", "default"}
        assert (found >= readings) or preset == "smoke"
    assert experiment.title


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_smoke_runs_and_goes_on(name, out):
    account = run_experiment(name, out, SMOKE)
    assert account.failures == ()
    assert account.done == account.planned > 0
    before = (out / name / FILE).read_bytes()
    again = run_experiment(name, out, SMOKE)
    assert (again.done, again.found) == (0, account.planned)
    assert (out / name / FILE).read_bytes() == before

    records = load_records(out / name)
    experiment = experiments.build(name)
    assert {record.key for record in records} == {
        job_key(name, job, experiment.constants(job)) for job in experiment.plan(SMOKE)
    }
    assert all(record.metrics and record.environment["torch"] for record in records)
    for file in experiments.build(name).extras(SMOKE):
        assert json.loads((out / name / file).read_text())
    if name in SYNTHETIC:
        records = [r for r in records if "task" not in r.job]
        assert all(0.5 < r.metrics["bayes_accuracy"] < 0.8 for r in records)
        learned = [r for r in records if r.job["method"] == "langevin"]
        rows = {(r.key, r.job["control"]) for r in learned}
        for key in {record.key for record in learned}:
            assert {(key, "norm-matched"), (key, "noise-only"), (key, None)} <= rows


@pytest.mark.parametrize("name", NAMES)
def test_jobs_are_repeatable(name):
    jobs = experiments.build(name).plan(SMOKE)
    learned = [job for job in jobs if job["method"] == "langevin"]
    job = (learned or jobs)[0]
    first, second = (run_job(name, job, SMOKE) for _ in range(2))
    assert [r.metrics for r in first] == [r.metrics for r in second]


def test_budget_in_attention_varies_the_particles_of_a_head(tmp_path):
    """Every learned row has its controls and its vanilla row at every budget."""
    jobs = experiments.build("budget").plan(Settings("paper", ("rotten_tomatoes",)))
    heads = [job for job in jobs if "task" in job]
    assert {job["n_components"] for job in heads} == {16, 32, 64, 128, 256}
    assert all(text_settings(j).n_features == j["n_components"] for j in heads)

    only = Settings("smoke", only={"task": ("toy",), "constants": ("default",)})
    assert run_experiment("budget", tmp_path, only).failures == ()
    records = load_records(tmp_path / "budget")
    tables = experiment_tables("budget", records)
    controls = {(r["n_components"], r["control"], r["n"]) for r in tables["controls"]}
    names = ("norm-matched", "noise-only")
    assert controls == {(m, name, 2) for m in (4, 8) for name in names}
    assert {(r["n_components"], r["n"]) for r in tables["vanilla"]} == {(4, 2), (8, 2)}
    for row in tables["vanilla"]:
        by_hand = [
            {
                r.job["seed"]: r.metrics[row["metric"]]
                for r in records
                if r.job["n_components"] == row["n_components"]
                and (r.job["method"], r.job["control"]) == (method, None)
            }
            for method in ("kernel-softmaxfeat", "vanilla-softmaxfeat")
        ]
        gaps = [by_hand[0][seed] - by_hand[1][seed] for seed in (0, 1)]
        assert row["mean"] == pytest.approx(sum(gaps) / 2)
    section = budget_section(records)
    (table,) = section.tables
    assert [column.header for column in table.columns][2:4] == ["M = 4", "M = 8"]
    assert len(table.rows) == 4
    assert [len(group.charts) for group in section.groups] == [1]


def test_unknown_names_are_refused():
    with pytest.raises(ParameterError, match="did you mean 'noise'"):
        experiments.build("noises")
    with pytest.raises(ParameterError, match="did you mean 'smoke'"):
        Settings("smok")


def test_rows_of_the_papers_text_tables():
    jobs = experiments.build("text").plan(Settings("paper", ("sst2",)))
    rows = {(job["method"], job["control"]) for job in jobs if job["seed"] == 0}
    kernel = [method for method, control in rows if control == "noise-only"]
    assert len(kernel) == 7
    assert len([method for method, control in rows if control is None]) == 18 + 3
    assert {job["task"] for job in jobs} == {"sst2"}


def test_records_of_other_constants_are_not_taken(tmp_path, monkeypatch):
    """A changed preset changes what a row of text stands for."""
    only = Settings("smoke", only={"method": ("softmax",), "constants": ("default",)})
    assert run_experiment("text", tmp_path, only).done == 1
    assert run_experiment("text", tmp_path, only).done == 0
    changed = {**PRESETS_OF_TEXT, "default": preset("default", {"lr": 1e-3})}
    monkeypatch.setattr("coulomb.text.settings.PRESETS", changed)
    assert run_experiment("text", tmp_path, only).done == 1
    (record,) = load_records(tmp_path / "text")  # the later one counts
    expected = job_key("text", record.job, text_constants(record.job))
    assert record.key == expected


@pytest.mark.parametrize(
    ("name", "place", "key"),
    [
        ("noise", 0, "d3384d6d260d3bdc"),
        ("budget", -1, "465cdc928cabb21a"),
        ("text", 0, "86d50d2d9e84db96"),
        ("phase-a", 0, "0299562a78d8a179"),
    ],
)
def test_keys_of_jobs_are_those_of_earlier_versions(name, place, key):
    """Else their records would be run again; only other constants may change them."""
    experiment = experiments.build(name)
    job = experiment.plan(SMOKE)[place]
    assert job_key(name, job, experiment.constants(job)) == key
