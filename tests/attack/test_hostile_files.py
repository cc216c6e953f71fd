"""Hostile files: a right answer or one sentence, and never anything else.

A file is made from a good one by changing one field, one tensor or some bytes, and
given to every verb that reads it. `make attack FILES=500` tries more of them.
"""

import io
import json
import os
import random
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from attack_cases import Child, flags, run_cli, write_data, write_encoder
from hostile import mutants, put
from safetensors.numpy import load_file, save_file

from coulomb import CoulombClassifier, CoulombSampler
from coulomb._support.errors import CoulombError
from coulomb._support.progress import visible_text
from coulomb.attention.layers.replace import _card
from coulomb.cli.text import _json_line, _write_csv
from coulomb.experiments.records import load_records, write_compressed
from coulomb.experiments.runner import write_sample
from coulomb.linearise import load_pretrained
from coulomb.report.chart import Axis, Chart, Curve, drawable
from coulomb.report.page import arrange, read_results

FILES = int(os.environ.get("FILES", "25"))
ROWS = pd.DataFrame(np.random.default_rng(0).normal(size=(40, 3)), columns=[*"abc"])
ROWS["words"] = [*"xyyz"] * 10
MEMORY = 2**34  # bytes of address space that a child may ask for

pytest.importorskip("transformers")


def api(call):
    """A call of the library that ends as the command line does."""
    try:
        call()
    except (CoulombError, OSError) as error:
        print(f"coulomb: {error}".encode("utf-8", "replace").decode(), file=sys.stderr)
        return 2
    return 0


def read_estimator(path):
    features = CoulombSampler.load(path).transform(np.ones((2, 3)))
    if not np.isfinite(features).all():
        raise ArithmeticError("features are not finite")


def read_classifier(path):
    chances = CoulombClassifier.load(path).predict_proba(ROWS)
    if chances.shape != (40, 2) or not np.isfinite(chances).all():
        raise ArithmeticError("probabilities are not finite")


def read_encoder(folder):
    model = load_pretrained(folder)
    with torch.no_grad():
        out = model(torch.ones(1, 4, dtype=torch.long)).last_hidden_state
    if not bool(out.isfinite().all()):
        raise ArithmeticError("outputs are not finite")


def tiny_train(box, file, *options):
    columns = "--text", "review", "--label", "sentiment"
    short = flags(epochs=1, align_after=0, align_epochs=0.0)
    return run_cli(
        "train", box / file, *columns, "--out", box / "new", *short, *options
    )


