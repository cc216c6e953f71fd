"""What importing costs, and what the package shows."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import coulomb
from coulomb._support.moved import MOVED

HEAVY = ["torch", "numpy", "scipy", "sklearn", "numba", "matplotlib", "pandas"]


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_imports_cost_little():
    """The package and its help import nothing heavy, the core no scikit-learn."""
    unwanted = {
        "coulomb": HEAVY,
        "coulomb.cli.main": HEAVY,
        "coulomb.dynamics.loop": ["sklearn"],
    }
    for module, names in unwanted.items():
        code = f"import sys, {module}; print(*[m for m in {names} if m in sys.modules])"
        assert run_python(code).split() == [], module


def test_runs_are_listed_without_torch():
    saved = Path(__file__).parents[1] / "regression" / "saved"
    code = f"import sys; from coulomb.cli.main import app; app(['runs', {str(saved)!r}]"
    code += ", standalone_mode=False); print('torch:', 'torch' in sys.modules)"
    told = run_python(code)
    assert "reviews" in told
    assert told.endswith("torch: False\n")


def test_public_names_are_there_and_documented():
    names = [name for name in coulomb.__all__ if name != "__version__"]
    bare = [name for name in names if not getattr(coulomb, name).__doc__]
    assert not bare
    assert set(names) <= set(dir(coulomb))


def test_unknown_names():
    with pytest.raises(AttributeError, match="no attribute 'Magnet'"):
        coulomb.Magnet  # noqa: B018


OLD_PATHS = {
    "coulomb.attention.windows": "window_particles",
    "coulomb.dynamics.preconditioned": "AdamLangevin",
    "coulomb.dynamics.resampling": "gibbs_weights",
    "coulomb.dynamics.schedules": "Annealed",
    "coulomb.dynamics.stopping": "Settled",
    "coulomb.experiments.sample": "write_sample",
    "coulomb.experiments.tables": "write_tables",
    "coulomb.linearise.compare": "kernel_table",
    "coulomb.theory.identities": "chemical_potential",
    "coulomb.theory.importance": "log_mean",
}


def test_documented_paths_of_earlier_versions_still_import():
    assert OLD_PATHS.keys() == MOVED.keys()
    for module, name in OLD_PATHS.items():
        sys.modules.pop(module, None)
        with pytest.warns(DeprecationWarning, match=f"{module} is now coulomb"):
            old = importlib.import_module(module)
        home = importlib.import_module(MOVED[module])
        assert getattr(old, name) is getattr(home, name)
        with pytest.raises(AttributeError):
            old.nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("coulomb.attention.doors")
