"""Modules that were documented under another path, and what others' imports start.

The old module warns and gives what the new one has. An entry goes after one version.
Where `coulomb` was imported, transformers knows its saved models: they are registered
when transformers is imported, before or after, and transformers is not imported for it.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "coulomb.attention.windows": "coulomb.attention.align.starts",
    "coulomb.dynamics.preconditioned": "coulomb.dynamics.langevin",
    "coulomb.dynamics.resampling": "coulomb.dynamics.initial",
    "coulomb.dynamics.schedules": "coulomb.dynamics.langevin",
    "coulomb.dynamics.stopping": "coulomb.dynamics.loop",
    "coulomb.experiments.sample": "coulomb.experiments.runner",
    "coulomb.experiments.tables": "coulomb.experiments.summary",
    "coulomb.linearise.compare": "coulomb.linearise.api",
    "coulomb.theory.identities": "coulomb.theory.system",
    "coulomb.theory.importance": "coulomb.theory.deviations",
}


def names_from(package: str, *homes: str, names: Sequence[str]) -> Callable[[str], Any]:
    """Give a package's `__getattr__`, which imports a public name on first use.

    Names are looked for in one module after the other, the lightest to import first.
    """

    def find(name: str) -> Any:
        for home in homes if name in names else ():
            module = importlib.import_module(f"coulomb.{home}")
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


# What is called after a module of transformers was imported.
AFTER_IMPORT = {
    "transformers.models.auto.configuration_auto": "register_configs",
    "transformers.modeling_utils": "register_attention",
}


class ImportHooks(MetaPathFinder, Loader):
    """Finds the modules of `MOVED`, and adds a call to those of `AFTER_IMPORT`."""

    def __init__(self) -> None:
        self._found: set[str] = set()

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Load a module that moved, or let others find one that a call comes after."""
        if fullname in MOVED:
            return ModuleSpec(fullname, self)
        if fullname not in AFTER_IMPORT or fullname in self._found:
            return None
        self._found.add(fullname)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                _call_after(fullname)

            loader.exec_module = execute_and_call
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Let the old module give what the new one has."""
        new = MOVED[module.__name__]
        message = (
            f"{module.__name__} is now {new}; the old path goes with the next version."
        )
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        home = importlib.import_module(new)
        module.__dict__["__getattr__"] = lambda name: getattr(home, name)


def _call_after(name: str) -> None:
    ours = importlib.import_module("coulomb.linearise.huggingface")
    getattr(ours, AFTER_IMPORT[name])()


def register() -> None:
    """Add the hooks once."""
    if any(isinstance(finder, ImportHooks) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, ImportHooks())
    for name in AFTER_IMPORT:
        if name in sys.modules:
            _call_after(name)
