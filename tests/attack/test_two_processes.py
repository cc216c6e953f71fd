"""Two processes that want the same folder, and outputs that cannot be written."""

import errno
import json
import os

import pytest
from attack_cases import (
    REFUSED,
    SECONDS,
    Child,
    flags,
    outcome,
    run_cli,
    write_data,
)
from typer.main import get_command

from coulomb._support import archive
from coulomb._support.archive import (
    append_lines,
    sweep,
    working_in,
    write_folder,
    write_whole,
)
from coulomb._support.errors import CoulombError
from coulomb.cli.main import app
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
    codes = [child.end(3 * SECONDS) for child in children]
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
    assert [child.end(5 * SECONDS) for child in children] == [0, 0]
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
    assert [child.end(3 * SECONDS) for child in children] == [0, 0, 0]
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


def test_without_locks_nothing_is_swept(tmp_path, monkeypatch):
    """Nobody can tell there whether a writer is dead."""

    def refuse(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(archive.fcntl, "flock", refuse)
    perhaps = tmp_path / f".a.txt.{'0' * 32}.txt"
    perhaps.write_text("half")
    write_whole(tmp_path / "b.txt", lambda path: path.write_text("whole"))
    assert perhaps.exists()
    assert (tmp_path / "b.txt").read_text() == "whole"
    with working_in(tmp_path), working_in(tmp_path):
        assert perhaps.exists()


@pytest.mark.parametrize("write", [write_whole, write_folder])
@pytest.mark.parametrize("swept", ["before the lock", "while it is taken"])
def test_a_writer_outlives_the_sweep_of_another(write, swept, tmp_path, monkeypatch):
    """A place that is seen before its lock looks like that of a dead writer."""
    flock, calls = archive.fcntl.flock, []

    def late(file, how):
        calls.append(file)
        if len(calls) == 1:
            monkeypatch.setattr(archive.fcntl, "flock", flock)
            sweep(tmp_path)
            monkeypatch.setattr(archive.fcntl, "flock", late)
            if swept == "while it is taken":
                raise BlockingIOError
        return flock(file, how)

    monkeypatch.setattr(archive.fcntl, "flock", late)
    inner = "a.txt" if write is write_folder else ""

    def fill(path):
        (path / inner).write_text("whole")
        sweep(tmp_path)

    write(tmp_path / "b", fill)
    assert len(calls) > 2
    assert (tmp_path / "b" / inner).read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_every_file_of_a_folder_is_flushed(tmp_path, monkeypatch):
    flushed, fsync = set(), os.fsync

    def record(file):
        flushed.add(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    def fill(path):
        (path / "pooling").mkdir()
        (path / "pooling" / "config.json").write_text("{}")
        place.append(path)

    place = []
    monkeypatch.setattr(os, "fsync", record)
    write_folder(tmp_path / "model", fill)
    inside = {place[0], place[0] / "pooling", place[0] / "pooling" / "config.json"}
    assert flushed == {*map(str, inside), str(tmp_path)}


def test_a_folder_belongs_to_one_process(tmp_path):
    with (
        working_in(tmp_path / "run"),
        pytest.raises(CoulombError, match="another one is at work"),
        working_in(tmp_path / "run"),
    ):
        pass
    with working_in(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()


@pytest.mark.parametrize("then", ["moved", "replaced"])
@pytest.mark.parametrize("write", [write_whole, append_lines])
def test_a_folder_that_was_moved_is_not_made_again(write, then, tmp_path):
    """Else a run would end in two halves, of which none can be gone on with."""
    folder, there = tmp_path / "run", tmp_path / "there"
    content = "x\n" if write is append_lines else lambda path: path.write_text("x\n")
    with working_in(folder):
        write(folder / "a", content)
        folder.rename(there)
        if then == "replaced":
            folder.mkdir()
        with pytest.raises(OSError, match="folder was moved or removed") as error:
            write(folder / "a", content)
    assert error.value.filename == str(folder / "a")
    assert (there / "a").read_text() == "x\n"
    assert not list(folder.glob("*"))
    write(folder / "a", content)  # nobody works there now


def test_a_model_goes_where_a_link_to_a_folder_leads(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write_folder(tmp_path / "link", lambda path: (path / "a").write_text("x"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a").read_text() == "x"


@pytest.mark.parametrize("verb", ["demo", "reproduce"])  # the second writes below it
def test_a_link_that_leads_nowhere_is_told_before_work(verb, data, capfd, monkeypatch):
    monkeypatch.chdir(data)
    (data / "link").symlink_to("nowhere")
    assert run_cli(*OUTPUTS[verb], data / "link") == 1
    assert capfd.readouterr().err.endswith("there is a broken link.\n")


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


# What a verb needs before it comes to its outputs; every other verb needs nothing.
NEEDED = {
    "claims": ["."],
    "deviations": ["x"],
    "diagnose": ["."],
    "evaluate": ["."],
    "export": ["."],
    "kernels": ["bert", "--texts", "texts.txt"],
    "linearise": ["bert", "--texts", "texts.txt", "--out", "new"],
    "predict": [".", "a film"],
    "report": ["."],
    "reproduce": ["noise"],
    "train": ["reviews.csv", *COLUMNS],
}
WRITTEN = {"--json", "--figure", "--csv", "--out"}


def outputs():
    """Every option of a verb that names a file or folder to write."""
    for verb in app.registered_commands:
        for parameter in get_command(app).commands[verb.callback.__name__].params:
            if not getattr(parameter, "is_flag", False):
                for option in WRITTEN & set(parameter.opts):
                    yield verb.callback.__name__, option


@pytest.mark.parametrize("verb, option", sorted(outputs()))
def test_outputs_are_checked_before_work(verb, option, data, monkeypatch, capfd):
    """Below a file nothing can be written: one line says so, and nothing else is."""
    monkeypatch.chdir(data)
    place = data / "taken" / "out"
    place.parent.write_text("precious")
    before = sorted(data.rglob("*"))
    assert run_cli(verb, *NEEDED.get(verb, []), option, place) == 1
    printed = capfd.readouterr()
    assert printed.err.startswith(f"coulomb: {place}")
    assert printed.err.endswith(": What is written must be in a folder.\n")
    assert len(printed.err.splitlines()) == 1
    assert not printed.out
    assert sorted(data.rglob("*")) == before


@pytest.mark.parametrize("verb", ["meanfield", "deviations"])
@pytest.mark.parametrize("name", ["picture", "picture.txt"])
def test_a_picture_that_nobody_writes_is_told_before_work(verb, name, tmp_path, capfd):
    assert run_cli(verb, "--figure", tmp_path / name) == REFUSED
    printed = capfd.readouterr()
    assert printed.err.startswith("coulomb: `figure` has no member '")
    assert printed.err.endswith(" Known: .pdf, .png, .svg.\n")
    assert not printed.out
    assert not list(tmp_path.iterdir())
