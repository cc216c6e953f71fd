"""`coulomb report`: a folder of results as one page."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of `coulomb reproduce`.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page to write; DIR/report.html if not given."),
    ] = None,
    open_page: Annotated[
        bool, typer.Option("--open", help="Show the page in the web browser.")
    ] = False,
) -> None:
    """Write one page with every figure, table and claim of a folder of results.

    The page is a single HTML file. It needs no network and no other file, so it can be
    sent by mail. Experiments that have not been run are left out, and it says so.

    **Examples**

    `coulomb report results`

    `coulomb report results --out page.html --open`
    """
    from coulomb.report.page import write_report

    page = write_report(folder, out)
    typer.echo(f"Page: {page}")
    if open_page and typer.launch(page.resolve().as_uri()):
        typer.echo("coulomb: no web browser could be started.", err=True)
