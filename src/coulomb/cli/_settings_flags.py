"""Every setting of a text classifier as a flag of a verb."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any

import typer

from coulomb.text.settings import TextSettings


def with_settings(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb one flag per setting."""
    own = inspect.signature(verb)
    flags = [_flag(part) for part in fields(TextSettings)]
    kept = [p for p in own.parameters.values() if p.name != "settings"]

    @wraps(verb)
    def called(**given: Any) -> None:
        names = [flag.name for flag in flags]
        changes = {n: given.pop(n) for n in names if n in given}
        chosen = {name: value for name, value in changes.items() if value is not None}
        verb(**given, settings=chosen)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept]
    called.__signature__ = own.replace(parameters=[*parameters, *flags])  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in (*parameters, *flags)}
    return called


def _flag(part: Any) -> inspect.Parameter:
    option = typer.Option(
        help=part.metadata["help"],
        rich_help_panel=part.metadata["group"],
        show_default=False,
    )
    annotation = Annotated[part.type | None, option]
    return inspect.Parameter(
        part.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=annotation,
    )
