"""One registry per extension point; one line per member."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from coulomb._support.errors import ParameterError, unknown_name

Member = TypeVar("Member")
Registered = TypeVar("Registered", bound=Callable[..., Any])


class Registry(Generic[Member]):
    """Names and what builds their members.

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
        if name not in self._factories:
            raise unknown_name(self._argument, name, self._factories)
        return self._factories[name](**settings)

    def __iter__(self) -> Iterator[str]:
        return iter(self._factories)

    def __contains__(self, name: object) -> bool:
        return name in self._factories
