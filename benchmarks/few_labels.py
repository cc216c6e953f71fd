"""Few labels on a frozen encoder: what Phase A with labels gains over its controls.

    python benchmarks/few_labels.py --data-dir DIR --tasks rotten_tomatoes,sst2,mrpc

all-MiniLM-L6-v2 is frozen. Its last three layers attend linearly with 16 particles per
head, learned on the training texts without labels; Phase A moves these particles for 10
Adam steps, each on all labelled texts. What the layers below give is computed once and
kept. The head is a logistic regression on pooled states. Arms, on the same labelled
texts:

- `tfidf`: logistic regression on TF-IDF;
- `softmax`: the encoder as it came; `linear`: the last three layers linear;
- `phase_a`: Phase A by the centred alignment of pooled states; `shuffled`: with labels
  dealt anew;
- `joint`: Phase A by the evidence that a ridge regression on the pooled states gives to
  the labels; `joint_shuffled`: with labels dealt anew;
- `tuned`: as many steps of cross-entropy on all weights of the last three layers;
  `tuned_faster` with a larger rate (`--arms tuned_faster`), which came when the others
  were done: on training rows of Rotten Tomatoes it is 0.7 points better;
- `contrastive`: one epoch of sentence-transformers' trainer on the whole softmax
  encoder, as SetFit does, over pairs of the labelled texts, ten of each; it costs
  several times as much, and runs if it is asked for (`--arms contrastive`).

Sizes and the penalty of the head were chosen on training rows that no comparison sees,
by a script of which `--select` is the successor. Every record goes to a JSON-lines
file; records that are there are not computed again. Test rows: the first of a fixed
shuffle of the split that each task reports on. Matrices are multiplied in bfloat16, for
all arms.
"""

import argparse
import copy
import json
import math
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn import functional

from coulomb.attention import AlignmentSettings, align
from coulomb.attention.align.scores import AbstractScore, class_vectors
from coulomb.linearise.api import linearised_heads
from coulomb.linearise.fit import LineariseSettings, fit_layer
from coulomb.linearise.huggingface import with_linearised_heads
from coulomb.linearise.teacher import as_teacher, record_texts
from coulomb.objectives import Evidence, Sample
from coulomb.text import entity_metrics, load_task
from coulomb.text.pretrained import installed_encoder, load_body, load_tokenizer

LENGTHS = {"imdb": 128, "mrpc": 96, "conll2003": 48}
ARMS = (
    "tfidf",
    "softmax",
    "linear",
    "phase_a",
    "shuffled",
    "joint",
    "joint_shuffled",
    "tuned",
    "tuned_faster",
    "contrastive",
)
LAYERS, STEPS, FEATURES, POOL, DEVELOP = 3, 10, 16, 600, 600
# Chosen so, for texts and for tags: steps of Phase A, the rate of `tuned`, and the
# inverse penalty of the head.
SIZES = {
    "sequence": {
        "phase_a": 3e-3,
        "joint": 3e-3,
        "tuned": 3e-4,
        "tuned_faster": 1e-3,
        "head": 0.01,
    },
    "token": {"phase_a": 3e-3, "joint": 1e-2, "tuned": 1e-3, "head": 0.1},
}


class TopLayers(nn.Module):
    """The last layers of the encoder, on what the others give."""

    def __init__(self, layers, by_token):
        super().__init__()
        self.layers, self.by_token = nn.ModuleList(layers), by_token

    def forward(self, states, key_mask):
        """Run texts of like length together; give pooled states, or all of them."""
        lengths = key_mask.sum(dim=1)
        order = lengths.argsort(stable=True)
        out = states.new_zeros(*states.shape[: 1 + self.by_token], states.shape[-1])
        parts = torch.split(order, 64)
        found = [self.run(states[some], key_mask[some]) for some in parts]
        if self.by_token:
            wide = states.shape[1]
            found = [functional.pad(x, (0, 0, 0, wide - x.shape[1])) for x in found]
        return out.index_copy(0, order, torch.cat(found))

    def run(self, states, key_mask):
        longest = int(key_mask.sum(dim=1).max())
        states, key_mask = states[:, :longest], key_mask[:, :longest]
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                states = layer(states, key_mask[:, None, None, :])
                states = states[0] if isinstance(states, tuple) else states
        states = states.float()
        if self.by_token:
            return states
        weight = key_mask.unsqueeze(-1).float()
        return (states * weight).sum(dim=1) / weight.sum(dim=1)


