"""Fine-tuning a pretrained encoder: how fast, and how good.

    python benchmarks/pretrained.py --data-dir DIR
    python benchmarks/pretrained.py --data-dir DIR --accuracy OUT --seeds 0,1,2
    python benchmarks/pretrained.py --accuracy OUT --table

The first is a race of `coulomb.text` against `transformers.Trainer`: both fine-tune
all-MiniLM-L6-v2 with the same head, weights, batches, learning rates and AdamW, without
dropout. The Trainer pads each batch to its longest text. They take turns, in blocks of
steps in one process; times are processor time of one thread, and the best block counts.
Losses of the last step are printed beside each other.

The others train with the preset "pretrained" by softmax and by linear attention, made
so before or after it is fine-tuned, each run in a folder of OUT. Runs that were
interrupted go on, those that are there are not trained again. Checkpoints are chosen on
validation rows; where metrics would be on these, on a twentieth of the training rows.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.nn import functional

from coulomb._support.checks import make_generator
from coulomb.experiments.text import thinned
from coulomb.text import load_task, preset, resume_folder, train_in_folder
from coulomb.text.pretrained import PaddedEncoder, installed_encoder, load_tokenizer
from coulomb.text.run_folder import read_metrics
from coulomb.text.setup import ORDER, set_up
from coulomb.text.tokens import choose_vocabulary
from coulomb.text.training import Store, Trainer

# What is trained, for how long, by which metric, and what it should reach.
TASKS = {
    "rotten_tomatoes": ({}, {"max_length": 128}, "accuracy", 0.84),
    "mrpc": ({}, {"max_length": 128}, "f1", 0.86),
    "conll2003": ({}, {"max_length": 128}, "entity_f1", 0.85),
    "sst2": ({}, {"max_length": 96, "epochs": 1}, "accuracy", 0.90),
    "qqp": ({}, {"max_length": 128, "epochs": 2}, "accuracy", 0.84),
    "imdb": ({"train": 5000, "test": 5000}, {"max_length": 512}, "accuracy", 0.90),
}
ARMS = {
    "softmax": {"attention": "softmax"},
    "linear": {"attention": "linear"},
    "linear after": {"attention": "linear", "linearise": "after"},
}
MRPC = 578, 1147  # test rows of both classes
CASES = {"rotten_tomatoes": (128, 32, 6), "imdb": (512, 8, 3)}  # length, batch, steps


class Padded(PaddedEncoder):
    """The same encoder and head as one would call them with padding."""

    def forward(self, input_ids, attention_mask, labels):
        logits = super().forward(input_ids, attention_mask)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class InOrder(transformers.Trainer):
    """The Trainer on rows in the order they are given."""

    def _get_train_sampler(self, *arguments):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def compare(task, folder, blocks):
    length, batch_size, steps = CASES[task]
    corpus = load_task(task, folder)
    changes = {"attention": "softmax", "dropout": 0.0, "max_length": length}
    changes |= {"batch_size": batch_size, "schedule": "constant", "warm_up_share": 0.0}
    settings = preset("pretrained", changes | {"weight_decay": 0.0, "epochs": 1})
    train = corpus.split("train")
    apart = len(train) // 2000
    corpus = type(corpus)(
        corpus.name,
        corpus.kind,
        corpus.classes,
        {
            # IMDb is sorted by its labels.
            "train": train.take(range(0, 2000 * apart, apart)),
            "validation": corpus.split("validation").take(range(8)),
        },
    )
    setup = set_up(corpus, settings, choose_vocabulary(corpus, settings))
    for module in (*setup.full.modules(), *setup.model.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ours = Trainer(setup, Store(), 10**9)
    ours.model.train()
    theirs = Padded(setup.full)
    order = torch.randperm(2000, generator=make_generator(0, ORDER, 0)).tolist()
    tokenizer = load_tokenizer(installed_encoder(), "sequence")
    train = corpus.split("train")
    cut = tokenizer(list(train.texts), truncation=True, max_length=length)
    rows = [
        {name: cut[name][i] for name in ("input_ids", "attention_mask")}
        | {"labels": train.labels[i]}
        for i in order
    ]
    best, losses, optimiser = [float("inf")] * 2, [0.0, 0.0], None
    todo = ours._batches(0, 0)
    for block in range(blocks):
        arguments = transformers.TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=settings.lr,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            weight_decay=0.0,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            dataloader_pin_memory=False,
        )
        some = rows[block * steps * batch_size :][: steps * batch_size]
        trainer = InOrder(
            theirs,
            arguments,
            train_dataset=some,
            processing_class=tokenizer,
            optimizers=(optimiser, None),
        )
        begun = time.process_time()
        trainer.train()
        best[0] = min(best[0], time.process_time() - begun)
        optimiser = trainer.optimizer.optimizer
        losses[0] = [x["loss"] for x in trainer.state.log_history if "loss" in x][-1]
        begun = time.process_time()
        for _ in range(steps):
            before = ours.now.loss
            ours._step(next(todo))
        best[1] = min(best[1], time.process_time() - begun)
        losses[1] = ours.now.loss - before
    return {
        "task": task,
        "tokens": length,
        "batch": batch_size,
        "trainer": best[0] / steps,
        "coulomb": best[1] / steps,
        "ratio": best[0] / best[1],
        "losses": losses,
    }


def fine_tune(task, arm, seed, given):
    """Train one run, or go on with it."""
    rows, changes, _, _ = TASKS[task]
    share = (
        0.05 if load_task(task, given.data_dir).reported_on == "validation" else None
    )
    corpus = load_task(task, given.data_dir, validation_share=share)
    corpus = thinned(corpus, rows)
    settings = preset("pretrained", changes | ARMS[arm] | {"seed": seed})
    folder = given.accuracy / f"{task}-{arm.replace(' ', '-')}-{seed}"
    if (folder / "config.json").is_file():
        return resume_folder(folder, corpus=corpus)
    words = choose_vocabulary(corpus, settings)
    return train_in_folder(folder, corpus, settings, words)


def f1_of(found, classes):
    """Compute F1 of the second class from its share and two accuracies.

    >>> found = {"accuracy": 0.75, "balanced_accuracy": (0.5 + 5 / 6) / 2}
    >>> round(f1_of(found, (2, 6)), 4)  # 5 of 6 found, 1 of 2 wrong
    0.8333
    """
    no, yes = classes
    right = found["accuracy"] * (no + yes)
    # right = yes a + no b and 2 balanced = a + b, for the shares a and b that are right
    a = (right - 2 * found["balanced_accuracy"] * no) / (yes - no)
    b = (right - yes * a) / no
    return 2 * yes * a / (yes * a + yes + no * (1 - b))


def print_table(folder):
    """Print what finished runs reach, and what linear attention loses."""
    for task, (_, _, metric, target) in TASKS.items():
        scores = {}
        for arm in ARMS:
            for path in sorted(folder.glob(f"{task}-{arm.replace(' ', '-')}-[0-9]*")):
                if not (path / "metrics.json").is_file():
                    continue
                run = read_metrics(path)
                found = dict(run["metrics"])
                if metric == "f1":
                    found["f1"] = f1_of(found, MRPC)
                row = found[metric], found.get("ece"), run["chosen_by"]["validation"]
                scores.setdefault(arm, {})[int(path.name.rsplit("-", 1)[1])] = row
        for arm, by_seed in scores.items():
            words = [f"{task}, {arm}, {len(by_seed)} seeds: {metric}"]
            words.append(_mean([x[0] for x in by_seed.values()]) + f" (goal {target})")
            words.append("validation " + _mean([x[2] for x in by_seed.values()]))
            if by_seed[min(by_seed)][1] is not None:
                words.append("ECE " + _mean([x[1] for x in by_seed.values()]))
            both = [s for s in by_seed if s in scores.get("softmax", {})]
            if arm != "softmax" and both:
                gaps = [by_seed[s][0] - scores["softmax"][s][0] for s in both]
                words.append("minus softmax " + _mean(gaps))
            print(", ".join(words))


def _mean(numbers):
    error = ""
    if len(numbers) > 1:
        error = f" ± {statistics.stdev(numbers) / math.sqrt(len(numbers)):.4f}"
    return f"{statistics.mean(numbers):.4f}{error}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--tasks", help="with commas between")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--accuracy", type=Path, help="folder of the runs")
    parser.add_argument("--arms", default="softmax,linear", help=", ".join(ARMS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    if given.accuracy is not None:
        tasks = given.tasks.split(",") if given.tasks else list(TASKS)
        for seed in () if given.table else map(int, given.seeds.split(",")):
            for task in tasks:
                for arm in given.arms.split(","):
                    fine_tune(task, arm, seed, given)
        print_table(given.accuracy)
        return
    for task in (given.tasks or "rotten_tomatoes,imdb").split(","):
        print(json.dumps(compare(task, given.data_dir, given.blocks)), flush=True)


if __name__ == "__main__":
    main()
