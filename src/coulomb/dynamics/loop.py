"""The one run loop: steps, history, stop rules, callbacks, progress, saved state.

A run is a function of its state: particles, step, generator and history. Saving the
state and going on later gives the same trajectory, to the bit.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coulomb._support.archive import read_archive, write_archive
from coulomb._support.checks import Registry, check_count, check_real
from coulomb._support.errors import DivergedError, FileFormatError, ParameterError
from coulomb._support.progress import Advance, progress_bar
from coulomb.dynamics.langevin import AbstractSampler, Info, State
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.objectives import AbstractObjective


class StopReason(Enum):
    """Why a run ended."""

    MAX_STEPS = "all steps were made"
    SETTLED = "the particles stopped moving"
    HELD_OUT = "the alignment on held-out data stopped improving"
    NO_GAIN = "no learning scored best on held-out data: the features stay as drawn"
    CALLBACK = "a callback asked to stop"


def max_displacement(before: Tensor, after: Tensor) -> float:
    """Measure the largest move of a particle, `max_k |w_k - w'_k|`.

    Parameters
    ----------
    before, after
        Positions of the same particles, shape `(..., n, dim)`.

    Returns
    -------
    float
        The distance.
    """
    return float((after - before).norm(dim=-1).max())


def sliced_wasserstein(before: Tensor, after: Tensor, *, slices: int = 64) -> float:
    """Measure the sliced 2-Wasserstein distance of two clouds of equal size.

    Directions come from a fixed seed, so that the distance is a function of the clouds
    alone.

    Parameters
    ----------
    before, after
        Positions, shape `(n, dim)`.
    slices
        How many directions.

    Returns
    -------
    float
        `sqrt(mean over directions and ranks of the squared gap)`.

    Examples
    --------
    >>> cloud = torch.tensor([[0.0], [1.0]])
    >>> sliced_wasserstein(cloud, cloud + 2)
    2.0
    """
    dim = before.shape[-1]
    generator = torch.Generator().manual_seed(dim)
    directions = torch.randn(dim, slices, generator=generator, dtype=torch.float64)
    directions = directions / directions.norm(dim=0)
    left = (before.double().reshape(-1, dim) @ directions).sort(dim=0).values
    right = (after.double().reshape(-1, dim) @ directions).sort(dim=0).values
    return float((left - right).square().mean().sqrt())


def energy_distance(before: Tensor, after: Tensor) -> float:
    """Measure `sqrt(2 E|X - Y| - E|X - X'| - E|Y - Y'|)` of two clouds.

    Parameters
    ----------
    before, after
        Positions, shape `(n, dim)`.

    Returns
    -------
    float
        Zero for equal clouds only.

    Examples
    --------
    >>> energy_distance(torch.tensor([[0.0]]), torch.tensor([[2.0]]))
    2.0
    """
    dim = before.shape[-1]
    left, right = before.double().reshape(-1, dim), after.double().reshape(-1, dim)
    cross = torch.cdist(left, right).mean()
    own = torch.cdist(left, left).mean() + torch.cdist(right, right).mean()
    return math.sqrt(max(0.0, float(2 * cross - own)))


DISTANCES = {
    "max-displacement": max_displacement,
    "sliced-wasserstein": sliced_wasserstein,
    "energy-distance": energy_distance,
}


class AbstractStopRule(ABC):
    """Decides from what a run has recorded."""

    @abstractmethod
    def check(
        self, history: Sequence[dict[str, Any]], windows: Sequence[Tensor]
    ) -> StopReason | None:
        """Say whether the run is over.

        Parameters
        ----------
        history
            The records so far, the newest last.
        windows
            Mean positions over the last two full windows, oldest first; shorter at the
            beginning.

        Returns
        -------
        StopReason or None
            None to go on.
        """


stop_rules: Registry[AbstractStopRule] = Registry("stopping")


@stop_rules.add("settled")
@dataclass(frozen=True)
class Settled(AbstractStopRule):
    """Stop when `D(mean of this window, mean of the one before) < tol`.

    Parameters
    ----------
    tol
        The threshold; 0 never stops.
    distance
        "max-displacement", "sliced-wasserstein" or "energy-distance".
    """

    tol: float
    distance: str = "sliced-wasserstein"

    def __post_init__(self) -> None:
        check_real("tol", self.tol, at_least=0)
        if self.distance not in DISTANCES:
            raise ParameterError(
                f"`distance` must be one of {', '.join(DISTANCES)}; "
                f"got {self.distance!r}."
            )

    def check(
        self, history: Sequence[dict[str, Any]], windows: Sequence[Tensor]
    ) -> StopReason | None:
        if len(windows) < 2 or self.tol == 0:
            return None
        moved = DISTANCES[self.distance](windows[-2], windows[-1])
        return StopReason.SETTLED if moved < self.tol else None


@stop_rules.add("held-out")
@dataclass(frozen=True)
class HeldOut(AbstractStopRule):
    """Stop when the held-out alignment has not improved for `patience` records.

    Parameters
    ----------
    tol
        What counts as an improvement.
    patience
        How many records to wait.
    """

    tol: float = 0.0
    patience: int = 10

    def __post_init__(self) -> None:
        check_real("tol", self.tol, at_least=0)
        check_count("patience", self.patience)

    def check(
        self, history: Sequence[dict[str, Any]], windows: Sequence[Tensor]
    ) -> StopReason | None:
        scores = [record["held_out"] for record in history if "held_out" in record]
        if len(scores) <= self.patience:
            return None
        best_before = max(scores[: -self.patience])
        stalled = max(scores[-self.patience :]) <= best_before + self.tol
        return StopReason.HELD_OUT if stalled else None


FORMAT = "coulomb-run-1"

Callback = Callable[["Run"], bool | None]


@dataclass
class Run:
    """A run in progress, or its end.

    Parameters
    ----------
    state
        Where the particles are.
    generator
        The source of randomness, as it is after the last step.
    history
        One record every `record_every` steps.
    windows
        Mean positions over the last full windows.
    reason
        Why the run ended; None while it has not.
    """

    state: State
    generator: torch.Generator
    history: list[dict[str, Any]] = field(default_factory=list)
    windows: list[Tensor] = field(default_factory=list)
    reason: StopReason | None = None
    _window_sum: Tensor | None = None
    _window_count: int = 0

    @property
    def particles(self) -> Particles:
        """The configuration."""
        return self.state.particles


@dataclass(frozen=True, eq=False)
class RunSettings:
    """How a run is driven; none of it changes the trajectory before it stops.

    Parameters
    ----------
    max_steps
        The last step.
    record_every
        Steps between records; stop rules are asked at records.
    window
        Records that are averaged before two windows are compared.
    stop
        Rules; the first to answer ends the run.
    held_out
        An objective on other data; minus its energy is recorded as "held_out".
    callbacks
        Called with the run at each record; True ends it.
    progress
        Show a bar; None shows it on a terminal only.
    """

    max_steps: int
    record_every: int = 10
    window: int = 5
    stop: Sequence[AbstractStopRule] = ()
    held_out: AbstractObjective | None = None
    callbacks: Sequence[Callback] = ()
    progress: bool | None = False

    def __post_init__(self) -> None:
        check_count("max_steps", self.max_steps, at_least=0)
        check_count("record_every", self.record_every)
        check_count("window", self.window)


def init_run(
    sampler: AbstractSampler, particles: Particles, *, generator: torch.Generator
) -> Run:
    """Begin a run.

    Parameters
    ----------
    sampler
        How the particles move.
    particles
        Where they are.
    generator
        The source of randomness.

    Returns
    -------
    Run
        At step zero, with an empty history.
    """
    return Run(sampler.init(particles), generator)


def run(
    current: Run, sampler: AbstractSampler, energy: Hamiltonian, settings: RunSettings
) -> Run:
    """Go on until a rule or the step limit ends the run.

    Parameters
    ----------
    current
        Where to go on from; it is changed.
    sampler
        How the particles move.
    energy
        What moves them.
    settings
        How the run is driven.

    Returns
    -------
    Run
        The same object, with its reason.

    Examples
    --------
    >>> from coulomb.dynamics.langevin import ProjectedLangevin
    >>> from coulomb.objectives import GaussianPrior
    >>> sampler = ProjectedLangevin(0.1, inverse_temperature=math.inf)
    >>> energy = Hamiltonian(GaussianPrior(1.0, inverse_temperature=1.0))
    >>> particles = Particles(torch.ones(2, 1))
    >>> begun = init_run(sampler, particles, generator=torch.Generator())
    >>> run(begun, sampler, energy, RunSettings(max_steps=20)).reason
    <StopReason.MAX_STEPS: 'all steps were made'>
    """
    current.reason = None
    if not current.history:
        current.history.append(_record(current, energy, settings, None))
    left = max(0, settings.max_steps - current.state.step)
    bar: AbstractContextManager[Advance | None] = nullcontext()
    if settings.progress is not False:
        bar = progress_bar("moving particles", left, visible=settings.progress)
    with bar as show:
        while current.reason is None and current.state.step < settings.max_steps:
            steps = _until_record(current.state.step, settings)
            current.state, info = sampler.advance(
                current.state, energy, steps, generator=current.generator
            )
            _refuse_divergence(current)
            current.history.append(_record(current, energy, settings, info))
            _add_to_window(current, settings.window)
            current.reason = _asked_to_stop(current, settings)
            if show is not None:
                show(steps, note=_note(current.history[-1]))
    current.reason = current.reason or StopReason.MAX_STEPS
    return current


_RENAMED = {"proceed": "run", "start": "init_run"}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = f"`{name}` is now called `{_RENAMED[name]}`."
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]


def _until_record(step: int, settings: RunSettings) -> int:
    # Records are at multiples of `record_every`, wherever the run was interrupted.
    next_record = (step // settings.record_every + 1) * settings.record_every
    return min(next_record, settings.max_steps) - step


def _refuse_divergence(run: Run) -> None:
    if not bool(torch.isfinite(run.particles.positions).all()):
        raise DivergedError(
            f"The particles are not finite at step {run.state.step}; use a smaller "
            "`step_size`, a `clip` or a bounded `domain`."
        )


@torch.no_grad()
def _record(
    run: Run, energy: Hamiltonian, settings: RunSettings, info: Info | None
) -> dict[str, Any]:
    # Random pair sums are drawn from a copy: looking must not change the run.
    watcher = torch.Generator().manual_seed(run.state.step)
    terms = info.terms if info else None
    terms = terms or energy.terms(run.particles, generator=watcher)
    record: dict[str, Any] = {
        "step": run.state.step,
        "energy": _number(terms.total),
        "alignment": -_number(terms.alignment),
        "repulsion": _number(terms.repulsion),
        "prior": _number(terms.prior),
    }
    if info is not None:
        record["displacement"] = math.sqrt(info.displacement)
        record["drift"] = math.sqrt(info.drift)
        record["noise"] = math.sqrt(info.noise)
        record["accepted"] = info.accepted
    if settings.held_out is not None:
        record["held_out"] = -_number(settings.held_out.energy(run.particles))
    return record


def _number(values: Tensor) -> float:
    return float(values.detach().double().mean())


def _note(record: dict[str, Any]) -> str:
    note = f"energy {record['energy']:.4g}, alignment {record['alignment']:.4g}"
    if "held_out" in record:
        note += f", held out {record['held_out']:.4g}"
    return note


def _add_to_window(run: Run, size: int) -> None:
    positions = run.particles.positions.detach().double()
    total = positions if run._window_sum is None else run._window_sum + positions
    run._window_sum, run._window_count = total, run._window_count + 1
    if run._window_count == size:
        run.windows = [*run.windows[-1:], run._window_sum / size]
        run._window_sum, run._window_count = None, 0


def _asked_to_stop(run: Run, settings: RunSettings) -> StopReason | None:
    # Callbacks come first: they see every record, the last one too.
    answers = [callback(run) for callback in settings.callbacks]
    for rule in settings.stop:
        reason = rule.check(run.history, run.windows)
        if reason is not None:
            return reason
    return StopReason.CALLBACK if any(answers) else None


def save_run(
    run: Run, path: str | Path, *, extra: Mapping[str, Tensor] | None = None
) -> None:
    """Write a run to one safetensors file, whole or not at all.

    Parameters
    ----------
    run
        The run.
    path
        The file to make or replace.
    extra
        Tensors to keep in the same file, for the caller to read; their names must not
        be among the run's own.
    """
    tensors = {
        "positions": run.particles.positions.detach(),
        "generator": run.generator.get_state(),
    }
    if run.particles.phases is not None:
        tensors["phases"] = run.particles.phases.detach()
    for name, kept in run.state.memory.items():
        tensors[f"memory_{name}"] = kept.detach()
    for index, window in enumerate(run.windows):
        tensors[f"window_{index}"] = window
    if run._window_sum is not None:
        tensors["window_sum"] = run._window_sum
    about = {
        "format": FORMAT,
        "step": run.state.step,
        "history": run.history,
        "window_count": run._window_count,
        "reason": run.reason.name if run.reason else None,
    }
    write_archive(path, tensors | dict(extra or {}), about)


def load_run(path: str | Path) -> Run:
    """Read a run that `save_run` wrote.

    Parameters
    ----------
    path
        The file.

    Returns
    -------
    Run
        To go on with in `run`.
    """
    tensors, about = read_archive(path, complaint="is not a saved run", form=FORMAT)
    generator = torch.Generator()
    try:
        generator.set_state(tensors["generator"])
        particles = Particles(tensors["positions"], tensors.get("phases"))
        reason = StopReason[about["reason"]] if about["reason"] else None
        counts = [about["step"], about["window_count"]]
        if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in counts):
            raise ValueError(f"a run cannot have made {counts} steps")
        if any(not isinstance(record, dict) for record in about["history"]):
            raise ValueError("its history is not a list of records")
        for name in tensors.keys() - {"generator", "align.seed"}:
            if not tensors[name].is_floating_point():
                raise ValueError(f"{name!r} is of the type {tensors[name].dtype}")
        memory = {
            name.removeprefix("memory_"): tensor
            for name, tensor in tensors.items()
            if name.startswith("memory_")
        }
        return Run(
            State(particles, about["step"], memory),
            generator,
            list(about["history"]),
            [tensors[name] for name in ("window_0", "window_1") if name in tensors],
            reason,
            tensors.get("window_sum"),
            about["window_count"],
        )
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FileFormatError(f"{path} is a damaged run: {error}.") from error
