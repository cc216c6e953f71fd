"""Columns of CSV, TSV, JSON-lines and Parquet files, with errors that say the line."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from coulomb._support.archive import check_file, parse_json
from coulomb._support.errors import FileFormatError, ParameterError

_LONGEST_FIELD = 2**31 - 1  # the csv module stops at 131,072 characters otherwise


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """Read some columns of a table."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise ParameterError(
            f"`data` must end in {', '.join(_READERS)}; got {path.name!r}."
        )
    check_file(path)
    try:
        columns = _READERS[suffix](path, names)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from error
    if not columns[names[0]]:
        raise FileFormatError(f"{path} has no rows; give a file with some.")
    return columns


def read_rows(path: Path, text: Sequence[str], label: str) -> tuple[Any, list[Any]]:
    """Read texts, or pairs, and their labels."""
    columns = read_columns(path, [*text, label])
    return join_columns(columns, text), columns[label]


def join_columns(table: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Give the texts of one column, or the pairs of two.

    Examples
    --------
    >>> join_columns({"a": ["x"], "b": ["y"]}, ["a", "b"])
    [('x', 'y')]
    """
    columns = [table[name] for name in names]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def _separated(
    path: Path, names: Sequence[str], delimiter: str
) -> dict[str, list[Any]]:
    with (
        _long_fields(),
        path.open(encoding="utf-8-sig", newline="", errors="strict") as file,
    ):
        rows = csv.reader(file, delimiter=delimiter)
        try:
            header = next(rows, None)
            if header is None:
                raise FileFormatError(f"{path} is empty; give a file with a header.")
            _check_columns(str(path), names, header)
            places = [header.index(name) for name in names]
            values: list[list[Any]] = [[] for _ in names]
            for row in rows:
                if not row:
                    continue
                if len(row) != len(header):
                    raise FileFormatError(
                        f"{path}, line {rows.line_num}: {len(row)} fields, but the "
                        f"header has {len(header)}. Quote fields that hold a "
                        f"{delimiter!r} or a line break."
                    )
                for column, place in zip(values, places, strict=True):
                    column.append(row[place])
        except csv.Error as error:
            raise FileFormatError(
                f"{path}, line {rows.line_num}: {error}. Is it a text file?"
            ) from error
    return dict(zip(names, values, strict=True))


def _jsonl(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {name: [] for name in names}
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            if not line.strip():
                continue
            row = parse_json(line, place, finite=False, complaint=": not JSON")
            if not isinstance(row, dict):
                raise FileFormatError(
                    f"{place}: not a JSON object; got {type(row).__name__}. Write one "
                    "object per line."
                )
            _check_columns(place, names, list(row))
            for name in names:
                values[name].append(row[name])
    return values


def _parquet(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        header = pyarrow.parquet.read_schema(path).names
        _check_columns(str(path), names, header)
        table = pyarrow.parquet.read_table(path, columns=list(dict.fromkeys(names)))
        return {name: table.column(name).to_pylist() for name in names}
    except (pyarrow.ArrowException, KeyError, OSError, ValueError) as error:
        raise FileFormatError(f"{path} is not a Parquet file: {error}.") from error


_READERS: dict[str, Callable[[Path, Sequence[str]], dict[str, list[Any]]]] = {
    ".csv": partial(_separated, delimiter=","),
    ".tsv": partial(_separated, delimiter="\t"),
    ".tab": partial(_separated, delimiter="\t"),
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".parquet": _parquet,
}


@contextmanager
def _long_fields() -> Iterator[None]:
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _check_columns(place: str, names: Sequence[str], header: Sequence[str]) -> None:
    for name in names:
        if name not in header:
            near = get_close_matches(name, header, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ParameterError(
                f"{place} has no column {name!r}{hint} It has: {', '.join(header)}. "
                "Name columns with --text and --label."
            )


def _not_utf8(path: Path, error: UnicodeDecodeError) -> FileFormatError:
    # The reader decodes in blocks: look for the place in the whole file.
    data = path.read_bytes()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as found:
        error = found
    line = data.count(b"\n", 0, error.start) + 1
    return FileFormatError(
        f"{path} is not UTF-8: byte 0x{data[error.start]:02x} in line {line}. Save it "
        "as UTF-8, for example with `iconv -f latin1 -t utf-8`."
    )
