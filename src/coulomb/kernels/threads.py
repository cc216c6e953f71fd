"""Contiguous ranges of particles over a few threads.

The loops release the interpreter lock, so plain threads suffice. Particles are split,
never sums: a particle is computed by the same instructions whatever the number of
threads, and results are the same to the last bit.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Lock

# Handing work to a sleeping thread and collecting it costs 30 to 50 microseconds; the
# gain of a second thread must be well above that.
_WORTH_A_THREAD = 150e-6

_pools: dict[int, ThreadPoolExecutor] = {}
_lock = Lock()


def _forget_pools() -> None:
    global _lock
    # A forked child has the pools of its parent but none of their threads, and perhaps
    # a lock held by a thread that is gone.
    _pools.clear()
    _lock = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)


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
