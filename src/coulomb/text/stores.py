"""Where a training run keeps what it must not lose: nowhere, or in a folder."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from coulomb._support.archive import write_archive
from coulomb.text.runs import (
    CHECKPOINT,
    HISTORY,
    PARTICLES,
    WEIGHTS,
    append_record,
    keep_records,
    read_history,
    read_tensors,
)


class Checkpoint(NamedTuple):
    """Tensors, and the plain facts that go with them."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class AbstractStore(ABC):
    """What training writes to while it runs."""

    @property
    @abstractmethod
    def particles(self) -> Path | None:
        """The file of Phase A; None if it is not kept."""

    @abstractmethod
    def load(self) -> Checkpoint | None:
        """Give the last checkpoint."""

    @abstractmethod
    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint."""

    @abstractmethod
    def record(self, record: Mapping[str, Any]) -> None:
        """Add to the history."""

    @abstractmethod
    def forget_after(self, step: int, aligned: int) -> None:
        """Drop records that will be written again."""

    @abstractmethod
    def keep(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the best weights."""

    @abstractmethod
    def best(self) -> dict[str, Tensor]:
        """Give the best weights."""

    @abstractmethod
    def history(self) -> list[dict[str, Any]]:
        """Give all records."""


class MemoryStore(AbstractStore):
    """Keeps the best weights and the history, and cannot be resumed."""

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []
        self._best: dict[str, Tensor] = {}

    @property
    def particles(self) -> None:
        return None

    def load(self) -> None:
        return None

    def save(self, checkpoint: Checkpoint) -> None:
        pass

    def record(self, record: Mapping[str, Any]) -> None:
        self._records.append(dict(record))

    def forget_after(self, step: int, aligned: int) -> None:
        pass

    def keep(self, weights: Mapping[str, Tensor]) -> None:
        self._best = dict(weights)

    def best(self) -> dict[str, Tensor]:
        return self._best

    def history(self) -> list[dict[str, Any]]:
        return self._records


class FolderStore(AbstractStore):
    """Keeps everything in the folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def particles(self) -> Path:
        return self.folder / PARTICLES

    def load(self) -> Checkpoint | None:
        path = self.folder / CHECKPOINT
        return Checkpoint(*read_tensors(path)) if path.exists() else None

    def save(self, checkpoint: Checkpoint) -> None:
        write_archive(self.folder / CHECKPOINT, *checkpoint)

    def record(self, record: Mapping[str, Any]) -> None:
        append_record(self.folder / HISTORY, record)

    def forget_after(self, step: int, aligned: int) -> None:
        limits = {"A": aligned, "B": step}
        keep_records(
            self.folder / HISTORY,
            lambda record: record["step"] <= limits.get(record["phase"], -1),
        )

    def keep(self, weights: Mapping[str, Tensor]) -> None:
        write_archive(self.folder / WEIGHTS, weights, {})

    def best(self) -> dict[str, Tensor]:
        return read_tensors(self.folder / WEIGHTS)[0]

    def history(self) -> list[dict[str, Any]]:
        return read_history(self.folder / HISTORY)
