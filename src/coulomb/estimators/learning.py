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
from coulomb.dynamics.loop import AbstractStopRule, HeldOut, Settled, StopReason
from coulomb.dynamics.resampling import (
    Resampler,
    choose_uniformly,
    effective_sample_size,
    gibbs_weights,
    temperature_of_divergence,
)
from coulomb.energy import Hamiltonian
from coulomb.estimators.selection import (
    BROAD,
    CAUTIOUS,
    LAWS,
    REFERENCE,
    Features,
    Pursuit,
    Rows,
    Trial,
    choose_law,
    complete,
)
from coulomb.features import AbstractFeatureMap, Particles
from coulomb.interactions import AbstractInteraction, ExactSum, FarFieldSum
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
_MANY_STEPS = 200  # from here on the steps are what a fit takes its time for
_LARGEST_SINGLE_ANGLE = 1e3  # rounded to 6e-5 in single precision
_RECORD_EVERY, _MOST_RECORDS = 10, 50
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

    def generator(self, stream: str) -> torch.Generator:
        """Make the generator of one of the random streams of a fit."""
        return make_generator(self.seed, _STREAMS[stream])

    def with_phases(self, positions: Tensor) -> Features:
        """Draw the phases, from a stream that learned and random features share."""
        phases = draw_phases(len(positions), generator=self.generator("phases"))
        return Features(positions.double(), phases)


class FitData(NamedTuple):
    """The rows of a fit."""

    sample: Sample  # standardised inputs, labels, weights
    order: Tensor  # rows sorted by label, for balanced folds
    distinct_rows: int  # how many different ones there are


class Learned(NamedTuple):
    """The end of a fit."""

    run: loop.Run
    draw: SpectralDraw  # mask and variance of every particle
    law: str
    divergence: float | None
    inverse_temperature: float
    trials: list[Trial]
    chosen: Tensor  # indices of the particles that become features
    effective_sample_size: float
    pursuit: Pursuit  # the features: particles, then those that were pursued


def learn(data: FitData, settings: LearningSettings) -> Learned:
    """Learn particles from scratch."""
    fit = _Fit(settings, *data)
    with fit.sensible_threads():
        law, divergence, trials = fit.choose()
        draw, beta, size = fit.draw_start(law, divergence)
        run = fit.move(draw, beta)
        chosen, weighted_size = fit.choose_particles(run, draw, beta)
        features = fit.features(run, chosen, law)
    size = weighted_size or size
    return Learned(run, draw, law, divergence, beta, trials, chosen, size, features)


def continue_fit(
    data: FitData, learned: Learned, settings: LearningSettings
) -> Learned:
    """Let learned particles move on, with other data."""
    fit = _Fit(settings, *data)
    draw = learned.draw._replace(positions=learned.run.particles.positions)
    with fit.sensible_threads():
        moved = fit.move(draw, learned.inverse_temperature, learned.run)
        features = fit.features(moved, learned.chosen, learned.law)
    return learned._replace(run=moved, draw=draw, pursuit=features)


def draw_random_features(dim: int, settings: LearningSettings) -> tuple[Features, str]:
    """Draw features that have learned nothing, from the first law."""
    name, law = next(iter(settings.laws.items()))
    positions = torch.empty(settings.n_components, 0, dtype=torch.float64)
    if dim:
        generator = settings.generator("start")
        positions = law.draw(settings.n_components, dim, generator=generator)
        positions = settings.domain.project(positions)
    return settings.with_phases(positions), name


