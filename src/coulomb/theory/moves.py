"""Metropolis moves of many configurations at once.

The moves are those of `MetropolisLangevin`, for all configurations in one call, for any
law with a density, and reflected at the walls of a box: a proposal that is refused
when any of many particles leaves would hardly ever be accepted.
"""

import itertools
import math

import torch
from torch import Tensor

from coulomb.domains import AbstractDomain, Box
from coulomb.theory.ensembles import Law, LogLaw


def metropolis_move(
    law: Law,
    positions: Tensor,
    here: LogLaw,
    step_size: Tensor,
    domain: AbstractDomain,
    *,
    generator: torch.Generator,
) -> tuple[Tensor, LogLaw, Tensor]:
    """Move every configuration once, leaving its law invariant.

    The proposal is `w + h clip(grad log p) + sqrt(2 h) xi`; one that leaves the domain
    is refused, except that in a box it is reflected, and its density is the sum over
    its mirror images. Drifts longer than the noise are shortened to it, which singular
    forces need; any drift is exact.
    """
    if isinstance(domain, Box) and _reflects(domain):
        # Up to here the images left out are below rounding, so the move is exact.
        step_size = step_size.clamp_max((domain.upper - domain.lower) ** 2 / 40)
    h = step_size[:, None, None]
    limit = 1 / h.sqrt()
    noise = torch.randn(positions.shape, generator=generator, dtype=positions.dtype)
    uniform = torch.rand(positions.shape[0], generator=generator, dtype=positions.dtype)
    forward = _limited(here.gradient, limit)
    proposal = positions + h * forward + (2 * h).sqrt() * noise
    if _reflects(domain):
        proposal = domain.reflect(proposal)
    inside = domain.contains(proposal).all(dim=-1)
    # Outside the law need not be defined; such proposals are refused anyway.
    proposal = torch.where(inside[:, None, None], proposal, positions)
    there = law(proposal)
    backward = proposal + h * _limited(there.gradient, limit)
    quotient = _log_density(positions, backward, h, domain) - _log_density(
        proposal, positions + h * forward, h, domain
    )
    accept = inside & (uniform.log() < there.value - here.value + quotient)
    chosen = accept[:, None, None]
    moved = torch.where(chosen, proposal, positions)
    now = LogLaw(
        torch.where(accept, there.value, here.value),
        torch.where(chosen, there.gradient, here.gradient),
    )
    return moved, now, accept


def _limited(gradient: Tensor, limit: Tensor) -> Tensor:
    norm = gradient.norm(dim=-1, keepdim=True)
    gradient = torch.where(norm.isfinite(), gradient, torch.zeros_like(gradient))
    return gradient * torch.where(norm > limit, limit / norm, torch.ones_like(norm))


def _reflects(domain: AbstractDomain) -> bool:
    if not isinstance(domain, Box):
        return False
    return math.isfinite(domain.lower) and math.isfinite(domain.upper)


def _log_density(
    places: Tensor, means: Tensor, h: Tensor, domain: AbstractDomain
) -> Tensor:
    """Evaluate the log-density of proposals with these means, up to a constant."""
    if not (isinstance(domain, Box) and _reflects(domain)):
        return -((places - means).square() / (4 * h)).sum((-1, -2))
    width = domain.upper - domain.lower
    images = []
    for shift, mirrored in itertools.product((-1, 0, 1), (False, True)):
        image = 2 * domain.lower - places if mirrored else places
        images.append(-((image + 2 * shift * width - means).square()) / (4 * h))
    return torch.stack(images).logsumexp(dim=0).sum((-1, -2))
