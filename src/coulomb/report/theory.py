"""Pictures of the theory: particles meet their density, deviations become rare."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from coulomb._support.archive import write_whole
from coulomb._support.stats import Fit
from coulomb.report.demo import AFTER, BEFORE, STYLE
from coulomb.theory.deviations import DeviationCurve, FreeEnergyCurve
from coulomb.theory.equilibrium import Equilibrium
from coulomb.theory.flow import Flow
from coulomb.theory.gap import GapCurve
from coulomb.theory.grids import AbstractGrid

_GREEN, _GREY = "#009E73", "#666666"


def draw_meanfield(
    path: Path, grid: AbstractGrid, rest: Equilibrium, flow: Flow, gap: GapCurve
) -> None:
    """Draw the density in time with particles on top, the free energy and the gap."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        density, energy, distance = figure.subplots(1, 3)
        if grid.dim == 1:
            _draw_line(density, grid, rest, flow, gap)
        else:
            _draw_plane(density, grid, gap)
        _draw_free_energy(energy, rest, flow)
        _draw_gap(distance, gap)
        write_whole(path, lambda file: figure.savefig(file, dpi=110))


def draw_deviations(path: Path, curve: DeviationCurve, energy: FreeEnergyCurve) -> None:
    """Draw log-probabilities against the speed, and the free energy of N particles."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        _bars(left, curve.speeds, curve.log_probabilities, curve.standard_errors)
        left.plot(
            curve.speeds,
            curve.predictions,
            "--",
            color=_GREY,
            label=f"predicted without prefactor, rate {curve.rate:.3f}",
        )
        left.plot([], [], " ", label=f"fitted rate {_with_error(curve.fit)}")
        left.set(
            title="Deviations become rare",
            xlabel="speed ($N$ or $\\beta_N$)",
            ylabel="$\\log P(|\\int f d\\mu_N - f^*| \\geq \\delta)$",
        )
        left.legend(frameon=False)
        _bars(right, energy.counts, energy.values, energy.standard_errors)
        right.plot(
            energy.counts, energy.finite_limits, "--", color=_GREY, label="mean field"
        )
        right.axhline(energy.limit, color=_GREEN, label="limit")
        right.set(title="Free energy", xlabel="$N$", ylabel="$-\\log Z_N / \\beta_N$")
        right.legend(frameon=False)
        write_whole(path, lambda file: figure.savefig(file, dpi=110))


def _with_error(fit: Fit) -> str:
    return f"{fit.slope:.3f} ± {fit.standard_error:.3f}"


def _bars(axis: Any, x: np.ndarray, y: np.ndarray, errors: np.ndarray) -> None:
    axis.errorbar(
        x, y, yerr=2 * errors, fmt="o", color=AFTER, label="measured, ± 2 s.e."
    )


def _draw_line(
    axis: Any, grid: AbstractGrid, rest: Equilibrium, flow: Flow, gap: GapCurve
) -> None:
    x = grid.points[:, 0]
    shades = np.linspace(0.35, 1.0, len(flow.times))
    for time, density, shade in zip(flow.times, flow.densities, shades, strict=True):
        axis.plot(x, density, color=BEFORE, alpha=shade, label=f"t = {time:.2g}")
    axis.plot(x, rest.density, "--", color=_GREY, label="equilibrium")
    particles = gap.positions[-1][..., 0].ravel()
    axis.hist(
        particles, bins=40, density=True, color=AFTER, alpha=0.35, label="particles"
    )
    axis.set(title="Density, and particles on top", xlabel="$w$", ylabel="density")
    axis.legend(frameon=False, fontsize=7)


def _draw_plane(axis: Any, grid: AbstractGrid, gap: GapCurve) -> None:
    shown = axis.scatter(
        grid.points[:, 0],
        grid.points[:, 1],
        c=gap.density,
        s=6,
        marker="s",
        cmap="cividis",
    )
    particles = gap.positions[-1][0]
    axis.scatter(particles[:, 0], particles[:, 1], s=5, color=AFTER)
    axis.set(title="Density, and particles on top", xlabel="$w_1$", ylabel="$w_2$")
    axis.set_aspect("equal")
    axis.figure.colorbar(shown, ax=axis, shrink=0.8, label="density")


def _draw_free_energy(axis: Any, rest: Equilibrium, flow: Flow) -> None:
    axis.plot(flow.step_times, flow.free_energies, color=BEFORE)
    axis.axhline(rest.free_energy, color=_GREY, linestyle="--", label="equilibrium")
    axis.set(title="The free energy falls", xlabel="time", ylabel="$F$")
    axis.legend(frameon=False)


def _draw_gap(axis: Any, gap: GapCurve) -> None:
    curves = [
        ("observable", gap.observable, gap.observable_errors, gap.observable_exponent)
    ]
    if gap.first_exponent is not None:
        curves.append(("$W_1$", gap.first, gap.first_errors, gap.first_exponent))
    for (name, values, errors, fit), colour in zip(
        curves, (AFTER, BEFORE), strict=False
    ):
        axis.errorbar(gap.counts, values, yerr=errors, fmt="o", color=colour)
        label = f"{name}: $N^{{{fit.slope:.2f}}}$ ({fit.low:.2f} to {fit.high:.2f})"
        line = np.exp(fit.intercept) * gap.counts**fit.slope
        axis.plot(gap.counts, line, "--", color=colour, label=label)
    axis.set(
        title="Gap between particles and density",
        xlabel="$N$",
        ylabel="distance",
        xscale="log",
        yscale="log",
    )
    axis.set_xticks(gap.counts, [f"{count:g}" for count in gap.counts])
    axis.set_xticks([], minor=True)
    axis.legend(frameon=False, fontsize=8)