@dataclass(frozen=True, eq=False)
class _Fit:
    """Settings and data, and the steps of a fit."""

    settings: LearningSettings
    sample: Sample
    order: Tensor
    distinct_rows: int

    @contextmanager
    def sensible_threads(self) -> Iterator[None]:
        """Use one thread for small problems.

        A second one gains nothing there, and on a busy machine the two wait for each
        other.
        """
        count = self.settings.n_candidates or self.settings.n_particles
        small = self.sample.x.numel() * count < _WORTH_A_THREAD
        with threadpool_limits(limits=1 if small else None):
            yield

    def choose(self) -> tuple[str, float | None, list[Trial]]:
        """Choose a law and a divergence, by held-out folds if there is a choice."""
        settings, laws = self.settings, self.settings.laws
        first = next(iter(laws))
        free = settings.inverse_temperature is None
        if len(laws) == 1 and not free:
            return first, None, []
        fourier = settings.feature_map.averages_phases
        few = self.distinct_rows < _ENOUGH_TO_CHOOSE
        if few or not fourier or not free:
            law, divergence = CAUTIOUS if few else REFERENCE
            return law if law in laws else first, divergence if free else None, []
        best, trials = choose_law(
            self.some_rows(_ROWS_TO_CHOOSE),
            laws=laws,
            n_candidates=settings.n_candidates or settings.n_particles,
            n_features=settings.n_components,
            generator=settings.generator("selection"),
        )
        return best.law, best.divergence, trials

    def some_rows(self, most: int) -> Rows:
        """Take some rows if there are many; they stay sorted by label."""
        rows = self.order
        if len(rows) > most:
            generator = self.settings.generator("held-out")
            drawn = torch.randperm(len(rows), generator=generator)
            rows = rows[drawn[:most].sort().values]
        weights = (self.sample.probabilities * self.sample.size)[rows]
        sample = self.sample
        return Rows(sample.x[rows], sample.labels[rows], weights / weights.mean())

    def draw_start(
        self, law: str, divergence: float | None
    ) -> tuple[SpectralDraw, float, float]:
        """Draw candidates and keep `n_particles` of them by their Gibbs weights."""
        settings, x = self.settings, self.sample.x
        generator, count = settings.generator("start"), settings.n_particles
        draw = settings.laws[law].draw_parts(
            settings.n_candidates or count, x.shape[1], generator=generator
        )
        draw = draw._replace(positions=settings.domain.project(draw.positions))
        draw = SpectralDraw(*(part.to(x) for part in draw))
        beta = settings.inverse_temperature
        if settings.n_candidates is None:
            assert beta is not None
            return draw, beta, float(count)
        energy = self.candidate_energies(draw.positions)
        if beta is None:
            beta = temperature_of_divergence(energy, divergence or 0.0)
        weights = gibbs_weights(energy.double(), beta)
        chosen = Resampler("systematic")(weights, count, generator=generator)
        kept = SpectralDraw(*(part[chosen] for part in draw))
        return kept, beta, effective_sample_size(weights)

    def candidate_energies(self, positions: Tensor) -> Tensor:
        sample = self.sample
        if sample.size > _ROWS_TO_WEIGH:
            sample = self.split(_ROWS_TO_WEIGH)[0]
        objective = self.objective(sample)
        phases = torch.zeros(len(positions), dtype=positions.dtype)
        blocks = zip(torch.split(positions, 512), torch.split(phases, 512), strict=True)
        with torch.no_grad():
            return torch.cat(
                [objective.field(Particles(*block)).potential for block in blocks]
            )

    def split(self, count: int) -> tuple[Sample, Sample]:
        """Take `count` rows at random, and the others."""
        sample, generator = self.sample, self.settings.generator("held-out")
        order = torch.randperm(sample.size, generator=generator)
        parts = []
        for rows in (order[:count], order[count:]):
            weights = sample.weights
            if weights is not None:
                weights = weights[rows] / weights[rows].sum()
            parts.append(Sample(sample.x[rows], sample.labels[rows], weights))
        return parts[0], parts[1]

    def objective(self, sample: Sample) -> AbstractSampled:
        if self.settings.feature_map.averages_phases:
            return FourierAlignment(sample, self.settings.distinct_pairs)
        return Alignment(
            sample, self.settings.feature_map, self.settings.distinct_pairs
        )

    def move(
        self, draw: SpectralDraw, beta: float, before: loop.Run | None = None
    ) -> loop.Run:
        """Run projected Langevin dynamics from the drawn particles."""
        settings, training, held_out = self.settings, self.sample, None
        if settings.stopping == "held-out":
            held_out, training = self.split(max(2, round(_VALIDATION * training.size)))
        rules: list[AbstractStopRule] = []
        if settings.tol > 0:
            rules.append(Settled(settings.tol))
        if held_out is not None:
            rules.append(HeldOut(settings.tol))
        dtype = self.precision(draw.positions)
        draw = SpectralDraw(*(part.to(dtype) for part in draw))
        sampler = self.sampler(draw, beta)
        run = before
        if run is None:
            phases = torch.zeros(len(draw.positions), dtype=dtype)
            particles = Particles(draw.positions, phases)
            generator = settings.generator("moves")
            run = loop.init_run(sampler, particles, generator=generator)
        else:
            run.state = run.state._replace(particles=_cast(run.particles, dtype))
        most = settings.max_iter if beta > 0 else 0
        every = _RECORD_EVERY
        if not rules:
            # Nobody asks between records: long runs keep fewer.
            every = max(every, settings.max_iter // _MOST_RECORDS)
        run = loop.run(
            run,
            sampler,
            self.hamiltonian(_converted(training, dtype), draw, beta),
            loop.RunSettings(
                run.state.step + most,
                record_every=every,
                stop=rules,
                held_out=(
                    self.objective(_converted(held_out, dtype)) if held_out else None
                ),
                progress=settings.progress,
            ),
        )
        run.state = run.state._replace(evaluated=None)  # it refers to the data
        if beta == 0:
            run.reason = StopReason.NO_GAIN
        return run

    def precision(self, positions: Tensor) -> torch.dtype:
        """Say in which precision to move: long runs in single, where angles allow it.

        Their noise hides the rounding. Short runs cost little, and in double precision
        an integer weight is a repeated row to the last digit.
        """
        x = self.sample.x
        reach = float(x.norm(dim=-1).max()) * float(positions.norm(dim=-1).max())
        if self.settings.max_iter < _MANY_STEPS or reach > _LARGEST_SINGLE_ANGLE:
            return x.dtype
        return torch.float32

    def hamiltonian(
        self, sample: Sample, draw: SpectralDraw, beta: float
    ) -> Hamiltonian:
        settings = self.settings
        many = len(draw.positions) > _MANY_PARTICLES
        prior = settings.prior and beta > 0
        return Hamiltonian(
            self.objective(sample),
            settings.interaction,
            settings.strength,
            GaussianPrior(draw.variance, beta) if prior else None,
            FarFieldSum() if many else ExactSum(),
        )

    def sampler(self, draw: SpectralDraw, beta: float) -> ProjectedLangevin:
        settings = self.settings
        options: dict[str, Any] = {"clip": settings.clip, "domain": settings.domain}
        if not bool((draw.mask == 1).all()):
            options["domain"] = Masked(settings.domain, draw.mask)
        step_size = settings.step_size
        if step_size is None:
            # eta / (variance beta) is the share of the way back to the origin in one
            # step.
            step_size = _STEP * (beta if 0 < beta < math.inf else 1.0)
            options["rates"] = draw.variance.clamp_max(1.0)
        if self.sample.size > settings.full_batch_up_to:
            options["batch_size"] = settings.batch_size
        return ProjectedLangevin(step_size, beta if beta > 0 else math.inf, **options)

    def choose_particles(
        self, run: loop.Run, draw: SpectralDraw, beta: float
    ) -> tuple[Tensor, float | None]:
        settings, generator = self.settings, self.settings.generator("choice")
        count, keep = settings.n_particles, settings.n_components
        if settings.resample == "uniform":
            return choose_uniformly(count, keep, generator=generator), None
        energy = self.hamiltonian(self.sample, draw, beta)
        particles = _cast(run.particles, self.sample.x.dtype)
        energies = energy.energy_per_particle(particles, generator=generator)
        weights = gibbs_weights(energies, beta)
        chosen = Resampler("systematic")(weights, keep, generator=generator)
        return chosen, effective_sample_size(weights)

    def features(self, run: loop.Run, chosen: Tensor, law: str) -> Pursuit:
        """Turn particles into features; the last may be chosen one after the other."""
        settings = self.settings
        drawn = settings.with_phases(run.particles.positions[chosen])
        if settings.pursuit == 0 or self.distinct_rows < _ENOUGH_TO_CHOOSE:
            return Pursuit(drawn, 0, [])
        rows, judges = self.some_rows(_ROWS_TO_PURSUE), self.some_rows(_ROWS_TO_CHOOSE)
        return complete(drawn, self.draw_pool(law), rows, judges, settings.pursuit)

    def draw_pool(self, law: str) -> Features:
        """Draw from the law that was chosen and, if all were open, from a broad one."""
        settings, generator = self.settings, self.settings.generator("pool")
        laws = [settings.laws[law]] + [BROAD] * (settings.laws is LAWS)
        size = math.ceil(max(_POOL, settings.pursuit or 0) / len(laws))
        dim = self.sample.x.shape[1]
        parts = [each.draw(size, dim, generator=generator) for each in laws]
        positions = settings.domain.project(torch.cat(parts))
        return Features(positions, draw_phases(len(positions), generator=generator))


def _cast(particles: Particles, dtype: torch.dtype) -> Particles:
    phases = particles.phases
    return Particles(
        particles.positions.to(dtype), None if phases is None else phases.to(dtype)
    )


def _converted(sample: Sample, dtype: torch.dtype) -> Sample:
    weights = None if sample.weights is None else sample.weights.to(dtype)
    return Sample(sample.x.to(dtype), sample.labels.to(dtype), weights)
