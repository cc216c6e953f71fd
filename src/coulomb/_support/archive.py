"""Files that are either whole or not there, and files that are not trusted.

An archive is one safetensors file whose metadata hold one JSON object. Nothing in it
is run when it is read. JSON is read with bounds on its size, its nesting and its
numbers; whatever is wrong with a file is a `FileFormatError` that names it.
"""

import csv
import enum
import errno
import io
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from coulomb._support.errors import FileFormatError, ParameterError, shown

try:
    import fcntl
except ImportError:  # without locks nothing is swept, and nobody is kept out
    fcntl = None  # type: ignore[assignment]

MOST_JSON, MOST_TABLE, MOST_TENSORS = 2**28, 2**32, 2**36  # bytes of a file
_DEEPEST, _LONGEST_NUMBER = 64, 40  # levels and characters of JSON
_MOST_PARTS = 2**21  # lists and objects of JSON; eight times as many values
MOST_ADDED = 2**17  # tokens that a tokenizer has beside its vocabulary
_MOST_NAMES = 2**16  # tensors of an archive
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}(\.[^.]*)?")
_held: dict[Path, int] = {}  # folders that are worked in, with their descriptors
_NESTING = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)


def check_file(path: str | Path, most: int = MOST_TABLE) -> Path:
    """Refuse a pipe, a device, a folder, or a file of more than `most` bytes."""
    path = Path(path)
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise FileFormatError(f"{path} is not a regular file; give one that is.")
    if found.st_size > most:
        raise FileFormatError(
            f"{path} has {found.st_size:,} bytes; at most {most:,} are read."
        )
    return path


def check_output(path: str | Path | None, *, folder: bool = False) -> None:
    """Refuse a place where nothing can be written, before any work is done.

    Examples
    --------
    >>> check_output("/dev/null/report.html")
    Traceback (most recent call last):
    NotADirectoryError: ... must be in a folder: '/dev/null/report.html'
    """
    if path is None:
        return
    path = Path(path)
    there = path if path.exists() and folder else path.absolute().parent
    broken = folder and path.is_symlink() and not path.exists()
    while not there.exists():
        broken |= there.is_symlink()
        there = there.parent
    if path.exists() and folder and not path.is_dir():
        told, number = "A folder is needed, and there is a file", errno.ENOTDIR
    elif broken:
        told, number = "A folder is needed, and there is a broken link", errno.ENOENT
    elif path.exists() and not folder and not path.is_file():
        told = "A file is to be written, and there is something else"
        number = errno.EISDIR
    elif not there.is_dir():
        told, number = "What is written must be in a folder", errno.ENOTDIR
    elif not os.access(there, os.W_OK | os.X_OK):
        told, number = f"{there} may not be written to", errno.EACCES
    else:
        return
    raise OSError(number, told, str(path))


def _lock(file: Any, *, wait: bool = False) -> bool | None:
    """Lock an open file; say whether it was free, or None where there are no locks.

    Whoever dies lets go of it.
    """
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return True
        except BlockingIOError:
            return False
        except OSError:
            pass
    return None


@contextmanager
def _opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file or folder for a moment, and give its descriptor."""
    descriptor = os.open(path, flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Make a folder, keep other processes out, and sweep what dead ones left."""
    folder.mkdir(parents=True, exist_ok=True)
    with _opened(folder) as file:
        if _lock(file) is False:
            raise ParameterError(
                f"`out` must be a folder of one process; another one is at work in "
                f"{str(folder)!r}. Wait for it to end, or choose another folder."
            )
        sweep(folder)
        place = folder.resolve()
        _held[place] = file
        try:
            yield
        finally:
            _held.pop(place, None)


def _make_parent(path: Path) -> None:
    """Make the folder of a file, but no second one in place of one worked in."""
    folder = path.parent
    held = _held.get(folder.resolve())
    if held is None:
        folder.mkdir(parents=True, exist_ok=True)
    elif not (folder.is_dir() and os.path.samestat(os.stat(held), folder.stat())):
        raise FileNotFoundError(errno.ENOENT, "Its folder was moved or removed")


def sweep(folder: Path) -> None:
    """Remove the temporary files of writers that were killed, and no others."""
    names = os.listdir(folder) if folder.is_dir() else ()
    for name in filter(_TEMPORARY.fullmatch, names):
        path = folder / name
        # Whoever else sweeps, or finishes, may be faster.
        with suppress(OSError), _opened(path, os.O_RDONLY | os.O_NONBLOCK) as file:
            if _lock(file):
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk itself."""
    with _opened(path) as file:
        os.fsync(file)


@contextmanager
def _or_say_what_is_safe(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        told = f"{error.strerror or error}. What was there before is unchanged"
        raise OSError(error.errno, told, str(path)) from error


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file through a temporary one in the same folder, flush and rename.

    Examples
    --------
    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "a.txt"
    >>> write_whole(target, lambda path: path.write_text("all"))
    >>> target.read_text()
    'all'
    """
    path = Path(path)
    with _beside(path, path.suffix, Path.touch) as temporary:
        write(temporary)


