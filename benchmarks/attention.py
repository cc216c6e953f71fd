"""Kernel attention against softmax, its own torch path and plain linear attention.

    python benchmarks/attention.py --quick
    python benchmarks/attention.py --compiled --write docs/results/attention.md
    python benchmarks/attention.py --json zen4.json --only times,memory
    python benchmarks/attention.py --write docs/results/attention.md zen4.json
    python benchmarks/attention.py --threads 1 --against ../older/src

The second measures everything, in about ten minutes on two idle cores, and writes the
section of this processor; the sections of others stay. So does the last, with records
that were made before.

8 heads of 64 and M = 256 features in float32 unless a table says otherwise. All
variants run in turns in one process and the best of several rounds counts, so that
ratios survive a busy machine; with `--threads 1` processor time is measured, which
survives it better. Peak memory is that of a process of its own, above what it needed
before its inputs. A file of `--json` collects the parts of one processor; to see a
narrower one, run with `ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
ONEDNN_MAX_CPU_ISA=AVX2 NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2,+fma` and a
`--label` that says so. `--against` races the sources of another tree, process by
process in turn, in a few cells where forms are close to each other.
"""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from coulomb.attention import (
    kernel_attention,
    packed_attention,
    prefill,
)
from coulomb.attention.ops import tuning
from coulomb.features import Particles

HEADS, DIM, FEATURES = 8, 64, 256
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
OURS = ("favor", "softmaxfeat")
PEERS = ("torch", "plain", "compiled")
PASSES = ("forward", "forward+backward")
CHUNK = 128
TOKENS = 16
PARTS = ("times", "shapes", "packed", "memory", "decode")
# At 8192 tokens, times SDPA; the length from which on ours is faster.
FACTORS = {("bidirectional", 0): 12, ("bidirectional", 1): 14}
FACTORS |= {("causal", 0): 5, ("causal", 1): 6}
CROSSOVERS = {("bidirectional", 0): 700, ("bidirectional", 1): 500}
CROSSOVERS |= {("causal", 0): 1000, ("causal", 1): 800}


@functools.cache
def particles(dim: int = DIM, features: int = FEATURES) -> Particles:
    generator = torch.Generator().manual_seed(0)
    return Particles(torch.randn(HEADS, features, dim, generator=generator))


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Key = TypeVar("Key", bound=Hashable)


def plain_features(x: Tensor, positions: Tensor, *, query: bool) -> Tensor:
    products = x @ positions.transpose(-1, -2)
    exponents = products - x.square().sum(dim=-1, keepdim=True) / 2
    dims = (-1,) if query else (-1, -2)
    return (exponents - exponents.amax(dim=dims, keepdim=True).detach()).exp()


def plain(
    q: Tensor, k: Tensor, v: Tensor, *, positions: Tensor, causal: bool
) -> Tensor:
    """Write linear attention down as one would, with whole arrays."""
    phi_q = plain_features(q, positions, query=True)
    phi_k = plain_features(k, positions, query=False)
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


def without_loops(attention: Attention) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = os.environ.get("COULOMB_NUMBA", "1")
        os.environ["COULOMB_NUMBA"] = "0"
        try:
            return attention(q, k, v)
        finally:
            os.environ["COULOMB_NUMBA"] = before

    return run


def variants(
    causal: bool, dim: int = DIM, features: int = FEATURES
) -> dict[str, Attention]:
    known = particles(dim, features)

    def ours(name: str) -> Attention:
        # Queries and keys arrive scaled by d^-1/4, as SDPA scales their product.
        return lambda q, k, v: kernel_attention(q, k, v, known, name, causal=causal)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=1.0
        )

    found: dict[str, Attention] = {"sdpa": sdpa}
    for name in OURS:
        found[name] = ours(name)
        found[f"torch {name}"] = without_loops(ours(name))
    return found


@functools.cache
def plain_variants(causal: bool) -> dict[str, Attention]:
    form = functools.partial(plain, positions=particles().positions, causal=causal)
    return {"plain": form, "compiled": torch.compile(form)}


