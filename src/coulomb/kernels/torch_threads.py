"""Work on the threads that torch has already, between its own operations.

Torch's OpenMP threads go on spinning for a while after each operation, ready for the
next one. Threads of our own would wait for a processor meanwhile; those that spin have
one. Handing them work costs some 45 microseconds, most of it for the interpreter lock.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch

from coulomb.kernels.threads import over_ranges, split, useful_threads

# Seconds of work from which on one more thread pays.
_WORTH_A_THREAD = 80e-6

_Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_forked = False


def _note_fork() -> None:
    global _forked
    # GNU's OpenMP waits forever for the threads its parent had.
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


@functools.cache
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
    worth = {} if _parallel() is None else {"worth": _WORTH_A_THREAD}
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
