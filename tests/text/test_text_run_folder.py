"""Runs in folders: killed, resumed, damaged, out of space."""

import json
import multiprocessing
import random
import resource
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from text_cases import tiny_corpus, tiny_settings, tiny_vocabulary

from coulomb._support.errors import CoulombError
from coulomb.text import (
    Predictor,
    build_corpus,
    list_runs,
    resume_folder,
    train_in_folder,
)
from coulomb.text.run_folder import read_history, read_tensors

# A forked child has everything imported: killing many of them is cheap.
FORK = multiprocessing.get_context("fork")
FILES = {
    "checkpoint.safetensors",
    "config.json",
    "environment.json",
    "history.jsonl",
    "metrics.json",
    "particles.safetensors",
    "start.safetensors",
    "vocabulary.json",
    "weights.safetensors",
}


def settings(**changes):
    long = {"epochs": 4, "align_after": 1, "align_epochs": 6.0, "average_epochs": 1.0}
    return tiny_settings(**long | {"align_start": "windows"} | changes)


@pytest.fixture(scope="module")
def corpus():
    return tiny_corpus(160)


@pytest.fixture(scope="module")
def vocabulary(corpus):
    return tiny_vocabulary(corpus)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus, vocabulary):
    """A run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train_in_folder(folder, corpus, settings(), vocabulary, save_every=2)
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    """The same, to be damaged."""
    return shutil.copytree(finished, tmp_path / "copy")


def snapshot(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def work(folder, corpus, vocabulary, limit=None):
    """What a child does: begin the run, or go on with it."""
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if (folder / "config.json").exists():
        resume_folder(folder, corpus=corpus, save_every=2)
    else:
        train_in_folder(folder, corpus, settings(), vocabulary, save_every=2)


def where(folder):
    """In which phase a killed run was."""
    path = folder / "checkpoint.safetensors"
    if not path.exists():
        return "start"
    facts = read_tensors(path)[1]
    if not facts["aligned"] and (folder / "particles.safetensors").exists():
        return "A"
    return "B"


def test_a_run_has_its_files(finished):
    assert set(snapshot(finished)) == FILES
    metrics = json.loads((finished / "metrics.json").read_text())
    assert 0 <= metrics["metrics"]["accuracy"] <= 1
    assert metrics["alignment"]["steps"] > 0
    assert "torch" in json.loads((finished / "environment.json").read_text())
    steps = [r["step"] for r in read_history(finished / "history.jsonl")]
    assert len(steps) > 4


@pytest.mark.slow
def test_killed_runs_end_as_if_nothing_had_happened(
    finished, tmp_path, corpus, vocabulary
):
    """Killed again and again, with SIGKILL and at random moments, in both phases."""
    folder = tmp_path / "killed"
    moments = random.Random(0)
    seen, kills = [], 0
    for attempt in range(200):
        child = FORK.Process(target=work, args=(folder, corpus, vocabulary))
        child.start()
        # Late attempts are given time, so that the run ends whatever the machine.
        child.join(moments.uniform(0.0, 0.25) * (1 if attempt < 12 else attempt))
        if not child.is_alive():
            assert child.exitcode == 0
            break
        child.kill()
        child.join()
        kills += 1
        seen.append(where(folder))
    assert kills >= 3
    assert {"A", "B"} & set(seen)
    same_end(folder, finished)


@pytest.mark.parametrize("phase", ["A", "B"])
def test_killed_in_each_phase(phase, finished, tmp_path, corpus, vocabulary):
    folder = tmp_path / "killed"
    child = FORK.Process(target=work, args=(folder, corpus, vocabulary))
    child.start()
    wanted = "particles.safetensors" if phase == "A" else "weights.safetensors"
    while child.is_alive() and not (folder / wanted).exists():
        time.sleep(0.001)
    child.kill()
    child.join()
    assert child.exitcode == -9
    assert where(folder) == phase
    assert not (folder / "metrics.json").exists()
    with pytest.raises(CoulombError, match="must be a finished run"):
        Predictor.load(folder)
    work(folder, corpus, vocabulary)
    same_end(folder, finished)


def same_end(folder, finished):
    for name in ("weights.safetensors", "particles.safetensors"):
        mine, theirs = load_file(folder / name), load_file(finished / name)
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert torch.equal(mine[key], theirs[key]), key
    records = [read_history(path / "history.jsonl") for path in (folder, finished)]
    for mine, theirs in zip(*records, strict=True):
        for key in theirs:
            if key != "tokens_per_second":
                assert mine[key] == theirs[key]
    metrics = [json.loads((p / "metrics.json").read_text()) for p in (folder, finished)]
    assert metrics[0]["metrics"] == metrics[1]["metrics"]


def test_a_full_disk_loses_nothing(finished, tmp_path, corpus, vocabulary):
    """Files that may not grow are what a full disk looks like to a process."""
    folder = tmp_path / "full"
    child = FORK.Process(target=work, args=(folder, corpus, vocabulary))
    child.start()
    while child.is_alive() and not (folder / "weights.safetensors").exists():
        time.sleep(0.001)
    child.kill()
    child.join()
    for path in folder.glob(".*"):  # what a killed process had begun to write
        path.unlink()
    before = snapshot(folder)
    child = FORK.Process(target=work, args=(folder, corpus, vocabulary, 4096))
    child.start()
    child.join()
    assert child.exitcode == 1
    after = snapshot(folder)
    history = "history.jsonl"
    assert {k: v for k, v in after.items() if k != history} == {
        k: v for k, v in before.items() if k != history
    }
    work(folder, corpus, vocabulary)
    same_end(folder, finished)


def test_a_finished_run_is_not_trained_again(copy, corpus):
    before = snapshot(copy)
    trained = resume_folder(copy, corpus=corpus)
    assert trained.metrics == json.loads((copy / "metrics.json").read_text())
    assert snapshot(copy) == before


def test_a_run_is_never_overwritten(copy, tmp_path, corpus, vocabulary):
    before = snapshot(copy)
    with pytest.raises(CoulombError, match="holds a run"):
        train_in_folder(copy, corpus, settings(), vocabulary)
    assert snapshot(copy) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(CoulombError, match=r"holds 'thesis.tex'"):
        train_in_folder(tmp_path / "other", corpus, settings(), vocabulary)


def test_a_file_in_the_way(tmp_path, corpus, vocabulary):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        train_in_folder(tmp_path / "file" / "run", corpus, settings(), vocabulary)
    assert (tmp_path / "file").read_text() == "in the way"


def test_changed_data_is_refused(copy, vocabulary):
    (copy / "metrics.json").unlink()
    before = snapshot(copy)
    with pytest.raises(CoulombError, match="has changed since the run began"):
        resume_folder(copy, corpus=tiny_corpus(158))
    assert snapshot(copy) == before


def unfinished(copy):
    (copy / "metrics.json").unlink()
    return copy


def read_again(name, folder, corpus):
    """Do what reads the file."""
    if name.startswith("checkpoint"):
        resume_folder(folder, corpus=corpus)
    else:
        Predictor.load(folder)


@pytest.mark.parametrize("keep", [0, 7, 100, 3000])
@pytest.mark.parametrize("name", ["checkpoint.safetensors", "weights.safetensors"])
def test_files_that_were_cut_short(name, keep, copy, corpus):
    path = copy / name
    path.write_bytes(path.read_bytes()[:keep])
    if name.startswith("checkpoint"):
        unfinished(copy)
    before = snapshot(copy)
    with pytest.raises(CoulombError, match=f"{name} is damaged or cut short"):
        read_again(name, copy, corpus)
    assert snapshot(copy) == before


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "weights.safetensors"])
def test_tensors_of_the_wrong_shape(name, copy, corpus):
    tensors, facts = read_tensors(copy / name)
    key = next(key for key in tensors if key.endswith("head.weight"))
    tensors[key] = tensors[key][:, :-1].contiguous()
    save_file(tensors, copy / name, metadata={"coulomb": json.dumps(facts)})
    if name.startswith("checkpoint"):
        unfinished(copy)
    before = snapshot(copy)
    with pytest.raises(CoulombError, match=r"head.weight' has the shape \(2, 15\)"):
        read_again(name, copy, corpus)
    assert snapshot(copy) == before


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_tensors_that_do_not_belong(change, copy):
    tensors = load_file(copy / "weights.safetensors")
    if change == "missing":
        del tensors["head.bias"]
    else:
        tensors["tail.bias"] = torch.zeros(1)
    save_file(tensors, copy / "weights.safetensors")
    with pytest.raises(CoulombError, match=r"has no 'head.bias'|has 'tail.bias'"):
        Predictor.load(copy)


def change_config(folder, **changes):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for name, value in changes.items():
        part, _, key = name.rpartition("__")
        (values[part] if part else values)[key] = value
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings__attention": "kernel-magic"}, "`attention` has no member"),
        ({"settings__widht": 3}, "did you mean 'width'"),
        ({"settings__width": "wide"}, "`width` must be a whole number"),
        ({"settings": [1]}, "settings"),
        ({"format": "other-1"}, "not of the format"),
        ({"weights": "../../other.safetensors"}, "unknown or missing: weights"),
        ({"vocabulary": "/etc/passwd"}, "unknown or missing: vocabulary"),
        ({"data__train": "../../secret.csv"}, "must be a whole path without"),
        ({"data__data_dir": "/tmp/../etc"}, "must be a whole path without"),
        ({"data__train": "/tmp/a\0.csv"}, "must be a whole path without"),
        ({"classes": ["one"]}, "damaged"),
        ({"kind": "picture"}, "damaged"),
    ],
)
def test_configurations_that_are_not_trusted(changes, message, copy):
    change_config(copy, **changes)
    before = snapshot(copy)
    with pytest.raises(CoulombError, match=message):
        Predictor.load(copy)
    assert snapshot(copy) == before


def test_a_task_in_a_configuration_cannot_lead_elsewhere(copy):
    change_config(unfinished(copy), data={"task": "../../etc", "data_dir": str(copy)})
    with pytest.raises(CoulombError, match="`task` has no member"):
        resume_folder(copy)


def test_broken_json(copy):
    (copy / "config.json").write_text("{")
    with pytest.raises(CoulombError, match=r"config.json is damaged"):
        Predictor.load(copy)


def test_a_history_whose_last_line_was_cut_is_read(copy):
    path = copy / "history.jsonl"
    whole = read_history(path)
    path.write_text(path.read_text()[:-30])
    assert read_history(path) == whole[:-1]


def test_list_runs(copy, tmp_path):
    broken = shutil.copytree(copy, tmp_path / "broken")
    (broken / "config.json").write_text("{")
    unfinished(shutil.copytree(copy, tmp_path / "partly"))
    rows = {row["run"]: row for row in list_runs(tmp_path)}
    assert set(rows) == {"broken", "copy", "partly"}
    assert "damaged" in rows["broken"]["problem"]
    assert rows["copy"]["metrics"]["accuracy"] >= 0
    assert not rows["partly"]["finished"]


def test_labels_that_cannot_be_written_are_refused_before_training(
    tmp_path, vocabulary
):
    rows = ["a film", "a plot"] * 8, [b"x", b"y"] * 8
    with pytest.raises(CoulombError, match="string or a number to be saved"):
        train_in_folder(
            tmp_path / "run", build_corpus("x", rows), settings(), vocabulary
        )
