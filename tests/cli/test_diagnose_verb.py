"""`coulomb diagnose` as a user meets it."""

import csv
import json
import random

import pytest
import typer.testing

from coulomb._support.errors import CoulombError
from coulomb.cli.main import app

RUNNER = typer.testing.CliRunner()
SHORT = {
    "epochs": 1,
    "batch-size": 16,
    "width": 32,
    "n-features": 32,
    "vocabulary-size": 100,
    "threads": 1,
}
FLAGS = [word for name, value in SHORT.items() for word in (f"--{name}", str(value))]
QUICK = ["--twins", "3", "--shuffles", "100"]


def run(*arguments):
    words = [str(word) for word in arguments]
    return RUNNER.invoke(app, words, env={"COLUMNS": "110"})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diagnose")
    draw = random.Random(0)
    with (folder / "reviews.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["review", "sentiment"])
        for number in range(200):
            words = draw.choices(["the", "a", "film", "plot", "cast", "story"], k=5)
            words.append(draw.choice(["fine great", "dull poor"][number % 2].split()))
            rows.writerow([" ".join(words), ["good", "bad"][number % 2]])
    names = ["--text", "review", "--label", "sentiment", "--preset", "paper-plain"]
    result = run(
        "train", folder / "reviews.csv", *names, *FLAGS, "--out", folder / "one"
    )
    assert result.exit_code == 0, (result.output, result.exception)
    return folder


def test_tables_and_a_verdict(trained):
    before = sorted(path.name for path in (trained / "one").iterdir())
    result = run("diagnose", trained / "one", *QUICK)
    assert result.exit_code == 0, (result.output, result.exception)
    for words in ("drift / noise", "layers.1.attention", "noise alone, 3 runs"):
        assert words in result.output
    last = result.output.splitlines()[-1]
    assert last.startswith("Phase A did not learn: its drift is drowned by its noise")
    assert sorted(path.name for path in (trained / "one").iterdir()) == before


def test_json_has_everything(trained, tmp_path):
    out = tmp_path / "found.json"
    options = [*QUICK, "--label-twins", "2", "--json", out]
    result = run("diagnose", trained / "one", *options)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "shuffled training labels, 2 runs" in result.output
    found = json.loads(out.read_text())
    assert found["run"] == "one"
    assert found["learned"] is False
    assert found["verdict"] in result.output
    assert len(found["twins"]) == 3
    assert len(found["label_twins"]) == 2
    assert len(found["shuffled_gains"]) == 100
    for name in ("drift_to_noise", "moved", "moved_by_noise", "apart", "cosines"):
        assert [len(row) for row in found[name]] == [2] * len(found["layers"])


def test_mistakes_are_one_sentence(trained, tmp_path):
    result = run("diagnose", tmp_path)
    assert isinstance(result.exception, CoulombError)
    assert "`coulomb runs` lists the runs there are" in str(result.exception)
    assert run("diagnose", trained / "one", "--twins", "1").exit_code == 2
    result = run("diagnose", trained / "one", "--label-twins", "1")
    assert "`--label-twins` must be 0 or at least 2" in str(result.exception)


def test_the_norms_of_pairs_are_shown(tmp_path, monkeypatch):
    """Whether two texts share words is all that their label says."""
    monkeypatch.setattr("coulomb.text.align.ENOUGH", 300)
    draw = random.Random(0)
    words = [f"{a}{b}" for a in "bdfklm" for b in ("ar", "el", "in", "os", "un")]
    with (tmp_path / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for number in range(400):
            draw.shuffle(words)
            second = words[2:8] if number % 2 else words[6:12]
            row = {"a": " ".join(words[:6]), "b": " ".join(second)}
            file.write(json.dumps(row | {"label": ["no", "yes"][number % 2]}) + "\n")
    names = ["--text", "a", "--text", "b", "--label", "label"]
    out = tmp_path / "pairs"
    told = [*names, *FLAGS, "--positions", "parts", "--out", out]
    result = run("train", tmp_path / "pairs.jsonl", *told)
    assert result.exit_code == 0, (result.output, result.exception)
    result = run("diagnose", out, *QUICK)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "blind to the part, 4 times as long" in result.output
    last = result.output.splitlines()[-1]
    assert last.startswith("Phase A learned: labels chose particles blind to the part")


def test_the_windows_of_a_tagger_are_shown(tmp_path):
    """Whether the word before is "not" is all that a tag says."""
    draw = random.Random(0)
    with (tmp_path / "tags.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(300):
            words = draw.choices(["not", "film", "plot", "cast", "story"], k=12)
            tags = ["yes" if word == "not" else "no" for word in ["", *words[:-1]]]
            file.write(json.dumps({"words": words, "tags": tags}) + "\n")
    names = ["--text", "words", "--label", "tags"]
    out = tmp_path / "tagger"
    result = run("train", tmp_path / "tags.jsonl", *names, *FLAGS, "--out", out)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "The labels chose that" in result.output.replace("\n", " ")
    result = run("diagnose", out, *QUICK)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "0, the token itself" in result.output
    assert "drift / noise" not in result.output
    first = [line for line in result.output.splitlines() if line.endswith("1 │")]
    assert first[0].split("│")[1].strip() == "-1"
    last = result.output.splitlines()[-1]
    assert last.startswith("Phase A learned: windows chosen by the labels (-1")
