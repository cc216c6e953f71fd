import math

import pytest
import torch

from coulomb.domains import Box
from coulomb.dynamics.metropolis import LogLaw, metropolis_move


def test_moves_leave_a_truncated_gaussian_invariant(generator):
    """Start in the law and stay in it: mean of x^2 within five standard errors."""

    def law(w):
        return LogLaw(-2 * w.square().sum(dim=(-1, -2)), -4 * w)

    proposals = 0.5 * torch.randn(40000, 1, 1, generator=generator, dtype=torch.float64)
    positions = proposals[proposals.abs()[:, 0, 0] < 0.8]
    expected, count = float(positions.square().mean()), positions.shape[0]
    now, steps = law(positions), torch.full((count,), 0.05, dtype=torch.float64)
    for _ in range(10):
        positions, now, _, _ = metropolis_move(
            law, positions, now, steps, Box(-0.8, 0.8), generator=generator
        )
    error = 5 * math.sqrt(2) * float(positions.square().std()) / math.sqrt(count)
    assert abs(float(positions.square().mean()) - expected) < error


@pytest.mark.parametrize("step", [0.01, 0.3, 100.0])
def test_reflected_moves_of_any_length_leave_the_law_invariant(step, generator):
    """exp(-3 x) on [-1, 1], started in the law; five standard errors of the mean."""

    def law(w):
        return LogLaw(-3 * w.sum(dim=(-1, -2)), -3 * torch.ones_like(w))

    count = 50000
    uniform = torch.rand(count, 1, 1, generator=generator, dtype=torch.float64)
    high, low = math.exp(3), math.exp(-3)
    positions = -torch.log(high - uniform * (high - low)) / 3
    now, steps = law(positions), torch.full((count,), step, dtype=torch.float64)
    for _ in range(20):
        positions, now, _, _ = metropolis_move(
            law, positions, now, steps, Box(-1.0, 1.0), generator=generator
        )
    expected = 1 / 3 - 1 / math.tanh(3)
    error = 5 * float(positions.std()) / math.sqrt(count)
    assert abs(float(positions.mean()) - expected) < error
