"""Progress bars that are silent where nobody watches."""

import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coulomb._support.ranks import launched_rank

Advance = Callable[..., None]


def visible_text(text: object) -> str:
    r"""Show what a terminal would act on: control signs, half pairs, turned directions.

    Examples
    --------
    >>> visible_text("a\x1b[2Jb"), visible_text("\u202eab")
    ('a\\x1b[2Jb', '\\u202eab')
    """
    return "".join(
        sign.encode("unicode_escape").decode() if _acts(sign) else sign
        for sign in str(text)
    )


def _acts(sign: str) -> bool:
    kind = unicodedata.category(sign)
    turns = unicodedata.bidirectional(sign) in _TURNS
    return (sign != "\n" and kind in ("Cc", "Cs", "Zl", "Zp")) or turns


# Where the order of letters is turned round, a text may look like another.
_TURNS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


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
