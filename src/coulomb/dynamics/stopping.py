"""When a run is over, and why: every run ends with a named reason.

With noise on, successive measures never stop moving. The rules therefore compare
averages of the particles over windows of the history, or watch the energy on held-out
data.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from coulomb._support.checks import Registry, check_count, check_real
from coulomb._support.errors import ParameterError


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