def inputs(batch: int, length: int, *, grad: bool, dim: int = DIM) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    tensors = [
        torch.randn(batch, HEADS, length, dim, generator=generator) for _ in range(3)
    ]
    tensors[0] *= dim**-0.25
    tensors[1] *= dim**-0.25
    return [x.requires_grad_(grad) for x in tensors]


def once(run: Attention, tensors: list[Tensor]) -> None:
    if not tensors[0].requires_grad:
        with torch.no_grad():
            run(*tensors)
        return
    out = run(*tensors)
    torch.autograd.grad(out, tensors, torch.ones_like(out))


def timed(call: Callable[[], object]) -> float:
    # Time on the processor leaves out what others use, but sees one thread only.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    call()
    return clock() - start


def race(calls: dict[Key, Callable[[], object]], seconds: float) -> dict[Key, float]:
    """Run all in turns until the time is up; the best time of each, in seconds."""
    best = {name: timed(call) for name, call in calls.items()}
    start = time.perf_counter()
    rounds = 0
    while rounds < 2 or (time.perf_counter() - start < seconds and rounds < 200):
        rounds += 1
        for name, call in calls.items():
            best[name] = min(best[name], timed(call))
    return best


def show(title: str, times: dict[str, float]) -> None:
    base = times.get("sdpa")
    cells = [
        f"{name} {ms:.3g}" + (f" ({base / ms:.2f}x)" if base else "")
        for name, ms in times.items()
    ]
    print(f"{title:50} ms: {', '.join(cells)}", flush=True)


class Cell(NamedTuple):
    """One race."""

    batch: int
    kind: str
    passes: int
    length: int
    dim: int = DIM
    features: int = FEATURES

    def run(self, args: argparse.Namespace, peers: bool) -> dict[str, Any]:
        causal = self.kind == "causal"
        tensors = inputs(self.batch, self.length, grad=bool(self.passes), dim=self.dim)
        runs = variants(causal, self.dim, self.features)
        if peers:
            runs = runs | plain_variants(causal)
            if not args.compiled:
                del runs["compiled"]
        calls = {n: functools.partial(once, run, tensors) for n, run in runs.items()}
        times = {n: 1e3 * s for n, s in race(calls, args.seconds).items()}
        title = f"{self.kind} {PASSES[self.passes]} batch {self.batch} n {self.length}"
        show(f"{title} d {self.dim} M {self.features}", times)
        return {**self._asdict(), "ms": times}


def time_forms(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        Cell(batch, kind, passes, length).run(args, peers=True)
        for batch in (1, 8)
        for kind in ("bidirectional", "causal")
        for passes in (0, 1)
        for length in args.lengths
        if batch == 1 or length in (128, 512)
    ]


def time_shapes(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        Cell(1, kind, passes, length, dim, features).run(args, peers=False)
        for dim in (32, 64, 128)
        for features in (64, 256)
        for kind in ("bidirectional", "causal")
        for passes in (0, 1)
        for length in ((512,) if args.quick else (512, 2048))
    ]


