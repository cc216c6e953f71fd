"""Records: one line of JSON for every finished job, never changed afterwards.

Beside the folder of an experiment, `NAME.csv.gz` may hold records too, without curves:
small enough to be published, so that others recompute what rests on them.
"""

import csv
import gzip
import hashlib
import io
import json
import os
import platform
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_origin

from coulomb._support.archive import (
    MOST_JSON,
    append_lines,
    check_file,
    parse_json,
    write_bytes,
)
from coulomb._support.checks import packaged
from coulomb._support.errors import CoulombError, FileFormatError

Job = dict[str, Any]
"""Plain data that say all about a piece of work: method, constants, seed, trial, ..."""

_REPEATED = ("seed", "trial", "design", "head")  # of a row; there may be many
_MOST_VALUES = 200  # of a setting, and names of metrics
_BAD = ": not a record; delete the line and run the experiment again"
_MOST_ROWS = 2**18  # of a file; each takes tens of microseconds
_LARGEST = 1e100  # of a metric; what is beyond cannot be averaged or drawn
FILE = "records.jsonl"
COMPRESSED = ".csv.gz"
PLANS = packaged("coulomb.experiments", "plans.toml")
"""Rows, constants and titles of the experiments."""


@dataclass(frozen=True)
class Record:
    """What one job gave on one split.

    Parameters
    ----------
    experiment
        Its name.
    job
        The row, as plain data. "method" and "constants" ("paper" or "default") say
        what was done, "control" is None, "norm-matched" or "noise-only", the other
        entries are settings, "seed" fixes everything drawn, "trial" pairs rows.
    key
        The hash of the piece of work that gave the record; a learned row and its
        controls come from one piece of work and share it.
    split
        Where the metrics were measured.
    metrics
        Numbers by name.
    seconds
        Wall-clock and CPU times by name.
    environment
        Versions and machine.
    version
        Of this package.
    extra
        Further plain data, such as curves.
    """

    experiment: str
    job: Job
    key: str
    split: str
    metrics: dict[str, float]
    seconds: dict[str, float]
    environment: dict[str, Any]
    version: str
    extra: dict[str, Any] = field(default_factory=dict)


_FIELDS: dict[str, Any] = {
    part.name: get_origin(part.type) or part.type
    for part in fields(Record)
    if part.name != "extra"
}


