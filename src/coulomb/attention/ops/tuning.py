"""Which form of attention is fastest on this machine: measured once, then looked up.

A *form* is an order of the products (`linear`, `quadratic`, `causal`) in an engine
(compiled `loops`, or blocks of `torch`). Its cost is `overhead + rate * products`, with
two numbers measured at two sizes, forwards and with the pass back, and kept in a file
for each `machine()`: the choice is a function of shapes and that file alone.
`COULOMB_TUNE=0`, and a folder that cannot be written, leave a fixed rule: the fewest
multiplications, in loops where there are any.
"""

import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache, partial
from itertools import product
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from coulomb._support.archive import check_file, read_json, write_json
from coulomb.kernels import available
from coulomb.kernels.runtime import source_hash

ENGINES = ("loops", "torch")
KINDS = ("linear", "quadratic", "causal")
PASSES = ("forward", "forward+backward")
_FORMS = tuple(product(KINDS, ENGINES, PASSES))
# Rows of a triangle or square that the loops form at once.
BLOCK = 96
_SLOWEST = 1e3  # seconds
# Two sizes of a problem, as batch and length, that tell overhead from rate.
_SIZES = {"linear": ((1, 64), (1, 768)), "causal": ((1, 64), (1, 768))}
_SIZES["quadratic"] = ((1, 32), (8, 64))
_HEADS, _DIM, _FEATURES = 8, 64, 128
_ROUNDS, _MOST_SECONDS = 12, 1.6

_Key = TypeVar("_Key", bound=Hashable)

_lock = RLock()
_known: dict[int, "Model | None"] = {}  # by the number of threads


class Work(NamedTuple):
    """The size of a problem: tokens are queries and keys, in all heads."""

    tokens: int
    pairs: int  # of a query and a key that meet, in all heads
    dim: int
    dim_v: int
    features: int

    def products(self, kind: str) -> int:
        """Count the multiplications of an order of the products.

        Examples
        --------
        >>> work = Work(tokens=8, pairs=16, dim=2, dim_v=2, features=8)
        >>> work.products("linear"), work.products("quadratic")
        (256, 288)
        """
        both, wide = self.tokens * self.features, self.features + self.dim_v
        if kind == "quadratic":
            return both * self.dim + self.pairs * wide
        inside = 0 if kind == "linear" else self.tokens * BLOCK // 4 * wide
        return both * (self.dim + self.dim_v) + inside

    def cheaper(self) -> str:
        """Name the order without causality that has fewer multiplications."""
        return min("linear", "quadratic", key=self.products)


class Model(NamedTuple):
    """Overhead in seconds and seconds per multiplication of every form."""

    costs: dict[str, tuple[float, float]]
    identity: str

    def seconds(self, kind: str, engine: str, passes: str, work: Work) -> float:
        """Predict the time of a form."""
        overhead, rate = self.costs[form_name(kind, engine, passes)]
        return overhead + rate * work.products(kind)


def form_name(kind: str, engine: str, passes: str) -> str:
    """Name a form with its passes, as in the file of a model."""
    return f"{kind} {engine} {passes}"


def machine() -> dict[str, Any]:
    """Say what a model depends on."""
    facts: dict[str, Any] = {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "loops": source_hash(),
    }
    if available():
        import numba

        from coulomb.kernels.gemm import vector_width

        facts |= {"numba": numba.__version__, "vector_width": vector_width()}
    return facts


@cache
def processor_name() -> str:
    """Give the name of the processor.

    Examples
    --------
    >>> len(processor_name()) > 0
    True
    """
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "unknown"


