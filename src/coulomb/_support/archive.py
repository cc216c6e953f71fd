"""Files that are either whole or not there: JSON, and tensors beside plain facts.

An archive is one safetensors file whose metadata hold one JSON object. Nothing in it
is run when it is read.
"""

import enum
import json
import math
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from coulomb._support.errors import FileFormatError


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
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON, whole or not at all."""
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"
    write_whole(path, lambda temporary: temporary.write_text(text))


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
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, enum.Enum):
        return value.name
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


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


def write_bytes(path: Path, data: bytes) -> None:
    """Write bytes to the disk itself, whole or not at all."""

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    write_whole(path, write)


def read_archive(
    path: str | Path,
    *,
    complaint: str,
    form: str | None = None,
    advice: str = "",
    framework: str = "pt",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read tensors and facts; a file that is no archive of this form is refused.

    The message is the path, the complaint ("is not a saved run"), the reason and the
    advice.
    """
    try:
        with safe_open(path, framework=framework) as file:
            facts = json.loads((file.metadata() or {}).get("coulomb", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path} {complaint}: {error}.{advice}") from error
    if form is not None and (
        not isinstance(facts, dict) or facts.get("format") != form
    ):
        raise FileFormatError(f"{path} {complaint}: its format is not {form!r}.")
    return tensors, facts
