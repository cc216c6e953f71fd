"""Inputs for the tests of attention."""

from typing import NamedTuple

import torch
from torch import Tensor

from coulomb.features import Particles, feature_maps

MAPS = sorted(feature_maps)


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    particles: Particles


def make_case(
    name: str,
    *,
    batch: int = 2,
    heads: int = 2,
    n: int = 7,
    m: int | None = None,
    dim: int = 3,
    dim_v: int = 2,
    n_particles: int = 5,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    """Draw queries, keys, values and particles for the map of this name."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    m = n if m is None else m
    # Maps that are not positive may have a normaliser of zero, where nothing can be
    # compared; small angles keep their cosines near one.
    scale = 1.0 if feature_maps.build(name).positive else 0.2
    q, k = normal(batch, heads, n, dim), normal(batch, heads, m, dim)
    v = normal(batch, heads, m, dim_v)
    positions = scale * normal(heads, n_particles, dim)
    phases = scale * normal(heads, n_particles).abs()
    return Case(q, k, v, Particles(positions, phases))


def padding(case: Case, *, seed: int = 1) -> Tensor:
    """Draw a key mask; the last sequence is empty if there are several."""
    generator = torch.Generator().manual_seed(seed)
    batch, _, length, _ = case.k.shape
    mask = torch.rand(batch, length, generator=generator) < 0.6
    mask[0, 0] = True
    if batch > 1:
        mask[-1] = False
    return mask


def gradients(function, case: Case, **options) -> tuple[Tensor, ...]:
    """Differentiate a fixed functional of the output with respect to every operand."""
    leaves = [x.detach().clone().requires_grad_() for x in (*case[:3], *case.particles)]
    out = function(*leaves[:3], Particles(*leaves[3:]), **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    grads = torch.autograd.grad(
        (out * weights).sum(), leaves, allow_unused=True, materialize_grads=True
    )
    return (out.detach(), *grads)
