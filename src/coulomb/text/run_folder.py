"""The folder of a run: what is in it, and how it survives being interrupted.

Files are written to a temporary file, flushed to the disk and renamed. Their names are
fixed: nothing that is read from a run names another file of it.
"""

import itertools
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coulomb._support import archive
from coulomb._support.archive import MOST_JSON, check_file, write_archive
from coulomb._support.errors import CoulombError, FileFormatError, ParameterError
from coulomb.text.data import Corpus
from coulomb.text.settings import TextSettings
from coulomb.text.tasks import load_data

if TYPE_CHECKING:
    from torch import Tensor

    from coulomb.text.tokens import Vocabulary

FORMAT = "coulomb-text-1"
CONFIG = "config.json"
VOCABULARY = "vocabulary.json"
WEIGHTS = "weights.safetensors"
BEST = "best.safetensors"  # of a pretrained encoder, until its weights are complete
PARTICLES = "particles.safetensors"
CHECKPOINT = "checkpoint.safetensors"
METRICS = "metrics.json"
HISTORY = "history.jsonl"
ENVIRONMENT = "environment.json"


class Config(NamedTuple):
    """What a run was asked, as it is written down."""

    settings: TextSettings
    kind: str
    classes: tuple[Any, ...]
    data: dict[str, Any]
    fingerprint: str


_KINDS = {"format": str, "settings": dict, "kind": str, "classes": list}
_KINDS |= {"data": dict, "fingerprint": str}


def read_tensors(path: Path) -> tuple[dict[str, "Tensor"], dict[str, Any]]:
    """Read tensors and facts of a run's folder."""
    _must_be_there(path)
    advice = " Nothing was changed; restore it from a copy, or train again in a new "
    complaint = "is damaged or cut short"
    return archive.read_archive(path, complaint=complaint, advice=f"{advice}folder.")


def _must_be_there(path: Path) -> None:
    if not path.is_file():
        raise FileFormatError(f"{path} is missing. Train the run again.")


