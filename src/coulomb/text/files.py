"""Columns of CSV, TSV, JSON-lines and Parquet files, with errors that say the line."""

import codecs
import csv
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from coulomb._support.archive import check_file, parse_json
from coulomb._support.checks import check_memory, retold
from coulomb._support.errors import FileFormatError, ParameterError, shown

_BYTES_PER_VALUE = 64  # of a Python number or a short word, about
_MOST_COLUMNS = 10_000  # of a file whose columns are all read
_MOST_NAMED = 20  # columns in a message
_LONGEST_FIELD = 2**31 - 1  # the csv module stops at 131,072 characters otherwise
_UTF8 = "utf-8-sig"  # with or without a mark of the byte order
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_LOOKED_AT = 200  # rows that tell the separator


class Form(NamedTuple):
    """How a file of text is written; None is found out."""

    separator: str | None = None
    encoding: str | None = None

    def checked(self) -> "Form":
        """Refuse what cannot separate columns, or is no encoding."""
        mark, encoding = self
        mark = "\t" if mark in ("tab", r"\t") else mark
        if mark is not None and (len(mark) != 1 or mark in '"\r\n '):
            raise ParameterError(f"`sep` must be one character, or tab; got {mark!r}.")
        try:
            "".encode(encoding or _UTF8)
        except LookupError as error:
            raise ParameterError(
                f"`encoding` must be one, such as utf-16 or latin-1; got {encoding!r}."
            ) from error
        return Form(mark, encoding)


FOUND_OUT = Form()


class Table(NamedTuple):
    """Columns of a file, and what was found out of it."""

    columns: dict[str, list[Any]]
    notes: tuple[str, ...] = ()


def read_table(
    path: Path, names: Sequence[str] | None = None, form: Form = FOUND_OUT
) -> Table:
    """Read some columns of a table, or all."""
    path, form = Path(path), form.checked()
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise ParameterError(
            f"`data` must end in {', '.join(_READERS)}; got {path.name!r}."
        )
    check_file(path)
    encoding, notes = form.encoding or _UTF8, []
    if suffix != ".parquet" and form.encoding is None:
        encoding, why = _find_encoding(path, fallback=suffix in _USUAL)
        notes += [f"is read as {encoding}{why}"] if why or encoding != _UTF8 else []
    form = Form(form.separator, encoding)
    if suffix in _USUAL and form.separator is None:
        mark = _find_separator(path, encoding, _USUAL[suffix])
        form = Form(mark, encoding)
        if mark != _USUAL[suffix]:
            notes.append(f"has its columns separated by {_SEPARATORS[mark]}")
    try:
        columns = _READERS[suffix](path, names, form)
    except UnicodeError as error:
        place = _first_odd_byte(path, encoding) or error
        raise FileFormatError(
            f"{path} is not {encoding.removesuffix('-sig').upper()}: {place}. Name its "
            "encoding with `--encoding`, or save it as UTF-8."
        ) from error
    if not next(iter(columns.values()), ()):
        raise FileFormatError(f"{path} has no rows; give a file with some.")
    return Table(columns, (f"{path.name} {' and '.join(notes)}.",) if notes else ())


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """Read some columns of a table whose form is found out."""
    return read_table(path, names).columns


def read_rows(
    path: Path,
    text: Sequence[str],
    label: str,
    form: Form = FOUND_OUT,
    *,
    strict: bool = False,
) -> tuple[Any, list[Any], tuple[str, ...]]:
    """Read texts, or pairs, their labels and notes; rows without either are dropped."""
    columns, notes = read_table(path, [*text, label], form)
    labels = columns[label]
    lacking = {n: {i for i, x in enumerate(columns[n]) if _missing(x)} for n in columns}
    unread, unnamed = set().union(*(lacking[n] for n in text)), lacking[label]
    if gone := unread | unnamed:
        told = (
            f"{path.name}: {len(gone)} of {len(labels)} rows lack a text "
            f"({len(unread)}) or a label ({len(unnamed)})"
        )
        if strict or len(gone) == len(labels):
            raise FileFormatError(
                f"{told}; the first is row {min(gone) + 1}. Fill them in"
                f"{', or drop `--strict`' if len(gone) < len(labels) else ''}."
            )
        notes += (f"{told}; these are dropped.",)
        kept = [row for row in range(len(labels)) if row not in gone]
        columns = {name: [x[row] for row in kept] for name, x in columns.items()}
    return join_columns(columns, text), columns[label], notes


def _missing(value: Any) -> bool:
    if isinstance(value, float):
        return math.isnan(value)
    empty = not value.strip() if isinstance(value, str) else value in ([], ())
    return value is None or empty


