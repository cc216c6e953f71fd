"""Texts with labels, checked row by row and split."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from coulomb._support.checks import check_labels, check_member, check_memory, check_real
from coulomb._support.errors import ParameterError, ParameterTypeError, shown
from coulomb.text.files import Form, read_rows

Text = str | tuple[str, ...]
Rows = tuple[Sequence[Any], Sequence[Any]]
_LONGEST_TEXT = 2**22
_LARGEST = 1e15  # of a quantity
SAME_SPLIT = (
    "Metrics are on the validation split, which also chose the checkpoint: they are "
    "somewhat too good."
)


@dataclass(frozen=True, eq=False)
class Split:
    """Some texts and the numbers of their classes.

    Parameters
    ----------
    texts
        Strings; pairs of strings; or, for tagging, tuples of words.
    labels
        A class or a quantity per text, or a tuple of classes, one per word; None if not
        known.
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
        "sequence" for one class per text, "token" for one per word, "number" for one
        quantity per text.
    classes
        What the numbers of classes stand for; none for quantities.
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

    @property
    def pairs(self) -> bool:
        """Whether texts are pairs."""
        first = self.splits["train"].texts[0]
        return self.kind != "token" and not isinstance(first, str)

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
        check_member("split", name, self.splits)
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
    target: str = "classes",
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
    target
        Whether labels are "classes", or each a "number".

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
    check_member("target", target, ("classes", "number"))
    parts = {"train": train, "validation": validation, "test": test}
    given = {part: checked_rows(part, rows) for part, rows in parts.items() if rows}
    kind = "number" if target == "number" else kind_of(given["train"][1])
    classes = () if kind == "number" else find_classes(given["train"][1], kind)
    splits = {
        part: Split(texts, number_labels(part, labels, classes, kind))
        for part, (texts, labels) in given.items()
    }
    if kind == "number" and len(set(splits["train"].labels or ())) < 2:
        raise ParameterError(
            "`label` must have at least two different numbers; got only "
            f"{given['train'][1][0]!r}. There is nothing to learn."
        )
    notes: tuple[str, ...] = ()
    for part, split in splits.items():
        empty = sum(not any(map(str.strip, parts_of(text))) for text in split.texts)
        if empty:
            notes += (f"{empty} of {len(split)} texts of {part!r} are empty; kept.",)
    if kind == "sequence":
        counts = Counter(given["train"][1])
        if alone := [label for label in classes if counts[label] == 1]:
            notes += (
                f"{len(alone)} of {len(classes)} classes occur once, such as "
                f"{alone[0]!r}: too rare to be learned and checked.",
            )
    if "validation" not in splits:
        splits |= keep_back(splits["train"], kind, validation_share, seed)
        notes += (f"Validation is {validation_share:g} of the training rows.",)
    reported = "test" if "test" in splits else "validation"
    if reported == "validation":
        notes += (SAME_SPLIT,)
    return Corpus(name, kind, classes, splits, reported, notes)


