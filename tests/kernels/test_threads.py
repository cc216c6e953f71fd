import numpy as np
import pytest

from coulomb.kernels.threads import over_ranges, split, useful_threads


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
