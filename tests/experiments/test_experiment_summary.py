import math

import numpy as np
import pytest

from coulomb._support.stats import Difference
from coulomb.experiments import load_experiments
from coulomb.experiments.records import Record, job_key
from coulomb.experiments.runner import write_sample
from coulomb.experiments.summary import (
    by_trial,
    compare_controls,
    experiment_tables,
    paired,
    power_laws,
    select,
    summarise,
    table_text,
    write_tables,
)


def made(trial, accuracy, *, noise=1.0, method="langevin", control=None, **more):
    job = {"method": method, "constants": "default", "noise": noise, **more}
    job |= {"trial": trial, "seed": trial, "control": control}
    key = job_key("noise", job)
    return Record("noise", job, key, "test", {"accuracy": accuracy}, {}, {}, "1")


def test_summaries_group_repetitions_only():
    records = [made(t, 0.5 + 0.1 * t, noise=n) for t in range(3) for n in (1.0, 2.0)]
    found = summarise(records, "accuracy")
    assert [(s.row["noise"], s.n) for s in found] == [(1.0, 3), (2.0, 3)]
    assert found[0].mean == pytest.approx(0.6)
    assert found[0].standard_deviation == pytest.approx(0.1)
    assert found[0].standard_error == pytest.approx(0.1 / math.sqrt(3))


def test_fresh_designs_are_repetitions_of_one_row():
    records = [made(t, 0.5, design=7000 + t) for t in range(3)]
    assert [(s.row["design"], s.n) for s in summarise(records, "accuracy")] == [
        ("fresh", 3)
    ]


def test_pairs_share_trial_and_noise():
    rng = np.random.default_rng(0)
    shared = rng.normal(size=5)
    ours = [made(t, shared[t] + 0.1 + n, noise=n) for t in range(5) for n in (1.0, 2.0)]
    theirs = [made(t, shared[t] + n, noise=n) for t in range(5) for n in (1.0, 2.0)]
    whole = paired(ours, theirs, "accuracy")
    assert (whole.mean, whole.n) == (pytest.approx(0.1), 5)
    assert whole.standard_error == pytest.approx(0, abs=1e-9)
    # A trial that lacks one noise level is still compared at equal noise.
    assert paired(ours[1:], theirs, "accuracy").mean == pytest.approx(0.1)
    assert paired(ours[:2], theirs[2:], "accuracy").n == 0


def test_the_error_counts_trials_not_settings():
    ours = [made(t, float(t % 2), noise=n) for t in range(4) for n in (1.0, 2.0, 3.0)]
    theirs = [made(t, 0.0, noise=n) for t in range(4) for n in (1.0, 2.0, 3.0)]
    found = paired(ours, theirs, "accuracy")
    assert found.n == 4
    assert found.standard_error == pytest.approx(np.std([0, 1, 0, 1], ddof=1) / 2)


def test_controls_are_compared_with_their_own_row():
    records = [made(t, 0.7, strength=s) for t in range(2) for s in (0.0, 0.5)]
    records += [
        made(t, 0.6 - s, strength=s, control="noise-only")
        for t in range(2)
        for s in (0.0, 0.5)
    ]
    rows = compare_controls(records, "accuracy")
    found = {row["strength"]: row["mean"] for row in rows}
    assert found == {0.0: pytest.approx(0.1), 0.5: pytest.approx(0.6)}


def test_selecting():
    records = [made(0, 0.5, gamma=0.5), made(0, 0.5)]
    assert select(records, gamma=None) == records[1:]
    assert select(records, gamma=(0.5, None)) == records
    assert by_trial(records, "missing") == {}


def test_distinct_needs_two_errors():
    assert Difference(0.03, 0.01, 10).distinct
    assert not Difference(0.015, 0.01, 10).distinct
    assert not Difference(0.5, math.nan, 1).distinct


def test_tables_of_a_sample_folder(tmp_path):
    write_sample(tmp_path / "records")
    found = load_experiments(tmp_path / "records")
    assert set(found) == {"noise", "strength", "budget", "runtime"}
    assert {r.version for rs in found.values() for r in rs} == {"invented"}
    assert power_laws(found["runtime"])
    paths = write_tables(tmp_path / "csv", found)
    assert {path.name for path in paths} >= {
        "noise-summary.csv", "noise-controls.csv", "runtime-power-laws.csv",
    }  # fmt: skip
    tables = experiment_tables("noise", found["noise"])
    learned = {row["title"] for row in tables["controls"]}
    assert len(tables["controls"]) == 2 * 2 * len(learned)  # controls, noise levels


def test_kernel_rows_are_compared_with_vanilla_rows_of_the_same_map():
    row = {"task": "sst2"}
    records = [
        made(seed, 0.7 + gain + 0.01 * seed, method=method, **row, control=control)
        for seed in range(3)
        for method, control, gain in [
            ("kernel-elu", None, 0.02),
            ("kernel-elu", "norm-matched", 0.2),
            ("vanilla-elu", None, 0.0),
            ("kernel-cos2", None, 0.3),  # has no partner
            ("softmax", None, 0.1),
        ]
    ]
    (found,) = experiment_tables("text", records)["vanilla"]
    assert (found["feature_map"], found["task"], found["n"]) == ("elu", "sst2", 3)
    assert found["mean"] == pytest.approx(0.02)
    assert found["standard_error"] == pytest.approx(0, abs=1e-9)


def test_cells_of_a_table():
    rows = [{"a": None, "b": math.nan}, {"a": "x,y", "c": 1}]
    assert table_text(rows) == 'a,b,c\n,,\n"x,y",,1\n'
