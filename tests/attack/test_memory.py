"""Memory: fits and forwards leave nothing behind, and many rows need few bytes.

Measured in fresh processes, so that what other tests hold does not count.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

if not Path("/proc/self/statm").exists():
    pytest.skip("resident memory is read from /proc", allow_module_level=True)

START = """
import gc
import os
import resource
import warnings

import numpy as np
import torch

warnings.simplefilter("ignore")
torch.set_num_threads(1)


def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def grows(work, times):
    # The first quarter fills caches; the rest may add noise of the allocator alone.
    for _ in range(times // 4):
        work()
    before = resident()
    for _ in range(times - times // 4):
        work()
    return resident() - before
"""
FITS = """
import itertools

from coulomb import CoulombSampler

X = np.random.default_rng(0).normal(size=(100, 4))
y = X[:, 0] > 0
objectives = itertools.cycle(["evidence"] + 7 * ["alignment"])  # the first is slow


def fit():
    sampler = CoulombSampler(
        8, gamma="scale", coordinates="all", n_candidates=32, max_iter=3, pursuit=0,
        objective=next(objectives), random_state=0,
    )
    sampler.fit(X, y).transform(X)


print(grows(fit, 200))
"""
FORWARDS = """
from coulomb.attention import KernelAttention

layer = KernelAttention(32, 2, n_features=32, batch_first=True, generator=0)
tokens = torch.randn(4, 64, 32)


def forward():
    out, _ = layer(tokens, tokens, tokens, need_weights=False)
    out.sum().backward()
    layer.zero_grad()


print(grows(forward, 2000))
"""
ROWS = """
from coulomb import CoulombSampler

X = np.random.default_rng(0).normal(size=(1_000_000, 20)).astype(np.float32)
y = X[:, 0] * X[:, 1] > 0
before = peak()
sampler = CoulombSampler(32, n_candidates=128, max_iter=10, random_state=0).fit(X, y)
fitted = peak() - before
out = sampler.transform(X)
assert np.isfinite(out).all()
print(fitted / (X.nbytes / 2**20), (peak() - before - out.nbytes / 2**20))
"""


def run(code):
    found = subprocess.run(
        [sys.executable, "-c", START + code],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return [float(number) for number in found.stdout.split()]


@pytest.mark.parametrize("code", [FITS, FORWARDS], ids=["fits", "forwards"])
def test_memory_stays_flat(code):
    """A leak of 10 kB in each of 150 or 1,500 calls would be 1.5 or 15 MB."""
    (grown,) = run(code)
    assert grown < 8  # megabytes


def test_a_million_rows_in_bounded_memory():
    """A fit needs a few copies of the rows, and no matrix of rows by candidates."""
    copies, _ = run(ROWS)
    # 128 candidates of every row in double precision would be 12.8 times the rows.
    assert copies < 8
