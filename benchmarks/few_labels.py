"""Few labels on a frozen encoder: what Phase A with labels gains over its controls.

    python benchmarks/few_labels.py --data-dir DIR --tasks rotten_tomatoes,sst2,mrpc

all-MiniLM-L6-v2 is frozen. Its last layer attends linearly with 16 particles per head,
learned on the training texts without labels; Phase A moves these particles for 30 Adam
steps. What the layers below give is computed once and kept. The head is a logistic
regression on pooled states. Arms, on the same labelled texts:

- `tfidf`: logistic regression on TF-IDF;
- `softmax`: the encoder as it came; `linear`: the last layer linear;
- `phase_a`: Phase A with the labels; `shuffled`: with labels dealt anew;
- `tuned`: as many steps of cross-entropy on all weights of the last layer.

The step size of Phase A was chosen with `--select`, on the validation split of Rotten
Tomatoes and one draw of labels; the rate of `tuned` was not chosen. Every record goes
to a JSON-lines file; records that are there are not computed again. Test rows: the
first of a fixed shuffle of the split that each task reports on.
"""

import argparse
import copy
import json
import math
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn import functional

from coulomb.attention import AlignmentSettings, align
from coulomb.linearise.api import linearised_heads
from coulomb.linearise.fit import LineariseSettings, fit_layer
from coulomb.linearise.huggingface import with_linearised_heads
from coulomb.linearise.teacher import as_teacher, record_texts
from coulomb.text import entity_metrics, load_task
from coulomb.text.pretrained import installed_encoder, load_body, load_tokenizer

LENGTHS = {"imdb": 128, "mrpc": 96, "conll2003": 48}
ARMS = ("tfidf", "softmax", "linear", "phase_a", "shuffled", "tuned")
STEPS, BATCH, FEATURES, POOL = 30, 32, 16, 600
STEP_SIZE, RATE = 1e-3, 3e-4  # the first by --select, the second the usual one


class LastLayer(nn.Module):
    """The last layer of the encoder, on what the others give."""

    def __init__(self, layer, by_token):
        super().__init__()
        self.layer, self.by_token = layer, by_token

    def forward(self, states, key_mask):
        out = self.layer(states, key_mask[:, None, None, :])
        out = out[0] if isinstance(out, tuple) else out
        if self.by_token:
            return out
        weight = key_mask.unsqueeze(-1).float()
        return (out * weight).sum(dim=1) / weight.sum(dim=1)


def load(task, folder, kept, test_rows, split=None):
    """Cut texts, run the frozen layers once, and keep their states on the disk."""
    corpus = load_task(task, folder)
    by_token, length = corpus.kind == "token", LENGTHS.get(task, 64)
    source = installed_encoder()
    body, tokenizer = load_body(source, 256).eval(), load_tokenizer(source, corpus.kind)
    draw = np.random.default_rng(0)
    parts = {}
    for name, size in (("train", POOL), (split or corpus.reported_on, test_rows)):
        every = corpus.split(name)
        chosen = every.take(draw.permutation(len(every))[:size].tolist())
        file = kept / f"{task}-{name}-{size}.npy"
        texts = list(chosen.texts)
        options = {"truncation": True, "max_length": length, "padding": "max_length"}
        if by_token:
            given = tokenizer(
                [list(words) for words in texts], is_split_into_words=True, **options
            )
        elif isinstance(texts[0], str):
            given = tokenizer(texts, **options)
        else:
            first, second = zip(*texts, strict=True)
            given = tokenizer(list(first), list(second), **options)
        mask = torch.tensor(given["attention_mask"]).bool()
        if not file.is_file():
            found = []
            for some in torch.split(torch.arange(len(texts)), 32):
                batch = {n: torch.tensor(x)[some] for n, x in given.items()}
                longest = int(batch["attention_mask"].sum(dim=1).max())
                batch = {n: x[:, :longest] for n, x in batch.items()}
                with torch.no_grad():
                    out = body(**batch, output_hidden_states=True).hidden_states[-2]
                found.append(functional.pad(out, (0, 0, 0, length - longest)))
            np.save(file, torch.cat(found).numpy())
        if by_token:
            labels = torch.full(mask.shape, -100)
            for row, tags in enumerate(chosen.labels):
                before = None
                for place, word in enumerate(given.word_ids(row)):
                    if word is not None and word != before:
                        labels[row, place] = tags[word]
                    before = word
        else:
            labels = torch.tensor(list(chosen.labels))
        parts["train" if name == "train" else "test"] = {
            "states": np.load(file, mmap_mode="r"),
            "mask": mask,
            "labels": labels,
            "texts": [t if isinstance(t, str) else " ".join(t) for t in texts],
        }
    return corpus, body, tokenizer, parts