def model_file() -> Path:
    """Give the file in which the model of this machine is kept."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    key = json.dumps(machine(), sort_keys=True)
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return Path(folder) / "coulomb" / f"attention-{name}.json"


def load(*, measure: bool = True) -> Model | None:
    """Give the model of this machine; None where the fixed rule holds.

    Parameters
    ----------
    measure
        Whether to measure and to keep a model if there is none.
    """
    if os.environ.get("COULOMB_TUNE") == "0":
        return None
    threads = torch.get_num_threads()
    if threads not in _known:
        with _lock:
            model = _read(model_file()) if available() else None
            if model is None and not measure:
                return None
            if model is None and available():
                model = _measured(model_file())
            _known[threads] = model
    return _known[threads]


def _measured(file: Path) -> Model | None:
    try:
        # A place that cannot be written is found before time is spent.
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
        costs = _measure_all()
        # What another process has written in the meantime is taken.
        if _read(file) is None:
            write_json(file, {"machine": machine(), "costs": costs})
    except OSError:
        return None
    return _read(file)


def identity() -> str:
    """Name what the choice of forms depends on: a hash, or that the rule is fixed."""
    model = load()
    return "fixed" if model is None else model.identity


def _read(file: Path) -> Model | None:
    # A file that is broken, or was written by something else, is none.
    try:
        # One that is longer is none of ours.
        found, costs = read_json(check_file(file, 2**16))["costs"], {}
        for form in _FORMS:
            overhead, rate = (float(x) for x in found[form_name(*form)])
            if not (0 <= overhead < _SLOWEST and 0 < rate < _SLOWEST):
                return None
            costs[form_name(*form)] = overhead, rate
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return Model(costs, hashlib.sha256(json.dumps(costs).encode()).hexdigest()[:12])


def _measure_all() -> dict[str, tuple[float, float]]:
    from coulomb.attention.ops.api import run_form

    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for kind, engine, passes in _FORMS:
        name = form_name(kind, engine, passes)
        for batch, n in _SIZES[kind]:
            rows = batch * _HEADS * n
            work = Work(2 * rows, rows * n, _DIM, _DIM, _FEATURES)
            run = partial(run_form, kind, engine)
            call = _problem(run, batch, n, backward=passes == PASSES[1])
            calls[name, work.products(kind)] = call
    times = _race(calls)
    costs = {}
    for name in dict.fromkeys(name for name, _ in calls):
        (small, fast), (large, slow) = sorted(
            (products, time) for (form, products), time in times.items() if form == name
        )
        rate = max((slow - fast) / (large - small), 1e-15)
        costs[name] = max(fast - rate * small, 0.0), rate
    return costs


def _problem(
    run: Callable[..., Tensor], batch: int, n: int, *, backward: bool
) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / 4

    with torch.inference_mode(False), torch.enable_grad():
        positions = draw(_HEADS, _FEATURES, _DIM)
        q, k, v = (
            draw(batch, n, _HEADS, _DIM).transpose(1, 2).requires_grad_(backward)
            for _ in range(3)
        )
        ones = torch.ones_like(q)

    def call() -> object:
        with torch.inference_mode(False), torch.set_grad_enabled(backward):
            out = run(q, k, v, positions)
            return torch.autograd.grad(out, (q, k, v), ones) if backward else out

    return call


def _race(calls: dict[_Key, Callable[[], object]]) -> dict[_Key, float]:
    # All in turn, and the least time of this thread counts, not that of the clock: what
    # else the machine does meanwhile must not decide for good.
    for call in calls.values():
        call()  # compiles, or brings into the caches
    best, start = dict.fromkeys(calls, math.inf), time.perf_counter()
    for _ in range(_ROUNDS):
        for key, call in calls.items():
            begin = time.thread_time()
            call()
            best[key] = min(best[key], time.thread_time() - begin)
        if time.perf_counter() - start > _MOST_SECONDS:
            break
    return best


def choose(
    candidates: list[tuple[str, str]], work: Work, *, backward: bool
) -> tuple[str, str]:
    """Choose among exact forms, each an order of the products and an engine.

    Without a model: the fewest multiplications, then loops before torch.

    Examples
    --------
    >>> work = Work(tokens=64, pairs=256, dim=8, dim_v=8, features=32)
    >>> forms = [("linear", "torch"), ("quadratic", "torch")]
    >>> choose(forms, work, backward=False)
    ('quadratic', 'torch')
    """
    if len(candidates) == 1:
        return candidates[0]
    model = load() if any(engine == "loops" for _, engine in candidates) else None
    if model is None:
        return min(candidates, key=lambda x: (work.products(x[0]), x[1] != ENGINES[0]))
    passes = PASSES[backward]
    return min(candidates, key=lambda x: model.seconds(x[0], x[1], passes, work))
