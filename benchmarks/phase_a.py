"""Which Phase A pays? Candidates against fixed particles, on validation rows only.

    python benchmarks/phase_a.py --task conll2003 --data-dir DIR --json FILE
    python benchmarks/phase_a.py --proof DIR  # tables of `coulomb reproduce phase-a`

A candidate is a change of settings. Every candidate is trained with every seed, and its
best validation score compared with that of `vanilla`, seed by seed. Test rows are never
read. The file is added to, and what it holds is not run again.
"""

import argparse
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from coulomb._support.stats import mean_difference, paired_p_value
from coulomb.attention.layers.kernel import KernelAttention
from coulomb.experiments import load_records
from coulomb.experiments.phase_a import CHANGES, compare_arms, load_rows
from coulomb.experiments.summary import METHOD_TITLES, summarise
from coulomb.text.evaluate import judged_by
from coulomb.text.run_folder import Store
from coulomb.text.settings import preset
from coulomb.text.setup import set_up
from coulomb.text.training import Trainer, show

VANILLA = {"attention": "vanilla-softmaxfeat"}
DRAWN = {"attention": "kernel-softmaxfeat", "align_start": "drawn"}
WINDOWS = {
    "attention": "kernel-softmaxfeat",
    "align_start": "windows",
    "align_after": 0,
}
CHOSEN = {
    "attention": "kernel-softmaxfeat",
    "align_start": "chosen",
    "align_after": 0,
    "align_epochs": 0.0,
}
ADAM = {
    "align_sampler": "adam",
    "align_inverse_temperature": math.inf,
    "align_clip": math.inf,
    "align_strength": 0.0,
    "align_step_size": 0.03,
}
NEIGHBOURS = ADAM | {
    "align_objective": "neighbours",
    "align_step_size": 0.01,
    "align_epochs": 2.0,
    "align_after": 0,
}
BEFORE = {"align_after": 0, "align_epochs": 1.0}
AFTER = {"align_after": 1, "align_epochs": 1.0}
CANDIDATES: dict[str, dict] = {
    # What needs no Phase A.
    "vanilla": VANILLA,
    "norm 0.5": VANILLA | {"start_norm": 0.5},
    "norm 3": VANILLA | {"start_norm": 3.0},
    "norm 6": VANILLA | {"start_norm": 6.0},
    "averaging": VANILLA | {"start_norm": 1e-6},
    "softmax": {"attention": "softmax"},
    # Particles that learn with everything else, at a multiple of the learning rate.
    "backprop x 1": VANILLA | {"backprop": 1.0},
    "backprop x 10": VANILLA | {"backprop": 10.0},
    # Starts.
    "placed": {"attention": "placed-softmaxfeat", "align_after": 0},
    "placed, norm 3": {
        "attention": "placed-softmaxfeat",
        "align_after": 0,
        "start_norm": 3.0,
    },
    "chosen by labels": CHOSEN,
    "shifts by hand": CHOSEN | {"align_shifts": "-1,1"},
    "shifts at random": {"attention": "strewn-softmaxfeat", "align_after": 0},
    "windows, then centred": WINDOWS | {"align_epochs": 1.0},
    # Moves.
    "centred, after 1": DRAWN | AFTER,
    "centred by layer, Adam, before": DRAWN | BEFORE | ADAM | {"align_level": "layer"},
    "centred by head, Adam, after 1": DRAWN | AFTER | ADAM | {"align_level": "head"},
    "likelihood, Adam, after 1": DRAWN
    | AFTER
    | ADAM
    | {"align_objective": "likelihood"},
    "neighbours, Adam, before": DRAWN | NEIGHBOURS,
    "neighbours, Adam, after 1": DRAWN | NEIGHBOURS | {"align_after": 1},
    "windows, then neighbours": WINDOWS | NEIGHBOURS | {"align_epochs": 1.0},
}


