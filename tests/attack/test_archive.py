"""Readers and writers of files, each bound from both sides."""

import json
import os

import numpy as np
import pytest
import torch
from attack_cases import write_encoder

from coulomb._support import archive
from coulomb._support.archive import (
    append_lines,
    check_file,
    parse_json,
    read_archive,
    read_shapes,
    write_archive,
    write_whole,
)
from coulomb._support.checks import make_generator
from coulomb._support.errors import CoulombError, FileFormatError
from coulomb.linearise.huggingface import load_tokenizer
from coulomb.text import read_vocabulary

TAKEN = {
    "[" * 64 + "]" * 64: [],
    '["' + "[{" * 500 + '"]': ["[{" * 500],  # inside a string nothing is nested
    r'["\"[[", "' + "[" * 100 + '"]': ['"[[', "[" * 100],
    "1" * 40: int("1" * 40),
    "-1e308": -1e308,
    '"\\ud83d\\ude00"': "\U0001f600",  # both halves of a pair
    "\ufeff[]": [],
}
REFUSED = {
    "[" * 65 + "]" * 65: "nested more than 64 deep",
    '{"a":' * 65 + "1" + "}" * 65: "nested more than 64 deep",
    '{"a": {"b": 1, "c": 2, "b": 3}}': "2 keys named 'b'",
    "[" * 100_000: "nested more than 64 deep",
    "[" + "[]," * 2**21 + "[]]": "too many values",
    "[" + "1," * 2**24 + "1,1,1,1,1,1,1,1,1]": "too many values",
    "1" * 41: "a number of 41 digits",
    "1e309": "1e309 is not finite",
    "NaN": "NaN is not finite",
    "-Infinity": "-Infinity is not finite",
    '["\\ud800"]': "surrogates not allowed",
    '{"a": 1': "Expecting",
    "": "Expecting value",
}


@pytest.mark.parametrize("text", TAKEN, ids=range(len(TAKEN)))
def test_json_within_bounds(text):
    found, wanted = parse_json(text.encode(), "here"), TAKEN[text]
    if wanted == [] and text.startswith("["):
        while found:
            (found,) = found
    assert found == wanted


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_json_beyond_bounds(text):
    with pytest.raises(FileFormatError, match=r"^here is damaged: ") as caught:
        parse_json(text, "here")
    assert REFUSED[text] in str(caught.value)
    assert len(str(caught.value)) < 200


def test_numbers_may_be_infinite_where_it_is_asked_for():
    assert parse_json("[NaN, 1e999]", "here", finite=False)[1] == float("inf")


@pytest.mark.parametrize("before", ["", "a\n", "a\nb", "torn"])
def test_lines_are_added_to_whole_lines(before, tmp_path):
    file = tmp_path / "lines"
    file.write_text(before)
    append_lines(file, "x\ny\n")
    whole = "".join(line for line in before.splitlines(True) if line.endswith("\n"))
    assert file.read_text() == whole + "x\ny\n"


def test_a_line_that_does_not_reach_the_disk_is_taken_back(tmp_path, monkeypatch):
    file = tmp_path / "lines"
    append_lines(file, "first\n")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left .* before is unchanged") as error:
        append_lines(file, "second\n")
    assert error.value.filename == str(file)
    assert file.read_text() == "first\n"


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Written, flushed, renamed, and the folder flushed: in this order."""
    events, fsync, replace = [], os.fsync, os.replace

    def flush(descriptor):
        place = os.readlink(f"/proc/self/fd/{descriptor}")
        events.append("folder" if place == str(tmp_path) else "file")
        fsync(descriptor)

    def rename(source, target):
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", rename)
    write_whole(tmp_path / "a", lambda path: events.append("write"))
    assert events == ["write", "file", "rename", "folder"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_tensors_that_are_not_finite_are_named(value, make, tmp_path):
    file = tmp_path / "a.safetensors"
    write_archive(file, {"mean": make([1.0]), "scale": make([1.0, value])}, {})
    with pytest.raises(FileFormatError, match=r"is damaged: 'scale' has values that"):
        read_archive(file, complaint="is damaged")
    found, _ = read_archive(file, complaint="", unbounded=("sca",))
    assert found["scale"].shape == (2,)
    assert read_shapes(file) == {"mean": (1,), "scale": (2,)}


def test_tensors_are_counted(tmp_path, monkeypatch):
    """A header of 75 MB names a million empty ones, which took 12 s."""
    monkeypatch.setattr(archive, "_MOST_NAMES", 2)
    file = tmp_path / "a.safetensors"
    write_archive(file, dict.fromkeys("ab", np.zeros(0)), {})
    assert len(read_shapes(file)) == len(read_archive(file, complaint="")[0]) == 2
    write_archive(file, dict.fromkeys("abc", np.zeros(0)), {})
    for read in (read_shapes, read_archive):
        with pytest.raises(FileFormatError, match=r"is bad: 3 tensors; at most 2\."):
            read(file, complaint="is bad")


def test_added_tokens_are_counted(tmp_path, monkeypatch):
    """A million of them take the library longer than a file may take."""
    pytest.importorskip("transformers")
    write_encoder(tmp_path / "bert")
    file = tmp_path / "bert" / "tokenizer.json"
    found = json.loads(file.read_text())
    count = len(found["added_tokens"])
    readers = lambda: load_tokenizer(file.parent), lambda: read_vocabulary(file)
    monkeypatch.setattr(archive, "MOST_ADDED", count)
    for read in readers:
        read()
    monkeypatch.setattr(archive, "MOST_ADDED", count - 1)
    for read in readers:
        with pytest.raises(FileFormatError, match=rf"{count} added tokens of 26 char"):
            read()
    monkeypatch.undo()
    found["added_tokens"][0]["content"] = "a" * 2**20
    file.write_text(json.dumps(found))
    for read in readers:
        with pytest.raises(FileFormatError, match=r"of 1,048,\d+ characters; at most"):
            read()


def test_special_and_large_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "large").write_bytes(b"12345")
    for name in ("pipe", "zero", ""):
        with pytest.raises(CoulombError, match="not a regular file"):
            check_file(tmp_path / name)
    with pytest.raises(CoulombError, match="has 5 bytes; at most 4 are read"):
        check_file(tmp_path / "large", 4)
    assert check_file(tmp_path / "large", 5).name == "large"


def test_every_path_of_numbers_has_its_own_stream():
    paths = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    drawn = [float(torch.rand(1, generator=make_generator(*path))) for path in paths]
    assert len(set(drawn)) == len(paths)
    again = [float(torch.rand(1, generator=make_generator(*path))) for path in paths]
    assert drawn == again
