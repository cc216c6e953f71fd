"""The command `coulomb`. Nothing heavy is imported before a verb runs."""

import signal
import sys

import typer
from typer import Option

from coulomb._support.errors import CoulombError
from coulomb._version import __version__
from coulomb.cli.demo import demo
from coulomb.cli.doctor import doctor
from coulomb.cli.experiments import claims, report, reproduce
from coulomb.cli.linearise import kernels, linearise
from coulomb.cli.output import Interrupted, say
from coulomb.cli.text import diagnose, evaluate, export, predict, runs, train
from coulomb.cli.theory import deviations, meanfield

app = typer.Typer(
    name="coulomb",
    help="Learn kernels as particle systems.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for verb in (demo, doctor, train, evaluate, predict, diagnose, runs, export):
    app.command()(verb)
for verb in (linearise, kernels, reproduce, claims, report, meanfield, deviations):
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


def _stop(number: int, frame: object) -> None:
    raise Interrupted(number)


def main() -> None:
    """Run the command line; mistakes of the user and signals end in one sentence."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        app()
    except CoulombError as error:
        say(f"coulomb: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        say(f"coulomb: {place}{error.strerror or error}.", err=True)
        sys.exit(1)
    except MemoryError:
        say("coulomb: there is not enough memory for this.", err=True)
        sys.exit(1)
    except Interrupted as stopped:
        say(f"coulomb: stopped.{stopped.advice}", err=True)
        sys.exit(128 + stopped.number)


if __name__ == "__main__":
    main()
