"""Tables in parts: Dask collections, Parquet files and iterables of chunks.

A fit asks two things of all rows: sums, and a uniform sample of bounded size for every
choice. Both are computed part by part, where the parts are, and added up in an order
that depends on nothing but the number of parts. So the result is the same on any number
of workers, and a part that is computed twice changes nothing.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from itertools import accumulate, repeat
from os import SEEK_END
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, NamedTuple, TypeVar

import numpy as np
from scipy import sparse
from sklearn.base import clone
from sklearn.utils.validation import check_is_fitted

from coulomb._support.checks import check_labels, check_memory
from coulomb._support.errors import (
    FileFormatError,
    ParameterError,
    ParameterTypeError,
    shown,
)

# Rows that are looked at together: of more, a uniform sample makes all choices.
MOST_ROWS = 100_000
_MOST_CLASSES = 10_000  # in `y`; with more values it holds numbers
_PLAIN = {str, int, float, bool, type(None)}  # what JSON gives back as it was
# For the chunks of an iterator: of more than 64 MB, a file without a name.
open_spool = partial(SpooledTemporaryFile, 2**26)

Term = TypeVar("Term")


class Chunk(NamedTuple):
    """Some rows; what is not given is None."""

    X: Any
    y: Any = None
    weight: Any = None


@dataclass(frozen=True, eq=False)
class Chunks:
    """Rows in parts, each read when it is needed and forgotten after."""

    read: Callable[[], Iterable[Chunk]]  # parts, of Dask delayed ones
    lengths: list[int]
    dask: Any = None  # the module, if it holds the parts

    @property
    def sampled(self) -> bool:
        """Whether there are more than can be looked at together."""
        return sum(self.lengths) > MOST_ROWS

    def total(
        self,
        function: Callable[..., Term],
        add: Callable[[Term, Term], Term],
        *shared: Any,
    ) -> Term:
        """Add up `function(chunk, number of its first row, *shared)` in a fixed order.

        Pairs of neighbours are added, then pairs of these, so that of many parts only
        a few sums are held at a time.
        """
        work: Callable[..., Any] = partial(_unless_empty, function)
        join: Callable[..., Any] = partial(_join, add)
        if self.dask is not None:
            work, join = self.dask.delayed(work), self.dask.delayed(join)
            shared = tuple(map(self.dask.delayed, shared))
        sums: list[tuple[int, Any]] = []
        starts = accumulate(self.lengths or repeat(0), initial=0)
        for chunk, start in zip(self.read(), starts, strict=False):
            level, term = 0, work(chunk, start, *shared)
            while sums and sums[-1][0] == level:
                level, term = level + 1, join(sums.pop()[1], term)
            sums.append((level, term))
        _, whole = sums.pop() if sums else (0, None)
        while sums:
            whole = join(sums.pop()[1], whole)
        found: Term | None = whole if self.dask is None else self.dask.compute(whole)[0]
        if found is None:
            raise ParameterError(
                "`X` must have a row, and `sample_weight` a positive weight; got none."
            )
        return found

    def __iter__(self) -> Iterator[Chunk]:
        """Read one part after the other."""
        for chunk in self.read():
            yield chunk if self.dask is None else Chunk(*self.dask.compute(*chunk))


def _unless_empty(function: Callable[..., Term], chunk: Chunk, *others: Any) -> Any:
    """Leave out parts without rows, or whose rows weigh nothing."""
    weightless = chunk.weight is not None and not np.any(np.asarray(chunk.weight))
    if weightless or not _count(chunk):
        return None
    return function(chunk, *others)


def _join(add: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return add(a, b)


def as_chunks(
    X: Any, y: Any = None, weight: Any = None, spool: Any = None
) -> Chunks | None:
    """Read data that come in parts, or are large; None for all others.

    An iterator is gone through here if there is a `spool` that keeps its chunks.
    Without one they can be read once, and nobody knows the lengths.

    Examples
    --------
    >>> parts = [(np.ones((2, 3)), [0, 1]), (np.ones((1, 3)), [1])]
    >>> as_chunks(parts).lengths
    [2, 1]
    >>> as_chunks(np.ones((2, 3)), [0, 1]) is None
    True
    """
    if hasattr(X, "__dask_graph__"):
        return _dask_chunks(X, y, weight)
    if isinstance(X, str | Path):
        return _parquet_chunks(X, y, weight)
    if has_parts(X):
        if y is not None or weight is not None:
            raise ParameterError(
                "`y` must be None where `X` gives chunks: each of them is (X, y) or "
                f"(X, y, sample_weight); got {shown(y)}."
            )
        read, once = partial(map, _as_chunk, X), iter(X) is X
        if once and spool is None:
            return Chunks(read, [])
        chunks = _keep(X, spool) if once else Chunks(read, list(map(_count, read())))
        if not chunks.lengths:
            raise ParameterError("`X` must give at least one chunk; got none.")
        return chunks
    rows = getattr(X, "shape", (0,))[0] if not sparse.issparse(X) else 0
    if rows <= MOST_ROWS:
        return None
    return Chunks(lambda: [Chunk(X, y, weight)], [rows])


def over_parts(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of rows take parts too, and give its arrays part by part.

    Of Dask collections it gives a Dask array, of all other parts an iterator.
    """

    @wraps(method)
    def called(self: Any, X: Any) -> Any:
        if not has_parts(X):
            return method(self, X)
        check_is_fitted(self)
        if not hasattr(X, "__dask_graph__"):
            known = getattr(self, "feature_names_in_", None)
            return (method(self, _select(part.X, known)) for part in as_chunks(X) or ())
        import dask.array as da

        frame = hasattr(X, "columns")
        row = X._meta_nonempty if frame else np.zeros((1, X.shape[1]), X.dtype)
        meta = method(self, row)[:0]
        chunks = _dask_chunks(X, None, None, count=False)
        work = chunks.dask.delayed(partial(_apply, method.__name__))
        model = chunks.dask.delayed(self)
        blocks = [
            da.from_delayed(work(model, part.X, meta), (n, *meta.shape[1:]), meta=meta)
            for part, n in zip(chunks.read(), chunks.lengths, strict=True)
        ]
        return da.concatenate(blocks, allow_unknown_chunksizes=True)

    return called