def read_corpus(
    train: str | Path,
    *,
    text: Sequence[str],
    label: str,
    validation: str | Path | None = None,
    test: str | Path | None = None,
    validation_share: float = 0.1,
    seed: int = 0,
    sep: str | None = None,
    encoding: str | None = None,
    strict: bool = False,
    target: str = "classes",
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
    sep, encoding
        What separates columns, and the encoding, of all files; None finds them out.
    strict
        Refuse rows without a text or a label, which are dropped otherwise.
    target
        As in `build_corpus`.

    Returns
    -------
    Corpus
        Named after the file; its notes say what was found out and dropped.
    """
    if not 1 <= len(text) <= 2:
        raise ParameterError(
            f"`text` must name one column, or two for pairs; got {len(text)}."
        )
    notes: tuple[str, ...] = ()
    parts: dict[str, Any] = {}
    for part, path in (("train", train), ("validation", validation), ("test", test)):
        if path:
            form = Form(sep, encoding)
            *parts[part], told = read_rows(Path(path), text, label, form, strict=strict)
            notes += told
    options: Any = {"validation_share": validation_share, "seed": seed}
    found = build_corpus(Path(train).stem, **parts, target=target, **options)
    return replace(found, notes=notes + found.notes)


def numbered_split(name: str, rows: Rows, classes: tuple[Any, ...]) -> Split:
    """Check rows against classes that are known."""
    texts, labels = checked_rows(name, rows)
    if not set(map(type, classes)) & {str}:
        by_look = {str(label): label for label in classes}
        labels = [by_look.get(x, x) if isinstance(x, str) else x for x in labels]
    kind = kind_of(labels) if classes else "number"
    return Split(texts, number_labels(name, labels, classes, kind))


def keep_back(part: Split, kind: str, share: float, seed: int) -> dict[str, Split]:
    """Keep a share of the rows back for validation, of every class alike."""
    check_real("validation_share", share, above=0, below=1)
    rng = np.random.default_rng([seed, 0x5EED])
    kept: list[int] = []
    assert part.labels is not None
    if kind != "sequence":
        groups = [np.arange(len(part))]
    else:
        labels = np.asarray(part.labels)
        groups = [np.flatnonzero(labels == number) for number in np.unique(labels)]
    for rows in groups:
        count = min(round(share * len(rows)), len(rows) - 1)
        kept += rng.permutation(rows)[:count].tolist()
    if not kept:
        most = max(map(len, groups))
        group = "the largest class" if kind == "sequence" else "the rows"
        larger = f"a share of at least {1 / most:.2g}" if most > 1 else "more rows"
        raise ParameterError(
            f"`validation_share` must keep at least one row of {group} back; got "
            f"{share:g} of {most}. Give {larger} or a validation file."
        )
    rest = sorted(set(range(len(part))) - set(kept))
    return {"train": part.take(rest), "validation": part.take(sorted(kept))}


def checked_rows(part: str, rows: Rows) -> Rows:
    """Check that texts are texts and that each has its label."""
    texts, labels = list(rows[0]), list(rows[1])
    if len(texts) != len(labels):
        raise ParameterError(
            f"`{part}` must have a label for each text; got {len(texts)} texts and "
            f"{len(labels)} labels."
        )
    if not texts:
        raise ParameterError(f"`{part}` must have rows; got none.")
    tagged = kind_of(labels) == "token"
    checked = check_texts(texts, tagged=tagged)
    plain = [plain_label(label, row) for row, label in enumerate(labels, 1)]
    if tagged:
        for row, (words, tags) in enumerate(zip(checked, plain, strict=True), 1):
            if not isinstance(tags, tuple) or len(words) != len(tags):
                raise ParameterError(
                    f"`{part}`, row {row}: a label for each word is needed; got "
                    f"{len(words)} words and the labels {tags!r}."
                )
    return checked, plain


def check_text(text: Any, row: int, *, tagged: bool = False) -> Text:
    """Turn a value into a text, or say what it should have been.

    Examples
    --------
    >>> check_text(["a", "b"], 1)
    ('a', 'b')
    """
    if isinstance(text, str) and not tagged:
        return _check_unicode(text, row)
    if isinstance(text, list | tuple | np.ndarray):
        parts = tuple(text)
        if all(isinstance(x, str) for x in parts) and (tagged or len(parts) == 2):
            return tuple(_check_unicode(x, row) for x in parts)
    wanted = "a list of words" if tagged else "a string, or a pair of strings"
    raise ParameterTypeError(f"Row {row}: a text must be {wanted}; got {shown(text)}.")


def _check_unicode(text: str, row: int) -> str:
    if len(text) > _LONGEST_TEXT:
        raise ParameterError(
            f"Row {row}: a text must have at most {_LONGEST_TEXT:,} characters; got "
            f"{len(text):,}. Cut it, or close its quotes."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(
            f"Row {row}: a text must be valid Unicode; it has the lone surrogate "
            f"{text[error.start]!r}. Write text.encode(errors='replace').decode()."
        ) from None
    return str(text)


def check_texts(texts: Iterable[Any], *, tagged: bool) -> list[Text]:
    """Check all texts, whose rows are counted from one."""
    rows = enumerate(texts, 1)
    checked = [check_text(text, row, tagged=tagged) for row, text in rows]
    check_memory("data", sum(len(part) for text in checked for part in parts_of(text)))
    if checked and not tagged:
        check_pairs(checked, isinstance(checked[0], tuple))
    return checked


def as_list(name: str, values: Any, wanted: str = "texts") -> list[Any]:
    """Refuse one string, or a number, in place of a list."""
    if isinstance(values, str) or not np.iterable(values):
        found = "one string" if isinstance(values, str) else shown(values)
        raise ParameterError(
            f"`{name}` must be a list of {wanted}; got {found}. Put it in a list."
        )
    return list(values)


def check_pairs(texts: Sequence[Text], pairs: bool) -> None:
    """Refuse single texts among pairs, and pairs among single texts."""
    for row, text in enumerate(texts, 1):
        if isinstance(text, str) == pairs:
            wanted, found = ("a pair", "one text") if pairs else ("one text", "a pair")
            raise ParameterError(
                f"Row {row}: {wanted} is needed, as in the other or the training rows; "
                f"got {found}, {shown(text)}."
            )


def plain_label(label: Any, row: int) -> Any:
    """Turn a label into plain data, or say that it is missing."""
    if isinstance(label, list | tuple | np.ndarray):
        return tuple(plain_label(part, row) for part in label)
    if isinstance(label, np.generic):
        label = label.item()
    if not isinstance(label, Hashable):
        raise ParameterTypeError(
            f"Row {row}: a label must be a string or a number; got {label!r:.60}."
        )
    infinite = isinstance(label, float) and not math.isfinite(label)
    if label is None or label == "" or infinite:
        raise ParameterError(
            f"Row {row}: the label is missing. Fill it in, or drop the row."
        )
    return _check_unicode(label, row) if isinstance(label, str) else label


def kind_of(labels: Sequence[Any]) -> str:
    """Tell whether labels are of words, "token", or of whole texts, "sequence"."""
    tags = bool(len(labels)) and isinstance(labels[0], list | tuple | np.ndarray)
    return "token" if tags else "sequence"


def find_classes(labels: Sequence[Any], kind: str) -> tuple[Any, ...]:
    """Collect the classes that occur."""
    every = [part for tags in labels for part in tags] if kind == "token" else labels
    check_labels("label", every, mixed=True)
    found = set(every)
    # Of one type they have an order; mixed ones are sorted by what they look like.
    one_type = len({type(label) for label in found}) == 1
    classes = sorted(found) if one_type else sorted(found, key=str)
    for one, other in pairwise(classes if not one_type else ()):
        if str(one) == str(other):  # answers name classes by what they look like
            raise ParameterError(
                f"`label` must write each class in one way; got {one!r} and {other!r}."
            )
    if kind == "sequence":
        _check_few(classes, len(every))
    if len(classes) < 2:
        raise ParameterError(
            f"`label` must have at least two classes; got only {classes[0]!r}. A "
            "classifier needs something to tell apart."
            if classes
            else "`label` must have at least two classes; got no labels."
        )
    return tuple(classes)


_FEW, _ROWS_OF_A_VALUE = 20, 10  # more values with fewer rows each measure something


def _check_few(classes: Sequence[Any], n_rows: int) -> None:
    """Refuse a quantity, or the names of rows, in place of classes."""
    try:
        whole = all(float(label).is_integer() for label in classes)
        kind, few = "numbers", _ROWS_OF_A_VALUE if whole else math.inf
        advice = (
            "A classifier needs classes; `--target number` learns the numbers, with a "
            "pretrained encoder."
        )
    except (TypeError, ValueError):
        kind, few, advice = "values", 2, "Is it the right column?"
    if len(classes) > _FEW and n_rows < few * len(classes):
        raise ParameterError(
            f"`label` has {len(classes):,} different {kind} in {n_rows:,} rows, such "
            f"as {classes[0]!r} and {classes[-1]!r}. {advice}"
        )


def number_labels(
    part: str, labels: Sequence[Any], classes: tuple[Any, ...], kind: str
) -> list[Any]:
    """Give labels the numbers of their classes, or read them as quantities."""
    if kind == "number":
        return [_quantity(part, label, row) for row, label in enumerate(labels, 1)]
    number_of = {label: number for number, label in enumerate(classes)}

    def number(label: Any, row: int) -> int:
        if label not in number_of:
            known = ", ".join(repr(c) for c in classes[:10])
            raise ParameterError(
                f"`{part}`, row {row}: the label {label!r} does not occur in the "
                f"training rows, which have {known}{'...' if len(classes) > 10 else ''}"
                ". Add such a row to them, or drop this one."
            )
        return number_of[label]

    rows = enumerate(labels, 1)
    if kind == "token":
        return [tuple(number(tag, row) for tag in tags) for row, tags in rows]
    return [number(label, row) for row, label in rows]


def _quantity(part: str, label: Any, row: int) -> float:
    try:
        found = float(label)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if abs(found) < _LARGEST:  # squares are finite, and so are float32
        return found
    raise ParameterError(
        f"`{part}`, row {row}: the label must be a number of at most {_LARGEST:g}; got "
        f"{shown(label)}. Mend it, drop the row, or leave `target` at classes."
    )


def parts_of(text: Text) -> tuple[str, ...]:
    """Give the strings of a text: itself, the two of a pair, or words."""
    return (text,) if isinstance(text, str) else text
