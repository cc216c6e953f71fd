"""The animation of the particles: read, checked, packed for the page, and printed."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from coulomb._support.errors import FileFormatError
from coulomb.report.palette import LIGHT
from coulomb.report.print import PRINT_STYLE, safe_text, save

FloatArray = npt.NDArray[np.float64]
_MOST_FRAMES, _MOST_PARTICLES, _MOST_ROWS = 600, 1000, 200
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
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise FileFormatError(f"{path}: not JSON ({error}).") from error
    runs = content.get("runs") if isinstance(content, dict) else None
    if not isinstance(runs, list) or not runs:
        raise FileFormatError(f"{path}: `runs` must be a list of runs.")
    return [_check(run, f"{path}, run {i}") for i, run in enumerate(runs)]


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
            _print_energy(axes[1], run)
            _print_kernel(axes[2], run, 0, "before")
            _print_kernel(axes[3], run, -1, "after")
        return save(figure)


def _check(run: Any, place: str) -> Run:
    if not isinstance(run, dict):
        raise FileFormatError(f"{place}: must be an object; got {run!r:.40}.")
    positions = _array(run, "positions", 3, place)
    n_frames, n_particles, dim = positions.shape
    if dim != 2 or not 0 < n_frames <= _MOST_FRAMES:
        raise FileFormatError(
            f"{place}: `positions` must be (frames, particles, 2) with at most "
            f"{_MOST_FRAMES} frames; got {positions.shape}."
        )
    if not 0 < n_particles <= _MOST_PARTICLES or not np.isfinite(positions).all():
        raise FileFormatError(
            f"{place}: `positions` must hold 1 to {_MOST_PARTICLES} finite particles."
        )
    steps, energy = (_array(run, name, 1, place) for name in ("steps", "energy"))
    if len(steps) != n_frames or len(energy) != n_frames:
        raise FileFormatError(
            f"{place}: `steps` and `energy` must have one number for each of the "
            f"{n_frames} frames; got {len(steps)} and {len(energy)}."
        )
    axes = run.get("axes") or ["first coordinate", "second coordinate"]
    radius = run.get("radius")
    return Run(
        title=str(run.get("title", "run"))[:80],
        axes=(str(axes[0])[:60], str(axes[-1])[:60]),
        radius=float(radius) if isinstance(radius, int | float) else None,
        steps=steps,
        positions=positions,
        energy=energy,
        kernels=tuple(sorted(_kernels(run, place, n_frames), key=lambda pair: pair[0])),
        marks=_array(run, "marks", 2, place) if run.get("marks") else np.zeros((0, 2)),
    )


def _kernels(run: dict[str, Any], place: str, n_frames: int) -> Any:
    for kernel in run.get("kernels") or []:
        values = _array(kernel, "values", 2, place)
        frame = kernel.get("frame")
        if not isinstance(frame, int) or not 0 <= frame < n_frames:
            raise FileFormatError(
                f"{place}: `frame` of a kernel must be below {n_frames}; got {frame!r}."
            )
        if values.shape[0] != values.shape[1] or len(values) > _MOST_ROWS:
            raise FileFormatError(
                f"{place}: a kernel must be square with at most {_MOST_ROWS} rows; "
                f"got {values.shape}."
            )
        yield frame, values


def _array(content: Any, name: str, ndim: int, place: str) -> FloatArray:
    try:
        array = np.array(content[name], dtype=np.float64)
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{place}: `{name}` must be an array.") from error
    if array.ndim != ndim or not array.size:
        raise FileFormatError(
            f"{place}: `{name}` must have {ndim} axes; got shape {array.shape}."
        )
    return array


def _pack(run: Run) -> dict[str, Any]:
    (left, right), (bottom, top) = _limits(run)
    values = [kernel for _, kernel in run.kernels]
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
        "x_range": [left, right],
        "y_range": [bottom, top],
        "kernels": [
            {"frame": frame, "size": len(kernel), "values": _squeeze(kernel)}
            for frame, kernel in run.kernels
        ],
        "kernel_low": low if values else 0,
        "kernel_high": high if values else 1,
    }


def _squeeze(values: FloatArray) -> dict[str, Any]:
    """Sixteen bits for each number: finer than any screen."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    span = (high - low) or 1.0
    scaled = np.nan_to_num((values - low) / span * 65535)
    data = base64.b64encode(scaled.round().astype("<u2").tobytes()).decode()
    return {"low": low, "high": low + span, "data": data}


def _limits(run: Run) -> tuple[tuple[float, float], tuple[float, float]]:
    if run.radius is not None:
        edge = 1.05 * run.radius
        return (-edge, edge), (-edge, edge)
    # A few that stray far would make the rest a dot.
    far = float(np.quantile(np.abs(run.positions), _SEEN_SHARE))
    marks = float(np.abs(run.marks).max()) if len(run.marks) else 0.0
    edge = 1.15 * max(far, marks) or 1.0
    return (-edge, edge), (-edge, edge)


def _kernel_range(run: Run) -> tuple[float, float]:
    """Leave the diagonal out: it is one, and would hide the rest."""
    if not run.kernels:
        return 0.0, 1.0
    parts = [kernel[~np.eye(len(kernel), dtype=bool)] for _, kernel in run.kernels]
    off = np.concatenate(parts)
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
    (left, right), (bottom, top) = _limits(run)
    axis.set(
        title="Particles",
        xlabel=safe_text(run.axes[0]),
        ylabel=safe_text(run.axes[1]),
        xlim=(left, right),
        ylim=(bottom, top),
        aspect="equal",
    )
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handletextpad=0.1)


def _print_energy(axis: Any, run: Run) -> None:
    axis.semilogx(1 + run.steps, run.energy, color=LIGHT[2])
    words = {"xlabel": "1 + Langevin step", "ylabel": "$H$, mean per particle"}
    axis.set(title="Energy", **words)


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
