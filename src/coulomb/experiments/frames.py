"""Particles on film: positions, energy and kernel along a run, small enough to draw."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from coulomb._support.streams import make_generator
from coulomb.datasets import SyntheticProblem, make_synthetic
from coulomb.domains import AbstractDomain, Ball, Masked, Space
from coulomb.dynamics import loop
from coulomb.dynamics.initial import Component, SpectralMixture
from coulomb.dynamics.langevin import ProjectedLangevin
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.interactions import Riesz
from coulomb.objectives import FourierAlignment, GaussianPrior, Sample

_SEEN = (0, 4)  # sin(pi x1) and sin(3 x5) put frequencies on these axes
_PARTICLES = 300
_ROWS = 48
_KERNELS = 6


def record_frames(
    n_frames: int = 120, *, steps: tuple[int, int] = (2000, 500), seed: int = 0
) -> dict[str, Any]:
    """Film the particles of the synthetic problem, with both sets of constants."""
    problem = make_synthetic(noise=0.1)
    runs = [
        make(problem, max_steps, n_frames, seed)
        for make, max_steps in zip((_paper, _ours), steps, strict=True)
    ]
    return {"runs": runs}


def _paper(
    problem: SyntheticProblem, max_steps: int, n_frames: int, seed: int
) -> dict[str, Any]:
    x, y = _training(problem)
    draw = SpectralMixture((Component(0, 0.5, True),)).draw_parts(
        _PARTICLES, x.shape[1], generator=make_generator(seed, 0)
    )
    domain = Ball(5.0)
    first = domain.project(draw.positions)
    energy = Hamiltonian(FourierAlignment(Sample(x, y)), Riesz(), 0.5)
    sampler = ProjectedLangevin(30.0, 100.0, domain=domain, clip=1.0)
    film = _film(problem, sampler, energy, first, max_steps, n_frames, seed)
    return {
        "title": "The paper's constants: repulsion drives particles to the wall",
        "constants": "paper",
        "radius": 5.0,
        **film,
    }


def _ours(
    problem: SyntheticProblem, max_steps: int, n_frames: int, seed: int
) -> dict[str, Any]:
    x, y = _training(problem)
    beta, dim = 400.0, x.shape[1]
    draw = SpectralMixture((Component(2, 2.0, True),)).draw_parts(
        2 * _PARTICLES, dim, generator=make_generator(seed, 0)
    )
    domain: AbstractDomain = Masked(Space(), draw.mask)
    energy = Hamiltonian(
        FourierAlignment(Sample(x, y - y.mean())),
        Riesz(),
        1e-3,
        GaussianPrior(draw.variance, beta),
    )
    sampler = ProjectedLangevin(
        0.02 * beta, beta, domain=domain, clip=1.0, rates=draw.variance.clamp_max(1.0)
    )
    film = _film(problem, sampler, energy, draw.positions, max_steps, n_frames, seed)
    return {
        "title": "Our constants: labels pull particles to their frequencies",
        "constants": "default",
        "radius": None,
        **film,
    }


def _film(
    problem: SyntheticProblem,
    sampler: ProjectedLangevin,
    energy: Hamiltonian,
    positions: Tensor,
    max_steps: int,
    n_frames: int,
    seed: int,
) -> dict[str, Any]:
    steps = _steps_to_show(max_steps, n_frames)
    run = loop.init_run(
        sampler,
        Particles(positions, torch.zeros(len(positions), dtype=positions.dtype)),
        generator=make_generator(seed, 1),
    )
    shown = _pick(positions)
    frames, kernels, history = [], [], []
    with_kernel = set(np.linspace(0, len(steps) - 1, _KERNELS).round().astype(int))
    rows = _sorted_rows(problem)
    for number, step in enumerate(steps):
        settings = loop.RunSettings(step, record_every=max_steps)
        loop.run(run, sampler, energy, settings)
        where = run.particles.positions
        frames.append(where[shown][:, _SEEN].numpy().round(2).tolist())
        terms = energy.terms(run.particles)
        history.append((float(terms.total), -float(terms.alignment)))
        if number in with_kernel:
            kernel = _kernel(problem.X[rows], where.numpy()).round(2)
            kernels.append({"frame": number, "values": kernel.tolist()})
    total, alignment = np.array(history).round(6).T
    return {
        "axes": ["frequency along x1", "frequency along x5"],
        "marks": [[np.pi, 0.0], [-np.pi, 0.0], [0.0, 3.0], [0.0, -3.0]],
        "steps": steps,
        "positions": frames,
        "energy": total.tolist(),
        "alignment": alignment.tolist(),
        "kernels": kernels,
        "kernel_labels": np.where(problem.probability[rows] < 0.5, -1, 1).tolist(),
    }


def _training(problem: SyntheticProblem) -> tuple[Tensor, Tensor]:
    x = torch.from_numpy(problem.X[problem.train])
    return x, torch.from_numpy(problem.y[problem.train]).double()[:, None]


def _steps_to_show(max_steps: int, n_frames: int) -> list[int]:
    """Show every step at first, then longer and longer strides."""
    steps = np.geomspace(1, max_steps + 1, n_frames).round().astype(int) - 1
    return sorted({int(step) for step in steps})


def _pick(positions: Tensor) -> Tensor:
    """Choose particles that live on the axes that are shown."""
    visible = positions[:, _SEEN].abs().sum(dim=1) > 0
    return visible.nonzero()[:_PARTICLES, 0]


def _sorted_rows(problem: SyntheticProblem) -> Any:
    order = np.argsort(problem.probability)
    return order[np.linspace(0, len(order) - 1, _ROWS).round().astype(int)]


def _kernel(X: Any, frequencies: Any) -> Any:
    """`K(x, x') = mean_k cos(w_k . (x - x'))`, the mean over phases."""
    angle = X @ frequencies.T
    real, imaginary = np.cos(angle), np.sin(angle)
    return (real @ real.T + imaginary @ imaginary.T) / frequencies.shape[0]
