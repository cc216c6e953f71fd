"""The picture of `coulomb demo`: particles, energy and kernel, before and after."""

from pathlib import Path
from typing import Any

import numpy as np

from coulomb._support.archive import write_bytes
from coulomb.datasets import make_synthetic
from coulomb.estimators import CoulombSampler
from coulomb.report.movie import Run, print_runs

_SHOWN_PARTICLES = 400
# Where sin(pi x1) and sin(3 x5) of the log-odds put their frequencies.
_MARKS = np.array([[np.pi, 0.0], [-np.pi, 0.0], [0.0, 3.0], [0.0, -3.0]])


def draw_demo(path: Path, *, seed: int = 0) -> None:
    """Let particles learn the paper's synthetic problem and draw what happened."""
    problem = make_synthetic(n_samples=600, noise=0.1)
    X, y = problem.X, problem.y
    order = np.argsort(problem.probability)[::3]
    shared: dict[str, Any] = {
        "n_candidates": None,
        "inverse_temperature": 400.0,
        "gamma": 2.0,
        "coordinates": 2,
        "random_state": seed,
    }
    both = [
        CoulombSampler(_SHOWN_PARTICLES, max_iter=steps, **shared).fit(X, y)
        for steps in (0, 1000)
    ]
    clouds = np.stack([sampler.particles_[:, [0, 4]] for sampler in both])
    seen = clouds.any(axis=(0, 2))  # the others look at other columns
    kernels = (sampler.kernel(X[order]) for sampler in both)
    history = both[1].history_
    run = Run(
        "Particles of the synthetic problem; + marks the frequencies of its log-odds",
        ("frequency along x1", "frequency along x5"),
        None,
        np.asarray(history["step"], dtype=np.float64),
        clouds[:, seen],
        np.asarray(history["energy"], dtype=np.float64),
        tuple(enumerate(kernels)),
        _MARKS,
    )
    write_bytes(path, print_runs([run])[1])
