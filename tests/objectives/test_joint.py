"""Joint energies against refits, normal densities and automatic differentiation."""

import math

import pytest
import torch

from coulomb.dynamics.langevin import AdamLangevin
from coulomb.dynamics.loop import RunSettings, init_run, run
from coulomb.energy import Hamiltonian
from coulomb.features import Fourier, FourierPair, Particles
from coulomb.objectives import (
    AbstractObjective,
    Evidence,
    LeaveOneOut,
    Sample,
    SharedScales,
)


def make_sample(generator, n=14, dim=3, n_labels=2, *, weighted=False):
    x = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    labels = (
        torch.randn(n, n_labels, generator=generator, dtype=torch.float64) + x[:, :1]
    )
    weights = 0.2 + torch.rand(n, generator=generator, dtype=torch.float64)
    return Sample(x, labels, weights / weights.sum() if weighted else None)


def make_particles(generator, n=5, dim=3, groups=()):
    positions = torch.randn(*groups, n, dim, generator=generator, dtype=torch.float64)
    phases = 6.28 * torch.rand(*groups, n, generator=generator, dtype=torch.float64)
    return Particles(positions, phases)


def refit(features, labels, weights, penalty):
    """Ridge regression with a free intercept, by its normal equations."""
    n = features.shape[-1]
    design = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
    ridge = penalty * torch.eye(n + 1, dtype=torch.float64)
    ridge[n, n] = 0
    gram = design.mT @ (weights.unsqueeze(-1) * design) + ridge
    return torch.linalg.solve(gram, design.mT @ (weights.unsqueeze(-1) * labels))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("phi", [Fourier(), FourierPair()], ids=repr)
def test_leave_one_out_is_a_refit_without_each_row(weighted, phi, generator):
    sample, particles = (
        make_sample(generator, weighted=weighted),
        make_particles(generator),
    )
    features = phi(sample.x, particles)
    features = features / math.sqrt(features.shape[-1])
    weights = sample.size * sample.probabilities
    total = 0.0
    for row in range(sample.size):
        others = torch.arange(sample.size) != row
        found = refit(features[others], sample.labels[others], weights[others], 0.7)
        error = sample.labels[row] - features[row] @ found[:-1] - found[-1]
        total += float(weights[row] * error.square().sum())
    expected = total / sample.labels.numel()
    energy = LeaveOneOut(sample, phi, 0.7).energy(particles)
    assert float(energy) == pytest.approx(expected, rel=1e-10)


def test_evidence_is_the_density_of_the_labels(generator):
    # Centred labels and features: the density of the n - 1 contrasts of each output.
    sample, particles = make_sample(generator), make_particles(generator)
    n, penalty = sample.size, 0.7
    features = Fourier()(sample.x, particles) / math.sqrt(5)
    features = features - features.mean(dim=0)
    labels = sample.labels - sample.labels.mean(dim=0)
    shape = features @ features.mT / penalty + torch.eye(n, dtype=torch.float64)
    noise = (labels * torch.linalg.solve(shape, labels)).sum() / labels.numel()
    law = torch.distributions.MultivariateNormal(
        torch.zeros(n, dtype=torch.float64), noise * shape
    )
    constant = 0.5 * (1 + math.log(2 * math.pi))
    expected = -law.log_prob(labels.mT).sum() / labels.numel() - constant
    energy = Evidence(sample, Fourier(), penalty).energy(particles)
    torch.testing.assert_close(energy, expected)


def test_integer_weights_of_evidence_repeat_rows_up_to_the_count(generator):
    # The noise of the fit is the same; only the number of rows differs.
    sample, particles = make_sample(generator, n=6), make_particles(generator)
    counts = torch.tensor([1, 2, 1, 3, 1, 4])
    twice = Sample(
        sample.x.repeat_interleave(counts, dim=0),
        sample.labels.repeat_interleave(counts, dim=0),
    )
    weighted = Sample(sample.x, sample.labels, counts.double() / counts.sum())
    penalty = 0.5  # relative to the number of rows, 6 and 12
    one = Evidence(twice, Fourier(), 2 * penalty, determinant=0.0).energy(particles)
    two = Evidence(weighted, Fourier(), penalty, determinant=0.0).energy(particles)
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("phi", [Fourier(), FourierPair()], ids=repr)
@pytest.mark.parametrize("groups", [(), (2,)])
@pytest.mark.parametrize(
    "build",
    [
        LeaveOneOut,
        Evidence,
        lambda *args: Evidence(*args, determinant=0.0),
    ],
    ids=["leave-one-out", "evidence", "no determinant"],
)
def test_closed_forms_are_the_automatic_gradients(
    build, groups, phi, weighted, generator
):
    sample = make_sample(generator, weighted=weighted)
    particles = make_particles(generator, groups=groups)
    objective = build(sample, phi, 0.3)
    fast, slow = (
        objective.field(particles),
        AbstractObjective.field(objective, particles),
    )
    torch.testing.assert_close(fast.potential, slow.potential)
    torch.testing.assert_close(fast.gradient, slow.gradient)