class Joint(AbstractScore):
    """The log evidence of the labels by a ridge regression on all outputs at once."""

    def __call__(self, rows):
        labels = class_vectors(rows.target).to(rows.features)
        centred = rows.features - rows.features.mean(dim=-2, keepdim=True)
        states = centred / centred.detach().square().mean().sqrt()
        sample = Sample(labels, labels)  # the states are the features as they are
        return -Evidence(sample, lambda *_: states).energy(None)


def load(task, folder, kept, test_rows, split=False):
    """Cut texts, run the frozen layers once, and keep their states on the disk."""
    corpus = load_task(task, folder)
    by_token, length = corpus.kind == "token", LENGTHS.get(task, 64)
    source = installed_encoder()
    body, tokenizer = load_body(source, 256).eval(), load_tokenizer(source, corpus.kind)
    draw = np.random.default_rng(0)
    parts = {}
    judged = ("train", DEVELOP) if split else (corpus.reported_on, test_rows)
    for part, (name, size) in {"train": ("train", POOL), "test": judged}.items():
        rows = corpus.split(name)
        order = draw.permutation(len(rows)).tolist()
        if part == "train":
            pool = set(order[:size])
        elif split:  # training rows that are not drawn from
            order = [row for row in order if row not in pool]
        chosen = rows.take(order[:size])
        told = f"{task}-{'develop' if split and part == 'test' else name}"
        file = kept / f"{told}-{size}-{LAYERS}.npy"
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
                    every = body(**batch, output_hidden_states=True).hidden_states
                out = every[-1 - LAYERS]
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
        parts[part] = {
            "states": np.load(file, mmap_mode="r"),
            "mask": mask,
            "labels": labels,
            "texts": [t if isinstance(t, str) else " ".join(t) for t in texts],
        }
    return corpus, body, tokenizer, parts


def linear_layers(body, tokenizer, texts, file):
    """Learn the particles of the last layers, without labels, or read them."""
    settings = LineariseSettings(
        n_features=FEATURES, max_tokens=8000, steps=150, distil_steps=0, max_length=128
    )
    teacher, source = as_teacher(body), torch.Generator().manual_seed(0)
    heads = [tuple(range(site.num_heads)) for site in teacher.sites[:-LAYERS]]
    options = {"n_features": FEATURES, "feature_map": settings.feature_map}
    exact = [*heads, *[()] * LAYERS]
    fast = with_linearised_heads(body, exact_heads=exact, **options).eval()
    learned = linearised_heads(fast)[-LAYERS:]
    if not file.is_file():
        given, judged = record_texts(
            teacher, tokenizer, texts, settings, generator=source
        )
        rows = list(zip(given.layers(), judged.layers(), strict=True))[-LAYERS:]
        for heads, some in zip(learned, rows, strict=True):
            draw = torch.Generator().manual_seed(1)
            heads.fill(fit_layer(*some, settings, generator=draw))
        found = {
            f"{i}.{name}": value
            for i, heads in enumerate(learned)
            for name, value in heads.state_dict().items()
        }
        save_file({name: x.contiguous() for name, x in found.items()}, file)
    found = load_file(file)
    for i, heads in enumerate(learned):
        heads.load_state_dict({n: found[f"{i}.{n}"] for n in heads.state_dict()})
    return list(fast.encoder.layer[-LAYERS:])


def rows_of(part, numbers):
    width = int(part["mask"][numbers].sum(dim=1).max())
    states = torch.from_numpy(np.array(part["states"][numbers][:, :width]))
    return states, part["mask"][numbers][:, :width]


@torch.no_grad()
def features(model, part, numbers):
    """Give what the head sees, with its labels."""
    states, mask = rows_of(part, numbers)
    out, y = model(states, mask), part["labels"][numbers]
    if model.by_token:
        y = y[:, : mask.shape[1]]
        out, y = out[y >= 0], y[y >= 0]
    return out.double().numpy(), y.numpy()


def score(model, parts, numbers, corpus, seen=None, inverse=None):
    """Fit the head on some rows, and score the test rows."""
    x, y = features(model, parts["train"], numbers)
    centre, scale = x.mean(axis=0), x.std(axis=0).mean()
    inverse = inverse or SIZES[corpus.kind]["head"]
    head = LogisticRegression(C=inverse, max_iter=2000)
    head.fit((x - centre) / scale, y)
    every = np.arange(len(parts["test"]["labels"]))
    new, true = seen or features(model, parts["test"], every)
    guess = head.predict((new - centre) / scale)
    if not model.by_token:
        return float((guess == true).mean())
    ends = np.cumsum((parts["test"]["labels"] >= 0).sum(dim=1).numpy())[:-1]
    names = np.asarray(corpus.classes)
    tags = [[list(r) for r in np.split(names[z], ends)] for z in (true, guess)]
    return float(entity_metrics(*tags)["entity_f1"])


