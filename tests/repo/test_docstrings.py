"""Docstrings: every public thing has one, and its parameters are those it takes."""

import importlib
import inspect
import pkgutil

import pytest
from numpydoc.docscrape import NumpyDocString

import coulomb


def public_things():
    for info in pkgutil.walk_packages(coulomb.__path__, "coulomb."):
        if any(part.startswith("_") for part in info.name.split(".")):
            continue
        module = importlib.import_module(info.name)
        for name, thing in vars(module).items():
            if name.startswith("_") or getattr(thing, "__module__", "") != info.name:
                continue
            if inspect.isclass(thing) or inspect.isfunction(thing):
                yield pytest.param(thing, id=f"{info.name}.{name}")


THINGS = list(public_things())


@pytest.mark.parametrize("thing", THINGS)
def test_documented_parameters_exist(thing):
    documentation = inspect.getdoc(thing)
    assert documentation, "no docstring"
    documented = {
        name.strip().lstrip("*")
        for parameter in NumpyDocString(documentation)["Parameters"]
        for name in parameter.name.split(",")
    }
    try:
        taken = set(inspect.signature(thing).parameters)
    except ValueError:  # exceptions have no signature
        taken = set()
    fields = set(getattr(thing, "_fields", ()))
    assert documented <= taken | fields


@pytest.mark.parametrize("thing", [t for t in THINGS if inspect.isclass(t.values[0])])
def test_public_methods_are_documented_once(thing):
    for name, method in inspect.getmembers(thing, inspect.isfunction):
        # transformers hangs a method of its own on every torch module.
        foreign = method.__module__.startswith("transformers.")
        if not name.startswith("_") and not foreign:
            assert inspect.getdoc(getattr(thing, name)), f"{name} has no docstring"
