"""Where Phase A begins: the model's own particles, or a start that aligns better."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from coulomb._support.errors import ParameterError, unknown_name
from coulomb.attention.phase_a import Problem
from coulomb.features import Particles

OWN = "own"
_JUDGES = 128  # training batches that choose among starts
_MARGIN = 2.0  # standard errors: the best of several is often only the luckiest


def read_places(
    problem: Problem, own: Tensor, starts: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Bring every start into the domain, the model's own among them.

    Parameters
    ----------
    problem
        What Phase A is asked.
    own
        Where the model's particles are.
    starts
        Other places, by name.

    Returns
    -------
    dict
        Positions by name.
    """
    places = {OWN: own}
    for name, positions in starts.items():
        if positions.shape != own.shape:
            raise ParameterError(
                f"`starts` must hold particles of shape {tuple(own.shape)}; got "
                f"{tuple(positions.shape)} for {name!r}."
            )
        places[name] = problem.settings.domain.project(positions.to(own))
    return places


def choose_start(
    problem: Problem, places: Mapping[str, Tensor], prefer: str
) -> tuple[dict[str, float], str]:
    """Ask training batches for a start.

    Parameters
    ----------
    problem
        What Phase A is asked.
    places
        Positions by name.
    prefer
        What is taken unless another is better by two standard errors.

    Returns
    -------
    tuple
        The mean alignment of every start, and the name of the one to take.
    """
    if prefer not in places:
        raise unknown_name("prefer", prefer, places)
    numbers = problem.training[:_JUDGES]
    values = {
        name: torch.stack(
            [problem.objective.score_batch(Particles(w), number) for number in numbers]
        ).double()
        for name, w in places.items()
    }
    chosen, best = prefer, 0.0
    for name, value in values.items():
        gains = value - values[prefer]
        mean = float(gains.mean())
        error = float(gains.std()) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
        if mean > max(best, _MARGIN * error):
            chosen, best = name, mean
    return {name: float(value.mean()) for name, value in values.items()}, chosen
