"""The documentation: every Python block runs, every link leads somewhere."""

import importlib
import re
import runpy
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    # Those that `make docs` leaves in docs/api are copies.
    *sorted(
        page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "api"
    ),
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


def test_links_lead_somewhere():
    missing = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in LINK.findall(page.read_text())
        if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists()
    ]
    assert not missing, "\n".join(missing)


def exists(name):
    """Whether a dotted name is a module or something in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            thing = getattr(thing, part, None)
        return thing is not None
    return False


def test_names_and_files_exist():
    """What pages call by its full name is there, after every move."""
    missing = []
    for page in PAGES:
        text = page.read_text()
        names = set(re.findall(r"(?<![\w.-])coulomb(?:\.[A-Za-z_]\w*)+", text))
        paths = set(
            re.findall(r"(?<![\w/])(?:src|tests|benchmarks|examples)/[\w/]+\.py", text)
        )
        missing += [f"{page.name}: {name}" for name in names if not exists(name)]
        missing += [
            f"{page.name}: {path}" for path in paths if not (ROOT / path).exists()
        ]
    assert not missing, "\n".join(sorted(missing))


@pytest.mark.long
@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem
)
def test_examples_are_short_and_run(example, tmp_path, monkeypatch, capsys):
    assert len(example.read_text().splitlines()) <= 80
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
    drawn = plt.get_fignums()
    plt.close("all")
    assert capsys.readouterr().out or drawn
    assert not list(tmp_path.iterdir())
