"""Public data sets by name, from a folder of Parquet files or from the hub."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coulomb._support.checks import check_member, packaged
from coulomb._support.errors import CoulombError, ParameterError
from coulomb.text.data import (
    SAME_SPLIT,
    Corpus,
    Split,
    check_texts,
    keep_back,
    read_corpus,
)
from coulomb.text.files import join_columns, read_columns

_SHARE = 0.1  # of the training rows, for a task without a validation split


@dataclass(frozen=True)
class Task:
    """Where a public data set is and how it is read."""

    columns: tuple[str, ...]
    classes: tuple[str, ...]
    hub: tuple[str, ...] = ()  # none if it is read from a folder only
    reported_on: str = "test"
    label: str = "label"
    kind: str = "sequence"
    english: bool = True
    subset: str = ""  # the folder of a part of it, if the whole is not there


def _read_tasks() -> dict[str, Task]:
    known = packaged("coulomb.text", "tasks.toml")
    for task in known.values():
        task |= {name: tuple(x) for name, x in task.items() if isinstance(x, list)}
    return {name: Task(**task) for name, task in known.items()}


TASKS = _read_tasks()
_FILE_KEYS = ("train", "validation", "test", "text", "label", "sep", "encoding")
# Splits by the names they have in files; "test_labeled" is not GLUE's.
_SPLITS = ("train", "validation", "test", "test_labeled")


def data_folder(folder: str | Path | None) -> Path | None:
    """Find the folder of data sets."""
    named = folder or os.environ.get("COULOMB_DATA")
    if not named:
        return None
    path = Path(named)
    if not path.is_dir():
        raise ParameterError(
            f"`data_dir` must be a folder; got {str(path)!r}, which is none."
        )
    return path


def load_task(
    name: str,
    folder: str | Path | None = None,
    *,
    validation_share: float | None = None,
    seed: int = 0,
) -> Corpus:
    """Load a public data set.

    Parameters
    ----------
    name
        One of `TASKS`.
    folder
        A folder with a sub-folder of Parquet files per data set; None for COULOMB_DATA,
        or else for the Hugging Face hub, which needs the extra `hf`.
    validation_share
        Choose the checkpoint on this share of the training rows instead of the
        validation split. A task without a validation split always does, with 0.1.
    seed
        Of the choice of those rows.

    Returns
    -------
    Corpus
        Its notes say what a reader of the metrics must know.
    """
    check_member("task", name, TASKS)
    task = TASKS[name]
    where, share = data_folder(folder), validation_share
    notes: tuple[str, ...] = ()
    if where is None:
        parts = _from_hub(name, task)
    else:
        parts, notes = _from_folder(name, task, where)
    # GLUE writes -1 for labels it keeps to itself.
    known = {
        part: rows
        for part, rows in parts.items()
        if rows.labels is not None and (task.kind == "token" or min(rows.labels) >= 0)
    }
    reported = task.reported_on
    if "train" not in known or (reported == "test" and "test" not in known):
        raise ParameterError(
            f"`data_dir` must hold the splits 'train' and {reported!r} of {name}; "
            f"got {', '.join(parts) or 'none'}."
        )
    if reported == "validation" and "test" in parts and "test" not in known:
        notes += ("The labels of the test split are not public.",)
    if "validation" not in known:
        share = share or _SHARE
        known |= keep_back(known["train"], task.kind, share, seed)
        notes += (f"Validation is {share:g} of the training rows.",)
    elif share is not None and reported == "validation":
        known["test"], reported = known["validation"], "test"
        known |= keep_back(known["train"], task.kind, share, seed)
        notes += (f"The checkpoint is chosen on {share:g} of the training rows.",)
    elif share is not None:
        raise ParameterError(
            f"`validation_share` must be None for {name}, which has a validation split "
            f"that no metric is reported on; got {share:g}."
        )
    if reported == "validation":
        notes += (SAME_SPLIT,)
    return Corpus(name, task.kind, task.classes, known, reported, notes)


def _from_folder(
    name: str, task: Task, where: Path
) -> tuple[dict[str, Split], tuple[str, ...]]:
    """Read the files of a task, or of a subset of it, which a note tells."""
    found = [
        folder
        for folder in (name, task.subset)
        if folder and (where / folder / "train.parquet").is_file()
    ]
    if not found:
        elsewhere = " Without `data_dir` it is loaded from the Hugging Face hub."
        raise ParameterError(
            f"`data_dir` must hold {name}/train.parquet for the task {name!r}; "
            f"{str(where)!r} does not.{elsewhere if task.hub else ''}"
        )
    files = {part: where / found[0] / f"{part}.parquet" for part in _SPLITS}
    columns = [*task.columns, task.label]
    parts = {
        part: _split(task, read_columns(path, columns))
        for part, path in files.items()
        if path.is_file()
    }
    if found[0] == name:
        return parts, ()
    return parts, (
        f"This is a subset ({found[0]}), not the full {name}: do not compare with "
        "published numbers.",
    )


def _split(task: Task, table: Mapping[str, Sequence[Any]]) -> Split:
    texts, labels = join_columns(table, task.columns), table[task.label]
    tagged = task.kind == "token"
    highest = len(task.classes) - 1
    plain: list[Any] = [tuple(x) if tagged else int(x) for x in labels]
    largest = max(max(x, default=0) if tagged else x for x in plain)
    if largest > highest:
        raise ParameterError(
            f"`{task.label}` must be at most {highest}; got {largest}. Is this another "
            "data set?"
        )
    return Split(check_texts(texts, tagged=tagged), plain)


def _from_hub(name: str, task: Task) -> dict[str, Split]:
    if not task.hub:
        raise ParameterError(
            f"`data_dir` must hold {name}/train.parquet for the task "
            f"{name!r}, which is not loaded from the hub."
        )
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ParameterError(
            f"`data_dir` is needed for the task {name!r}, or the extra that loads it "
            "from the hub: pip install 'coulomb[hf]'."
        ) from error
    try:
        loaded = load_dataset(*task.hub)
    except Exception as error:  # the hub's client raises errors of many libraries
        raise CoulombError(
            f"The Hugging Face hub did not give {'/'.join(task.hub)}: {error}. Pass "
            "`data_dir`, or try again."
        ) from error
    columns = [*task.columns, task.label]
    return {
        part: _split(task, {name: list(loaded[part][name]) for name in columns})
        for part in _SPLITS
        if part in loaded
    }


def load_data(data: Mapping[str, Any], *, strict: bool = False) -> Corpus:
    """Load the corpus that a run's configuration describes.

    Parameters
    ----------
    data
        "task", with "data_dir", or "train", "validation", "test", "text" and "label";
        "validation_share", "sep", "encoding" and "target".
    strict
        Refuse rows of files without a text or a label.

    Returns
    -------
    Corpus
        The same for the same files.
    """
    keys = {
        "name",
        "pairs",
        "task",
        "data_dir",
        *_FILE_KEYS,
        "validation_share",
        "strict",
        "target",
    }
    odd = set(data) - keys
    if odd:
        raise ParameterError(
            f"`data` must have the keys {', '.join(sorted(keys))} only; got "
            f"{', '.join(sorted(odd))}."
        )
    share = data.get("validation_share")
    if data.get("task"):
        if data.get("target") == "number":
            raise ParameterError(
                f"`target` must be classes for the task {data['task']}; got number."
            )
        folder = data.get("data_dir")
        return load_task(data["task"], folder, validation_share=share)
    if not data.get("train"):
        raise ParameterError(
            "`run` has no data of its own: it was trained on data in memory. Pass it "
            "in Python as `corpus`, or name a file."
        )
    options: dict[str, Any] = {name: data.get(name) for name in _FILE_KEYS}
    options["target"] = data.get("target") or "classes"
    share = _SHARE if share is None else share
    return read_corpus(**options, validation_share=share, strict=strict)
