"""A folder of invented records: to try pages and tables on, never to be believed."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from coulomb._support.archive import write_json
from coulomb.experiments.base import Settings, experiments
from coulomb.experiments.records import (
    FILE,
    FRAMES,
    Job,
    Record,
    append_records,
    environment,
    job_key,
)

VERSION = "invented"


def write_sample(
    out: Path, names: Iterable[str] = ("noise", "strength", "budget", "runtime")
) -> None:
    """Write invented records of the smoke plans, in the shape real ones have.

    Examples
    --------
    >>> import tempfile
    >>> from coulomb.experiments.records import load_experiments
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_sample(folder, ["noise"])
    >>> sorted({record.version for record in load_experiments(folder)["noise"]})
    ['invented']
    """
    for name in names:
        folder = Path(out) / name
        plan = experiments.build(name).plan(Settings("smoke"))
        records = [record for job in plan for record in _invent(name, job)]
        (folder / FILE).unlink(missing_ok=True)
        append_records(folder / FILE, records)
        if name == "noise":
            write_json(folder / FRAMES, invent_frames())


def invent_frames(
    steps: int = 20, particles: int = 40, rows: int = 12
) -> dict[str, Any]:
    """Invent the file of an animation."""
    rng = np.random.default_rng(0)
    walk = rng.normal(size=(steps, particles, 2)).cumsum(axis=0) * 0.2
    kernel = np.corrcoef(rng.normal(size=(rows, 4)))
    return {
        "runs": [
            {
                "title": "Invented",
                "constants": "default",
                "axes": ["frequency along x1", "frequency along x5"],
                "radius": None,
                "steps": list(range(steps)),
                "positions": walk.round(3).tolist(),
                "energy": (-np.linspace(0, 1, steps)).round(4).tolist(),
                "alignment": np.linspace(0, 1, steps).round(4).tolist(),
                "kernels": [
                    {"frame": frame, "values": kernel.round(3).tolist()}
                    for frame in (0, steps - 1)
                ],
                "kernel_labels": [-1] * (rows // 2) + [1] * (rows - rows // 2),
            }
        ]
    }


def _invent(name: str, job: Job) -> list[Record]:
    key = job_key(name, job)
    rng = np.random.default_rng(int(key, 16))
    learned = job.get("method") == "langevin"
    controls = (None, "norm-matched", "noise-only") if learned else (None,)
    sigma = float(job.get("noise", 1.0))
    best = 0.5 + 0.26 / (1 + sigma / 5)
    records = []
    for control in controls:
        drop = 0.02 + 0.03 * (control is not None) + 0.01 * rng.normal()
        accuracy = best - drop
        metrics = {
            "accuracy": accuracy + 0.02 * rng.normal(),
            "expected_accuracy": accuracy,
            "f1": accuracy + 0.02 * rng.normal(),
            "bayes_accuracy": best,
        }
        seconds = {"total": math.exp(rng.normal()), "cpu": math.exp(rng.normal())}
        row = job | {"control": control}
        records.append(
            Record(name, row, key, "test", metrics, seconds, environment(), VERSION)
        )
    return records
