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


def unknown_name(argument: str, name: object, known: Iterable[str]) -> ParameterError:
    """Build the error for a name that is not registered.

    Examples
    --------
    >>> print(unknown_name("map", "softplsu", ["elu", "softplus"]))
    `map` has no member 'softplsu'; did you mean 'softplus'? Known: elu, softplus.
    """
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ParameterError(
        f"`{argument}` has no member {name!r}{hint} Known: {', '.join(names)}."
    )
