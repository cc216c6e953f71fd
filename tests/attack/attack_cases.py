"""Children that run the command line, and the commands that they are killed in.

A child is forked from a process that has everything imported: many are cheap.
"""

import contextlib
import json
import logging
import os
import re
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
from tqdm import tqdm

import coulomb.cli.main
import coulomb.experiments.runner
import coulomb.linearise
import coulomb.report.page
import coulomb.text.classifier
import coulomb.text.diagnose

SECONDS = 20.0  # of the processor; a child that takes more hangs
GOOD = ["fine", "lovely", "great", "superb", "warm", "clever"]
BAD = ["dull", "poor", "awful", "weak", "cold", "clumsy"]
TINY = {
    "width": 16, "ffn-width": 16, "n-features": 8, "n-layers": 1, "max-length": 16,
    "epochs": 2, "min-steps": 0, "batch-size": 16, "vocabulary-size": 80,
    "align-after": 1, "align-start": "drawn", "align-epochs": 1.0,
    "validation-share": 0.2, "save-every": 2, "threads": 1,
}  # fmt: skip
REFUSED, BROKEN, STOPPED = 2, 1, (130, 143)


def flags(**changes):
    given = TINY | {name.replace("_", "-"): x for name, x in changes.items()}
    return [part for name, x in given.items() for part in (f"--{name}", str(x))]


