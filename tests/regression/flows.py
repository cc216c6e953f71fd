"""Seeded outputs of every flow, for two trees on one machine, or one tree over time.

    python tests/regression/flows.py                   # a hash of each output, as JSON
    python tests/regression/flows.py --only attention  # of one flow
    python tests/regression/flows.py --against FILE    # what differs from those hashes

Only public names are used, one thread computes, and every number comes from a seed.
Bits differ between processors, so hashes are compared on one machine and not committed.
"""

import argparse
import hashlib
import importlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import coulomb
from coulomb import attention as attn
from coulomb import theory
from coulomb.features import Particles, feature_maps

GOOD = ["fine", "lovely", "great", "superb", "warm", "clever", "moving", "bright"]
BAD = ["dull", "poor", "awful", "weak", "cold", "clumsy", "boring", "bleak"]
OTHER = ["the", "a", "film", "plot", "with", "cast", "and", "story", "of", "actor"]
TINY = {
    "width": 16,
    "ffn_width": 16,
    "n_features": 8,
    "max_length": 24,
    "epochs": 3,
    "min_steps": 0,
    "batch_size": 16,
    "vocabulary_size": 150,
    "align_after": 1,
    "align_epochs": 1.0,
    "average_epochs": 1.0,
}
COLD = {"align_inverse_temperature": float("inf")}
POSITIVE = ("favor", "elu", "softplus", "sigmoid2", "softmaxfeat", "cos2")


def estimators():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 4))
    y = (np.sin(2 * X[:, 0]) + X[:, 1] > 0).astype(int)
    target = np.sin(2 * X[:, 0]) + X[:, 1]
    options = {
        "default": {},
        "langevin": {"max_iter": 40},
        "repelled": {"max_iter": 30, "interaction_strength": 0.01, "pursuit": 0},
        "fixed": {"max_iter": 0},
    }
    for name, changes in options.items():
        model = coulomb.CoulombSampler(32, random_state=0, **changes)
        yield f"classes {name}", model.fit_transform(X, y)
        yield f"numbers {name}", model.fit_transform(X, target)
        yield f"control {name}", model.control(random_state=0).transform(X[:20])
    model = coulomb.CoulombSampler(32, random_state=0, max_iter=20)
    for rows in (slice(0, 150), slice(150, 300)):
        model.partial_fit(X[rows], y[rows], classes=[0, 1])
    yield "chunks", model.transform(X)
    for kind in (coulomb.OrthogonalSampler, coulomb.ImportanceSampler):
        yield kind.__name__, kind(32, random_state=0).fit(X, y).transform(X)
    mkl = coulomb.MultipleKernelClassifier().fit(X, y)
    yield "multiple kernels", mkl.decision_function(X)


