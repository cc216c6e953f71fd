"""What more machines cost and give: tables, training, many particles.

`tables` fits a table of which nobody holds more than a partition, on a Dask cluster of
processes here, and prints the peak memory of the client. `particles` times steps of
N particles; under `torchrun` the ranks share them. `training` and `messages` count the
bytes that a process writes to its sockets (`/proc/self/io`), beside the formulas, and
`partitions` what two Dask workers send to each other and to the client. `forecast` puts
measured costs into the formulas, for 10 and 1,000 machines.

    python benchmarks/scale.py tables --gigabytes 20
    python benchmarks/scale.py particles
    torchrun --nproc-per-node 2 benchmarks/scale.py particles
    torchrun --nproc-per-node 2 benchmarks/scale.py training
    torchrun --nproc-per-node 2 benchmarks/scale.py messages
    python benchmarks/scale.py partitions
    python benchmarks/scale.py forecast
"""

import argparse
import heapq
import json
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from coulomb import CoulombRegressor, CoulombSampler
from coulomb._support.ranks import Ranks
from coulomb.interactions import FarFieldSum, RandomBatchSum, Riesz

COLUMNS, PARTITIONS = 20, 200
COUNTS, DIMENSIONS = (10_000, 100_000, 1_000_000), (5, 16, 64)
# Measured below, for `forecast`: CPU seconds of a step of a million particles, what all
# ranks do and what they share; of workers for a million rows, and of the client; and
# of one job of `noise`, most of which take hundredths.
PARTICLE_SECONDS = {5: (0.0, 1.83), 64: (0.68, 5.95)}
ROWS_SECONDS, LEARN_SECONDS = 18.0, 3.6
JOB_SECONDS = {("langevin", "paper"): 8.8, ("langevin", "default"): 1.2}


def lazily(block_info=None, rows=0):
    number = block_info[None]["chunk-location"][0]
    return np.random.default_rng(number).normal(size=(rows, COLUMNS))


def tables(gigabytes: float, workers: int) -> dict:
    import dask.array as da
    from distributed import Client, LocalCluster

    rows = int(gigabytes * 1e9 / 8 / COLUMNS / PARTITIONS)
    X = da.map_blocks(
        lazily, rows=rows, chunks=((rows,) * PARTITIONS, (COLUMNS,)), dtype=float
    )
    y = X[:, 0] * X[:, 1] + X[:, 2]
    options = {"n_workers": workers, "threads_per_worker": 1}
    model = CoulombRegressor(64, sampler=CoulombSampler(max_iter=0), random_state=0)
    with LocalCluster(**options, dashboard_address=":0") as cluster, Client(cluster):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        model.fit(X, y)
        seconds = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        score = model.score(X[: 2 * rows], y[: 2 * rows])
    return {
        "gigabytes": rows * PARTITIONS * COLUMNS * 8 / 1e9,
        "rows": rows * PARTITIONS,
        "partitions": PARTITIONS,
        "workers": workers,
        "client peak, GB": after / 1e6,
        "client before, GB": before / 1e6,
        "seconds": seconds,
        "R^2": score,
    }


def particles(largest: int) -> Iterator[dict]:
    """Time sums over all pairs of a cloud; forces are what a step costs."""
    ranks = Ranks.join()
    torch.set_num_threads(1)
    kinds = {
        "far field": FarFieldSum(ranks=ranks),
        "random batch": RandomBatchSum(ranks=ranks),
    }
    for name, pairs in kinds.items():
        for dim in DIMENSIONS:
            known = [n for n in COUNTS if n <= largest]
            seconds = []
            for count in known:
                draw = torch.Generator().manual_seed(0)
                cloud = torch.randn(count, dim, generator=draw)
                took = []
                for _ in range(3 if count < 1_000_000 else 1):
                    began = time.process_time()
                    pairs(Riesz(0.0), cloud, generator=draw)
                    took.append(time.process_time() - began)
                seconds.append(min(took))
                row = {"sum": name, "dim": dim, "N": count, "ranks": ranks.world}
                yield row | {"cpu seconds": seconds[-1]}
            if len(known) > 1:
                slope = np.polyfit(np.log(known), np.log(seconds), 1)[0]
                yield {"sum": name, "dim": dim, "exponent": float(slope)}