def run_cli(*arguments):
    """What `coulomb ARGUMENTS` does; gives its exit code."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = sys.argv, [signal.getsignal(number) for number in numbers]
    sys.argv = ["coulomb", *map(str, arguments)]
    try:
        coulomb.cli.main.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before[0]
        for number, handler in zip(numbers, before[1], strict=True):
            signal.signal(number, handler)
    return 0


class Child:
    """A forked process with its output in two files."""

    def __init__(self, target, folder, *, memory=None):
        self.out, self.err = folder / "stdout", folder / "stderr"
        for path in (self.out, self.err):  # it may be killed before it opens them
            path.write_bytes(b"")
        self.pid = os.fork()
        if self.pid:
            self.code = None
            return
        code = 70
        try:
            for path, number in ((self.out, 1), (self.err, 2)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            # The lock of its bars is shared by all forks: one that is killed holding it
            # would stop every later one.
            tqdm.set_lock(threading.RLock())
            sys.stdout, sys.stderr, sys.stdin = (
                os.fdopen(n, mode, encoding="utf-8", buffering=1)
                for n, mode in ((1, "w"), (2, "w"), (0, "r"))
            )
            # What transformers tells is the child's too: unseen, it may hold anything.
            for handler in logging.getLogger("transformers").handlers:
                handler.stream = sys.stderr
            if memory is not None:
                resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            code = target() or 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def wait(self, seconds):
        """Give the exit code, or None if it is still at work."""
        end = time.monotonic() + seconds
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                return None
            else:
                time.sleep(0.002)
        return self.code

    def end(self, seconds=SECONDS):
        """Give the exit code, or None if it hangs, and is killed.

        It does if it uses more of the processor, or five times as much of the clock:
        other processes may compute at the same time.
        """
        began = time.monotonic()
        while self.wait(0.1) is None:
            used = sum(psutil.Process(self.pid).cpu_times()[:2])
            if used > seconds or time.monotonic() > began + 5 * seconds:
                self.kill()
                self.wait(seconds)
                return None
        return self.code

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)

    def told(self):
        return self.err.read_text(encoding="utf-8", errors="replace")

    def printed(self):
        return self.out.read_text(encoding="utf-8", errors="replace")


def dying_at(target, count, *, after, number=signal.SIGKILL):
    """Make what gets a signal before, or after, its `count`-th rename or flush."""

    def run():
        left = [count]

        def wrapped(call):
            def made(*arguments, **options):
                left[0] -= 1
                if left[0] == 0 and not after:
                    os.kill(os.getpid(), number)
                result = call(*arguments, **options)
                if left[0] == 0:
                    os.kill(os.getpid(), number)
                return result

            return made

        os.replace, os.fsync = wrapped(os.replace), wrapped(os.fsync)
        return target()

    return run


def reviews(n=64):
    return [
        (f"the {(GOOD if row % 2 else BAD)[row % 6]} film {row % 5}", row % 2)
        for row in range(n)
    ]


def write_data(folder):
    """Write small tables: texts, pairs and tags."""
    rows = reviews()
    lines = ["review,sentiment", *(f"{t},{'pos' if x else 'neg'}" for t, x in rows)]
    (folder / "reviews.csv").write_text("\n".join(lines) + "\n")
    pairs = [
        {"first": text, "second": rows[(i * (1 + i % 2)) % 64][0], "same": i % 2}
        for i, (text, _) in enumerate(rows)
    ]
    tags = [
        {"words": text.split(), "tags": ["O", "B-Q" if x else "O", "O", "B-N"]}
        for text, x in rows
    ]
    for name, content in (("pairs", pairs), ("tags", tags)):
        text = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(text)
    texts = "\n".join(text for text, _ in rows)
    (folder / "texts.txt").write_text(texts + "\n")


def write_encoder(folder):
    """Save a tiny BERT and its tokenizer."""
    import torch
    import transformers

    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "film", *GOOD, *BAD]
    (folder / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=24, max_position_embeddings=40,
        initializer_range=0.5,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModel.from_config(config).save_pretrained(folder)


def train_job(file, *columns):
    def run(data, out):
        if (out / "config.json").exists():
            return run_cli("train", "--resume", out, "--save-every", 2)
        return run_cli("train", data / file, *columns, "--out", out, *flags())

    return run


def linearise_job(data, out):
    return run_cli(
        "linearise", data / "bert", "--texts", data / "texts.txt", "--out", out,
        "--n-features", 4, "--steps", 6, "--distil-steps", 2,
    )  # fmt: skip


def reproduce_job(data, out):
    some = "--only", "constants=paper"
    return run_cli("reproduce", "strength", "--preset", "smoke", *some, "--out", out)


JOBS = {
    "csv": train_job("reviews.csv", "--text", "review", "--label", "sentiment"),
    "pairs": train_job(
        "pairs.jsonl", "--text", "first", "--text", "second", "--label", "same"
    ),
    "tags": train_job("tags.jsonl", "--text", "words", "--label", "tags"),
    "linearise": linearise_job,
    "reproduce": reproduce_job,
}


def outcome(out):
    """Everything that a command left, without times and machines."""
    found = {}
    for path in sorted(out.parent.rglob("*")):
        name = str(path.relative_to(out.parent))
        if path.is_dir() or (path.parent == out.parent and path.name in _OUTPUT):
            continue
        found[name] = _content(path)
    return found


_OUTPUT = ("stdout", "stderr")
_VARIES = ("seconds", "tokens_per_second", "environment")


def _content(path: Path):
    if path.suffix == ".safetensors":
        from safetensors.numpy import load_file

        if path.name == "checkpoint.safetensors":
            return "there"
        tensors = load_file(path).items()
        return {name: array.tobytes() for name, array in tensors}
    if path.suffix == ".jsonl":
        records = map(json.loads, path.read_text().splitlines())
        return sorted(json.dumps(_still(x), sort_keys=True) for x in records)
    if path.suffix == ".json":
        return _still(json.loads(path.read_text()))
    if path.name == "README.md":  # a card, which tells how long it took
        lines = path.read_text().splitlines()
        return [
            line for line in lines if not re.search(r"\d m?s\b|times as fast", line)
        ]
    return path.read_bytes()


def _still(value):
    if isinstance(value, dict):
        return {name: _still(x) for name, x in value.items() if name not in _VARIES}
    return [_still(x) for x in value] if isinstance(value, list) else value
