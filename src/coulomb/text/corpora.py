"""Texts with labels, in splits that are checked against one another."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coulomb._support.checks import check_real
from coulomb._support.errors import ParameterError, unknown_name
from coulomb.text._rows import (
    Rows,
    Text,
    checked_rows,
    count_empty,
    find_classes,
    is_tagging,
    number_labels,
)
from coulomb.text.files import read_columns


@dataclass(frozen=True, eq=False)
class Split:
    """Some texts and the numbers of their classes.

    Parameters
    ----------
    texts
        Strings; pairs of strings; or, for tagging, tuples of words.
    labels
        A class per text, or a tuple of classes, one per word; None if not known.
    """

    texts: Sequence[Text]
    labels: Sequence[Any] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Sequence[int]) -> "Split":
        """Pick rows.

        Parameters
        ----------
        rows
            Their numbers.

        Returns
        -------
        Split
            In the order asked for.
        """
        labels = None if self.labels is None else [self.labels[i] for i in rows]
        return Split([self.texts[i] for i in rows], labels)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A data set: named splits over the same classes.

    Parameters
    ----------
    name
        What it is called.
    kind
        "sequence" for one label per text, "token" for one per word.
    classes
        What the numbers of classes stand for.
    splits
        "train", "validation" and maybe others.
    reported_on
        The split that metrics are reported on.
    notes
        What a reader of the metrics must know.
    """

    name: str
    kind: str
    classes: tuple[Any, ...]
    splits: Mapping[str, Split]
    reported_on: str = "validation"
    notes: tuple[str, ...] = ()

    def split(self, name: str) -> Split:
        """Give a split by name.

        Parameters
        ----------
        name
            Of the split.

        Returns
        -------
        Split
            The texts and labels.
        """
        if name not in self.splits:
            raise unknown_name("split", name, self.splits)
        return self.splits[name]

    def fingerprint(self) -> str:
        """Hash the training and validation texts with their labels.

        Returns
        -------
        str
            64 hexadecimal digits.
        """
        digest = hashlib.sha256(json.dumps([str(c) for c in self.classes]).encode())
        for name in ("train", "validation"):
            part = self.splits[name]
            assert part.labels is not None
            for text, label in zip(part.texts, part.labels, strict=True):
                row = json.dumps([text, label], ensure_ascii=True)
                digest.update(row.encode() + b"\n")
        return digest.hexdigest()


def build_corpus(
    name: str,
    train: Rows,
    *,
    validation: Rows | None = None,
    test: Rows | None = None,
    validation_share: float = 0.1,
    seed: int = 0,
) -> Corpus:
    """Check texts and labels, and split them.

    Parameters
    ----------
    name
        What the corpus is called.
    train
        Texts and labels. A text is a string, a pair of strings or, if labels are
        sequences, a sequence of words.
    validation, test
        Others; without `validation` a share of the training rows is kept back.
    validation_share
        That share, of every class alike.
    seed
        Of the choice.

    Returns
    -------
    Corpus
        Metrics are reported on the test split, or else on validation.

    Examples
    --------
    >>> rows = ["good", "bad", "fine", "poor"], ["+", "-", "+", "-"]
    >>> build_corpus("tiny", rows, validation_share=0.5).classes
    ('+', '-')
    """
    parts = {"train": train, "validation": validation, "test": test}
    given = {part: checked_rows(part, rows) for part, rows in parts.items() if rows}
    kind = "token" if is_tagging(given["train"][1]) else "sequence"
    classes = find_classes(given["train"][1], kind)
    splits = {
        part: Split(texts, number_labels(part, labels, classes, kind))
        for part, (texts, labels) in given.items()
    }
    notes: tuple[str, ...] = ()
    for part, split in splits.items():
        empty = count_empty(split.texts)
        if empty:
            notes += (f"{empty} of {len(split)} texts of {part!r} are empty; kept.",)
    if "validation" not in splits:
        splits |= keep_back(splits["train"], kind, validation_share, seed)
        notes += (f"Validation is {validation_share:g} of the training rows.",)
    reported = "test" if "test" in splits else "validation"
    if reported == "validation":
        notes += (SAME_SPLIT,)
    return Corpus(name, kind, classes, splits, reported, notes)


