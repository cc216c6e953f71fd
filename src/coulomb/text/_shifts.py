"""Where the heads of a tagger look: windows of tokens before or after each token."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb._support.streams import make_generator
from coulomb.attention.align.problem import ParticleLayers
from coulomb.attention.align.starts import (
    Choice,
    ChoiceTest,
    Contexts,
    count_labels,
    describe_shifts,
    unexplained,
    window_particles,
)
from coulomb.attention.encoder.layout import TokenBatch
from coulomb.attention.encoder.packed import packed_form
from coulomb.attention.layers.kernel import KernelAttention
from coulomb.text.settings import read_shifts
from coulomb.text.setup import ALIGN, Setup

# Windows that labels choose among: so many tokens after, or before, the token itself.
POOL = tuple(range(-4, 5))
# Tokens that are looked at: more change the choice no more.
_TOKENS = 100_000
_TEXTS = 64  # of a batch


class Start(NamedTuple):
    """Where Phase A begins, and why."""

    positions: Tensor  # (layers, heads, n_particles, dim), or twice as many coordinates
    shifts: tuple[int, ...] | None  # None for windows around the token itself
    choice: Choice | None  # None if labels had no part in it

    @property
    def begun(self) -> str:
        """What particles are, in one word."""
        return "windows"

    def sentence(self) -> str:
        """Say it in words."""
        if self.shifts is None:
            return "Particles began at windows of positions. "
        where = describe_shifts(self.shifts)
        text = f"Particles began at windows of positions, by head {where}. "
        if self.choice is None:
            return text
        return text + (
            "The labels chose that: these windows tell "
            f"{100 * self.choice.explained:.2g} % of what a token does not tell of its "
            f"label, one around the token itself {100 * self.choice.centred:.2g} %. "
        )


def window_start(setup: Setup, shifts: Sequence[int] | None = None) -> Tensor | None:
    """Point the particles at windows of positions, with the norms of the drawn ones."""
    model = setup.model
    table = model.position_embedding
    if table is None or model.settings.positions != "learned":
        return None
    drawn = ParticleLayers.find(model).read(model)
    layers, heads, count, _ = drawn.shape
    sides = 1 if shifts is None else 2
    norms = drawn.reshape(layers, heads, count, sides, -1).norm(dim=-1)
    usual = torch.quantile(setup.rows["train"].lengths.double(), 0.95)

    turns = shifts and [shifts[head % len(shifts)] for head in range(heads)]
    windows = window_particles(
        table.weight,
        n_heads=heads,
        n_particles=count,
        span=round(float(usual)),
        norm=float(norms.mean()),
        shifts=turns,
    )
    return windows.expand(layers, *windows.shape).clone()


def choose_start(setup: Setup, *, at_random: bool = False) -> Start:
    """Choose where the heads look: as the settings say, or as the labels do."""
    settings = setup.settings
    # All layers look at the same places: those above see further by themselves.
    heads = settings.n_heads
    choice = None
    if at_random:
        generator = make_generator(settings.seed, ALIGN)
        order = torch.randperm(len(POOL), generator=generator)
        shifts = tuple(POOL[number] for number in order[:heads].tolist())
    elif settings.align_shifts:
        shifts = read_shifts(settings.align_shifts)
    else:
        choice = look_around(setup).choose(heads)
        shifts = choice.shifts
    positions = window_start(setup, shifts)
    assert positions is not None
    return Start(positions, shifts, choice)


def look_around(setup: Setup, *, n_shuffles: int = 0) -> Contexts:
    """Show the labels what a head of the first layer sees in every window."""
    model = setup.model
    attention = model.layers[0].attention
    assert isinstance(attention, KernelAttention)
    starts = [window_start(setup, (shift,)) for shift in POOL]
    dim, classes = attention.head_dim, len(setup.corpus.classes)
    contexts = Contexts(POOL, dim=dim, n_classes=classes * (1 + n_shuffles))
    kept = attention.particles.detach().clone()
    try:
        with torch.no_grad():
            for batch, labelled, rest in _open_labels(setup, n_shuffles):
                form = packed_form(model, batch)
                x = form.embed()
                shown = []
                for start in starts:
                    assert start is not None
                    attention.particles.copy_(start[0])
                    out = form.attend(0, x)
                    shown.append(out[labelled, :dim])  # heads are alike: the first
                contexts.add(torch.cat(shown, dim=1), rest)
    finally:
        with torch.no_grad():
            attention.particles.copy_(kept)
    return contexts


def judge_choice(setup: Setup, n_shuffles: int) -> ChoiceTest:
    """Compare what the labels choose with what shuffled labels choose."""
    contexts = look_around(setup, n_shuffles=n_shuffles)
    classes, heads = len(setup.corpus.classes), setup.settings.n_heads
    true, *shuffled = (
        contexts.of_columns(slice(first, first + classes))
        for first in range(0, classes * (1 + n_shuffles), classes)
    )
    return ChoiceTest(
        true.choose(heads),
        tuple(each.choose(heads).explained for each in shuffled),
        {shift: true.explained([shift]) for shift in POOL},
    )


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
    counts = count_labels(tokens, labels, classes)
    source = make_generator(setup.settings.seed, ALIGN)
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
            rest = [unexplained(*each, counts) for each in (own, *shuffles)]
            yield batch, labelled, torch.cat(rest, dim=1)
        if seen >= _TOKENS:
            return
