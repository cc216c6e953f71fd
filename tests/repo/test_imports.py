"""What importing costs, and what the package shows."""

import importlib
import subprocess
import sys

import pytest

import coulomb
from coulomb._support.moved import MOVED

HEAVY = ["torch", "numpy", "scipy", "sklearn", "numba", "matplotlib", "pandas"]


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("module", ["coulomb", "coulomb.cli.main"])
def test_nothing_heavy_is_imported(module):
    code = f"import sys, {module}; print(*[m for m in {HEAVY} if m in sys.modules])"
    assert run_python(code).split() == []


def test_the_core_does_not_import_scikit_learn():
    code = "import sys, coulomb.dynamics.loop; print('sklearn' in sys.modules)"
    assert run_python(code).strip() == "False"


@pytest.mark.parametrize("name", [n for n in coulomb.__all__ if n != "__version__"])
def test_every_public_name_is_there_and_documented(name):
    assert getattr(coulomb, name).__doc__
    assert name in dir(coulomb)


def test_unknown_names():
    with pytest.raises(AttributeError, match="no attribute 'Magnet'"):
        coulomb.Magnet  # noqa: B018


def test_help_is_quick_to_import():
    """Less than half a second of imports, counted by the interpreter itself."""
    out = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import coulomb.cli.main"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    names = {line.rsplit("|", 1)[-1].strip() for line in out.splitlines()}
    assert not names & set(HEAVY)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("coulomb.attention.windows", "window_particles"),
        ("coulomb.dynamics.preconditioned", "AdamLangevin"),
        ("coulomb.dynamics.schedules", "Annealed"),
        ("coulomb.dynamics.stopping", "Settled"),
        ("coulomb.experiments.sample", "write_sample"),
        ("coulomb.experiments.tables", "write_tables"),
        ("coulomb.linearise.compare", "kernel_table"),
    ],
)
def test_documented_paths_of_earlier_versions_still_import(module, name):
    sys.modules.pop(module, None)
    with pytest.warns(DeprecationWarning, match=f"{module} is now coulomb"):
        old = importlib.import_module(module)
    assert getattr(old, name) is getattr(importlib.import_module(MOVED[module]), name)
    with pytest.raises(AttributeError):
        old.nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("coulomb.attention.doors")
