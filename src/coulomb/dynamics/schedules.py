"""Schedules of the inverse temperature."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from coulomb._support.checks import check_count, check_real


class AbstractSchedule(ABC):
    """The inverse temperature as a function of the step."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Tell the inverse temperature of a step.

        Parameters
        ----------
        step
            Counted from zero.

        Returns
        -------
        float
            Positive, possibly infinite.
        """


@dataclass(frozen=True)
class Constant(AbstractSchedule):
    """The same temperature at every step.

    Parameters
    ----------
    inverse_temperature
        `beta`; infinity is gradient flow.
    """

    inverse_temperature: float

    def __post_init__(self) -> None:
        check_real(
            "inverse_temperature", self.inverse_temperature, above=0, infinite=True
        )

    def __call__(self, step: int) -> float:
        return self.inverse_temperature


@dataclass(frozen=True)
class Annealed(AbstractSchedule):
    """Cool geometrically from `start` to `end` over `steps`, then stay.

    Parameters
    ----------
    start, end
        Inverse temperatures, positive and finite.
    steps
        How long the cooling takes.

    Examples
    --------
    >>> cool = Annealed(start=1.0, end=100.0, steps=10)
    >>> cool(0), round(cool(5), 9), cool(20)
    (1.0, 10.0, 100.0)
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        check_real("start", self.start, above=0)
        check_real("end", self.end, above=0)
        check_count("steps", self.steps)

    def __call__(self, step: int) -> float:
        share = min(step / self.steps, 1.0)
        if share == 1.0:
            return self.end
        return self.start * math.exp(share * math.log(self.end / self.start))


def as_schedule(value: "float | AbstractSchedule") -> AbstractSchedule:
    """Turn a number into a constant schedule.

    Parameters
    ----------
    value
        A number or a schedule.

    Returns
    -------
    AbstractSchedule
        The schedule.
    """
    return value if isinstance(value, AbstractSchedule) else Constant(value)
