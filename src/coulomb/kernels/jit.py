"""How loops are compiled, where their machine code is kept, and whether they can be.

Importing this does not import numba; decorating a function does. Compiled functions
carry no annotations: numba infers their types, and mypy would learn nothing from `Any`.
"""

import hashlib
import importlib
import os
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

# Sums may be reordered, which vector registers need; infinities and nan stay defined.
SUMS = {"contract", "nsz", "reassoc", "arcp"}
# Range reduction and rounding by a magic number are lost if terms are reordered.
EXACT = {"contract", "nsz"}

# Loops that write to an array they do not read never sum at the same time. LLVM would
# compile such a loop twice, vectorised and scalar, and choose by how many bytes after
# an input the output begins (a threshold that grows with the vector width); the two sum
# in different orders, so that the last bit would depend on addresses. Loops without a
# sum give equal bits either way, loops without a store need no choice, and for arrays
# updated in place LLVM asks whether two ranges truly overlap, which none here do.


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


def entry(fastmath: set[str]) -> Any:
    """Compile what Python calls, and cache it where a folder can be written."""
    import numba

    def decorate(function: Any) -> Any:
        compiled = numba.njit(nogil=True, fastmath=fastmath, error_model="numpy")(
            function
        )
        with suppress(RuntimeError):  # numba found no folder to write to
            compiled._cache = _cache_class()(function)
            _remove_stale_folders(Path(compiled._cache.cache_path))
        return compiled

    return decorate


def helper(fastmath: set[str]) -> Any:
    """Compile what only compiled code calls: not cached, no entry from Python."""
    import numba

    return numba.njit(
        nogil=True,
        fastmath=fastmath,
        error_model="numpy",
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
    )


@cache
def source_hash() -> str:
    """Hash the sources of all compiled loops."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


_FOLDER = "coulomb-"


class _HashedLocator:
    """Where numba caches a function: a folder of its own for each state of the sources.

    Numba alone asks only whether the file of the function has changed, not whether
    those of the functions it calls have.
    """

    def get_cache_path(self) -> str:
        parent: str = super().get_cache_path()  # type: ignore[misc]
        return os.path.join(parent, _FOLDER + source_hash())

    def get_source_stamp(self) -> str:
        return source_hash()


@cache
def _remove_stale_folders(current: Path) -> None:
    for folder in current.parent.glob(_FOLDER + "*"):
        if folder != current:
            shutil.rmtree(folder, ignore_errors=True)


@cache
def _cache_class() -> Any:
    from numba.core.caching import FunctionCache

    known = FunctionCache._impl_class
    locators = [
        type(locator.__name__, (_HashedLocator, locator), {})
        for locator in known._locator_classes
    ]

    class HashedFunctionCache(FunctionCache):  # type: ignore[misc]
        _impl_class = type("HashedImpl", (known,), {"_locator_classes": locators})

        def save_overload(self, signature: Any, data: Any) -> None:
            # A full disk, or another process that has removed the folder.
            with suppress(OSError):
                super().save_overload(signature, data)

    return HashedFunctionCache
