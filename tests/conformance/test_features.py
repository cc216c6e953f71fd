"""What every registered feature map must do."""

import math

import pytest
import torch

from coulomb._support.errors import ParameterError
from coulomb.features import (
    Elu,
    Favor,
    Fourier,
    FourierPair,
    Particles,
    Softplus,
    SquaredSigmoid,
    as_feature_map,
    feature_maps,
    kernel,
    projections,
    renormalise,
)

NAMES = list(feature_maps)
RENORMALISED = [name for name in NAMES if feature_maps.build(name).normalised]


def draw_particles(generator, *shape, dtype=torch.float64):
    positions = torch.randn(*shape, generator=generator, dtype=torch.float64)
    phases = 6.28 * torch.rand(*shape[:-1], generator=generator, dtype=torch.float64)
    return Particles(positions.to(dtype), phases.to(dtype))


@pytest.mark.parametrize("name", NAMES)
class TestEveryMap:
    def test_shape_and_dtype(self, name, generator):
        for dtype in (torch.float32, torch.float64):
            particles = draw_particles(generator, 7, 3, dtype=dtype)
            x = torch.randn(5, 3, generator=generator, dtype=dtype)
            features = feature_maps.build(name)(x, particles)
            assert features.shape == (5, feature_maps.build(name).n_features(7))
            assert features.dtype == dtype

    def test_groups_do_not_mix(self, name, generator):
        phi = feature_maps.build(name)
        particles = draw_particles(generator, 2, 4, 6, 3)
        x = torch.randn(2, 4, 5, 3, generator=generator, dtype=torch.float64)
        together = phi(x, particles)
        for i in range(2):
            for j in range(4):
                alone = Particles(particles.positions[i, j], particles.phases[i, j])
                torch.testing.assert_close(together[i, j], phi(x[i, j], alone))

    def test_gradient(self, name, generator):
        phi = feature_maps.build(name)
        particles = draw_particles(generator, 4, 3)
        x = torch.randn(2, 3, generator=generator, dtype=torch.float64)

        def features(inputs, positions, phases):
            return phi(inputs, Particles(positions, phases))

        operands = (x, particles.positions, particles.phases)
        assert torch.autograd.gradcheck(
            features, tuple(o.clone().requires_grad_() for o in operands)
        )

    def test_gram_matrix_is_positive_semidefinite(self, name, generator):
        particles = draw_particles(generator, 9, 3)
        x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
        gram = kernel(feature_maps.build(name), x, x, particles)
        torch.testing.assert_close(gram, gram.T)
        assert torch.linalg.eigvalsh(gram).min() > -1e-12

    def test_positivity_as_declared(self, name, generator):
        phi = feature_maps.build(name)
        particles = draw_particles(generator, 50, 3)
        x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
        assert bool((phi(x, particles) >= 0).all()) == phi.positive

    @pytest.mark.parametrize("norm", [1e-4, 1.0, 1e2, 1e4])
    def test_finite_at_any_norm(self, name, norm, generator):
        if feature_maps.build(name).needs_shift and norm > 1:
            pytest.skip("features alone overflow; attention takes their logarithms")
        particles = draw_particles(generator, 16, 4, dtype=torch.float32)
        x = torch.randn(8, 4, generator=generator)
        x = norm * x / x.norm(dim=-1, keepdim=True)
        assert feature_maps.build(name)(x, particles).isfinite().all()

    def test_logarithms(self, name, generator):
        phi = feature_maps.build(name)
        particles = draw_particles(generator, 9, 3)
        x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        logs = phi.log_features(x, particles)
        assert (logs is not None) == phi.has_log_features
        if logs is not None:
            torch.testing.assert_close(logs.exp(), phi(x, particles))
        if phi.exponential:
            rows = logs - projections(x, particles) / phi.temperature
            torch.testing.assert_close(rows, rows[:, :1].expand_as(rows))


def test_what_maps_declare_is_what_the_loops_know():
    pytest.importorskip("numba")
    from coulomb.kernels import packed_encoder as maps

    codes = {name: feature_maps.build(name).loop_code for name in NAMES}
    names = {code: name for name, code in codes.items() if code is not None}
    known = {"softmaxfeat": "SOFTMAX"}
    for code, name in names.items():
        assert getattr(maps, known.get(name, name).upper()) == code
    assert len(names) == 6


