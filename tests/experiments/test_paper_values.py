"""The transcribed tables, and what they say about themselves."""

import math

import pytest

from coulomb._support.errors import ParameterError
from coulomb.experiments.paper import (
    MAPS,
    TASKS,
    check_paper,
    impossible_calibration,
    is_multiple,
    kernel_minus_vanilla,
    paper_table,
    paper_value,
    published_power_laws,
)
from coulomb.text.settings import PAPER_ROWS


@pytest.mark.parametrize("task", TASKS)
def test_eighteen_rows_of_twelve_numbers(task):
    table = paper_table(task)
    assert [line["row"] for line in table] == [
        name for name in PAPER_ROWS if not name.startswith(("vanilla", "kernel"))
    ] + [f"{kind}-{name}" for name in MAPS for kind in ("vanilla", "kernel")]
    for line in table:
        assert len(line) == 13
        assert line["f1_micro"] == line["accuracy"]
        assert all(isinstance(v, float) for k, v in line.items() if k != "row")


@pytest.mark.parametrize(
    "task, column, total",
    [
        # Added up from the lines of the paper's source, apart from our CSV files.
        ("sst2", "accuracy", 14.4346),
        ("qqp", "accuracy", 14.0569),
        ("rotten_tomatoes", "accuracy", 12.4495),
        ("sst2", "ece", 6.5409),
        ("qqp", "brier", 2.7099),
    ],
)
def test_sums_of_columns(task, column, total):
    found = sum(line[column] for line in paper_table(task))
    assert found == pytest.approx(total, abs=1e-6)


def test_values_quoted_in_the_papers_text():
    quoted = {
        ("sst2", "kernel-porf-softplus", "accuracy"): 0.8188,
        ("sst2", "kernel-porf-softplus", "mcc"): 0.6376,
        ("sst2", "vanilla-elu", "accuracy"): 0.8028,
        ("sst2", "kernel-elu", "log_loss"): 0.4502,
        ("sst2", "kernel-cos2", "brier"): 0.1366,
        ("sst2", "kernel-favor", "ece"): 0.3086,
        ("qqp", "kernel-softmaxfeat", "mcc"): 0.5506,
        ("qqp", "vanilla-softmaxfeat", "log_loss"): 0.4625,
        ("qqp", "kernel-favor", "ece"): 0.4106,
        ("rotten_tomatoes", "kernel-softmaxfeat", "accuracy"): 0.7167,
        ("rotten_tomatoes", "kernel-softmaxfeat", "brier"): 0.1929,
    }
    assert {place: paper_value(*place) for place in quoted} == quoted


def test_runtime_tables():
    assert len(paper_table("runtime")) == 6 * 8
    assert sum(line["seconds"] for line in paper_table("runtime")) == pytest.approx(
        55_395.97, abs=0.01
    )
    for fit, printed in published_power_laws().values():
        # Their seconds are printed with three digits.
        assert fit.exponent == pytest.approx(printed["exponent"], abs=0.013)
        assert fit.prefactor == pytest.approx(printed["prefactor"], rel=0.1)
    assert [line["test"] for line in paper_table("datasets")] == [1821, 390965, 1066]


def test_single_runs():
    for task, rows in (("sst2", 872), ("rotten_tomatoes", 1066)):
        values = [line["accuracy"] for line in paper_table(task)]
        assert all(is_multiple(value, rows) for value in values)
    # The other split's size does not fit, nor do most numbers of four digits.
    assert sum(is_multiple(line["accuracy"], 1821) for line in paper_table("sst2")) < 18
    share = sum(is_multiple(k / 1e4, 872) for k in range(10_000)) / 10_000
    assert share < 0.1


def test_calibration_errors_that_cannot_be():
    counts = {task: len(impossible_calibration(task)) for task in TASKS}
    assert counts == {"sst2": 3, "qqp": 18, "rotten_tomatoes": 0}


def test_means_over_maps():
    found = {task: kernel_minus_vanilla(task) for task in TASKS}
    rounded = {task: tuple(round(v, 4) for v in pair) for task, pair in found.items()}
    assert rounded == {
        "sst2": (-0.0007, 0.0031),
        "qqp": (0.0062, 0.0016),
        "rotten_tomatoes": (0.0086, 0.0086),
    }


def test_every_check_says_what_it_found():
    checks = check_paper()
    assert len(checks) == 10
    confirmed = [check.title for check in checks if check.confirmed]
    assert len(confirmed) == 8
    linformer = next(c for c in checks if c.title.startswith("log loss"))
    assert linformer.found == "rotten_tomatoes linformer"
    assert all(check.found for check in checks)


def test_unknown_tables_and_rows():
    with pytest.raises(ParameterError, match="did you mean 'sst2'"):
        paper_table("sst")
    with pytest.raises(ParameterError, match="kernel-elu"):
        paper_value("sst2", "kernel-elo", "accuracy")
    assert math.isclose(paper_value("sst2", "softmax", "accuracy"), 0.805)
