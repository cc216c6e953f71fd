"""Pairs of texts: particles that see which words of one stand in the other."""

from typing import NamedTuple

import torch
from torch import Tensor

from coulomb._support.streams import make_generator
from coulomb.attention.align.problem import ParticleLayers
from coulomb.attention.align.starts import (
    DRAWN,
    MatchChoice,
    MatchTest,
    choose_norm,
    cross_text_attention,
    describe_norm,
    judge_norms,
    remove_part_direction,
)
from coulomb.attention.encoder.packed import packed_form
from coulomb.attention.layers.kernel import KernelAttention
from coulomb.text.setup import ALIGN, Setup

# Norms that labels choose among, as multiples of the drawn ones.
FACTORS = (1.0, 2.0, 4.0, 8.0)
_PAIRS = 5000  # that are looked at
# With fewer Phase B does not learn to compare words, whatever the labels choose.
ENOUGH = 5000
_TEXTS = 64  # of a batch


class MatchStart(NamedTuple):
    """Where Phase A of pairs begins, and why."""

    positions: Tensor  # (layers, heads, n_particles, dim)
    choice: MatchChoice | None  # None if labels had no part in it

    @property
    def begun(self) -> str:
        """What particles are, in one word."""
        stay = self.choice is not None and self.choice.factor == DRAWN
        return "drawn" if stay else "matches"

    @property
    def shifts(self) -> None:
        """Pairs have none."""
        return

    def sentence(self) -> str:
        """Say it in words."""
        if self.choice is None:
            return "Particles began blind to the part of a pair. "
        told = describe_norm(self.choice)
        return f"{told[0].upper()}{told[1:]}. "


def sees_parts(setup: Setup) -> bool:
    """Say whether there are pairs, whose encoder sees which text a token is from."""
    pairs = setup.rows["train"].parts is not None
    return pairs and setup.settings.positions == "parts"


def may_choose(setup: Setup) -> bool:
    """Say whether labels choose the norms of particles that are blind to the part."""
    asked = setup.settings.align_start == "chosen" and sees_parts(setup)
    return asked and len(setup.rows["train"]) >= ENOUGH


def match_start(setup: Setup, factor: float) -> Tensor:
    """Turn the particles of all layers until they do not see the part."""
    drawn = ParticleLayers.find(setup.model).read(setup.model)
    if factor == DRAWN:
        return drawn
    table = setup.model.position_embedding
    assert table is not None
    return remove_part_direction(drawn, table.weight.detach(), factor=factor)


def choose_matches(setup: Setup) -> MatchStart:
    """Let the labels choose how closely words must agree."""
    choice = choose_norm(*look_across(setup))
    return MatchStart(match_start(setup, choice.factor), choice)


def judge_matches(setup: Setup, n_shuffles: int) -> MatchTest:
    """Compare what the labels choose with what shuffled labels choose."""
    shares, labels = look_across(setup)
    seed = make_generator(setup.settings.seed, ALIGN).initial_seed()
    return judge_norms(shares, labels, n_shuffles=n_shuffles, seed=seed)


def look_across(setup: Setup) -> tuple[dict[float, Tensor], Tensor]:
    """See how much attention of the first layer is paid to the other text."""
    model, rows = setup.model, setup.rows["train"]
    attention = model.layers[0].attention
    assert isinstance(attention, KernelAttention)
    starts = {factor: match_start(setup, factor)[0] for factor in (DRAWN, *FACTORS)}
    source = make_generator(setup.settings.seed, ALIGN)
    order = torch.randperm(len(rows), generator=source)[:_PAIRS]
    order = order[rows.lengths[order].argsort(stable=True)]
    kept = attention.particles.detach().clone()
    shares: dict[float, list[Tensor]] = {factor: [] for factor in starts}
    labels = []
    try:
        with torch.no_grad():
            for some in torch.split(order, _TEXTS):
                batch = rows.batch(some)
                assert batch.labels is not None
                assert batch.parts is not None
                labels.append(batch.labels)
                form = packed_form(model, batch)
                states, mask = form.layout.pad(form.embed())
                parts, _ = form.layout.pad(batch.parts)
                q, k, _ = attention.project(states, states, states)
                for factor, start in starts.items():
                    attention.particles.copy_(start)
                    weights = attention.weights(q, k, mask, causal=False)
                    shares[factor].append(cross_text_attention(weights, parts, mask))
    finally:
        with torch.no_grad():
            attention.particles.copy_(kept)
    return {factor: torch.cat(each) for factor, each in shares.items()}, torch.cat(
        labels
    )