def _apply(method: str, model: Any, X: Any, empty: np.ndarray) -> Any:
    return getattr(model, method)(X) if X.shape[0] else empty


def _select(X: Any, names: Any) -> Any:
    """Take the columns of a fit out of an Arrow table, which may have others."""
    columns = getattr(X, "column_names", None)
    found = names is not None and columns is not None and set(names) <= set(columns)
    return X.select(list(names)) if found else X


def has_parts(X: Any) -> bool:
    """Say whether something is given in parts: what has rows itself is not.

    Examples
    --------
    >>> has_parts([[1.0, 2.0]]), has_parts([np.ones((2, 3)), np.ones((4, 3))])
    (False, True)
    """
    if hasattr(X, "__dask_graph__") or isinstance(X, str | Path):
        return True
    if any(hasattr(X, name) for name in ("shape", "column_names", "__array__")):
        return False
    if isinstance(X, list | tuple):
        first = X[0] if X else None
        first = first[0] if isinstance(first, tuple) and first else first
        return len(getattr(first, "shape", ())) == 2
    return isinstance(X, Iterable) and not hasattr(X, "__len__")


class Summary(NamedTuple):
    """What a fit must know of all rows, and the sample that it learns from."""

    arrays: list[np.ndarray]  # columns, targets and weights of the sample
    classes: np.ndarray | None  # different targets; None if they are too many
    about: dict[str, Any]  # of the table: number and names of its columns
    mass: float = 0.0  # sum of the weights
    columns: Any = None  # what the model describes columns by


def summarise(chunks: Chunks, model: Any, seed: int) -> Summary:
    """Check all rows with the checks of a model, and sum up what a fit must know."""
    chosen = None
    if chunks.sampled:
        rng = np.random.default_rng(seed)
        chosen = np.sort(rng.choice(sum(chunks.lengths), MOST_ROWS, replace=False))
    return chunks.total(_summarise, _join_summaries, clone(model), chosen)


