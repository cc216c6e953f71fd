"""Every command of the guide to scale, run on loopback as a user would."""

import os
import re
import shlex
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guide-scale.md"
BLOCKS = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
TEXTS = [f"{word} {end} film" for word in ("good", "bad") for end in "abcdefghij"]
LABELS = [text.startswith("good") for text in TEXTS]
QUICK = " --epochs 2 --batch-size 8 --max-length 8 --threads 1"
SCRATCH = " --width 16 --ffn-width 16 --n-features 8 --n-layers 1 --min-steps 0"
SCRATCH += " --preset default --align-epochs 1"
# What a command of the guide is followed by here, to be small.
SMALL = {
    "coulomb reproduce noise": " --preset smoke",
    "coulomb train --task": QUICK + SCRATCH,
    "coulomb train reviews.csv": QUICK + " --attention softmax",
    "coulomb linearise": " --n-features 8 --steps 5 --distil-steps 2",
    "dask scheduler": " --host 127.0.0.1 --dashboard-address :0",
    "dask worker": " --no-dashboard --local-directory .",
}
# What each command must have printed once, by all its processes together.
TOLD = {"train": "Best epoch", "linearise": "Model: fast", "reproduce": " 0 failed"}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture
def folder(tmp_path):
    """What the commands of the guide find where they run."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "data" / "sst2").mkdir(parents=True)
    rows = pyarrow.table({"sentence": TEXTS, "label": [int(x) for x in LABELS]})
    for name in ("train", "validation", "test"):
        pyarrow.parquet.write_table(rows, tmp_path / f"data/sst2/{name}.parquet")
    named = zip(TEXTS, LABELS, strict=True)
    lines = ["review,sentiment", *(f"{text},{label}" for text, label in named)]
    (tmp_path / "reviews.csv").write_text("\n".join(lines))
    (tmp_path / "reviews.txt").write_text("\n".join(TEXTS))
    encoder = tmp_path / "bert-folder"
    encoder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += sorted({word for text in TEXTS for word in text.split()})
    (encoder / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizerFast(str(encoder / "vocab.txt"))
    tokenizer.save_pretrained(encoder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 16}
    config = transformers.BertConfig(vocab_size=len(words), **sizes)
    transformers.BertModel(config).save_pretrained(encoder)
    return tmp_path


def adapted(block):
    """Give the commands of a block, small, on this machine and at free ports."""
    ports = {"10.0.0.7": "127.0.0.1", "host:": "127.0.0.1:", "torchrun ": "torchrun "}
    ports |= {"8786": free_port(), "29500": free_port()}
    ports["--nnodes 4 --nproc-per-node 8"] = "--nnodes 2 --nproc-per-node 1"
    ports["accelerate launch"] = f"accelerate launch --main_process_port {free_port()}"
    if "nnodes" not in block:  # else all runs of one machine would meet at one port
        ports["torchrun "] = f"torchrun --master-port {free_port()} "
    for command in block.replace("\\\n", " ").splitlines():
        for old, new in ports.items():
            command = command.replace(old, new)
        yield command + "".join(SMALL[verb] for verb in SMALL if verb in command)


def started(command, folder):
    program, *words = shlex.split(command)
    return subprocess.Popen(
        [str(Path(sys.executable).with_name(program)), *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COULOMB_TUNE": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    BLOCKS.findall(GUIDE.read_text()),
    ids=lambda block: " ".join(block.split()[:2]),
)
def test_commands(block, folder):
    if "accelerate" in block:
        pytest.importorskip("accelerate")
    with ExitStack() as servers:
        for command in adapted(block):
            if command.startswith("dask"):
                server = servers.enter_context(started(command, folder))
                servers.callback(server.terminate)
                continue
            if "--resume" in command:
                (folder / "run" / "metrics.json").unlink()
            machines = 1 + ("--nnodes" in command)
            running = [started(command, folder) for _ in range(machines)]
            said = [process.communicate(timeout=500) for process in running]
            assert [process.returncode for process in running] == [0] * machines, said
            printed, errors = ("".join(texts) for texts in zip(*said, strict=True))
            for verb, told in TOLD.items():
                if f"coulomb {verb}" in command:
                    assert printed.count(told) == 1, said
            if "--scheduler" in command:
                assert "Dask's dashboard: http://" in errors
                assert (folder / "results" / "noise" / "records.jsonl").exists()
            if "doctor" in command:
                assert "wrong" not in printed


def test_no_command_is_left_out():
    """All engines have a block, and the extras that the guide names are declared."""
    programs = {block.split()[0] for block in BLOCKS.findall(GUIDE.read_text())}
    assert programs == {"coulomb", "dask", "torchrun", "accelerate"}
    extras = (GUIDE.parents[1] / "pyproject.toml").read_text()
    for name in re.findall(r"coulomb\[([\w-]+)\]", GUIDE.read_text()):
        assert f"\n{name} = [" in extras
