"""Alignment energies against their double sums."""

import math

import pytest
import torch

from coulomb._support.errors import ParameterError
from coulomb.features import Fourier, FourierPair, Particles, SoftmaxFeatures
from coulomb.objectives import (
    AbstractObjective,
    Alignment,
    CentredAlignment,
    FourierAlignment,
    GaussianPrior,
    Sample,
    centred_alignment,
    label_matrix,
)


def make_sample(generator, n=9, dim=3, n_labels=2, *, weighted=False):
    x = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    labels = torch.randn(n, n_labels, generator=generator, dtype=torch.float64)
    weights = torch.rand(n, generator=generator, dtype=torch.float64)
    return Sample(x, labels, weights / weights.sum() if weighted else None)


def make_particles(generator, n=5, dim=3):
    positions = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    phases = 6.28 * torch.rand(n, generator=generator, dtype=torch.float64)
    return Particles(positions, phases)


def double_sum(sample, features):
    """The definition: every pair of different samples, particle by particle."""
    q, labels = sample.probabilities, sample.labels
    total, mass = torch.zeros(features.shape[-1], dtype=torch.float64), 0.0
    for i in range(sample.size):
        for j in range(sample.size):
            if i != j:
                weight = q[i] * q[j]
                mass += float(weight)
                total += weight * (labels[i] @ labels[j]) * features[i] * features[j]
    return -total / mass


def numerical_gradient(function, positions, step=1e-6):
    gradient = torch.zeros_like(positions)
    for index in range(positions.numel()):
        ahead, behind = positions.clone(), positions.clone()
        ahead.view(-1)[index] += step
        behind.view(-1)[index] -= step
        gradient.view(-1)[index] = (function(ahead) - function(behind)) / (2 * step)
    return gradient


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("phi", [Fourier(), SoftmaxFeatures(0.5)], ids=repr)
def test_alignment_is_the_double_sum(weighted, phi, generator):
    sample = make_sample(generator, weighted=weighted)
    particles = make_particles(generator)
    expected = double_sum(sample, phi(sample.x, particles))
    objective = Alignment(sample, phi)
    torch.testing.assert_close(objective.potential(particles), expected)
    torch.testing.assert_close(objective.energy(particles), expected.mean())
    if phi == Fourier():  # one-body: a particle's potential depends on it alone
        gradient = numerical_gradient(
            lambda w: objective.potential(particles._replace(positions=w)).sum(),
            particles.positions,
        )
        torch.testing.assert_close(
            objective.field(particles).gradient, gradient, rtol=1e-6, atol=1e-8
        )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n_labels", [1, 4])
@pytest.mark.parametrize("compiled", ["1", "0"])
def test_fourier_alignment_is_the_phase_average(
    weighted, n_labels, compiled, generator, monkeypatch
):
    monkeypatch.setenv("COULOMB_NUMBA", compiled)
    sample = make_sample(generator, n_labels=n_labels, weighted=weighted)
    particles = make_particles(generator)
    features = FourierPair()(sample.x, particles)
    cosine, sine = features[:, :5], features[:, 5:]
    expected = double_sum(sample, cosine) + double_sum(sample, sine)
    objective = FourierAlignment(sample)
    assert objective.compiles(particles.positions) == (compiled == "1")
    torch.testing.assert_close(objective.potential(particles), expected)
    field = objective.field(particles)
    torch.testing.assert_close(field.potential, expected)
    gradient = numerical_gradient(
        lambda w: objective.potential(Particles(w)).sum(), particles.positions
    )
    torch.testing.assert_close(field.gradient, gradient, rtol=1e-6, atol=1e-8)


