"""Phase A of a text classifier: its batches, the settings, the controls."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coulomb._support.errors import ParameterError
from coulomb._support.streams import make_generator
from coulomb.attention import AlignmentResult, AlignmentSettings, align
from coulomb.attention.align.controls import run_twin
from coulomb.attention.align.problem import (
    Evaluate,
    ParticleLayers,
    Problem,
    build_problem,
)
from coulomb.attention.align.scores import Neighbours
from coulomb.attention.encoder.layout import IGNORED, TokenBatch
from coulomb.attention.encoder.packed import feature_function
from coulomb.domains import Ball, Space
from coulomb.dynamics.loop import Run, load_run
from coulomb.dynamics.stopping import StopReason
from coulomb.features import Particles
from coulomb.interactions import Riesz
from coulomb.text._matches import (
    MatchStart,
    choose_matches,
    match_start,
    may_choose,
    sees_parts,
)
from coulomb.text._shifts import Start, choose_start, window_start
from coulomb.text.settings import TextSettings
from coulomb.text.setup import ALIGN, BATCHES, Setup
from coulomb.text.tokens import TokenRows
from coulomb.text.variants import find_variant, looks_aside

Batch = tuple[TokenBatch, Tensor]
AnyStart = Start | MatchStart
Report = Callable[[dict[str, Any]], None]
NEIGHBOURS = "neighbours"
_WINDOW = 20  # batches whose texts are sorted by length together


def objective_of(settings: TextSettings, kind: str) -> str:
    """Give the objective of Phase A: "auto" depends on what has labels."""
    found = settings.align_objective
    if found == "auto":
        return NEIGHBOURS if kind == "token" else "centred"
    if found == NEIGHBOURS and kind != "token":
        raise ParameterError(
            "`align_objective` must not be 'neighbours' for texts with one label each; "
            "use 'auto' or 'centred'."
        )
    return found


def alignment_settings(settings: TextSettings, kind: str) -> AlignmentSettings:
    """Translate the flat settings into those of `coulomb.attention.align.run`."""
    objective, level = objective_of(settings, kind), settings.align_level
    if objective in ("likelihood", NEIGHBOURS) or (
        kind == "token" and level == "sequence"
    ):
        level = kind
    by_weights = objective == NEIGHBOURS
    score = Neighbours(settings.n_layers * settings.n_heads) if by_weights else None
    bounded = math.isfinite(settings.align_radius)
    return AlignmentSettings(
        objective=score or objective,
        level=level,
        output="" if by_weights else None,
        pool=settings.pooling,
        sampler=settings.align_sampler,
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
    """Cut a split into batches of texts of like length."""
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


def neighbour_batches(batches: Sequence[Batch], classes: Sequence[str]) -> list[Batch]:
    """Give the batches of tags the labels that `Neighbours` looks at."""
    kinds = [name.removeprefix("B-").removeprefix("I-") for name in classes]
    numbers = torch.tensor([kinds.index(kind) for kind in kinds])
    found = []
    for batch, tags in batches:
        lengths = batch.cu_seqlens.diff()
        real = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
        labels = torch.full(real.shape, IGNORED)
        flat = tags.flatten()
        labels[real] = torch.where(flat >= 0, numbers[flat.clamp_min(0)], IGNORED)
        found.append((batch, labels))
    return found


def packed_view(settings: TextSettings, kind: str) -> Evaluate:
    """Choose what Phase A looks at: pooled texts, tags, logits or attention weights."""
    objective = objective_of(settings, kind)
    if objective == "likelihood":
        return feature_function("logits")
    if objective == NEIGHBOURS:
        return feature_function("weights")
    return feature_function("heads", "none" if kind == "token" else settings.pooling)


def run_phase_a(
    setup: Setup,
    file: Path | None,
    report: Report,
    *,
    save_every: int = 500,
) -> dict[str, Any]:
    """Do with the particles what the row asks for before Phase B."""
    kind = find_variant(setup.settings.attention).phase_a
    if kind == "none":
        return {}
    if kind in ("place", "strew"):
        return _placed(setup, at_random=kind == "strew") | {"kind": kind}
    began = time.perf_counter()
    control = kind == "control"
    if kind == "noise" or (control and math.isfinite(setup.settings.align_radius)):
        facts = _without_labels(setup, control=control)
    else:
        drawn = _positions(setup)
        start = _beginning(setup)
        result = _aligned(setup, start, file, report, save_every)
        facts = _facts(result, start)
        if control:
            _match_norms(setup, drawn, result.positions)
            facts = {"summary": "Starting directions, norms of aligned particles."}
    return facts | {"kind": kind, "seconds": time.perf_counter() - began}


def _length(settings: TextSettings, n_batches: int) -> int:
    return round(settings.align_epochs * n_batches)


def alignment_problem(
    setup: Setup,
) -> tuple[list[Batch], AlignmentSettings, dict[str, Any]]:
    """Put together what Phase A of a run is asked."""
    settings = setup.settings
    batches = alignment_batches(setup.rows["train"], settings.batch_size, settings.seed)
    chosen = alignment_settings(settings, setup.corpus.kind)
    if isinstance(chosen.objective, Neighbours):
        batches = neighbour_batches(batches, setup.corpus.classes)
    # A fifth is kept back to watch the alignment of texts that move nothing.
    held_out = max(1, round(0.2 * len(batches))) if len(batches) > 1 else 0
    steps = _length(settings, len(batches) - held_out)
    options = {
        "evaluate": packed_view(settings, setup.corpus.kind),
        "seed": make_generator(settings.seed, ALIGN).initial_seed(),
    }
    return batches, chosen.changed({"max_steps": steps}), options


def _aligned(
    setup: Setup,
    start: AnyStart | None,
    file: Path | None,
    report: Report,
    save_every: int,
) -> AlignmentResult:
    batches, chosen, options = alignment_problem(setup)
    if start is not None and not (file is not None and file.is_file()):
        ParticleLayers.find(setup.model).write(setup.model, start.positions)
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


def _beginning(setup: Setup) -> AnyStart | None:
    """Find where Phase A begins; None for drawn particles.

    Labels of whole texts say nothing about places. Those of tokens choose where heads
    look, and those of pairs how closely words must agree, if they may.
    """
    if may_choose(setup):
        return choose_matches(setup)
    if setup.corpus.kind != "token" or setup.settings.align_start == "drawn":
        return None
    if looks_aside(setup.settings, setup.corpus.kind):
        return choose_start(setup)
    windows = window_start(setup)
    return None if windows is None else Start(windows, None, None)


def _placed(setup: Setup, *, at_random: bool) -> dict[str, Any]:
    """Point particles at windows, or blind them to parts, without asking labels."""
    settings = setup.settings
    start: AnyStart
    if sees_parts(setup) and not at_random:
        start = MatchStart(match_start(setup, 1.0), None)
    elif settings.positions != "learned":
        raise ParameterError(
            f"`positions` must be 'learned' for {settings.attention!r}; got "
            f"{settings.positions!r}."
        )
    elif at_random:
        start = choose_start(setup, at_random=True)
    else:
        windows = window_start(setup)
        assert windows is not None
        start = Start(windows, None, None)
    ParticleLayers.find(setup.model).write(setup.model, start.positions)
    return {"summary": start.sentence().strip(), "shifts": start.shifts}


def _without_labels(setup: Setup, *, control: bool) -> dict[str, Any]:
    problem = _still(setup)
    layers = problem.network.layers
    inside = problem.settings.domain.project(layers.read(setup.model))
    if control:
        layers.write(setup.model, inside)
        return {"summary": "Particles projected on the domain and left there."}
    twin = run_twin(problem, Particles(inside), problem.last_step, seed=problem.seed)
    layers.write(setup.model, twin.positions)
    return {"summary": "Phase A without the alignment's gradient."}


def _positions(setup: Setup) -> Tensor:
    return _still(setup).network.layers.read(setup.model)


def _still(setup: Setup) -> Problem:
    batches, chosen, options = alignment_problem(setup)
    return build_problem(setup.model, batches, chosen, **options)


def _match_norms(setup: Setup, drawn: Tensor, aligned: Tensor) -> None:
    """Give drawn particles the norms of aligned ones, for queries and keys apart."""
    sides = 2 if looks_aside(setup.settings, setup.corpus.kind) else 1
    drawn, aligned = (x.reshape(*x.shape[:-1], sides, -1) for x in (drawn, aligned))
    directions = drawn / drawn.norm(dim=-1, keepdim=True)
    matched = aligned.norm(dim=-1, keepdim=True) * directions
    ParticleLayers.find(setup.model).write(setup.model, matched.flatten(-2))


def _facts(result: AlignmentResult, start: AnyStart | None) -> dict[str, Any]:
    first, last = result.history[0], result.history[-1]
    begun = "" if start is None else start.sentence()
    choice = {} if start is None or start.choice is None else start.choice._asdict()
    return {
        "summary": begun + result.summary(),
        "steps": result.run.state.step,
        "begun": "drawn" if start is None else start.begun,
        "shifts": None if start is None else start.shifts,
        "chosen": choice,
        "before": {k: first[k] for k in ("alignment", "held_out") if k in first},
        "after": {k: last[k] for k in ("alignment", "held_out") if k in last},
        "drowned": result.drowned,
    }