def moved(arm, layers, parts, numbers, corpus, seed, size):
    """Give the last layers as an arm leaves them."""
    by_token = corpus.kind == "token"
    model = TopLayers(copy.deepcopy(layers), by_token).eval()
    labels = parts["train"]["labels"][numbers].clone()
    if arm.endswith("shuffled"):
        source = torch.Generator().manual_seed(seed)
        known = labels >= 0
        flat = labels[known]
        labels[known] = flat[torch.randperm(len(flat), generator=source)]
    states, mask = rows_of(parts["train"], numbers)
    labels = labels[:, : mask.shape[1]] if by_token else labels
    if arm in ("phase_a", "shuffled", "joint", "joint_shuffled"):
        settings = AlignmentSettings(
            objective=Joint() if arm.startswith("joint") else "centred",
            level="token" if by_token else "sequence",
            output="",
            sampler="adam",
            inverse_temperature=math.inf,
            step_size=size,
            strength=0.0,
            clip=math.inf,
            max_steps=STEPS,
            max_epochs=STEPS,
            record_every=STEPS,
        )
        batches = [(states, mask, labels)]
        align(model, batches, settings=settings, held_out=None, seed=seed)
    if arm.startswith("tuned"):
        head = nn.Linear(384, len(corpus.classes))
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        weights = [p for n, p in model.named_parameters() if "coulomb" not in n]
        for weight in weights:
            weight.requires_grad_(True)
        groups = [{"params": weights}, {"params": head.parameters(), "lr": 1e-2}]
        optimiser = torch.optim.Adam(groups, lr=size)
        for _ in range(STEPS):
            logits = head(model(states, mask)).flatten(0, -2)
            loss = functional.cross_entropy(logits, labels.flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return model


def run_tfidf(parts, numbers):
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    some = [parts["train"]["texts"][i] for i in numbers]
    head = LogisticRegression(max_iter=2000, C=10.0)
    head.fit(words.fit_transform(some), parts["train"]["labels"][numbers].numpy())
    new = words.transform(parts["test"]["texts"])
    return float(head.score(new, parts["test"]["labels"].numpy()))


def run_contrastive(parts, numbers, seed):
    """Draw texts of a class together and classes apart, then fit the head."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )
    from sentence_transformers.models import Pooling, Transformer

    y, draw = parts["train"]["labels"][numbers].numpy(), np.random.default_rng(seed)
    texts = [parts["train"]["texts"][i] for i in numbers]
    pairs = {"sentence1": [], "sentence2": [], "label": []}
    for i, text in enumerate(texts):
        for same in (True, False):
            others = np.flatnonzero((y == y[i]) == same)
            for j in draw.choice(others[others != i], 5):
                pairs["sentence1"].append(text)
                pairs["sentence2"].append(texts[j])
                pairs["label"].append(float(same))
    encoder = Transformer(str(installed_encoder()), max_seq_length=64)
    model = SentenceTransformer(modules=[encoder, Pooling(384)], device="cpu")
    with tempfile.TemporaryDirectory() as place:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=place,
            num_train_epochs=1,
            per_device_train_batch_size=16,
            learning_rate=2e-5,
            seed=seed,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        SentenceTransformerTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict(pairs),
            loss=losses.CosineSimilarityLoss(model),
        ).train()
    x, new = (model.encode(some) for some in (texts, parts["test"]["texts"]))
    centre, scale = x.mean(axis=0), x.std(axis=0).mean()
    head = LogisticRegression(C=SIZES["sequence"]["head"], max_iter=2000)
    head.fit((x - centre) / scale, y)
    found = head.predict((new - centre) / scale) == parts["test"]["labels"].numpy()
    return float(found.mean())


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
    parser.add_argument("--seeds", default="0-5", help="from, and to before which")
    parser.add_argument("--test-rows", type=int, default=500)
    parser.add_argument("--kept", type=Path, default=Path("few-labels"))
    parser.add_argument("--arms", default=",".join(ARMS[:-2]))
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
    counts = [int(n) for n in given.labels.split(",")]
    for task in given.tasks.split(","):
        about = load(task, given.data_dir, given.kept, given.test_rows, given.select)
        corpus, body, tokenizer, parts = about
        learned = given.kept / f"{task}-particles-{LAYERS}.safetensors"
        fast = linear_layers(body, tokenizer, corpus_texts(corpus), learned)
        layers = {"softmax": list(body.encoder.layer[-LAYERS:])}
        seen, by_token = {}, corpus.kind == "token"
        for seed in range(*map(int, given.seeds.split("-"))):
            for count in counts:
                # Selection draws labelled rows that no comparison has.
                drawn = seed + 1000 * given.select
                labels = parts["train"]["labels"]
                numbers = choose_rows(labels, count, drawn, by_token)
                for arm, chosen in arms_of(given, by_token):
                    if (task, count, seed, arm, chosen) in there:
                        continue
                    began = time.process_time()
                    if arm == "tfidf":
                        value = run_tfidf(parts, numbers)
                    elif arm == "contrastive":
                        value = run_contrastive(parts, numbers, drawn)
                    else:
                        how = parts, numbers, corpus, drawn
                        kind = arm.replace("_shuffled", "")
                        kind = "phase_a" if kind == "shuffled" else kind
                        size = chosen or SIZES[corpus.kind].get(kind, 0)
                        model = moved(arm, layers.get(arm, fast), *how, size)
                        if arm in ("softmax", "linear", "head") and arm not in seen:
                            every = np.arange(len(parts["test"]["labels"]))
                            seen[arm] = features(model, parts["test"], every)
                        inverse = chosen if arm == "head" else None
                        value = score(model, *how[:3], seen.get(arm), inverse)
                    told = {"task": task, "labels": count, "seed": seed, "arm": arm}
                    told |= {"size": chosen, "score": value}
                    told |= {"seconds": time.process_time() - began}
                    done.append(told)
                    with file.open("a") as out:
                        out.write(json.dumps(told) + "\n")


def corpus_texts(corpus):
    texts = corpus.split("train").texts[:2000]
    return [text if isinstance(text, str) else " ".join(text) for text in texts]


def arms_of(given, by_token):
    if not given.select:
        arms = given.arms.split(",")
        return [(arm, 0) for arm in arms if not (by_token and arm == "tfidf")]
    sizes = [(arm, s) for arm in ("phase_a", "joint") for s in (3e-3, 1e-2)]
    sizes += [("head", inverse) for inverse in (1e-3, 1e-2, 1e-1, 1.0)]
    return [("linear", 0), *sizes, *(("tuned", s) for s in (1e-4, 3e-4, 1e-3))]


def show(done, select):
    table = {}
    for row in done:
        key = row["task"], row["labels"], row["arm"], row["size"]
        table.setdefault(key, {})[row["seed"]] = 100 * row["score"]
    if select:
        for (task, count, arm, size), found in table.items():
            gap = compare(found, table[task, count, "linear", 0])
            print(f"{task} {count} {arm} {size:g} {mean(found)} {gap}")
        return
    print("| task | labels | draws | " + " | ".join(ARMS) + " |")
    print("| --- " * (len(ARMS) + 3) + "|")
    pairs = dict.fromkeys(key[:2] for key in table)
    by_arm = {p: {arm: table.get((*p, arm, 0), {}) for arm in ARMS} for p in pairs}
    for (task, count), found in by_arm.items():
        draws = len(found["linear"])
        cells = [task, str(count), str(draws), *map(mean, found.values())]
        print("| " + " | ".join(cells) + " |")
    others = ("linear", "shuffled", "tuned", "tuned_faster")
    print("\n| task | labels | arm | " + " | ".join(f"- {x}" for x in others) + " |")
    print("| --- " * (len(others) + 3) + "|")
    for (task, count), found in by_arm.items():
        for arm in ("phase_a", "joint"):
            dealt = {"shuffled": "joint_shuffled"} if arm == "joint" else {}
            gaps = [compare(found[arm], found[dealt.get(x, x)]) for x in others]
            print("| " + " | ".join([task, str(count), arm, *gaps]) + " |")


def mean(found):
    return f"{np.mean(list(found.values())):.1f}" if found else ""


def compare(one, other):
    """Give the mean difference of two arms on the same draws, and its p-value."""
    gap = np.array([one[seed] - other[seed] for seed in one.keys() & other.keys()])
    if len(gap) < 2 or not gap.std():
        return ""
    error, p = gap.std(ddof=1) / math.sqrt(len(gap)), stats.ttest_1samp(gap, 0).pvalue
    return f"{gap.mean():+.1f} ± {error:.1f} (p = {p:.2g}, n = {len(gap)})"


if __name__ == "__main__":
    main()