@pytest.mark.parametrize("kind", [Elu, Softplus])
def test_the_floor_keeps_features_where_all_would_vanish(kind, generator):
    particles = Particles(torch.ones(4, 3))
    deep = -300 * torch.ones(1, 3)  # the function alone is zero in every feature
    torch.testing.assert_close(kind()(deep, particles), torch.full((1, 4), 0.5))
    # Three features are the floor, and one is what the function gives at a = 3.
    particles = Particles(torch.tensor([[1.0], [-99.0], [-99.0], [-99.0]]))
    floor = 0.25
    ratio = kind(floor=floor)(3 * torch.ones(1, 1), particles)[0]
    top = 4.0 if kind is Elu else math.log1p(math.exp(3.0)) + floor
    torch.testing.assert_close(ratio[0] / ratio[1:], torch.full((3,), top / floor))


@pytest.mark.parametrize("name", RENORMALISED)
def test_features_of_an_input_sum_to_the_root_of_their_number(name, generator):
    particles = draw_particles(generator, 16, 4)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    total = feature_maps.build(name)(x, particles).sum(dim=-1)
    torch.testing.assert_close(total, torch.full_like(total, 4.0))


@pytest.mark.parametrize("dim", [2, 5])
def test_fourier_features_give_the_gaussian_kernel(dim, generator):
    gamma, count = 0.3, 200_000
    positions = math.sqrt(2 * gamma) * torch.randn(
        count, dim, generator=generator, dtype=torch.float64
    )
    phases = 2 * math.pi * torch.rand(count, generator=generator, dtype=torch.float64)
    x = torch.randn(2, dim, generator=generator, dtype=torch.float64)
    exact = torch.exp(-gamma * (x[0] - x[1]).square().sum())
    for phi, bound in ((Fourier(), 2.0), (FourierPair(), 1.0)):
        estimate = kernel(phi, x[:1], x[1:], Particles(positions, phases)).squeeze()
        # Each particle contributes at most `bound`: the standard error is below this.
        assert abs(estimate - exact) < 4 * bound / math.sqrt(count)


def test_favor_is_unbiased_for_the_softmax_kernel(generator):
    count = 400_000
    positions = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    q, k = 0.5 * torch.randn(2, 1, 3, generator=generator, dtype=torch.float64)
    particles = Particles(positions)
    values = (Favor()(q, particles) * Favor()(k, particles)).squeeze() * count
    standard_error = float(values.std() / math.sqrt(count))
    assert abs(float(values.mean() - torch.exp(q @ k.T))) < 4 * standard_error


def test_squared_sigmoid_equals_its_formula(generator):
    particles = draw_particles(generator, 6, 3)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    plain = renormalise(torch.sigmoid(projections(x, particles) / 0.7).square())
    torch.testing.assert_close(SquaredSigmoid(temperature=0.7)(x, particles), plain)


def test_a_callable_is_a_feature_map(generator):
    phi = as_feature_map(lambda x, particles: projections(x, particles).relu())
    particles = draw_particles(generator, 6, 3)
    assert phi(torch.zeros(4, 3, dtype=torch.float64), particles).shape == (4, 6)


def test_messages():
    with pytest.raises(ParameterError, match="did you mean 'softplus'"):
        as_feature_map("softplsu")
    with pytest.raises(TypeError, match="`feature_map` must be a name"):
        as_feature_map(3)
    with pytest.raises(ParameterError, match="`temperature` must be positive; got 0"):
        Softplus(temperature=0)
    with pytest.raises(ParameterError, match="must carry phases"):
        Fourier()(torch.zeros(1, 2), Particles(torch.zeros(3, 2)))
    wrong = as_feature_map(lambda x, particles: x[:, 0])
    with pytest.raises(ParameterError, match=r"shape \(1, 3\).*got \(1,\)"):
        wrong(torch.zeros(1, 2), Particles(torch.zeros(3, 2)))