def job_key(
    experiment: str, job: Mapping[str, Any], constants: Mapping[str, Any] | None = None
) -> str:
    """Hash a job: the same on every machine and for every order of its parts.

    Examples
    --------
    >>> job_key("noise", {"seed": 1, "noise": 0.1}) == job_key(
    ...     "noise", {"noise": 0.1, "seed": 1}
    ... )
    True
    """
    parts = [experiment, job, constants] if constants else [experiment, job]
    # Settings may be infinite.
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Add records to a file, each as one line, all in one write.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "noise" / FILE
    >>> found = {"accuracy": 0.7}
    >>> record = Record("noise", {"seed": 0}, "ab", "test", found, {}, {}, "1.0")
    >>> append_records(path, [record])
    >>> load_records(path) == [record]
    True
    """
    lines = []
    for record in records:
        content = asdict(record)
        if not record.extra:
            del content["extra"]
        lines.append(json.dumps(content, sort_keys=True, allow_nan=False) + "\n")
    append_lines(path, "".join(lines))


def write_compressed(path: Path, records: Iterable[Record]) -> None:
    """Write records as compressed CSV, without curves: a column for each entry.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "noise.csv.gz"
    >>> found = {"accuracy": 0.1 + 0.2}
    >>> job = {"method": "svm", "seed": 0, "control": None, "name": "1"}
    >>> record = Record("noise", job, "ab", "test", found, {}, {}, "1.0")
    >>> write_compressed(path, [record])
    >>> load_records(path) == [record]
    True
    """
    rows = []
    for record in records:
        kept = {key: record.extra[key] for key in ("preset",) if key in record.extra}
        row: dict[str, Any] = {}
        for name, value in (vars(record) | {"extra": kept}).items():
            parts = value if isinstance(value, dict) else {"": value}
            row |= {f"{name}.{key}".rstrip("."): _cell(v) for key, v in parts.items()}
        rows.append(row)
    file = io.StringIO()
    columns = sorted({name for row in rows for name in row})
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(Path(path), gzip.compress(file.getvalue().encode(), mtime=0))


def _cell(value: Any) -> str:
    """Write words as they are and all else as JSON."""
    plain = isinstance(value, str) and value and _from_cell(value) == value
    return str(value) if plain else json.dumps(value, allow_nan=False)


def _from_cell(cell: str) -> Any:
    try:
        return parse_json(cell, "", finite=False)
    except FileFormatError:
        return cell


def _read_compressed(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with gzip.open(check_file(path, MOST_JSON)) as file:
            data = file.read(MOST_JSON + 1)
        if len(data) > MOST_JSON or data.count(b"\n") > _MOST_ROWS:
            raise ValueError(f"it has over {MOST_JSON:,} bytes or {_MOST_ROWS:,} rows")
        for number, row in enumerate(csv.DictReader(io.StringIO(data.decode())), 1):
            if None in row:
                raise ValueError(f"row {number} has more cells than there are columns")
            content: dict[str, Any] = {"metrics": {}, "seconds": {}, "environment": {}}
            for name, cell in row.items():
                part, _, key = str(name).partition(".")
                if cell and key:
                    content.setdefault(part, {})[key] = _from_cell(cell)
                elif cell:
                    content[part] = str(_from_cell(cell))
            yield f"{path}, row {number}", content
    except (OSError, EOFError, TypeError, ValueError, csv.Error, zlib.error) as error:
        raise FileFormatError(f"{path} is no compressed CSV: {error}.") from error


def load_records(path: Path, problems: list[str] | None = None) -> list[Record]:
    """Read a file of records, in an order that does not depend on who was first.

    A last line that an interruption cut short is left out. Of two records of the same
    row and split the later counts.

    Parameters
    ----------
    path
        A file of records, or the folder of an experiment, beside which compressed ones
        may be.
    problems
        A list that is told which metrics are no numbers of use; they are left out.

    Returns
    -------
    list of Record
        Sorted by job; empty if there is no file.
    """
    path = Path(path)
    contents: list[tuple[str, Any]] = []
    packed = path.name.endswith(COMPRESSED)
    beside = path if packed else path.with_name(path.name + COMPRESSED)
    if beside.exists():
        contents += _read_compressed(beside)
    file = path / FILE if path.is_dir() else path
    if file.exists() and not packed:
        lines = check_file(file, MOST_JSON).read_bytes().split(b"\n", _MOST_ROWS + 1)
        if len(lines) > _MOST_ROWS + 1:
            raise FileFormatError(f"{file} has more than {_MOST_ROWS:,} lines.")
        # What comes after the last newline was being written when the run ended.
        for number, row in enumerate(lines[:-1], 1):
            place = f"{file}, line {number}"
            content = parse_json(row, place, finite=False, complaint=_BAD)
            contents.append((place, content))
    found: dict[tuple[str, str], Record] = {}
    for place, content in contents:
        record = _checked(place, content, problems)
        found[json.dumps(record.job, sort_keys=True), record.split] = record
    _check_variety(path, found.values())
    return [found[row] for row in sorted(found)]


def experiment_folders(out: Path) -> list[Path]:
    """List where the experiments of a folder have, or would have, their records."""
    compressed = (path.name for path in Path(out).glob(f"*{COMPRESSED}"))
    names = {name.removesuffix(COMPRESSED) for name in compressed}
    names |= {path.parent.name for path in Path(out).glob(f"*/{FILE}")}
    return [Path(out) / name for name in sorted(names)]


def load_experiments(
    out: Path, problems: list[str] | None = None
) -> dict[str, list[Record]]:
    """Read the records of every experiment in a folder.

    Parameters
    ----------
    out
        The folder given to `coulomb reproduce --out`, or one of compressed records.
    problems
        A list that is told what is wrong with an experiment, which is then left out;
        None raises it.

    Returns
    -------
    dict
        Records by the name of the experiment.
    """
    found = {}
    for folder in experiment_folders(out):
        try:
            found[folder.name] = load_records(folder, problems)
        except (CoulombError, OSError) as error:
            if problems is None:
                raise
            problems.append(str(error).replace(f"{out}/", ""))
    return found


@cache
def environment() -> dict[str, Any]:
    """Describe this machine and the packages that numbers depend on."""
    packages = ("numpy", "scipy", "scikit-learn", "torch", "numba")
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        **{name: version(name) for name in packages},
    }


def _checked(place: str, content: Any, problems: list[str] | None) -> Record:
    if not isinstance(content, dict):
        raise FileFormatError(f"{place}: it must be an object; got {content!r:.60}.")
    for name, kind in _FIELDS.items():
        if not isinstance(content.get(name), kind):
            raise FileFormatError(
                f"{place}: `{name}` must be a {kind.__name__}; got "
                f"{content.get(name)!r:.60}."
            )
    for name in ("metrics", "seconds"):
        for metric, value in list(content[name].items()):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is None or (number and abs(value) < _LARGEST):
                continue
            del content[name][metric]
            if problems is not None:
                problems.append(
                    f"{place}: `{metric}` is {value!r:.60}, no number; left out."
                )
    _check_job(place, content["job"])
    extra = content.get("extra", {})
    return Record(**{name: content[name] for name in _FIELDS}, extra=extra)


def _check_variety(path: Path, records: Collection[Record]) -> None:
    """Refuse what would make pages and tables without end."""
    values: dict[str, set[str]] = {}
    for record in records:
        for name, value in record.job.items():
            if name not in _REPEATED:
                values.setdefault(f"job.{name}", set()).add(repr(value))
        for part in ("job", "metrics", "seconds", "environment"):
            values.setdefault(part, set()).update(getattr(record, part))
    for name, found in values.items():
        if len(found) > _MOST_VALUES:
            raise FileFormatError(
                f"{path}: `{name:.60}` has {len(found):,} names or values; at most "
                f"{_MOST_VALUES} are read."
            )


def _check_job(place: str, job: Job) -> None:
    """Refuse a row whose names are no names and whose numbers are no numbers."""
    kinds: dict[str, Any] = {}
    kinds |= dict.fromkeys(("method", "constants", "control", "task"), str | None)
    kinds |= dict.fromkeys(("gamma", "strength", "exponent"), int | float | None)
    for name, value in job.items():
        if not isinstance(value, kinds.get(name, object)):
            raise FileFormatError(f"{place}: `job.{name}` cannot be {value!r:.60}.")
