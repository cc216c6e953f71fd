"""Whether compiled loops can be used, and how to get at them."""

import importlib
import os
from functools import cache
from types import ModuleType


def available() -> bool:
    """Say whether the compiled loops can be used.

    They can unless numba cannot be imported or the environment variable
    ``COULOMB_NUMBA`` is ``0``. Numba is imported by the first call, not before.
    """
    return os.environ.get("COULOMB_NUMBA", "1") != "0" and _numba_imports()


@cache
def _numba_imports() -> bool:
    # A broken numba (built for another numpy) raises more than ImportError.
    try:
        importlib.import_module("numba")
    except Exception:
        return False
    return True


def compiled() -> ModuleType:
    """Import the compiled loops, which imports numba."""
    return importlib.import_module("coulomb.kernels.loops")
