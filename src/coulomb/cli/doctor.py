"""`coulomb doctor`: what this machine is, what runs on it, and whether it is right."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from coulomb.cli.output import Cell, Json, check_outputs, print_table, write_numbers

if TYPE_CHECKING:
    from torch import Tensor

_LENGTHS = (32, 128, 512, 2048, 8192)
# Single precision, sums in another order: relative to the largest number.
_TOLERANCE = 1e-4

# Computes some numbers, in compiled loops where there are any.
_Check = Callable[[], "list[Tensor]"]


def doctor(
    test: Annotated[
        bool, Option(help="Compare every compiled loop with its plain twin.")
    ] = True,
    json: Json = None,
) -> None:
    """Describe this machine, the forms chosen on it, and test the compiled loops.

    Shows processor, vector width, threads, BLAS, versions, where compiled loops are
    kept, GPUs; how fast each form of attention was measured to be (measuring takes a
    second, once) and which one each length takes. Ends with code 1 if a loop and its
    twin disagree.

    **Examples**

    `coulomb doctor`

    `coulomb doctor --no-test --json doctor.json`
    """
    from coulomb.attention.ops import tuning
    from coulomb.kernels import available

    check_outputs(json)
    facts = _describe()
    print_table("This machine", ("", ""), list(facts.items()), words=2)
    model = tuning.load() if available() else None
    costs = {} if model is None else model.costs
    rows: list[Sequence[Cell]]
    if costs:
        rows = [
            (name, f"{1e6 * overhead:.0f}", f"{1e-9 / rate:.1f}")
            for name, (overhead, rate) in costs.items()
        ]
        headers = ("form", "overhead, us", "products per ns")
        print_table("Cost of each form of attention", headers, rows)
    forms = _choices()
    title = "Form of attention: 8 heads of 64, 256 features, float32"
    rows = [(name, *chosen.values()) for name, chosen in forms.items()]
    lengths = ("length", *map(str, _LENGTHS))
    print_table(title, lengths, rows, words=len(lengths))
    identity = "fixed" if model is None else model.identity
    content = {"machine": facts, "model": identity, "costs": costs, "forms": forms}
    errors = _test_loops() if test and available() else {}
    wrong = [name for name, error in errors.items() if error > _TOLERANCE]
    if test:
        rows = [
            (name, f"{error:.1e}", ("wrong", "bold") if name in wrong else "ok")
            for name, error in errors.items()
        ]
        headers = ("loop", "largest difference", "")
        print_table("Compiled loops against their twins", headers, rows)
        content["differences"] = errors
    write_numbers(json, content)
    if wrong:
        typer.echo("A compiled loop is wrong here; COULOMB_NUMBA=0 turns them off.")
        raise typer.Exit(1)


def _describe() -> dict[str, str]:
    """Tell what is there."""
    import torch
    from torch import distributed

    from coulomb._version import __version__
    from coulomb.attention.ops import tuning
    from coulomb.experiments.records import environment
    from coulomb.kernels import available

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    parts = {"MKL": torch.backends.mkl, "oneDNN": torch.backends.mkldnn}
    blas = [name for name, part in parts.items() if part.is_available()]
    talk = [
        name
        for name in ("gloo", "nccl")
        if distributed.is_available() and getattr(distributed, f"is_{name}_available")()
    ]
    facts = {
        "processor": tuning.processor_name(),
        "vectors of torch": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "BLAS": ", ".join(blas) or "torch's own",
        "GPU": ", ".join(gpus) or "none",
        "processes talk by": ", ".join(talk) or "nothing",
        "coulomb": __version__,
        **{name: str(value) for name, value in environment().items()},
    }
    if not available():
        return {**facts, "compiled loops": "off: plain torch computes everything"}
    from coulomb.kernels import linear_attention
    from coulomb.kernels.gemm import vector_width

    kept = getattr(linear_attention.attend._cache, "cache_path", None)
    return {
        **facts,
        "vectors of the loops": f"{vector_width()} numbers",
        "compiled loops": f"kept in {kept}" if kept else "compiled in every process",
        "model of attention": tuning.identity(),
        "kept in": str(tuning.model_file()),
    }


def _choices() -> dict[str, dict[str, str]]:
    """Tell which form each length takes."""
    import torch

    from coulomb.attention.ops.api import choose_form
    from coulomb.attention.ops.checks import check_inputs
    from coulomb.attention.ops.tuning import PASSES
    from coulomb.features import DEFAULT_MAP, Particles

    found: dict[str, dict[str, str]] = {}
    particles = Particles(torch.zeros(256, 64))
    for causal, backward, n in product((False, True), (False, True), _LENGTHS):
        x = torch.zeros(64).expand(1, 8, n, 64)
        operands = (x, x, x), particles, DEFAULT_MAP, None, None, None
        inputs = check_inputs(*operands, causal=causal)
        name = f"{'causal' if causal else 'bidirectional'}, {PASSES[backward]}"
        form = choose_form(inputs, "auto", None, backward)
        found.setdefault(name, {})[str(n)] = " ".join(form)
    return found


def _test_loops() -> dict[str, float]:
    """Compute everything with and without the loops; give the largest differences."""
    from unittest.mock import patch

    from coulomb._support.progress import progress_bar

    checks = {**_particle_checks(), **_attention_checks(), **_encoder_checks()}
    errors = {}
    with (
        progress_bar("testing compiled loops", len(checks)) as advance,
        patch.dict(os.environ, COULOMB_TUNE="0"),
    ):
        for name, check in checks.items():
            os.environ["COULOMB_NUMBA"] = "1"
            ours = check()
            os.environ["COULOMB_NUMBA"] = "0"
            differences = [
                float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
                for a, b in zip(ours, check(), strict=True)
            ]
            # A nan is no small difference.
            errors[name] = max(x if x == x else float("inf") for x in differences)
            advance(note=name)
    return errors


def _with_gradients(
    function: "Callable[..., Tensor]", *inputs: "Tensor"
) -> "list[Tensor]":
    """Evaluate a function, and its gradient by every input."""
    import torch

    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def _particle_checks() -> dict[str, _Check]:
    """List forces on particles, and steps under them."""
    import numpy as np
    import torch

    from coulomb.dynamics import langevin, loop
    from coulomb.energy import Hamiltonian
    from coulomb.features import Particles
    from coulomb.interactions import ExactSum, Riesz
    from coulomb.kernels import available
    from coulomb.objectives import FourierAlignment, Sample

    source = torch.Generator().manual_seed(0)
    x, y, positions = (
        torch.randn(shape, generator=source) for shape in ((200, 5), (200, 3), (65, 5))
    )
    sample, particles, repulsion = Sample(x, y), Particles(positions), Riesz(s=1.0)

    def waves() -> "list[Tensor]":
        angles = (9 * positions.flatten()).numpy()
        sine, cosine = np.sin(angles), np.cos(angles)
        if available():
            from coulomb.kernels.math import sincos_row

            sincos_row(angles, sine, cosine)
        return [torch.from_numpy(sine), torch.from_numpy(cosine)]

    def steps() -> "list[Tensor]":
        energy = Hamiltonian(FourierAlignment(sample), repulsion)
        sampler = langevin.ProjectedLangevin(1e-3, inverse_temperature=100.0)
        generator = torch.Generator().manual_seed(1)
        begun = loop.init_run(sampler, particles, generator=generator)
        settings = loop.RunSettings(max_steps=20, progress=False)
        return [loop.run(begun, sampler, energy, settings).particles.positions]

    return {
        "particles: alignment": lambda: [*FourierAlignment(sample).field(particles)],
        "particles: repulsion": lambda: [*ExactSum()(repulsion, positions)],
        "particles: Langevin steps": steps,
        "particles: sine and cosine": waves,
    }


def _attention_checks() -> dict[str, _Check]:
    """List every form of attention with its gradients, and decoding."""
    import torch

    from coulomb import attention
    from coulomb.features import Particles, feature_maps
    from coulomb.linearise import LinearisedHeads

    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> "Tensor":
        return torch.randn(*shape, generator=source) / 2

    positions, offsets = draw(4, 96, 32), (draw(4, 96), draw(4, 96))
    long, short = draw(3, 2, 4, 150, 32), draw(3, 12, 4, 40, 32)
    rows, bounds = draw(3, 300, 4, 32), torch.tensor([0, 7, 90, 300])
    particles = Particles(positions)

    def padded(name: str, x: "Tensor", causal: bool) -> "list[Tensor]":
        def attend(q: "Tensor", k: "Tensor", v: "Tensor", w: "Tensor") -> "Tensor":
            given = q, k, v, Particles(w), name
            return attention.kernel_attention(*given, offsets=offsets, causal=causal)

        return _with_gradients(attend, *x, positions)

    def packed(name: str) -> "list[Tensor]":
        def attend(q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
            return attention.packed_attention(q, k, v, particles, name, bounds)

        return _with_gradients(attend, *rows)

    def decode(name: str) -> "list[Tensor]":
        state = attention.init_state(particles, name, batch=4, heads=4, dim_v=32)
        for t in range(3):
            q, k, v = short[:, :4, :, t]
            out, state = attention.decode_step(state, q, k, v, particles, name)
        return [out, *state]

    def near() -> "list[Tensor]":
        heads = LinearisedHeads(4, 32, n_features=96, window=8)
        heads.draw(generator=torch.Generator().manual_seed(0))
        out = heads(*long)
        heads.exact_length = long.shape[3]
        return [out, heads(*long)]

    checks: dict[str, _Check] = {"attention: near keys": near}
    for name in feature_maps:
        if feature_maps.build(name).exponential:
            checks |= {
                f"attention: linear, {name}": partial(padded, name, long, False),
                f"attention: causal, {name}": partial(padded, name, long, True),
                f"attention: quadratic, {name}": partial(padded, name, short, False),
                f"attention: packed, {name}": partial(packed, name),
                f"attention: decoding, {name}": partial(decode, name),
            }
    return checks


def _encoder_checks() -> dict[str, _Check]:
    """List the encoder on packed tokens around every layer, with gradients."""
    import torch

    from coulomb import attention
    from coulomb.attention.encoder import layout, packed
    from coulomb.features import feature_maps

    settings = attention.EncoderSettings(40, 3, width=32, ffn_width=48, max_length=16)
    lengths = torch.tensor([0, 3, 1, 12, 7, 9])
    batch = layout.TokenBatch(torch.arange(32) % 40, lengths.cumsum(0))

    def encode(factory: Any) -> "list[Tensor]":
        model = attention.KernelEncoder(settings, factory, generator=0).eval()
        logits = packed.packed_logits(model, batch, dropout_seed=3)
        wanted = [x for x in model.parameters() if x.requires_grad]
        grads = torch.autograd.grad(logits.square().sum(), wanted, allow_unused=True)
        return [logits.detach(), *(x for x in grads if x is not None)]

    layers: dict[str, Any] = {
        name: partial(attention.KernelAttention, feature_map=name, n_features=32)
        for name in feature_maps
        if feature_maps.build(name).loop_code is not None
    }
    first = next(iter(layers))  # one map for what all of them share
    layers[f"{first}, shared projections"] = partial(layers[first], qkv="shared")
    layers["softmax"] = attention.SoftmaxAttention
    layers["linformer"] = partial(attention.Linformer, max_length=16, rank=6)
    return {f"encoder: {name}": partial(encode, x) for name, x in layers.items()}
