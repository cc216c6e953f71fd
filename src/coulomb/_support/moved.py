"""Modules that were documented under another path: importing one still works.

The old module warns and gives what the new one has. An entry goes after one version.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "coulomb.attention.windows": "coulomb.attention.align.starts",
    "coulomb.dynamics.preconditioned": "coulomb.dynamics.langevin",
    "coulomb.dynamics.schedules": "coulomb.dynamics.langevin",
    "coulomb.dynamics.stopping": "coulomb.dynamics.loop",
    "coulomb.experiments.sample": "coulomb.experiments.runner",
    "coulomb.experiments.tables": "coulomb.experiments.summary",
    "coulomb.linearise.compare": "coulomb.linearise.api",
}


class MovedModules(MetaPathFinder, Loader):
    """Finds the modules of `MOVED`, after every other finder has looked."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Say that a module that moved can be loaded."""
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Let the old module give what the new one has."""
        new = MOVED[module.__name__]
        message = (
            f"{module.__name__} is now {new}; the old path goes with the next version."
        )
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        home = importlib.import_module(new)
        module.__dict__["__getattr__"] = lambda name: getattr(home, name)


def register() -> None:
    """Add the finder once."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
