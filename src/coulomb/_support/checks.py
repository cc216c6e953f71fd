"""Checks of arguments: numbers, counts, seeds and streams, labels, names, files."""

import math
import os
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from itertools import pairwise
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from coulomb._support.errors import (
    CoulombError,
    FileFormatError,
    ParameterError,
    ParameterTypeError,
    shown,
    unknown_name,
)

if TYPE_CHECKING:
    from torch import Generator

Member = TypeVar("Member")
Registered = TypeVar("Registered", bound=Callable[..., Any])


def packaged(package: str, name: str) -> dict[str, Any]:
    """Read the TOML file of a package."""
    return tomllib.loads(files(package).joinpath(name).read_text("utf-8"))


# No count of steps, rows or features is meant to be larger.
_MOST = 2**31 - 1
# Physical memory in bytes, asked once: torch cannot trace the question.
try:
    _MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
except (AttributeError, OSError, ValueError):  # not on every system
    _MEMORY = 0


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
        raise ParameterTypeError(f"`{name}` must be a number; got {shown(value)}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.nan
    if math.isnan(number) or (math.isinf(number) and not infinite):
        raise ParameterError(f"`{name}` must be finite; got {shown(value)}.")
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
            raise ParameterError(f"`{name}` must be {rule}; got {shown(value)}.")
    return number


def check_count(
    name: str, value: Any, *, at_least: int = 1, at_most: int = _MOST
) -> int:
    """Return `value` as an int, or say that it must be a whole number.

    Examples
    --------
    >>> check_count("n_components", 0)
    Traceback (most recent call last):
    coulomb._support.errors.ParameterError: `n_components` must be at least 1; got 0.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ParameterTypeError(
            f"`{name}` must be a whole number; got {shown(value)}."
        )
    number = int(value)
    if not at_least <= number <= at_most:
        rule = f"at least {at_least}" if number < at_least else f"at most {at_most}"
        raise ParameterError(f"`{name}` must be {rule}; got {shown(number)}.")
    return number


def check_seed(name: str, value: Any, *, at_most: int = 2**63 - 1) -> int:
    """Return a seed as an int; torch's generators take 63 bits.

    Examples
    --------
    >>> check_seed("seed", -1)
    Traceback (most recent call last):
    coulomb._support.errors.ParameterError: `seed` must be at least 0; got -1.
    """
    return check_count(name, value, at_least=0, at_most=at_most)


def make_generator(seed: int, *path: int) -> "Generator":
    """Make the generator that belongs to `seed` and a path of numbers.

    Generators of different paths are independent, so that a change in how much one
    part draws leaves the others as they were.

    Examples
    --------
    >>> a, b = make_generator(0, 1), make_generator(0, 1)
    >>> a.initial_seed() == b.initial_seed() != make_generator(0, 2).initial_seed()
    True
    """
    import numpy as np
    from torch import Generator

    sequence = np.random.SeedSequence(entropy=seed, spawn_key=path)
    word = sequence.generate_state(1, np.uint64)[0]
    # torch takes seeds below 2**63 without changing them
    return Generator().manual_seed(int(word >> np.uint64(1)))


def check_memory(name: str, n_bytes: int) -> None:
    """Refuse what the memory of this machine cannot hold, before it is asked for.

    Examples
    --------
    >>> check_memory("n_components", 10**15)
    Traceback (most recent call last):
    coulomb._support.errors.ParameterError: `n_components` must fit into memory, ...
    """
    if n_bytes > _MEMORY > 0:
        raise ParameterError(
            f"`{name}` must fit into memory, {_MEMORY // 2**30} GiB here; got values "
            f"that need {n_bytes // 2**30} GiB. Lower it."
        )


def check_labels(name: str, values: Iterable[Any], *, mixed: bool = False) -> None:
    """Refuse labels that are missing, or not all numbers or all strings if not mixed.

    Examples
    --------
    >>> check_labels("y", ["a", "b", 3])
    Traceback (most recent call last):
    coulomb._support.errors.ParameterTypeError: `y` must hold only numbers or only
    strings; got 'a' and 3. Convert them to one kind.
    """
    first: dict[type, Any] = {}
    for row, value in enumerate(values):
        value = value.item() if hasattr(value, "item") else value
        if value is None or (isinstance(value, Real) and value != value):
            raise ParameterError(
                f"`{name}` must have a label in every row; got {value!r} in row {row}. "
                "Fill it in, or drop the row."
            )
        kind = next((k for k in (str, bytes, Real) if isinstance(value, k)), None)
        if kind is None or (isinstance(value, int) and value.bit_length() > 63):
            raise ParameterTypeError(
                f"`{name}` must hold numbers of at most 63 bits or strings; got "
                f"{shown(value)} in row {row}. Convert the labels first."
            )
        first.setdefault(kind, value)
        if len(first) > 1 and not mixed:
            one, other = map(shown, first.values())
            raise ParameterTypeError(
                f"`{name}` must hold only numbers or only strings; got {one} and "
                f"{other}. Convert them to one kind."
            )


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
    if not hasattr(cu_seqlens, "is_floating_point"):
        raise ParameterTypeError(
            f"`cu_seqlens` must be a tensor; got {type(cu_seqlens).__name__}."
        )
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


@contextmanager
def retold(complaint: str) -> Iterator[None]:
    """Turn what a library raises of a file into one sentence.

    Examples
    --------
    >>> with retold("a.json is no tokenizer"):
    ...     raise OSError("line 3")
    Traceback (most recent call last):
    coulomb._support.errors.FileFormatError: a.json is no tokenizer: line 3.
    """
    try:
        yield
    except CoulombError:
        raise
    except BaseException as error:
        # A panic in a tokenizer is no Exception; a signal is neither.
        panic = type(error).__name__ == "PanicException"
        if not panic and not isinstance(error, Exception):
            raise
        told = " ".join(str(error).split())[:300]
        raise FileFormatError(f"{complaint}: {told}.") from error
