"""Tables in parts are fitted, mapped and scored like tables in memory."""

import os
import signal
import tempfile
import threading
import time
import tracemalloc
from decimal import Decimal
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.metrics import accuracy_score, r2_score
from threadpoolctl import threadpool_limits

from coulomb import CoulombClassifier, CoulombRegressor, CoulombSampler
from coulomb._support.errors import FileFormatError
from coulomb.estimators import chunked, coulomb, predictors
from coulomb.estimators.chunked import Chunk, Chunks, as_chunks
from coulomb.estimators.tabular import RidgeSums, fit_ridge

da = pytest.importorskip("dask.array")
dd = pytest.importorskip("dask.dataframe")
pd = pytest.importorskip("pandas")

ROWS = 600
CUTS = (0, 170, 171, 400, ROWS)
MODELS = {
    "sampler": CoulombSampler(
        12,
        gamma="scale",
        coordinates="all",
        inverse_temperature=10.0,
        n_candidates=100,
        max_iter=2,
        random_state=0,
    ),
    "classifier": CoulombClassifier(12, random_state=0),
    "regressor": CoulombRegressor(12, random_state=0),
}
for _model in (MODELS["classifier"], MODELS["regressor"]):
    _model.set_params(sampler=CoulombSampler(max_iter=0))


def data(kind="classifier"):
    rng = np.random.default_rng(1)
    X = rng.normal(size=(ROWS, 4)) * [1.0, 10.0, 1e-3, 1.0] + [0.0, 5.0, 0.0, 100.0]
    number = X[:, 0] * (X[:, 1] - 5)
    return X, number if kind == "regressor" else np.where(number > 0, "up", "down")


def in_parts(source, X, y, folder):
    """Give the same rows in parts: arguments of `fit`, and of `transform`."""
    pieces = [(X[i:j], y[i:j]) for i, j in pairwise(CUTS)]
    if source == "chunks":
        return (pieces,), [x for x, _ in pieces]
    if source == "array":
        sizes = tuple(np.diff(CUTS).tolist())
        arrays = da.from_array(X, chunks=(sizes, 2)), da.from_array(y, chunks=150)
        return arrays, arrays[0]
    frame = pd.DataFrame(X, columns=list("abcd"))
    if source == "frame":
        rows, targets = dd.from_pandas(frame, npartitions=4), pd.Series(y, name="y")
        return (rows, dd.from_pandas(targets, npartitions=4)), rows
    frame["y"] = y
    for number, (i, j) in enumerate(pairwise(CUTS)):
        frame[i:j].to_parquet(folder / f"{number}.parquet")
    frame[list("abcd")].to_parquet(folder.with_suffix(".parquet"), row_group_size=200)
    return (folder, "y"), str(folder.with_suffix(".parquet"))


def fitted(model):
    names = ("random_weights_", "random_offset_", "mean_", "scale_", "gamma_")
    names += ("coef_", "intercept_", "alpha_", "feature_importances_")
    return {name: getattr(model, name) for name in names if hasattr(model, name)}


@pytest.mark.parametrize("source", ["chunks", "array", "frame", "parquet"])
@pytest.mark.parametrize("kind", MODELS)
def test_few_rows_give_the_fit_in_memory_to_the_bit(kind, source, tmp_path):
    X, y = data(kind)
    folder = tmp_path / "table"
    folder.mkdir()
    arguments, rows = in_parts(source, X, y, folder)
    whole = clone(MODELS[kind]).fit(X, y)
    parts = clone(MODELS[kind]).fit(*arguments)
    # Frames have their columns one after the other, and sums another order.
    rtol = 1e-9 if source == "frame" else 0.0
    for name, value in fitted(whole).items():
        np.testing.assert_allclose(
            fitted(parts)[name], value, rtol=rtol, atol=rtol, err_msg=name
        )
    if source == "frame":
        assert parts.feature_names_in_.tolist() == list("abcd")
    expected = whole.transform(X) if kind == "sampler" else whole.predict(X)
    found = parts.transform(rows) if kind == "sampler" else parts.predict(rows)
    if source in ("array", "frame"):
        check_chunks(found, rows)
        assert found.ndim == expected.ndim
        found = found.compute()
    else:
        found = np.concatenate(list(found))
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    else:
        assert (found == expected).all()
    if kind != "sampler":
        score = parts.score(*arguments)
        judge = accuracy_score if kind == "classifier" else r2_score
        assert score == pytest.approx(judge(y, expected), abs=1e-12)
        if source == "chunks":
            assert parts.score(iter(arguments[0])) == score


