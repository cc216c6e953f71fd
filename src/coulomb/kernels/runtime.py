"""How loops are compiled, where their machine code is kept, and how they use threads.

Importing this does not import numba; decorating a function does. Compiled functions
carry no annotations: numba infers their types, and mypy would learn nothing from `Any`.

Threads are our own, or those that torch has already. The loops release the interpreter
lock, so plain threads suffice. Particles are split, never sums: a particle is computed
by the same instructions whatever the number of threads, and results are the same to
the last bit. Between operations of torch, its OpenMP threads go on spinning for a
while, ready for the next one. Threads of our own would wait for a processor meanwhile;
those that spin have one. Handing them work costs some 45 microseconds, most of it for
the interpreter lock.
"""

import ctypes
import hashlib
import importlib
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import torch

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


# Handing work to a sleeping thread and collecting it costs 30 to 50 microseconds; the
# gain of a second thread must be well above that.
_WORTH_A_THREAD = 150e-6
_WORTH_A_TORCH_THREAD = 80e-6

_pools: dict[int, ThreadPoolExecutor] = {}
_lock = Lock()
_forked = False

_Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _forget_threads() -> None:
    global _lock, _forked
    # A forked child has the pools of its parent but none of their threads, and perhaps
    # a lock held by a thread that is gone. GNU's OpenMP waits forever for the threads
    # its parent had, torch's operations too: the child computes on one thread.
    _pools.clear()
    _lock = Lock()
    _forked = True
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def _pool(workers: int) -> ThreadPoolExecutor:
    with _lock:
        if workers not in _pools:
            _pools[workers] = ThreadPoolExecutor(workers, thread_name_prefix="coulomb")
        return _pools[workers]


def useful_threads(
    threads: int, n: int, seconds: float, *, worth: float = _WORTH_A_THREAD
) -> int:
    """Give the number of threads that pays for itself.

    Examples
    --------
    >>> useful_threads(2, 300, 1e-5), useful_threads(2, 300, 1e-2)
    (1, 2)
    """
    return max(1, min(threads, n, int(seconds / worth) + 1))


def split(n: int, parts: int) -> list[tuple[int, int]]:
    """Split ``range(n)`` into contiguous ranges of nearly equal length.

    Every range begins at an even index: the loops take particles in pairs, and the same
    pairs give the same bits.

    Examples
    --------
    >>> split(7, 2)
    [(0, 2), (2, 7)]
    """
    edges = [n * part // parts // 2 * 2 for part in range(parts)] + [n]
    return list(pairwise(edges))


def over_ranges(work: Callable[[int, int], object], n: int, threads: int) -> None:
    """Call ``work(first, end)`` on the parts of ``range(n)``, at the same time."""
    ranges = split(n, threads)
    if threads == 1:
        work(*ranges[0])
        return
    pool = _pool(threads - 1)
    futures = [pool.submit(work, *each) for each in ranges[:-1]]
    try:
        work(*ranges[-1])
    finally:
        # Also after an error: nobody may still write when this returns.
        for future in futures:
            future.result()


@cache
def _openmp() -> Any:
    """Find the OpenMP that came with torch, which it has loaded; None without one."""
    for file in sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*")):
        try:
            return ctypes.CDLL(str(file)).GOMP_parallel
        except (OSError, AttributeError):
            continue
    return None


def _parallel() -> Any:
    return None if _forked else _openmp()


def threads_for(n: int, seconds: float) -> int:
    """Give the number of torch's threads that pays for itself.

    Examples
    --------
    >>> threads_for(8, 1e-6), threads_for(1, 1.0)
    (1, 1)
    """
    worth = {} if _parallel() is None else {"worth": _WORTH_A_TORCH_THREAD}
    return useful_threads(torch.get_num_threads(), n, seconds, **worth)


def over_torch_threads(
    work: Callable[[int, int], object], n: int, threads: int
) -> None:
    """Call ``work(first, end)`` on ranges that make up ``range(n)``, at the same time.

    Where torch has no GNU OpenMP, and after a fork, threads of our own do it.
    """
    parallel = _parallel()
    if threads == 1 or parallel is None:
        over_ranges(work, n, threads)
        return
    ranges, turns, errors = split(n, threads), count(), list[BaseException]()

    def take(_: int | None) -> None:
        # Inside another parallel region there is one thread, which takes every turn.
        # No error may pass through C.
        try:
            while (turn := next(turns)) < threads:
                work(*ranges[turn])
        except BaseException as error:
            errors.append(error)

    parallel(_Task(take), None, ctypes.c_uint(threads), ctypes.c_uint(0))
    if errors:
        raise errors[0]