RUN = {
    "predict": lambda box: run_cli("predict", box / "run", "a fine film"),
    "runs": lambda box: run_cli("runs", box),
    "go on": lambda box: run_cli("train", "--resume", box / "run"),
    "evaluate": lambda box: run_cli("evaluate", box / "run", "--json"),
}
PART = {"go on": lambda box: run_cli("train", "--resume", box / "part")}
DIAGNOSE = {"diagnose": lambda box: run_cli("diagnose", box / "run", "--twins", 2)}
RESULTS = {
    "claims": lambda box: run_cli("claims", box / "results"),
    "report": lambda box: run_cli("report", box / "results"),
}
LINEARISE = {
    "kernels": lambda box: run_cli(
        "kernels", box / "bert", "--texts", box / "texts.txt",
        "--n-features", "2", "--steps", 0, "--max-tokens", 64,
    )
}  # fmt: skip
READERS = {
    "run/config.json": RUN | DIAGNOSE,
    "run/metrics.json": RUN,
    "run/history.jsonl": {"go on": RUN["go on"]},
    "run/vocabulary.json": RUN,
    "run/weights.safetensors": RUN,
    "run/start.safetensors": DIAGNOSE,
    "run/particles.safetensors": DIAGNOSE,
    "part/checkpoint.safetensors": PART,
    "part/history.jsonl": PART,
    "part/config.json": PART,
    "part/particles.safetensors": PART,
    "results/noise/records.jsonl": RESULTS,
    "results/strength.csv.gz": RESULTS,
    "features.safetensors": {
        "load": lambda box: api(lambda: read_estimator(box / "features.safetensors"))
    },
    "classifier.safetensors": {
        "load": lambda box: api(lambda: read_classifier(box / "classifier.safetensors"))
    },
    "reviews.csv": {"train": lambda box: tiny_train(box, "reviews.csv")},
    "rows.jsonl": {"train": lambda box: tiny_train(box, "rows.jsonl")},
    "rows.parquet": {"train": lambda box: tiny_train(box, "rows.parquet")},
    "settings.toml": {
        "train": lambda box: tiny_train(
            box, "reviews.csv", "--config", box / "settings.toml"
        )
    },
    "words.json": {
        "train": lambda box: tiny_train(
            box, "reviews.csv", "--vocabulary", box / "words.json"
        )
    },
    "bert/config.json": LINEARISE,
    "bert/tokenizer.json": LINEARISE,
    "bert/tokenizer_config.json": LINEARISE,
    "bert/model.safetensors": LINEARISE,
    "fast/config.json": {
        "load": lambda box: api(lambda: read_encoder(box / "fast")),
    },
    "fast/model.safetensors": {
        "load": lambda box: api(lambda: read_encoder(box / "fast")),
    },
}


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    """One good file of every format."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("good")
    write_data(folder)
    rows = [{"review": "a fine film", "sentiment": "pos"}] * 12
    rows += [{"review": "a dull film", "sentiment": "neg"}] * 12
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), folder / "rows.parquet"
    )
    (folder / "settings.toml").write_text('preset = "default"\nlr = 1e-3\nseed = 2\n')
    columns = "--text", "review", "--label", "sentiment"
    out = folder / "run"
    assert (
        run_cli("train", folder / "reviews.csv", *columns, "--out", out, *flags()) == 0
    )
    shutil.copy(out / "vocabulary.json", folder / "words.json")
    shutil.copytree(out, folder / "part")
    (folder / "part" / "metrics.json").unlink()
    for path in (out, folder / "part"):
        assert (path / "checkpoint.safetensors").exists()
    write_sample(folder / "results", ["noise"])
    records = folder / "results" / "noise" / "records.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:8]))
    write_compressed(folder / "results" / "strength.csv.gz", load_records(records))
    X = ROWS[["a", "b", "c"]].to_numpy()
    model = CoulombSampler(6, max_iter=3, random_state=0).fit(X, X[:, 0] > 0)
    model.save(folder / "features.safetensors")
    classifier = CoulombClassifier(4, random_state=0).fit(ROWS, X[:, 0] > 0)
    classifier.save(folder / "classifier.safetensors")
    write_encoder(folder / "bert")
    assert (
        run_cli(
            "linearise", folder / "bert", "--texts", folder / "texts.txt",
            "--out", folder / "fast", "--n-features", 4, "--steps", 2,
            "--distil-steps", 0,
        )
        == 0
    )  # fmt: skip
    return folder


def attack(box, folder, file, name, data, reader):
    """Give one bad file to one reader; say what went wrong, if anything did."""
    here = folder / "box"
    shutil.copytree(box, here)
    put(here / file, name, data)
    (folder / "outside").write_text("untouched")
    child = Child(lambda: reader(here), folder, memory=MEMORY)
    code = child.end()
    if code is None:
        return "hangs"
    told, printed = child.told(), child.printed()
    names = {path.name for path in folder.iterdir()}
    problem = ""
    if "Traceback" in told or code not in (0, 1, 2):
        problem = f"ends with {code}: {told[-600:]}"
    elif code and "coulomb: " not in told:
        problem = f"ends with {code} and says nothing"
    elif "\x1b" in told + printed:
        problem = "passes escape bytes on"
    elif printed.startswith("{") and ("NaN" in printed or "Infinity" in printed):
        problem = "prints what is not a number"
    elif names != {"box", "outside", "stdout", "stderr"}:
        problem = f"writes {names}"
    shutil.rmtree(here)
    return problem


@pytest.mark.parametrize("file", READERS)
def test_hostile_files(file, box, tmp_path):
    draw = random.Random(file)
    every = [
        (name, data, verb)
        for name, data in mutants(box / file)
        for verb in READERS[file]
    ]
    some = draw.sample(every, min(len(every), -(-FILES // len(READERS))))
    problems = []
    for name, data, verb in some:
        found = attack(box, tmp_path, file, name, data, READERS[file][verb])
        if found:
            problems.append(f"{file}, {name}, {verb}: {found}")
    print(f"{file}: {len(some)} of {len(every)} tried, {len(problems)} problems")
    assert not problems, "\n\n".join(problems)


EVIL_NAME = "evil\x1b[2Jname"


@pytest.mark.parametrize("shape", [(2,), ()], ids=["extra", "mismatched"])
def test_reports_of_transformers_hold_nothing_of_a_file(shape, box, tmp_path):
    """They name tensors, as a stranger has named them."""
    here = tmp_path / "box"
    shutil.copytree(box, here)
    file = here / "bert" / "model.safetensors"
    tensors = load_file(file)
    tensors[EVIL_NAME] = np.zeros(2)
    if not shape:
        name = next(iter(load_file(file)))
        tensors[name] = tensors[name][..., :-1].copy()
    save_file(tensors, file, metadata={"format": "pt"})
    child = Child(lambda: LINEARISE["kernels"](here), tmp_path)
    assert child.end() == (0 if shape else 2), child.told()
    assert "\x1b" not in child.told()
    assert "evil" not in child.told() + child.printed()
    if not shape:
        assert name in child.told()


@pytest.mark.parametrize("name", ["num_labels", "type_vocab_size"])
def test_sizes_of_a_model_are_checked_before_it_is_described(name, box, tmp_path):
    """A description names every label: a billion of them are 100 GB."""
    here = tmp_path / "box"
    shutil.copytree(box, here)
    file = here / "bert" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: 10**9}))
    child = Child(lambda: LINEARISE["kernels"](here), tmp_path, memory=MEMORY)
    assert child.end() == 2, child.told()
    assert f"`{name}` of config.json cannot be 1000000000" in child.told()


def test_the_name_of_a_folder_adds_nothing_to_a_model_card():
    evil = "bert: [\n---\nlicense: mit\x1b[2J"
    model = SimpleNamespace(name_or_path=f"models/{evil}", config=SimpleNamespace())
    card = _card(model, None, None)
    header = card.split("---\n")[1].splitlines()
    assert [line.split(":")[0] for line in header] == [
        "base_model", "library_name", "pipeline_tag", "tags",
    ]  # fmt: skip
    assert json.loads(header[0].removeprefix("base_model: ")) == evil
    assert "\x1b" not in card


@pytest.mark.parametrize("count", [150, 201])
def test_a_page_of_many_settings_is_bounded(count, tmp_path):
    """Each value of `constants` is a group of four charts, of half a second each."""
    write_sample(tmp_path, ["noise"])
    file = tmp_path / "noise" / "records.jsonl"
    record = json.loads(file.read_text().splitlines()[0])
    lines = []
    for number in range(count):
        record["job"] |= {"constants": f"mine {number}", "trial": number}
        lines.append(json.dumps(record) + "\n")
    file.write_text("".join(lines))
    if count > 200:
        with pytest.raises(CoulombError, match=r"`job.constants` has 201 names or v"):
            load_records(file.parent)
        return
    contents = arrange(read_results(tmp_path))
    (section,) = contents.sections
    assert sum(len(group.charts) for group in section.groups) == 36
    assert any("the first 36 of 600 charts" in told for told in contents.problems)


def test_a_picture_of_many_rows_is_bounded():
    layers = tuple(Curve(f"c{i}", (0.0, 1.0), (0.0, i)) for i in range(150))
    shown = drawable(Chart("k", "t", Axis("x"), Axis("y"), layers, "Means."))
    assert len(shown.layers) == 100
    assert shown.caption == "Means. The first 100 of 150 rows."


EVIL = "a\x1b[2J\x9b2J\u202eb\u2066\u2028c\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_finds_nothing_to_act_on_in_predictions():
    row = {"text": EVIL, "prediction": EVIL, "probabilities": {EVIL: 1.0, "ä": 0.0}}
    line = _json_line(row)
    assert json.loads(line) == row
    assert "ä" in line
    screen, file = Terminal(), io.StringIO()
    for table in (screen, file):
        _write_csv(table, [{"text": EVIL, EVIL: EVIL, "ä": 0.5}])
    for shown in (line, screen.getvalue(), visible_text(EVIL)):
        assert not set(EVIL) - {*"abc2J[\n"} & set(shown)
    assert EVIL in file.getvalue()  # the data as they are
