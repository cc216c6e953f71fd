"""Rules of the tree that a machine can check."""

import ast
import io
import re
import subprocess
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PUBLIC_PRIVATE = {"_version", "__version__"}
# Ceilings of src: lines of code (no blanks, comments, docstrings), docstrings, files.
# They fall, but for features that were asked for (the last: a server, CSV files as they
# come, bounds of stranger's files, texts with quantities, ONNX, a baseline for tags, a
# loop for near keys); the goals are 25,000 lines of code and 140 files.
MOST_CODE, MOST_DOCSTRINGS, MOST_FILES = 28_449, 10_209, 134


FORBIDDEN = (
    r"np\.random\.(seed|rand|randn|normal|uniform)\(",
    r"torch\.manual_seed\(",
    r"(?<![.\w])random\.seed\(",
    r"pickle\.loads?\(",
    r"torch\.load\(",
    r"allow_pickle=True",
    r"(?<![.\w])eval\(",
    r"(?<![.\w])exec\(",
)
DRAWING = {"rand", "randn", "randint", "randperm", "multinomial", "normal"}


@cache
def parsed(path):
    return ast.parse(path.read_text())


def docstring_lines(tree):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            yield from range(node.body[0].lineno, node.body[0].end_lineno + 1)


def code_lines(text):
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT}
    layout |= {tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            yield from range(token.start[0], token.end[0] + 1)


def test_the_tree_stays_small():
    """`pytest tests/repo/test_tree.py -k small -s` prints how large it is."""
    code = docstrings = 0
    for path in SOURCES:
        words = set(docstring_lines(parsed(path)))
        code += len(set(code_lines(path.read_text())) - words)
        docstrings += len(words)
    files = len(SOURCES)
    print(f"{code:,} lines of code, {docstrings:,} of docstrings, {files} files")
    assert code <= MOST_CODE
    assert docstrings <= MOST_DOCSTRINGS
    assert files <= MOST_FILES


def test_no_global_randomness_and_no_unsafe_loading():
    offenders = [
        f"{path.relative_to(ROOT)}: {pattern}"
        for path in SOURCES
        for pattern in FORBIDDEN
        if re.search(pattern, path.read_text())
    ]
    assert not offenders, "\n".join(offenders)


def test_drawing_takes_a_generator():
    """torch's drawing functions are never called without their generator."""
    offenders = []
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in DRAWING
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "torch"
                and "generator" not in {word.arg for word in node.keywords}
            ):
                offenders.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not offenders, "\n".join(offenders)


def test_no_private_names_of_other_packages():
    """An underscore ends at its package: modules and names alike."""
    offenders = []
    for path in SOURCES:
        own = path.relative_to(ROOT / "src" / "coulomb").parts[0].removesuffix(".py")
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            parts = node.module.split(".")
            if parts[0] != "coulomb" or parts[1:2] in ([own], ["_support"]):
                continue
            names = [*parts[1:], *(alias.name for alias in node.names)]
            private = [n for n in names if n[0] == "_" and n not in PUBLIC_PRIVATE]
            if private:
                offenders.append(f"{path.relative_to(ROOT)}:{node.lineno} {private}")
    assert not offenders, "\n".join(offenders)


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
