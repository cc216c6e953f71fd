"""Fine-tuning a pretrained encoder: `coulomb.text` against `transformers.Trainer`.

    python benchmarks/pretrained.py --data-dir DIR

Both fine-tune all-MiniLM-L6-v2 with the same head, weights, batches, learning rates and
AdamW, without dropout. The Trainer pads each batch to its longest text. They take
turns, in blocks of steps in one process; times are processor time of one thread, and
the best block counts. Losses of the last step are printed beside each other.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.nn import functional

from coulomb._support.checks import make_generator
from coulomb.text import load_task, preset
from coulomb.text.pretrained import PaddedEncoder, installed_encoder, load_tokenizer
from coulomb.text.setup import ORDER, set_up
from coulomb.text.tokens import choose_vocabulary
from coulomb.text.training import Store, Trainer

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
    corpus = type(corpus)(
        corpus.name,
        corpus.kind,
        corpus.classes,
        {
            "train": corpus.split("train").take(range(0, 8000, 4)),
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--tasks", default="rotten_tomatoes,imdb")
    parser.add_argument("--blocks", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    for task in given.tasks.split(","):
        print(json.dumps(compare(task, given.data_dir, given.blocks)), flush=True)


if __name__ == "__main__":
    main()