def time_close(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the cells in which forms are close, or an older tree was faster."""
    small = [(dim, 64, 512) for dim in (32, 64)]
    usual = [(DIM, FEATURES, length) for length in (128, 512, 2048)]
    return [
        Cell(1, kind, passes, length, dim, features).run(args, peers=False)
        for kind in ("bidirectional", "causal")
        for passes in (0, 1)
        for dim, features, length in [*small, *usual]
    ]


def race_trees(args: argparse.Namespace) -> None:
    """Race the sources of two trees; print how many times as fast this one is."""
    here = Path(__file__).parents[1] / "src"
    trees = {"this": here, "other": args.against.resolve()}
    best: dict[str, list[dict[str, Any]]] = {}
    command = [sys.executable, __file__, "--only", "close"]
    command += ["--threads", str(args.threads)] if args.threads else []
    for turn in range(args.rounds):
        for name, tree in trees.items():
            print(f"round {turn + 1} of {args.rounds}: {tree}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                file, path = Path(folder) / "times.json", {"PYTHONPATH": str(tree)}
                run = [*command, "--json", str(file)]
                subprocess.run(
                    run, check=True, env=os.environ | path, stdout=subprocess.DEVNULL
                )
                found = json.loads(file.read_text())["close"]
            for old, new in zip(best.setdefault(name, found), found, strict=True):
                old["ms"] = {n: min(ms, new["ms"][n]) for n, ms in old["ms"].items()}
    for ours, theirs in zip(best["this"], best["other"], strict=True):
        cell = Cell(*(ours[field] for field in Cell._fields))
        cells = [f"{n} {theirs['ms'][n] / ms:.3f}" for n, ms in ours["ms"].items()]
        cells += [
            f"{n} over torch {ours['ms'][f'torch {n}'] / ours['ms'][n]:.3f}"
            for n in OURS
        ]
        print(f"{' '.join(map(str, cell))}: {', '.join(cells)}")


def time_packed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time sentences and paragraphs of mixed lengths, against padded SDPA."""
    rows = []
    for middle, spread in ((24.0, 0.6), (200.0, 0.9)):
        generator = torch.Generator().manual_seed(0)
        draws = torch.randn(48, generator=generator).mul(spread).exp().mul(middle)
        lengths = draws.clamp(4, 1024).long()
        about = {"median": middle, "longest": int(lengths.max())}
        about["tokens"] = int(lengths.sum())
        for kind in ("bidirectional", "causal"):
            for passes in (0, 1):
                calls = packed_calls(lengths, kind == "causal", bool(passes))
                times = {n: 1e3 * s for n, s in race(calls, args.seconds).items()}
                show(f"packed, median {middle:g}, {kind} {PASSES[passes]}", times)
                rows.append({**about, "kind": kind, "passes": passes, "ms": times})
    return rows


def packed_calls(
    lengths: Tensor, causal: bool, grad: bool
) -> dict[str, Callable[[], object]]:
    """Give ours on sequences in a row, and SDPA on the same with padding."""
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    longest = int(lengths.max())
    mask = torch.arange(longest) < lengths.unsqueeze(1)
    seen = mask[:, None, None, :]
    if causal:
        seen = seen & torch.ones(longest, longest, dtype=torch.bool).tril()
    drawn = inputs(1, int(bounds[-1]), grad=False)
    flat = [x[0].transpose(0, 1).contiguous() for x in drawn]
    padded = [x.new_zeros(len(lengths), longest, HEADS, DIM) for x in flat]
    for whole, x in zip(padded, flat, strict=True):
        whole[mask] = x
        x.requires_grad_(grad)
    padded = [x.transpose(1, 2).contiguous().requires_grad_(grad) for x in padded]

    def ours(name: str) -> Attention:
        about = particles(), name, bounds
        return lambda q, k, v: packed_attention(q, k, v, *about, causal=causal)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=1.0
        )

    calls: dict[str, Callable[[], object]] = {}
    calls["sdpa"] = functools.partial(once, sdpa, padded)
    for name in OURS:
        calls[name] = functools.partial(once, ours(name), flat)
        slow = without_loops(ours(name))
        calls[f"torch {name}"] = functools.partial(once, slow, flat)
    return calls


def peak_memory(name: str, kind: str, length: int) -> float:
    """Measure the peak, in MB, of one call in a process of its own."""
    spec = json.dumps([name, kind, length])
    command = [sys.executable, __file__, "--memory-of", spec]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def measure_memory(spec: str) -> None:
    name, kind, length = json.loads(spec)
    run = variants(kind == "causal")[name]
    once(run, inputs(1, CHUNK, grad=True))
    # Importing torch peaks higher than the calls; 5 makes Linux forget that peak.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_of_process()
    once(run, inputs(1, length, grad=True))
    print(peak_of_process() - before)


def peak_of_process() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return float(line.split()[1]) / 1024


def memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for kind in ("bidirectional", "causal"):
        for length in (2048,) if args.quick else (2048, 8192):
            names = ("sdpa", *OURS)
            peaks = {name: peak_memory(name, kind, length) for name in names}
            rows.append({"kind": kind, "length": length, "mb": peaks})
            cells = ", ".join(f"{name} {mb:.0f}" for name, mb in peaks.items())
            print(f"peak MB {kind:13} forward+backward {length:6}: {cells}", flush=True)
    return rows


