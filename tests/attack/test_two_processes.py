"""Two processes that want the same folder, and outputs that cannot be written."""

import json

import pytest
from attack_cases import Child, flags, outcome, run_cli, write_data

from coulomb._support.archive import append_lines, sweep, working_in, write_whole
from coulomb._support.errors import CoulombError
from coulomb.experiments.records import load_records

COLUMNS = "--text", "review", "--label", "sentiment"


@pytest.fixture
def data(tmp_path):
    write_data(tmp_path)
    return tmp_path


def test_the_second_of_two_runs_is_refused(data, tmp_path):
    """One ends as it would have alone; the other says why it did not begin."""
    command = "train", data / "reviews.csv", *COLUMNS, *flags(), "--out"
    alone, shared = tmp_path / "a" / "out", tmp_path / "b" / "out"
    alone.parent.mkdir()
    shared.parent.mkdir()
    assert run_cli(*command, alone) == 0
    boxes = [tmp_path / "1", tmp_path / "2"]
    for box in boxes:
        box.mkdir()
    children = [Child(lambda: run_cli(*command, shared), box) for box in boxes]
    codes = [child.wait(60) for child in children]
    assert sorted(codes) == [0, 2], [child.told() for child in children]
    told = children[codes.index(2)].told()
    assert "another one is at work" in told or "holds a run" in told
    assert outcome(shared) == outcome(alone)


def test_two_experiments_share_their_records(tmp_path):
    command = "reproduce", "strength", "--preset", "smoke", "--out", tmp_path / "out"
    boxes = [tmp_path / "1", tmp_path / "2"]
    for box in boxes:
        box.mkdir()
    constants = ("paper", "default")
    children = [
        Child(
            lambda c=c: run_cli(
                *command, "--only", "method=fixed", "--only", f"constants={c}"
            ),
            box,
        )
        for box, c in zip(boxes, constants, strict=True)
    ]
    assert [child.wait(90) for child in children] == [0, 0]
    found = load_records(tmp_path / "out" / "strength")
    assert {record.job["constants"] for record in found} == set(constants)


def test_lines_of_many_writers_are_whole(tmp_path):
    file = tmp_path / "lines.jsonl"

    def write(number):
        for count in range(200):
            append_lines(file, json.dumps([number, count, "x" * 300]) + "\n")

    boxes = [tmp_path / str(number) for number in range(3)]
    for box in boxes:
        box.mkdir()
    children = [Child(lambda i=i: write(i), box) for i, box in enumerate(boxes)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 600


def test_only_what_dead_writers_left_is_swept(tmp_path):
    dead = tmp_path / f".a.txt.{'0' * 32}.txt"
    other = tmp_path / ".a.txt.swp"
    for path in (dead, other):
        path.write_text("half")

    def write(path):
        path.write_text("half")
        sweep(tmp_path)
        assert path.exists()
        path.write_text("whole")

    write_whole(tmp_path / "b.txt", write)
    assert not dead.exists()
    assert {path.name for path in tmp_path.iterdir()} == {other.name, "b.txt"}


def test_a_folder_belongs_to_one_process(tmp_path):
    with (
        working_in(tmp_path / "run"),
        pytest.raises(CoulombError, match="another one is at work"),
        working_in(tmp_path / "run"),
    ):
        pass
    with working_in(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()


OUTPUTS = {
    "train": ("train", "reviews.csv", *COLUMNS, "--out"),
    "linearise": ("linearise", "bert", "--texts", "texts.txt", "--out"),
    "reproduce": ("reproduce", "noise", "--preset", "smoke", "--out"),
    "demo": ("demo", "--out"),
}


@pytest.mark.parametrize("verb", OUTPUTS)
def test_a_file_in_the_way_is_told_before_work(verb, data, monkeypatch, capfd):
    monkeypatch.chdir(data)
    (data / "taken").write_text("precious")
    assert run_cli(*OUTPUTS[verb], data / "taken") == 1
    told = capfd.readouterr().err
    assert told.startswith(f"coulomb: {data / 'taken'}")
    assert len(told.splitlines()) == 1
    assert "Traceback" not in told
    assert (data / "taken").read_text() == "precious"


@pytest.mark.parametrize("option", ["--json", "--figure"])
def test_numbers_and_pictures_in_the_way(option, data, capfd):
    (data / "folder").mkdir()
    assert run_cli("meanfield", option, data / "folder") == 1
    assert "something else" in capfd.readouterr().err
