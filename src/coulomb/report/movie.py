"""The animation of the particles: read, checked, packed for the page, and printed."""

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from coulomb._support.archive import read_json
from coulomb._support.errors import FileFormatError
from coulomb.report.chart import LIGHT
from coulomb.report.print import PRINT_STYLE, safe_text, save

FloatArray = npt.NDArray[np.float64]
_MOST_FRAMES, _MOST_PARTICLES, _MOST_ROWS = 600, 1000, 200
_LARGEST = 1e100  # what is drawn; differences and squares of it are finite
_PRINTED_RUNS = 3
_SEEN_SHARE = 0.998


@dataclass(frozen=True)
class Run:
    """The particles of one run, frame by frame."""

    title: str
    axes: tuple[str, str]
    radius: float | None
    steps: FloatArray
    positions: FloatArray
    energy: FloatArray
    kernels: tuple[tuple[int, FloatArray], ...]
    marks: FloatArray


def read_runs(path: Path) -> list[Run]:
    """Read and check a file of frames."""
    content = read_json(path, complaint=": not JSON")
    runs = content.get("runs") if isinstance(content, dict) else None
    if not isinstance(runs, list) or not runs:
        raise FileFormatError(f"{path}: `runs` must be a list of runs.")
    found = []
    for number, run in enumerate(runs):
        place = f"{path}, run {number}"
        try:
            found.append(_check(run, place))
        except FileFormatError:
            raise
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            raise FileFormatError(f"{place}: damaged ({error}).") from error
    return found


def pack(runs: list[Run]) -> dict[str, Any]:
    """Give the page what it needs, in few bytes."""
    return {"runs": [_pack(run) for run in runs]}


def print_runs(runs: list[Run]) -> tuple[bytes, bytes]:
    """Draw the first and the last frame of each run, its energy and its kernels."""
    shown = runs[:_PRINTED_RUNS]
    with matplotlib.rc_context(PRINT_STYLE):
        figure = Figure(figsize=(11, 3.0 * len(shown)), layout="constrained")
        parts = figure.subfigures(len(shown), 1, squeeze=False)[:, 0]
        for part, run in zip(parts, shown, strict=True):
            part.suptitle(safe_text(run.title), x=0.01, ha="left", fontsize=10)
            axes = part.subplots(1, 4)
            _print_cloud(axes[0], run)
            axes[1].semilogx(1 + run.steps, run.energy, color=LIGHT[2])
            axes[1].set(title="Energy", xlabel="1 + Langevin step")
            axes[1].set_ylabel("$H$, mean per particle")
            _print_kernel(axes[2], run, 0, "before")
            _print_kernel(axes[3], run, -1, "after")
        return save(figure)


def _check(run: Any, place: str) -> Run:
    def demand(fine: bool, sentence: str) -> None:
        if not fine:
            raise FileFormatError(f"{place}: {sentence}")

    def array(content: Any, name: str, ndim: int) -> FloatArray:
        try:
            found = np.array(content[name], dtype=np.float64)
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"{place}: `{name}` must be an array.") from error
        whole = found.ndim == ndim and found.size > 0
        demand(whole, f"`{name}` must have {ndim} axes; got shape {found.shape}.")
        seen = np.abs(np.nan_to_num(found)).max()
        demand(seen < _LARGEST, f"`{name}` must be below {_LARGEST:g}; got {seen:g}.")
        return found

    demand(isinstance(run, dict), f"must be an object; got {run!r:.40}.")
    positions = array(run, "positions", 3)
    n_frames, n_particles, dim = positions.shape
    demand(
        dim == 2 and 0 < n_frames <= _MOST_FRAMES,
        "`positions` must be (frames, particles, 2) with at most "
        f"{_MOST_FRAMES} frames; got {positions.shape}.",
    )
    demand(
        0 < n_particles <= _MOST_PARTICLES and bool(np.isfinite(positions).all()),
        f"`positions` must hold 1 to {_MOST_PARTICLES} finite particles.",
    )
    steps, energy = array(run, "steps", 1), array(run, "energy", 1)
    demand(
        len(steps) == len(energy) == n_frames,
        "`steps` and `energy` must have one number for each of the "
        f"{n_frames} frames; got {len(steps)} and {len(energy)}.",
    )
    demand(bool((steps >= 0).all()), "`steps` must count from 0.")
    kernels = []
    for kernel in run.get("kernels") or []:
        values, frame = array(kernel, "values", 2), kernel.get("frame")
        demand(
            isinstance(frame, int) and 0 <= frame < n_frames,
            f"`frame` of a kernel must be below {n_frames}; got {frame!r}.",
        )
        demand(
            values.shape[0] == values.shape[1] <= _MOST_ROWS,
            f"a kernel must be square with at most {_MOST_ROWS} rows; "
            f"got {values.shape}.",
        )
        kernels.append((frame, values))
    axes = run.get("axes") or ["first coordinate", "second coordinate"]
    demand(isinstance(axes, list), f"`axes` must be two names; got {axes!r:.40}.")
    radius = run.get("radius")
    numeric = isinstance(radius, int | float) and 0 < radius < _LARGEST
    demand(radius is None or numeric, f"`radius` cannot be {radius!r:.40}.")
    marks = array(run, "marks", 2) if run.get("marks") else np.zeros((0, 2))
    demand(marks.shape[1] == 2, f"`marks` must have 2 columns; got {marks.shape}.")
    return Run(
        title=str(run.get("title", "run"))[:80],
        axes=(str(axes[0])[:60], str(axes[-1])[:60]),
        radius=None if radius is None else float(radius),
        steps=steps,
        positions=positions,
        energy=energy,
        kernels=tuple(sorted(kernels, key=lambda pair: pair[0])),
        marks=marks,
    )


