"""Files that are either whole or not there."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write through a temporary file in the same folder, then rename.

    Examples
    --------
    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "a.txt"
    >>> write_whole(target, lambda path: path.write_text("all"))
    >>> target.read_text()
    'all'
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix
    )
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        _make_readable(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON, whole or not at all."""
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"
    write_whole(path, lambda temporary: temporary.write_text(text))


def _make_readable(path: Path) -> None:
    # mkstemp makes files only their owner can read; give them the usual rights.
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
