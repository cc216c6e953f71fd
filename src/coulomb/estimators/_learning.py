"""From data to particles: draw candidates, bend their law, let them move."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from coulomb._support.streams import make_generator
from coulomb.domains import AbstractDomain, Masked
from coulomb.dynamics import loop
from coulomb.dynamics.initial import SpectralDraw, SpectralMixture, draw_phases
from coulomb.dynamics.langevin import ProjectedLangevin
from coulomb.dynamics.loop import Run, RunSettings
from coulomb.dynamics.resampling import (
    choose_uniformly,
    effective_sample_size,
    gibbs_weights,
    resamplers,
    temperature_of_divergence,
)
from coulomb.dynamics.stopping import AbstractStopRule, HeldOut, Settled, StopReason
from coulomb.energy import Hamiltonian
from coulomb.estimators._pursuit import Pursuit, Waves, complete
from coulomb.estimators._selection import (
    BROAD,
    CAUTIOUS,
    LAWS,
    REFERENCE,
    Trial,
    choose_law,
)
from coulomb.features import AbstractFeatureMap, Fourier, Particles
from coulomb.interactions import (
    AbstractInteraction,
    AbstractPairSum,
    ExactSum,
    FarFieldSum,
)
from coulomb.objectives import (
    AbstractSampled,
    Alignment,
    FourierAlignment,
    GaussianPrior,
    Sample,
)

# Fewer different rows than this cannot tell laws apart.
_ENOUGH_TO_CHOOSE = 50
_ROWS_TO_CHOOSE = 2000  # more rows change a choice little and cost much
_ROWS_TO_WEIGH = 20_000  # for the energies of thousands of candidates
_ROWS_TO_PURSUE = 10_000  # for the products of a pool of features
_POOL = 1000
_MANY_PARTICLES = 5000  # above, pairs are summed with a far field
_WORTH_A_THREAD = 2_000_000_000
_STEP = 0.02  # of the fastest relaxation: eta = beta * step * variance
_VALIDATION = 0.2
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
    choose how many features are chosen one after the other.
    """

    n_components: int
    n_particles: int
    laws: dict[str, SpectralMixture]
    inverse_temperature: float | None
    divergences: tuple[float, ...]
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
    stopping: str
    seed: int
    progress: bool


class Table(NamedTuple):
    """The rows of a fit."""

    sample: Sample  # standardised inputs, labels, weights
    order: Tensor  # rows sorted by label, for balanced folds
    distinct_rows: int  # how many different ones there are


class Learned(NamedTuple):
    """The end of a fit."""

    run: Run
    draw: SpectralDraw  # mask and variance of every particle
    law: str
    divergence: float | None
    inverse_temperature: float
    trials: list[Trial]
    chosen: Tensor  # indices of the particles that become features
    effective_sample_size: float
    pursuit: Pursuit  # the features: particles, then those that were pursued


def learn(table: Table, settings: LearningSettings) -> Learned:
    """Learn particles from scratch."""
    sample = table.sample
    with _sensible_threads(sample, settings):
        law, divergence, trials = _choose(table, settings)
        draw, beta, size = _draw_start(sample, law, divergence, settings)
        run = _move(sample, draw, beta, settings)
        chosen, weighted_size = _choose_particles(run, sample, draw, beta, settings)
        features = _features(table, run, chosen, law, settings)
    size = weighted_size or size
    return Learned(run, draw, law, divergence, beta, trials, chosen, size, features)


def go_on(table: Table, learned: Learned, settings: LearningSettings) -> Learned:
    """Let learned particles move on, with other data."""
    draw = learned.draw._replace(positions=learned.run.particles.positions)
    beta = learned.inverse_temperature
    with _sensible_threads(table.sample, settings):
        moved = _move(table.sample, draw, beta, settings, learned.run)
        features = _features(table, moved, learned.chosen, learned.law, settings)
    return learned._replace(run=moved, draw=draw, pursuit=features)


def fixed(dim: int, settings: LearningSettings) -> tuple[Waves, str]:
    """Draw features that have learned nothing, from the first law."""
    name, law = next(iter(settings.laws.items()))
    positions = torch.empty(settings.n_components, 0, dtype=torch.float64)
    if dim:
        generator = _stream(settings, "start")
        positions = law.draw(settings.n_components, dim, generator=generator)
        positions = settings.domain.project(positions)
    return _with_phases(positions, settings), name


@contextmanager
def _sensible_threads(sample: Sample, settings: LearningSettings) -> Iterator[None]:
    """Use one thread for small problems.

    A second one gains nothing there, and on a busy machine the two wait for each other.
    """
    work = sample.x.numel() * (settings.n_candidates or settings.n_particles)
    with threadpool_limits(limits=1 if work < _WORTH_A_THREAD else None):
        yield