def linear_layer(body, tokenizer, texts):
    """Learn the particles of the last layer, without labels."""
    settings = LineariseSettings(
        n_features=FEATURES, max_tokens=8000, steps=150, distil_steps=0, max_length=128
    )
    teacher, source = as_teacher(body), torch.Generator().manual_seed(0)
    learned, judged = record_texts(
        teacher, tokenizer, texts, settings, generator=source
    )
    *_, rows = zip(learned.layers(), judged.layers(), strict=True)
    fit = fit_layer(*rows, settings, generator=torch.Generator().manual_seed(1))
    heads = [tuple(range(site.num_heads)) for site in teacher.sites[:-1]]
    options = {"n_features": FEATURES, "feature_map": settings.feature_map}
    fast = with_linearised_heads(body, exact_heads=[*heads, ()], **options).eval()
    linearised_heads(fast)[-1].fill(fit)
    return fast.encoder.layer[-1]


def rows_of(part, numbers):
    width = int(part["mask"][numbers].sum(dim=1).max())
    states = torch.from_numpy(np.array(part["states"][numbers][:, :width]))
    return states, part["mask"][numbers][:, :width]


@torch.no_grad()
def features(model, part, numbers):
    """Give what the head sees, with its labels."""
    found, labels = [], []
    numbers = np.asarray(numbers)
    order = numbers[np.argsort(part["mask"][numbers].sum(dim=1).numpy())]
    for some in np.array_split(order, -(-len(order) // 32)):
        states, mask = rows_of(part, some)
        out, y = model(states, mask), part["labels"][some]
        if model.by_token:
            y = y[:, : mask.shape[1]]
            out, y = out[y >= 0], y[y >= 0]
        found.append(out)
        labels.append(y)
    return torch.cat(found).double().numpy(), torch.cat(labels).numpy(), order


def score(model, parts, numbers, corpus):
    """Fit the head on some rows, and score the test rows."""
    x, y, _ = features(model, parts["train"], numbers)
    centre, scale = x.mean(axis=0), x.std(axis=0).mean()
    head = LogisticRegression(max_iter=2000).fit((x - centre) / scale, y)
    every = np.arange(len(parts["test"]["labels"]))
    new, true, order = features(model, parts["test"], every)
    guess = head.predict((new - centre) / scale)
    if not model.by_token:
        return float((guess == true).mean())
    ends = np.cumsum((parts["test"]["labels"][order] >= 0).sum(dim=1).numpy())[:-1]
    names = np.asarray(corpus.classes)
    tags = [[list(r) for r in np.split(names[z], ends)] for z in (true, guess)]
    return float(entity_metrics(*tags)["entity_f1"])


def batches_of(part, numbers, seed, labels):
    """Cut labelled rows into batches, as many as there are steps."""
    draw, made = np.random.default_rng(seed), []
    where = {int(number): place for place, number in enumerate(numbers)}
    while len(made) < STEPS:
        order = draw.permutation(numbers)
        for some in np.array_split(order, -(-len(order) // BATCH)):
            states, mask = rows_of(part, some)
            y = labels[[where[int(number)] for number in some]]
            made.append((states, mask, y if y.ndim == 1 else y[:, : mask.shape[1]]))
    return made[:STEPS]


def run_arm(arm, layer, parts, numbers, corpus, seed, step_size, rate):
    by_token = corpus.kind == "token"
    if arm == "tfidf":
        words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
        some = [parts["train"]["texts"][i] for i in numbers]
        head = LogisticRegression(max_iter=2000, C=10.0)
        head.fit(words.fit_transform(some), parts["train"]["labels"][numbers].numpy())
        new = words.transform(parts["test"]["texts"])
        return float(head.score(new, parts["test"]["labels"].numpy()))
    model = LastLayer(copy.deepcopy(layer), by_token).eval()
    labels = parts["train"]["labels"][numbers].clone()
    if arm == "shuffled":
        source = torch.Generator().manual_seed(seed)
        known = labels >= 0
        flat = labels[known]
        labels[known] = flat[torch.randperm(len(flat), generator=source)]
    if arm in ("phase_a", "shuffled"):
        settings = AlignmentSettings(
            objective="centred",
            level="token" if by_token else "sequence",
            output="",
            sampler="adam",
            inverse_temperature=math.inf,
            step_size=step_size,
            strength=0.0,
            clip=math.inf,
            max_steps=STEPS,
            record_every=STEPS,
        )
        batches = batches_of(parts["train"], numbers, seed, labels)
        align(model, batches, settings=settings, held_out=None, seed=seed)
    if arm == "tuned":
        head = nn.Linear(384, len(corpus.classes))
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        weights = [p for n, p in model.named_parameters() if "coulomb" not in n]
        for weight in weights:
            weight.requires_grad_(True)
        groups = [{"params": weights}, {"params": head.parameters(), "lr": 1e-2}]
        optimiser = torch.optim.Adam(groups, lr=rate)
        for states, mask, y in batches_of(parts["train"], numbers, seed, labels):
            logits = head(model(states, mask)).flatten(0, -2)
            loss = functional.cross_entropy(logits, y.flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return score(model, parts, numbers, corpus)


def choose_rows(labels, per_class, seed, by_token):
    draw = np.random.default_rng([seed, 7])
    if by_token:  # sentences: so many for each of the four kinds of entities
        return draw.permutation(len(labels))[: 4 * per_class]
    groups = [np.flatnonzero(labels.numpy() == c) for c in np.unique(labels.numpy())]
    return np.concatenate([draw.permutation(g)[:per_class] for g in groups])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--tasks", default="rotten_tomatoes,sst2,mrpc,imdb,conll2003")
    parser.add_argument("--labels", default="8,16,64")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--test-rows", type=int, default=500)
    parser.add_argument("--kept", type=Path, default=Path("few-labels"))
    parser.add_argument("--select", action="store_true")
    parser.add_argument("--table", action="store_true", help="Print what is there.")
    given = parser.parse_args()
    given.kept.mkdir(parents=True, exist_ok=True)
    file = given.kept / ("select.jsonl" if given.select else "records.jsonl")
    lines = file.read_text().splitlines() if file.is_file() else []
    done = [json.loads(line) for line in lines]
    if not given.table:
        torch.set_num_threads(1)
        compute(given, file, done)
    show(done, given.select)


def compute(given, file, done):
    there = {(r["task"], r["labels"], r["seed"], r["arm"], r["size"]) for r in done}
    tasks = ["rotten_tomatoes"] if given.select else given.tasks.split(",")
    split = "validation" if given.select else None
    counts = [16] if given.select else [int(n) for n in given.labels.split(",")]
    for task in tasks:
        about = load(task, given.data_dir, given.kept, given.test_rows, split)
        corpus, body, tokenizer, parts = about
        fast = linear_layer(body, tokenizer, corpus_texts(corpus))
        for count in counts:
            for seed in range(given.seeds):
                # Selection draws labelled rows that no comparison has.
                drawn = seed + 1000 * given.select
                labels, by_token = parts["train"]["labels"], corpus.kind == "token"
                numbers = choose_rows(labels, count, drawn, by_token)
                for arm, size in arms_of(given.select, by_token):
                    if (task, count, seed, arm, size) in there:
                        continue
                    layer = body.encoder.layer[-1] if arm == "softmax" else fast
                    sizes = size or STEP_SIZE, size or RATE
                    told = {"task": task, "labels": count, "seed": seed, "arm": arm}
                    value = run_arm(arm, layer, parts, numbers, corpus, drawn, *sizes)
                    done.append(told | {"size": size, "score": value})
                    with file.open("a") as out:
                        out.write(json.dumps(done[-1]) + "\n")


def corpus_texts(corpus):
    texts = corpus.split("train").texts[:2000]
    return [text if isinstance(text, str) else " ".join(text) for text in texts]


def arms_of(select, by_token):
    if not select:
        return [(arm, 0) for arm in ARMS if not (by_token and arm == "tfidf")]
    sizes = [("phase_a", s) for s in (3e-4, 1e-3, 3e-3, 1e-2)]
    return [("linear", 0), *sizes, *(("tuned", s) for s in (1e-4, 3e-4, 1e-3))]


def show(done, select):
    table = {}
    for row in done:
        key = row["task"], row["labels"], row["arm"], row["size"]
        table.setdefault(key, {})[row["seed"]] = 100 * row["score"]
    if select:
        for (_, _, arm, size), found in table.items():
            print(f"{arm:8} {size:g} {np.mean(list(found.values())):.2f}")
        return
    print(
        "| task | labels | " + " | ".join(ARMS) + " | Phase A - linear | - shuffled"
        " | - tuned |"
    )
    print("| --- " * (len(ARMS) + 5) + "|")
    for task, count in dict.fromkeys(key[:2] for key in table):
        found = {arm: table.get((task, count, arm, 0), {}) for arm in ARMS}
        means = [
            f"{np.mean(list(x.values())):.1f}" if x else "" for x in found.values()
        ]
        cells = []
        for other in ("linear", "shuffled", "tuned"):
            both = sorted(found["phase_a"].keys() & found[other].keys())
            gap = np.array([found["phase_a"][s] - found[other][s] for s in both])
            if len(gap) < 2 or not gap.std():
                cells.append("")
                continue
            error = gap.std(ddof=1) / math.sqrt(len(gap))
            p = stats.ttest_1samp(gap, 0).pvalue
            cells.append(
                f"{gap.mean():+.1f} ± {error:.1f} (p = {p:.2g}, n = {len(gap)})"
            )
        print("| " + " | ".join([task, str(count), *means, *cells]) + " |")


if __name__ == "__main__":
    main()