@pytest.mark.parametrize("kind", [LeaveOneOut, Evidence])
def test_shared_scales_have_the_automatic_gradient(kind, generator):
    sample, particles = make_sample(generator), make_particles(generator)
    scales = SharedScales(kind(sample, Fourier(), 0.3), particles)
    at = Particles(torch.randn(1, 3, generator=generator, dtype=torch.float64))
    fast, slow = scales.field(at), AbstractObjective.field(scales, at)
    torch.testing.assert_close(fast.gradient, slow.gradient)
    torch.testing.assert_close(fast.potential, slow.potential)


@pytest.mark.parametrize("kind", [LeaveOneOut, Evidence])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_order_of_particles_and_rows_does_not_matter(kind, weighted, generator):
    sample = make_sample(generator, weighted=weighted)
    particles = make_particles(generator)
    rows, order = torch.randperm(14), torch.randperm(5)
    weights = None if sample.weights is None else sample.weights[rows]
    other = Sample(sample.x[rows], sample.labels[rows], weights)
    turned = Particles(particles.positions[order], particles.phases[order])
    torch.testing.assert_close(
        kind(sample, Fourier()).energy(particles),
        kind(other, Fourier()).energy(turned),
    )


@pytest.mark.parametrize("kind", [LeaveOneOut, Evidence])
def test_the_best_penalty_is_that_of_lowest_energy(kind, generator):
    sample, particles = make_sample(generator), make_particles(generator)
    penalties = (0.01, 0.1, 1.0, 10.0)
    values = [float(kind(sample, Fourier(), a).energy(particles)) for a in penalties]
    best = kind(sample, Fourier()).with_best_penalty(particles, penalties)
    assert best.penalty == penalties[values.index(min(values))]


def test_two_equal_particles_repel_by_the_determinant(generator):
    sample = make_sample(generator, n=40)
    particles = make_particles(generator, n=2)
    same = Particles(
        particles.positions[:1].repeat(2, 1), particles.phases[:1].repeat(2)
    )
    volume = [
        float(Evidence(sample, Fourier(), 0.1).energy(each))
        - float(Evidence(sample, Fourier(), 0.1, determinant=0.0).energy(each))
        for each in (same, particles)
    ]
    # The determinant's term is a cost of volume: equal features have less of it ...
    assert volume[0] < volume[1]
    # ... and less to explain the labels with.
    noise = [
        float(Evidence(sample, Fourier(), 0.1, determinant=0.0).energy(each))
        for each in (same, particles)
    ]
    assert noise[1] < noise[0]


@pytest.mark.parametrize("kind", [LeaveOneOut, Evidence])
def test_a_batch_of_all_rows_is_the_sample(kind, generator):
    sample, particles = make_sample(generator), make_particles(generator)
    objective = kind(sample, Fourier(), 0.3)
    batch = objective.batch(torch.arange(14))
    torch.testing.assert_close(batch.energy(particles), objective.energy(particles))
    assert objective.on(make_sample(generator, n=7)).sample.size == 7


@pytest.mark.parametrize("batch_size", [None, 40])
def test_the_loop_lowers_the_energy(batch_size, generator):
    sample = make_sample(generator, n=80, n_labels=1)
    particles = make_particles(generator, n=6)
    energy = Hamiltonian(Evidence(sample, Fourier(), 0.3), strength=1e-3)
    sampler = AdamLangevin(0.02, batch_size=batch_size)
    begun = init_run(sampler, particles, generator=generator)
    ended = run(begun, sampler, energy, RunSettings(60))
    assert ended.history[-1]["energy"] < ended.history[0]["energy"] - 0.02


@pytest.mark.parametrize("kind", [LeaveOneOut, Evidence])
def test_bad_penalties_and_samples_are_refused(kind, generator):
    with pytest.raises(ValueError, match="`penalty` must be"):
        kind(make_sample(generator), Fourier(), 0.0)
    with pytest.raises(ValueError, match="at least two rows; got 1"):
        kind(make_sample(generator, n=1), Fourier())


@pytest.mark.parametrize("weighted", [False, True])
def test_the_tuned_regression_is_a_refit(weighted, generator):
    sample = make_sample(generator, weighted=weighted)
    particles = make_particles(generator)
    objective = LeaveOneOut(sample, Fourier())
    tuned = objective.tuned(particles)
    assert tuned.penalty == objective.with_best_penalty(particles).penalty
    weights = sample.size * sample.probabilities
    errors = weights.unsqueeze(-1) * tuned.errors.square()
    best = LeaveOneOut(sample, Fourier(), tuned.penalty)
    torch.testing.assert_close(errors.mean(), best.energy(particles))
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    features, new = (
        Fourier()(each, particles) / math.sqrt(5) for each in (sample.x, x)
    )
    found = refit(features, sample.labels, weights, tuned.penalty)
    expected = new @ found[:-1] + found[-1]
    torch.testing.assert_close(best.predict(particles, x), expected)
    torch.testing.assert_close(objective.predict(particles, x, tuned.weights), expected)


def test_penalties_below_the_rounding_of_single_precision(generator):
    x = 0.01 * torch.randn(4000, 3, generator=generator)
    sample = Sample(x, x[:, :1].clone())
    positions = 0.1 * torch.randn(64, 3, generator=generator)
    particles = Particles(positions, torch.rand(64, generator=generator))
    field = Evidence(sample, Fourier(), 1e-9).field(particles)
    assert torch.isfinite(field.gradient).all()
