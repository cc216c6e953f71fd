"""The picture of `coulomb demo`: particles, energy and kernel, before and after."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from coulomb._support.archive import write_whole
from coulomb.datasets import make_synthetic
from coulomb.estimators import CoulombSampler
from coulomb.report.chart import LIGHT

BEFORE, AFTER = LIGHT[6], LIGHT[1]
STYLE = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False}
STYLE |= {"axes.spines.right": False}
_SHOWN_PARTICLES = 400
_ALIGNED = "$-E$, mean over particles"


def draw_demo(path: Path, *, seed: int = 0) -> None:
    """Let particles learn the paper's synthetic problem and draw what happened."""
    problem = make_synthetic(n_samples=600, noise=0.1)
    X, y = problem.X, problem.y
    order = np.argsort(problem.probability)[::3]
    shared: dict[str, Any] = {
        "n_candidates": None,
        "inverse_temperature": 400.0,
        "gamma": 2.0,
        "coordinates": 2,
        "random_state": seed,
    }
    moved = CoulombSampler(_SHOWN_PARTICLES, max_iter=1000, **shared).fit(X, y)
    before = CoulombSampler(_SHOWN_PARTICLES, max_iter=0, **shared).fit(X, y)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 6), layout="constrained")
        axes = figure.subplots(2, 3)
        _draw_particles(axes[0, 0], before.particles_, BEFORE, "Particles before")
        _draw_particles(axes[1, 0], moved.particles_, AFTER, "Particles after")
        for axis, name, title, words in (
            (axes[0, 1], "energy", "Energy $H$", "mean per particle"),
            (axes[1, 1], "alignment", "Alignment with the labels", _ALIGNED),
        ):
            axis.plot(moved.history_["step"], moved.history_[name], color=AFTER)
            axis.set(title=title, xlabel="Langevin step", ylabel=words)
        _draw_kernel(axes[0, 2], before.kernel(X[order]), "before")
        _draw_kernel(axes[1, 2], moved.kernel(X[order]), "after")
        figure.supxlabel(
            "+ and × mark the frequencies that $\\sin(\\pi x_1)$ and $\\sin(3 x_5)$ "
            "put into the log-odds; every particle looks at two of the five columns.",
            fontsize=9,
        )
        write_whole(path, lambda file: figure.savefig(file, dpi=150))


def _draw_particles(axis: Any, particles: np.ndarray, colour: str, title: str) -> None:
    seen = particles[:, [0, 4]]
    seen = seen[seen.any(axis=1)]  # the others look at other columns
    axis.scatter(*seen.T, s=9, color=colour, alpha=0.6, linewidths=0)
    for sign in (-1, 1):  # where sin(pi x1) and sin(3 x5) put their frequencies
        axis.plot(sign * np.pi, 0, "+", color="black", markersize=9)
        axis.plot(0, sign * 3, "x", color="black", markersize=7)
    axis.set(title=title, xlim=(-7, 7), ylim=(-7, 7), aspect="equal")
    axis.set(xlabel="frequency along $x_1$", ylabel="frequency along $x_5$")


def _draw_kernel(axis: Any, gram: np.ndarray, when: str) -> None:
    image = axis.imshow(gram, cmap="cividis", vmin=-0.2, vmax=0.6)
    words = "samples, from class $-1$ to $+1$"
    axis.set(title=f"Kernel {when}", xlabel=words, ylabel=words, xticks=[], yticks=[])
    axis.figure.colorbar(image, ax=axis, shrink=0.8, label="$K(x, x')$")