def decode(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time tokens after short and after long contexts, all in turn.

    The first token of `TOKENS` finds its state outside of the caches, as the layers of
    a large model do; it is also timed alone ("first").
    """
    from coulomb.attention import Decoder  # older trees, which may be raced, have none

    calls: dict[tuple[int, str], Callable[[], object]] = {}
    swept = torch.zeros(1 << 24)  # 64 MB: more than the caches hold
    contexts = (128, max(args.lengths))
    for length in contexts:
        q, k, v = inputs(1, length, grad=False)
        token = [x[:, :, -1].contiguous() for x in (q, k, v)]
        for name in OURS:
            state = prefill(k, v, particles(), name)
            held = Decoder(state, particles(), name)
            for count, label in ((TOKENS, ""), (1, " first")):
                calls[length, f"sweep {name}{label}"] = lambda: swept.add_(1)
                calls[length, f"{name}{label}"] = functools.partial(
                    decode_tokens, held, token, count
                )
        calls[length, "sdpa"] = functools.partial(
            functional.scaled_dot_product_attention, q[:, :, -1:], k, v
        )
    with torch.no_grad():
        best = race(calls, 4 * args.seconds)
    rows: list[dict[str, Any]] = []
    for length in contexts:
        times = {
            name: 1e3 * s / (TOKENS if name in OURS else 1)
            for (context, name), s in best.items()
            if context == length and "sweep" not in name
        }
        rows.append({"context": length, "ms": times})
        show(f"decode, per token and layer, context {length}", times)
    return rows


def decode_tokens(held: Any, token: list[Tensor], count: int) -> None:
    for _ in range(count):
        held.step(*token)


def crossover(rows: list[dict[str, Any]], name: str) -> float:
    """Interpolate, in logarithms, the length from which on ours beats SDPA."""
    length = float("inf")
    previous: tuple[int, float] | None = None
    for row in rows:
        n, ratio = row["length"], row["ms"]["sdpa"] / row["ms"][name]
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


def multiplications(row: dict[str, Any]) -> float:
    """Divide ours by those of SDPA."""
    n, dim, causal = row["length"], row["dim"], row["kind"] == "causal"
    work = tuning.Work(2 * n, n * n, dim, dim, row["features"])  # of one head
    kinds = ("causal",) if causal else ("linear", "quadratic")
    return min(map(work.products, kinds)) / (n * n * dim * (1 if causal else 2))


def least_speed(row: dict[str, Any]) -> float:
    """Allow 1.3 times the ratio of multiplications, where softmax needs fewer."""
    return min(1.0, 1 / (1.3 * multiplications(row)))


def verdicts(record: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def add(what: str, value: float, bound: float, *, at_least: bool) -> None:
        met = value >= bound if at_least else value <= bound
        found.append({"target": what, "value": value, "bound": bound, "met": met})

    for ours in OURS:
        times = record.get("times", [])
        for (kind, passes), factor in FACTORS.items():
            wanted = {"batch": 1, "kind": kind, "passes": passes}
            rows = [row for row in times if wanted.items() <= row.items()]
            label = f"{ours}, {kind} {PASSES[passes]}"
            for row in rows:
                if row["length"] == 8192:
                    gain = row["ms"]["sdpa"] / row["ms"][ours]
                    add(f"{label}: times SDPA at 8192", gain, factor, at_least=True)
            if rows:
                length, most = crossover(rows, ours), CROSSOVERS[kind, passes]
                add(f"{label}: crossover with SDPA", length, most, at_least=False)
        below = [
            row["ms"][ours] / row["ms"]["sdpa"] / multiplications(row)
            for row in (*times, *record.get("shapes", []))
            if row["ms"]["sdpa"] < row["ms"][ours]
        ]
        if below:
            text = f"{ours}: most time over SDPA's and multiplications, where slower"
            add(text, max(below), 1.3, at_least=False)
        every = [row for part in PARTS[:3] for row in record.get(part, [])]
        for peer in PEERS:
            ratios = [ratio(row["ms"], peer, ours) for row in every]
            ratios = [x for x in ratios if x is not None]
            if ratios:
                text = f"{ours}: least speed-up over {peer}, all cells"
                add(text, min(ratios), 0.97, at_least=True)
        for row in record.get("memory", []):
            text = f"{ours}, {row['kind']}: peak over SDPA's at {row['length']}"
            add(text, row["mb"][ours] / row["mb"]["sdpa"], 1.0, at_least=False)
        if "decode" in record:
            short, long = (row["ms"][ours] for row in record["decode"])
            add(f"{ours}: decode, ms per token", long, 0.1, at_least=False)
            text = f"{ours}: decode, long context over short"
            add(text, long / short, 1.25, at_least=False)
    return found


def table(headers: list[str], rows: list[list[str]]) -> list[str]:
    lines = [
        "| " + " | ".join(headers) + " |",
        "| --- |" + " --- |" * (len(headers) - 1),
    ]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def ratio(times: dict[str, float], peer: str, ours: str) -> float | None:
    own = times.get(peer, times.get(f"{peer} {ours}"))
    return None if own is None else own / times[ours]


def pair(times: dict[str, float], peer: str) -> str:
    found = [ratio(times, peer, ours) for ours in OURS]
    return " / ".join("not run" if x is None else f"{x:.2f}" for x in found)


RANGES = "All processors"
HEAD = """# Speed of attention

One section for each processor, written by
`python benchmarks/attention.py --compiled --label NAME --write PAGE`:
8 heads of 64, M = 256, float32 unless a table says otherwise. Variants of a row were
timed in turn in one process. Numbers are how many times as fast ours is: above 1 ours
wins. The first of each pair is favor, the second softmaxfeat. *torch* is our own path
without loops, *plain* linear attention as one would write it (favor's features, whole
arrays), *compiled* the same under `torch.compile`. *bound*: on short sequences softmax
needs fewer multiplications; one over 1.3 times the ratio of multiplications is the
least that the column before it should show.
"""


def write_sections(path: Path, records: list[dict[str, Any]]) -> None:
    """Write ratios as tables, one section for each processor; keep other sections."""
    known: dict[str, str] = {}
    if path.exists():
        _, *sections = re.split(r"^## ", path.read_text(), flags=re.MULTILINE)
        known = {text.split("\n", 1)[0]: text for text in sections}
    for record in records:
        lines = [record["label"], "", record["about"], "", *_machine_tables(record)]
        known[record["label"]] = "\n".join(lines)
    known.pop(RANGES, None)
    sections = [f"## {text.rstrip()}\n" for text in known.values()]
    path.write_text("\n".join([HEAD, *ranges(known), *sections]))


def ranges(sections: dict[str, str]) -> list[str]:
    """Say from where to where each target's value goes, over all processors."""
    found: dict[tuple[str, str], list[float]] = {}
    for text in sections.values():
        _, _, targets = text.partition("### Targets\n")
        for line in targets.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == 4 and cells[3] in ("met", "**missed**"):
                found.setdefault((cells[0], cells[2]), []).append(float(cells[1]))
    rows = [
        [target, f"{min(values):g} to {max(values):g}", bound, str(len(values))]
        for (target, bound), values in found.items()
    ]
    return [f"## {RANGES}\n", *table(["target", "from, to", "bound", "sections"], rows)]


def _machine_tables(record: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in record.get("times", []):
        title = f"Batch {row['batch']}, {row['kind']}, {PASSES[row['passes']]}"
        groups.setdefault(title, []).append(row)
    for title, rows in groups.items():
        known = [p for p in PEERS if ratio(rows[0]["ms"], p, OURS[0]) is not None]
        cells = [
            [
                str(r["length"]), pair(r["ms"], "sdpa"), f"{least_speed(r):.2f}",
                *(pair(r["ms"], p) for p in known),
            ]
            for r in rows
        ]  # fmt: skip
        headers = ["length", "sdpa", "bound", *known]
        lines += [f"### {title}", "", *table(headers, cells)]
    if "shapes" in record:
        cells = [
            [
                f"{r['dim']}", f"{r['features']}", f"{r['length']}",
                f"{r['kind']}, {PASSES[r['passes']]}",
                pair(r["ms"], "sdpa"), f"{least_speed(r):.2f}",
                pair(r["ms"], "torch"),
            ]
            for r in record["shapes"]
        ]  # fmt: skip
        headers = ["head size", "M", "length", "pass", "sdpa", "bound", "torch"]
        lines += ["### Head sizes and features", "", *table(headers, cells)]
    if "packed" in record:
        cells = [
            [
                f"{r['tokens']}", f"{r['median']:g}", f"{r['longest']}",
                f"{r['kind']}, {PASSES[r['passes']]}",
                pair(r["ms"], "sdpa"), pair(r["ms"], "torch"),
            ]
            for r in record["packed"]
        ]  # fmt: skip
        headers = ["tokens", "median", "longest", "pass", "sdpa, padded", "torch"]
        lines += [
            "### 48 sequences of mixed lengths, packed",
            "",
            *table(headers, cells),
        ]
    if "memory" in record:
        cells = [
            [
                r["kind"],
                f"{r['length']}",
                *(f"{r['mb'][n]:.0f}" for n in ("sdpa", *OURS)),
            ]
            for r in record["memory"]
        ]
        headers = ["", "length", "sdpa", *OURS]
        lines += ["### Peak memory, forward+backward, MB", "", *table(headers, cells)]
    if "decode" in record:
        names = list(record["decode"][0]["ms"])
        cells = [
            [str(r["context"]), *(f"{r['ms'][n]:.3f}" for n in names)]
            for r in record["decode"]
        ]
        lines += ["### Decoding, ms per token and layer", ""]
        lines += [
            f"Mean of {TOKENS} tokens in a row by a `Decoder`; the first of them, whose"
        ]
        lines += ["state was not in the caches, also by itself.", ""]
        lines += table(["context", *names], cells)
    cells = [
        [
            each["target"], f"{each['value']:.3g}", f"{each['bound']:g}",
            "met" if each["met"] else "**missed**",
        ]
        for each in verdicts(record)
    ]  # fmt: skip
    return [*lines, "### Targets", "", *table(["target", "value", "bound", ""], cells)]


def describe(label: str | None) -> dict[str, Any]:
    facts = tuning.machine()
    width = facts.get("vector_width", "no")
    about = (
        f"{facts['processor']}, {facts['threads']} threads, torch {facts['torch']} "
        f"with {facts['capability']}, loops with vectors of {width}."
    )
    return {"label": label or facts["processor"], "about": about}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="the record of this processor")
    parser.add_argument("--label", help="of this processor; its name by default")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter cells")
    parser.add_argument("--lengths", help="of the times, with commas between")
    parser.add_argument("--compiled", action="store_true", help="also torch.compile")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--write", type=Path, help="the page of tables to write to")
    parser.add_argument("--against", type=Path, help="the src of a tree to race")
    parser.add_argument("--rounds", type=int, default=5, help="of that race")
    parser.add_argument("records", type=Path, nargs="*", help="write these instead")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.records:
        records = [json.loads(path.read_text()) for path in args.records]
        write_sections(args.write, records)
        return
    if args.against:
        race_trees(args)
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.memory_of:
        measure_memory(args.memory_of)
        return
    # Else the compiled variant would fall back to eager after eight lengths.
    torch._dynamo.config.recompile_limit = 64
    lengths = (128, 512, 2048) if args.quick else LENGTHS
    if args.lengths:
        lengths = tuple(map(int, args.lengths.split(",")))
    args.lengths = lengths
    args.seconds = 0.3 if args.quick else 0.4
    record, start = describe(args.label), time.perf_counter()
    print(record["about"], f"Model {tuning.identity()}.")
    if args.json and args.json.exists():
        record = json.loads(args.json.read_text()) | record
    measures = (time_forms, time_shapes, time_packed, memory, decode, time_close)
    for part, measure in zip((*PARTS, "close"), measures, strict=True):
        if part in args.only.split(","):
            record[part] = measure(args)
            if args.json:
                args.json.write_text(json.dumps(record, indent=1))
    for t in verdicts(record):
        mark = "met   " if t["met"] else "MISSED"
        print(f"{mark} {t['target']}: {t['value']:.3g} (bound {t['bound']:g})")
    print(f"{(time.perf_counter() - start) / 60:.1f} minutes")
    if args.write:
        write_sections(args.write, [record])


if __name__ == "__main__":
    main()