def test_averaging_the_phase_of_the_fixed_form_gives_the_closed_form(generator):
    sample = make_sample(generator)
    positions = make_particles(generator).positions
    closed = FourierAlignment(sample).potential(Particles(positions))
    grid = torch.arange(64, dtype=torch.float64) * (2 * math.pi / 64)
    fixed = torch.stack(
        [
            Alignment(sample, Fourier()).potential(
                Particles(positions, torch.full((5,), float(phase)))
            )
            for phase in grid
        ]
    )
    # A trigonometric polynomial of degree two is averaged exactly by the grid.
    torch.testing.assert_close(fixed.mean(dim=0), closed)


def test_the_lemma_of_the_paper_with_its_missing_factor(generator):
    """Lemma KTA_energy_bias: -(2/n^2)|y'C|^2 needs 1/N and a diagonal."""
    sample = make_sample(generator, n_labels=1)
    signs = sample.labels.sign()
    sample = Sample(sample.x, signs)
    particles = make_particles(generator)
    n, y = sample.size, signs[:, 0]
    cosine = (sample.x @ particles.positions.T + particles.phases).cos()
    total = (y @ cosine).square() - cosine.square().sum(dim=0)
    energy = -2 / (n * (n - 1)) * total.mean()
    torch.testing.assert_close(Alignment(sample, Fourier()).energy(particles), energy)


def test_integer_weights_are_repeated_samples_over_all_pairs(generator):
    sample = make_sample(generator, n=4)
    counts = torch.tensor([1, 3, 2, 1])
    repeated = Sample(
        sample.x.repeat_interleave(counts, dim=0),
        sample.labels.repeat_interleave(counts, dim=0),
    )
    weighted = Sample(sample.x, sample.labels, counts / counts.sum())
    particles = make_particles(generator)
    for make in (FourierAlignment, lambda s, **k: Alignment(s, Fourier(), **k)):
        torch.testing.assert_close(
            make(weighted, distinct_pairs=False).potential(particles),
            make(repeated, distinct_pairs=False).potential(particles),
        )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fourier", [False, True])
def test_batches_estimate_the_gradient_without_bias(weighted, fourier, generator):
    sample = make_sample(generator, n=6, weighted=weighted)
    particles = make_particles(generator, n=2)
    objective = FourierAlignment(sample) if fourier else Alignment(sample, Fourier())
    exact = objective.field(particles).gradient
    draws = torch.multinomial(
        sample.probabilities, 3 * 4000, replacement=True, generator=generator
    ).reshape(4000, 3)
    values = torch.stack(
        [objective.batch(draw).field(particles).gradient for draw in draws]
    )
    standard_error = values.std(dim=0) / math.sqrt(4000)
    assert ((values.mean(dim=0) - exact).abs() < 4 * standard_error).all()


def test_centred_alignment_is_the_matrix_formula(generator):
    for weighted in (False, True):
        sample = make_sample(generator, weighted=weighted)
        particles = make_particles(generator)
        q = sample.probabilities
        features = Fourier()(sample.x, particles)
        centring = torch.eye(9, dtype=torch.float64) - q.repeat(9, 1)
        root = q.sqrt().diag()
        gram = root @ centring @ features @ features.T @ centring.T @ root
        target = root @ centring @ sample.labels @ sample.labels.T @ centring.T @ root
        expected = (gram * target).sum() / (gram.norm() * target.norm())
        value = centred_alignment(features, sample.labels, q)
        torch.testing.assert_close(value, expected)
        energy = CentredAlignment(sample, Fourier())
        torch.testing.assert_close(energy.energy(particles), -expected)
        gradient = 5 * numerical_gradient(
            lambda w, e=energy, p=particles: e.energy(p._replace(positions=w)),
            particles.positions,
        )
        torch.testing.assert_close(
            energy.field(particles).gradient, gradient, rtol=1e-5, atol=1e-8
        )


def test_perfect_features_have_alignment_one_and_constant_ones_zero():
    labels = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    assert float(centred_alignment(labels, labels)) == pytest.approx(1)
    constant = torch.ones(4, 3, requires_grad=True)
    alignment = centred_alignment(constant, labels)
    assert float(alignment.detach()) == 0
    alignment.backward()
    assert torch.equal(constant.grad, torch.zeros(4, 3))


