"""Checks of arguments, each with one sentence for the user."""

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from coulomb._support.errors import ParameterError, ParameterTypeError, unknown_name


def check_real(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    infinite: bool = False,
) -> float:
    """Return `value` as a float, or say which rule it breaks.

    Examples
    --------
    >>> check_real("step_size", -0.1, above=0)
    Traceback (most recent call last):
    coulomb._support.errors.ParameterError: `step_size` must be positive; got -0.1.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ParameterTypeError(f"`{name}` must be a number; got {value!r}.")
    number = float(value)
    if math.isnan(number) or (math.isinf(number) and not infinite):
        raise ParameterError(f"`{name}` must be finite; got {value!r}.")
    rules = (
        (above is None or number > above, "greater than", above),
        (at_least is None or number >= at_least, "at least", at_least),
        (below is None or number < below, "less than", below),
        (at_most is None or number <= at_most, "at most", at_most),
    )
    for holds, words, bound in rules:
        if not holds:
            positive = words == "greater than" and bound == 0
            rule = "positive" if positive else f"{words} {bound:g}"
            raise ParameterError(f"`{name}` must be {rule}; got {value!r}.")
    return number


def check_count(name: str, value: Any, *, at_least: int = 1) -> int:
    """Return `value` as an int, or say that it must be a whole number.

    Examples
    --------
    >>> check_count("n_components", 0)
    Traceback (most recent call last):
    coulomb._support.errors.ParameterError: `n_components` must be at least 1; got 0.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ParameterTypeError(f"`{name}` must be a whole number; got {value!r}.")
    if value < at_least:
        raise ParameterError(f"`{name}` must be at least {at_least}; got {value!r}.")
    return int(value)


def check_member(name: str, value: object, known: Collection[str]) -> None:
    """Refuse what is not among the known names, and name the nearest one.

    Examples
    --------
    >>> check_member("norm", "prae", ("post", "pre"))
    Traceback (most recent call last):
    coulomb._support.errors.ParameterError: `norm` has no member 'prae'; did you mean
    'pre'? Known: post, pre.
    """
    if value not in known:
        raise unknown_name(name, value, known)
