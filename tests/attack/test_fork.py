"""After a fork no hang: a child computes on one thread, and gives the same numbers.

GNU's OpenMP, which torch uses, waits forever for threads that a forked child lacks.
The cases run in a process of their own, which computes on two threads and then forks.
"""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

START = """
import multiprocessing
import warnings

import numpy as np
import torch

from coulomb import CoulombSampler
from coulomb.attention import KernelAttention

warnings.simplefilter("ignore")  # of forking with threads: that is what is tested
torch.set_num_threads(2)
X = np.random.default_rng(0).normal(size=(100, 4))
y = X[:, 0] * X[:, 1] > 0
layer = KernelAttention(32, 2, n_features=64, batch_first=True, generator=0)
tokens = torch.randn(4, 256, 32, generator=torch.Generator().manual_seed(0))


def fit(seed=0):
    sampler = CoulombSampler(
        16, gamma="scale", coordinates="all", max_iter=3, pursuit=0, random_state=seed
    )
    return sampler.fit(X, y).transform(X)


def attend(scale=1.0):
    large = torch.ones(600, 600) @ torch.ones(600, 600)  # on torch's own threads
    out, _ = layer(scale * tokens, tokens, tokens, need_weights=False)
    return float(large[0, 0]), out.detach().numpy()


def work(seed=0):
    return torch.get_num_threads(), fit(seed), attend()


threads, features, (_, heads) = work()
assert threads == 2


def check(found):
    threads, theirs, (_, out) = found
    assert threads == 1, threads
    np.testing.assert_allclose(theirs, features, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(out, heads, rtol=1e-4, atol=1e-5)
"""
CASES = {
    "multiprocessing": """
with multiprocessing.get_context("fork").Pool(2) as pool:
    for found in pool.map(work, [0, 0], chunksize=1):
        check(found)
""",
    "joblib": """
from joblib import Parallel, delayed

for found in Parallel(n_jobs=2, backend="multiprocessing")(
    delayed(work)(0) for _ in range(2)
):
    check(found)
""",
    "loader": """
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        return work()


loader = DataLoader(
    Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork",
    collate_fn=None,
)
for threads, theirs, (_, out) in loader:
    check((threads, np.asarray(theirs), (0, np.asarray(out))))
""",
    "grandchild": """
def grandchild():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        check(pool.apply(work))


child = multiprocessing.get_context("fork").Process(target=grandchild)
child.start()
child.join()
assert child.exitcode == 0
""",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_forked_children_do_not_hang():
    cases = "".join(f"\nprint({name!r})\n{code}" for name, code in CASES.items())
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    process = subprocess.Popen(
        [sys.executable, "-uc", START + cases],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said[-2000:]
        assert said.split() == list(CASES)
    finally:
        # Children that hang would outlive their parent.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
