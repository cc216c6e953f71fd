"""What verbs share: options, tables, JSON files, lists typed with commas between."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from coulomb._support.errors import FileFormatError, Interrupted, ParameterError
from coulomb._support.progress import visible_text
from coulomb._support.ranks import LostProcessError, launched_rank

Seed = Annotated[int, Option(min=0, help="Seed of everything drawn.")]
Json = Annotated[Path | None, Option("--json", help="Write all numbers to this file.")]
# A cell is words, or words with a style such as "bold".
Cell = str | tuple[str, str]


def print_table(
    title: str,
    headers: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    words: int = 1,
    caption: str | None = None,
    lines: bool = False,
    width: int = 110,
) -> None:
    """Print a table whose first columns are words and whose others are numbers.

    Cells are shown as they are: nothing in them is read as markup. Where nobody
    watches, the table is `width` wide.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if launched_rank():
        return
    table = Table(title=Text(visible_text(title)), caption=caption, show_lines=lines)
    for number, header in enumerate(headers):
        justify: Any = "left" if number < words else "right"
        table.add_column(Text(visible_text(header)), justify=justify, overflow="fold")
    for row in rows:
        cells = [(cell, "") if isinstance(cell, str) else cell for cell in row]
        table.add_row(*(Text(visible_text(shown), style) for shown, style in cells))
    Console(width=None if Console().is_terminal else width).print(table)


def check_outputs(*files: Path | None, folder: Path | None = None) -> None:
    """Refuse files, and a folder, that cannot be written, before any work is done."""
    from coulomb._support.archive import check_output

    for file in files:
        check_output(file)
    check_output(folder, folder=True)


def say(text: object, *, err: bool = False) -> None:
    """Print a line, with nothing in it that a terminal would act on.

    Of the processes of one run only the first does.
    """
    if not launched_rank():
        typer.echo(visible_text(text), err=err)


@contextmanager
def resumable(advice: str, needed: Path | None = None) -> Iterator[None]:
    """Say what to do if a signal ends what is inside, once there is what is needed."""
    try:
        yield
    except Interrupted as stopped:
        if needed is None or needed.exists():
            stopped.advice = f" {advice}"
        raise
    except LostProcessError as lost:
        raise LostProcessError(f"{lost} {advice}") from lost


def write_numbers(path: Path | None, content: Any) -> None:
    """Write JSON to the file of `--json`, if there is one, and say so."""
    if path is None:
        return
    from coulomb._support.archive import write_json

    write_json(path, content)
    say(f"Numbers: {path}")


def read_lines(file: Path | None) -> Iterator[str]:
    """Go through the lines of a text file, or of standard input."""
    from coulomb._support.archive import check_file

    name = "Standard input" if file is None else str(file)
    stream = sys.stdin.buffer if file is None else check_file(file).open("rb")
    with stream:
        # Four bytes for each character that a text may have.
        for number, line in enumerate(iter(lambda: stream.readline(2**24), b""), 1):
            if len(line) == 2**24:
                raise FileFormatError(f"{name}: line {number} has 16 MiB or more.")
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise FileFormatError(
                    f"{name} is not a text file in UTF-8: byte "
                    f"0x{line[error.start]:02x} in line {number}."
                ) from error


def whole_numbers(name: str, text: str) -> list[int]:
    """Read whole numbers with commas between.

    Examples
    --------
    >>> whole_numbers("counts", "8,16")
    [8, 16]
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ParameterError(
            f"`{name}` must be whole numbers with commas between; got {text!r}."
        ) from error
