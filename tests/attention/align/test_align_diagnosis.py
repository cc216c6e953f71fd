"""The controls find what was learned, and what was not, and why."""

import json
from dataclasses import replace

import pytest
import torch
from align_cases import TinyModel, marked_batches, marked_model, random_batches
from torch import nn

from coulomb.attention.align.diagnosis import BLIND, diagnose, label_cosines
from coulomb.attention.align.problem import PAPER
from coulomb.attention.align.run import align, run_twin
from coulomb.features import Particles

SIZE = {"size": 32, "length": 6}
QUICK = {"n_twins": 7, "n_shuffles": 120}


@pytest.fixture(scope="module")
def learned():
    batches = marked_batches(10, **SIZE)
    return align(marked_model(), batches, max_epochs=4, record_every=16)


@pytest.fixture(scope="module")
def paper():
    batches = marked_batches(10, **SIZE)
    return align(
        marked_model(), batches, settings=PAPER, drift="plain", record_every=40
    )


def test_a_problem_that_can_be_learned_is_learned(learned):
    """Both tests at 1 %: noise-only runs, and labels of others."""
    found = diagnose(learned, **QUICK)
    assert found.learned
    assert found.verdict.startswith("Phase A learned: held-out alignment (centred)")
    assert found.after > 0.5 > found.before
    assert found.p_value < 0.01
    assert found.p_shuffled == pytest.approx(1 / 121)
    assert float(found.cosines.abs().max()) < BLIND
    # Labels, not noise, brought the particles where they are.
    assert float(found.apart) > 3 * float(found.moved_by_noise)


def test_the_paper_s_settings_without_the_factor_n_did_not_learn(paper):
    found = diagnose(paper, **QUICK)
    assert not found.learned
    assert found.verdict.startswith("Phase A did not learn: its drift is drowned")
    assert "hardly sees the labels (gradient cosine 0.9" in found.verdict
    assert float(found.drift_to_noise.max()) < 0.05
    torch.testing.assert_close(found.moved, found.moved_by_noise, rtol=0.05, atol=0)
    assert found.judged_by == "centred"
    # Judged by what it was asked for, it did not learn either.
    by_its_own = diagnose(paper, objective="within-class", n_twins=3, n_shuffles=120)
    assert by_its_own.judged_by == "within-class"
    assert not by_its_own.learned


def test_gains_that_any_labels_give_are_not_learned_from_them():
    """The within-class alignment finds the marks here, whatever the labels are."""
    batches = marked_batches(10, **SIZE)
    blind = align(marked_model(), batches, objective="within-class", max_epochs=3)
    found = diagnose(blind, **QUICK)
    assert found.verdict.startswith("Phase A learned, but perhaps not from the labels")
    found = diagnose(blind, n_label_twins=3, **QUICK)
    assert not found.learned
    assert found.label_share < 0.1
    assert "gains most of it on labels without meaning too" in found.verdict
    seeing = align(marked_model(), batches, max_epochs=3)
    found = diagnose(seeing, n_label_twins=3, **QUICK)
    assert found.learned
    assert found.label_share > 0.9
    assert "trained on shuffled labels" in found.verdict


def test_the_control_that_a_gain_cannot_be_told_from_is_named(learned):
    found = diagnose(learned, **QUICK)
    doubtful = replace(found, learned=False, p_shuffled=0.2)
    assert doubtful.verdict.startswith(
        "Phase A did not learn: its gain cannot be told from that of shuffled held-out"
    )
    unlucky = replace(found, learned=False, after=found.before - 0.01)
    assert "did not carry over to other data" in unlucky.verdict
    worse = replace(unlucky, training_gain=-0.1)
    assert "did not learn: no alignment was gained" in worse.verdict


def test_without_noise_twins_are_no_test(learned):
    found = replace(diagnose(learned, **QUICK), twins=(0.1,) * 3)
    assert "without labels 0.1, shuffled" in found.verdict


def test_labels_without_meaning_are_not_learned():
    """A cold run on shuffled labels gains in training only."""
    generator = torch.Generator().manual_seed(1)
    batches = [
        (x, torch.randint(2, y.shape, generator=generator))
        for x, y in marked_batches(5, **SIZE)
    ]
    result = align(marked_model(), batches, max_epochs=4, record_every=16)
    found = diagnose(result, **QUICK)
    assert found.training_gain > 0
    assert not found.learned
    assert "did not carry over to other data" in found.verdict


class Loudness(nn.Module):
    """Particles that can only make the outputs louder."""

    feature_map = "none"

    def __init__(self):
        super().__init__()
        self.particles = nn.Parameter(torch.ones(1, 4, 2, dtype=torch.float64))

    def forward(self, x):
        return x.double() * self.particles.mean()


def test_larger_outputs_alone_are_not_learning():
    """The within-class alignment grows, and more so for true labels."""
    batches = marked_batches(10, **SIZE)
    result = align(
        Loudness(), batches, objective="within-class", max_epochs=3, step_size=10.0
    )
    first, last = result.history[0], result.history[-1]
    assert last["held_out"] > 1.5 * first["held_out"] > 0
    assert not diagnose(result, **QUICK).learned


def test_diagnosing_changes_nothing(learned):
    model = learned.problem.network.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mode, state = model.training, torch.random.get_rng_state()
    first, second = (diagnose(learned, **QUICK).record() for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    assert first["verdict"].startswith("Phase A learned")
    assert model.training is mode
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_twin_has_the_same_noise():
    """Without walls and repulsion, run and twin differ by the drift alone."""
    batches = marked_batches(4, **SIZE)
    result = align(marked_model(), batches, max_epochs=2, strength=0.0)
    start, steps = Particles(result.stats.start), result.run.state.step
    twin = run_twin(result.problem, start, steps, seed=0)
    torch.testing.assert_close(
        result.positions - twin.positions, result.stats.drift.float()
    )
    other = run_twin(result.problem, start, steps, seed=1)
    assert not torch.equal(other.positions, twin.positions)
    assert not torch.equal(other.positions, start.positions)


def test_the_objectives_differ_in_what_they_see_of_the_labels():
    """Measured on text before the library began: 0.975 to 0.998, and at most 0.12."""
    cosines = {}
    for objective in ("within-class", "centred"):
        batches = marked_batches(5, **SIZE)
        result = align(marked_model(), batches, objective=objective, max_epochs=0)
        start = Particles(result.stats.start)
        cosines[objective] = float(label_cosines(result.problem.objective, start))
    assert cosines["within-class"] > BLIND
    assert cosines["centred"] < 0.5


def test_layers_and_heads_are_told_apart():
    batches = random_batches(4, size=12)
    result = align(TinyModel(classes=3), batches, max_epochs=1)
    found = diagnose(result, n_twins=2, n_shuffles=5)
    for groups in (found.drift_to_noise, found.moved, found.apart, found.cosines):
        assert groups.shape == (2, 2)
        assert groups.isfinite().all()
    assert "cosine" in found.summary()


def test_mistakes_are_named(learned):
    alone = align(marked_model(), marked_batches(1), held_out=None, max_epochs=1)
    with pytest.raises(ValueError, match="with held-out batches"):
        diagnose(alone)
    with pytest.raises(ValueError, match="`n_twins` must be at least 2"):
        diagnose(learned, n_twins=1)
