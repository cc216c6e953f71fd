"""Progress bars that are silent where nobody watches."""

import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coulomb._support.ranks import launched_rank

Advance = Callable[..., None]


def visible_text(text: object) -> str:
    r"""Show what a terminal would act on: control characters and lone surrogates.

    Examples
    --------
    >>> visible_text("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return "".join(
        sign
        if sign == "\n" or unicodedata.category(sign) not in ("Cc", "Cs")
        else sign.encode("unicode_escape").decode()
        for sign in str(text)
    )


@contextmanager
def progress_bar(
    description: str, total: int, *, visible: bool | None = None
) -> Iterator[Advance]:
    """Show a bar on standard error while the block runs.

    Examples
    --------
    >>> with progress_bar("counting", 3, visible=False) as advance:
    ...     for _ in range(3):
    ...         advance()
    """
    if visible is None:
        visible = sys.stderr.isatty() and not launched_rank()
    if not visible:
        yield lambda count=1, note="": None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(visible_text(description), total=total, note="")

        def advance(count: int = 1, note: str = "") -> None:
            progress.update(task, advance=count, note=visible_text(note))

        yield advance