def _pack(run: Run) -> dict[str, Any]:
    edge = _edge(run)
    low, high = _kernel_range(run)
    return {
        "title": run.title,
        "axes": list(run.axes),
        "radius": run.radius,
        "n_frames": len(run.steps),
        "n_particles": run.positions.shape[1],
        "steps": run.steps.tolist(),
        "energy": [v if np.isfinite(v) else None for v in run.energy.tolist()],
        "positions": _squeeze(run.positions.transpose(0, 2, 1)),
        "marks": run.marks.tolist(),
        "x_range": [-edge, edge],
        "y_range": [-edge, edge],
        "kernels": [
            {"frame": frame, "size": len(kernel), "values": _squeeze(kernel)}
            for frame, kernel in run.kernels
        ],
        "kernel_low": low,
        "kernel_high": high,
    }


def _squeeze(values: FloatArray) -> dict[str, Any]:
    """Sixteen bits for each number: finer than any screen."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    span = (high - low) or 1.0
    scaled = np.nan_to_num((values - low) / span * 65535)
    data = base64.b64encode(scaled.round().astype("<u2").tobytes()).decode()
    return {"low": low, "high": low + span, "data": data}


def _edge(run: Run) -> float:
    """How far the picture reaches from the middle, on each side."""
    if run.radius is not None:
        return 1.05 * run.radius
    # A few that stray far would make the rest a dot.
    far = float(np.quantile(np.abs(run.positions), _SEEN_SHARE))
    return 1.15 * max(far, float(np.abs(run.marks).max(initial=0.0))) or 1.0


def _kernel_range(run: Run) -> tuple[float, float]:
    """Leave the diagonal out: it is one, and would hide the rest."""
    parts = [kernel[~np.eye(len(kernel), dtype=bool)] for _, kernel in run.kernels]
    off = np.concatenate([*parts, np.zeros(0)])
    off = off[np.isfinite(off)]
    if not off.size:
        return 0.0, 1.0
    low, high = np.quantile(off, [0.01, 0.995])
    return float(low), float(high) if high > low else float(low) + 1.0


def _print_cloud(axis: Any, run: Run) -> None:
    first, last = run.positions[0], run.positions[-1]
    axis.scatter(*first.T, s=6, color=LIGHT[7], alpha=0.4, linewidths=0, label="start")
    axis.scatter(*last.T, s=9, color=LIGHT[1], alpha=0.8, linewidths=0, label="end")
    if len(run.marks):
        axis.plot(*run.marks.T, "+", color=LIGHT[0], markersize=8)
    limits = (-_edge(run), _edge(run))
    x, y = map(safe_text, run.axes)
    axis.set(title="Particles", xlabel=x, ylabel=y)
    axis.set(xlim=limits, ylim=limits, aspect="equal")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handletextpad=0.1)


def _print_kernel(axis: Any, run: Run, which: int, when: str) -> None:
    if not run.kernels:
        axis.set_axis_off()
        return
    low, high = _kernel_range(run)
    image = axis.imshow(run.kernels[which][1], cmap="cividis", vmin=low, vmax=high)
    axis.grid(False)
    axis.set(title=f"Kernel {when}", xticks=[], yticks=[], xlabel="samples by class")
    if which:
        axis.figure.colorbar(image, ax=axis, shrink=0.8, label="$K(x, x')$")