def run(name: str, task: str, n_features: int, seed: int, data_dir: Path | None):
    """Train one candidate; give the validation score of every epoch."""
    corpus, vocabulary = load_rows(task, data_dir)
    corpus = replace(corpus, reported_on="validation")
    changes = CHANGES.get(task, {}) | CANDIDATES[name]
    factor = changes.pop("backprop", 0.0)
    changes |= {"n_features": n_features, "seed": seed}
    began = time.process_time()
    setup = set_up(corpus, preset("default", changes), vocabulary)
    trainer = Trainer(setup, Store(), 10**9)
    if factor:
        train_particles(trainer.optimiser, setup.model, factor)
    with show(trainer.total, False, None) as display:
        trainer.run(display)
    judged = judged_by(corpus.kind, corpus.classes)
    scores = [
        row[f"validation_{judged}"]
        for row in trainer.store.history()
        if row["phase"] == "B"
    ]
    alignment = trainer.now.alignment or {}
    kept = ("before", "after", "starts", "begun")
    return {
        "candidate": name,
        "task": task,
        "n_features": n_features,
        "seed": seed,
        "scores": scores,
        "best": max(scores),
        "alignment": {key: alignment[key] for key in kept if key in alignment},
        "cpu_seconds": time.process_time() - began,
    }


def train_particles(optimiser, model, factor: float) -> None:
    """Train the particles too: an upper bound of what moving them can give."""
    layers = [part for part in model.modules() if isinstance(part, KernelAttention)]
    for layer in layers:
        layer.unfreeze_particles()
    particles = [layer.particles for layer in layers]
    optimiser.add_param_group({"params": particles, "weight_decay": 0.0})

    def scaled(optimiser, *_):
        optimiser.param_groups[-1]["lr"] *= factor  # the trainer sets it at every step

    optimiser.register_step_pre_hook(scaled)


def print_table(rows: list[dict]) -> None:
    """Print the best validation score, and its difference from vanilla."""
    found = {(r["task"], r["n_features"], r["candidate"], r["seed"]): r for r in rows}
    print("| task | M | candidate | score | minus vanilla | p | seeds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for task, budget, name in dict.fromkeys(key[:3] for key in found):
        seeds = [key[3] for key in found if key[:3] == (task, budget, name)]
        mean = sum(found[task, budget, name, s]["best"] for s in seeds) / len(seeds)
        gains = [
            found[task, budget, name, s]["best"]
            - found[task, budget, "vanilla", s]["best"]
            for s in seeds
            if (task, budget, "vanilla", s) in found
        ]
        gap = mean_difference(gains)
        words = (
            f"{gap.mean:+.4f} ± {gap.standard_error:.4f} | {paired_p_value(gap):.2g}"
        )
        print(f"| {task} | {budget} | {name} | {mean:.4f} | {words} | {len(seeds)} |")


def print_proof(folder: Path) -> None:
    """Print the tables of the experiment's records."""
    records = load_records(folder / "phase-a")
    print("| task | M | arm | score | standard error | seeds |")
    print("| --- | --- | --- | --- | --- | --- |")

    def place_of(row):
        arm = row.row
        budget = arm["n_components"] or math.inf  # what has no particles comes last
        return arm["task"], budget, arm["method"], arm["control"] or ""

    for row in sorted(summarise(records, "score"), key=place_of):
        name = METHOD_TITLES.get(row.row["method"], row.row["method"])
        if row.row["control"]:
            name = f"{name}, {row.row['control']}"
        budget = row.row["n_components"] or ""
        print(
            f"| {row.row['task']} | {budget} | {name} | {row.mean:.4f} | "
            f"{row.standard_error:.4f} | {row.n} |"
        )
    print("\n| task | M | arm | minus | difference | p | seeds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for gap in compare_arms(records):
        place = f"| {gap['task']} | {gap['n_components']} | {gap['method']} "
        place += f"| {gap['against']} "
        value = f"| {gap['mean']:+.4f} ± {gap['standard_error']:.4f} "
        print(f"{place}{value}| {gap['p_value']:.2g} | {gap['n']} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", nargs="+", default=["conll2003"])
    parser.add_argument("--n-features", nargs="+", type=int, default=[32])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(CANDIDATES))
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("COULOMB_DATA"))
    parser.add_argument("--json", type=Path, default=Path("phase-a.jsonl"))
    parser.add_argument("--proof", type=Path)
    options = parser.parse_args()
    if options.proof is not None:
        print_proof(options.proof)
        return
    torch.set_num_threads(1)
    rows = []
    if options.json.exists():
        rows = [json.loads(line) for line in options.json.read_text().splitlines()]
    done = {(r["candidate"], r["task"], r["n_features"], r["seed"]) for r in rows}
    for task in options.task:
        for budget in options.n_features:
            for seed in options.seeds:
                for name in options.only:
                    job = (name, task, budget, seed)
                    if job in done:
                        continue
                    rows.append(run(*job, options.data_dir))
                    with options.json.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    print_table(rows)


if __name__ == "__main__":
    main()
