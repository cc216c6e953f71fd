"""Phase A on the cross-entropy, and with Adam's steps: against torch's own."""

import math

import pytest
import torch
from align_cases import TinyModel, marked_batches, marked_model, random_batches
from torch import nn
from torch.nn import functional

from coulomb._support.errors import ParameterError
from coulomb.attention.align.problem import AlignmentSettings, build_problem
from coulomb.attention.align.run import align
from coulomb.attention.align.scores import Likelihood, Rows
from coulomb.features import Particles

FLOW = {"sampler": "adam", "inverse_temperature": math.inf, "strength": 0.0}
ON_LOSS = {**FLOW, "objective": "likelihood", "clip": math.inf, "step_size": 0.05}


def positions_of(model):
    return torch.stack([layer.particles.detach() for layer in model.attention])


def loss_of(model, batch):
    x, mask, labels = batch
    return functional.cross_entropy(model(x, mask), labels)


def test_it_is_minus_the_cross_entropy_of_the_model_in_value_and_gradient():
    model = TinyModel(classes=3, dtype=torch.float64).eval()
    batches = random_batches(2, dtype=torch.float64)
    settings = AlignmentSettings(objective="likelihood")
    problem = build_problem(model, batches, settings, held_out=None)
    field = problem.objective.field(Particles(positions_of(model)))
    loss = (loss_of(model, batches[0]) + loss_of(model, batches[1])) / 2
    loss.backward()
    slow = torch.stack([layer.particles.grad for layer in model.attention])
    torch.testing.assert_close(field.gradient, 6 * slow)
    torch.testing.assert_close(field.potential[0, 0, 0], loss.detach())


def test_the_label_s_probability_by_hand():
    logits = torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    chances = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
    expected = (chances[0, 1].log() + chances[1, 1].log()) / 2
    found = Likelihood()(Rows(logits, torch.tensor([1, 1])))
    torch.testing.assert_close(found, expected)


def test_it_is_torch_s_adam_on_the_particles():
    model, batches = TinyModel(classes=3).eval(), random_batches(1)
    twin = TinyModel(classes=3).eval()
    particles = [layer.particles for layer in twin.attention]
    # The engine's force is N times the gradient, which Adam does not feel.
    adam = torch.optim.Adam(particles, 0.05, betas=(0.9, 0.99), eps=1e-8 / 6)
    for _ in range(5):
        adam.zero_grad()
        loss_of(twin, batches[0]).backward()
        adam.step()
    result = align(model, batches, held_out=None, max_steps=5, **ON_LOSS)
    torch.testing.assert_close(
        result.positions, positions_of(twin), atol=1e-5, rtol=1e-4
    )


class Marked(nn.Module):
    """Says which sign it sees most."""

    def __init__(self):
        super().__init__()
        self.layer = marked_model()

    def forward(self, x):
        sign = self.layer(x).mean(dim=1)[:, 1:]
        return torch.cat([-3 * sign, 3 * sign], dim=-1)


def test_the_loss_falls_on_batches_that_move_nothing():
    result = align(Marked(), marked_batches(8), max_epochs=5, **ON_LOSS)
    first, last = result.history[0], result.history[-1]
    assert last["held_out"] > first["held_out"]
    assert last["alignment"] > first["alignment"]


def test_all_that_moves_without_noise_is_drift():
    result = align(TinyModel(classes=3), random_batches(3), max_steps=4, **ON_LOSS)
    moved = (result.positions - result.stats.start).double()
    torch.testing.assert_close(result.stats.drift, moved, atol=1e-5, rtol=1e-4)
    assert not result.drowned
    assert "There was no noise." in result.summary()


def test_resumed_to_the_bit(tmp_path):
    """Adam's memory of past gradients is saved with the particles."""
    batches = random_batches(4)
    options = {"held_out": None, "seed": 5, "record_every": 1, **ON_LOSS}
    whole = align(TinyModel(classes=3), batches, max_steps=9, **options)
    model = TinyModel(classes=3)
    align(model, batches, max_steps=4, **options).save(tmp_path / "run")
    rest = align(model, batches, max_steps=9, resume=tmp_path / "run", **options)
    assert torch.equal(rest.positions, whole.positions)
    torch.testing.assert_close(rest.stats.drift, whole.stats.drift)


def test_mistakes_are_named():
    with pytest.raises(ParameterError, match="`inverse_temperature` must be infinite"):
        AlignmentSettings(sampler="adam")
    with pytest.raises(ParameterError, match="did you mean 'adam'"):
        AlignmentSettings(sampler="adm")
    with pytest.raises(ParameterError, match="`level` must be 'sequence' or 'token'"):
        align(TinyModel(), random_batches(2), objective="likelihood", level="head")
