"""Phase A of a text classifier: its problem, where it begins, its run, its controls.

Labels of whole texts say nothing about places. Those of tags choose where heads look
(windows of tokens before or after each token), and those of pairs how closely words of
both texts must agree, before the first step.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coulomb._support.archive import write_archive
from coulomb._support.checks import make_generator
from coulomb._support.errors import ParameterError
from coulomb._support.ranks import ALONE, Ranks
from coulomb.attention import AlignmentResult, AlignmentSettings, align
from coulomb.attention.align import starts
from coulomb.attention.align.problem import Batch as Parts
from coulomb.attention.align.problem import Evaluate, ParticleLayers, build_problem
from coulomb.attention.align.run import run_twin
from coulomb.attention.align.scores import Neighbours
from coulomb.attention.align.starts import Choice, Contexts, MatchChoice
from coulomb.attention.encoder.encoder import KernelEncoder
from coulomb.attention.encoder.layout import IGNORED, TokenBatch
from coulomb.attention.encoder.packed import feature_function, packed_form
from coulomb.attention.layers.kernel import KernelAttention
from coulomb.domains import Ball, Space
from coulomb.dynamics.loop import Run, StopReason, load_run
from coulomb.features import Particles
from coulomb.interactions import Riesz
from coulomb.text.settings import TextSettings, find_variant, read_shifts
from coulomb.text.setup import ALIGN, BATCHES, Setup, uses_windows
from coulomb.text.tokens import TokenRows

Batch = tuple[TokenBatch, Tensor]
Report = Callable[[dict[str, Any]], None]

START = "start.safetensors"
NEIGHBOURS = "neighbours"
_SORTED = 20  # batches whose texts are sorted by length together
# Windows that labels choose among: so many tokens after, or before, the token itself.
POOL = tuple(range(-4, 5))
# Norms that labels of pairs choose among, as multiples of the drawn ones.
FACTORS = (1.0, 2.0, 4.0, 8.0)
# What labels look at before they choose: more changes the choice no more.
_TOKENS, _PAIRS = 100_000, 5000
_TEXTS = 64  # of a batch
# With fewer pairs Phase B does not learn to compare words, whatever labels choose.
ENOUGH = 5000


def alignment_objective(settings: TextSettings, kind: str) -> str:
    """Give the objective of Phase A: "auto" depends on what has labels."""
    found = settings.align.objective
    if found == "auto":
        return NEIGHBOURS if kind == "token" else "centred"
    if found == NEIGHBOURS and kind != "token":
        raise ParameterError(
            "`align_objective` must not be 'neighbours' for texts with one label each; "
            "use 'auto' or 'centred'."
        )
    return found


def alignment_settings(settings: TextSettings, kind: str) -> AlignmentSettings:
    """Give the settings of `coulomb.attention.align`."""
    model, chosen = settings.model, settings.align
    objective: Any = alignment_objective(settings, kind)
    level, output = str(chosen.level), None
    if objective in (NEIGHBOURS, "likelihood") or level == "sequence":
        level = kind  # the first two have no levels
    if objective == NEIGHBOURS:
        objective, output = Neighbours(model.n_layers * model.n_heads), ""
    known = {part.name for part in fields(AlignmentSettings)}
    same = {name: x for name, x in vars(chosen).items() if name in known}
    translated = {
        "objective": objective,
        "level": level,
        "output": output,
        "pool": model.pooling,
        "interaction": Riesz(s=chosen.riesz),
        "domain": Ball(chosen.radius) if math.isfinite(chosen.radius) else Space(),
        "patience": chosen.patience or None,
        "also": tuple(part for part in chosen.also.split(",") if part),
    }
    return AlignmentSettings(**same | translated)


def alignment_features(settings: TextSettings, kind: str) -> Evaluate:
    """Choose what is scored: pooled texts, tags, logits or attention weights."""
    known = {"likelihood": "logits", NEIGHBOURS: "weights"}
    scored = known.get(alignment_objective(settings, kind), "heads")
    return feature_function(scored, "none" if kind == "token" else settings.pooling)


def alignment_batches(
    rows: TokenRows, batch_size: int, seed: int, ranks: Ranks = ALONE
) -> list[Any]:
    """Cut a split into batches of texts of like length, and take one's own texts."""
    generator = make_generator(seed, BATCHES)
    order = torch.randperm(len(rows), generator=generator)
    batches = []
    for some in torch.split(order, _SORTED * batch_size):
        some = some[rows.lengths[some].argsort(stable=True)]
        for numbers in torch.split(some, batch_size):
            batch = rows.batch(numbers[ranks.own(rows.lengths[numbers])])
            assert batch.labels is not None
            labels = batch.labels if rows.first is None else batch.labels[None]
            # Too few for all are the first's.
            counted = ranks.writes or len(numbers) >= ranks.world
            whole = Parts((batch,), {}, None, labels, counted)
            batches.append((batch, labels) if ranks.world == 1 else whole)
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


