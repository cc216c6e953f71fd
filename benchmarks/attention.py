"""Kernel attention against softmax, performer-pytorch and plain linear attention.

Heads of 64, 8 of them, M = 256 features, float32. All variants run in turns in one
process and the best of several rounds counts, so that ratios survive a busy machine;
with `--threads 1` processor time is measured, which survives it better.
Peak memory is that of a process of its own, above what it needed before its inputs.
performer-pytorch is compared with if it can be imported.
"""

import argparse
import contextlib
import functools
import io
import json
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from coulomb.attention import (
    AttentionState,
    decode_step,
    kernel_attention,
    prefill,
)
from coulomb.features import Particles

HEADS, DIM, FEATURES = 8, 64, 256
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
MEMORY_LENGTHS = (4096, 8192, 16384)
OURS = ("ours favor", "ours softmaxfeat")
PEERS = ("performer", "plain", "compiled")
CHUNK = 128
TOKENS = 16

PARTICLES = Particles(
    torch.randn(HEADS, FEATURES, DIM, generator=torch.Generator().manual_seed(0))
)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Key = TypeVar("Key", bound=Hashable)


def plain_features(x: Tensor, *, query: bool) -> Tensor:
    products = x @ PARTICLES.positions.transpose(-1, -2)
    exponents = products - x.square().sum(dim=-1, keepdim=True) / 2
    dims = (-1,) if query else (-1, -2)
    return (exponents - exponents.amax(dim=dims, keepdim=True).detach()).exp()


def plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Write linear attention down as one would, with whole arrays."""
    phi_q, phi_k = plain_features(q, query=True), plain_features(k, query=False)
    if not causal:
        sums = phi_k.transpose(-1, -2) @ v
        normaliser = phi_q @ phi_k.sum(dim=-2).unsqueeze(-1)
        return phi_q @ sums / normaliser
    shape = (*q.shape[:2], q.shape[2] // CHUNK, CHUNK, -1)
    phi_q, phi_k, ones = (x.view(shape) for x in (phi_q, phi_k, v))
    values = functional.pad(ones, (0, 1), value=1.0)
    states = phi_k.transpose(-1, -2) @ values
    before = states.cumsum(dim=2) - states
    inside = (phi_q @ phi_k.transpose(-1, -2)).tril()
    sums = (inside @ values + phi_q @ before).flatten(2, 3)
    return sums[..., :-1] / sums[..., -1:]


@functools.cache
def performer(causal: bool) -> Attention | None:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            from performer_pytorch import FastAttention
        except ImportError:
            return None
        layer: Attention = FastAttention(DIM, FEATURES, causal=causal).eval()
        return layer


@functools.cache
def variants(causal: bool) -> dict[str, Attention]:
    def ours(name: str) -> Attention:
        # Queries and keys arrive scaled by d^-1/4, as SDPA scales their product.
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return kernel_attention(q, k, v, PARTICLES, name, causal=causal)

        return run

    found: dict[str, Attention | None] = {
        "sdpa": lambda q, k, v: functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=1.0
        ),
        "ours favor": ours("favor"),
        "ours softmaxfeat": ours("softmaxfeat"),
        "performer": performer(causal),
        "plain": functools.partial(plain, causal=causal),
        "compiled": torch.compile(functools.partial(plain, causal=causal)),
    }
    return {name: run for name, run in found.items() if run is not None}


def inputs(batch: int, length: int, *, grad: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    tensors = [
        torch.randn(batch, HEADS, length, DIM, generator=generator) for _ in range(3)
    ]
    tensors[0] *= DIM**-0.25
    tensors[1] *= DIM**-0.25
    return [x.requires_grad_(grad) for x in tensors]


def once(run: Attention, tensors: list[Tensor]) -> None:
    if not tensors[0].requires_grad:
        with torch.no_grad():
            run(*tensors)
        return
    out = run(*tensors)
    torch.autograd.grad(out, tensors, torch.ones_like(out))


def timed(call: Callable[[], None]) -> float:
    # Time on the processor leaves out what others use, but sees one thread only.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    call()
    return clock() - start


def race(calls: dict[Key, Callable[[], None]], seconds: float) -> dict[Key, float]:
    """Run all in turns until the time is up; the best time of each, in seconds."""
    best = {name: timed(call) for name, call in calls.items()}
    start = time.perf_counter()
    rounds = 0
    while rounds < 2 or (time.perf_counter() - start < seconds and rounds < 200):
        rounds += 1
        for name, call in calls.items():
            best[name] = min(best[name], timed(call))
    return best


class Skips:
    """Leaves out what would take too long, judged by the next shorter length."""

    def __init__(self, limit: float, compiled: bool) -> None:
        self.limit = limit
        self.compiled = compiled
        self.last: dict[tuple[object, ...], tuple[int, float]] = {}

    def wanted(self, name: str, key: tuple[object, ...], length: int) -> bool:
        if name == "compiled" and not self.compiled:
            return False
        # performer-pytorch's causal form stores a state for each position.
        if name == "performer" and "causal" in key and length > 1024:
            return False
        if (name, *key) not in self.last:
            return True
        before, seconds = self.last[name, *key]
        return seconds * (length / before) ** 2 < self.limit


def time_forms(args: argparse.Namespace) -> list[dict[str, object]]:
    skips = Skips(args.limit, args.compiled)
    rows: list[dict[str, object]] = []
    for batch in (1, 8):
        for kind in ("bidirectional", "causal"):
            for grad in (False, True):
                key = (batch, kind, grad)
                for length in args.lengths:
                    if batch * length > args.most_tokens:
                        continue
                    tensors = inputs(batch, length, grad=grad)
                    calls = {
                        name: functools.partial(once, run, tensors)
                        for name, run in variants(kind == "causal").items()
                        if skips.wanted(name, key, length)
                    }
                    best = race(calls, args.seconds)
                    for name, seconds in best.items():
                        skips.last[name, *key] = length, seconds
                    row = {
                        "batch": batch,
                        "kind": kind,
                        "pass": "forward+backward" if grad else "forward",
                        "length": length,
                        "ms": {name: 1e3 * s for name, s in best.items()},
                    }
                    rows.append(row)
                    show(row)
    return rows


def show(row: dict[str, object]) -> None:
    times = row["ms"]
    assert isinstance(times, dict)
    base = times.get("sdpa")
    cells = [
        f"{name} {ms:.2f}" + (f" ({base / ms:.2f}x)" if base else "")
        for name, ms in times.items()
    ]
    head = f"batch {row['batch']} {row['kind']:13} {row['pass']:16} {row['length']:6}"
    print(f"{head} ms: {', '.join(cells)}", flush=True)


def peak_memory(name: str, kind: str, length: int, grad: bool) -> float:
    """Measure the peak, in MB, of one call in a process of its own."""
    spec = json.dumps([name, kind, length, grad])
    command = [sys.executable, __file__, "--memory-of", spec]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def measure_memory(spec: str) -> None:
    name, kind, length, grad = json.loads(spec)
    run = variants(kind == "causal")[name]
    once(run, inputs(1, CHUNK, grad=grad))
    # Importing torch peaks higher than the calls; 5 makes Linux forget that peak.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_of_process()
    once(run, inputs(1, length, grad=grad))
    print(peak_of_process() - before)


def peak_of_process() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return float(line.split()[1]) / 1024


def memory(args: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for kind in ("bidirectional", "causal"):
        for length in args.memory_lengths:
            names = ["sdpa", *OURS]
            if kind == "bidirectional":
                names += [n for n in ("performer", "plain") if n in variants(False)]
            peaks = {name: peak_memory(name, kind, length, True) for name in names}
            rows.append({"kind": kind, "length": length, "mb": peaks})
            cells = ", ".join(f"{name} {mb:.0f}" for name, mb in peaks.items())
            print(f"peak MB {kind:13} forward+backward {length:6}: {cells}", flush=True)
    return rows


def decode(args: argparse.Namespace) -> list[dict[str, object]]:
    """Time tokens after short and after long contexts, all in turn.

    The first token of `TOKENS` finds its state outside of the caches, as the layers of
    a large model do; it is also timed alone ("first").
    """
    calls: dict[tuple[int, str], Callable[[], None]] = {}
    swept = torch.zeros(1 << 24)  # 64 MB: more than the caches hold
    contexts = (128, max(args.lengths))
    for length in contexts:
        q, k, v = inputs(1, length, grad=False)
        token = [x[:, :, -1].contiguous() for x in (q, k, v)]
        for name in ("favor", "softmaxfeat"):
            state = prefill(k, v, PARTICLES, name)
            for count, label in ((TOKENS, ""), (1, " first")):
                calls[length, f"sweep {name}{label}"] = lambda: swept.add_(1)
                calls[length, f"ours {name}{label}"] = functools.partial(
                    decode_tokens, state, token, name, count
                )
        calls[length, "sdpa"] = functools.partial(
            functional.scaled_dot_product_attention, q[:, :, -1:], k, v
        )
    with torch.no_grad():
        best = race(calls, 4 * args.seconds)
    rows: list[dict[str, object]] = []
    for length in contexts:
        times = {
            name: 1e3 * s / (TOKENS if name in OURS else 1)
            for (context, name), s in best.items()
            if context == length and "sweep" not in name
        }
        rows.append({"context": length, "ms": times})
        cells = ", ".join(f"{name} {ms:.3f}" for name, ms in times.items())
        print(
            f"decode, ms per token and layer, context {length:6}: {cells}", flush=True
        )
    return rows


def decode_tokens(
    state: AttentionState, token: list[Tensor], name: str, count: int
) -> None:
    for _ in range(count):
        _, state = decode_step(state, *token, PARTICLES, name)


def crossover(rows: list[dict[str, object]], name: str) -> float:
    """Interpolate, in logarithms, the length from which on ours beats SDPA."""
    length = float("inf")
    previous: tuple[int, float] | None = None
    for row in rows:
        times, n = row["ms"], row["length"]
        assert isinstance(times, dict)
        assert isinstance(n, int)
        if "sdpa" not in times:
            continue
        ratio = times["sdpa"] / times[name]
        if ratio < 1:
            length = float("inf")
        elif length == float("inf"):
            length = n
            if previous is not None:
                n0, r0 = previous
                share = (1 - r0) / (ratio - r0)
                length = n0 * (n / n0) ** share
        previous = n, ratio
    return length


def verdicts(results: dict[str, list[dict[str, object]]]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []

    def add(what: str, value: float, bound: float, *, at_least: bool) -> None:
        met = value >= bound if at_least else value <= bound
        found.append({"target": what, "value": value, "bound": bound, "met": met})

    def pick(**wanted: object) -> list[dict[str, object]]:
        return [r for r in results["times"] if wanted.items() <= r.items()]

    for ours in OURS:
        for kind, factor, most in (("bidirectional", 10, 900), ("causal", 3, 2000)):
            for passes in ("forward", "forward+backward"):
                rows = pick(batch=1, kind=kind, **{"pass": passes})
                for row in (r for r in rows if r["length"] == 8192):
                    times = row["ms"]
                    ratio = times["sdpa"] / times[ours]
                    text = f"{ours}: {kind} {passes} at 8192, times SDPA"
                    add(text, ratio, factor, at_least=True)
                length = crossover(rows, ours)
                text = f"{ours}: {kind} {passes} crossover with SDPA"
                add(text, length, most, at_least=False)
        for peer in PEERS:
            ratios = [r["ms"][peer] / r["ms"][ours] for r in pick() if peer in r["ms"]]
            if ratios:
                text = f"{ours}: least speed-up over {peer}, all cells"
                add(text, min(ratios), 1.0, at_least=True)
        peaks = {(r["kind"], r["length"]): r["mb"] for r in results["memory"]}
        for (kind, length), mb in peaks.items():
            if length == 8192:
                text = f"{ours}: {kind} memory at 8192, times SDPA"
                add(text, mb[ours] / mb["sdpa"], 1.2, at_least=False)
        if ("causal", 16384) in peaks:
            growth = peaks["causal", 16384][ours] / peaks["causal", 8192][ours]
            text = f"{ours}: causal memory, 16384 over 8192"
            add(text, growth, 2.1, at_least=False)
        short, long = (row["ms"][ours] for row in results["decode"])
        add(f"{ours}: decode, ms per token", long, 0.1, at_least=False)
        text = f"{ours}: decode, long context over short"
        add(text, long / short, 1.25, at_least=False)
    return found


def markdown(record: dict[str, Any]) -> str:
    """Write ratios of one run as tables; seconds of one machine say little."""
    machine = record["machine"]
    lines = [
        "# Speed of attention",
        "",
        "Written by `python benchmarks/attention.py --markdown FILE`: 8 heads of 64,",
        f"M = 256, float32, {machine['threads']} threads, torch {machine['torch']}. "
        "All variants of a row were",
        "timed in turn in one process. Numbers are how many times as fast ours is:",
        "above 1 ours wins. The first of each pair is favor, the second softmaxfeat.",
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in record["times"]:
        title = f"Batch {row['batch']}, {row['kind']}, {row['pass']}"
        groups.setdefault(title, []).append(row)
    peers = ("sdpa", *PEERS)
    for title, rows in groups.items():
        lines += ["", f"## {title}", "", "| length | " + " | ".join(peers) + " |"]
        lines += ["| --- |" + " --- |" * len(peers)]
        for row in rows:
            ms = row["ms"]
            cells = [
                " / ".join(f"{ms[peer] / ms[ours]:.2f}" for ours in OURS)
                if peer in ms
                else "not run"
                for peer in peers
            ]
            lines.append(f"| {row['length']} | " + " | ".join(cells) + " |")
    lines += ["", "## Decoding, ms per token and layer", ""]
    lines += [f"Mean of {TOKENS} tokens in a row; the first of them, whose state was"]
    lines += ["not in the caches, also by itself.", ""]
    names = list(record["decode"][0]["ms"])
    lines += ["| context | " + " | ".join(names) + " |"]
    lines += ["| --- |" + " --- |" * len(names)]
    for row in record["decode"]:
        cells = [f"{row['ms'][name]:.3f}" for name in names]
        lines.append(f"| {row['context']} | " + " | ".join(cells) + " |")
    lines += ["", "## Targets", "", "| target | value | bound | |"]
    lines += ["| --- | --- | --- | --- |"]
    for each in record["targets"]:
        word = "met" if each["met"] else "**missed**"
        value, bound = f"{each['value']:.3g}", f"{each['bound']:g}"
        lines.append(f"| {each['target']} | {value} | {bound} | {word} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--markdown", type=Path, help="where to write ratios as tables")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter cells")
    parser.add_argument(
        "--limit", type=float, default=20.0, help="longest single run, seconds"
    )
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.memory_of:
        measure_memory(args.memory_of)
        return
    # Else the compiled variant would fall back to eager after eight lengths.
    torch._dynamo.config.recompile_limit = 64
    args.lengths = (128, 512, 2048) if args.quick else LENGTHS
    args.memory_lengths = (2048,) if args.quick else MEMORY_LENGTHS
    args.most_tokens = 1 << 12 if args.quick else 1 << 14
    args.seconds = 0.3 if args.quick else 1.0
    args.compiled = not args.quick
    if performer(False) is None:
        print("performer-pytorch cannot be imported: not compared with.")
    results = {
        "times": time_forms(args),
        "memory": memory(args),
        "decode": decode(args),
    }
    targets = verdicts(results)
    for t in targets:
        mark = "met   " if t["met"] else "MISSED"
        print(f"{mark} {t['target']}: {t['value']:.3g} (bound {t['bound']:g})")
    machine = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
    }
    record = {"machine": machine, **results, "targets": targets}
    if args.json:
        args.json.write_text(json.dumps(record, indent=1))
    if args.markdown:
        args.markdown.write_text(markdown(record))


if __name__ == "__main__":
    main()
