"""Tables that come in parts: hostile Parquet files, chunks and Dask collections."""

import json
import os

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from coulomb import CoulombSampler
from coulomb._support.errors import CoulombError
from coulomb.text.data import check_texts
from coulomb.text.files import read_columns, read_table

X = np.random.default_rng(0).normal(size=(20, 3))
Y = (X[:, 0] > 0).astype(int)
GOOD = pyarrow.table({"a": X[:, 0], "b": X[:, 1], "y": Y})


def fit(*data):
    sampler = CoulombSampler(4, n_candidates=16, max_iter=2, random_state=0)
    return sampler.fit(*data)


@pytest.fixture
def folder(tmp_path):
    pyarrow.parquet.write_table(GOOD, tmp_path / "good.parquet")
    data = (tmp_path / "good.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(data[: len(data) // 2])
    # The pages of the first column, which are read long after the schema.
    (tmp_path / "flipped.parquet").write_bytes(data[:20] + b"\xff" * 20 + data[40:])
    (tmp_path / "text.parquet").write_text("what")
    (tmp_path / "empty.parquet").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.parquet")
    (tmp_path / "endless.parquet").symlink_to("/dev/zero")
    (tmp_path / "none").mkdir()
    pyarrow.parquet.write_table(GOOD.select(["y"]), tmp_path / "labels.parquet")
    return tmp_path


FILES = {
    **dict.fromkeys(
        ("cut", "flipped", "text", "empty", "pipe", "endless"), "is not a Parquet table"
    ),
    "labels": "must have a column beside `y`",
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_tables(name, folder):
    with pytest.raises(CoulombError, match=FILES[name]):
        fit(folder / f"{name}.parquet", "y")


def test_labels_of_a_file_are_one_of_its_columns(folder):
    for y in (3, [0, 1] * 10, Y):
        with pytest.raises(CoulombError, match="`y` must name a column of "):
            fit(folder / "good.parquet", y)
    with pytest.raises(CoulombError, match="must name columns of `X`; got 'c' for a,"):
        fit(folder / "good.parquet", "c")
    with pytest.raises(CoulombError, match="it has no rows"):
        fit(folder / "none", "y")


CHUNKS = {
    "four": ([(X, Y, Y, Y)], r"alone or as \(X, y\)"),
    "none": ([(X, Y), ()], r"alone or as \(X, y\)"),
    "a number": ([(X, Y), (np.array(3.0), Y)], r"alone or as \(X, y\)"),
    "nothing": ([(X, Y), None], r"alone or as \(X, y\)"),
    "no rows": ([(X[:0], Y[:0])], "`X` must have a row"),
    "no weight": ([(X, Y, np.zeros(20))], "`X` must have a row"),
    "widths": ([(X, Y), (X[:, :2], Y)], "the same columns in every chunk"),
    "no label": ([(X, Y), (X, np.array([None] * 20))], "must have a label in every"),
    "once": ((x for x in [(X, Y), (X[:, :2], Y)]), "the same columns in every chunk"),
    "end": ((x for x in [(X, Y), X[:, :2], 3]), r"alone or as \(X, y\)"),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_that_are_none(name):
    chunks, words = CHUNKS[name]
    with pytest.raises(CoulombError, match=words):
        fit(chunks)


def test_dask_collections_that_are_no_tables():
    dask = pytest.importorskip("dask")
    arrays = pytest.importorskip("dask.array")
    for X_ in (dask.delayed(X), arrays.ones(4), arrays.ones((4, 2, 2))):
        with pytest.raises(CoulombError, match="must be a Dask array of rows and col"):
            fit(X_, Y)


def test_columns_that_hold_no_numbers_are_named():
    frames = pytest.importorskip("dask.dataframe")
    for others in (["a", "b"] * 10, pd.to_datetime(["2020-01-01"] * 20)):
        table = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "w": others, "y": Y})
        numbers, words = table[["a", "b", "y"]], "its column 'w' holds others"
        with pytest.raises(CoulombError, match=words):
            fit(frames.from_pandas(table, npartitions=2), "y")
        model = fit(frames.from_pandas(numbers, npartitions=2), "y")
        moved = table[["a", "w"]]
        for given in (moved, frames.from_pandas(moved, npartitions=2)):
            with pytest.raises(CoulombError, match=words):
                model.transform(given)
    table = pd.DataFrame({"a": X[:, 0].astype(object), "b": Y.astype(bool)})
    assert fit(table, Y).transform(table).shape[0] == 20


def test_words_of_a_small_file_are_held_once(tmp_path, monkeypatch):
    """A file of 60 kB can repeat a long word a million times."""
    places = pyarrow.array([0] * 300, pyarrow.int32())
    words = pyarrow.DictionaryArray.from_arrays(places, pyarrow.array(["x" * 2**20]))
    table = pyarrow.table({"text": words, "label": [1, None] * 150})
    file = tmp_path / "bomb.parquet"
    pyarrow.parquet.write_table(table, file)
    assert file.stat().st_size < 2**17
    found = read_columns(file, ["text", "label"])
    assert found["label"] == [1, None] * 150
    assert [len(word) for word in found["text"]] == [2**20] * 300
    assert len(set(map(id, found["text"]))) == 1
    monkeypatch.setattr("coulomb._support.checks._MEMORY", 2**28)
    with pytest.raises(CoulombError, match="`data` must fit into memory"):
        check_texts(found["text"], tagged=False)
    monkeypatch.setattr("coulomb._support.checks._MEMORY", 600 * 64 - 1)
    with pytest.raises(CoulombError, match="`data` must fit into memory"):
        read_columns(file, ["text", "label"])
    monkeypatch.setattr("coulomb._support.checks._MEMORY", 600 * 8 - 1)
    with pytest.raises(CoulombError, match="`X` must fit into memory"):
        fit(file, "label")


def test_a_message_names_some_of_many_columns(tmp_path):
    file = tmp_path / "wide.csv"
    file.write_text(",".join(f"c{i}" for i in range(10**5)) + "\n")
    rows = (json.dumps({f"c{i}": 1}) + "\n" for i in range(10_001))
    (tmp_path / "wide.jsonl").write_text("".join(rows))
    for wide in (file, tmp_path / "wide.jsonl"):
        with pytest.raises(CoulombError, match="columns; at most 10,000 are read"):
            read_table(wide)
    with pytest.raises(CoulombError, match=r"no column 'c'.* c0, .*\.\.\.") as caught:
        read_columns(file, ["c"])
    assert len(str(caught.value)) < 400
