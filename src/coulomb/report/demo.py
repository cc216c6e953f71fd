"""The picture of `coulomb demo`: particles, energy and kernel, before and after."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from coulomb._support.archive import write_bytes
from coulomb.datasets import make_synthetic
from coulomb.estimators import CoulombSampler
from coulomb.report.chart import LIGHT
from coulomb.report.print import PRINT_STYLE, save

_SHOWN_PARTICLES = 400
_SEEN_SHARE = 0.998  # a few that stray far would make the rest a dot
# Where sin(pi x1) and sin(3 x5) of the log-odds put their frequencies.
_MARKS = np.array([[np.pi, 0.0], [-np.pi, 0.0], [0.0, 3.0], [0.0, -3.0]])


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
    both = [
        CoulombSampler(_SHOWN_PARTICLES, max_iter=steps, **shared).fit(X, y)
        for steps in (0, 1000)
    ]
    clouds = np.stack([sampler.particles_[:, [0, 4]] for sampler in both])
    seen = clouds.any(axis=(0, 2))  # the others look at other columns
    history = both[1].history_
    with matplotlib.rc_context(PRINT_STYLE):
        figure = Figure(figsize=(11, 3.0), layout="constrained")
        title = "Particles of the synthetic problem; + marks the frequencies of its "
        figure.suptitle(f"{title}log-odds", x=0.01, ha="left", fontsize=10)
        cloud, energy, *kernels = figure.subplots(1, 4)
        _draw_cloud(cloud, *clouds[:, seen])
        energy.semilogx(
            1 + np.asarray(history["step"]), history["energy"], color=LIGHT[2]
        )
        energy.set(title="Energy", xlabel="1 + Langevin step")
        energy.set_ylabel("$H$, mean per particle")
        _draw_kernels(kernels, [sampler.kernel(X[order]) for sampler in both])
        write_bytes(path, save(figure)[1])


def _draw_cloud(axis: Any, first: Any, last: Any) -> None:
    axis.scatter(*first.T, s=6, color=LIGHT[7], alpha=0.4, linewidths=0, label="start")
    axis.scatter(*last.T, s=9, color=LIGHT[1], alpha=0.8, linewidths=0, label="end")
    axis.plot(*_MARKS.T, "+", color=LIGHT[0], markersize=8)
    far = float(np.quantile(np.abs([first, last]), _SEEN_SHARE))
    edge = 1.15 * max(far, float(np.abs(_MARKS).max()))
    axis.set(title="Particles", xlim=(-edge, edge), ylim=(-edge, edge), aspect="equal")
    axis.set(xlabel="frequency along x1", ylabel="frequency along x5")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handletextpad=0.1)


def _draw_kernels(axes: Any, kernels: Any) -> None:
    """Draw both with one scale, without the diagonal: it is one, and hides the rest."""
    off = np.concatenate(
        [kernel[~np.eye(len(kernel), dtype=bool)] for kernel in kernels]
    )
    low, high = np.quantile(off, [0.01, 0.995])
    for axis, kernel, when in zip(axes, kernels, ("before", "after"), strict=True):
        image = axis.imshow(kernel, cmap="cividis", vmin=low, vmax=high)
        axis.grid(False)
        axis.set(
            title=f"Kernel {when}", xlabel="samples by class", xticks=[], yticks=[]
        )
    axes[-1].figure.colorbar(image, ax=axes[-1], shrink=0.8, label="$K(x, x')$")