def _stream(settings: LearningSettings, name: str) -> torch.Generator:
    return make_generator(settings.seed, _STREAMS[name])


def _choose(
    table: Table, settings: LearningSettings
) -> tuple[str, float | None, list[Trial]]:
    sample, order, distinct_rows = table
    first = next(iter(settings.laws))
    if settings.inverse_temperature is not None:
        divergences: tuple[float, ...] = ()
    else:
        divergences = settings.divergences
    if len(settings.laws) * max(1, len(divergences)) == 1:
        return first, divergences[0] if divergences else None, []
    fourier = isinstance(settings.feature_map, Fourier)
    if distinct_rows < _ENOUGH_TO_CHOOSE or not fourier or not divergences:
        law, divergence = CAUTIOUS if distinct_rows < _ENOUGH_TO_CHOOSE else REFERENCE
        known = law if law in settings.laws else first
        return known, divergence if divergences else None, []
    rows = _some(order, _ROWS_TO_CHOOSE, settings)
    best, trials = choose_law(
        sample.x[rows],
        sample.labels[rows],
        sample.probabilities[rows],
        laws=settings.laws,
        divergences=divergences,
        order=torch.arange(len(rows)),
        n_candidates=settings.n_candidates or settings.n_particles,
        n_features=settings.n_components,
        generator=_stream(settings, "selection"),
    )
    return best.law, best.divergence, trials


def _draw_start(
    sample: Sample, law: str, divergence: float | None, settings: LearningSettings
) -> tuple[SpectralDraw, float, float]:
    """Draw candidates and keep `n_particles` of them by their Gibbs weights."""
    generator = _stream(settings, "start")
    dim, count = sample.x.shape[1], settings.n_particles
    n_candidates = settings.n_candidates or count
    draw = settings.laws[law].draw_parts(n_candidates, dim, generator=generator)
    draw = draw._replace(positions=settings.domain.project(draw.positions))
    draw = SpectralDraw(*(part.to(sample.x) for part in draw))
    if settings.n_candidates is None:
        assert settings.inverse_temperature is not None
        return draw, settings.inverse_temperature, float(count)
    energy = _candidate_energies(sample, draw.positions, settings)
    beta = settings.inverse_temperature
    if beta is None:
        beta = temperature_of_divergence(energy, divergence or 0.0)
    weights = gibbs_weights(energy.double(), beta)
    chosen = resamplers.build("systematic")(weights, count, generator=generator)
    kept = SpectralDraw(*(part[chosen] for part in draw))
    return kept, beta, effective_sample_size(weights)


def _candidate_energies(
    sample: Sample, positions: Tensor, settings: LearningSettings
) -> Tensor:
    if sample.size > _ROWS_TO_WEIGH:
        generator = _stream(settings, "held-out")
        rows = torch.randperm(sample.size, generator=generator)[:_ROWS_TO_WEIGH]
        weights = sample.weights
        if weights is not None:
            weights = weights[rows] / weights[rows].sum()
        sample = Sample(sample.x[rows], sample.labels[rows], weights)
    objective = _objective(sample, settings)
    phases = torch.zeros(len(positions), dtype=positions.dtype)
    blocks = zip(torch.split(positions, 512), torch.split(phases, 512), strict=True)
    with torch.no_grad():
        return torch.cat(
            [objective.field(Particles(*block)).potential for block in blocks]
        )


def _objective(sample: Sample, settings: LearningSettings) -> AbstractSampled:
    if isinstance(settings.feature_map, Fourier):
        return FourierAlignment(sample, settings.distinct_pairs)
    return Alignment(sample, settings.feature_map, settings.distinct_pairs)


def _move(
    sample: Sample,
    draw: SpectralDraw,
    beta: float,
    settings: LearningSettings,
    before: Run | None = None,
) -> Run:
    """Run projected Langevin dynamics from the drawn particles."""
    held_out, training = None, sample
    if settings.stopping == "held-out":
        training, held_out = _split(sample, settings)
    energy = _hamiltonian(training, draw, beta, settings)
    sampler = _sampler(draw, beta, settings, sample.size)
    if before is None:
        phases = torch.zeros(len(draw.positions), dtype=draw.positions.dtype)
        particles = Particles(draw.positions, phases)
        run = loop.init_run(sampler, particles, generator=_stream(settings, "moves"))
    else:
        run = before
    goal = run.state.step + (settings.max_iter if beta > 0 else 0)
    rules: list[AbstractStopRule] = [Settled(settings.tol)]
    if held_out is not None:
        rules.append(HeldOut(settings.tol))
    run = loop.run(
        run,
        sampler,
        energy,
        RunSettings(
            goal,
            stop=rules,
            held_out=_objective(held_out, settings) if held_out else None,
            progress=settings.progress,
        ),
    )
    if beta == 0:
        run.reason = StopReason.NO_GAIN
    return run


