"""Whole Langevin steps against a straightforward numpy loop, as ratios.

One step moves N = 300 particles in p = 5 dimensions by the alignment gradient on n
samples, log repulsion and noise; drawing the noise is part of the step on both sides.
The roofline is the time to compute only the sines and cosines, n x N of each, block by
block in cache, by the fastest means at hand.

"Through the estimator" is what one more Langevin step costs a fit of `CoulombSampler`
on float64 data: the difference of fits of different lengths, on one thread, so that the
choice of law and temperature does not count.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numba
import numpy as np
import torch
from threadpoolctl import threadpool_limits

from coulomb import CoulombSampler
from coulomb.domains import Ball
from coulomb.dynamics.langevin import ProjectedLangevin
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.interactions import (
    AbstractPairSum,
    ExactSum,
    FarFieldSum,
    PairField,
    RandomBatchSum,
    Riesz,
)
from coulomb.kernels.math import sincos_row
from coulomb.kernels.particles import (
    FourierData,
    compile_loops,
    langevin_steps,
    riesz_sums,
)
from coulomb.objectives import FourierAlignment, Sample

N, P = 300, 5
STEP, NOISE, STRENGTH, RADIUS, CLIP = 1.0, 0.1, 0.01, 5.0, 10.0
BLOCK = 4096
ESTIMATOR_TARGET = 50.0
TARGETS = {"numpy_float64": 50.0, "numpy_float32": 12.0, "roofline": 2.5}


def problem(n: int, real: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n, P)).astype(real)
    y = np.sign(rng.standard_normal(n)).astype(real)
    return x, y, rng.standard_normal((N, P)).astype(real)


def numpy_step(
    x: np.ndarray, y: np.ndarray, w: np.ndarray, noise: np.ndarray
) -> np.ndarray:
    """Write the step down as one would, with whole arrays."""
    n, count = len(x), len(w)
    angles = x @ w.T  # (n, N)
    cos, sin = np.cos(angles), np.sin(angles)
    c, s = y @ cos, y @ sin  # (N,)
    slope = y[:, None] * (cos * s - sin * c)
    drift = (-2 / (n * (n - 1))) * (slope.T @ x)
    gaps = w[:, None] - w[None]  # (N, N, p)
    squares = (gaps**2).sum(axis=2)
    np.fill_diagonal(squares, np.inf)
    drift += STRENGTH / (count - 1) * -(gaps / squares[:, :, None]).sum(axis=1)
    length = np.linalg.norm(drift, axis=1, keepdims=True)
    drift *= np.minimum(1, CLIP / length)
    moved = w - STEP * drift + NOISE * noise
    length = np.linalg.norm(moved, axis=1, keepdims=True)
    return moved * np.minimum(1, RADIUS / length)


def numpy_run(n: int, real: type) -> Callable[[int], object]:
    x, y, start = problem(n, real)
    rng = np.random.default_rng(0)

    def run(steps: int) -> object:
        w = start
        for _ in range(steps):
            w = numpy_step(x, y, w, rng.standard_normal(w.shape, dtype=w.dtype))
        return w

    return run


def our_run(n: int, threads: int, batch: int | None = None) -> Callable[[int], object]:
    """Make the steps as a user of the library does, drawing included."""
    x, y, start = (torch.from_numpy(each) for each in problem(n, np.float32))
    objective = FourierAlignment(Sample(x, y[:, None]), threads=threads)
    energy = Hamiltonian(objective, Riesz(0.0), STRENGTH)
    sampler = ProjectedLangevin(
        STEP, 2 * STEP / NOISE**2, Ball(RADIUS), clip=CLIP, batch_size=batch
    )
    generator = torch.Generator().manual_seed(0)

    def run(steps: int) -> object:
        state = sampler.init(Particles(start))
        return sampler.advance(state, energy, steps, generator=generator)

    return run


def check_same_step(n: int) -> None:
    """Stop unless both sides make the same step."""
    x, y, w = problem(n, np.float64)
    noise = np.random.default_rng(1).standard_normal((1, N, P))
    ours = langevin_steps(
        *(w, NOISE * noise, np.full(1, STEP), FourierData.of(x, y[:, None])),
        scale=1 / (n * (n - 1)),
        strength=STRENGTH,
        clip=CLIP,
        radius=RADIUS,
    )
    np.testing.assert_allclose(ours.positions, numpy_step(x, y, w, noise[0]), 1e-9)


def roofline_runs(n: int, threads: int) -> dict[str, Callable[[int], object]]:
    """Only sines and cosines, n x N per step, over the same number of threads."""
    rng = np.random.default_rng(0)
    pool = ThreadPoolExecutor(threads)

    def spread(work: Callable[[int], None], steps: int) -> None:
        blocks = max(1, round(steps * n * N / BLOCK / threads))
        list(pool.map(work, [blocks] * threads))

    def polynomial(count: int) -> None:
        angles = rng.standard_normal(BLOCK).astype(np.float32)
        sine, cosine = np.empty_like(angles), np.empty_like(angles)
        for _ in range(count):
            sincos_row(angles, sine, cosine)

    def library(count: int) -> None:
        angles = torch.randn(BLOCK)
        sine, cosine = torch.empty_like(angles), torch.empty_like(angles)
        for _ in range(count):
            torch.sin(angles, out=sine)
            torch.cos(angles, out=cosine)

    return {
        "own": lambda steps: spread(polynomial, steps),
        "torch": lambda steps: spread(library, steps),
    }


def numpy_repulsion(w: np.ndarray) -> np.ndarray:
    """Sum log forces by differences, in blocks of rows: the whole array is 2 GB."""
    parts = []
    for rows in np.array_split(np.arange(len(w)), max(1, len(w) // 250)):
        gaps = w[rows, None] - w[None]
        squares = (gaps**2).sum(axis=2)
        squares[np.arange(len(rows)), rows] = np.inf
        parts.append(-(gaps / squares[:, :, None]).sum(axis=1) / (len(w) - 1))
    return np.concatenate(parts)


def medians(
    runs: dict[str, tuple[Callable[[int], object], int]], repeats: int
) -> dict[str, float]:
    """Time every run in turn, again and again: load hits all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, (run, steps) in runs.items():
            start = time.perf_counter()
            run(steps)
            if repeat:
                seconds[name].append((time.perf_counter() - start) / steps)
    return {name: statistics.median(times) for name, times in seconds.items()}