def written() -> int:
    """Count the bytes that this process has written, to sockets too."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar"):
            return int(line.split()[1])
    raise OSError("/proc/self/io has no wchar")


def training(steps: int = 20) -> dict:
    from coulomb.attention import EncoderSettings, KernelAttention, KernelEncoder
    from coulomb.attention.encoder.layout import TokenBatch
    from coulomb.text.training import _Logits

    ranks = Ranks.join()
    torch.set_num_threads(1)
    model = KernelEncoder(
        EncoderSettings(5000, 2, dropout=0.0), KernelAttention, generator=0
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("particles" not in name)
    moving = sum(p.numel() for p in model.parameters() if p.requires_grad)
    logits = _Logits(model)
    if ranks.world > 1:
        logits = nn.parallel.DistributedDataParallel(logits)
    lengths = torch.full((64 // ranks.world,), 40)
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    ids = torch.randint(5000, (int(bounds[-1]),))
    batch = TokenBatch(ids, bounds)
    took = []
    for step in range(steps + 5):
        if step == 5:
            ranks.wait()
            bytes_before = written()
        began, cpu = time.perf_counter(), time.process_time()
        logits(batch, None).sum().backward()
        model.zero_grad()
        took.append((time.process_time() - cpu, time.perf_counter() - began))
    sent = (written() - bytes_before) / steps
    share = 2 * (ranks.world - 1) / ranks.world
    return {
        "ranks": ranks.world,
        "parameters": moving,
        "tokens of a rank": len(ids),
        "bytes a step, formula": share * 4 * moving,
        "bytes a step, written": sent,
        "cpu seconds a step": min(took)[0],
    }


def messages() -> Iterator[dict]:
    """Count the bytes of a step of particles, of Phase A, and of linearising."""
    ranks, draw = Ranks.join(), torch.Generator().manual_seed(0)
    torch.set_num_threads(1)
    ring = (ranks.world - 1) / ranks.world

    def count(name: str, formula: float, step: Callable[[], object]) -> dict:
        step()
        ranks.wait()
        before = written()
        step()
        sent = written() - before
        return {"step": name, "formula": round(formula), "written": sent}

    for dim in (5, 64):
        cloud, pairs = (
            torch.randn(10_000, dim, generator=draw),
            FarFieldSum(ranks=ranks),
        )
        yield count(
            f"particles, N = 10,000, p = {dim}",
            2 * ring * 4 * 10_000 * (dim + 1),
            lambda: pairs(Riesz(0.0), cloud, generator=draw),  # noqa: B023
        )
    yield count("Phase A", *phase_a(ranks, ring))
    yield count("linearise", *linearising(ranks, ring))


def phase_a(ranks: Ranks, ring: float) -> tuple[float, Callable[[], object]]:
    from coulomb.attention import (
        AlignmentSettings,
        EncoderSettings,
        KernelAttention,
        KernelEncoder,
    )
    from coulomb.attention.align.problem import Batch, ParticleLayers, build_problem
    from coulomb.attention.encoder.layout import TokenBatch
    from coulomb.attention.encoder.packed import feature_function
    from coulomb.features import Particles

    settings = EncoderSettings(5000, 2, dropout=0.0)
    model = KernelEncoder(settings, KernelAttention, generator=0)
    bounds = 40 * torch.arange(65)
    whole = TokenBatch(torch.arange(2560) % 5000, bounds, torch.arange(64) % 2)
    own = whole.take(torch.arange(64)[ranks.block(64)])
    parts = [Batch((own,), {}, None, own.labels, True)]
    chosen = AlignmentSettings(objective="centred", level="sequence")
    evaluate = feature_function("heads", "mean")
    options = {"held_out": None, "evaluate": evaluate, "ranks": ranks}
    problem = build_problem(model, parts, chosen, **options)
    particles = Particles(ParticleLayers.find(model).read(model))
    # Outputs of the batch, as float32, its labels and two counts, as 8 bytes each.
    outputs = sum(
        rows.features.numel() for rows in problem.objective.rows(particles, 0)
    )
    labels = 8 * 64 * ring + 16 * (ranks.world - 1)
    moving = 2 * ring * 4 * particles.positions.numel()
    formula = 4 * ring * outputs + labels + moving
    return formula, lambda: problem.objective.forces(particles)


def linearising(ranks: Ranks, ring: float) -> tuple[float, Callable[[], object]]:
    """Record two layers of 128 texts of 24 tokens; nothing is distilled."""
    from coulomb.linearise import linearise

    width, tokens, draw = 64, 128 * 24, torch.Generator().manual_seed(0)
    rows = torch.randn(128, 24, width, generator=draw)
    layer = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True)
    torch.manual_seed(0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()

    def step() -> object:
        options = {"measure": False, "ranks": ranks, "window": 0, "max_tokens": tokens}
        options |= {"long_share": 0.0, "max_length": 24}
        options |= {"n_features": 8, "steps": 1, "distil_steps": 0}
        texts = [f"{number:3d} {'x' * 84}" for number in range(128)]  # of 24 tokens
        return linearise(
            model,
            lambda some: {"src": rows[[int(text.split()[0]) for text in some]]},
            texts,
            **options,
        )

    return 2 * 3 * 4 * ring * tokens * width, step


def partitions(workers: int = 2, count: int = 40, rows: int = 20_000) -> dict:
    """Count what leaves the workers in a fit, of which nobody holds the rows."""
    import dask.array as da
    from distributed import Client, LocalCluster

    X = da.map_blocks(
        lazily, rows=rows, chunks=((rows,) * count, (COLUMNS,)), dtype=float
    )
    y = X[:, 0] * X[:, 1] + X[:, 2]
    model = CoulombRegressor(64, sampler=CoulombSampler(max_iter=0), random_state=0)
    options = {"n_workers": workers, "threads_per_worker": 1}
    with (
        LocalCluster(**options, dashboard_address=":0") as cluster,
        Client(cluster) as c,
    ):
        began = sum(c.run(cpu_seconds).values()), cpu_seconds()
        model.fit(X, y)
        sent = sum(c.run(worker_sent).values())
        seconds = sum(c.run(cpu_seconds).values()) - began[0]
        alone = cpu_seconds() - began[1]
    design = len(model.coef_.ravel()) + 1
    # The sample goes up a tree: at every level, half of it to the neighbour, at most.
    levels = int(np.ceil(np.log2(count)))
    sums = 8 * design**2 * count
    sample = 8 * (COLUMNS + 2) * 100_000 * levels
    return {
        "partitions": count,
        "GB of rows": rows * count * COLUMNS * 8 / 1e9,
        "columns of the head": design,
        "bytes, at most": sums + sample,
        "bytes sent by workers": sent,
        "CPU seconds of a million rows": 1e6 * seconds / count / rows,
        "CPU seconds of the client": alone,
    }


def worker_sent(dask_worker) -> int:
    return int(dask_worker.transfer_outgoing_bytes_total)


def cpu_seconds() -> float:
    return time.process_time()


def forecast(seconds: float, parameters: int, bandwidth: float, latency: float) -> None:
    """Print what each engine gains, from costs that were measured here.

    A step is compute, then a ring: `2 (R-1)` messages of `4 P / R` bytes. A table is
    20 GB in 200 partitions. The jobs of an experiment are those of `noise`, each begun
    by the machine that is free first.
    """
    from coulomb.experiments import Settings
    from coulomb.experiments.base import experiments

    plan = experiments.build("noise").plan(Settings("paper"))
    jobs = [JOB_SECONDS.get((job["method"], job["constants"]), 0.03) for job in plan]

    def step(machines: int, fixed: float, shared: float, numbers: float) -> float:
        hops = 2 * (machines - 1)
        ring = hops * (latency + 4 * numbers / machines / bandwidth)
        return fixed + shared / machines + ring

    def table(machines: int) -> float:
        work = np.ceil(200 / machines) * 0.625 * ROWS_SECONDS
        # The sample passes the levels of the tree, and ends at the client.
        levels = np.ceil(np.log2(200))
        sent = 8 * (COLUMNS + 2) * 100_000 / bandwidth
        return LEARN_SECONDS + work + (levels * (latency + sent) if machines > 1 else 0)

    def experiment(machines: int) -> float:
        free = [0.0] * machines
        for cost in jobs:
            heapq.heapreplace(free, free[0] + cost)
        return max(free)

    gains: dict[str, Callable[[int], float]] = {
        "one batch": lambda r: step(r, 0, seconds, parameters),
        "a batch each": lambda r: step(r, seconds, 0, parameters) / r,
        "particles, p = 5": lambda r: step(r, *PARTICLE_SECONDS[5], 6e6),
        "particles, p = 64": lambda r: step(r, *PARTICLE_SECONDS[64], 65e6),
        "table of 20 GB": table,
        f"{len(jobs)} jobs": experiment,
    }
    print("machines |", " | ".join(gains))
    for machines in (2, 10, 100, 1000):
        found = (f"{gain(1) / gain(machines):.2f}" for gain in gains.values())
        print(f"{machines:8d} |", " | ".join(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = ["tables", "particles", "training", "messages", "partitions", "forecast"]
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--largest", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=0.19, help="of a step, alone")
    parser.add_argument("--parameters", type=int, default=921_858)
    parser.add_argument(
        "--bandwidth", type=float, default=1.25e9, help="bytes a second"
    )
    parser.add_argument("--latency", type=float, default=5e-5, help="of a message")
    given = parser.parse_args()
    if given.what == "tables":
        print(json.dumps(tables(given.gigabytes, given.workers), indent=2))
    elif given.what == "particles":
        for row in particles(given.largest):
            if Ranks.join().writes:
                print(json.dumps(row), flush=True)
    elif given.what == "messages":
        for row in messages():
            if Ranks.join().writes:
                print(json.dumps(row), flush=True)
    elif given.what == "partitions":
        print(json.dumps(partitions(), indent=2))
    elif given.what == "training":
        found = training()
        if Ranks.join().writes:
            print(json.dumps(found, indent=2))
    else:
        options = (given.parameters, given.bandwidth, given.latency)
        forecast(given.seconds, *options)


if __name__ == "__main__":
    main()
