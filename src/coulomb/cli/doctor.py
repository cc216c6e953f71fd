"""`coulomb doctor`: what this machine is, what runs on it, and whether it is right."""

import os
from collections.abc import Callable, Sequence
from functools import partial
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
    errors = _test_loops() if test and available() else {}
    right = {name: error <= _TOLERANCE for name, error in errors.items()}
    if test:
        rows = [
            (name, f"{error:.1e}", "ok" if right[name] else ("wrong", "bold"))
            for name, error in errors.items()
        ]
        headers = ("loop", "largest difference", "")
        print_table("Compiled loops against their twins", headers, rows)
    identity = "fixed" if model is None else model.identity
    content = {"machine": facts, "model": identity, "costs": costs, "forms": forms}
    write_numbers(json, content | ({"differences": errors} if test else {}))
    if not all(right.values()):
        typer.echo("A compiled loop is wrong here; COULOMB_NUMBA=0 turns them off.")
        raise typer.Exit(1)


def _backends() -> list[str]:
    """List the backends of torch's processes."""
    from torch import distributed

    if not distributed.is_available():
        return []
    found = {
        "gloo": distributed.is_gloo_available(),
        "nccl": distributed.is_nccl_available(),
    }
    return [name for name, there in found.items() if there]


def _describe() -> dict[str, str]:
    """Tell what is there."""
    import torch

    from coulomb._version import __version__
    from coulomb.attention.ops import tuning
    from coulomb.experiments.records import environment
    from coulomb.kernels import available

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    parts = {"MKL": torch.backends.mkl, "oneDNN": torch.backends.mkldnn}
    blas = [name for name, part in parts.items() if part.is_available()]
    facts = {
        "processor": tuning.processor_name(),
        "vectors of torch": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "BLAS": ", ".join(blas) or "torch's own",
        "GPU": ", ".join(gpus) or "none",
        "processes talk by": ", ".join(_backends()) or "nothing",
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
    for causal in (False, True):
        for backward in (False, True):
            forms = {}
            for n in _LENGTHS:
                x = torch.zeros(64).expand(1, 8, n, 64)
                operands = (x, x, x), particles, DEFAULT_MAP, None, None, None
                inputs = check_inputs(*operands, causal=causal)
                form = choose_form(inputs, "auto", None, backward)
                forms[str(n)] = " ".join(form)
            name = "causal" if causal else "bidirectional"
            found[f"{name}, {PASSES[backward]}"] = forms
    return found


def _test_loops() -> dict[str, float]:
    """Compute everything with and without the loops; give the largest differences."""
    from coulomb._support.progress import progress_bar

    checks = {**_particle_checks(), **_attention_checks(), **_encoder_checks()}
    errors, names = {}, ("COULOMB_TUNE", "COULOMB_NUMBA")
    before = {name: os.environ[name] for name in names if name in os.environ}
    with progress_bar("testing compiled loops", len(checks)) as advance:
        try:
            for name, check in checks.items():
                os.environ.update(COULOMB_TUNE="0", COULOMB_NUMBA="1")
                ours = check()
                os.environ["COULOMB_NUMBA"] = "0"
                differences = [
                    float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
                    for a, b in zip(ours, check(), strict=True)
                ]
                # A nan is no small difference.
                errors[name] = max(x if x == x else float("inf") for x in differences)
                advance(note=name)
        finally:
            for name in names:
                os.environ.pop(name, None)
            os.environ.update(before)
    return errors


def _particle_checks() -> dict[str, _Check]:
    """List forces on particles, and steps under them."""
    import torch

    from coulomb.dynamics.langevin import ProjectedLangevin
    from coulomb.dynamics.loop import RunSettings, init_run, run
    from coulomb.energy import Hamiltonian
    from coulomb.features import Particles
    from coulomb.interactions import ExactSum, Riesz
    from coulomb.objectives import FourierAlignment, Sample

    source = torch.Generator().manual_seed(0)
    x, y, positions = (
        torch.randn(shape, generator=source) for shape in ((200, 5), (200, 3), (65, 5))
    )

    def alignment() -> "list[Tensor]":
        return list(FourierAlignment(Sample(x, y)).field(Particles(positions)))

    def repulsion() -> "list[Tensor]":
        return list(ExactSum()(Riesz(s=1.0), positions))

    def langevin() -> "list[Tensor]":
        energy = Hamiltonian(FourierAlignment(Sample(x, y)), Riesz(s=1.0))
        sampler = ProjectedLangevin(1e-3, inverse_temperature=100.0)
        generator = torch.Generator().manual_seed(1)
        begun = init_run(sampler, Particles(positions), generator=generator)
        done = run(begun, sampler, energy, RunSettings(max_steps=20, progress=False))
        return [done.particles.positions]

    return {
        "particles: alignment": alignment,
        "particles: repulsion": repulsion,
        "particles: Langevin steps": langevin,
    }


def _attention_checks() -> dict[str, _Check]:
    """List every form of attention with its gradients, and decoding."""
    import torch

    from coulomb.attention import (
        decode_step,
        init_state,
        kernel_attention,
        packed_attention,
    )
    from coulomb.features import Particles, feature_maps

    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> "Tensor":
        return torch.randn(*shape, generator=source) / 2

    positions, offsets = draw(4, 96, 32), (draw(4, 96), draw(4, 96))
    long, short = draw(3, 2, 4, 150, 32), draw(3, 12, 4, 40, 32)
    rows, bounds = draw(3, 300, 4, 32), torch.tensor([0, 7, 90, 300])

    def padded(name: str, x: "Tensor", causal: bool) -> "list[Tensor]":
        q, k, v, w = (
            leaf.clone().requires_grad_() for leaf in (*x.unbind(), positions)
        )
        out = kernel_attention(
            q, k, v, Particles(w), name, offsets=offsets, causal=causal
        )
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v, w))]

    def packed(name: str) -> "list[Tensor]":
        q, k, v = (leaf.clone().requires_grad_() for leaf in rows.unbind())
        out = packed_attention(q, k, v, Particles(positions), name, bounds)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]

    def decode(name: str) -> "list[Tensor]":
        state = init_state(Particles(positions), name, batch=4, heads=4, dim_v=32)
        for t in range(3):
            q, k, v = short[:, :4, :, t]
            out, state = decode_step(state, q, k, v, Particles(positions), name)
        return [out, *state]

    checks: dict[str, _Check] = {}
    for name in feature_maps:
        if not feature_maps.build(name).exponential:
            continue
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

    from coulomb.attention import (
        EncoderSettings,
        KernelAttention,
        KernelEncoder,
        Linformer,
        SoftmaxAttention,
    )
    from coulomb.attention.encoder.layout import TokenBatch
    from coulomb.attention.encoder.packed import packed_logits
    from coulomb.features import feature_maps

    settings = EncoderSettings(40, 3, width=32, ffn_width=48, max_length=16)
    lengths = torch.tensor([0, 3, 1, 12, 7, 9])
    ids = torch.arange(int(lengths.sum())) % 40
    batch = TokenBatch(ids, lengths.cumsum(0))

    def encode(factory: Any) -> "list[Tensor]":
        model = KernelEncoder(settings, factory, generator=0).eval()
        logits = packed_logits(model, batch, dropout_seed=3)
        wanted = [x for x in model.parameters() if x.requires_grad]
        grads = torch.autograd.grad(logits.square().sum(), wanted, allow_unused=True)
        return [logits.detach(), *(x for x in grads if x is not None)]

    layers: dict[str, Any] = {
        name: partial(KernelAttention, feature_map=name, n_features=32)
        for name in feature_maps
        if feature_maps.build(name).loop_code is not None
    }
    layers["softmax"] = SoftmaxAttention
    layers["linformer"] = partial(Linformer, max_length=16, rank=6)
    return {f"encoder: {name}": partial(encode, x) for name, x in layers.items()}
