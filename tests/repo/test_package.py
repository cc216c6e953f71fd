"""The distribution: it builds, installs and runs without the repository."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An sdist and the wheel made of it; a copy, so that the tree stays as it is."""
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


def test_installs_and_runs(built, tmp_path):
    """From a folder, into an environment that sees this one's dependencies only.

    The wheel was built from the sdist, so that both are whole.
    """
    venv.create(tmp_path / "env")
    python, coulomb = (tmp_path / "env" / "bin" / x for x in ("python", "coulomb"))
    outer = next(p for p in sys.path if p.endswith("site-packages"))
    (site,) = (tmp_path / "env").glob("lib/*/site-packages")
    (site / "outer.pth").write_text(outer + "\n")
    clean = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}

    def run(*command):
        options = {"check": True, "capture_output": True, "text": True, "env": clean}
        return subprocess.run(command, cwd=tmp_path, **options).stdout

    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps",
        "--no-compile", "-q", "--force-reinstall", "--no-index",
        "--find-links", built[0].parent, "coulomb",
    )  # fmt: skip
    code = "import coulomb; print(coulomb.__file__); coulomb.CoulombSampler"
    assert str(tmp_path) in run(python, "-c", code)
    assert run(coulomb, "--version").startswith("coulomb ")


def test_the_version_is_dated_in_the_changelog_and_cited(built):
    from coulomb import __version__

    assert f"coulomb-{__version__}-" in built[0].name
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(
        rf"^## {re.escape(__version__)} - \d{{4}}-\d\d-\d\d$", changes, re.M
    )
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_extra_is_documented():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(r"^\| `([\w-]+)` \|", (ROOT / "docs/index.md").read_text(), re.M)
    assert {*rows, "dev"} == set(project["optional-dependencies"])