def row(name: str, n: int, seconds: float, **ratios: float) -> dict[str, object]:
    return {"name": name, "n": n, "seconds_per_step": seconds, "ratios": ratios}


def step_rows(n: int, threads: int, quick: bool) -> list[dict[str, object]]:
    check_same_step(n)
    long = max(1, (2 if quick else 5) * 140_000 // (n + 1000))
    runs = {
        "full batch": (our_run(n, threads), long),
        "numpy float64": (numpy_run(n, np.float64), 1 if n > 5000 else 3),
        "numpy float32": (numpy_run(n, np.float32), 1 if n > 5000 else 3),
    }
    if n > 256:
        runs["minibatch 256"] = (our_run(n, threads, batch=256), 200)
    for name, run in roofline_runs(n, threads).items():
        runs[f"sincos {name}"] = (run, long)
    times = medians(runs, 3 if quick else 9)
    limit = min(times["sincos own"], times["sincos torch"])
    rows = []
    for name in [each for each in ("full batch", "minibatch 256") if each in times]:
        ours = times[name]
        ratios = {
            "numpy_float64": times["numpy float64"] / ours,
            "numpy_float32": times["numpy float32"] / ours,
        }
        if name == "full batch":
            ratios["roofline"] = ours / limit
        rows.append(row(name, n, ours, **ratios))
    done = {each["name"] for each in rows}
    return rows + [row(each, n, t) for each, t in times.items() if each not in done]


def estimator_row(n: int, quick: bool) -> dict[str, object]:
    """Compare an extra step of a fit with the numpy loop, by processor time.

    A temperature that is given keeps held-out rows from leaving the steps out, as they
    would for these random labels.
    """
    x, y, _ = problem(n, np.float64)
    loop = numpy_run(n, np.float64)
    few, many = 400, 8400
    plain = max(1, 20_000 // (n + 1000))

    def fit(steps: int) -> object:
        settings = {"inverse_temperature": 200.0, "n_particles": N, "max_iter": steps}
        return CoulombSampler(200, random_state=0, **settings).fit(x, y)

    runs = {"few": (fit, few), "many": (fit, many), "numpy": (loop, plain)}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with threadpool_limits(limits=1):
        for _ in range(2 if quick else 5):
            for name, (run, steps) in runs.items():
                start = time.process_time()
                run(steps)
                seconds[name].append(time.process_time() - start)
    best = {name: min(times) for name, times in seconds.items()}
    ours = (best["many"] - best["few"]) / (many - few)
    ratio = best["numpy"] / plain / ours
    return row("through the estimator", n, ours, numpy_float64=ratio)


def repulsion_row(count: int, threads: int, quick: bool) -> dict[str, object]:
    w = np.random.default_rng(0).standard_normal((count, P)).astype(np.float32)
    runs = {
        "ours": (lambda _: riesz_sums(w, s=0.0, threads=threads), 1),
        "numpy": (lambda _: numpy_repulsion(w), 1),
    }
    times = medians(runs, 1 if quick else 3)
    ratio = times["numpy"] / times["ours"]
    name = f"repulsion, potential and force, N = {count}"
    return row(name, 0, times["ours"], numpy_float32=ratio)


def large_repulsion_rows(quick: bool) -> list[dict[str, object]]:
    """Time the sums for many particles, with their errors."""
    rows = []
    for count, dim in ((10_000, 64), (10_000, P), (100_000, 64), (100_000, P)):
        generator = torch.Generator().manual_seed(0)
        w = torch.randn(count, dim, generator=generator)
        sums: dict[str, AbstractPairSum] = {
            "random batches of 128": RandomBatchSum(128),
            "far field": FarFieldSum(0),
            "far field + batches of 16": FarFieldSum(16),
        }
        if count == 10_000:
            sums = {"exact": ExactSum()} | sums
        field = partial(evaluate, positions=w, generator=generator)
        runs = {name: (partial(field, each), 1) for name, each in sums.items()}
        times = medians(runs, 1 if quick else 3)
        # For 100,000 particles the exact forces on 200 of them are the yardstick.
        some = torch.randperm(count, generator=generator)[:200]
        exact = exact_forces(w, some)
        for name, each in sums.items():
            found = field(each).gradient[some].double()
            error = float((found - exact).norm() / exact.norm())
            label = f"repulsion, N = {count}, p = {dim}: {name}"
            ratios = {"relative_error": error}
            if "exact" in times:
                ratios["exact"] = times["exact"] / times[name]
            rows.append(row(label, 0, times[name], **ratios))
    return rows


def evaluate(
    pair_sum: AbstractPairSum,
    steps: int = 1,
    *,
    positions: torch.Tensor,
    generator: torch.Generator,
) -> PairField:
    return pair_sum(Riesz(0.0), positions, generator=generator)


def forces_from(gaps: torch.Tensor) -> torch.Tensor:
    squares = gaps.square().sum(dim=-1)
    squares[squares == 0] = torch.inf
    return -(gaps / squares.unsqueeze(-1)).sum(dim=1) / (gaps.shape[1] - 1)


def exact_forces(w: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
    parts = [forces_from(w[k].double() - w.double()[None]) for k in some[:, None]]
    return torch.cat(parts)


def judged(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Say for every target whether it is met."""
    verdicts = []
    for each in rows:
        estimator = each["name"] == "through the estimator"
        if each["name"] != "full batch" and not estimator:
            continue
        ratios = each["ratios"]
        assert isinstance(ratios, dict)
        targets = {"numpy_float64": ESTIMATOR_TARGET} if estimator else TARGETS
        for ratio, target in targets.items():
            if ratio != "numpy_float64" and each["n"] != 14000:
                continue
            value = ratios[ratio]
            met = value <= target if ratio == "roofline" else value >= target
            verdicts.append(
                {"name": each["name"], "n": each["n"], "ratio": ratio, "target": target}
                | {"value": value, "met": bool(met)}
            )
    return verdicts


def show(rows: list[dict[str, object]], verdicts: list[dict[str, object]]) -> None:
    print(f"{'':42}{'n':>7}{'x numpy f64':>13}{'x numpy f32':>13}{'/ sincos':>10}")
    for each in rows:
        ratios = each["ratios"]
        assert isinstance(ratios, dict)
        if "relative_error" in ratios:
            speed = f"{ratios['exact']:.0f} x exact, " if "exact" in ratios else ""
            print(f"{each['name']}: {speed}error {ratios['relative_error']:.0e}")
        elif ratios:
            cells = [
                f"{ratios[key]:{width}.1f}" if key in ratios else " " * width
                for key, width in (
                    ("numpy_float64", 13),
                    ("numpy_float32", 13),
                    ("roofline", 10),
                )
            ]
            print(f"{each['name']:42}{each['n'] or '':>7}{''.join(cells)}")
    for each in verdicts:
        word = "met" if each["met"] else "MISSED"
        print(
            f"target {each['ratio']} {each['target']:g}, {each['name']}, "
            f"n = {each['n']}: {each['value']:.1f}, {word}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the roofline brings its own threads
    compile_loops()
    rows = []
    for n in (70, 1400, 14000):
        rows += step_rows(n, options.threads, options.quick)
    rows += [estimator_row(n, options.quick) for n in (70, 1400, 14000)]
    for count in (N, 10_000):
        rows.append(repulsion_row(count, options.threads, options.quick))
    torch.set_num_threads(options.threads)
    rows += large_repulsion_rows(options.quick)
    verdicts = judged(rows)
    show(rows, verdicts)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of the whole benchmark: {peak:.0f} MB")
    if options.json:
        machine = {
            "cores": os.cpu_count(),
            "threads": options.threads,
            "processor": platform.processor() or platform.machine(),
            "numba": numba.__version__,
            "numpy": np.__version__,
            "torch": torch.__version__,
        }
        report = {"machine": machine, "rows": rows, "targets": verdicts}
        report["peak_memory_mb"] = peak
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
