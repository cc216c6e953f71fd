"""Tables that come in parts: hostile Parquet files, chunks and Dask collections."""

import os

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from coulomb import CoulombSampler
from coulomb._support.errors import CoulombError

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
    "once": ((part for part in [(X, Y)]), "used up after one pass"),
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
