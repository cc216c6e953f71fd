import numpy as np
import pytest

from coulomb.kernels import available


@pytest.fixture(autouse=True)
def _needs_numba():
    if not available():
        pytest.skip("numba is missing or switched off")


@pytest.fixture
def rng():
    return np.random.default_rng(0)
