"""The attention that tokens pay to their class: loops over pairs, limits, learning."""

import math

import pytest
import torch
from torch import nn

from coulomb._support.errors import ParameterError
from coulomb.attention import KernelAttention, align
from coulomb.attention.align.scores import (
    Neighbours,
    Rows,
    neighbour_likelihood,
    shuffled,
)

F64 = torch.float64
NONE = -100


def drawn_weights(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=F64) + 0.01


def by_loops(weights, labels):
    """Sum over tokens and their companions, class by class."""
    by_class = {}
    for sequence, classes in zip(weights, labels.tolist(), strict=True):
        for i, mine in enumerate(classes):
            others = [j for j, c in enumerate(classes) if j != i and c != NONE]
            own = [j for j in others if classes[j] == mine]
            if mine == NONE or not own:
                continue
            share = sum(sequence[i, j] for j in own)
            share = share / sum(sequence[i, j] for j in others)
            by_class.setdefault(mine, []).append(share.log())
    means = [torch.stack(found).mean() for found in by_class.values()]
    return torch.stack(means).mean()


LABELS = torch.tensor([[0, 2, 2, 0, 1, NONE], [1, 1, 0, NONE, NONE, NONE]])


def test_values_and_gradients_are_those_of_loops():
    weights = drawn_weights(2, 6, 6).requires_grad_(True)
    ours, theirs = neighbour_likelihood(weights, LABELS), by_loops(weights, LABELS)
    assert torch.allclose(ours, theirs, rtol=1e-12)
    grads = [torch.autograd.grad(value, weights)[0] for value in (ours, theirs)]
    assert torch.allclose(*grads, rtol=1e-10, atol=1e-14)
    assert torch.autograd.gradcheck(
        lambda w: neighbour_likelihood(w.square(), LABELS), weights
    )


def test_uniform_attention_gives_the_share_of_the_class():
    """`log((n_c - 1) / (n - 1))`, averaged over classes of 2 and 3 of five tokens."""
    labels = torch.tensor([[0, 0, 1, 1, 1]])
    found = float(neighbour_likelihood(torch.ones(1, 5, 5, dtype=F64), labels))
    assert math.isclose(found, (math.log(1 / 4) + math.log(2 / 4)) / 2)


def test_attention_inside_classes_is_the_maximum():
    labels = torch.tensor([[0, 0, 1, 1, 1]])
    inside = (labels.unsqueeze(2) == labels.unsqueeze(1)).to(F64)
    assert float(neighbour_likelihood(inside, labels)) == 0


def test_what_has_no_label_does_not_count():
    weights = drawn_weights(2, 6, 6)
    changed = weights.clone()
    unlabelled = LABELS == NONE
    changed[unlabelled] = 7.0
    changed.transpose(1, 2)[unlabelled] = 7.0
    ours = neighbour_likelihood(weights, LABELS)
    assert torch.equal(neighbour_likelihood(changed, LABELS), ours)


def test_without_companions_there_is_nothing_to_learn():
    weights = drawn_weights(1, 3, 3).requires_grad_(True)
    value = neighbour_likelihood(weights, torch.tensor([[0, 1, 2]]))
    value.backward()
    assert float(value.detach()) == 0
    assert torch.equal(weights.grad, torch.zeros_like(weights))


def test_groups_lie_side_by_side():
    weights = drawn_weights(3, 2, 6, 6)
    rows = Rows(weights.permute(1, 2, 0, 3).flatten(2), LABELS)
    expected = torch.stack([by_loops(each, LABELS) for each in weights])
    assert torch.allclose(Neighbours(groups=3)(rows), expected)


def test_labels_of_sequences_are_refused():
    with pytest.raises(ParameterError, match="classes of tokens"):
        Neighbours()(Rows(torch.ones(2, 3, 3), torch.tensor([0, 1])))


def test_shuffled_labels_stay_where_labels_are():
    share = torch.ones(2, 6)
    rows = Rows(torch.ones(2, 6, 6), LABELS, share)
    generator = torch.Generator().manual_seed(0)
    mixed = shuffled([rows], generator, pairwise=True)[0].target
    assert torch.equal(mixed == NONE, LABELS == NONE)
    for ours, theirs in zip(mixed, LABELS, strict=True):
        assert torch.equal(ours.sort().values, theirs.sort().values)
    assert not torch.equal(mixed, LABELS)


class Weighing(nn.Module):
    """A layer that gives its attention weights."""

    def __init__(self):
        super().__init__()
        self.attention = KernelAttention(
            16, 2, n_features=8, qkv="shared", batch_first=True, generator=0
        )

    def forward(self, x):
        q, k, _ = self.attention.project(x, x, x)
        weights = self.attention.weights(q, k, None, causal=False)
        return weights.transpose(1, 2).flatten(2)


def test_particles_learn_who_belongs_together():
    """Eight words of two classes: what is learned holds for sentences never seen."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(8, 16, generator=generator)
    batches = []
    for _ in range(8):
        drawn = torch.randint(8, (16, 10), generator=generator)
        batches.append((words[drawn], drawn % 2))
    result = align(
        Weighing(), batches, objective=Neighbours(groups=2), level="token", output="",
        sampler="adam", inverse_temperature=math.inf, step_size=0.1, max_steps=60,
        strength=0.0,
    )  # fmt: skip
    first, last = result.history[0]["held_out"], result.history[-1]["held_out"]
    assert math.exp(first) < 0.6
    assert math.exp(last) > 0.8
