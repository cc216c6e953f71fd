"""Several processes on one run: `torchrun` on this machine, with gloo."""

import json
import os
import runpy
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import typer.testing

from coulomb._support import ranks
from coulomb._support.ranks import Ranks
from coulomb.cli.main import app

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "scale.py"
RUNNER = typer.testing.CliRunner()
SECONDS = 200  # for what takes a tenth of it on an idle machine
SMALL = "--preset default --width 16 --n-features 8 --n-heads 2 --n-layers 1 --lr 0.01"
SMALL += " --ffn-width 32 --batch-size 10 --dropout 0 --word-dropout 0.1 --seed 3"
SMALL += " --min-steps 0 --align-epochs 2 --threads 1 --epochs 12"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COULOMB_TUNE": "0"}

# What every process computes of its own rows must be what one computes of all.
TOGETHER = """
import json, sys, torch
from dataclasses import replace
from coulomb._support.ranks import Ranks
from coulomb.attention import AlignmentSettings, EncoderSettings, KernelAttention
from coulomb.attention import KernelEncoder
from coulomb.attention.align.problem import Batch, ParticleLayers, build_problem
from coulomb.attention.encoder.layout import TokenBatch
from coulomb.attention.encoder.packed import feature_function
from coulomb.dynamics.langevin import ProjectedLangevin
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.interactions import ExactSum, FarFieldSum, RandomBatchSum, Riesz
from coulomb.objectives import FourierAlignment, Sample

ranks, draw = Ranks.join(), torch.Generator().manual_seed(0)
model = KernelEncoder(EncoderSettings(30, 2, width=16, n_heads=2, dropout=0.0),
                      KernelAttention, generator=0)
lengths = torch.tensor([3, 9, 4, 1, 7, 7, 2])
bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
ids = torch.randint(30, (int(lengths.sum()),), generator=draw)
labels = torch.tensor([0, 1, 1, 0, 0, 1, 1])
whole = TokenBatch(ids, bounds, labels)
found = {}
for name, level in (("centred", "sequence"), ("within-class", "layer"),
                    ("likelihood", "sequence"), ("centred", "head")):
    settings = AlignmentSettings(objective=name, level=level, also=("norm",))
    kind = "logits" if name == "likelihood" else "heads"
    options = {"held_out": None, "evaluate": feature_function(kind, "mean")}
    parts = []
    for rows in (torch.arange(7), torch.tensor([2])):  # one row: less than processes
        batch = whole.take(rows)
        own = batch.take(ranks.split(batch.cu_seqlens.diff())[ranks.rank])
        counted = ranks.writes or len(rows) >= ranks.world
        parts.append(Batch((own,), {}, None, own.labels, counted))
    every = [(whole, labels), (whole.take(torch.tensor([2])), labels[2:3])]
    shared = build_problem(model, parts, settings, ranks=ranks, **options)
    alone = build_problem(model, every, settings, **options)
    layers = ParticleLayers.find(model)
    particles = Particles(layers.read(model))
    (a, more), (b, same) = (x.objective.forces(particles) for x in (shared, alone))
    gap = [(a.gradient - b.gradient).abs().max() / b.gradient.abs().max()]
    gap += [(more[k] - same[k]).abs().max() / b.gradient.abs().max() for k in same]
    gap += [(a.potential - b.potential).abs().max()]
    found[f"{name} {level}"] = float(torch.stack(gap).max())
for dim in (5, 40):
    cloud = torch.randn(501, dim, generator=draw, dtype=torch.float64)
    cloud[7] = cloud[300]  # at the same place
    sums = ExactSum(tile=64), RandomBatchSum(20), FarFieldSum(8), FarFieldSum(0)
    for pairs in sums:
        draws = [torch.Generator().manual_seed(1) for _ in range(2)]
        one = pairs(Riesz(1.0, 0.01), cloud, generator=draws[0])
        shared = replace(pairs, ranks=ranks)
        two = shared(Riesz(1.0, 0.01), cloud, generator=draws[1])
        found[f"{pairs} {dim}"] = float(max((x - y).abs().max() / x.abs().max()
                                            for x, y in zip(one, two)))
sample = [torch.randn(50, n, generator=draw, dtype=torch.float64) for n in (5, 1)]
cloud = torch.randn(501, 5, generator=draw, dtype=torch.float64)
for pairs in (RandomBatchSum(20), FarFieldSum(8)):
    ends = []
    for kind in (pairs, replace(pairs, ranks=ranks)):
        force = FourierAlignment(Sample(*sample)), Riesz(1.0, 0.01), 0.1
        energy = Hamiltonian(*force, pair_sum=kind)
        sampler = ProjectedLangevin(0.1, 10.0)
        state, source = sampler.init(Particles(cloud)), torch.Generator().manual_seed(1)
        for _ in range(3):
            state, _ = sampler.step(state, energy, generator=source)
        ends.append(state.particles.positions)
    assert not torch.equal(ends[0], cloud)
    found[f"steps of {pairs}"] = float((ends[0] - ends[1]).abs().max())
if ranks.writes:
    print(json.dumps(found))
"""

