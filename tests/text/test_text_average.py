"""Averaged weights: the formula, and what a run does with them."""

import math

import pytest
import torch
from text_cases import tiny_corpus, tiny_settings, tiny_vocabulary
from torch import nn

from coulomb.text import train
from coulomb.text.training import RunningAverage


@pytest.mark.parametrize(
    ("memory", "every"), [(2.5, 1), (16.0, 4), (30.0, 7), (99.0, 8)]
)
def test_it_is_the_recursion(memory, every):
    model = nn.Linear(2, 1, bias=False)
    weights = torch.linspace(-1, 3, 80).view(40, 1, 2)
    average = RunningAverage(model, memory)
    assert average.every == every
    expected = model.weight.detach().clone()
    for step, value in enumerate(weights, start=1):
        model.weight.data.copy_(value)
        average.add(step)
        if step % every == 0:
            share = 1 - math.exp(-every / min(memory, (step + every) / 2))
            expected = (1 - share) * expected + share * value
    with average.in_place():
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight.detach(), weights[-1])


def test_long_memory_forgets_the_start_and_short_memory_everything():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1e3)  # where it begins counts less and less
    averages = {memory: RunningAverage(model, memory) for memory in (2.0, 1e9)}
    values = torch.linspace(0, 1, 4000)
    for step, value in enumerate(values, start=1):
        model.weight.data.fill_(value)
        for average in averages.values():
            average.add(step)
    found = {}
    for memory, average in averages.items():
        with average.in_place():
            found[memory] = model.weight.item()
    assert abs(found[2.0] - 1) < 0.01
    assert 0.5 < found[1e9] < 0.8


def test_frozen_parameters_and_no_memory_are_left_alone():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert set(RunningAverage(model, 5.0).tensors()) == {"weight", "begun"}
    assert RunningAverage(model, 0.0).tensors() == {}


def test_a_checkpoint_goes_on():
    model = nn.Linear(1, 1, bias=False)
    one = RunningAverage(model, 20.0)
    one.restart(8)
    for step in range(9, 17):
        model.weight.data.add_(1.0)
        one.add(step)
    other = RunningAverage(model, 20.0)
    for name, value in other.tensors().items():
        value.copy_(one.tensors()[name])
    for average in (one, other):
        average.add(25)
    for name, value in one.tensors().items():
        assert torch.equal(value, other.tensors()[name])


def test_a_run_keeps_the_average_and_trains_as_without_it():
    corpus = tiny_corpus()
    vocabulary = tiny_vocabulary(corpus)
    plain, averaged = (
        train(
            corpus,
            tiny_settings(attention="softmax", align_after=0, average_epochs=epochs),
            vocabulary,
            progress=False,
        )
        for epochs in (0.0, 2.0)
    )
    losses = [[row["loss"] for row in run.history] for run in (plain, averaged)]
    assert losses[0] == losses[1]
    name = "layers.0.widen.weight"
    assert plain.metrics["best_epoch"] == averaged.metrics["best_epoch"]
    assert not torch.equal(plain.weights[name], averaged.weights[name])
