"""Contiguous ranges over a few threads: of our own, or those that torch has already.

The loops release the interpreter lock, so plain threads suffice. Particles are split,
never sums: a particle is computed by the same instructions whatever the number of
threads, and results are the same to the last bit.

Between operations of torch, its OpenMP threads go on spinning for a while, ready for
the next one. Threads of our own would wait for a processor meanwhile; those that spin
have one. Handing them work costs some 45 microseconds, most of it for the interpreter
lock.
"""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import torch

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
