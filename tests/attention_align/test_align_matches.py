"""Pairs: particles that do not see the part, and labels that choose their norms."""

import numpy as np
import pytest
import torch

from coulomb._support.errors import ParameterError
from coulomb.attention.align.starts import (
    DRAWN,
    choose_norm,
    cross_text_attention,
    judge_norms,
    remove_part_direction,
    variance_explained,
)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