def attention():
    source = torch.Generator().manual_seed(0)
    for batch, n, heads, dim, m in [(2, 9, 2, 8, 16), (1, 300, 4, 16, 32)]:
        shape = (batch, heads, n, dim)
        q, k, v = (torch.randn(shape, generator=source) for _ in range(3))
        mask = torch.ones(batch, n, dtype=torch.bool)
        mask[-1, n // 2 :] = False
        positions = torch.randn(heads, m, dim, generator=source)
        phases = torch.rand(heads, m, generator=source)
        for name in POSITIVE:
            needs = feature_maps.build(name).needs_phases
            for causal in (False, True):
                leaves = [x.clone().requires_grad_() for x in (q, k, v, positions)]
                w = Particles(leaves[3], phases if needs else None)
                out = attn.kernel_attention(*leaves[:3], w, name, mask, causal=causal)
                tag = f"{name} {n} {'causal' if causal else 'both'}"
                yield tag, out
                for x, g in zip(
                    "qkvw", torch.autograd.grad(out.square().sum(), leaves), strict=True
                ):
                    yield f"{tag} grad {x}", g
            w = Particles(positions, phases if needs else None)
            bounds = torch.tensor([0, n // 3, n])
            rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
            yield f"{name} {n} packed", attn.packed_attention(*rows, w, name, bounds)
            state = attn.init_state(w, name, batch=batch, heads=heads, dim_v=dim)
            for t in range(3):
                at = [x[:, :, t] for x in (q, k, v)]
                out, state = attn.decode_step(state, *at, w, name)
                yield f"{name} {n} decoded {t}", out
            yield f"{name} {n} weights", attn.kernel_weights(q, k, w, name, mask)


def layers():
    x = torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(0))
    padding = torch.arange(11) >= torch.tensor([[11], [7]])
    for name in POSITIVE:
        for untied in (False, True):
            layer = attn.KernelAttention(
                16, 2, n_features=16, feature_map=name, batch_first=True,
                generator=0, tied=not untied,
            )  # fmt: skip
            out, weights = layer(x, x, x, key_padding_mask=padding)
            yield f"{name} {untied}", torch.cat([out.flatten(), weights.flatten()])
    made = {
        "softmax": attn.SoftmaxAttention(16, 2, batch_first=True, generator=0),
        "performer": attn.Performer(
            16, 2, n_features=16, batch_first=True, generator=0
        ),
        "linformer": attn.Linformer(
            16, 2, rank=4, max_length=16, batch_first=True, generator=0
        ),
    }
    for name, layer in made.items():
        layer.eval()
        yield name, layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]


def reviews(n=120, seed=0):
    draw = random.Random(seed)
    texts, labels = [], []
    for row in range(n):
        words = draw.choices(OTHER, k=draw.randint(2, 9))
        words += draw.choices(GOOD if row % 2 else BAD, k=2)
        draw.shuffle(words)
        texts.append(" ".join(words))
        labels.append("pos" if row % 2 else "neg")
    return texts, labels


def tagged(n=60, seed=0):
    draw = random.Random(seed)
    texts, tags = [], []
    for _ in range(n):
        words, marks = draw.choices(OTHER, k=4), ["O"] * 4
        place = draw.randint(0, 4)
        words[place:place] = ["Ada", "Lovelace"]
        marks[place:place] = ["B-PER", "I-PER"]
        texts.append(words)
        tags.append(marks)
    return texts, tags


def text():
    from coulomb.text import (
        build_corpus,
        diagnose_run,
        preset,
        train_in_folder,
        train_vocabulary,
    )

    first, labels = reviews(80)
    second, _ = reviews(80, seed=1)
    pairs = list(zip(first, second, strict=True))
    corpora = {
        "reviews": build_corpus("reviews", reviews(), validation_share=0.2),
        "tags": build_corpus("tags", tagged(), validation_share=0.2),
        "pairs": build_corpus("pairs", (pairs, labels), validation_share=0.2),
    }
    cases = [
        ("reviews", "kernel-softmaxfeat", {"align_start": "drawn"}),
        (
            "reviews",
            "kernel-favor",
            {"align_start": "drawn", "align_sampler": "adam", **COLD},
        ),
        (
            "reviews",
            "kernel-elu",
            {"align_start": "drawn", "align_objective": "centred"},
        ),
        ("reviews", "kernel-cos2", {"align_start": "drawn", "align_level": "layer"}),
        ("reviews", "vanilla-softplus", {"norm": "pre", "pooling": "cls"}),
        ("reviews", "softmax", {"optimiser": "adamw", "schedule": "cosine"}),
        ("reviews", "performer", {"redraw_every": 3}),
        ("reviews", "linformer", {"linformer_rank": 4}),
        ("tags", "kernel-softmaxfeat", {"align_start": "chosen"}),
        ("tags", "kernel-softmaxfeat", {"align_start": "windows"}),
        ("pairs", "kernel-softmaxfeat", {"positions": "parts"}),
    ]
    with tempfile.TemporaryDirectory() as root:
        for place, (name, row, changes) in enumerate(cases):
            corpus, folder = corpora[name], Path(root) / str(place)
            settings = preset("default", TINY | {"attention": row} | changes)
            texts = corpus.split("train").texts
            vocabulary = train_vocabulary(texts, size=150)
            train_in_folder(folder, corpus, settings, vocabulary)
            for file in sorted(folder.glob("*.safetensors")):
                from safetensors import safe_open

                with safe_open(str(file), "np") as data:
                    for key in sorted(data.keys()):
                        if data.get_tensor(key).size:
                            tag = f"{place} {name} {row} {file.stem} {key}"
                            yield tag, data.get_tensor(key)
            metrics = json.loads((folder / "metrics.json").read_text())
            yield f"{place} {name} {row} metrics", drop_times(metrics)
            history = (folder / "history.jsonl").read_text().splitlines()
            rows = [drop_times(json.loads(line)) for line in history]
            yield f"{place} {name} {row} history", rows
            if place in (0, 8):
                judged = diagnose_run(folder, corpus=corpus)
                yield f"{place} diagnosis", str(judged)


def drop_times(facts):
    """Leave out what a clock measured."""
    if isinstance(facts, dict):
        names = ("second", "time", "date", "per_s")
        return {
            key: drop_times(value)
            for key, value in facts.items()
            if not any(name in key for name in names)
        }
    return [drop_times(x) for x in facts] if isinstance(facts, list) else facts


def tiny_bert(seed=0):
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=40, initializer_range=0.5,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.AutoModel.from_config(config).eval()


def tokenize(texts):
    rows = [[2 + ord(c) % 60 for c in text[:36]] for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def strings(n=24, seed=0):
    draw = random.Random(seed)
    return [
        "".join(draw.choices("abcdefghij", k=draw.randint(5, 30))) for _ in range(n)
    ]


def linearise():
    from coulomb.linearise import linearise as make_linear

    quick = {
        "n_features": 8, "steps": 20, "distil_steps": 4, "check_every": 10,
        "max_length": 36, "measure": False,
    }  # fmt: skip
    for name, changes in {
        "default": {},
        "favor": {"feature_map": "favor"},
        "shared": {"shared": True},
        "mse": {"objective": "mse"},
        "exact": {"keep_exact": 1},
    }.items():
        model = make_linear(tiny_bert(), tokenize, strings(), **quick | changes)
        with torch.no_grad():
            out = model(**tokenize(strings(5, seed=1))).last_hidden_state
        yield f"{name} output", out
        for key, value in model.state_dict().items():
            yield f"{name} {key}", value


def mean_field():
    from coulomb.interactions import Riesz

    system = theory.MeanField(
        theory.Interval(-1.5, 1.5, 120),
        theory.parse_expression("2*x**2", 1),
        Riesz(s=0.0),
        strength=1.0,
        inverse_temperature=20.0,
    )
    yield "equilibrium", theory.equilibrium(system).density
    yield "gibbs", theory.gibbs_equilibrium(system).density
    yield "relax", theory.relax(system).densities[-1]


def run_command(*words, folder):
    code = "import sys; from coulomb.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, text=True,
        capture_output=True, check=True, env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip
    return done.stdout


def commands():
    """The verbs with their flags, and the records of two experiments."""
    with tempfile.TemporaryDirectory() as folder:
        verbs = re.findall(r"^│ (\w+)  ", run_command("--help", folder=folder), re.M)
        yield "verbs", verbs
        for verb in verbs:
            page = run_command(verb, "--help", folder=folder)
            yield verb, sorted(set(re.findall(r"--[a-z-]+", page)))
        for name in ("noise", "meanfield"):
            run_command("reproduce", name, "--preset", "smoke", folder=folder)
            file = Path(folder, "results", name, "records.jsonl")
            rows = [drop_times(json.loads(line)) for line in file.open()]
            for row in rows:
                row.pop("environment", None)
            yield f"{name} records", rows


def names():
    """Public names: what users import."""
    packages = ["", ".attention", ".text", ".linearise", ".theory", ".estimators"]
    packages += [".experiments", ".objectives", ".interactions"]
    for package in packages:
        module = importlib.import_module("coulomb" + package)
        yield f"coulomb{package}", sorted(module.__all__)


FLOWS = {
    "names": names,
    "commands": commands,
    "estimators": estimators,
    "attention": attention,
    "layers": layers,
    "text": text,
    "linearise": linearise,
    "theory": mean_field,
}


def digest(value):
    """Hash an array to the last bit, or anything else as JSON."""
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().numpy()
    if isinstance(value, np.ndarray):
        head = f"{value.dtype} {value.shape}".encode()
        return hashlib.sha256(head + np.ascontiguousarray(value).tobytes()).hexdigest()
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=FLOWS, action="append")
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["COULOMB_TUNE"] = "0"  # bits differ between forms of attention
    hashes = {
        f"{flow}: {name}": digest(value)
        for flow in options.only or FLOWS
        for name, value in FLOWS[flow]()
    }
    if options.against is None:
        json.dump(hashes, sys.stdout, indent=1)
        return
    known = json.loads(options.against.read_text())
    known = {
        k: v for k, v in known.items() if k.split(":")[0] in (options.only or FLOWS)
    }
    changed = sorted(k for k in known if hashes.get(k) != known[k])
    print(f"{len(known) - len(changed)} of {len(known)} outputs are equal to the bit")
    print(*changed, sep="\n")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
