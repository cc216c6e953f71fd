"""Training steps of the paper's encoder: packed against the naive loop.

The naive loop is what one would write: pad to 128, a module of torch's own layers and
operations with a key mask, `torch.optim.Adam` over the whole vocabulary. The packed one
is `packed_logits`, a vocabulary trimmed to the tokens seen, and the fused Adam. Both
start from the same weights and see the same batches. Losses are compared without
dropout; times are taken with it, in alternating blocks of steps in one process, as
processor time of one thread. Evaluation is timed in the same way, and with `--phase-a`
the steps of Phase A.

With `--data-dir` sentences are real; without, they are random tokens with lengths of
the same distribution.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb.attention import (
    EncoderSettings,
    KernelAttention,
    KernelEncoder,
    Linformer,
    Performer,
    SoftmaxAttention,
    align,
)
from coulomb.attention.encoder.layout import TokenBatch, pad
from coulomb.attention.encoder.packed import PackedHeads, packed_logits
from coulomb.text.settings import preset
from coulomb.text.setup import trim_vocabulary
from coulomb.text.training import make_optimiser

VOCABULARY, LENGTH, BATCH, LR = 30_522, 128, 64, 2e-4
MAPS = ("softmaxfeat", "elu", "softplus", "sigmoid2", "cos2", "favor")


class Source(NamedTuple):
    """A data set, and the lengths of its sequences for when it is not there."""

    folder: str
    columns: tuple[str, ...]
    quantiles: tuple[float, ...]  # at 0, 5, 25, 50, 75, 95, 99 and 100 %
    target: float


SOURCES = {
    "rotten_tomatoes": Source(
        "rotten_tomatoes", ("text",), (3, 11, 19, 27, 35, 47, 56, 78), 8
    ),
    "sst2": Source("sst2", ("sentence",), (3, 4, 6, 10, 17, 33, 44, 66), 12),
    "pairs": Source(
        "qqp_subset",
        ("question1", "question2"),
        (7, 17, 22, 27, 35, 54, 74, 128),
        7,
    ),
}


class PlainAttention(nn.Module):
    """Kernel attention as one would write it, for padded batches."""

    def __init__(self, layer: KernelAttention) -> None:
        super().__init__()
        width = layer.embed_dim
        self.heads, self.shared = layer.num_heads, layer.qkv == "shared"
        self.projection = nn.Linear(width, width if self.shared else 3 * width)
        self.out = nn.Linear(width, width)
        self.map, self.particles = layer.feature_map, layer.as_particles()
        self.scale = layer.head_dim**-0.25 if self.map.imitates_softmax else 1.0
        weight = layer.v_proj_weight if self.shared else layer.in_proj_weight
        bias = layer.v_proj_bias if self.shared else layer.in_proj_bias
        with torch.no_grad():
            self.projection.weight.copy_(weight)
            self.projection.bias.copy_(bias)
            self.out.load_state_dict(layer.out_proj.state_dict())

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        joint = self.projection(x)
        parts = (x, joint) if self.shared else joint.chunk(3, dim=-1)
        split = [
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts
        ]
        phi_q = self.map(self.scale * split[0], self.particles)
        # Queries are keys: nobody would evaluate the same features twice.
        phi_k = phi_q
        if not self.shared:
            phi_k = self.map(self.scale * split[1], self.particles)
        phi_k = phi_k * mask[:, None, :, None]
        sums = phi_k.transpose(-1, -2) @ split[-1]
        total = phi_q @ phi_k.sum(dim=2).unsqueeze(-1)
        out = phi_q @ sums / total
        return self.out(out.transpose(1, 2).reshape(batch, length, width))


class PlainLayer(nn.Module):
    """Attention and a feed-forward network, each added and normalised."""

    def __init__(self, layer: nn.Module, rate: float) -> None:
        super().__init__()
        self.attention = PlainAttention(layer.attention)
        self.feed_forward = nn.Sequential(
            nn.Linear(layer.widen.in_features, layer.widen.out_features),
            nn.GELU(),
            nn.Dropout(rate),
            nn.Linear(layer.narrow.in_features, layer.narrow.out_features),
        )
        self.norms = nn.ModuleList(
            nn.LayerNorm(layer.widen.in_features) for _ in range(2)
        )
        self.dropout = nn.Dropout(rate)
        self.feed_forward[0].load_state_dict(layer.widen.state_dict())
        self.feed_forward[3].load_state_dict(layer.narrow.state_dict())

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norms[0](x + self.dropout(self.attention(x, mask)))
        return self.norms[1](x + self.dropout(self.feed_forward(x)))


class PlainEncoder(nn.Module):
    """The encoder as one would write it, with the weights of a `KernelEncoder`."""

    def __init__(self, model: KernelEncoder) -> None:
        super().__init__()
        shape = model.settings
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = nn.Embedding(shape.max_length, shape.width)
        self.norm = nn.LayerNorm(shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.layers = nn.ModuleList(
            PlainLayer(layer, shape.dropout) for layer in model.layers
        )
        self.head = nn.Linear(shape.width, shape.n_classes)
        self.tokens.load_state_dict(model.token_embedding.state_dict())
        self.positions.load_state_dict(model.position_embedding.state_dict())
        self.head.load_state_dict(model.head.state_dict())

    def forward(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(token_ids.shape[1])
        x = self.tokens(token_ids) + self.positions(places)
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, mask)
        real = mask.to(x).unsqueeze(-1)
        return self.head((x * real).sum(dim=1) / real.sum(dim=1))


def attention_of(row: str) -> Callable[..., nn.Module]:
    kind, _, name = row.partition("-")
    if kind in ("shared", "learned"):
        return partial(KernelAttention, qkv=kind, feature_map=name)
    layers = {"softmax": SoftmaxAttention, "performer": Performer}
    layers["linformer"] = partial(Linformer, max_length=LENGTH)
    return layers[row]


def read(source: Source, folder: Path, count: int) -> list[tuple[list[int], int]]:
    from pyarrow import parquet
    from tokenizers import Tokenizer

    table = parquet.read_table(folder / source.folder / "train.parquet")
    order = np.random.default_rng(0).permutation(len(table))[:count]
    rows = table.take(order).to_pydict()
    vocabulary = Tokenizer.from_file(str(folder / "bert-base-uncased/tokenizer.json"))
    columns = [rows[name] for name in source.columns]
    texts = list(zip(*columns, strict=True)) if len(columns) > 1 else columns[0]
    ids = [found.ids[:LENGTH] for found in vocabulary.encode_batch(texts)]
    return list(zip(ids, rows["label"], strict=True))


def draw(source: Source, count: int) -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(0)
    levels = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1)
    lengths = np.interp(rng.random(count), levels, source.quantiles).astype(int)
    # Word frequencies fall like one over the rank.
    frequency = 1 / (np.arange(VOCABULARY) + 2.7)
    words = rng.choice(VOCABULARY, size=lengths.sum(), p=frequency / frequency.sum())
    parts = np.split(words, lengths.cumsum()[:-1])
    return [(part.tolist(), int(rng.integers(2))) for part in parts]


def batches_of(rows: Sequence[tuple[list[int], int]]) -> list[TokenBatch]:
    found = []
    for start in range(0, len(rows) - BATCH + 1, BATCH):
        part = rows[start : start + BATCH]
        ids = torch.tensor([token for tokens, _ in part for token in tokens])
        ends = np.cumsum([0] + [len(tokens) for tokens, _ in part])
        labels = torch.tensor([label for _, label in part])
        found.append(TokenBatch(ids, torch.from_numpy(ends), labels))
    return found


Step = Callable[[TokenBatch, int], float]


def race(
    ways: dict[str, Step], batches: list[TokenBatch], steps: int, block: int
) -> dict[str, float]:
    """Take turns; give the processor time of each in all, in seconds."""
    for step in ways.values():
        step(batches[0], 0)
    seconds = dict.fromkeys(ways, 0.0)
    for start in range(0, steps, block):
        for name, step in ways.items():
            begin = time.process_time()
            for number in range(start, min(start + block, steps)):
                step(batches[number % len(batches)], number)
            seconds[name] += time.process_time() - begin
    return seconds


def naive_step(model: KernelEncoder, row: str) -> Step:
    plain = row.startswith(("shared", "learned"))
    net = PlainEncoder(model) if plain else model
    optimiser = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], LR)

    def step(batch: TokenBatch, _: int) -> float:
        tokens, mask = pad(batch, LENGTH)
        loss = functional.cross_entropy(net(tokens, mask), batch.labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return loss.item()

    return step


def packed_step(model: KernelEncoder, kept: Tensor, *, drops: bool) -> Step:
    optimiser = make_optimiser(model, preset("default", {"lr": LR}).train)
    numbers = torch.zeros(VOCABULARY, dtype=torch.int64)
    numbers[kept] = torch.arange(len(kept))

    def step(batch: TokenBatch, number: int) -> float:
        batch = batch._replace(token_ids=numbers[batch.token_ids])
        logits = packed_logits(model, batch, dropout_seed=number if drops else None)
        loss = functional.cross_entropy(logits, batch.labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return loss.item()

    return step


def build(row: str, dropout: float) -> KernelEncoder:
    shape = EncoderSettings(VOCABULARY, 2, dropout=dropout, max_length=LENGTH)
    return KernelEncoder(shape, attention_of(row), generator=0)


def both(row: str, dropout: float, seen: Tensor) -> dict[str, Step]:
    trimmed, kept = trim_vocabulary(build(row, dropout), seen)
    return {
        "naive": naive_step(build(row, dropout).train(), row),
        "packed": packed_step(trimmed.train(), kept, drops=dropout > 0),
    }


def evaluations(row: str) -> dict[str, Step]:
    model = build(row, 0.1).eval()
    plain = row.startswith(("shared", "learned"))
    net = PlainEncoder(model).eval() if plain else model

    @torch.inference_mode()
    def naive(batch: TokenBatch, _: int) -> float:
        return float(net(*pad(batch, LENGTH)).sum())

    @torch.inference_mode()
    def packed(batch: TokenBatch, _: int) -> float:
        return float(packed_logits(model, batch).sum())

    return {"naive": naive, "packed": packed}


def alignments(row: str) -> dict[str, Step]:
    model = build(row, 0.1).eval()
    silent = {"held_out": None, "progress": False, "max_steps": 1, "watched": 1}

    def naive(batch: TokenBatch, _: int) -> float:
        return align(model, [(*pad(batch, LENGTH), batch.labels)], **silent).norms[0]

    def packed(batch: TokenBatch, _: int) -> float:
        given = [(batch, batch.labels)]
        return align(model, given, evaluate=PackedHeads(), **silent).norms[0]

    return {"naive": naive, "packed": packed}


def compare(
    row: str, batches: list[TokenBatch], args: argparse.Namespace
) -> dict[str, float]:
    """Race the two, and say how well their losses agree without dropout."""
    seen = torch.cat([batch.token_ids for batch in batches])
    ways = both(row, 0.0, seen)
    pairs = [
        [step(batch, number) for step in ways.values()]
        for number, batch in enumerate(batches[:6])
    ]
    differ = max(abs(a - b) / abs(a) for a, b in pairs)
    turns = batches, args.steps, args.block
    seconds = race(both(row, 0.1, seen), *turns)
    scoring = race(evaluations(row), *turns)
    found = {
        "naive_ms": 1e3 * seconds["naive"] / args.steps,
        "packed_ms": 1e3 * seconds["packed"] / args.steps,
        "ratio": seconds["naive"] / seconds["packed"],
        "evaluation_ratio": scoring["naive"] / scoring["packed"],
        "losses_differ": differ,
        "tokens_per_batch": len(seen) / len(batches),
        "vocabulary": float(len(seen.unique())),
    }
    if args.phase_a and row.startswith(("shared", "learned")):
        phase = race(alignments(row), *turns)
        found["phase_a_ratio"] = phase["naive"] / phase["packed"]
    return found


def show(name: str, row: str, result: dict[str, float], target: float) -> None:
    phase = result.get("phase_a_ratio")
    print(
        f"{name:16} {row:20} naive {result['naive_ms']:6.1f} ms, packed "
        f"{result['packed_ms']:5.1f} ms: {result['ratio']:5.2f}x (target {target:g}); "
        f"evaluation {result['evaluation_ratio']:5.2f}x; "
        + (f"Phase A {phase:5.2f}x; " if phase else "")
        + f"losses differ by {result['losses_differ']:.1e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="folder of Parquet data sets")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each")
    parser.add_argument("--block", type=int, default=4, help="steps of one turn")
    parser.add_argument("--sentences", type=int, default=8530, help="of each data set")
    parser.add_argument(
        "--rows",
        nargs="+",
        default=["shared-softmaxfeat"],
        help="attention, such as shared-elu, learned-favor, softmax; or all",
    )
    parser.add_argument("--phase-a", action="store_true", help="race Phase A, too")
    parser.add_argument("--sets", nargs="+", default=list(SOURCES), choices=SOURCES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = args.rows
    if rows == ["all"]:
        rows = [f"shared-{name}" for name in MAPS]
        rows += ["learned-favor", "softmax", "performer", "linformer"]
    results = []
    for name in args.sets:
        source = SOURCES[name]
        found = (
            draw(source, args.sentences)
            if args.data_dir is None
            else read(source, args.data_dir, args.sentences)
        )
        batches = batches_of(found)
        for row in rows:
            result = compare(row, batches, args)
            results.append({"set": name, "row": row, **result})
            show(name, row, result, source.target)
    if args.json:
        machine = {
            "torch": torch.__version__,
            "processor": platform.processor() or platform.machine(),
            "data": "synthetic lengths" if args.data_dir is None else "real",
        }
        args.json.write_text(
            json.dumps({"machine": machine, "rows": results}, indent=1)
        )


if __name__ == "__main__":
    main()