SAME_SPLIT = (
    "Metrics are on the validation split, which also chose the checkpoint: they are "
    "somewhat too good."
)


def read_corpus(
    train: str | Path,
    *,
    text: Sequence[str],
    label: str,
    validation: str | Path | None = None,
    test: str | Path | None = None,
    validation_share: float = 0.1,
    seed: int = 0,
) -> Corpus:
    """Read a corpus from CSV, TSV, JSON-lines or Parquet files.

    Parameters
    ----------
    train
        The file of training rows.
    text
        One column of texts, or two for pairs. A column of lists of words makes it a
        tagging corpus; labels are then lists too.
    label
        The column of labels.
    validation, test
        Files with the same columns.
    validation_share, seed
        As in `build_corpus`.

    Returns
    -------
    Corpus
        Named after the file.
    """
    if not 1 <= len(text) <= 2:
        raise ParameterError(
            f"`text` must name one column, or two for pairs; got {len(text)}."
        )
    paths = {"train": train, "validation": validation, "test": test}
    parts: dict[str, Rows | None] = {}
    for part, path in paths.items():
        if path is None:
            parts[part] = None
            continue
        columns = read_columns(Path(path), [*text, label])
        texts = [columns[name] for name in text]
        joined = texts[0] if len(text) == 1 else list(zip(*texts, strict=True))
        parts[part] = joined, columns[label]
    rows = parts["train"]
    assert rows is not None
    return build_corpus(
        Path(train).stem,
        rows,
        validation=parts["validation"],
        test=parts["test"],
        validation_share=validation_share,
        seed=seed,
    )


def numbered_split(name: str, rows: Rows, classes: tuple[Any, ...]) -> Split:
    """Check rows against classes that are known."""
    texts, labels = checked_rows(name, rows)
    kind = "token" if is_tagging(labels) else "sequence"
    if not set(map(type, classes)) & {str}:
        by_look = {str(label): label for label in classes}
        labels = [by_look.get(x, x) if isinstance(x, str) else x for x in labels]
    return Split(texts, number_labels(name, labels, classes, kind))


def keep_back(part: Split, kind: str, share: float, seed: int) -> dict[str, Split]:
    """Keep a share of the rows back for validation, of every class alike."""
    check_real("validation_share", share, above=0, below=1)
    rng = np.random.default_rng([seed, 0x5EED])
    kept: list[int] = []
    assert part.labels is not None
    if kind == "token":
        groups = [np.arange(len(part))]
    else:
        labels = np.asarray(part.labels)
        groups = [np.flatnonzero(labels == number) for number in np.unique(labels)]
    for rows in groups:
        count = min(round(share * len(rows)), len(rows) - 1)
        kept += rng.permutation(rows)[:count].tolist()
    if not kept:
        raise ParameterError(
            f"`validation_share` must keep at least one row back; got {share:g} of "
            f"{len(part)} rows. Give more rows, a larger share or a validation file."
        )
    rest = sorted(set(range(len(part))) - set(kept))
    return {"train": part.take(rest), "validation": part.take(sorted(kept))}


def without_validation(corpus: Corpus, share: float, seed: int) -> Corpus:
    """Choose the checkpoint on a share of the training rows, not on "validation"."""
    splits = dict(corpus.splits) | keep_back(
        corpus.splits["train"], corpus.kind, share, seed
    )
    splits["test"] = corpus.splits["validation"]
    notes = tuple(note for note in corpus.notes if note != SAME_SPLIT)
    notes += (f"The checkpoint is chosen on {share:g} of the training rows.",)
    return replace(corpus, splits=splits, reported_on="test", notes=notes)