# Three layers for two processes, and batches of one text and of several.
LINEAR = """
import json, sys, torch
from torch import nn
from coulomb._support.ranks import Ranks
from coulomb.linearise import linearise, linearised_heads

ranks, draw = Ranks.join(), torch.Generator().manual_seed(0)
table = 2 * torch.randn(26, 16, generator=draw)
texts = ["".join(chr(97 + int(c)) for c in torch.randint(26, (n,), generator=draw))
         for n in torch.randint(4, 30, (40,), generator=draw).tolist()]

def tokenize(some):
    rows = [[ord(c) - 97 for c in text[:24]] for text in some]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [-1] * (longest - len(row)) for row in rows])
    return {"src": table[ids.clamp_min(0)], "src_key_padding_mask": ids < 0}

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
fast = linearise(
    model, tokenize, texts, n_features=6, steps=12, check_every=4, distil_steps=6,
    window=2, max_length=24, batch_tokens=10, measure=False, checkpoint=sys.argv[1],
    ranks=ranks,
)
if ranks.writes:
    heads = [[x.particles.tolist(), x.tilt.tolist()] for x in linearised_heads(fast)]
    print(json.dumps([heads, fast.linearise_summary.as_dict()]))
"""


# The second process stops for good; the first waits for it, and then no longer.
HANGS = """
import os, signal
from datetime import timedelta

import torch

from coulomb._support import ranks

ranks._STEP = timedelta(seconds=15)
here = ranks.Ranks.join()
pids = here.collect(os.getpid())
if here.rank:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    here.add([torch.ones(1)])
except ranks.LostProcessError as lost:
    print(lost, flush=True)
if here.writes:
    os.kill(pids[1], signal.SIGKILL)
"""


def launch(count=2):
    """Start processes that meet at a port nobody else has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"
    return *torchrun, str(count), "--master-port", str(port)


def run(*command, folder, **options):
    done = subprocess.run(
        command,
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_rows_are_shared_out_by_tokens_without_overlap():
    lengths = torch.randint(1, 60, (37,), generator=torch.Generator().manual_seed(0))
    for world in (1, 2, 5, 37):
        shares = Ranks(0, world).split(lengths)
        assert torch.equal(torch.cat(shares).sort().values, torch.arange(37))
        tokens = [int(lengths[share].sum()) for share in shares]
        assert max(tokens) - min(tokens) <= int(lengths.max())
    blocks = [Ranks(rank, 3).block(10) for rank in range(3)]
    assert [i for block in blocks for i in range(10)[block]] == list(range(10))


def test_alone_nothing_is_sent():
    x = torch.ones(2)
    alone = Ranks.join()
    alone.add([x])
    assert alone == (0, 1)
    assert alone.gather(x) is x
    assert alone.share("a") == "a"
    assert alone.collect("a") == ["a"]


def test_what_is_sent_is_where_the_rows_are(monkeypatch):
    """As nccl wants it, which refuses tensors of the CPU; `meta` stands for a GPU."""
    sent = []

    def all_gather(parts, part, group=None):
        sent.extend([part, *parts])
        if part.dtype == torch.long:
            parts[:] = torch.tensor([2]), torch.tensor([3])

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    monkeypatch.setattr(torch.distributed, "all_reduce", sent.append)
    rows = torch.zeros(4, 2, device="meta")
    assert Ranks(0, 2).gather(rows, dim=1).shape == (4, 5)
    Ranks(0, 2).add([rows])
    assert len(sent) == 7
    assert {tensor.device.type for tensor in sent} == {"meta"}


def test_every_device_has_its_backend(monkeypatch):
    asked = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ranks, "_patient", list)
    monkeypatch.setattr(ranks.atexit, "register", id)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    values = {"is_nccl_available": True, "get_rank": 1, "get_world_size": 2}
    for name, value in values.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda backend, timeout: asked.append(backend),
    )
    assert Ranks.join() == (1, 2)
    assert asked == ["cpu:gloo,cuda:nccl"]


@pytest.mark.slow
def test_a_process_that_hangs_ends_all(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    command = [*launch(), "hangs.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, timeout=SECONDS
    )
    assert done.stdout.count(b"does not answer") == 1, done.stderr


@pytest.mark.slow
def test_scores_gradients_and_forces_are_those_of_one_process(tmp_path):
    """Sums in another order: rounding of float32, and of float64 for the forces."""
    (tmp_path / "together.py").write_text(TOGETHER)
    done = run(*launch(), "together.py", folder=tmp_path)
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 14
    for name, gap in found.items():
        assert gap < (1e-13 if "Sum" in name else 1e-5), (name, gap)
    assert max(gap for name, gap in found.items() if "Batch" in name) == 0


@pytest.mark.slow
def test_bytes_are_those_of_the_formulas(tmp_path):
    """Of particles, Phase A and linearising; headers and heads learned are the rest."""
    done = run(*launch(), str(BENCHMARK), "messages", folder=tmp_path)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 4
    for row in rows:
        assert row["formula"] <= row["written"] < 1.03 * row["formula"], row


@pytest.mark.slow
def test_an_encoder_is_linearised_as_by_one_process(tmp_path, monkeypatch, capsys):
    """Products of fewer texts are rounded otherwise, and steps add that up."""
    script = tmp_path / "linear.py"
    script.write_text(LINEAR)
    done = run(*launch(), str(script), str(tmp_path / "two"), folder=tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "one")])
    with torch.random.fork_rng():
        runpy.run_path(str(script))
    found = [json.loads(said) for said in (capsys.readouterr().out, done.stdout)]
    assert {path.name for path in tmp_path.iterdir()} == {"linear.py", "one", "two"}
    (one, told), (two, same) = found
    for ours, theirs in zip(one, two, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            gap = (torch.tensor(a) - torch.tensor(b)).abs().max()
            assert gap < 1e-4 * torch.tensor(a).abs().max()
    assert told["after"] == pytest.approx(same["after"], rel=1e-4)
    assert told["cosine"] == pytest.approx(same["cosine"], abs=1e-5)
    assert told["cosine"] > told["cosine_start"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A file of texts; the last batch of an epoch has one row."""
    folder = tmp_path_factory.mktemp("texts")
    words = ["fine", "good", "great", "bad", "awful", "poor"]
    words += ["film", "plot", "actor", "scene", "long", "short"]
    draw = torch.Generator().manual_seed(0)
    lines = ["text,label"]
    for row in range(101):
        length = int(torch.randint(2, 9, (1,), generator=draw))
        picked = torch.randint(6, 12, (length,), generator=draw).tolist()
        picked.append(int(torch.randint(3, (1,), generator=draw)) + 3 * (row % 2))
        lines.append(f"{' '.join(words[k] for k in picked)},{row % 2}")
    (folder / "texts.csv").write_text("\n".join(lines) + "\n")
    (folder / "judged.csv").write_text("\n".join(lines[:41]) + "\n")
    return folder


