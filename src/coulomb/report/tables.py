"""Tables: cells that know their value, for sorting, marking the best and CSV."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from coulomb._support.archive import csv_text


@dataclass(frozen=True)
class Cell:
    """One entry."""

    text: str
    value: float | None = None
    best: bool = False
    detail: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Column:
    """One column."""

    header: str
    numeric: bool = True
    better: int = 0
    wide: bool = False


Header = Column | str


@dataclass(frozen=True)
class Table:
    """A caption, columns and rows; the first column names the row."""

    key: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    @property
    def csv(self) -> str:
        """The table as comma-separated values, with full precision."""
        headers = [column.header for column in self.columns]
        return csv_text(headers, ([_saved(cell) for cell in row] for row in self.rows))


def number(value: float | None, *, digits: int = 3, detail: str = "") -> Cell:
    """Make a cell of a number.

    Examples
    --------
    >>> number(0.71234).text, number(12345.6).text, number(None).text
    ('0.712', '12,346', '–')
    """
    if value is None or not math.isfinite(value):
        return Cell("–")
    return Cell(show(value, digits), float(value), detail=detail)


def show(value: float, digits: int = 3) -> str:
    """Write a number with as many digits as a reader wants.

    Examples
    --------
    >>> show(0.5), show(2000), show(0.00001234), show(4.49e7)
    ('0.500', '2,000', '1.23e-05', '4.49e+07')
    """
    size = abs(value)
    if size != 0 and (size < 10.0**-digits or size >= 1e6):
        return f"{value:.2e}"
    if size >= 1000 or (float(value).is_integer() and size >= 10):
        return f"{value:,.0f}"
    return f"{value:.{max(0, digits - (2 if size >= 100 else 0))}f}"


def tabulate(
    key: str,
    caption: str,
    columns: Iterable[Header],
    rows: Iterable[Iterable[Any]],
    note: str = "",
) -> Table:
    """Make a table; a header alone is a column of words, a bare entry its cell.

    Examples
    --------
    >>> table = tabulate("k", "c", ["method", Column("n")], [("a", 3), ("b", 0.5)])
    >>> [[cell.text for cell in row] for row in table.rows]
    [['a', '3'], ['b', '0.500']]
    """
    made = (Column(c, numeric=False) if isinstance(c, str) else c for c in columns)
    cells = tuple(tuple(_cell(entry) for entry in row) for row in rows)
    return Table(key, caption, tuple(made), cells, note)


def _cell(entry: Cell | str | float | None) -> Cell:
    if isinstance(entry, Cell):
        return entry
    if isinstance(entry, str):
        return Cell(entry)
    return number(entry, digits=0 if isinstance(entry, int) else 3)


def mark_best(table: Table) -> Table:
    """Mark the best value of every column where better is defined.

    Values that round to the same text as the best are marked too: the table does not
    tell them apart.

    Examples
    --------
    >>> columns = ("method", Column("accuracy", better=1))
    >>> table = tabulate("k", "c", columns, [("a", 0.7), ("b", 0.8)])
    >>> [row[1].best for row in mark_best(table).rows]
    [False, True]
    """
    rows = [list(row) for row in table.rows]
    for place, column in enumerate(table.columns):
        known = {
            i: v for i, row in enumerate(rows) if (v := row[place].value) is not None
        }
        if not column.better or len(known) < 2:
            continue
        best = rows[max(known, key=lambda i: column.better * known[i])][place].text
        for i in known:
            if rows[i][place].text == best:
                rows[i][place] = replace(rows[i][place], best=True)
    return replace(table, rows=tuple(tuple(row) for row in rows))


def _saved(cell: Cell) -> str | float:
    words = "" if cell.text == "–" else cell.text
    return words if cell.value is None else cell.value
