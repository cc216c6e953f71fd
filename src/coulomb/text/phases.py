"""Phase A of a text classifier: its batches, the settings, the controls."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coulomb._support.streams import make_generator
from coulomb.attention import AlignmentResult, AlignmentSettings, align
from coulomb.attention.controls import noise_twin
from coulomb.attention.phase_a import set_up as set_up_alignment
from coulomb.domains import Ball, Space
from coulomb.dynamics.loop import Run, load_run
from coulomb.dynamics.stopping import StopReason
from coulomb.features import Particles
from coulomb.interactions import Riesz
from coulomb.text._setup import ALIGN, BATCHES, Setup
from coulomb.text.batches import TokenBatch
from coulomb.text.packed import PackedHeads
from coulomb.text.settings import TextSettings
from coulomb.text.tokens import TokenRows
from coulomb.text.variants import find_variant

Batch = tuple[TokenBatch, Tensor]
Report = Callable[[dict[str, Any]], None]
_WINDOW = 20  # batches whose texts are sorted by length together


def alignment_settings(settings: TextSettings, kind: str) -> AlignmentSettings:
    """Translate the flat settings into those of `coulomb.attention.align`.

    Parameters
    ----------
    settings
        Of the classifier.
    kind
        "sequence" or "token"; tags are aligned by token.

    Returns
    -------
    AlignmentSettings
        Without a length: it is in steps and depends on the data.
    """
    level = settings.align_level
    if kind == "token" and level == "sequence":
        level = "token"
    bounded = math.isfinite(settings.align_radius)
    return AlignmentSettings(
        objective=settings.align_objective,
        level=level,
        pool=settings.pooling,
        step_size=settings.align_step_size,
        inverse_temperature=settings.align_inverse_temperature,
        drift=settings.align_drift,
        clip=settings.align_clip,
        interaction=Riesz(s=settings.align_riesz),
        strength=settings.align_strength,
        domain=Ball(settings.align_radius) if bounded else Space(),
        tol=settings.align_tol,
        patience=settings.align_patience or None,
        also=tuple(part for part in settings.align_also.split(",") if part),
    )


def alignment_batches(rows: TokenRows, batch_size: int, seed: int) -> list[Batch]:
    """Cut a split into batches of texts of like length.

    Parameters
    ----------
    rows
        The training split.
    batch_size
        Texts of a batch.
    seed
        Of what comes together.

    Returns
    -------
    list of tuple
        Packed tokens and what `PackedHeads` is compared with: a label per text, or a
        row of tags.
    """
    generator = make_generator(seed, BATCHES)
    order = torch.randperm(len(rows), generator=generator)
    batches = []
    for window in torch.split(order, _WINDOW * batch_size):
        window = window[rows.lengths[window].argsort(stable=True)]
        for some in torch.split(window, batch_size):
            batch = rows.batch(some)
            labels = batch.labels
            assert labels is not None
            batches.append((batch, labels if rows.first is None else labels[None]))
    return batches


def packed_view(settings: TextSettings, kind: str) -> PackedHeads:
    """Choose what Phase A looks at: pooled texts, or tokens that have tags.

    Parameters
    ----------
    settings
        For the pooling.
    kind
        "sequence" or "token".

    Returns
    -------
    PackedHeads
        The `evaluate` that goes with `alignment_batches`.
    """
    return PackedHeads("none" if kind == "token" else settings.pooling)


def run_phase_a(
    setup: Setup,
    file: Path | None,
    report: Report,
    *,
    save_every: int = 500,
) -> dict[str, Any]:
    """Do with the particles what the row asks for before Phase B.

    Parameters
    ----------
    setup
        The model, whose particles are moved, and its data.
    file
        Where the run of the particles is kept, and continued from if it is there;
        None keeps it nowhere.
    report
        Called with every record.
    save_every
        Steps between two writings of the file.

    Returns
    -------
    dict
        What happened, as plain data.
    """
    kind = find_variant(setup.settings.attention).phase_a
    if kind == "none":
        return {}
    began = time.perf_counter()
    control = kind == "control"
    if kind == "noise" or (control and math.isfinite(setup.settings.align_radius)):
        facts = _without_labels(setup, control=control)
    else:
        start = _positions(setup)
        result = _aligned(setup, file, report, save_every)
        facts = _facts(result)
        if control:
            _match_norms(setup, start, result.positions)
            facts = {"summary": "Starting directions, norms of aligned particles."}
    return facts | {"kind": kind, "seconds": time.perf_counter() - began}


def _length(settings: TextSettings, n_batches: int) -> int:
    return round(settings.align_epochs * n_batches)


def _problem(setup: Setup) -> tuple[list[Batch], AlignmentSettings, dict[str, Any]]:
    settings = setup.settings
    batches = alignment_batches(setup.rows["train"], settings.batch_size, settings.seed)
    chosen = alignment_settings(settings, setup.corpus.kind)
    # A fifth is kept back to watch the alignment of texts that move nothing.
    held_out = max(1, round(0.2 * len(batches))) if len(batches) > 1 else 0
    steps = _length(settings, len(batches) - held_out)
    options = {
        "evaluate": packed_view(settings, setup.corpus.kind),
        "seed": make_generator(settings.seed, ALIGN).initial_seed(),
    }
    return batches, chosen.changed({"max_steps": steps}), options


def _aligned(
    setup: Setup, file: Path | None, report: Report, save_every: int
) -> AlignmentResult:
    batches, chosen, options = _problem(setup)
    while True:
        resume, last = None, 0
        if file is not None and file.is_file():
            before = load_run(file)
            resume, last = file, before.state.step
            if before.reason not in (None, StopReason.CALLBACK):
                chosen = chosen.changed({"max_steps": last})

        def told(run: Run, last: int = last) -> bool:
            record = run.history[-1]
            kept = ("step", "alignment", "held_out")
            report({name: record[name] for name in kept if name in record})
            return file is not None and run.state.step - last >= save_every

        result = align(
            setup.model,
            batches,
            settings=chosen,
            resume=resume,
            callbacks=(told,),
            progress=False,
            **options,
        )
        if file is not None:
            result.save(file)
        if result.run.reason is not StopReason.CALLBACK:
            return result


def _without_labels(setup: Setup, *, control: bool) -> dict[str, Any]:
    batches, chosen, options = _problem(setup)
    problem = set_up_alignment(setup.model, batches, chosen, **options)
    layers = problem.network.layers
    inside = chosen.domain.project(layers.read(setup.model))
    if control:
        layers.write(setup.model, inside)
        return {"summary": "Particles projected on the domain and left there."}
    twin = noise_twin(problem, Particles(inside), problem.last_step, seed=problem.seed)
    layers.write(setup.model, twin.positions)
    return {"summary": "Phase A without the alignment's gradient."}


def _positions(setup: Setup) -> Tensor:
    batches, chosen, options = _problem(setup)
    problem = set_up_alignment(setup.model, batches, chosen, **options)
    return problem.network.layers.read(setup.model)


def _match_norms(setup: Setup, start: Tensor, aligned: Tensor) -> None:
    from coulomb.attention._evaluation import ParticleLayers

    directions = start / start.norm(dim=-1, keepdim=True)
    norms = aligned.norm(dim=-1, keepdim=True)
    ParticleLayers.find(setup.model).write(setup.model, norms * directions)


def _facts(result: AlignmentResult) -> dict[str, Any]:
    first, last = result.history[0], result.history[-1]
    return {
        "summary": result.summary(),
        "steps": result.run.state.step,
        "before": {k: first[k] for k in ("alignment", "held_out") if k in first},
        "after": {k: last[k] for k in ("alignment", "held_out") if k in last},
        "drowned": result.drowned,
    }
