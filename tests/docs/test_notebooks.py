"""The notebooks: made of three examples, and run by a kernel of their own.

`python tests/docs/test_notebooks.py` writes them again after an example has changed.
"""

import ast
import re
import textwrap
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "notebooks"
MADE_OF = {
    "table": "predict_a_table",
    "attention": "attention_in_torch",
    "text": "text_classifier",
}


def write_notebook(example):
    """Make cells of the story, of each definition and of each paragraph of `main`."""
    text = example.read_text("utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    title, story = re.split(r"\n=+\n+", ast.get_docstring(tree))
    nodes = tree.body[1:-1]  # without the docstring and the call of `main`
    defined = [isinstance(node, ast.FunctionDef | ast.ClassDef) for node in nodes]
    begin = defined.index(True)
    spans = [(nodes[0], nodes[begin - 1]), *((node, node) for node in nodes[begin:])]
    cells = ["\n".join(lines[a.lineno - 1 : b.end_lineno]) for a, b in spans]
    body = textwrap.dedent(cells.pop().partition("\n")[2])  # of `main`
    cells += re.split(r"\n\n(?=\S)", body)
    path = example.relative_to(ROOT).as_posix()
    first = f"# {title}\n\n{story}\n\nThe same as a script is `{path}`."
    made = [nbformat.v4.new_markdown_cell(first)]
    made += map(nbformat.v4.new_code_cell, cells)
    for number, cell in enumerate(made):
        cell["id"] = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book = nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": kernel})
    nbformat.validate(book)
    return nbformat.writes(book) + "\n"


@pytest.mark.parametrize("name", MADE_OF)
def test_a_notebook_is_what_its_example_says(name):
    made = write_notebook(ROOT / "examples" / f"{MADE_OF[name]}.py")
    assert made == (FOLDER / f"{name}.ipynb").read_text("utf-8")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("attention", marks=pytest.mark.slow),
        pytest.param("table", marks=pytest.mark.long),
        pytest.param("text", marks=pytest.mark.long),
    ],
)
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, timeout=300, resources=place).execute()
    outputs = [output for cell in book.cells[1:] for output in cell.outputs]
    assert {output.get("name") for output in outputs} == {"stdout"}  # no warnings


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, example in MADE_OF.items():
        made = write_notebook(ROOT / "examples" / f"{example}.py")
        (FOLDER / f"{name}.ipynb").write_text(made, "utf-8")
