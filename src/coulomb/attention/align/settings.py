"""What Phase A is asked to do: `AlignmentSettings`, and the paper's, `PAPER`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from coulomb._support.checks import check_count, check_member, check_real
from coulomb._support.errors import ParameterError
from coulomb.attention.align.scores import AbstractScore
from coulomb.domains import AbstractDomain, Ball, Space
from coulomb.dynamics.langevin import (
    AbstractGradientSampler,
    AbstractSchedule,
    AdamLangevin,
    samplers,
)
from coulomb.interactions import AbstractInteraction, Riesz
from coulomb.objectives import AbstractOneBody

Pool = str | Callable[[Tensor, Tensor | None], Tensor]


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
        check_member("drift", self.drift, ("N", "plain"))
        built = self.build_sampler()
        if isinstance(built, AdamLangevin) and self.inverse_temperature != math.inf:
            # Noise that is scaled by the gradient would leave no control without it.
            raise ParameterError(
                "`inverse_temperature` must be infinite with the sampler 'adam'; got "
                f"{self.inverse_temperature}. Use 'langevin' to have noise."
            )
        check_real("also_step_size", self.also_step_size, above=0)

    def build_sampler(self) -> AbstractGradientSampler:
        """Build what moves the particles along the gradient of a batch.

        Returns
        -------
        AbstractGradientSampler
            The member of `samplers` that `sampler` names.
        """
        built = samplers.build(
            self.sampler,
            step_size=self.step_size,
            inverse_temperature=self.inverse_temperature,
            domain=self.domain,
            clip=self.clip,
        )
        if not isinstance(built, AbstractGradientSampler):
            raise ParameterError(
                f"`sampler` must need the gradient only; got {self.sampler!r}. Use "
                "'langevin' or 'adam'."
            )
        return built

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
            check_member("settings", name, known)
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