def check_chunks(found, rows):
    """A Dask array has the partitions of the rows, and says truly what is in them."""
    known = getattr(rows, "chunks", None)
    if known is None:
        assert found.numblocks[0] == rows.npartitions
        assert np.isnan(found.chunks[0]).all()
    else:
        assert found.chunks[0] == known[0]
    assert isinstance(found._meta, np.ndarray)
    for block, length in zip(found.blocks, found.chunks[0], strict=True):
        made = block.compute()
        assert made.dtype == found.dtype == found._meta.dtype
        assert made.shape[1:] == found.shape[1:]
        assert made.ndim == found._meta.ndim
        assert len(made) == length or np.isnan(length)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("weighted", [False, True])
def test_many_rows_give_the_same_sample_and_sums(kind, weighted, monkeypatch):
    monkeypatch.setattr(chunked, "MOST_ROWS", 200)
    monkeypatch.setattr(predictors, "_BLOCK", 70)
    X, y = data(kind)
    weight = None
    if weighted:
        weight = np.random.default_rng(2).integers(0, 3, ROWS).astype(float)
        weight[CUTS[2] : CUTS[3]] = 0.0  # a part that does not count
    whole = clone(MODELS[kind]).fit(X, y, weight)
    many = [None] * ROWS if weight is None else weight
    pieces = [
        (X[i:j], y[i:j], None if weight is None else many[i:j])
        for i, j in pairwise(CUTS)
    ]
    parts = clone(MODELS[kind]).fit(pieces)
    for name, value in fitted(whole).items():
        np.testing.assert_allclose(
            fitted(parts)[name], value, rtol=1e-7, atol=1e-9, err_msg=name
        )
    if kind == "sampler":
        keep = slice(None) if weight is None else weight > 0
        np.testing.assert_allclose(
            parts.mean_, np.average(X, axis=0, weights=weight), rtol=1e-12
        )
        if weight is None:
            np.testing.assert_allclose(parts.scale_, X[keep].std(axis=0), rtol=1e-12)
    if kind == "regressor":
        # The head is that of a ridge regression on all rows, not on the sample.
        keep = np.ones(ROWS, dtype=bool) if weight is None else weight > 0
        from coulomb.estimators.tabular import encode, read_table

        table = read_table(X[keep], whole._names(), None)
        design = whole._design(encode(table, whole.columns_))
        mass = np.ones(ROWS) if weight is None else weight[keep]
        head = fit_ridge(design, y[keep, None], mass, whole._alphas("ridge"))
        assert whole.alpha_ == head.alpha
        np.testing.assert_allclose(whole.alpha_losses_, head.losses, rtol=1e-6)
        fit, expected = (
            design @ coef + level
            for coef, level in [
                (whole.coef_, whole.intercept_),
                (head.coef, head.intercept),
            ]
        )
        np.testing.assert_allclose(fit, expected, rtol=1e-5, atol=1e-6)


