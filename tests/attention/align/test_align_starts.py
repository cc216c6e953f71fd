"""Where Phase A begins: windows, shifts that labels choose, norms that they choose."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from coulomb._support.errors import ParameterError
from coulomb.attention import EncoderSettings, KernelEncoder, align
from coulomb.attention.align.starts import (
    _RIDGE,
    DRAWN,
    Contexts,
    choose_norm,
    count_labels,
    cross_text_attention,
    judge_norms,
    remove_part_direction,
    unexplained,
    variance_explained,
    window_particles,
)
from coulomb.attention.layers.kernel import KernelAttention
from coulomb.features import Particles, as_feature_map


def test_windows_by_hand():
    table = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    found = window_particles(table, n_heads=2, n_particles=4, span=6, norm=2.0)
    for head in range(2):
        part = table[:, 2 * head : 2 * head + 2]
        for k in range(4):
            total = torch.zeros(2)
            for t in range(9):
                # Centres are 2 positions apart, which is more than the width of 1.5.
                weight = math.exp(-((t - 2 * k) ** 2) / (2 * 2.0**2))
                total += weight * part[t] / part[t].norm()
            torch.testing.assert_close(found[head, k], 2 * total / total.norm())


@pytest.mark.parametrize("count", [1, 3, 40])
def test_windows_have_the_norm_and_stay_in_the_table(count):
    table = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    found = window_particles(table, n_heads=3, n_particles=count, span=100, norm=1.5)
    assert found.shape == (3, count, 2)
    torch.testing.assert_close(found.norm(dim=-1), torch.full((3, count), 1.5))
    assert (
        window_particles(0 * table, n_heads=3, n_particles=count, span=4)
        .isfinite()
        .all()
    )


def test_the_kernel_of_windows_is_local():
    """With orthogonal embeddings it falls with the distance of two positions."""
    table = 8 * torch.eye(24)
    particles = Particles(
        window_particles(table, n_heads=1, n_particles=24, span=23, norm=3.0)
    )
    features = as_feature_map("softmaxfeat")(table.unsqueeze(0), particles)[0]
    kernel = features @ features.T
    near = kernel[8, 8:16]
    assert (near.diff() < 0).all()
    assert near[0] > 5 * near[6]


def test_a_bad_shape_is_named():
    with pytest.raises(ParameterError, match="`positions` must have shape"):
        window_particles(torch.zeros(4, 5), n_heads=2, n_particles=3, span=4)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_what_a_token_leaves_open_by_hand():
    tokens = torch.tensor([4, 1, 4, 4, 1, 0])
    labels = torch.tensor([0, 1, 0, 2, 1, 0])
    found = unexplained(tokens, labels, count_labels(tokens, labels, 3), prior=3.0)
    shares = [(labels == c).double().mean().item() for c in range(3)]
    for i in range(6):
        same = [j for j in range(6) if j != i and tokens[j] == tokens[i]]
        for c in range(3):
            count = sum(int(labels[j] == c) for j in same)
            told = (count + 3 * shares[c]) / (len(same) + 3)
            assert found[i, c].item() == pytest.approx(
                float(labels[i] == c) - told, abs=1e-6
            )
    torch.testing.assert_close(found.sum(dim=1), torch.zeros(6))


def test_a_token_that_is_always_right_leaves_nothing_open():
    tokens = torch.arange(3).repeat(400)
    assert (
        unexplained(tokens, tokens, count_labels(tokens, tokens, 3)).abs().max() < 0.01
    )


@pytest.mark.parametrize(("tokens", "labels"), [((3,), (2,)), ((2, 2), (2, 2)), (0, 0)])
def test_lists_of_another_shape_are_refused(tokens, labels):
    with pytest.raises(ParameterError, match="`tokens` and `labels` must be"):
        count_labels(torch.zeros(tokens).long(), torch.zeros(labels).long(), 2)


def test_explained_is_ridge_regression_on_the_other_half():
    contexts = Contexts((-1, 0, 1), dim=2, n_classes=3)
    halves = []
    for half in range(2):
        shown = drawn(60, 6, seed=half) + 0.5
        rest = shown[:, 2:4] @ drawn(2, 3, seed=7) + drawn(60, 3, seed=9 + half)
        contexts.add(shown, rest)
        halves.append((shown.double().numpy(), rest.double().numpy()))
    lost = guessed = 0.0
    for (shown, rest), (others, theirs) in (halves, halves[::-1]):
        some = shown[:, [4, 5, 0, 1]]
        penalty = _RIDGE * (some**2).sum(axis=0).mean()
        model = Ridge(penalty).fit(some, rest)
        lost += ((theirs - model.predict(others[:, [4, 5, 0, 1]])) ** 2).sum()
        guessed += ((theirs - rest.mean(axis=0)) ** 2).sum()
    assert contexts.explained([1, -1]) == pytest.approx(1 - lost / guessed, abs=1e-6)
    assert contexts.explained([]) == pytest.approx(0)


def test_windows_are_chosen_by_what_they_add():
    """The second window is a copy of the first: the third tells more beside it."""
    contexts = Contexts((0, 1, 2), dim=1, n_classes=1)
    for half in range(2):
        shown = drawn(4000, 3, seed=half)
        shown[:, 1] = shown[:, 0] + 0.1 * shown[:, 1]
        contexts.add(shown, 2 * shown[:, :1] + shown[:, 2:])
    choice = contexts.choose(3)
    assert choice.shifts[:2] == (0, 2)
    assert choice.explained == pytest.approx(1, abs=1e-3)
    assert choice.centred == pytest.approx(0.8, abs=0.03)


def test_windows_that_tell_nothing_are_not_chosen():
    contexts = Contexts((-1, 0, 1), dim=4, n_classes=2)
    for half in range(2):
        contexts.add(drawn(300, 12, seed=half), drawn(300, 2, seed=5 + half))
    choice = contexts.choose(2)
    assert choice.shifts == (0,)
    assert choice.explained == 0
    assert choice.centred < 0


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_hardly_any_tokens_give_numbers(rows):
    contexts = Contexts((0, 1), dim=2, n_classes=2)
    contexts.add(drawn(rows, 4), drawn(rows, 2))
    assert Contexts((0,), dim=1, n_classes=1).choose(1).shifts == (0,)
    assert contexts.choose(2).shifts
    with pytest.raises(ParameterError, match="`shifts` must contain 0"):
        Contexts((1, 2), dim=1, n_classes=1)


@pytest.mark.parametrize("shift", [-2, -1, 0, 1, 2])
def test_a_shifted_head_attends_beside_the_token(shift):
    table = 8 * torch.eye(24)
    layer = KernelAttention(24, 1, n_features=24, qkv="shared", tied=False)
    windows = window_particles(
        table, n_heads=1, n_particles=24, span=23, width=0.5, shifts=[shift]
    )
    assert windows.shape == (1, 24, 48)
    with torch.no_grad():
        layer.particles.copy_(windows)
    _, weights = layer(*[table.unsqueeze(1)] * 3)
    most = weights[0].argmax(dim=1)
    inside = torch.arange(4, 20)
    assert torch.equal(most[inside], inside + shift)


def test_centred_windows_are_untied_twins_of_tied_ones():
    table = drawn(30, 8)
    options = {"n_heads": 2, "n_particles": 5, "span": 20}
    tied = window_particles(table, **options)
    untied = window_particles(table, shifts=[0, 0], **options)
    torch.testing.assert_close(untied, torch.cat([tied, tied], dim=-1))
    with pytest.raises(ParameterError, match="one number for each of 2 heads"):
        window_particles(table, shifts=[1], **options)


def test_labels_can_move_untied_particles_apart():
    settings = EncoderSettings(20, 2, width=8, n_heads=2, ffn_width=8, n_layers=1)
    factory = partial(KernelAttention, n_features=4, qkv="shared", tied=False)
    model = KernelEncoder(settings, factory, generator=0)
    tokens = torch.randint(20, (16, 6), generator=torch.Generator().manual_seed(0))
    labels = (tokens[:, 0] > 9).long()
    result = align(model, [(tokens, labels)], held_out=None, max_steps=3)
    before = result.stats.start
    assert before.shape == (1, 2, 4, 8)
    assert torch.equal(*before.split(4, dim=-1))
    asking, asked = result.positions.split(4, dim=-1)
    assert not torch.allclose(asking, asked)
    assert result.history[-1]["alignment"] > result.history[0]["alignment"]


def test_blind_particles_give_both_parts_the_same_projections():
    particles, parts = drawn(3, 2, 5, 8), drawn(2, 16, seed=1)
    found = remove_part_direction(particles, parts, factor=4.0)
    words = drawn(7, 16, seed=2)
    first, second = (
        torch.einsum("nhd,lhmd->lhmn", (words + part).view(7, 2, 8), found)
        for part in parts
    )
    torch.testing.assert_close(first, second)
    norms = found.norm(dim=-1) / particles.norm(dim=-1)
    torch.testing.assert_close(norms, torch.full_like(norms, 4.0))
    again = remove_part_direction(found, parts)
    torch.testing.assert_close(again, found)


def test_parts_without_a_difference_turn_nothing():
    particles = drawn(2, 5, 8)
    found = remove_part_direction(particles, torch.ones(2, 16))
    torch.testing.assert_close(found, particles)
    assert torch.equal(
        remove_part_direction(0 * particles, drawn(2, 16)), 0 * particles
    )


@pytest.mark.parametrize("shape", [(2, 8), (3, 16), (16,)])
def test_parts_of_another_shape(shape):
    with pytest.raises(ParameterError, match=r"`parts` must have shape \(2, 16\)"):
        remove_part_direction(drawn(2, 5, 8), torch.ones(shape))


def test_crossing_is_the_sum_over_pairs_of_tokens():
    weights = drawn(3, 2, 6, 6).exp()
    parts = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    lengths = (6, 3, 4)
    mask = torch.arange(6) < torch.tensor(lengths).unsqueeze(1)
    found = cross_text_attention(weights, parts, mask)
    for pair, length in enumerate(lengths):
        for head in range(2):
            shares = []
            for i in range(length):
                others = [j for j in range(length) if j != i]
                paid = [weights[pair, head, i, j].item() for j in others]
                across = [float(parts[pair, j] != parts[pair, i]) for j in others]
                shares.append(np.dot(paid, across) / np.sum(paid))
            assert found[pair, head].item() == pytest.approx(np.mean(shares), rel=1e-5)
    assert found[2].tolist() == [0, 0]


def test_a_token_alone_crosses_nothing():
    mask = torch.tensor([[True, False]])
    assert (
        cross_text_attention(torch.ones(1, 1, 2, 2), torch.tensor([[0, 1]]), mask) == 0
    )


def test_two_classes_tell_the_squared_correlation():
    labels = torch.arange(60) % 2
    values = drawn(60, 3) + labels.unsqueeze(1)
    both = [np.corrcoef(values[:, j], labels)[0, 1] ** 2 for j in range(3)]
    assert variance_explained(values, labels) == pytest.approx(np.mean(both), rel=1e-6)
    assert variance_explained(torch.ones(4, 1), torch.tensor([0, 1, 2, 2])) == 0


def test_the_smallest_of_norms_that_are_alike_is_chosen():
    labels = torch.arange(2000) % 2
    noise, told = drawn(2000, 2), labels.unsqueeze(1).float()
    shares = {DRAWN: noise, 1.0: noise + 0.3 * told, 2.0: noise + told}
    shares |= {4.0: noise + 1.01 * told, 8.0: noise + 0.8 * told}
    found = choose_norm(shares, labels)
    assert found.factor == 2.0
    assert found.explained > 10 * found.drawn


@pytest.mark.parametrize("n_classes", [2, 3, 20])
def test_labels_that_mean_nothing_choose_nothing(n_classes):
    """Of two classes chance gives 16 / n, four standard errors, once in 16,000 columns.

    Of more it gives `(n_classes - 1) / n` on average, which is no reason to choose.
    """
    labels = torch.arange(500) % n_classes
    for seed in range(10):
        kinds = enumerate((DRAWN, 1.0, 4.0))
        shares = {factor: drawn(500, 1, seed=3 * seed + k) for k, factor in kinds}
        found = judge_norms(shares, labels, n_shuffles=5, seed=0)
        assert found.choice.factor == DRAWN
        assert found.p_value == 1.0
        assert "particles stay as drawn" in found.sentence()


def test_drawn_particles_must_be_among_them():
    with pytest.raises(ParameterError, match=r"`shares` must contain 0\.0"):
        choose_norm({1.0: torch.ones(2, 1)}, torch.tensor([0, 1]))
