"""What interactions and their sums must do."""

import math

import pytest
import torch

from coulomb._support.errors import ParameterError
from coulomb.interactions import (
    AbstractInteraction,
    Coulomb,
    ExactSum,
    FarFieldSum,
    Log,
    RandomBatchSum,
    Riesz,
    _tiled_sum,
    interactions,
    pair_energy,
    pair_sums,
)

EXPONENTS = [-1.9, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.7]


def double_sum(interaction, positions):
    """The definition, pair by pair, differentiable in the positions."""
    count = positions.shape[0]
    total = positions.new_zeros(())
    for k in range(count):
        for l in range(count):  # noqa: E741
            if k != l:
                total = total + interaction.radial((positions[k] - positions[l]).norm())
    return total / (2 * count * (count - 1))


@pytest.mark.parametrize("s", EXPONENTS)
class TestRiesz:
    def test_repels(self, s):
        distance = torch.linspace(0.1, 5, 100, dtype=torch.float64)
        assert (Riesz(s).radial(distance).diff() < 0).all()
        assert (Riesz(s).slope(distance) < 0).all()

    def test_slope_is_the_derivative(self, s):
        distance = torch.linspace(0.1, 5, 50, dtype=torch.float64, requires_grad=True)
        (derivative,) = torch.autograd.grad(Riesz(s).radial(distance).sum(), distance)
        torch.testing.assert_close(Riesz(s).slope(distance) * distance, derivative)

    def test_taylor_coefficients(self, s):
        square = torch.linspace(0.5, 5, 50, dtype=torch.float64)
        by_hand = Riesz(s).taylor(square)
        by_autograd = AbstractInteraction.taylor(Riesz(s), square)
        for mine, automatic in zip(by_hand, by_autograd, strict=True):
            torch.testing.assert_close(mine, automatic)

    def test_scaling_law(self, s):
        distance = torch.linspace(0.1, 5, 50, dtype=torch.float64)
        scaled = Riesz(s).radial(3 * distance)
        if s == 0:
            expected = Riesz(s).radial(distance) - math.log(3)
        else:
            expected = 3**-s * Riesz(s).radial(distance)
        torch.testing.assert_close(scaled, expected)

    @pytest.mark.parametrize("truncation", [0.0, 0.4])
    @pytest.mark.parametrize("tile", [3, 64])
    def test_every_sum_equals_the_double_sum(self, s, truncation, tile, generator):
        interaction = Riesz(s, truncation)
        positions = torch.randn(11, 3, generator=generator, dtype=torch.float64)
        variable = positions.clone().requires_grad_()
        energy = double_sum(interaction, variable)
        (gradient,) = torch.autograd.grad(11 * energy, variable)
        for field in (
            ExactSum()(interaction, positions),
            _tiled_sum(interaction, positions, tile),
            RandomBatchSum(100)(interaction, positions, generator=generator),
            FarFieldSum(100)(interaction, positions, generator=generator),
        ):
            torch.testing.assert_close(0.5 * field.potential.mean(), energy.detach())
            torch.testing.assert_close(field.gradient, gradient)


def test_names():
    assert set(interactions) == {"riesz", "log"}
    assert set(pair_sums) == {"exact", "random-batch", "far-field"}
    assert Log(0.1) == Riesz(0.0, 0.1)


@pytest.mark.parametrize(("dim", "s"), [(1, -1.0), (2, 0.0), (3, 1.0), (5, 3.0)])
def test_coulomb_is_riesz_with_s_two_below_the_dimension(dim, s):
    assert Coulomb(dim) == Riesz(s)


