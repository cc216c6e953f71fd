import gzip

import pytest

from coulomb._support.errors import FileFormatError
from coulomb.experiments import load_experiments
from coulomb.experiments.records import (
    FILE,
    Record,
    append_records,
    job_key,
    load_records,
)


def made(trial=0, control=None, **metrics):
    job = {"method": "langevin", "noise": 0.1, "seed": trial, "trial": trial}
    row = job | {"control": control}
    return Record("noise", row, job_key("noise", job), "test", metrics, {}, {}, "1.0")


def test_round_trip_and_order(tmp_path):
    records = [
        made(trial, control) for trial in (1, 0) for control in (None, "noise-only")
    ]
    for record in records:
        append_records(tmp_path / "noise" / FILE, [record])
    found = load_experiments(tmp_path)["noise"]
    assert len(found) == len(records)
    assert all(record in found for record in records)
    append_records(tmp_path / "again" / FILE, reversed(records))
    assert load_records(tmp_path / "again") == found


def test_the_key_depends_on_every_entry_and_on_the_experiment():
    job = {"method": "svm", "gamma": 0.5, "seed": 0}
    keys = {
        job_key("noise", job),
        job_key("budget", job),
        job_key("noise", job | {"gamma": 0.01}),
        job_key("noise", job | {"more": None}),
    }
    assert len(keys) == 4


def test_a_line_cut_short_is_no_record_and_is_cut_off(tmp_path):
    path = tmp_path / FILE
    append_records(path, [made(0), made(1)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert [record.job["trial"] for record in load_records(path)] == [0]
    append_records(path, [made(1)])
    assert path.read_bytes() == whole


def test_the_later_of_two_records_counts(tmp_path):
    path = tmp_path / FILE
    append_records(path, [made(accuracy=0.1)])
    append_records(path, [made(accuracy=0.2)])
    assert [record.metrics["accuracy"] for record in load_records(path)] == [0.2]


@pytest.mark.parametrize(
    "line, message",
    [
        ("what", "line 1: not a record"),
        ("[1]", "must be an object"),
        ('{"experiment": 3}', "`experiment` must be a str"),
    ],
)
def test_damage_is_named_with_its_line(tmp_path, line, message):
    path = tmp_path / FILE
    path.write_text(line + "\n")
    with pytest.raises(FileFormatError, match=message):
        load_records(path)


@pytest.mark.parametrize("name, value", [("method", 5), ("gamma", "x"), ("task", [])])
def test_a_row_has_names_and_numbers(tmp_path, name, value):
    record = made()
    record.job[name] = value
    append_records(tmp_path / FILE, [record])
    with pytest.raises(FileFormatError, match=f"line 1: `job.{name}` cannot be"):
        load_records(tmp_path / FILE)


def test_numbers_that_json_does_not_know_are_refused(tmp_path):
    with pytest.raises(ValueError):
        append_records(tmp_path / FILE, [made(accuracy=float("nan"))])
    assert load_records(tmp_path) == []


@pytest.mark.parametrize(
    "text, reason",
    [
        (
            "experiment,split\nnoise,test,more\n",
            "row 1 has more cells than there",
        ),
        ("job,job.seed\nx,1\n", "'str' object"),
    ],
)
def test_damage_of_compressed_records_is_named(tmp_path, text, reason):
    path = tmp_path / "noise.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(FileFormatError, match=f"{path} is no compressed CSV: {reason}"):
        load_records(path)


@pytest.mark.parametrize("name", ["noise.csv.gz", FILE])
def test_files_without_end_are_refused_before_their_rows_are_read(tmp_path, name):
    """A thousandth of them is on the disk: each would be kept until all are read."""
    rows = b"experiment\n" + b"x\n" * 2**18
    path = tmp_path / name
    path.write_bytes(gzip.compress(rows) if name.endswith("gz") else rows)
    with pytest.raises(FileFormatError, match=r"262,144 (rows|lines)"):
        load_records(path)
