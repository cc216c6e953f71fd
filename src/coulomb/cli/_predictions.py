"""Texts in, predictions out, a few thousand at a time."""

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from coulomb._support.archive import write_whole
from coulomb._support.errors import FileFormatError, ParameterError, unknown_name

if TYPE_CHECKING:
    from coulomb.text.predictor import Predictor

_AT_ONCE = 4096
_FORMATS = ("csv", "jsonl")


def read_texts(
    given: Sequence[str] | None, file: Path | None, columns: Sequence[str], kind: str
) -> Iterator[list[Any]]:
    """Go through the texts to predict, in lists."""
    from coulomb.text.files import read_columns

    if file is not None and file.suffix.lower() != ".txt":
        if not columns:
            raise ParameterError(f"Name the column of {file}: `--text COLUMN`.")
        table = read_columns(file, columns)
        parts = [table[name] for name in columns]
        rows: Iterable[Any] = parts[0] if len(parts) == 1 else zip(*parts, strict=True)
        yield from _in_lists(rows)
        return
    lines: Iterable[str] = given or _lines(file)
    yield from _in_lists(_parsed(line, len(columns), kind) for line in lines)


def _lines(file: Path | None) -> Iterator[str]:
    name = "Standard input" if file is None else str(file)
    stream = sys.stdin.buffer if file is None else file.open("rb")
    with stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise FileFormatError(
                    f"{name} is not UTF-8: byte 0x{line[error.start]:02x} in line "
                    f"{number}."
                ) from error


def _parsed(line: str, n_columns: int, kind: str) -> Any:
    if kind == "token":
        return tuple(line.split())
    if n_columns < 2:
        return line
    parts = line.split("\t")
    if len(parts) != 2:
        raise ParameterError(
            f"A pair must be two texts separated by a tab; got {line[:60]!r}."
        )
    return tuple(parts)


def _in_lists(rows: Iterable[Any]) -> Iterator[list[Any]]:
    items = iter(rows)
    while some := list(islice(items, _AT_ONCE)):
        yield some


def write_predictions(
    predictor: "Predictor", chunks: Iterable[list[Any]], form: str, out: Path | None
) -> None:
    """Predict and write, to standard output or to a file that is whole or not there."""
    if form not in _FORMATS:
        raise unknown_name("format", form, _FORMATS)
    lines = _lines_of(predictor, chunks, form)
    if out is None:
        for line in lines:
            typer.echo(line, nl=False)
        return

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8", newline="") as file:
            file.writelines(lines)

    write_whole(out, write)


def _lines_of(
    predictor: "Predictor", chunks: Iterable[list[Any]], form: str
) -> Iterator[str]:
    tagging = predictor.config.kind == "token"
    classes = [str(label) for label in predictor.classes]
    if form == "csv":
        extra = [] if tagging else [f"p_{label}" for label in classes]
        yield _csv_line(["text", "prediction", *extra])
    for texts in chunks:
        if tagging:
            for words, tags in zip(texts, predictor.tag(texts), strict=True):
                yield _row(form, list(words), tags, None, classes)
            continue
        probabilities = predictor.predict_proba(texts)
        for text, row in zip(texts, probabilities.tolist(), strict=True):
            best = predictor.classes[row.index(max(row))]
            yield _row(form, text, best, row, classes)


def _row(
    form: str, text: Any, best: Any, row: list[float] | None, classes: list[str]
) -> str:
    if form == "jsonl":
        content = {"text": text, "prediction": best}
        if row is not None:
            content["probabilities"] = dict(zip(classes, row, strict=True))
        return json.dumps(content, ensure_ascii=False) + "\n"
    shown = text if isinstance(text, str) else ("\t" if row else " ").join(text)
    answer = " ".join(map(str, best)) if isinstance(best, list) else best
    return _csv_line([shown, answer, *(f"{p:.6f}" for p in row or ())])


def _csv_line(cells: Sequence[Any]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()