def _summarise(chunk: Chunk, start: int, model: Any, chosen: Any) -> Summary:
    reader = clone(model)
    table, y, weight = reader._check_part(*chunk)
    names = ("n_features_in_", "feature_names_in_")
    about = {name: getattr(reader, name) for name in names if hasattr(reader, name)}
    if y.dtype == object:
        check_labels("y", y)
    values = np.unique(y)
    classes = values if len(values) <= _MOST_CLASSES else None
    mass, columns = float(weight.sum()), None
    if chosen is not None:
        columns = reader._describe_part(table, weight)
        low, high = np.searchsorted(chosen, [start, start + len(y)])
        here = chosen[low:high] - start
        table, y, weight = [column[here] for column in table], y[here], weight[here]
    return Summary([*table, y, weight], classes, about, mass, columns)


def _join_summaries(a: Summary, b: Summary) -> Summary:
    if str(a.about) != str(b.about):
        raise ParameterError(
            f"`X` must have the same columns in every chunk; got {a.about} and "
            f"{b.about}."
        )
    classes = None
    if a.classes is not None and b.classes is not None:
        classes = np.union1d(a.classes, b.classes)
    columns = a.columns
    if columns is not None:
        columns = columns.join(b.columns, b.mass / (a.mass + b.mass))
    return Summary(
        [np.concatenate(both) for both in zip(a.arrays, b.arrays, strict=True)],
        classes,
        a.about,
        a.mass + b.mass,
        columns,
    )


def _as_chunk(item: Any) -> Chunk:
    given = item if isinstance(item, tuple) else (item,)
    if not 1 <= len(given) <= 3 or not getattr(given[0], "shape", ()):
        raise ParameterTypeError(
            "`X` must give chunks with rows, such as arrays or data frames, alone or "
            f"as (X, y) or (X, y, sample_weight); got {shown(item)}."
        )
    return Chunk(*given)


def _count(chunk: Chunk) -> int:
    return int(chunk.X.shape[0])


def _keep(X: Iterable[Any], spool: Any) -> Chunks:
    """Go through chunks once, and write them to a file to read them again."""
    parts = [(_count(c), [_write(x, spool) for x in c]) for c in map(_as_chunk, X)]
    lengths = [length for length, _ in parts]
    return Chunks(lambda: (Chunk(*(f() for f in part)) for _, part in parts), lengths)


def _write(values: Any, spool: Any) -> Callable[[], Any]:
    """Write rows to a file; give what reads them with their types, bits and layout.

    What neither numpy, JSON nor Arrow gives back as it was stays in memory.
    """
    import pyarrow as pa

    if values is not None and len(getattr(values, "shape", ())) < 2:
        values = np.asarray(values)  # as all checks do with targets and weights
    kind, start = type(values), spool.seek(0, SEEK_END)
    if kind in (np.ndarray, np.memmap) and values.dtype.kind in "biufSU":
        np.save(spool, np.copy(values), allow_pickle=False)
        return lambda: (spool.seek(start), np.load(spool))[1]
    if kind is np.ndarray and set(map(type, values.flat)) <= _PLAIN:
        text = np.frombuffer(json.dumps(values.tolist()).encode(), np.uint8)
        data, shape = _write(text, spool), values.shape
        return lambda: np.array(json.loads(data().tobytes()), object).reshape(shape)
    if kind is pa.Table:
        with pa.ipc.new_stream(spool, values.schema) as stream:
            stream.write_table(values)
        return lambda: (spool.seek(start), pa.ipc.open_stream(spool).read_all())[1]
    if hasattr(values, "iloc"):
        types, names = [*set(values.dtypes)], values.columns
        if len(types) == 1 and isinstance(types[0], np.dtype):
            data = _write(values.to_numpy(), spool)
            return lambda: kind(data(), columns=names, dtype=types[0], copy=False)
        with suppress(pa.ArrowException, TypeError, ValueError):
            table = pa.Table.from_pandas(values, preserve_index=False)
            if table.to_pandas().equals(values.reset_index(drop=True)):
                data = _write(table, spool)
                return lambda: data().to_pandas()
    return lambda: values