@pytest.mark.parametrize("s", [1.0, 3.0])
def test_coulomb_is_harmonic_off_the_origin(s):
    dim = int(s) + 2
    point = torch.full((dim,), 0.6, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(
        lambda p: Coulomb(dim).radial(p.norm()), point
    )
    assert abs(float(hessian.trace())) < 1e-9


@pytest.mark.parametrize("sum_of", [ExactSum(), ExactSum(tile=2)])
def test_close_particles_far_from_the_origin(sum_of, monkeypatch):
    """Distances of 1e-6 at norm 100 must not cancel."""
    positions = torch.zeros(4, 64, dtype=torch.float64)
    positions[:, 0] = 100.0
    positions[1, 1], positions[2, 1], positions[3, 2] = 1e-6, 5.0, 7.0
    gap = positions[1, 1] - positions[0, 1]
    exact = sum(float(-(positions[0] - positions[k]).norm().log()) for k in (1, 2, 3))
    field = sum_of(Riesz(0), positions)  # 64 dimensions: matrix products
    assert abs(float(field.potential[0]) - exact / 3) < 1e-9
    assert abs(float(field.gradient[0, 1] * gap) - 1 / 3) < 1e-6
    low = sum_of(Riesz(0), positions[:, :3].contiguous())  # compiled differences
    torch.testing.assert_close(low.gradient, field.gradient[:, :3])


class TestCoincidentParticles:
    @pytest.mark.parametrize("dim", [1, 3, 40])
    @pytest.mark.parametrize("truncation", [0.0, 0.1])
    @pytest.mark.parametrize(
        "sum_of", [ExactSum(), RandomBatchSum(10), FarFieldSum(10)], ids=repr
    )
    def test_are_pushed_apart_the_same_way_every_time(self, dim, truncation, sum_of):
        positions = torch.ones(3, dim, dtype=torch.float64)
        positions[2] = 2.0
        fields = [
            sum_of(
                Riesz(1.0, truncation),
                positions,
                generator=torch.Generator().manual_seed(seed),
            )
            for seed in (0, 1)
        ]
        first = fields[0].gradient
        torch.testing.assert_close(first, fields[1].gradient)
        assert first.isfinite().all()
        assert float((first[0] - first[1]).norm()) > 0
        # Newton's third law
        torch.testing.assert_close(
            first.sum(dim=0), torch.zeros(dim, dtype=torch.float64), atol=1e-3, rtol=0
        )

    def test_energy(self):
        positions = torch.zeros(2, 2, dtype=torch.float64)
        assert pair_energy(Riesz(1.0), positions) == math.inf
        assert pair_energy(Riesz(0.0), positions) == math.inf
        assert pair_energy(Riesz(-1.0), positions) == 0
        assert pair_energy(Riesz(1.0, truncation=0.1), positions) == 5.0

    def test_compiled_and_plain_push_alike(self):
        positions = torch.zeros(5, 3, dtype=torch.float64)
        positions[3:] = 1.0
        compiled = ExactSum()(Riesz(0.0), positions)
        plain = _tiled_sum(Riesz(0.0), positions, 2)
        torch.testing.assert_close(compiled.gradient, plain.gradient)

    def test_force_inside_the_truncation_is_zero(self):
        positions = torch.tensor([[0.0], [0.05]], dtype=torch.float64)
        field = ExactSum()(Riesz(1.0, truncation=0.1), positions)
        assert torch.equal(field.gradient, torch.zeros_like(positions))


@pytest.mark.parametrize("name", list(pair_sums))
class TestEverySum:
    def test_one_particle_feels_nothing(self, name, generator):
        field = pair_sums.build(name)(Riesz(1.0), torch.ones(1, 3), generator=generator)
        assert field.potential.tolist() == [0]
        assert field.gradient.tolist() == [[0, 0, 0]]

    def test_two_particles(self, name, generator):
        positions = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
        field = pair_sums.build(name)(Riesz(0.0), positions, generator=generator)
        torch.testing.assert_close(field.potential, torch.full((2,), -math.log(2)))
        expected = torch.tensor([[0.5, 0.0], [-0.5, 0.0]])
        torch.testing.assert_close(field.gradient, expected)

    def test_groups_do_not_feel_each_other(self, name, generator):
        positions = torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64)
        field = pair_sums.build(name)(Riesz(0.0), positions, generator=generator)
        assert field.potential.shape == (2, 3, 5)
        alone = ExactSum()(Riesz(0.0), positions[1, 2])
        torch.testing.assert_close(field.gradient[1, 2], alone.gradient)


@pytest.mark.parametrize("sum_of", [RandomBatchSum(4), FarFieldSum(4)], ids=repr)
@pytest.mark.parametrize("s", [0.0, 1.0])
def test_random_sums_are_unbiased(sum_of, s, generator):
    positions = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    exact = ExactSum()(Riesz(s), positions)
    draws = [sum_of(Riesz(s), positions, generator=generator) for _ in range(2000)]
    for name in ("potential", "gradient"):
        values = torch.stack([getattr(draw, name) for draw in draws])
        standard_error = values.std(dim=0) / math.sqrt(len(draws))
        gap = (values.mean(dim=0) - getattr(exact, name)).abs()
        # 240 numbers are compared: five standard errors leave a chance of 1e-4.
        assert (gap < 5 * standard_error).all()


def test_far_field_is_accurate_in_many_dimensions(generator):
    positions = torch.randn(2000, 64, generator=generator, dtype=torch.float64)
    exact = ExactSum()(Riesz(0.0), positions).gradient
    errors = {}
    for sum_of in (FarFieldSum(0), FarFieldSum(16), RandomBatchSum(128)):
        field = sum_of(Riesz(0.0), positions, generator=generator)
        errors[sum_of] = float((field.gradient - exact).norm() / exact.norm())
    assert errors[FarFieldSum(0)] < 5e-3
    assert errors[FarFieldSum(16)] < errors[RandomBatchSum(128)] / 3


def test_memory_stays_bounded_with_many_particles(generator):
    """100,000 particles: all pairs would need 40 GB in one array."""
    positions = torch.randn(100_000, 8, generator=generator)
    field = FarFieldSum(8)(Riesz(0.0), positions, generator=generator)
    assert field.gradient.isfinite().all()


def test_messages():
    with pytest.raises(ParameterError, match="`s` must be greater than -2; got -2"):
        Riesz(s=-2)
    with pytest.raises(ParameterError, match="`truncation` must be at least 0"):
        Riesz(truncation=-1.0)
    with pytest.raises(ParameterError, match="`generator` must be given"):
        RandomBatchSum()(Riesz(), torch.zeros(3, 2))
    with pytest.raises(ParameterError, match="did you mean 'far-field'"):
        pair_sums.build("farfield")
