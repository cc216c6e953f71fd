"""The same ranges, on threads of our own and on torch's."""

import multiprocessing
import os
import threading

import numpy as np
import pytest
import torch

from coulomb.kernels import runtime
from coulomb.kernels.runtime import (
    over_ranges,
    over_torch_threads,
    split,
    threads_for,
    useful_threads,
)


@pytest.mark.parametrize(("n", "parts"), [(1, 1), (7, 3), (100, 4)])
def test_ranges_make_up_the_whole(n, parts):
    ranges = split(n, parts)
    assert [i for first, end in ranges for i in range(first, end)] == list(range(n))


def test_never_more_threads_than_particles():
    assert useful_threads(8, 3, 1.0) == 3
    assert useful_threads(8, 300, 0.0) == 1


def test_errors_come_through():
    seen = np.zeros(10)

    def work(first, end):
        seen[first:end] += 1
        if first == 0:
            raise ValueError("first range")

    with pytest.raises(ValueError, match="first range"):
        over_ranges(work, 10, 2)
    assert (seen == 1).all()


@pytest.fixture(params=["torch", "own"])
def whose(request, monkeypatch):
    if request.param == "own":
        monkeypatch.setattr(runtime, "_forked", True)
    elif runtime._openmp() is None:
        pytest.skip("torch came without GNU OpenMP")
    return request.param


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_range_once(whose, count):
    seen = np.zeros(11)

    def work(first, end):
        seen[first:end] += 1

    over_torch_threads(work, 11, count)
    assert (seen == 1).all()


def test_at_the_same_time(whose):
    """Each part waits for the other."""
    both = threading.Barrier(2, timeout=20)
    over_torch_threads(lambda *_: both.wait(), 4, 2)


def test_errors_come_through_torch_and_all_are_done(whose):
    seen = np.zeros(10)

    def work(first, end):
        seen[first:end] += 1
        if first == 0:
            raise ValueError("first range")

    with pytest.raises(ValueError, match="first range"):
        over_torch_threads(work, 10, 2)
    assert (seen == 1).all()


def test_between_operations_of_torch(whose):
    x = torch.ones(300, 300)
    for _ in range(20):
        total = []
        over_torch_threads(lambda *_, to=total: to.append(x.sum().item()), 2, 2)
        assert total == [90000.0] * 2
        assert (x @ x)[0, 0] == 300


def test_small_work_stays_on_one_thread():
    assert threads_for(8, 1e-6) == 1
    assert threads_for(1, 1.0) == 1


def _child(queue):
    done = []
    over_torch_threads(lambda *each: done.append(each), 4, 2)
    queue.put(sorted(done))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_its_parents_threads():
    over_torch_threads(lambda *_: None, 4, 2)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    try:
        assert queue.get(timeout=60) == [(0, 2), (2, 4)]
    finally:
        child.kill()