def _check_kinds(path: Path, values: Any, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse data in which something is of another type than it was written in."""
    for name, kind in kinds.items():
        if not isinstance(values, dict) or not isinstance(values.get(name), kind):
            raise FileFormatError(f"{path}: `{name}` is damaged.")
    return dict(values)


def check_tensors(
    path: str | Path, tensors: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    """Refuse tensors that do not fit the model of a run's configuration."""
    for name in (*expected, *tensors):
        if name not in tensors:
            raise FileFormatError(f"{path} has no {name!r}, which the run needs.")
        if name not in expected:
            raise FileFormatError(f"{path} has {name!r}, which the run does not know.")
        found, wanted = tensors[name], expected[name]
        if found.shape != wanted.shape:
            raise FileFormatError(
                f"{path}: {name!r} has the shape {tuple(found.shape)}, but {CONFIG} "
                f"asks for {tuple(wanted.shape)}."
            )
        if found.dtype != wanted.dtype:
            raise FileFormatError(
                f"{path}: {name!r} is of the type {found.dtype}; the run needs "
                f"{wanted.dtype}."
            )


def check_free(folder: Path) -> None:
    """Refuse to begin a run where there is one, or where there are other files."""
    if (folder / CONFIG).exists():
        raise ParameterError(
            f"`out` must be a new folder; {str(folder)!r} holds a run. Go on with "
            f"`--resume {folder}`, or choose another."
        )
    # A run that was killed in its first moments leaves behind what is allowed here.
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in (VOCABULARY, ENVIRONMENT) and path.name[0] != ".":
            raise ParameterError(
                f"`out` must be a new or empty folder; {str(folder)!r} holds "
                f"{path.name!r}."
            )


def load_corpus(folder: Path, config: Config, corpus: Corpus | None) -> Corpus:
    """Read the data of a run again, unless it is given; refuse data that changed."""
    try:
        corpus = corpus or load_data(config.data)
    except (CoulombError, OSError) as error:
        raise ParameterError(
            f"`run` needs its data again, as {folder / CONFIG} describes it: {error}"
        ) from error
    if corpus.fingerprint() != config.fingerprint:
        raise FileFormatError(
            f"The data of {folder} has changed since the run began: its texts or "
            "labels have another fingerprint. Bring it back, or train in a new folder."
        )
    return corpus


def write_run(folder: Path, config: Config, vocabulary: "Vocabulary") -> None:
    """Write what was asked; last the configuration: with it a run can be resumed."""
    for label in config.classes:
        if not isinstance(label, str | int | float | bool):
            raise ParameterError(
                "`label` must be a string or a number to be saved; got "
                f"{type(label).__name__} {label!r}."
            )
    archive.write_json(folder / ENVIRONMENT, describe_environment())
    archive.write_bytes(folder / VOCABULARY, vocabulary.to_json().encode())
    plain = {"settings": config.settings.plain(), "classes": list(config.classes)}
    archive.write_json(folder / CONFIG, config._asdict() | plain | {"format": FORMAT})


def read_config(folder: Path) -> Config:
    """Read and check the configuration of a run."""
    path = Path(folder) / CONFIG
    if not path.exists():
        raise ParameterError(
            f"`run` must be a folder with a {CONFIG}; got {str(folder)!r}. `coulomb "
            "runs` lists the runs there are."
        )
    values = archive.read_json(path)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise FileFormatError(f"{path} is not of the format {FORMAT!r}.")
    odd = set(values) ^ set(_KINDS)
    if odd:
        raise FileFormatError(
            f"{path} must have the keys {', '.join(_KINDS)} and no others; unknown or "
            f"missing: {', '.join(sorted(odd))}."
        )
    _check_kinds(path, values, _KINDS)
    classes, kind = values["classes"], values["kind"]
    if kind not in ("sequence", "token", "number"):
        raise FileFormatError(f"{path}: `kind` is damaged.")
    plain = all(isinstance(label, str | int | float) for label in classes)
    different = len(set(map(str, classes))) == len(classes)
    fitting = not classes if kind == "number" else len(classes) >= 2
    if not (plain and different and fitting):
        raise FileFormatError(f"{path}: `classes` is damaged.")
    try:
        settings = TextSettings.from_plain(values["settings"])
    except (CoulombError, TypeError) as error:
        raise FileFormatError(f"{path}: {error}") from error
    _check_source(path, values["data"])
    return Config(settings, kind, tuple(classes), values["data"], values["fingerprint"])


_WORDS = ("name", "task", "label", "sep", "encoding", "target")
_SOURCE: dict[str, Any] = dict.fromkeys(_WORDS, str | None)
_SOURCE |= {"text": list | None, "validation_share": int | float | None}


def _check_source(path: Path, data: Mapping[str, Any]) -> None:
    """Refuse what cannot describe data.

    A run may come from someone else. Data files are whole paths without detours, so
    that what the configuration shows is what is read.
    """
    typed = all(isinstance(data.get(name), kind) for name, kind in _SOURCE.items())
    if not typed or not all(isinstance(x, str) for x in data.get("text") or ()):
        raise FileFormatError(f"{path}: `data` is damaged.")
    for name in ("train", "validation", "test", "data_dir"):
        value = data.get(name)
        ok = isinstance(value, str) and Path(value).is_absolute()
        if value is not None and (not ok or "\0" in value or ".." in Path(value).parts):
            raise FileFormatError(
                f"{path}: `data.{name}` must be a whole path without '..' or zero "
                f"bytes; got {value!r}."
            )


def load_vocabulary(folder: Path) -> "Vocabulary":
    """Read the vocabulary of a run."""
    path = folder / VOCABULARY
    _must_be_there(path)
    text = check_file(path, MOST_JSON).read_text(encoding="utf-8", errors="replace")
    from coulomb.text.tokens import Vocabulary

    return Vocabulary.from_json(text, str(path))


def read_metrics(folder: Path) -> dict[str, Any]:
    """Read and check the metrics of a finished run."""
    path = folder / METRICS
    kinds = {"split": str, "rows": int, "best_epoch": int, "metrics": dict}
    kinds |= {"alignment": dict, "notes": list}
    found = _check_kinds(path, archive.read_json(path), kinds)
    parts = [found["metrics"], *found["metrics"].values()]
    numbers = [x for part in parts if isinstance(part, dict) for x in part.values()]
    if not all(isinstance(x, int | float | dict | None) for x in numbers):
        raise FileFormatError(f"{path}: `metrics` must be numbers.")
    return found


def read_history(path: Path) -> list[dict[str, Any]]:
    """Read a history; a last line that was cut short does not count."""
    records: list[dict[str, Any]] = []
    if not path.exists():
        return records
    lines = check_file(path, MOST_JSON).read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        place = f"{path}, line {number}"
        try:
            record = archive.parse_json(line, place)
        except FileFormatError:
            if number >= len(lines) - 1:
                break
            raise
        known = isinstance(record, dict) and isinstance(record.get("phase"), str)
        if not known or not isinstance(record.get("step"), int):
            raise FileFormatError(f"{place}: a record must have a phase and a step.")
        records.append(record)
    return records


def new_folder(parent: Path, name: str) -> Path:
    """Make the next free folder, `parent/name-1`, `parent/name-2`, ..."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        with suppress(FileExistsError):
            (parent / f"{name}-{number}").mkdir()
            break
    return parent / f"{name}-{number}"


def list_runs(parent: str | Path) -> list[dict[str, Any]]:
    """Describe the runs in a folder.

    Parameters
    ----------
    parent
        Where runs are.

    Returns
    -------
    list of dict
        Name, data, attention, seed, whether it is finished, and its metrics; a damaged
        run has a "problem" instead.
    """
    found = []
    folder = Path(parent)
    if not folder.is_dir():
        raise ParameterError(f"`folder` must be a folder; got {str(folder)!r}.")
    candidates = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    for path in candidates:
        if not os.path.lexists(path / CONFIG):
            continue
        row: dict[str, Any] = {"run": path.name, "folder": str(path)}
        try:
            config = read_config(path)
            done = (path / METRICS).exists()
            result = read_metrics(path) if done else {}
            row |= {
                "data": config.data.get("name", "?"),
                "attention": config.settings.model.attention,
                "seed": config.settings.train.seed,
                "finished": done,
                "metrics": result.get("metrics", {}),
                "split": result.get("split", ""),
            }
        except (CoulombError, OSError) as error:
            row["problem"] = str(error)
        found.append(row)
    return found


class Checkpoint(NamedTuple):
    """Tensors, and the plain facts that go with them."""

    tensors: dict[str, "Tensor"]
    facts: dict[str, Any]


class Store:
    """What training must not lose: in the folder of a run, or in memory.

    Without a folder it holds the best weights and the history, and cannot be resumed.
    Of several processes only the first writes.
    """

    def __init__(
        self, folder: Path | None = None, weights: str = WEIGHTS, *, writes: bool = True
    ) -> None:
        self.folder, self._weights, self.writes = folder, weights, writes
        self._records: list[dict[str, Any]] = []
        self._best: dict[str, Tensor] = {}

    @property
    def particles(self) -> Path | None:
        """The file of Phase A; None if it is not kept."""
        return None if self.folder is None else self.folder / PARTICLES

    def load(self) -> Checkpoint | None:
        """Give the last checkpoint."""
        if self.folder is None or not (self.folder / CHECKPOINT).exists():
            return None
        return Checkpoint(*read_tensors(self.folder / CHECKPOINT))

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint."""
        if self.folder is not None and self.writes:
            write_archive(self.folder / CHECKPOINT, *checkpoint)

    def record(self, record: Mapping[str, Any]) -> None:
        """Add to the history; in a folder one line, flushed to the disk."""
        if self.folder is None:
            self._records.append(dict(record))
            return
        if self.writes:
            line = json.dumps(dict(record), allow_nan=False) + "\n"
            archive.append_lines(self.folder / HISTORY, line)

    def forget_after(self, step: int, aligned: int) -> None:
        """Drop the records that an interrupted run will write again."""
        if self.folder is None or not self.writes:
            return
        limits = {"A": aligned, "B": step}
        text = "".join(
            json.dumps(record) + "\n"
            for record in self.history()
            if record["step"] <= limits.get(record["phase"], -1)
        )
        archive.write_bytes(self.folder / HISTORY, text.encode())

    def keep(self, weights: "Mapping[str, Tensor]") -> None:
        """Replace the best weights."""
        if self.folder is None:
            self._best = dict(weights)
        elif self.writes:
            write_archive(self.folder / self._weights, weights, {})

    def best(self) -> "dict[str, Tensor]":
        """Give the best weights."""
        if self.folder is None:
            return self._best
        return read_tensors(self.folder / self._weights)[0]

    def history(self) -> list[dict[str, Any]]:
        """Give all records."""
        if self.folder is None:
            return self._records
        return read_history(self.folder / HISTORY)


def describe_environment() -> dict[str, Any]:
    """Tell what a run was computed with."""
    import platform
    from importlib.metadata import version

    import torch

    from coulomb._version import __version__
    from coulomb.attention.ops import tuning

    packages = ("torch", "numpy", "scikit-learn", "tokenizers", "safetensors", "numba")
    return {
        "coulomb": __version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "attention_model": tuning.identity(),
        **{name: version(name) for name in packages},
    }
