import math

import pytest
import torch

from coulomb._support.errors import ParameterError
from coulomb.dynamics.initial import (
    choose_uniformly,
    effective_sample_size,
    gibbs_weights,
    resamplers,
)


class TestGibbsWeights:
    def test_formula(self, generator):
        felt = torch.randn(20, generator=generator, dtype=torch.float64)
        expected = torch.exp(-3 * felt) / torch.exp(-3 * felt).sum()
        torch.testing.assert_close(gibbs_weights(felt, 3.0), expected)

    def test_huge_energies_do_not_overflow(self):
        weights = gibbs_weights(torch.tensor([1e8, 1e8 + 1, -1e8]), 1e6)
        assert weights.tolist() == [0, 0, 1]
        assert gibbs_weights(torch.tensor([math.inf, 0.0]), 1.0).tolist() == [0, 1]
        assert gibbs_weights(torch.full((2,), math.inf), 1.0).tolist() == [0.5, 0.5]

    def test_temperature_limits(self):
        felt = torch.tensor([0.0, 1.0, 0.0])
        assert gibbs_weights(felt, math.inf).tolist() == [0.5, 0, 0.5]
        torch.testing.assert_close(gibbs_weights(felt, 0.0), torch.full((3,), 1 / 3))


def test_effective_sample_size(generator):
    assert effective_sample_size(torch.ones(7)) == pytest.approx(7)
    assert effective_sample_size(torch.tensor([0.0, 5.0, 0.0])) == 1
    assert effective_sample_size(torch.tensor([1e-30, 1e-30])) == pytest.approx(2)


@pytest.mark.parametrize("name", list(resamplers))
class TestEveryResampler:
    def test_counts_are_unbiased(self, name, generator):
        weights = torch.tensor([0.5, 0.3, 0.0, 0.2])
        draws = 3000
        counts = torch.zeros(4)
        for _ in range(draws):
            chosen = resamplers.build(name)(weights, 5, generator=generator)
            counts += torch.bincount(chosen, minlength=4)
        # A count varies at most like a binomial one.
        standard_error = (5 * weights * (1 - weights) / draws).sqrt()
        assert ((counts / draws - 5 * weights).abs() <= 4 * standard_error).all()
        assert counts[2] == 0

    def test_one_particle_has_all_the_weight(self, name, generator):
        weights = torch.tensor([0.0, 1.0, 0.0])
        chosen = resamplers.build(name)(weights, 9, generator=generator)
        assert chosen.tolist() == [1] * 9

    def test_bad_weights(self, name, generator):
        for weights in ([0.0, 0.0], [-1.0, 2.0], [math.nan, 1.0], [math.inf, 1.0]):
            with pytest.raises(ParameterError, match="`weights` must be non-negative"):
                resamplers.build(name)(torch.tensor(weights), 2, generator=generator)


@pytest.mark.parametrize("name", ["systematic", "stratified"])
def test_even_schemes_take_equal_weights_about_once(name, generator):
    chosen = resamplers.build(name)(torch.ones(50), 50, generator=generator)
    assert torch.bincount(chosen, minlength=50).max() <= 2


def test_systematic_takes_equal_weights_exactly_once(generator):
    chosen = resamplers.build("systematic")(torch.ones(64), 64, generator=generator)
    assert chosen.sort().values.tolist() == list(range(64))


def test_choosing_uniformly(generator):
    chosen = choose_uniformly(10, 4, generator=generator)
    assert chosen.unique().numel() == 4
    with pytest.raises(ParameterError, match="at most the number of particles, 3"):
        choose_uniformly(3, 4, generator=generator)


def test_a_point_on_an_edge_belongs_to_what_comes_after(monkeypatch, generator):
    """Not to a weight of zero before it, nor beyond the last weight."""
    points = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    resampler = resamplers.build("stratified")
    monkeypatch.setattr(resampler, "_points", lambda count, generator: points)
    weights = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    assert resampler(weights, 5, generator=generator).tolist() == [1, 1, 3, 3, 3]