def _split(sample: Sample, settings: LearningSettings) -> tuple[Sample, Sample]:
    order = torch.randperm(sample.size, generator=_stream(settings, "held-out"))
    cut = max(2, round(_VALIDATION * sample.size))
    parts = []
    for rows in (order[cut:], order[:cut]):
        weights = sample.probabilities[rows]
        parts.append(
            Sample(sample.x[rows], sample.labels[rows], weights / weights.sum())
        )
    return parts[0], parts[1]


def _hamiltonian(
    sample: Sample, draw: SpectralDraw, beta: float, settings: LearningSettings
) -> Hamiltonian:
    many = len(draw.positions) > _MANY_PARTICLES
    pair_sum: AbstractPairSum = FarFieldSum() if many else ExactSum()
    prior = None
    if settings.prior and beta > 0:
        prior = GaussianPrior(draw.variance, beta)
    return Hamiltonian(
        _objective(sample, settings),
        settings.interaction,
        settings.strength,
        prior,
        pair_sum,
    )


def _sampler(
    draw: SpectralDraw, beta: float, settings: LearningSettings, n_samples: int
) -> ProjectedLangevin:
    options: dict[str, Any] = {}
    if not bool((draw.mask == 1).all()):
        options["domain"] = Masked(settings.domain, draw.mask)
    else:
        options["domain"] = settings.domain
    step_size = settings.step_size
    if step_size is None:
        # eta / (variance beta) is the share of the way back to the origin in one step.
        step_size = _STEP * (beta if 0 < beta < math.inf else 1.0)
        options["rates"] = draw.variance.clamp_max(1.0)
    if settings.batch_size is not None and n_samples > settings.full_batch_up_to:
        options["batch_size"] = settings.batch_size
    return ProjectedLangevin(
        step_size,
        beta if beta > 0 else math.inf,
        clip=settings.clip,
        **options,
    )


def _choose_particles(
    run: Run,
    sample: Sample,
    draw: SpectralDraw,
    beta: float,
    settings: LearningSettings,
) -> tuple[Tensor, float | None]:
    generator = _stream(settings, "choice")
    count, keep = settings.n_particles, settings.n_components
    if settings.resample == "uniform":
        return choose_uniformly(count, keep, generator=generator), None
    energy = _hamiltonian(sample, draw, beta, settings)
    weights = gibbs_weights(
        energy.energy_per_particle(run.particles, generator=generator), beta
    )
    resampler = resamplers.build("systematic")
    chosen = resampler(weights, keep, generator=generator)
    return chosen, effective_sample_size(weights)


def _with_phases(positions: Tensor, settings: LearningSettings) -> Waves:
    # Phases have a stream of their own: learned and fixed features share them.
    phases = draw_phases(len(positions), generator=_stream(settings, "phases"))
    return Waves(positions.double(), phases)


def _features(
    table: Table, run: Run, chosen: Tensor, law: str, settings: LearningSettings
) -> Pursuit:
    """Turn particles into features; the last may be chosen one after the other."""
    drawn = _with_phases(run.particles.positions[chosen], settings)
    if settings.pursuit == 0 or table.distinct_rows < _ENOUGH_TO_CHOOSE:
        return Pursuit(drawn, 0, [])
    return complete(
        table.sample,
        drawn=drawn,
        pool=_draw_pool(table.sample.x.shape[1], law, settings),
        count=settings.pursuit,
        judges=_some(table.order, _ROWS_TO_CHOOSE, settings),
        rows=_some(table.order, _ROWS_TO_PURSUE, settings),
    )


def _draw_pool(dim: int, law: str, settings: LearningSettings) -> Waves:
    """Draw from the law that was chosen and, if all were open, from a broad one."""
    generator = _stream(settings, "pool")
    laws = [settings.laws[law]] + [BROAD] * (settings.laws is LAWS)
    size = math.ceil(max(_POOL, settings.pursuit or 0) / len(laws))
    parts = [each.draw(size, dim, generator=generator) for each in laws]
    positions = settings.domain.project(torch.cat(parts))
    return Waves(positions, draw_phases(len(positions), generator=generator))


def _some(order: Tensor, most: int, settings: LearningSettings) -> Tensor:
    """Take some rows if there are many; they stay sorted by label."""
    if len(order) <= most:
        return order
    drawn = torch.randperm(len(order), generator=_stream(settings, "held-out"))
    return order[drawn[:most].sort().values]