def write_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Write a new or empty folder, all its files or none.

    Examples
    --------
    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "model"
    >>> write_folder(target, lambda path: (path / "a.txt").write_text("all"))
    >>> [file.name for file in target.iterdir()]
    ['a.txt']
    """
    # A link to a folder stays: what is renamed takes the place of the folder.
    with _beside(path.resolve(), "", Path.mkdir) as temporary:
        write(temporary)
        for part in temporary.rglob("*"):
            _flush(part)


@contextmanager
def _beside(path: Path, suffix: str, make: Callable[[Path], object]) -> Iterator[Path]:
    """Give a locked temporary place; then flush, rename, and flush the rename."""
    with _or_say_what_is_safe(path):
        _make_parent(path)
        sweep(path.parent)
        temporary, file = _reserve(path, suffix, make)
        try:
            yield temporary
            _flush(temporary)
            os.replace(temporary, path)
            _flush(path.parent)
        finally:
            os.close(file)
            _remove(temporary)


def _reserve(
    path: Path, suffix: str, make: Callable[[Path], object]
) -> tuple[Path, int]:
    """Make a temporary file or folder and lock it, before anybody sweeps it."""
    while True:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{suffix}")
        make(temporary)
        with suppress(FileNotFoundError):
            file = os.open(temporary, os.O_RDONLY)
            if _lock(file) is not False and os.fstat(file).st_nlink:
                return temporary, file
            os.close(file)


def append_lines(path: Path, lines: str) -> None:
    """Add whole lines at the end of a file, flushed; a torn line there is taken away.

    Of several processes each waits for its turn.
    """
    with _or_say_what_is_safe(path):
        _make_parent(path)
        with path.open("a+b") as file:
            _lock(file, wait=True)
            end = _cut_torn_line(file)
            try:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    os.truncate(path, end)
                raise


def _cut_torn_line(file: Any) -> int:
    """Take away what comes after the last newline; give the length that is left."""
    end = int(file.seek(0, os.SEEK_END))
    file.seek(max(0, end - 1))
    if end and file.read() != b"\n":
        file.seek(0)
        end = file.read().rfind(b"\n") + 1
        file.truncate(end)
    return end


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON, whole or not at all."""
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write bytes, whole or not at all."""
    write_whole(path, lambda temporary: temporary.write_bytes(data))


def parse_json(
    text: str | bytes,
    place: str,
    *,
    finite: bool = True,
    complaint: str = " is damaged",
) -> Any:
    """Parse JSON that is not trusted; `place` says in messages where it is from.

    Examples
    --------
    >>> parse_json('{"a": [1, 2.5]}', "here")
    {'a': [1, 2.5]}
    >>> parse_json("[" * 1000, "here")
    Traceback (most recent call last):
    coulomb._support.errors.FileFormatError: here is damaged: nested more than 64 deep.
    """

    def whole(digits: str) -> int:
        if len(digits) > _LONGEST_NUMBER:
            raise ValueError(f"a number of {len(digits):,} digits")
        return int(digits)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):  # readers differ in which of them counts
            name, count = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ValueError(f"{count} keys named {shown(name)}")
        return found

    def real(digits: str) -> float:
        number = float(digits)
        if finite and not math.isfinite(number):
            raise ValueError(f"{digits[:_LONGEST_NUMBER]} is not finite")
        return number

    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        parts = text.count("[") + text.count("{")
        if max(parts, text.count(",") // 8) > _MOST_PARTS:
            raise ValueError("it holds too many values")
        if parts > _DEEPEST and _depth(text) > _DEEPEST:
            raise ValueError(f"nested more than {_DEEPEST} deep")
        how: Any = {"parse_int": whole, "parse_float": real, "parse_constant": real}
        found = json.loads(text, object_pairs_hook=once, **how)
        if "\\ud" in text.lower():  # half of a pair cannot be printed or written
            json.dumps(found, ensure_ascii=False).encode()
    except ValueError as error:
        raise FileFormatError(f"{place}{complaint}: {error}.") from error
    return found


def _depth(text: str) -> int:
    depth = deepest = 0
    for token in _NESTING.finditer(text):
        sign = token.group()[0]
        depth += (sign in "[{") - (sign in "]}")
        deepest = max(deepest, depth)
    return deepest


def read_json(path: str | Path, **options: Any) -> Any:
    """Read a JSON file that is not trusted."""
    path = check_file(path, MOST_JSON)
    return parse_json(path.read_bytes(), str(path), **options)


def check_tokenizer(found: Any, place: str) -> None:
    """Refuse more added tokens than any tokenizer has; the library is slow in them."""
    added = found.get("added_tokens") if isinstance(found, dict) else None
    parts = added if isinstance(added, list) else []
    words = [str(part.get("content")) for part in parts if isinstance(part, dict)]
    if len(words) > MOST_ADDED or sum(map(len, words)) > 8 * MOST_ADDED:
        raise FileFormatError(
            f"{place} has {len(words):,} added tokens of {sum(map(len, words)):,} "
            f"characters; at most {MOST_ADDED:,} of {8 * MOST_ADDED:,} are read."
        )


def plain(value: Any) -> Any:
    """Turn arrays, NamedTuples and enumerations into what JSON knows.

    Examples
    --------
    >>> from coulomb._support.stats import Fit
    >>> plain({"fit": Fit(1.0, 0.1, float("nan"), 0.8, 1.2)})
    {'fit': {'slope': 1.0, 'standard_error': 0.1, 'intercept': None, 'low': 0.8,
             'high': 1.2}}
    """
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, enum.Enum):
        return value.name
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def csv_text(headers: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    r"""Write rows below their headers as comma-separated values, all words harmless.

    Examples
    --------
    >>> csv_text(["name", "n"], [("=a", 2), ("b", None)])
    "name,n\n'=a,2\nb,\n"
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for row in (headers, *rows):
        writer.writerow([harmless(v) if isinstance(v, str) else v for v in row])
    return file.getvalue()


