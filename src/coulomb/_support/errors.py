"""Errors a user can act on: the argument, the rule, the value and the way out."""

import difflib
from collections.abc import Iterable


class CoulombError(Exception):
    """Base of every error raised on purpose by this package."""


class ParameterError(CoulombError, ValueError):
    """An argument breaks its rule."""


class ParameterTypeError(CoulombError, TypeError):
    """An argument is of the wrong kind."""


class FileFormatError(CoulombError, ValueError):
    """A file is not what it should be: damaged, truncated or of another kind."""


class DivergedError(CoulombError, ArithmeticError):
    """Particles are not finite."""


class Interrupted(BaseException):
    """A signal asked to stop; `advice` says how to go on."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number, self.advice = number, ""


def shown(value: object) -> str:
    """Write a value into a message: cut if it is long, whatever its `repr` does.

    Examples
    --------
    >>> shown(10**6000), shown("a" * 100)[-5:]
    ('a number of 19932 bits', 'aa...')
    """
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def unknown_name(argument: str, name: object, known: Iterable[str]) -> ParameterError:
    """Build the error for a name that is not registered.

    Examples
    --------
    >>> print(unknown_name("map", "softplsu", ["elu", "softplus"]))
    `map` has no member 'softplsu'; did you mean 'softplus'? Known: elu, softplus.
    """
    names = sorted(known)
    near = difflib.get_close_matches(shown(name).strip("'"), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ParameterError(
        f"`{argument}` has no member {shown(name)}{hint} Known: {', '.join(names)}."
    )
