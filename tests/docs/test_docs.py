"""The documentation: every Python block runs, every link leads somewhere."""

import os
import re
from pathlib import Path

import matplotlib
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def pages_with_code():
    """Pages of plain blocks; those with prompts are doctests, run by tests/theory."""
    pages = [page for page in PAGES if BLOCK.search(page.read_text())]
    return [page for page in pages if "\n>>> " not in page.read_text()]


@pytest.mark.parametrize(
    "page", pages_with_code(), ids=lambda page: str(page.relative_to(ROOT))
)
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    scope = {"__name__": "documentation"}
    for number, block in enumerate(BLOCK.findall(page.read_text())):
        code = compile(block, f"{page.name}, block {number}", "exec")
        exec(code, scope)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), target


def test_examples_are_short_and_run(tmp_path):
    import subprocess
    import sys

    examples = sorted((ROOT / "examples").glob("*.py"))
    assert examples
    for example in examples:
        assert len(example.read_text().splitlines()) <= 80, example.name
        subprocess.run(
            [sys.executable, example],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