def harmless(words: str) -> str:
    """Keep spreadsheets from running a cell that starts like a formula.

    Examples
    --------
    >>> harmless("=1+1"), harmless("svm"), harmless("-0.5")
    ("'=1+1", 'svm', '-0.5')
    """
    if not words.startswith(_FORMULA_STARTS):
        return words
    try:
        float(words)
    except ValueError:
        return f"'{words}"
    return words


def write_archive(
    path: str | Path, tensors: Mapping[str, Any], facts: Mapping[str, Any]
) -> None:
    """Write torch tensors or numpy arrays beside JSON facts, whole or not at all."""
    metadata = {"coulomb": json.dumps(dict(facts))}
    write_bytes(Path(path), _serialise(tensors, metadata))


def _serialise(tensors: Mapping[str, Any], metadata: dict[str, str]) -> bytes:
    # torch takes seconds to import, and whoever has tensors has imported it already.
    if all(isinstance(array, np.ndarray) for array in tensors.values()):
        from safetensors.numpy import save as save_arrays

        arrays = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
        return save_arrays(arrays, metadata=metadata)
    from safetensors.torch import save as save_tensors

    ready = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    return save_tensors(ready, metadata=metadata)


def read_archive(
    path: str | Path,
    *,
    complaint: str,
    form: str | None = None,
    advice: str = "",
    framework: str = "pt",
    unbounded: Sequence[str] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read tensors and facts; a file that is no archive of this form is refused.

    So is a tensor with values that are not finite, unless its name contains one
    of `unbounded`. The message is the path, the complaint ("is not a saved run"), the
    reason and the advice.
    """
    with _archive(path, complaint, advice, framework) as file:
        about = (file.metadata() or {}).get("coulomb", "{}")
        facts = parse_json(about, "its metadata", finite=False)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, tensor in tensors.items():
            checked = not any(part in name for part in unbounded)
            if checked and not _finite(tensor):
                raise ValueError(f"{name!r} has values that are not finite")
    if not isinstance(facts, dict):
        raise FileFormatError(f"{path} {complaint}: its facts are no object.{advice}")
    if form is not None and facts.get("format") != form:
        raise FileFormatError(f"{path} {complaint}: its format is not {form!r}.")
    return tensors, facts


def read_shapes(
    path: str | Path, *, complaint: str = "is damaged or cut short"
) -> dict[str, tuple[int, ...]]:
    """Read the shapes of the tensors of an archive, and none of their numbers."""
    with _archive(path, complaint, "", "np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@contextmanager
def _archive(
    path: str | Path, complaint: str, advice: str, framework: str
) -> Iterator[Any]:
    check_file(path, MOST_TENSORS)
    try:
        with safe_open(path, framework=framework) as file:
            if (count := len(file.keys())) > _MOST_NAMES:  # each costs 10 microseconds
                raise FileFormatError(f"{count:,} tensors; at most {_MOST_NAMES:,}.")
            yield file
    except FileFormatError as error:
        raise FileFormatError(f"{path} {complaint}: {error}{advice}") from error
    except (
        *(SafetensorError, ArithmeticError, AttributeError, LookupError, MemoryError),
        *(RuntimeError, TypeError, ValueError),
    ) as error:
        raise FileFormatError(f"{path} {complaint}: {error}.{advice}") from error


def _finite(tensor: Any) -> bool:
    if isinstance(tensor, np.ndarray):
        return tensor.dtype.kind not in "fc" or bool(np.isfinite(tensor).all())
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
