"""Invented results, small and whole, in the shape real ones have."""

import itertools
import math

import numpy as np

from coulomb.experiments.records import FILE, Record, append_records, job_key

COMMON = {"n_samples": 400, "n_features": 5, "n_components": 200, "design": 42}
LEARNED = {"method": "langevin", "constants": "default"}
ROWS = (
    {"method": "svm", "constants": "paper", "gamma": 0.5},
    {"method": "fixed", "constants": "paper"},
    {"method": "fixed", "constants": "default"},
    LEARNED,
)


def make_record(experiment, job, metrics, **more):
    content = {
        "key": job_key(experiment, job | {"control": None}),
        "split": "test",
        "seconds": {"total": 0.5},
        "environment": {"python": "3.11", "numpy": "2.0"},
        "version": "1.0",
    } | more
    return Record(experiment, job, metrics=metrics, **content)


def make_noise(noises=(0.1, 1.0, 10.0), trials=3, rows=ROWS):
    """Accuracies that are known: the learned row 0.70, each of its controls 0.68."""
    records = []
    for row, noise, trial in itertools.product(rows, noises, range(trials)):
        learned = row["method"] == "langevin"
        for control in (None, "norm-matched", "noise-only") if learned else (None,):
            base = 0.70 if learned else 0.60
            accuracy = base - 0.02 * (control is not None) + 0.001 * trial
            job = COMMON | row | {"noise": noise, "trial": trial, "seed": trial}
            records.append(
                make_record(
                    "noise",
                    job | {"control": control},
                    {
                        "expected_accuracy": accuracy,
                        "accuracy": accuracy,
                        "f1": accuracy,
                        "bayes_accuracy": 0.76,
                    },
                )
            )
    return records


def make_runtime(sizes=(100, 1000, 10_000)):
    """Seconds that follow t = 0.001 n^0.5."""
    job = COMMON | {"method": "svm", "constants": "paper", "gamma": 0.5, "noise": 1.0}
    return [
        make_record(
            "runtime",
            job | {"n_samples": n, "trial": trial, "seed": trial, "control": None},
            {"expected_accuracy": 0.6},
            seconds={"total": 0.001 * math.sqrt(n)},
        )
        for n in sizes
        for trial in range(2)
    ]


def make_text(seeds=2):
    """Kernel 0.01 above Vanilla and level with its controls."""
    records = []
    for seed in range(seeds):
        rows = [("softmax", None), ("vanilla-elu", None), ("unigrams", None)]
        rows += [("kernel-elu", c) for c in (None, "norm-matched", "noise-only")]
        for method, control in rows:
            accuracy = (0.77 if method.startswith("kernel") else 0.76) + 0.001 * seed
            job = {"task": "rotten_tomatoes", "method": method, "constants": "paper"}
            job |= {"control": control, "seed": seed, "trial": seed}
            metrics = {"accuracy": accuracy, "log_loss": 0.5, "ece": 0.04}
            records.append(make_record("text", job, metrics))
    return records


def make_meanfield(counts=(4, 8, 16), cells=20):
    x = np.linspace(-1, 1, cells)
    density = np.full(cells, 0.5)
    fit = {"slope": -0.5, "standard_error": 0.1, "intercept": 0.0}
    fit |= {"low": -0.7, "high": -0.3}
    values = [n**-0.5 for n in counts]
    return {
        "points": x[:, None].tolist(),
        "equilibrium": {"density": density.tolist(), "free_energy": -1.0},
        "flow": {
            "times": [0.1, 0.2],
            "densities": [density.tolist()] * 2,
            "step_times": [0.0, 0.1, 0.2],
            "free_energies": [0.0, -0.5, -0.9],
        },
        "gap": {
            "counts": list(counts),
            "first": values,
            "first_errors": [0.01] * 3,
            "first_exponent": fit,
            "observable": values,
            "observable_errors": [0.01] * 3,
            "observable_exponent": fit,
            "density": density.tolist(),
            "positions": [x[:n, None][None].tolist() for n in counts],
        },
    }


def make_deviations(counts=(4.0, 8.0, 16.0)):
    return {
        "deviations": {
            "counts": list(counts),
            "speeds": list(counts),
            "log_probabilities": [-0.3 * n for n in counts],
            "standard_errors": [0.1] * 3,
            "predictions": [-0.25 * n for n in counts],
            "rate": 0.25,
            "fit": {"slope": 0.26, "standard_error": 0.01},
        },
        "free_energy": {
            "counts": list(counts),
            "values": [-0.4] * 3,
            "standard_errors": [0.01] * 3,
            "finite_limits": [-0.41] * 3,
            "limit": -0.42,
        },
    }


def write_results(folder, **experiments):
    for name, records in experiments.items():
        append_records(folder / name / FILE, records)
    return folder
