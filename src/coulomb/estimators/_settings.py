"""From the parameters of a CoulombSampler to settings with every name resolved."""

from typing import Any

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError, unknown_name
from coulomb.domains import AbstractDomain, Ball, domains
from coulomb.dynamics.initial import Component, SpectralMixture
from coulomb.estimators._learning import LearningSettings
from coulomb.estimators._selection import DIVERGENCES, LAWS
from coulomb.features import Fourier, as_feature_map
from coulomb.interactions import AbstractInteraction, interactions

_CHOICES = {
    "resample": ("uniform", "gibbs"),
    "stopping": ("settled", "held-out"),
    "labels": ("centred", "balanced", "paper"),
}
# The constants of the paper's study of vectors, which do not win.
PAPER: dict[str, Any] = {
    "n_particles": 300,
    "gamma": 0.5,
    "coordinates": "all",
    "inverse_temperature": 100.0,
    "n_candidates": None,
    "max_iter": 2000,
    "step_size": 30.0,
    "interaction_strength": 0.5,
    "domain": Ball(5.0),
    "clip": 1.0,
    "prior": False,
    "batch_size": None,
    "labels": "paper",
    "resample": "gibbs",
    "pursuit": 0,
    "standardize": False,
}
_FULL_BATCH = 20_000
_BATCH = 4096


def resolve_settings(sampler: Any, seed: int) -> LearningSettings:
    """Check every parameter of a sampler and resolve every name."""
    check_auto_gamma(sampler.gamma)
    for name, known in _CHOICES.items():
        if getattr(sampler, name) not in known:
            raise unknown_name(name, getattr(sampler, name), known)
    n_particles = _count_particles(sampler)
    beta = _number_or_auto(
        "inverse_temperature", sampler.inverse_temperature, infinite=True
    )
    strength = sampler.interaction_strength
    return LearningSettings(
        n_components=sampler.n_components,
        n_particles=n_particles,
        laws=_open_laws(sampler.gamma, sampler.coordinates),
        inverse_temperature=beta,
        divergences=DIVERGENCES,
        n_candidates=_count_candidates(sampler, n_particles, beta),
        max_iter=check_count("max_iter", sampler.max_iter, at_least=0),
        tol=check_real("tol", sampler.tol, at_least=0),
        step_size=_number_or_auto("step_size", sampler.step_size),
        interaction=_build(
            "interaction", sampler.interaction, AbstractInteraction, interactions
        ),
        strength=check_real("interaction_strength", strength, at_least=0),
        domain=_build("domain", sampler.domain, AbstractDomain, domains),
        clip=check_real("clip", sampler.clip, above=0, infinite=True),
        prior=bool(sampler.prior),
        feature_map=as_feature_map(sampler.feature_map),
        batch_size=_resolve_batch(sampler.batch_size),
        full_batch_up_to=_FULL_BATCH if sampler.batch_size == "auto" else 0,
        distinct_pairs=sampler.labels == "paper",
        resample=sampler.resample,
        pursuit=_count_pursued(sampler, beta),
        stopping=sampler.stopping,
        seed=seed,
        progress=bool(sampler.verbose),
    )


def check_auto_gamma(gamma: Any) -> None:
    """Refuse a bandwidth that is neither "auto", "scale" nor a positive number."""
    if not isinstance(gamma, str):
        check_real("gamma", gamma, above=0)
    elif gamma not in ("auto", "scale"):
        raise unknown_name("gamma", gamma, ["auto", "scale"])


def _count_particles(sampler: Any) -> int:
    n_components = check_count("n_components", sampler.n_components)
    if sampler.n_particles is None:
        return n_components
    n_particles = check_count("n_particles", sampler.n_particles)
    if n_particles < n_components:
        raise ParameterError(
            f"`n_components` must be at most `n_particles` = {n_particles}; got "
            f"{n_components}. Raise `n_particles` or leave it None."
        )
    return n_particles


def _count_candidates(sampler: Any, n_particles: int, beta: float | None) -> int | None:
    if sampler.n_candidates is not None:
        return max(check_count("n_candidates", sampler.n_candidates), n_particles)
    if beta is None and sampler.max_iter != 0:
        raise ParameterError(
            "`inverse_temperature` must be a number when `n_candidates` is None; got "
            "'auto'. Give one of the two a number."
        )
    return None


def _count_pursued(sampler: Any, beta: float | None) -> int | None:
    """Give how many features are pursued, None if held-out folds shall decide."""
    fourier = isinstance(as_feature_map(sampler.feature_map), Fourier)
    if isinstance(sampler.pursuit, str):
        if sampler.pursuit != "auto":
            raise unknown_name("pursuit", sampler.pursuit, ["auto"])
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


def _number_or_auto(name: str, value: Any, *, infinite: bool = False) -> float | None:
    if not isinstance(value, str):
        return check_real(name, value, above=0, infinite=infinite)
    if value != "auto":
        raise unknown_name(name, value, ["auto"])
    return None


def _resolve_batch(batch_size: Any) -> int | None:
    if batch_size is None:
        return None
    if batch_size == "auto":
        return _BATCH
    if isinstance(batch_size, str):
        raise unknown_name("batch_size", batch_size, ["auto"])
    return check_count("batch_size", batch_size, at_least=2)


def _open_laws(gamma: Any, coordinates: Any) -> dict[str, SpectralMixture]:
    """List the starting laws that the parameters leave open, the default first."""
    if isinstance(coordinates, str) and coordinates not in ("auto", "all"):
        raise unknown_name("coordinates", coordinates, ["auto", "all"])
    if gamma == "auto" and coordinates == "auto":
        return LAWS
    count = 0
    if not isinstance(coordinates, str):
        count = check_count("coordinates", coordinates)
    if gamma == "auto":
        return {
            f"{coordinates} coordinates, {m:g} times scale": SpectralMixture(
                (Component(count, m),)
            )
            for m in (1.0, 0.5, 2.0, 4.0)
        }
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
    raise ParameterError(f"`{name}` must be a name or a {word}; got {value!r}.")
