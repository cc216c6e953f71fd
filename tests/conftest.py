import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("coulomb", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("coulomb")


# Containers often forbid Python to keep what it compiles. Then every process that a
# test starts compiles torch and transformers again, which is most of its time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# The choice between forms of attention must not depend on the machine of the tests.
os.environ["COULOMB_TUNE"] = "0"
# Test problems are tiny: threads would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def data_dir():
    """The folder of real data sets; its tests are skipped where there is none."""
    here = os.environ.get("COULOMB_DATA")
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(here) if here else beside
    if not folder.is_dir():
        pytest.skip("no data folder: set COULOMB_DATA to one")
    return folder
