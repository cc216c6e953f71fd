"""What Phase A is asked to do, and the problem that a model and its data make of it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError, unknown_name
from coulomb._support.streams import make_generator
from coulomb.attention.align.batches import as_batches
from coulomb.attention.align.energies import AbstractBatched, ModelAlignment, Pool, View
from coulomb.attention.align.model_as_function import (
    Evaluate,
    Network,
    ParticleLayers,
    call_model,
)
from coulomb.attention.align.sampler import HELD_OUT, Account, BatchedLangevin
from coulomb.attention.align.scores import AbstractScore, as_score
from coulomb.domains import AbstractDomain, Ball, Space
from coulomb.dynamics.langevin import AbstractSchedule, AdamLangevin, ProjectedLangevin
from coulomb.energy import Hamiltonian
from coulomb.interactions import AbstractInteraction, Riesz
from coulomb.objectives import AbstractOneBody

# How particles move on one batch.
_SAMPLERS: dict[str, type[ProjectedLangevin] | type[AdamLangevin]] = {
    "langevin": ProjectedLangevin,
    "adam": AdamLangevin,
}


@dataclass(frozen=True, eq=False)
class AlignmentSettings:
    """What Phase A is asked to do. The defaults are the library's; see `PAPER`.

    Parameters
    ----------
    objective
        "centred", "within-class", "likelihood", "target", or a score.
    level
        "sequence", "token", "layer" or "head"; see `View`.
    pool
        "mean", "cls" or a function of outputs and key mask.
    output
        None for the outputs of the attention layers (what the model returns for the
        objective "likelihood"), "" for what the model returns, or the name of the
        module whose output counts.
    layers
        Names of the layers whose particles move; None for all.
    sampler
        "langevin", or "adam" for steps preconditioned as in Adam, without noise: every
        coordinate moves about `step_size`, however weak the force.
    step_size
        `eta`.
    inverse_temperature
        `beta`, a number or a schedule; infinity is gradient flow.
    drift
        "N" for `N grad_k H`, "plain" for `grad_k H`.
    clip
        The largest norm of a particle's drift, before the step size.
    interaction
        Between the particles of one head.
    strength
        `lambda`.
    domain
        Where particles may be; a ball bounds their norms.
    prior
        A one-body energy of the particles; None for none.
    max_epochs
        How often all batches are gone through, at most.
    max_steps
        The last step; None leaves it to `max_epochs`.
    tol
        Stop when no particle moved farther between the means of two windows of records;
        0 never does.
    patience
        Stop when held-out alignment has not improved for so many records; None never.
    record_every
        Steps between records; None for four an epoch, but at most ten in all.
    watched
        How many training batches the recorded alignment is over.
    also
        Other parameters that move, by plain gradient steps: "norm", "value", or parts
        of their names.
    also_step_size
        The step of those.
    """

    objective: str | AbstractScore = "centred"
    level: str = "sequence"
    pool: Pool = "mean"
    output: str | None = None
    layers: tuple[str, ...] | None = None
    sampler: str = "langevin"
    step_size: float = 1.0
    inverse_temperature: float | AbstractSchedule = 1e5
    drift: str = "N"
    clip: float = 1.0
    interaction: AbstractInteraction = field(default_factory=Riesz)
    strength: float = 1e-3
    domain: AbstractDomain = field(default_factory=Space)
    prior: AbstractOneBody | None = None
    max_epochs: int = 10
    max_steps: int | None = None
    tol: float = 0.0
    patience: int | None = None
    record_every: int | None = None
    watched: int = 4
    also: tuple[str, ...] = ()
    also_step_size: float = 1e-2

    def __post_init__(self) -> None:
        check_count("max_epochs", self.max_epochs, at_least=0)
        check_count("watched", self.watched)
        if self.sampler not in _SAMPLERS:
            raise unknown_name("sampler", self.sampler, _SAMPLERS)
        if self.sampler == "adam" and self.inverse_temperature != math.inf:
            # Noise that is scaled by the gradient would leave no control without it.
            raise ParameterError(
                "`inverse_temperature` must be infinite with the sampler 'adam'; got "
                f"{self.inverse_temperature}. Use 'langevin' to have noise."
            )
        check_real("also_step_size", self.also_step_size, above=0)

    def changed(self, changes: dict[str, Any]) -> "AlignmentSettings":
        """Replace some settings.

        Parameters
        ----------
        changes
            New values by name.

        Returns
        -------
        AlignmentSettings
            A copy.
        """
        known = [setting.name for setting in fields(self)]
        for name in changes:
            if name not in known:
                raise unknown_name("settings", name, known)
        return replace(self, **changes)


# The paper's Phase A [CPM "Experimental setup"]; no setting is left to a default.
PAPER = AlignmentSettings(
    objective="within-class",
    level="sequence",
    pool="mean",
    output=None,
    layers=None,
    sampler="langevin",
    step_size=2e-3,
    inverse_temperature=50.0,
    drift="plain",
    clip=10.0,
    interaction=Riesz(s=0.0),
    strength=1e-3,
    domain=Ball(1.5),
    prior=None,
    max_epochs=10,
    max_steps=None,
    tol=1e-6,
    patience=None,
    record_every=None,
    watched=4,
    also=(),
    also_step_size=2e-3,
)


@dataclass(frozen=True, eq=False)
class Problem:
    """A model, its data and what is asked: everything but the particles."""

    settings: AlignmentSettings
    objective: ModelAlignment
    training: tuple[int, ...]
    held_out: ModelAlignment | None
    seed: int

    @property
    def network(self) -> Network:
        """The model as a function of its particles."""
        return self.objective.network

    @property
    def last_step(self) -> int:
        """Where the run ends if no rule ends it before."""
        if self.settings.max_steps is not None:
            return self.settings.max_steps
        return self.settings.max_epochs * len(self.training)

    def energy(self, objective: AbstractBatched) -> Hamiltonian:
        """Build the Hamiltonian of an objective."""
        chosen = self.settings
        return Hamiltonian(objective, chosen.interaction, chosen.strength, chosen.prior)

    def sampler(self, account: Account) -> BatchedLangevin:
        """Build what moves the particles."""
        chosen = self.settings
        moves = _SAMPLERS[chosen.sampler](
            chosen.step_size,
            chosen.inverse_temperature,
            domain=chosen.domain,
            clip=chosen.clip,
        )
        return BatchedLangevin(
            moves,
            self.training,
            self.seed,
            account,
            chosen.drift,
            self.network.free,
            chosen.also_step_size,
        )


def set_up(
    model: nn.Module,
    batches: Iterable[Any],
    settings: AlignmentSettings,
    *,
    held_out: Iterable[Any] | float | None = 0.2,
    evaluate: Evaluate | None = None,
    seed: int = 0,
) -> Problem:
    """Put a model, its data and the settings together; nothing is computed."""
    every = as_batches(batches)
    layers = ParticleLayers.find(model, settings.layers)
    score = as_score(settings.objective)
    output = settings.output
    if score.of_logits:
        output = output or ""
        if settings.level not in ("sequence", "token"):
            raise ParameterError(
                f"`level` must be 'sequence' or 'token' for the objective "
                f"{score.label()!r}; got {settings.level!r}."
            )
    network = Network(model, layers, evaluate or call_model, output)
    network.free.update(network.free_from(settings.also))
    order = list(range(len(every)))
    kept_back: list[int] = []
    if isinstance(held_out, int | float):
        share = check_real("held_out", held_out, at_least=0, below=1)
        count = max(1, round(share * len(every))) if share and len(every) > 1 else 0
        generator = make_generator(seed, HELD_OUT)
        mixed = torch.randperm(len(every), generator=generator).tolist()
        kept_back, order = sorted(mixed[:count]), sorted(mixed[count:])
    view = View(settings.level, settings.pool)
    objective = ModelAlignment(network, score, view, every, tuple(order))
    other: ModelAlignment | None = None
    if kept_back:
        other = replace(objective, numbers=tuple(kept_back))
    elif held_out is not None and not isinstance(held_out, int | float):
        other = objective.on(as_batches(held_out))
    watched = replace(objective, numbers=tuple(order[: settings.watched]))
    return Problem(settings, watched, tuple(order), other, seed)
