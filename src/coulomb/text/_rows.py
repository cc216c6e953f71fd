"""Checks of texts and labels as they come, row by row."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coulomb._support.errors import ParameterError, ParameterTypeError

Text = str | tuple[str, ...]
Rows = tuple[Sequence[Any], Sequence[Any]]


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
    tagged = is_tagging(labels)
    checked = [
        check_text(text, row, tagged=tagged) for row, text in enumerate(texts, start=1)
    ]
    plain = [plain_label(label, row) for row, label in enumerate(labels, start=1)]
    if tagged:
        for row, (words, tags) in enumerate(zip(checked, plain, strict=True), start=1):
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
        return str(text)
    if isinstance(text, list | tuple | np.ndarray):
        parts = tuple(text)
        if all(isinstance(x, str) for x in parts) and (tagged or len(parts) == 2):
            return tuple(str(x) for x in parts)
    wanted = "a list of words" if tagged else "a string, or a pair of strings"
    shown = repr(text) if len(repr(text)) < 60 else repr(text)[:57] + "..."
    raise ParameterTypeError(f"Row {row}: a text must be {wanted}; got {shown}.")


def plain_label(label: Any, row: int) -> Any:
    """Turn a label into plain data, or say that it is missing."""
    if isinstance(label, list | tuple | np.ndarray):
        return tuple(plain_label(part, row) for part in label)
    if isinstance(label, np.generic):
        label = label.item()
    if label is None or label == "" or label != label:
        raise ParameterError(
            f"Row {row}: the label is missing. Fill it in, or drop the row."
        )
    return label


def is_tagging(labels: Sequence[Any]) -> bool:
    """Tell whether labels are of words."""
    return bool(len(labels)) and isinstance(labels[0], list | tuple | np.ndarray)


def find_classes(labels: Sequence[Any], kind: str) -> tuple[Any, ...]:
    """Collect the classes that occur."""
    found = {part for tags in labels for part in tags} if kind == "token" else {*labels}
    # Of one type they have an order; mixed ones are sorted by what they look like.
    one_type = len({type(label) for label in found}) == 1
    classes = sorted(found) if one_type else sorted(found, key=str)
    if len(classes) < 2:
        raise ParameterError(
            f"`label` must have at least two classes; got only {classes[0]!r}. A "
            "classifier needs something to tell apart."
            if classes
            else "`label` must have at least two classes; got no labels."
        )
    return tuple(classes)


def number_labels(
    part: str, labels: Sequence[Any], classes: tuple[Any, ...], kind: str
) -> list[Any]:
    """Give labels the numbers of their classes."""
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

    if kind == "token":
        return [
            tuple(number(tag, row) for tag in tags)
            for row, tags in enumerate(labels, start=1)
        ]
    return [number(label, row) for row, label in enumerate(labels, start=1)]


def count_empty(texts: Sequence[Text]) -> int:
    """Count the texts without a word.

    Examples
    --------
    >>> count_empty(["a", " ", ("", "b")])
    1
    """
    return sum(
        not any(part.strip() for part in ((text,) if isinstance(text, str) else text))
        for text in texts
    )
