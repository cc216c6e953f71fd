"""Labels choose where heads look: what tokens leave open, and windows that tell it."""

from functools import partial

import pytest
import torch
from sklearn.linear_model import Ridge

from coulomb._support.errors import ParameterError
from coulomb.attention import EncoderSettings, KernelEncoder, align
from coulomb.attention.align.starts import (
    _RIDGE,
    Contexts,
    count_labels,
    unexplained,
    window_particles,
)
from coulomb.attention.layers.kernel import KernelAttention


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
