"""Progress bars that are silent where nobody watches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[..., None]


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
        visible = sys.stderr.isatty()
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
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(description, total=total, note="")

        def advance(count: int = 1, note: str = "") -> None:
            progress.update(task, advance=count, note=note)

        yield advance
