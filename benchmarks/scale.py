"""What more machines cost and give: tables, training, many particles.

`tables` fits a table of which nobody holds more than a partition, on a Dask cluster of
processes here, and prints the peak memory of the client. `particles` times steps of
N particles; under `torchrun` the ranks share them. `training` counts the bytes that a
process writes to its sockets in a step (`/proc/self/io`), beside the formula.
`forecast` puts measured costs into the formulas, for 10 and 1,000 machines.

    python benchmarks/scale.py tables --gigabytes 20
    python benchmarks/scale.py particles
    torchrun --nproc-per-node 2 benchmarks/scale.py particles
    torchrun --nproc-per-node 2 benchmarks/scale.py training
    python benchmarks/scale.py forecast
"""

import argparse
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from coulomb import CoulombRegressor, CoulombSampler
from coulomb._support.ranks import Ranks
from coulomb.interactions import FarFieldSum, RandomBatchSum, Riesz

COLUMNS, PARTITIONS = 20, 200
COUNTS, DIMENSIONS = (10_000, 100_000, 1_000_000), (5, 16, 64)


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


def forecast(seconds: float, parameters: int, bandwidth: float, latency: float) -> None:
    """Print steps a second for a fixed batch and for a batch a machine.

    A step is compute, then a ring: `2 (R-1)` messages of `4 P / R` bytes.
    """
    print("machines | same batch, speed-up | a batch a machine, share of ideal")
    for machines in (1, 2, 10, 100, 1000):
        hops = 2 * (machines - 1)
        ring = hops * (latency + 4 * parameters / machines / bandwidth)
        print(
            f"{machines:5d} | {seconds / (seconds / machines + ring):8.2f} | "
            f"{seconds / (seconds + ring):6.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["tables", "particles", "training", "forecast"])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--largest", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a step, alone")
    parser.add_argument("--parameters", type=int, default=2_300_000)
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
    elif given.what == "training":
        found = training()
        if Ranks.join().writes:
            print(json.dumps(found, indent=2))
    else:
        options = (given.parameters, given.bandwidth, given.latency)
        forecast(given.seconds, *options)


if __name__ == "__main__":
    main()