def join_columns(table: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Give the texts of one column, or the pairs of two.

    Examples
    --------
    >>> join_columns({"a": ["x"], "b": ["y"]}, ["a", "b"])
    [('x', 'y')]
    """
    columns = [table[name] for name in names]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def _find_encoding(path: Path, *, fallback: bool) -> tuple[str, str]:
    """Find how characters are written, and say what is unusual about it."""
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16", ""
    # Every other byte of European text in UTF-16 is zero.
    for name, zeros in (("utf-16-le", start[1::2]), ("utf-16-be", start[::2])):
        if zeros.count(0) > len(start) / 4 > 0:
            return name, ""
    odd = _first_odd_byte(path, _UTF8)
    if not odd or not fallback or b"\0" in start:
        marked = start.startswith(codecs.BOM_UTF8)
        return _UTF8, ", UTF-8 with a byte-order mark" if marked else ""
    # Windows has letters and quotation marks where Latin-1 has control characters.
    name = "latin-1" if _first_odd_byte(path, "cp1252") else "cp1252"
    return name, f", Windows' Latin-1, since it is not UTF-8 ({odd})"


def _first_odd_byte(path: Path, encoding: str) -> str:
    """Say which byte is not of an encoding; readers decode in blocks, this does not."""
    data = path.read_bytes()
    try:
        data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return f"byte 0x{error.object[error.start]:02x} in line {line}"
    return ""


def _find_separator(path: Path, encoding: str, usual: str) -> str:
    """Find what gives most rows as many columns as the header has."""
    # The csv module's own guess counts characters, and texts are full of commas.
    found: dict[str, tuple[float, int]] = {}
    with (
        _long_fields(),
        path.open(encoding=encoding, newline="", errors="replace") as file,
    ):
        for mark in dict.fromkeys((usual, *_SEPARATORS)):
            file.seek(0)
            rows = csv.reader(file, delimiter=mark)
            try:
                width = len(next(rows, ()))
                if width > 1:
                    sizes = [len(row) for row in islice(rows, _LOOKED_AT) if row]
                    found[mark] = sizes.count(width) / max(1, len(sizes)), width
            except csv.Error:
                continue
    return max(found, key=lambda mark: found[mark], default=usual)


def _separated(
    path: Path, names: Sequence[str] | None, form: Form
) -> dict[str, list[Any]]:
    delimiter = form.separator or ","
    with _long_fields(), path.open(encoding=form.encoding, newline="") as file:
        rows = csv.reader(file, delimiter=delimiter)
        try:
            header = next(rows, None)
            if header is None:
                raise FileFormatError(f"{path} is empty; give a file with a header.")
            names = check_columns(str(path), names, header)
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


def _jsonl(path: Path, names: Sequence[str] | None, form: Form) -> dict[str, list[Any]]:
    found: dict[str, None] = {}
    rows = []
    with path.open(encoding=form.encoding) as file:
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
            found |= dict.fromkeys(check_columns(place, names, list(row)))
            rows.append(row)
    check_columns(str(path), names, list(found))
    check_memory("data", 8 * len(found) * len(rows))
    return {name: [row.get(name) for row in rows] for name in found}


def _parquet(path: Path, names: Sequence[str] | None, _: Form) -> dict[str, list[Any]]:
    import pyarrow
    import pyarrow.parquet

    with retold(f"{path} is not a Parquet file"):
        schema = pyarrow.parquet.read_schema(path)
        names = check_columns(str(path), names, schema.names)
        wanted = [schema.field(name) for name in dict.fromkeys(names)]
        # Words that are repeated are held once, however often a small file says them.
        words = [each.name for each in wanted if pyarrow.types.is_string(each.type)]
        with pyarrow.parquet.ParquetFile(path, read_dictionary=words) as file:
            check_memory("data", _BYTES_PER_VALUE * len(names) * file.metadata.num_rows)
            table = file.read(columns=[each.name for each in wanted])
        return {name: _values(table.column(name)) for name in names}


def _values(column: Any) -> list[Any]:
    """Give the values of an Arrow column; equal words are one object."""
    found: list[Any] = []
    for chunk in column.chunks:
        words = getattr(chunk, "dictionary", None)
        if words is None:
            found += chunk.to_pylist()
        else:
            known = words.to_pylist()
            places = chunk.indices.to_pylist()
            found += [None if i is None else known[i] for i in places]
    return found


_USUAL = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
_Reader = Callable[[Path, Sequence[str] | None, Form], dict[str, list[Any]]]
_READERS: dict[str, _Reader] = dict.fromkeys(_USUAL, _separated)
_READERS |= {".jsonl": _jsonl, ".ndjson": _jsonl, ".parquet": _parquet}


@contextmanager
def _long_fields() -> Iterator[None]:
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def check_columns(
    place: str, names: Sequence[str] | None, header: Sequence[str]
) -> Sequence[str]:
    """Give the columns to read, all of them if none are named."""
    name, count = Counter(header).most_common(1)[0] if header else ("", 1)
    if count > 1:
        raise FileFormatError(
            f"{place} has {count} columns named {shown(name)}. Rename all but one."
        )
    if names is None and len(header) > _MOST_COLUMNS:
        raise FileFormatError(
            f"{place} has {len(header):,} columns; at most {_MOST_COLUMNS:,} are read."
        )
    for name in names or ():
        if name not in header:
            some = [shown(each).strip("'") for each in header[:_MOST_NAMED]]
            near = get_close_matches(name, some, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            more = ", ..." if len(header) > len(some) else ""
            raise ParameterError(
                f"{place} has no column {name!r}{hint} It has: {', '.join(some)}{more}"
                ". Name columns with --text and --label."
            )
    return names or header
