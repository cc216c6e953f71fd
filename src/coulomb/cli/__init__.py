"""The command line; signals are answered before anything heavy is imported."""

import signal
import sys
from typing import Any

from coulomb._support.errors import CoulombError, Interrupted


def run_command() -> None:
    """Run the command line; mistakes of the user and signals end in one sentence."""
    signals: list[Interrupted] = []

    def stop(number: int, frame: object) -> None:
        signals.append(Interrupted(number))
        raise signals[0]

    def answer(how: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, how)

    try:
        answer(stop)
        from coulomb.cli.main import app

        app()
    except BaseException as error:
        # A second one would cut the sentence short; it may come just now.
        try:
            answer(signal.SIG_IGN)
        except Interrupted:
            answer(signal.SIG_IGN)
        # An import that a signal broke off may fail with an error of its own.
        told, code = _explain(signals[0] if signals else error)
        from coulomb._support.progress import visible_text
        from coulomb._support.ranks import speaks_first

        if speaks_first():
            line = visible_text(told).replace("\n", "\\n")
            print(f"coulomb: {line}", file=sys.stderr)
        sys.exit(code)


def _explain(error: BaseException) -> tuple[str, int]:
    """Give the sentence and the exit code of an error; others are raised again."""
    match error:
        case Interrupted():
            return f"stopped.{error.advice}", 128 + error.number
        case CoulombError():
            return str(error), 2
        case OSError():
            place = "" if error.filename is None else f"{error.filename}: "
            return f"{place}{error.strerror or error}.", 1
        case MemoryError():
            return "there is not enough memory for this.", 1
    raise error
