"""The verbs `linearise` and `kernels`, on a tiny saved model."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
import torch
import typer
from linearise_cases import bert_tokenizer, make_texts, tiny_model
from safetensors.torch import load_file
from typer.testing import CliRunner

from coulomb._support.errors import FileFormatError, ParameterError
from coulomb.cli.linearise import kernels, linearise
from coulomb.linearise import kernel_table, linearised_heads, load_pretrained

transformers = pytest.importorskip("transformers")

app = typer.Typer()
app.command()(linearise)
app.command()(kernels)


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    tokenizer = bert_tokenizer(path)
    tokenizer.save_pretrained(path)
    tiny_model("bert").save_pretrained(path)
    (path / "texts.txt").write_text("\n".join(make_texts(30)))
    return path


def test_linearise_saves_a_model_that_loads(folder, tmp_path):
    out = run(
        "linearise", folder, "--texts", folder / "texts.txt", "--out", tmp_path / "out",
        "--n-features", 8, "--steps", 5, "--distil-steps", 2, "--keep-exact", "0.1",
        "--json", tmp_path / "numbers.json", "--int8",
    )  # fmt: skip
    assert "cosine with the softmax embedding" in out
    assert "eight bits" in out
    assert "tokens:" not in out  # the model reads 40
    model = load_pretrained(tmp_path / "out")
    assert [heads.exact_heads for heads in linearised_heads(model)] == [(1,), ()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    pipe = transformers.pipeline("feature-extraction", model=model, tokenizer=tokenizer)
    assert len(pipe("abc")[0][0]) == 16
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["exact_heads"] == [[1], []]
    assert 0.5 < numbers["cosine_int8"] < 1
    assert model.config.coulomb["int8"]
    assert numbers["speed"] == {}


@pytest.mark.slow
def test_processes_write_one_model_though_one_is_killed(folder, tmp_path):
    """Two learn two layers of four, and one of them is killed; three learn the rest."""
    tiny_model("bert", layers=4).save_pretrained(tmp_path / "four")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(
        tmp_path / "four"
    )
    verb = ["linearise", tmp_path / "four", "--texts", folder / "texts.txt"]
    verb += ["--n-features", 8, "--steps", 30, "--distil-steps", 30]

    def start(count):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", count, "-m", "coulomb", *verb]
        return subprocess.Popen(
            [*map(str, launch), "--out", tmp_path / "many"], text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    kept, began = tmp_path / "many.partial" / "layers.safetensors", time.monotonic()
    with start(2) as running:
        while not kept.exists():
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < began + 300
            time.sleep(0.01)
        psutil.Process(running.pid).children()[-1].kill()
        _, said = running.communicate(timeout=300)
    assert running.returncode != 0
    sentences = [line for line in said.splitlines() if line.startswith("coulomb:")]
    assert len(sentences) == 1, said
    assert sentences[0].endswith("The same command goes on from there.")
    assert not (tmp_path / "many").exists()
    assert len({name.split(".")[0] for name in load_file(kept)}) in (2, 4)
    with start(3) as running:
        printed, said = running.communicate(timeout=300)
    assert running.returncode == 0, said
    assert printed.count("Model:") == 1
    run(*verb, "--out", tmp_path / "one")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"four", "one", "many"}
    one, many = (load_pretrained(tmp_path / name) for name in ("one", "many"))
    for ours, theirs in zip(*map(linearised_heads, (one, many)), strict=True):
        torch.testing.assert_close(ours.particles, theirs.particles, rtol=0, atol=1e-3)


def test_long_texts_and_a_dry_run(folder, tmp_path):
    options = "--texts", folder / "texts.txt", "--out", tmp_path / "out"
    options += "--n-features", 8, "--steps", 2, "--distil-steps", 1
    options += "--max-length", 150, "--window", 3
    told = run("linearise", folder, *options, "--dry-run")
    assert "2 layers of 2 heads get 8 particles each (softmaxfeat, window 3)" in told
    assert "texts of at most 150 tokens are read" in told
    assert "s of processor time to learn" in told
    assert "  128 tokens:" in told
    assert not list(tmp_path.iterdir())
    out = run("linearise", folder, *options)
    assert "  128 tokens:" in out
    assert "512 tokens" not in out
    model = load_pretrained(tmp_path / "out")
    assert model.config.max_position_embeddings == 150
    assert [heads.window for heads in linearised_heads(model)] == [3, 3]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.model_max_length == 150


def test_kernels_prints_every_method(folder, tmp_path):
    out = run(
        "kernels", folder, "--texts", folder / "texts.txt", "--n-features", "4,16",
        "--steps", 20, "--json", tmp_path / "k.json",
    )  # fmt: skip
    numbers = json.loads((tmp_path / "k.json").read_text())
    assert numbers["methods"] == [
        "uniform",
        "elu + 1",
        "FAVOR+ 4",
        "orthogonal 4",
        "learned 4",
        "FAVOR+ 16",
        "orthogonal 16",
        "learned 16",
    ]
    for method in numbers["methods"]:
        assert len(numbers["divergence"][method]) == 2
    assert "Best kept exact (layer.head, KL of learned 16)" in out


def test_table_ranks_what_it_must(folder):
    model = transformers.AutoModel.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    table = kernel_table(model, tokenizer, make_texts(30), n_features=(4, 16), steps=30)
    mean = {m: sum(table.by_layer(m)) for m in table.methods}
    assert mean["learned 16"] < mean["learned 4"] < mean["uniform"]
    assert mean["learned 16"] < mean["orthogonal 16"]
    worst = table.worst_heads("learned 16", 2)
    assert worst[0][2] >= worst[1][2]
    again = kernel_table(model, tokenizer, make_texts(30), n_features=(4, 16), steps=30)
    assert again == table


class TestRefusals:
    def test_folder_without_a_model(self, folder, tmp_path):
        with pytest.raises(FileFormatError, match=r"no config\.json"):
            run("kernels", tmp_path, "--texts", folder / "texts.txt")

    def test_file_that_is_no_text(self, folder, tmp_path):
        (tmp_path / "a.bin").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(FileFormatError, match="not a text file in UTF-8"):
            run("kernels", folder, "--texts", tmp_path / "a.bin")

    def test_numbers_and_heads(self, folder):
        texts = "--texts", folder / "texts.txt"
        with pytest.raises(ParameterError, match="whole numbers with commas"):
            run("kernels", folder, *texts, "--n-features", "4,x")
        for wrong in ("x", "1.2.3", "0.1,2"):
            with pytest.raises(ParameterError, match=r"such as 0\.3,2\.11; got"):
                run("linearise", folder, *texts, "--out", "o", "--keep-exact", wrong)