def test_permuting_particles_permutes_what_they_feel(generator):
    sample, particles = make_sample(generator), make_particles(generator)
    order = torch.tensor([3, 1, 4, 0, 2])
    swapped = Particles(particles.positions[order], particles.phases[order])
    for objective in (
        Alignment(sample, Fourier()),
        FourierAlignment(sample),
        CentredAlignment(sample, Fourier()),
    ):
        before, after = objective.field(particles), objective.field(swapped)
        torch.testing.assert_close(before.potential[order], after.potential)
        torch.testing.assert_close(before.gradient[order], after.gradient)


def test_gaussian_prior_keeps_the_spectral_law(generator):
    """Its gradient is minus the score of N(0, v), divided by beta."""
    prior = GaussianPrior(variance=0.7, inverse_temperature=20.0)
    particles = make_particles(generator)
    law = torch.distributions.Normal(0.0, math.sqrt(0.7))
    positions = particles.positions.clone().requires_grad_()
    (score,) = torch.autograd.grad(law.log_prob(positions).sum(), positions)
    torch.testing.assert_close(prior.field(particles).gradient, -score / 20)
    assert GaussianPrior(1.0, math.inf).precision == 0


class TestLabels:
    y = torch.tensor([0, 2, 1, 1, 2, 2])

    def test_one_hot_products_say_who_belongs_together(self):
        labels = label_matrix(self.y, kind="one-hot", n_classes=3)
        same = (self.y[:, None] == self.y).double()
        torch.testing.assert_close(labels @ labels.T, same)

    @pytest.mark.parametrize(
        "kind", ["centred", "balanced", "centred-signs", "regression"]
    )
    def test_centred_labels_have_mean_zero_under_the_weights(self, kind):
        weights = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.1, 0.2], dtype=torch.float64)
        y = self.y.clamp_max(1) if kind == "centred-signs" else self.y
        labels = label_matrix(y, kind=kind, n_classes=3, weights=weights)
        assert float((weights @ labels).abs().max()) < 1e-15

    def test_every_class_weighs_the_same_when_balanced(self):
        labels = label_matrix(self.y, kind="balanced", n_classes=3)
        share = torch.bincount(self.y) / 6
        spread = labels.square().mean(dim=0)
        torch.testing.assert_close(spread, 1 - share.double())

    def test_scale_of_regression_targets_does_not_matter(self):
        y = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)
        torch.testing.assert_close(
            label_matrix(y, kind="regression"),
            label_matrix(1000 * y + 7, kind="regression"),
        )

    def test_unknown_kind(self):
        with pytest.raises(ParameterError, match="`kind` must be one of"):
            label_matrix(self.y, kind="centered")


def test_messages(generator):
    with pytest.raises(ParameterError, match="one row per sample"):
        Sample(torch.zeros(3, 2), torch.zeros(2, 1))
    with pytest.raises(ParameterError, match="at least two samples"):
        FourierAlignment(Sample(torch.zeros(1, 2), torch.ones(1, 1)))
    with pytest.raises(ParameterError, match="one feature per particle"):
        Alignment(make_sample(generator), FourierPair())
    with pytest.raises(ParameterError, match="`batch_size` must be at least 2; got 1"):
        FourierAlignment(make_sample(generator)).batch(torch.tensor([1]))


def test_an_energy_that_sees_no_particle_pushes_none(generator):
    """As where all tokens of short texts are compared without particles."""
    other = torch.ones((), dtype=torch.float64, requires_grad=True)

    class Blind(AbstractObjective):
        def energy(self, particles):
            return 3 * other.expand(particles.positions.shape[:-2])

    found = Blind().field(make_particles(generator))
    assert torch.equal(found.gradient, torch.zeros(5, 3, dtype=torch.float64))
    assert found.potential.tolist() == [3.0] * 5
