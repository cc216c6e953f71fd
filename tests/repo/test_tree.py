"""Rules of the tree that a machine can check."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_global_randomness_and_no_unsafe_loading(path):
    text = path.read_text()
    for pattern in (
        r"np\.random\.(seed|rand|randn|normal|uniform)\(",
        r"torch\.manual_seed\(",
        r"(?<![.\w])random\.seed\(",
        r"pickle\.loads?\(",
        r"torch\.load\(",
        r"allow_pickle=True",
        r"(?<![.\w])eval\(",
        r"(?<![.\w])exec\(",
    ):
        assert not re.search(pattern, text), pattern


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_drawing_takes_a_generator(path):
    """torch's drawing functions are never called without their generator."""
    drawing = {"rand", "randn", "randint", "randperm", "multinomial", "normal"}
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in drawing
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
        ):
            assert "generator" in {word.arg for word in node.keywords}, node.lineno


def test_no_local_paths_and_no_large_files():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split():
        path = ROOT / name
        if not path.is_file():
            continue
        assert path.stat().st_size < 1_000_000, name
        if path.suffix in {".py", ".md", ".toml", ".txt", ".yaml", ".cff"}:
            text = path.read_text()
            assert not re.search(r"(^|[^\w.])/(work|farm|root|home)/\w", text), name
