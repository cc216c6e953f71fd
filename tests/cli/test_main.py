"""The command line as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer.testing

from coulomb import __version__
from coulomb.cli.main import app

RUNNER = typer.testing.CliRunner()


def verbs():
    return [command.callback.__name__ for command in app.registered_commands]


def test_help_lists_the_verbs():
    result = RUNNER.invoke(app, ["--help"])
    assert result.exit_code == 0
    for verb in verbs():
        assert verb in result.output


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_has_examples_in_its_help(verb):
    result = RUNNER.invoke(app, [verb, "--help"])
    assert result.exit_code == 0
    assert "Examples" in result.output
    assert f"coulomb {verb}" in result.output


def test_version():
    result = RUNNER.invoke(app, ["--version"])
    assert result.output == f"coulomb {__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete(shell):
    """What a shell runs once for its completion, and what it runs at each tab."""
    told = RUNNER.invoke(
        app, [], prog_name="coulomb", env={"_COULOMB_COMPLETE": f"source_{shell}"}
    )
    assert "_COULOMB_COMPLETE" in told.output
    if shell == "bash":
        env = {"_COULOMB_COMPLETE": "complete_bash", "COMP_WORDS": "coulomb lin"}
        found = RUNNER.invoke(
            app, [], prog_name="coulomb", env=env | {"COMP_CWORD": "1"}
        )
        assert found.output.split() == ["linearise"]


def test_unknown_verbs_are_refused():
    result = RUNNER.invoke(app, ["dmeo"])
    assert result.exit_code == 2
    assert "No such command 'dmeo'" in result.output


def test_demo(tmp_path, monkeypatch):
    few = {"synthetic": 24, "breast cancer": 8, "digits": 8}
    monkeypatch.setattr("coulomb.cli.demo._COMPONENTS", few)
    out = tmp_path / "out"
    result = RUNNER.invoke(app, ["demo", "--trials", "2", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "learned - control" in result.output
    assert "±" in result.output
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((out / "demo.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["synthetic", "breast cancer", "digits"]
    for row in rows:
        assert len(row["learned"]) == len(row["control"]) == 2
    assert sorted(path.name for path in out.iterdir()) == ["demo.json", "demo.png"]


def test_an_unwritable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    command = Path(sys.executable).with_name("coulomb")
    result = subprocess.run(
        [command, "demo", "--trials", "2", "--out", tmp_path / "file" / "out"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("coulomb: ")
    assert "Traceback" not in result.stderr
