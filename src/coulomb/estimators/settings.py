"""What a fit of `CoulombSampler` is asked to do, with every name resolved."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coulomb._support.checks import check_count, check_member, check_real
from coulomb._support.errors import ParameterError, shown
from coulomb._support.seeds import make_generator
from coulomb.domains import AbstractDomain, domains
from coulomb.dynamics.initial import Component, SpectralMixture, draw_phases
from coulomb.estimators.base import is_name
from coulomb.estimators.selection import LAWS, Features
from coulomb.features import AbstractFeatureMap, as_feature_map, feature_maps
from coulomb.interactions import AbstractInteraction, interactions
from coulomb.objectives import Evidence, LeaveOneOut

JOINT = {"evidence": Evidence, "leave-one-out": LeaveOneOut}
_FULL_BATCH, _BATCH = 20_000, 4096
_STRONGEST = 1e8  # of a repulsion beside which labels do not vanish in rounding
_CHOICES = {
    "resample": ("uniform", "gibbs"),
    "stopping": ("settled", "held-out"),
    "labels": ("centred", "balanced", "paper"),
    "objective": ("auto", "alignment", *JOINT),
}
_STREAMS = {
    "start": 0,
    "selection": 1,
    "moves": 2,
    "choice": 3,
    "held-out": 4,
    "pool": 5,
    "phases": 9,
}


@dataclass(frozen=True, eq=False)
class LearningSettings:
    """What a fit is asked to do, with every name resolved.

    `inverse_temperature` None lets the data choose, `n_candidates` None starts from the
    law itself, `step_size` None follows the temperature, `pursuit` None lets the data
    choose how many features are chosen one after the other. `joint` names the energy
    of all features that moves the particles, None for the alignment.
    """

    n_components: int
    n_particles: int
    laws: dict[str, SpectralMixture]
    inverse_temperature: float | None
    n_candidates: int | None
    max_iter: int
    tol: float
    step_size: float | None
    interaction: AbstractInteraction
    strength: float
    domain: AbstractDomain
    clip: float
    prior: bool
    feature_map: AbstractFeatureMap
    batch_size: int | None
    full_batch_up_to: int
    distinct_pairs: bool
    resample: str
    pursuit: int | None
    joint: str | None
    stopping: str
    seed: int
    progress: bool

    def generator(self, stream: str) -> torch.Generator:
        """Make the generator of one of the random streams of a fit."""
        return make_generator(self.seed, _STREAMS[stream])

    def with_phases(self, positions: Tensor) -> Features:
        """Draw the phases, from a stream that learned and random features share."""
        phases = draw_phases(len(positions), generator=self.generator("phases"))
        return Features(positions.double(), phases)


def resolve_settings(sampler: Any, seed: int) -> LearningSettings:
    """Check every parameter of a sampler and resolve every name."""
    sampler._check_gamma()
    for name, known in _CHOICES.items():
        check_member(name, getattr(sampler, name), known)
    n_components = check_count("n_components", sampler.n_components)
    n_particles = n_components
    if sampler.n_particles is not None:
        n_particles = check_count("n_particles", sampler.n_particles)
    if n_particles < n_components:
        raise ParameterError(
            f"`n_components` must be at most `n_particles` = {n_particles}; got "
            f"{n_components}. Raise `n_particles` or leave it None."
        )
    beta = _number_or_auto(
        "inverse_temperature", sampler.inverse_temperature, infinite=True
    )
    n_candidates = sampler.n_candidates
    if n_candidates is not None:
        n_candidates = max(check_count("n_candidates", n_candidates), n_particles)
    elif beta is None and sampler.max_iter != 0:
        raise ParameterError(
            "`inverse_temperature` must be a number when `n_candidates` is None; got "
            "'auto'. Give one of the two a number."
        )
    feature_map, batch_size = sampler.feature_map, sampler.batch_size
    named = isinstance(feature_map, str)
    feature_map = (feature_maps.build if named else as_feature_map)(feature_map)
    if batch_size is not None and not is_name("batch_size", batch_size, "auto"):
        check_count("batch_size", batch_size, at_least=2)
    strength = sampler.interaction_strength
    return LearningSettings(
        n_components=n_components,
        n_particles=n_particles,
        laws=_open_laws(sampler.gamma, sampler.coordinates),
        inverse_temperature=beta,
        n_candidates=n_candidates,
        max_iter=check_count("max_iter", sampler.max_iter, at_least=0),
        tol=check_real("tol", sampler.tol, at_least=0),
        step_size=_number_or_auto("step_size", sampler.step_size),
        interaction=_build(
            "interaction", sampler.interaction, AbstractInteraction, interactions
        ),
        strength=check_real(
            "interaction_strength", strength, at_least=0, at_most=_STRONGEST
        ),
        domain=_build("domain", sampler.domain, AbstractDomain, domains),
        clip=check_real("clip", sampler.clip, above=0, infinite=True),
        prior=bool(sampler.prior),
        feature_map=feature_map,
        batch_size=_BATCH if batch_size == "auto" else batch_size,
        full_batch_up_to=_FULL_BATCH if batch_size == "auto" else 0,
        distinct_pairs=sampler.labels == "paper",
        resample=sampler.resample,
        pursuit=_count_pursued(sampler, feature_map.averages_phases, beta),
        joint=_joint_energy(sampler, feature_map.averages_phases, beta),
        stopping=sampler.stopping,
        seed=seed,
        progress=bool(sampler.verbose),
    )


def _count_pursued(sampler: Any, fourier: bool, beta: float | None) -> int | None:
    """Give how many features are pursued, None if held-out folds shall decide."""
    if is_name("pursuit", sampler.pursuit, "auto"):
        # Who gives a temperature wants particles of that temperature.
        return None if fourier and beta is None else 0
    count = check_count("pursuit", sampler.pursuit, at_least=0)
    if count > sampler.n_components:
        raise ParameterError(
            f"`pursuit` must be at most `n_components` = {sampler.n_components}; got "
            f"{count}. Lower it, or use 'auto'."
        )
    if count and not fourier:
        raise ParameterError(
            f"`pursuit` must be 0 with the feature map {sampler.feature_map!r}; got "
            f"{count}. Only Fourier features are pursued."
        )
    return count


def _joint_energy(sampler: Any, fourier: bool, beta: float | None) -> str | None:
    """Name the energy of all features that moves the particles, None for alignment."""
    name = sampler.objective
    # Who sets up the Langevin dynamics of the alignment wants them.
    fits = {
        "feature_map": fourier,
        "inverse_temperature": beta is None,
        "n_candidates": sampler.n_candidates is not None,
        "tol": sampler.tol == 0,
        "step_size": sampler.step_size == "auto",
        "resample": sampler.resample == "uniform",
        "stopping": sampler.stopping == "settled",
        "labels": sampler.labels != "paper",
    }
    if name == "auto":
        return "evidence" if all(fits.values()) else None
    for setting, fit in fits.items():
        if name in JOINT and not fit:
            raise ParameterError(
                f"`{setting}` must be left at its default with `objective` = {name!r}; "
                f"got {getattr(sampler, setting)!r}. Use objective='alignment'."
            )
    return name if name in JOINT else None


def _number_or_auto(name: str, value: Any, *, infinite: bool = False) -> float | None:
    if is_name(name, value, "auto"):
        return None
    return check_real(name, value, above=0, infinite=infinite)


def _open_laws(gamma: Any, coordinates: Any) -> dict[str, SpectralMixture]:
    """List the starting laws that the parameters leave open, the default first."""
    count = 0
    if not is_name("coordinates", coordinates, "auto", "all"):
        count = check_count("coordinates", coordinates)
    if gamma == "auto" and coordinates == "auto":
        return LAWS
    if gamma == "auto":
        name = f"{coordinates} coordinates, {{:g}} times scale"
        widths = (1.0, 0.5, 2.0, 4.0)
        return {name.format(m): SpectralMixture((Component(count, m),)) for m in widths}
    counts = (0, 1, 2, 3) if coordinates == "auto" else (count,)
    width, absolute = (1.0, False) if gamma == "scale" else (float(gamma), True)
    return {
        f"{k or 'all'} coordinates": SpectralMixture((Component(k, width, absolute),))
        for k in counts
    }


def _build(name: str, value: Any, kind: type, registry: Any) -> Any:
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        return registry.build(value)
    word = kind.__name__.removeprefix("Abstract").lower()
    raise ParameterError(f"`{name}` must be a name or a {word}; got {shown(value)}.")
