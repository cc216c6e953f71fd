"""The Hamiltonian: alignment, repulsion and prior, with the force that moves particles.

`H = E + lambda W + prior`. All three are means, so that nothing scales with `N`; the
force on a particle is `-N grad_k H`.
"""

import warnings
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb._support.checks import check_real
from coulomb.features import Particles
from coulomb.interactions import (
    AbstractInteraction,
    AbstractPairSum,
    ExactSum,
    PairField,
    Riesz,
)
from coulomb.objectives import AbstractObjective, AbstractOneBody, AbstractSampled


class EnergyTerms(NamedTuple):
    """The value of the Hamiltonian and of its parts, one number per group."""

    total: Tensor
    alignment: Tensor  # E
    repulsion: Tensor  # W, before it is multiplied by the strength
    prior: Tensor


@dataclass(frozen=True, eq=False)
class Hamiltonian:
    """`H = E + lambda W + prior`. [CPM eq:main-hamiltonian].

    Parameters
    ----------
    objective
        The alignment energy `E`.
    interaction
        The pair potential of `W`.
    strength
        `lambda`, at least zero.
    prior
        A one-body energy that does not look at the data; None for none.
    pair_sum
        How the pairs are summed.

    Examples
    --------
    >>> from coulomb.objectives import FourierAlignment, Sample
    >>> sample = Sample(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [-1.0]]))
    >>> energy = Hamiltonian(FourierAlignment(sample), Riesz(s=1), strength=0.5)
    >>> energy.value(Particles(torch.tensor([[0.0], [2.0]])))
    tensor(0.4169)
    """

    objective: AbstractObjective
    interaction: AbstractInteraction = field(default=Riesz())
    strength: float = 0.0
    prior: AbstractOneBody | None = None
    pair_sum: AbstractPairSum = field(default=ExactSum())

    def __post_init__(self) -> None:
        check_real("strength", self.strength, at_least=0)

    def terms(
        self, particles: Particles, *, generator: torch.Generator | None = None
    ) -> EnergyTerms:
        """Evaluate the Hamiltonian and its parts.

        Parameters
        ----------
        particles
            The configuration.
        generator
            For random pair sums.

        Returns
        -------
        EnergyTerms
            Numbers per group.
        """
        alignment = self.objective.energy(particles)
        repulsion = 0.5 * self._pairs(particles, generator).potential.mean(dim=-1)
        return self.combine(particles, alignment, repulsion)

    def combine(
        self, particles: Particles, alignment: Tensor, repulsion: Tensor
    ) -> EnergyTerms:
        """Add the prior to an alignment and a repulsion that are known already.

        Parameters
        ----------
        particles
            The configuration.
        alignment, repulsion
            `E` and `W` there, one number per group.

        Returns
        -------
        EnergyTerms
            Numbers per group.
        """
        prior = torch.zeros_like(repulsion)
        if self.prior is not None:
            prior = self.prior.energy(particles)
        # An infinite repulsion of zero strength is no repulsion.
        weighted = self.strength * repulsion if self.strength else 0 * prior
        return EnergyTerms(alignment + weighted + prior, alignment, repulsion, prior)

    def value(
        self, particles: Particles, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Evaluate `H`.

        Parameters
        ----------
        particles
            The configuration.
        generator
            For random pair sums.

        Returns
        -------
        Tensor
            One number per group.
        """
        return self.terms(particles, generator=generator).total

    def gradient(
        self,
        particles: Particles,
        *,
        generator: torch.Generator | None = None,
        attraction: Tensor | None = None,
    ) -> Tensor:
        """Evaluate `N grad_k H = grad V(w_k) + (lambda/(N-1)) sum_l grad g(w_k - w_l)`.

        Parameters
        ----------
        particles
            The configuration.
        generator
            For random pair sums.
        attraction
            `grad V(w_k)`, if it is known; None evaluates the objective.

        Returns
        -------
        Tensor
            The shape of the positions.
        """
        gradient = attraction
        if gradient is None:
            gradient = self.objective.field(particles).gradient
        if self.strength:
            pairs = self._pairs(particles, generator)
            gradient = gradient + self.strength * pairs.gradient
        if self.prior is not None:
            gradient = gradient + self.prior.field(particles).gradient
        return gradient

    def energy_per_particle(
        self, particles: Particles, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Evaluate `h_k = V(w_k) + (lambda/(N-1)) sum_l g(w_k - w_l)`, no prior.

        Parameters
        ----------
        particles
            The configuration.
        generator
            For random pair sums.

        Returns
        -------
        Tensor
            Shape `(*groups, n_particles)`; what Gibbs weights are made of.
        """
        energy = self.objective.field(particles).potential
        if self.strength:
            pairs = self._pairs(particles, generator)
            energy = energy + self.strength * pairs.potential
        return energy

    def felt_energy(
        self, particles: Particles, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Call `energy_per_particle`, its name now.

        Parameters
        ----------
        particles
            The configuration.
        generator
            For random pair sums.

        Returns
        -------
        Tensor
            Shape `(*groups, n_particles)`.
        """
        message = "`felt_energy` is now called `energy_per_particle`."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.energy_per_particle(particles, generator=generator)

    def batch(self, indices: Tensor) -> "Hamiltonian":
        """Estimate the Hamiltonian from some of the samples.

        Parameters
        ----------
        indices
            Sample numbers, drawn with replacement by their weights.

        Returns
        -------
        Hamiltonian
            The same with the objective of the batch.
        """
        objective = self.objective
        if not isinstance(objective, AbstractSampled):
            raise TypeError(f"{objective!r} has no samples to take a batch of.")
        return replace(self, objective=objective.batch(indices))

    def _pairs(
        self, particles: Particles, generator: torch.Generator | None
    ) -> PairField:
        positions = particles.positions.detach()
        return self.pair_sum(self.interaction, positions, generator=generator)
