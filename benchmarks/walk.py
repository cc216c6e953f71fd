"""How far a call travels: files and functions that one run of each flow touches.

    python benchmarks/walk.py                    # every flow, with their limits
    python benchmarks/walk.py --flow train --path   # the calls, module by module

A flow runs twice, so that imports, compilation and caches are over, and the second time
every call of a function of this library is counted, in all threads.
"""

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

import coulomb

HOME = Path(coulomb.__file__).parent
LIMITS = {"sampler": 18, "blocked": 8, "compiled": 8, "train": 35, "linearise": 22}


def sampler() -> None:
    from coulomb.estimators import CoulombSampler

    X = np.random.default_rng(0).normal(size=(200, 4))
    CoulombSampler(32, random_state=0).fit(X, X[:, 0] > 0)


def attention(n: int) -> None:
    from coulomb.attention import kernel_attention
    from coulomb.features import Particles

    source = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, n, 64, generator=source)
    particles = Particles(torch.randn(4, 64, 64, generator=source) / 8)
    kernel_attention(x, x, x, particles, "softmaxfeat")


def train() -> None:
    from coulomb.text.data import build_corpus
    from coulomb.text.settings import preset
    from coulomb.text.tokens import train_vocabulary
    from coulomb.text.training import train_in_folder

    words = ["fine film", "warm plot", "dull film", "cold plot"] * 20
    corpus = build_corpus("walk", (words, [1, 1, 0, 0] * 20), validation_share=0.25)
    changes = {"width": 16, "ffn_width": 16, "n_features": 8, "epochs": 2}
    changes |= {"min_steps": 0, "align_after": 1, "align_epochs": 1.0}
    changes |= {"align_start": "drawn", "attention": "kernel-softmaxfeat"}
    vocabulary = train_vocabulary(words, size=60)
    with tempfile.TemporaryDirectory() as folder:
        settings = preset("default", changes)
        train_in_folder(Path(folder) / "run", corpus, settings, vocabulary)


def linearise() -> None:
    import transformers

    from coulomb.linearise import linearise as make_linear

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=40,
    )  # fmt: skip
    model = transformers.AutoModel.from_config(config).eval()

    def tokenize(texts: list[str]) -> dict[str, torch.Tensor]:
        rows = [[2 + ord(c) % 60 for c in text[:36]] for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    texts = [("abcdefgh" * 3)[i % 8 :][:12] for i in range(24)]
    make_linear(
        model, tokenize, texts, n_features=8, steps=4, distil_steps=2, check_every=2,
        max_length=36, measure=False,
    )  # fmt: skip


FLOWS: dict[str, Callable[[], None]] = {
    "sampler": sampler,
    "blocked": partial(attention, 64),  # blocks of torch's own products
    "compiled": partial(attention, 2048),  # loops, where numba is there
    "train": train,
    "linearise": linearise,
}


def walk(flow: Callable[[], None]) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Count calls by file and function, and list the modules in the order of calls."""
    flow()
    seen: Counter[tuple[str, str]] = Counter()
    path: list[str] = []

    def profile(frame, event, _):  # type: ignore[no-untyped-def]
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(HOME)):
            module = str(Path(file).relative_to(HOME).with_suffix(""))
            seen[module, frame.f_code.co_qualname] += 1
            if not path or path[-1] != module:
                path.append(module)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        flow()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen, path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flow", choices=FLOWS, action="append")
    parser.add_argument("--path", action="store_true", help="print the modules")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'flow':12} {'files':>5} {'limit':>5} {'functions':>9} {'turns':>6}")
    for name in options.flow or FLOWS:
        seen, path = walk(FLOWS[name])
        files = dict.fromkeys(path)
        row = (name, len(files), LIMITS[name], len(seen), len(path))
        print("{:12} {:5} {:5} {:9} {:6}".format(*row))
        if options.path:
            for file in files:
                names = [f for m, f in seen if m == file]
                print(f"  {file}: {', '.join(names)}")


if __name__ == "__main__":
    main()
