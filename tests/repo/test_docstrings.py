"""Docstrings: complete for what is public, one line at least for everything else."""

import importlib
import inspect
import pkgutil
import typing

from numpydoc.docscrape import NumpyDocString
from numpydoc.validate import validate

import coulomb

# Packages whose exported names are public, and core modules that are public as a whole.
PACKAGES = ("", ".attention", ".estimators", ".experiments", ".linearise", ".text")
PACKAGES += (".theory",)
CORE = ("datasets", "domains", "dynamics", "energy", "features", "interactions")
CORE += ("objectives",)
CHECKS = {"GL03", "GL07", "GL10", "SS02", "SS03", "PR01", "PR03", "RT03", "YD01"}


def is_documented_kind(thing):
    return inspect.isclass(thing) or inspect.isfunction(thing)


def modules():
    for info in pkgutil.walk_packages(coulomb.__path__, "coulomb."):
        yield importlib.import_module(info.name)


def public_things():
    for thing in dict.fromkeys(public_names()):
        yield thing
        if inspect.isclass(thing):
            for name, method in vars(thing).items():
                owned = getattr(method, "__qualname__", "").startswith(thing.__name__)
                if (
                    name[0] != "_"
                    and owned
                    and inspect.isfunction(method)
                    and method.__doc__
                ):
                    yield method


def public_names():
    for package in PACKAGES:
        module = importlib.import_module(f"coulomb{package}")
        for name in module.__all__:
            if is_documented_kind(getattr(module, name)):
                yield getattr(module, name)
    for module in modules():
        if module.__name__.split(".")[1] not in CORE or "._" in module.__name__:
            continue
        for name, thing in vars(module).items():
            ours = getattr(thing, "__module__", "") == module.__name__
            if ours and not name.startswith("_") and is_documented_kind(thing):
                yield thing


def parameters_of(thing):
    """Names that can be passed, those of `**options: Unpack[Options]` among them."""
    try:
        signature = inspect.signature(thing)
    except ValueError:  # exceptions have no signature
        return set()
    names = set(signature.parameters)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            for options in typing.get_args(parameter.annotation):
                names |= set(options.__annotations__)
    return names


def test_public_docstrings_are_complete():
    """numpydoc finds nothing missing, and documented parameters exist."""
    offenders = []
    for thing in public_things():
        name = f"{thing.__module__}.{thing.__qualname__}"
        documentation = inspect.getdoc(thing)
        if not documentation:
            offenders.append(f"{name}: no docstring")
            continue
        # Fields of dataclasses and named tuples are described where they stand.
        known = CHECKS - {"PR01", "PR03"} if inspect.isclass(thing) else CHECKS
        errors = [" ".join(e) for e in validate(name)["errors"] if e[0] in known]
        offenders += [f"{name}: {error}" for error in errors]
        documented = {
            word.strip().lstrip("*")
            for parameter in NumpyDocString(documentation)["Parameters"]
            for word in parameter.name.split(",")
        }
        taken = parameters_of(thing)
        extra = documented - taken - set(getattr(thing, "_fields", ()))
        offenders += [f"{name}: no parameter {word}" for word in sorted(extra)]
    assert not offenders, "\n".join(offenders)


def test_everything_has_a_docstring():
    """Functions, classes and methods without underscore; an abstract method once."""
    offenders = []
    for module in modules():
        for name, thing in vars(module).items():
            ours = getattr(thing, "__module__", "") == module.__name__
            named = is_documented_kind(thing) and thing.__name__ == name
            if not (ours and named) or "._" in module.__name__ or name[0] == "_":
                continue
            parts = {name: thing}
            if inspect.isclass(thing):
                for part, method in inspect.getmembers(thing, inspect.isfunction):
                    if method.__module__.startswith("coulomb") and part[0] != "_":
                        parts[f"{name}.{part}"] = getattr(thing, part)
            bare = [part for part, thing in parts.items() if not inspect.getdoc(thing)]
            offenders += [f"{module.__name__}.{part}" for part in bare]
    assert not offenders, "\n".join(offenders)