def alignment_problem(setup: Setup, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Give what `align` is called with in a run, beside the model."""
    settings, kind = setup.settings, setup.corpus.kind
    size, seed = settings.train.batch_size, settings.train.seed
    chosen = alignment_settings(settings, kind)
    if isinstance(chosen.objective, Neighbours):
        ranks = ALONE  # it compares pairs of tokens: every process sees all
    batches = alignment_batches(setup.rows["train"], size, seed, ranks)
    if isinstance(chosen.objective, Neighbours):
        batches = neighbour_batches(batches, setup.corpus.classes)
    # A fifth is kept back to watch the alignment of texts that move nothing.
    held_out = max(1, round(0.2 * len(batches))) if len(batches) > 1 else 0
    steps = round(settings.align.epochs * (len(batches) - held_out))
    return {
        "batches": batches,
        "settings": chosen.changed({"max_steps": steps}),
        "evaluate": alignment_features(settings, kind),
        "seed": make_generator(seed, ALIGN).initial_seed(),
        "ranks": ranks,
    }


class Start(NamedTuple):
    """Where Phase A begins, and why."""

    positions: Tensor  # (layers, heads, n_particles, dim), untied twice as many numbers
    begun: str  # what particles are, in one word
    shifts: tuple[int, ...] | None = None  # None for windows around the token itself
    choice: Choice | MatchChoice | None = None  # None if labels had no part in it

    def sentence(self) -> str:
        """Say it in words."""
        if isinstance(self.choice, MatchChoice):
            told = starts.describe_norm(self.choice)
            return f"{told[0].upper()}{told[1:]}. "
        if self.begun == "drawn":
            return ""
        if self.begun == "matches":
            return "Particles began blind to the part of a pair. "
        if self.shifts is None:
            return "Particles began at windows of positions. "
        where = starts.describe_shifts(self.shifts)
        text = f"Particles began at windows of positions, by head {where}. "
        if self.choice is None:
            return text
        return text + (
            "The labels chose that: these windows tell "
            f"{100 * self.choice.explained:.2g} % of what a token does not tell of its "
            f"label, one around the token itself {100 * self.choice.centred:.2g} %. "
        )


def choose_start(setup: Setup) -> Start:
    """Find where Phase A begins."""
    if can_select_norm(setup):
        return choose_pair_norm(setup)
    kind, settings = setup.corpus.kind, setup.settings
    if uses_windows(settings, kind):
        return choose_windows(setup)
    positions, asked = settings.model.positions, settings.align.start
    if kind == "token" and asked == "windows" and positions == "learned":
        return Start(window_start(setup), "windows")
    return Start(ParticleLayers.find(setup.scratch).read(setup.scratch), "drawn")


def judge_start(
    setup: Setup, n_shuffles: int
) -> starts.ChoiceTest | starts.MatchTest | None:
    """Compare what labels choose with what shuffled ones do; None if they do not."""
    settings = setup.settings
    if can_select_norm(setup):
        shares, labels = measure_cross_attention(setup)
        seed = make_generator(settings.train.seed, ALIGN).initial_seed()
        return starts.judge_norms(shares, labels, n_shuffles=n_shuffles, seed=seed)
    if settings.align.shifts or not uses_windows(settings, setup.corpus.kind):
        return None
    contexts = measure_windows(setup, n_shuffles=n_shuffles)
    classes, heads = len(setup.corpus.classes), settings.model.n_heads
    true, *shuffled = (
        contexts.of_columns(slice(first, first + classes))
        for first in range(0, classes * (1 + n_shuffles), classes)
    )
    return starts.ChoiceTest(
        true.choose(heads),
        tuple(each.choose(heads).explained for each in shuffled),
        {shift: true.explained([shift]) for shift in POOL},
    )


def window_start(setup: Setup, shifts: Sequence[int] | None = None) -> Tensor:
    """Point the particles at windows of positions, with the norms of the drawn ones."""
    model = setup.scratch
    table = model.position_embedding
    assert table is not None
    drawn = ParticleLayers.find(model).read(model)
    layers, heads, count, _ = drawn.shape
    sides = 1 if shifts is None else 2
    norms = drawn.reshape(layers, heads, count, sides, -1).norm(dim=-1)
    usual = torch.quantile(setup.rows["train"].lengths.double(), 0.95)
    windows = starts.window_particles(
        table.weight,
        n_heads=heads,
        n_particles=count,
        span=round(float(usual)),
        norm=float(norms.mean()),
        shifts=shifts and [shifts[head % len(shifts)] for head in range(heads)],
    )
    return windows.expand(layers, *windows.shape).clone()


def choose_windows(setup: Setup, *, at_random: bool = False) -> Start:
    """Choose where the heads look: as the settings say, or as the labels do."""
    settings = setup.settings
    # All layers look at the same places: those above see further by themselves.
    heads = settings.model.n_heads
    choice = None
    if at_random:
        generator = make_generator(settings.train.seed, ALIGN)
        order = torch.randperm(len(POOL), generator=generator)
        shifts = tuple(POOL[number] for number in order[:heads].tolist())
    elif settings.align.shifts:
        shifts = read_shifts(settings.align.shifts)
    else:
        choice = measure_windows(setup).choose(heads)
        shifts = choice.shifts
    return Start(window_start(setup, shifts), "windows", shifts, choice)


def measure_windows(setup: Setup, *, n_shuffles: int = 0) -> Contexts:
    """Show the labels what a head of the first layer sees in every window."""
    windows = [window_start(setup, (shift,)) for shift in POOL]
    classes = len(setup.corpus.classes) * (1 + n_shuffles)
    with _first_attention(setup.scratch) as attention:
        dim = attention.head_dim
        contexts = Contexts(POOL, dim=dim, n_classes=classes)
        for batch, labelled, rest in _open_labels(setup, n_shuffles):
            form = packed_form(setup.scratch, batch)
            x, shown = form.embed(), []
            for window in windows:
                attention.particles.copy_(window[0])
                out = form.attend(0, x)
                shown.append(out[labelled, :dim])  # heads are alike: the first
            contexts.add(torch.cat(shown, dim=1), rest)
    return contexts


def _open_labels(
    setup: Setup, n_shuffles: int
) -> Iterator[tuple[TokenBatch, Tensor, Tensor]]:
    """Give batches in a random order, which tokens have labels, and what is open."""
    rows, classes = setup.rows["train"], len(setup.corpus.classes)
    assert rows.labels is not None
    places = (rows.labels >= 0).nonzero().squeeze(1)
    if not len(places):
        return
    tokens, labels = rows.token_ids[places], rows.labels[places]
    counts = starts.count_labels(tokens, labels, classes)
    source = make_generator(setup.settings.train.seed, ALIGN)
    order = torch.randperm(len(rows), generator=source)
    seen = 0
    for some in torch.split(order, _TEXTS):
        batch = rows.batch(some)
        assert batch.labels is not None
        labelled = batch.labels >= 0
        own = batch.token_ids[labelled], batch.labels[labelled]
        seen += len(own[0])
        if len(own[0]):
            # A shuffle gives every token what another, drawn at random, leaves open.
            size = n_shuffles, len(own[0])
            others = torch.randint(len(places), size, generator=source)
            shuffles = [(tokens[numbers], labels[numbers]) for numbers in others]
            rest = [starts.unexplained(*each, counts) for each in (own, *shuffles)]
            yield batch, labelled, torch.cat(rest, dim=1)
        if seen >= _TOKENS:
            return


def has_pair_parts(setup: Setup) -> bool:
    """Say whether there are pairs, whose encoder sees which text a token is from."""
    pairs = setup.rows["train"].parts is not None
    return pairs and setup.settings.model.positions == "parts"


def can_select_norm(setup: Setup) -> bool:
    """Say whether labels choose the norms of particles that are blind to the part."""
    asked = setup.settings.align.start == "chosen" and has_pair_parts(setup)
    return asked and len(setup.rows["train"]) >= ENOUGH


def pair_start(setup: Setup, factor: float) -> Tensor:
    """Take the direction of the part from the drawn particles, and scale them."""
    drawn = ParticleLayers.find(setup.scratch).read(setup.scratch)
    if factor == starts.DRAWN:
        return drawn
    table = setup.scratch.position_embedding
    assert table is not None
    return starts.remove_part_direction(drawn, table.weight.detach(), factor=factor)


def choose_pair_norm(setup: Setup) -> Start:
    """Let the labels choose how closely words must agree."""
    choice = starts.choose_norm(*measure_cross_attention(setup))
    begun = "drawn" if choice.factor == starts.DRAWN else "matches"
    return Start(pair_start(setup, choice.factor), begun, choice=choice)


def measure_cross_attention(setup: Setup) -> tuple[dict[float, Tensor], Tensor]:
    """See how much attention of the first layer is paid to the other text."""
    rows = setup.rows["train"]
    factors = (starts.DRAWN, *FACTORS)
    begun = {factor: pair_start(setup, factor)[0] for factor in factors}
    source = make_generator(setup.settings.train.seed, ALIGN)
    order = torch.randperm(len(rows), generator=source)[:_PAIRS]
    order = order[rows.lengths[order].argsort(stable=True)]
    shares: dict[float, list[Tensor]] = {factor: [] for factor in factors}
    labels = []
    with _first_attention(setup.scratch) as attention:
        for some in torch.split(order, _TEXTS):
            batch = rows.batch(some)
            assert batch.labels is not None
            assert batch.parts is not None
            labels.append(batch.labels)
            form = packed_form(setup.scratch, batch)
            states, mask = form.layout.pad(form.embed())
            parts, _ = form.layout.pad(batch.parts)
            q, k, _ = attention.project(states, states, states)
            for factor, positions in begun.items():
                attention.particles.copy_(positions)
                weights = attention.weights(q, k, mask, causal=False)
                share = starts.cross_text_attention(weights, parts, mask)
                shares[factor].append(share)
    found = {factor: torch.cat(each) for factor, each in shares.items()}
    return found, torch.cat(labels)


@contextmanager
def _first_attention(model: KernelEncoder) -> Iterator[KernelAttention]:
    """Give the first attention layer, and its particles back after the block."""
    attention = model.layers[0].attention
    assert isinstance(attention, KernelAttention)
    kept = attention.particles.detach().clone()
    with torch.no_grad():
        try:
            yield attention
        finally:
            attention.particles.copy_(kept)


def run_phase_a(
    setup: Setup,
    file: Path | None,
    report: Report,
    *,
    save_every: int = 500,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Do with the particles what the row asks for before Phase B."""
    kind = find_variant(setup.settings.model.attention).phase_a
    if kind == "none":
        return {}
    if kind == "align" and file is not None and ranks.writes:
        # What Phase A did can be judged only with the weights it began with. Computing
        # them again would cost the epochs before it, and be exact with the same number
        # of threads and the same version only.
        write_archive(file.with_name(START), setup.scratch.state_dict(), {})
    if kind in ("place", "strew"):
        return _place(setup, at_random=kind == "strew") | {"kind": kind}
    began = time.perf_counter()
    layers = ParticleLayers.find(setup.scratch)
    drawn = layers.read(setup.scratch)
    inside = alignment_settings(setup.settings, setup.corpus.kind).domain.project(drawn)
    if kind == "noise":
        problem = build_problem(setup.scratch, **alignment_problem(setup))
        steps, seed = problem.last_step, problem.seed
        twin = run_twin(problem, Particles(inside), steps, seed=seed)
        layers.write(setup.scratch, twin.positions)
        facts = {"summary": "Phase A without the alignment's gradient."}
    elif kind == "control" and math.isfinite(setup.settings.align.radius):
        layers.write(setup.scratch, inside)
        facts = {"summary": "Particles projected on the domain and left there."}
    else:
        start = ranks.share(choose_start(setup) if ranks.writes else None)
        result = _run_alignment(setup, start, file, report, save_every, ranks)
        facts = _facts(result, start)
        if kind == "control":
            sides = 2 if uses_windows(setup.settings, setup.corpus.kind) else 1
            layers.write(setup.scratch, _match_norms(drawn, result.positions, sides))
            facts = {"summary": "Starting directions, norms of aligned particles."}
    return facts | {"kind": kind, "seconds": time.perf_counter() - began}


def _run_alignment(
    setup: Setup,
    start: Start,
    file: Path | None,
    report: Report,
    save_every: int,
    ranks: Ranks,
) -> AlignmentResult:
    problem = alignment_problem(setup, ranks)
    if file is None or not file.is_file():
        ParticleLayers.find(setup.scratch).write(setup.scratch, start.positions)
    while True:
        resume, last = None, 0
        if file is not None and file.is_file():
            before = load_run(file)
            resume, last = file, before.state.step
            if before.reason not in (None, StopReason.CALLBACK):
                problem["settings"] = problem["settings"].changed({"max_steps": last})

        def told(run: Run, last: int = last) -> bool:
            report(_records(run.history[-1], "step"))
            return file is not None and run.state.step - last >= save_every

        result = align(
            setup.scratch, **problem, resume=resume, callbacks=(told,), progress=False
        )
        if file is not None and ranks.writes:
            result.save(file)
        ranks.wait()
        if result.run.reason is not StopReason.CALLBACK:
            return result


def _place(setup: Setup, *, at_random: bool) -> dict[str, Any]:
    """Point particles at windows, or blind them to parts, without asking labels."""
    settings = setup.settings
    if has_pair_parts(setup) and not at_random:
        start = Start(pair_start(setup, 1.0), "matches")
    elif settings.model.positions != "learned":
        raise ParameterError(
            f"`positions` must be 'learned' for {settings.model.attention!r}; got "
            f"{settings.model.positions!r}."
        )
    elif at_random:
        start = choose_windows(setup, at_random=True)
    else:
        start = Start(window_start(setup), "windows")
    ParticleLayers.find(setup.scratch).write(setup.scratch, start.positions)
    return {"summary": start.sentence().strip(), "shifts": start.shifts}


def _match_norms(drawn: Tensor, aligned: Tensor, sides: int) -> Tensor:
    """Give drawn particles the norms of aligned ones, for queries and keys apart."""
    drawn, aligned = (x.reshape(*x.shape[:-1], sides, -1) for x in (drawn, aligned))
    directions = drawn / drawn.norm(dim=-1, keepdim=True)
    return (aligned.norm(dim=-1, keepdim=True) * directions).flatten(-2)


def _records(record: dict[str, Any], *more: str) -> dict[str, Any]:
    return {k: record[k] for k in (*more, "alignment", "held_out") if k in record}


def _facts(result: AlignmentResult, start: Start) -> dict[str, Any]:
    return {
        "summary": start.sentence() + result.summary(),
        "steps": result.run.state.step,
        "begun": start.begun,
        "shifts": start.shifts,
        "chosen": {} if start.choice is None else start.choice._asdict(),
        "before": _records(result.history[0]),
        "after": _records(result.history[-1]),
        "drowned": result.drowned,
    }