def test_ridge_sums_are_exact_far_from_the_origin():
    rng = np.random.default_rng(0)
    design, targets = rng.normal(size=(80, 5)) + 1e4, rng.normal(size=(80, 2))
    weight = rng.uniform(0.5, 2.0, 80)
    alphas = [1e-3, 1.0, 100.0]
    head = fit_ridge(design, targets, weight, alphas)
    shifted = design - 1e4
    sums = RidgeSums.of(shifted[:30], targets[:30], weight[:30])
    sums += RidgeSums.of(shifted[30:], targets[30:], weight[30:])
    path = sums.path(alphas)
    losses = path.losses(shifted, targets, weight) / sums.mass
    np.testing.assert_allclose(losses, head.losses, rtol=1e-9)
    coef, intercept = path.coefficients(int(losses.argmin()))
    np.testing.assert_allclose(coef, head.coef, rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(
        shifted @ coef + intercept, design @ head.coef + head.intercept, atol=1e-7
    )
    assert (sums.low, sums.high) == (targets.min(), targets.max())


def test_sums_are_taken_in_pairs_whatever_the_engine():
    seen = []

    def add(a, b):
        seen.append((a, b))
        return f"({a}{b})"

    chunks = Chunks(lambda: [Chunk(np.ones((1, 1)))] * 7, [1] * 7)
    assert chunks.total(lambda chunk, start: str(start), add) == "(((01)(23))((45)6))"
    assert len(seen) == 6


def test_unscaled_columns_keep_their_bandwidth(monkeypatch):
    monkeypatch.setattr(chunked, "MOST_ROWS", 200)
    X, y = data()
    for gamma in ("scale", "auto", 0.3):
        options = {"gamma": gamma, "standardize": False, "max_iter": 0}
        found = CoulombSampler(4, random_state=0, **options).fit(X, y)
        small = CoulombSampler(4, random_state=0, **options)
        monkeypatch.setattr(chunked, "MOST_ROWS", 10_000)
        small.fit(X, y)
        monkeypatch.setattr(chunked, "MOST_ROWS", 200)
        assert found.gamma_ == pytest.approx(small.gamma_, rel=1e-12)
        np.testing.assert_array_equal(found.scale_, small.scale_)


def test_categories_and_empty_partitions(monkeypatch):
    monkeypatch.setattr(chunked, "MOST_ROWS", 300)
    X, y = data()
    frame = pd.DataFrame(X, columns=list("abcd"))
    frame["e"] = np.where(X[:, 0] > 0, "left", None)
    frame["y"] = y
    parts = dd.from_pandas(frame, npartitions=3)
    empty = parts.partitions[1][parts.partitions[1]["a"] > 1e9]
    parts = dd.concat([parts.partitions[0], empty, parts.partitions[2]])
    whole = frame[: ROWS // 3], frame[2 * ROWS // 3 :]
    together = pd.concat(whole)
    model = CoulombClassifier(8, sampler=CoulombSampler(max_iter=0), random_state=0)
    fit = model.fit(parts, "y")
    twin = CoulombClassifier(**model.get_params(deep=False))
    twin.fit(together.drop(columns="y"), together["y"])
    np.testing.assert_array_equal(fit.coef_, twin.coef_)
    proba = fit.predict_proba(parts.drop(columns="y"))
    assert np.isnan(proba.chunks[0]).all()
    np.testing.assert_array_equal(
        proba.compute(), twin.predict_proba(together.drop(columns="y"))
    )


@pytest.mark.parametrize("source", ["chunks", "array", "frame", "parquet"])
@pytest.mark.parametrize("kind", MODELS)
def test_partial_fit_reads_one_part_after_the_other(kind, source, tmp_path):
    X, y = data(kind)
    folder = tmp_path / "table"
    folder.mkdir()
    arguments, _ = in_parts(source, X, y, folder)
    parts = clone(MODELS[kind]).partial_fit(*arguments)
    one_by_one = clone(MODELS[kind])
    rows = pd.DataFrame(X, columns=list("abcd")) if source == "frame" else X
    for i, j in pairwise(CUTS if source != "frame" else range(0, ROWS + 1, 150)):
        one_by_one.partial_fit(rows[i:j], y[i:j])
    rtol = 1e-9 if source == "frame" else 0.0
    for name, value in fitted(one_by_one).items():
        np.testing.assert_allclose(
            fitted(parts)[name], value, rtol=rtol, atol=rtol, err_msg=name
        )


@pytest.mark.parametrize("kind", MODELS)
def test_the_sample_is_that_in_memory_to_the_bit(kind, monkeypatch):
    """Whatever the partitions, and how many there are."""
    monkeypatch.setattr(chunked, "MOST_ROWS", 200)
    X, y = data(kind)

    def sample(*arguments):
        chunks = as_chunks(*arguments)
        return chunked.summarise(chunks, clone(MODELS[kind]), 0).arrays

    whole = sample(X, y)
    assert len(whole[0]) == 200
    for size in (600, 150, 7):
        arrays = (da.from_array(each, chunks=size) for each in (X, y))
        for ours, theirs in zip(whole, sample(*arrays), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_partial_fit_takes_parts_once():
    X, y = data()
    chunks = [(X[:300], y[:300]), (X[300:], y[300:])]
    one = clone(MODELS["sampler"]).partial_fit(iter(chunks))
    two = clone(MODELS["sampler"])
    for rows, labels in chunks:
        two.partial_fit(rows, labels)
    np.testing.assert_array_equal(one.random_weights_, two.random_weights_)
    options = {"sampler": CoulombSampler(max_iter=0), "random_state": 0}
    arrays = da.from_array(X, chunks=(300, 4)), da.from_array(y, chunks=300)
    one = CoulombClassifier(6, **options).partial_fit(*arrays)
    two = CoulombClassifier(6, **options)
    for rows, labels in chunks:
        two.partial_fit(rows, labels)
    np.testing.assert_array_equal(one.coef_, two.coef_)


def pieces_of(source, kind):
    """Give chunks with weights, of types that keep their rows in other ways."""
    X, y = data(kind)
    names = list("abcd")
    for i, j in pairwise(CUTS):
        rows, targets, weight = X[i:j], y[i:j], np.arange(i, j) % 3
        if source == "columns first":
            rows, targets = np.asfortranarray(X)[i:j], targets.tolist()
        elif source == "frame":
            rows = pd.DataFrame(rows, columns=names, copy=False)
            targets, weight = pd.Series(targets), pd.Series(weight)
        elif source == "mixed":
            rows = pd.DataFrame(rows, columns=names).astype({"b": "float32"})
            if kind != "sampler":
                rows["e"] = np.where(rows["a"] > 0, "left", None)
                rows["f"] = pd.Categorical(np.where(rows["c"] > 0, "in", "out"))
        elif source == "arrow":
            rows = pa.table(dict(zip(names, rows.T, strict=True)))
            targets = pa.chunked_array([targets])
        elif source == "objects":
            targets = targets.astype(object)
            if kind != "sampler":
                words = np.where(rows[:, 0] > 0, "left", None)
                rows = np.column_stack([rows.astype(object), words])
        yield rows, targets, weight


@pytest.fixture
def on_disk(monkeypatch, tmp_path):
    """Keep even few chunks in a file, in a folder of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spool = partial(tempfile.SpooledTemporaryFile, 1)
    monkeypatch.setattr(coulomb, "open_spool", spool)
    monkeypatch.setattr(predictors, "open_spool", spool)
    return tmp_path


@pytest.mark.parametrize(
    "source", ["arrays", "columns first", "frame", "mixed", "arrow", "objects"]
)
@pytest.mark.parametrize("kind", MODELS)
def test_a_generator_gives_the_fit_of_a_list_to_the_bit(
    kind, source, on_disk, monkeypatch
):
    monkeypatch.setattr(chunked, "MOST_ROWS", 200)
    one = clone(MODELS[kind]).fit(pieces_of(source, kind))
    two = clone(MODELS[kind]).fit(list(pieces_of(source, kind)))
    assert fitted(one).keys() == fitted(two).keys()
    for name, value in fitted(two).items():
        np.testing.assert_array_equal(fitted(one)[name], value, err_msg=name)
    names = getattr(two, "feature_names_in_", None)
    np.testing.assert_array_equal(getattr(one, "feature_names_in_", None), names)


ROW = np.arange(12.0).reshape(4, 3)
WORDS = np.array([["a", 1, 2.5], [None, True, float("nan")]], dtype=object)


@pytest.mark.parametrize(
    "values",
    [
        ROW,
        np.asfortranarray(ROW)[::2],
        ROW[:0],
        np.array(["x", "yy"]),
        WORDS,
        WORDS[:0],
        pd.DataFrame(ROW, columns=[0, 1, 2], copy=False)[1:],
        pd.DataFrame(np.asfortranarray(ROW), columns=list("aba"), copy=False),
        pd.DataFrame(WORDS, dtype=object),
        pd.DataFrame({"a": pd.array([1, None]), "b": ["x", None], "c": [1.0, 2.0]}),
        pa.table({"a": [1, None], "b": pa.array(["x", "x"]).dictionary_encode()}),
        None,
    ],
    ids=str,
)
def test_kept_rows_come_back_as_they_were(values):
    with chunked.open_spool() as spool:
        spool.write(b"before")
        read = chunked._write(values, spool)
        chunked._write(ROW, spool)
        read()
        found = read()
    assert type(found) is type(values)
    assert found is not values or values is None
    if isinstance(values, pa.Table):
        assert found.equals(values)
    if isinstance(values, pd.DataFrame):
        pd.testing.assert_frame_equal(found, values.reset_index(drop=True))
        found, values = found.to_numpy(), values.to_numpy()
    if isinstance(values, np.ndarray):
        assert found.dtype == values.dtype
        assert found.shape == values.shape
        assert repr(found.tolist()) == repr(values.tolist())
        assert found.dtype == object or found.flags.fnc == np.copy(values).flags.fnc


@pytest.mark.parametrize(
    "values",
    [
        csr_array(ROW),
        np.array([[Decimal("1.0")], [Decimal(2)]], dtype=object),
        pd.DataFrame({"a": [1.0, 2.0], "b": pd.Series(["x", 1], dtype=object)}),
        pd.DataFrame({"a": [1.0, 2.0], "b": pd.Series([1, None], dtype=object)}),
    ],
    ids=["sparse", "numbers", "words and numbers", "whole numbers"],
)
def test_what_no_file_gives_back_stays_in_memory(values):
    with chunked.open_spool() as spool:
        assert chunked._write(values, spool)() is values
        assert spool.tell() == 0


def files_in(folder):
    """Count the open files in a folder, also those without a name."""
    open_files = Path("/proc/self/fd")
    if not open_files.exists():
        pytest.skip("only Linux lists the open files of a process")
    places = [os.path.realpath(file) for file in open_files.iterdir()]
    return sum(place.startswith(str(folder)) for place in places)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_kept_chunks_are_gone_after_a_fit_and_after_an_error(kind, fails, on_disk):
    seen = []

    def parts():
        yield from pieces_of("arrays", kind)
        seen.append(files_in(on_disk))
        if fails:
            raise KeyError("no more")

    model = clone(MODELS[kind])
    if fails:
        # The error, which is still there, holds on to all that the fit had.
        with pytest.raises(KeyError, match="no more") as caught:
            model.fit(parts())
        assert caught.value.__traceback__ is not None
        assert not hasattr(model, "n_features_in_")
    else:
        model.fit(parts())
    assert seen == [1]
    assert files_in(on_disk) == 0
    assert not list(on_disk.iterdir())


def test_a_fit_of_a_generator_holds_few_of_its_chunks(on_disk, monkeypatch):
    """32 MB in 40 chunks, and a sample of 2,000 rows."""
    monkeypatch.setattr(chunked, "MOST_ROWS", 2000)
    sizes = []

    def parts():
        for number in range(40):
            rows = np.random.default_rng(number).normal(size=(5000, 20))
            sizes.append(rows.nbytes)
            yield rows, rows[:, 0] * rows[:, 1]

    tracemalloc.start()
    try:
        clone(MODELS["regressor"]).fit(parts())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < sum(sizes) / 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((iter([(np.ones((2, 2)), [0, 1])]), [0, 1]), "`y` must be None"),
        (([(np.ones((2, 2)), [0, 1])], [0, 1]), "`y` must be None"),
        (([(np.ones((2, 2)), [0, 1]), (np.ones((2, 3)), [0, 1])],), "same columns"),
        (("nowhere.parquet", "y"), "Parquet path"),
        (((x for x in ()),), "at least one chunk"),
        (
            (dd.from_pandas(pd.DataFrame({"a": [1.0]}), npartitions=1), "z"),
            "must name columns",
        ),
        ((da.ones((4, 2), chunks=(2, 2)), da.ones(2, chunks=1)), "`y`"),
    ],
)
def test_mistakes_are_named(arguments, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        CoulombSampler(2).fit(*arguments)


def test_parquet_that_is_none_and_columns_that_are_not_asked_for(tmp_path):
    X, y = data()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more PAR1")
    with pytest.raises(FileFormatError, match="is not a Parquet table"):
        CoulombSampler(2).fit(tmp_path / "broken.parquet", "y")
    frame = pd.DataFrame(X, columns=list("abcd")).assign(y=y)
    frame.to_parquet(tmp_path / "all.parquet")
    model = clone(MODELS["classifier"]).fit(tmp_path / "all.parquet", "y")
    found = np.concatenate(list(model.predict(tmp_path / "all.parquet")))
    assert (found == model.predict(frame.drop(columns="y"))).all()


def test_a_list_of_rows_is_no_list_of_chunks():
    assert as_chunks([[1.0, 2.0], [3.0, 4.0]], [0, 1]) is None
    assert as_chunks(np.ones((3, 2)), [0, 1, 1]) is None


def lazily(block_info=None):
    """Make a partition of a table that nobody holds."""
    number = block_info[None]["chunk-location"][0]
    rows = np.random.default_rng(number).normal(size=(5000, 20))
    time.sleep(0.01)
    return rows


@pytest.mark.slow
def test_a_killed_worker_loses_nothing_and_the_client_holds_little(monkeypatch):
    """32 MB in 40 partitions, of which the client holds a sample of 2,000 rows.

    One of four workers is killed while they compute; then partitions are persisted, and
    stay where they are.
    """
    monkeypatch.setattr(chunked, "MOST_ROWS", 2000)
    distributed = pytest.importorskip("distributed")
    X = da.map_blocks(lazily, chunks=((5000,) * 40, (20,)), dtype=float)
    y = X[:, 0] * X[:, 1] + X[:, 2]
    model = CoulombRegressor(8, sampler=CoulombSampler(max_iter=0), random_state=0)
    cluster = distributed.LocalCluster(
        n_workers=4, threads_per_worker=1, dashboard_address=":0"
    )
    with cluster, distributed.Client(cluster) as client:
        victim = next(iter(client.run(os.getpid).values()))
        killer = threading.Timer(0.5, os.kill, (victim, signal.SIGKILL))
        tracemalloc.start()
        killer.start()
        model.fit(X, y)
        assert not killer.is_alive()
        kept = clone(model)
        on_workers = client.persist([X, y])
        distributed.wait(on_workers)
        assert sum(map(len, client.has_what().values())) >= 80
        kept.fit(*on_workers)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < X.nbytes / 2
    with threadpool_limits(1):  # as workers have it: BLAS rounds by its threads
        twin = clone(model).fit(X, y)  # by threads, in this process
    for found in (model, kept):
        for name, value in fitted(twin).items():
            np.testing.assert_array_equal(fitted(found)[name], value, err_msg=name)
