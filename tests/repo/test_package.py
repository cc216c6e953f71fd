"""The distribution: it builds, installs and runs without the repository."""

import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel and an sdist, built from a copy so that nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".venv", ".git", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    # The environment has the build backend: no network is needed.
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source],
        check=True,
        capture_output=True,
    )
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def test_wheel_holds_the_package_and_nothing_else(built):
    names = zipfile.ZipFile(built[0]).namelist()
    assert "coulomb/py.typed" in names
    assert {name.split("/")[0] for name in names} == {
        "coulomb",
        built[0].name.removesuffix("-py3-none-any.whl") + ".dist-info",
    }


def test_sdist_holds_what_a_packager_needs(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "tests/conftest.py"} <= names
    assert not [name for name in names if ".venv" in name or "__pycache__" in name]


@pytest.mark.parametrize("kind", [0, 1], ids=["wheel", "sdist"])
def test_installs_and_runs(built, kind, tmp_path):
    """Into an environment that sees this one's dependencies but not its coulomb."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    here = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    outer = next(p for p in sys.path if p.endswith("site-packages"))
    Path(here, "outer.pth").write_text(outer + "\n")
    subprocess.run(
        [python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-q",
         "--force-reinstall", built[kind]],
        check=True,
        capture_output=True,
    )  # fmt: skip
    code = "import coulomb; print(coulomb.__file__); coulomb.CoulombSampler"
    result = subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert str(tmp_path) in result.stdout
    command = tmp_path / "env" / "bin" / "coulomb"
    version = subprocess.run(
        [command, "--version"], check=True, capture_output=True, text=True
    )
    assert version.stdout.startswith("coulomb ")