def _split_off(table: Any, *names: Any) -> Chunk:
    """Take columns that are named out of a frame or an Arrow table."""
    given = [name for name in names if isinstance(name, str)]
    columns = getattr(table, "column_names", None)
    known = table.columns if columns is None else columns
    for name in given:
        if name not in list(known):
            raise ParameterError(
                f"`y` and `sample_weight` must name columns of `X`; got {name!r} for "
                f"{', '.join(map(str, list(known)[:20]))}."
            )
    taken = [table[name] if isinstance(name, str) else name for name in names]
    if given:
        drop = table.drop if columns is None else table.drop_columns
        table = drop(columns=given)
    if len(known) == len(set(given)):
        raise ParameterError("`X` must have a column beside `y` and `sample_weight`.")
    return Chunk(table, *taken)


def _parquet_chunks(path: Any, y: Any, weight: Any) -> Chunks:
    """Read a Parquet file or a folder of them, one group of rows after the other."""
    from pyarrow import dataset

    if not Path(path).exists():
        raise ParameterError(f"`X` must be data or a Parquet path; got {str(path)!r}.")
    for name, value in (("y", y), ("sample_weight", weight)):
        if value is not None and not isinstance(value, str):
            raise ParameterTypeError(
                f"`{name}` must name a column of {str(path)!r}; got {shown(value)}."
            )
    with _reading(path):
        files = list(dataset.dataset(str(path), format="parquet").get_fragments())
        groups = [group for file in files for group in file.split_by_row_group()]
    lengths = [group.count_rows() for group in groups]
    width = max((len(group.physical_schema) for group in groups), default=0)
    check_memory("X", 8 * width * max(lengths, default=0))
    if not groups:
        raise FileFormatError(f"{path} is not a Parquet table: it has no rows.")

    def read() -> Iterator[Chunk]:
        for group in groups:
            with _reading(path):
                table = group.to_table()
            X, *others = _split_off(table, y, weight)
            yield Chunk(X, *(None if x is None else x.to_numpy() for x in others))

    return Chunks(read, lengths)


@contextmanager
def _reading(path: Any) -> Iterator[None]:
    """Name the file that pyarrow cannot read."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError) as error:
        raise FileFormatError(f"{path} is not a Parquet table: {error}") from error


def _dask_chunks(X: Any, y: Any, weight: Any, *, count: bool = True) -> Chunks:
    """Pair the blocks of a Dask collection with those of its targets and weights."""
    import dask

    axes = getattr(X, "ndim", None)
    if not isinstance(axes, int) or axes != 2:
        raise ParameterTypeError(
            "`X` must be a Dask array of rows and columns, or a Dask data frame; got "
            f"{type(X).__name__}."
        )
    if hasattr(X, "columns"):
        X, y, weight = _split_off(X, y, weight)
    known = getattr(X, "chunks", None)
    if known is not None and len(known[1]) > 1:
        X = X.rechunk({1: -1})
    blocks = list(np.ravel(X.to_delayed()))
    lengths: list[Any] = list(known[0]) if known else [np.nan] * len(blocks)
    if count and np.isnan(lengths).any():
        lengths = list(dask.compute(*(dask.delayed(len)(block) for block in blocks)))
    targets = _dask_blocks("y", y, lengths)
    weights = _dask_blocks("sample_weight", weight, lengths)
    parts = [Chunk(*part) for part in zip(blocks, targets, weights, strict=True)]
    return Chunks(lambda: parts, lengths, dask)


def _dask_blocks(name: str, values: Any, lengths: list[int]) -> list[Any]:
    """Cut targets or weights like the rows they belong to."""
    if values is None:
        return [None] * len(lengths)
    lazy = hasattr(values, "__dask_graph__")
    known = hasattr(values, "rechunk") and not np.isnan(values.chunks[0]).any()
    if (known or not lazy) and len(values) != sum(lengths):
        raise ParameterError(
            f"`{name}` must have the {sum(lengths)} rows of `X`; got {len(values)}."
        )
    if not lazy:
        return np.split(np.asarray(values), np.cumsum(lengths)[:-1])
    if known:
        values = values.rechunk((tuple(lengths), *values.chunks[1:]))
    blocks = list(np.ravel(values.to_delayed()))
    if len(blocks) != len(lengths):
        raise ParameterError(
            f"`{name}` must have the {len(lengths)} partitions of `X`; got "
            f"{len(blocks)}. Repartition it, or name a column of `X`."
        )
    return blocks
