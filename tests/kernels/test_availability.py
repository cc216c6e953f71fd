import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np

import coulomb
from coulomb.kernels import available
from coulomb.kernels.particles import FourierData

SOURCE = Path(coulomb.__file__).parents[1]


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), **environment},
        capture_output=True,
        text=True,
        timeout=500,  # of a busy machine; pytest ends a test at 600
        check=False,
    )


def test_switched_off_by_the_environment(monkeypatch):
    assert available()
    monkeypatch.setenv("COULOMB_NUMBA", "0")
    assert not available()


def test_importing_neither_imports_nor_needs_numba():
    result = run(
        """
        import sys
        import coulomb.kernels.particles
        print("numba" in sys.modules)
        sys.modules["numba"] = None
        for name in [name for name in sys.modules if name.startswith("coulomb")]:
            del sys.modules[name]
        import coulomb.kernels.particles
        assert not coulomb.kernels.available()
        print(coulomb.kernels.particles.index_directions(2, 1).shape)
        """
    )
    assert result.stdout.split("\n")[:2] == ["False", "(2, 1)"], result.stderr


def test_compiles_where_nothing_can_be_cached(tmp_path):
    # Folders that cannot exist stop even the superuser from writing.
    shutil.copytree(
        SOURCE / "coulomb",
        tmp_path / "coulomb",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (tmp_path / "coulomb/kernels/__pycache__").touch()
    result = run(
        """
        import numpy as np
        from coulomb.kernels import math
        a = np.zeros(8, np.float32)
        math.sincos_row(a, a.copy(), a)
        print(math.__file__, a[0])
        """,
        PYTHONPATH=str(tmp_path),
        PYTHONDONTWRITEBYTECODE="1",
        HOME="/dev/null",
        XDG_CACHE_HOME="/dev/null",
        NUMBA_CACHE_DIR="",
    )
    assert str(tmp_path) in result.stdout, result.stderr
    assert result.stdout.split()[-1] == "1.0"


def test_a_forked_child_computes_again(rng):
    # In a process of its own: pytest's may hold threads that fork warns about.
    result = run(
        """
        import os, signal, warnings
        import numpy as np
        from coulomb.kernels.particles import FourierData
        rng = np.random.default_rng(0)
        x = rng.normal(size=(3000, 5)).astype("f4")
        data = FourierData.of(x, x[:, :1])
        first = data.alignment(x[:400], scale=1.0, threads=2)[1]
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            again = data.alignment(x[:400], scale=1.0, threads=2)[1]
            os._exit(0 if np.array_equal(first, again) else 3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert result.stdout.strip() == "0", result.stderr


def test_data_take_the_type_of_the_samples(rng):
    data = FourierData.of(rng.normal(size=(5, 2)).astype("f4"), np.ones((5, 1)))
    assert data.targets.dtype == np.float32


def test_the_cache_notices_changes_in_called_files(tmp_path):
    # The loop that is cached is in one file, the exponential it calls in another.
    shutil.copytree(
        SOURCE / "coulomb",
        tmp_path / "coulomb",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    code = """
        import numpy as np
        from coulomb.kernels import packed_encoder as loops
        x = np.full((1, 8), 0.5, np.float32)
        out = np.zeros_like(x)
        loops.gelu_rows(x, np.zeros(8, np.float32), (0, 0, 1.0), out)
        print(sum(loops.gelu_rows.stats.cache_hits.values()), out[0, 0])
        """
    runs = [run(code, PYTHONPATH=str(tmp_path)) for _ in range(2)]
    before, again = (result.stdout.split() for result in runs)
    assert (before[0], again[0]) == ("0", "1"), runs[0].stderr
    assert before[1] == again[1]
    source = tmp_path / "coulomb/kernels/math.py"
    text = source.read_text()
    changed = text.replace("power = _ONE + r", "power = _TWO + r")
    assert changed != text
    source.write_text(changed)
    after = run(code, PYTHONPATH=str(tmp_path)).stdout.split()
    assert after[0] == "0"
    assert after[1] != before[1]
    folders = list((tmp_path / "coulomb/kernels/__pycache__").glob("coulomb-*"))
    assert len(folders) == 1
