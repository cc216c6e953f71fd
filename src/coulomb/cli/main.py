"""The verbs of `coulomb`. Nothing heavy is imported before a verb runs."""

import typer
from typer import Option

from coulomb._version import __version__
from coulomb.cli import run_command as main
from coulomb.cli.demo import demo, new
from coulomb.cli.doctor import doctor
from coulomb.cli.experiments import claims, report, reproduce
from coulomb.cli.linearise import kernels, linearise
from coulomb.cli.text import (
    Folded,
    diagnose,
    evaluate,
    export,
    predict,
    runs,
    serve,
    train,
)
from coulomb.cli.theory import deviations, meanfield

app = typer.Typer(
    name="coulomb",
    help="Learn kernels as particle systems.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command(cls=Folded)(train)
_OF_TEXT = (new, evaluate, predict, diagnose, runs, export, serve)
_OTHERS = (demo, doctor, linearise, kernels, reproduce, claims, report, meanfield)
for verb in (*_OF_TEXT, *_OTHERS, deviations):
    app.command()(verb)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"coulomb {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = Option(
        False,
        "--version",
        callback=_show_version,
        is_eager=True,
        help="Show the version and exit.",
    ),
) -> None:
    """Learn kernels as particle systems."""


if __name__ == "__main__":
    main()
