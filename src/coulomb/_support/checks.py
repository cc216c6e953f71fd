"""Checks of arguments, each with one sentence for the user: numbers, counts, names."""

import math
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, Generic, TypeVar

from coulomb._support.errors import ParameterError, ParameterTypeError, unknown_name

Member = TypeVar("Member")
Registered = TypeVar("Registered", bound=Callable[..., Any])


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
    if not isinstance(value, str) or value not in known:
        raise unknown_name(name, value, known)


class Registry(Generic[Member]):
    """The names of an extension point and what builds its members; one line each.

    Examples
    --------
    >>> shapes = Registry[str]("shape")
    >>> @shapes.add("round")
    ... def ball():
    ...     return "o"
    >>> shapes.build("round"), list(shapes)
    ('o', ['round'])
    """

    def __init__(self, argument: str) -> None:
        self._argument = argument
        self._factories: dict[str, Callable[..., Member]] = {}

    def add(self, name: str) -> Callable[[Registered], Registered]:
        """Register the decorated class or function under `name`."""

        def register(factory: Registered) -> Registered:
            if name in self._factories:
                raise ParameterError(f"`{self._argument}` has {name!r} already.")
            self._factories[name] = factory
            return factory

        return register

    def build(self, name: str, /, **settings: Any) -> Member:
        """Build the member called `name`."""
        check_member(self._argument, name, self._factories)
        return self._factories[name](**settings)

    def __iter__(self) -> Iterator[str]:
        return iter(self._factories)

    def __contains__(self, name: object) -> bool:
        return name in self._factories


def sequence_bounds(cu_seqlens: Any, tokens: int) -> tuple[tuple[int, int], ...]:
    """Read where each packed sequence starts and stops."""
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
        raise ParameterTypeError(
            "`cu_seqlens` must be a vector of whole numbers; got "
            f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}."
        )
    ends = cu_seqlens.tolist()
    rising = all(a <= b for a, b in pairwise(ends))
    if not ends or ends[0] != 0 or ends[-1] != tokens or not rising:
        shown = ends if len(ends) <= 8 else [*ends[:4], "...", *ends[-3:]]
        raise ParameterError(
            f"`cu_seqlens` must rise from 0 to the number of tokens, {tokens}; got "
            f"{shown}."
        )
    return tuple((a, b) for a, b in pairwise(ends) if a < b)
