"""Drawing parameters from a generator, never from hidden state."""

import math

import torch
from torch import Tensor, nn

from coulomb._support.checks import check_count
from coulomb._support.streams import make_generator

Seed = torch.Generator | int | None


def as_generator(generator: Seed) -> torch.Generator:
    """Turn a seed into a generator; None is torch's own, as in every torch module.

    Examples
    --------
    >>> as_generator(0).initial_seed() == as_generator(0).initial_seed()
    True
    """
    if generator is None:
        return torch.default_generator
    if isinstance(generator, torch.Generator):
        return generator
    return make_generator(check_count("generator", generator, at_least=0))


def draw_uniform(
    parameter: Tensor, bound: float, *, generator: torch.Generator
) -> None:
    """Fill a parameter with numbers from `[-bound, bound]`.

    They are drawn in float32 on the CPU, so that a seed means the same numbers for
    every precision and device.
    """
    drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        parameter.copy_(drawn.uniform_(-bound, bound, generator=generator))


def empty_linear(
    n_in: int,
    n_out: int,
    *,
    bias: bool = True,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> nn.Linear:
    """Make a linear layer without drawing it."""
    linear = nn.Linear(n_in, n_out, bias=bias, device="meta", dtype=dtype)
    return linear.to_empty(device=device)


def reset_linear(linear: nn.Linear, *, generator: torch.Generator) -> None:
    """Draw a linear layer as torch does, weights and biases within `1 / sqrt(n_in)`."""
    bound = 1 / math.sqrt(linear.in_features)
    draw_uniform(linear.weight, bound, generator=generator)
    if linear.bias is not None:
        draw_uniform(linear.bias, bound, generator=generator)