def history(folder):
    lines = (folder / "history.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_processes_train_as_one_though_they_are_killed(data, tmp_path):
    """Phase A by two until the last is killed, by three until the first is; then one.

    All of it is what one process does, up to the order of sums in float32.
    """
    one, many = tmp_path / "one", tmp_path / "many"
    words = f"train {data / 'texts.csv'} --text text --label label --save-every 5"
    words = f"{words} --validation {data / 'judged.csv'} {SMALL}".split()
    done = RUNNER.invoke(app, [*words, "--out", str(one)])
    assert done.exit_code == 0, done.output
    begin, resume = [*words, "--out", str(many)], ["train", "--resume", str(many)]
    late = len(history(one)) - 5
    for count, killed, verb, records in ((2, -1, begin, 9), (3, 0, resume, late)):
        command = [*launch(count), "-m", "coulomb", *verb]
        said = killed_run(command, many, killed, records)
        sentences = [line for line in said.splitlines() if line.startswith("coulomb:")]
        assert len(sentences) == 1, said
        assert f"--resume {many}" in sentences[0]
        assert not (many / "metrics.json").exists()
    done = RUNNER.invoke(app, resume)
    assert done.exit_code == 0, done.output
    for a, b in zip(history(one), history(many), strict=True):
        assert (a["phase"], a["step"]) == (b["phase"], b["step"])
        for name in {"loss", "alignment", "held_out"} & set(a):
            assert b[name] == pytest.approx(a[name], rel=1e-3), name


def killed_run(command, folder, number, records):
    """Kill one of the processes once there are records; give what all of them say."""
    began, children, told = time.monotonic(), [], folder.with_suffix(".txt")
    with told.open("w") as file:  # a pipe would fill up and hold the writers
        running = subprocess.Popen(command, env=ENVIRONMENT, stderr=file)
    try:
        while not (folder / "history.jsonl").exists() or len(history(folder)) < records:
            assert running.poll() is None, told.read_text()
            assert time.monotonic() < began + SECONDS
            time.sleep(0.02)
        children = psutil.Process(running.pid).children()
        children[number].kill()
        running.wait(timeout=SECONDS)
    finally:
        for process in children:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        running.kill()
    assert running.returncode != 0
    return told.read_text()
