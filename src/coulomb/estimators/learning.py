"""From data to particles: choose a law, draw, let the particles move.

Particles move by one of two energies. Under the paper's *alignment* each follows the
labels on its own, with the noise of its temperature, from candidates that the labels
have weighted. Under a *joint* energy, of a ridge regression on all features, they
complete each other; then the labels have been used to the full, so a part of the rows
is held out from all of it and decides how far to go: whether the scales of the columns
move (shared by all particles), how many features are pursued, and how many steps the
particles make on their own.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from coulomb._support.seeds import make_generator
from coulomb.domains import AbstractDomain, Masked, Space
from coulomb.dynamics import loop
from coulomb.dynamics.initial import SpectralDraw, SpectralMixture, draw_phases
from coulomb.dynamics.langevin import AdamLangevin, ProjectedLangevin, State
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
    CAREFUL,
    LARGEST_SINGLE_ANGLE,
    LAWS,
    REFERENCE,
    Trial,
    choose_law,
    complete,
    draw_from,
    furthest_gain,
    held_out_losses,
    mean_loss,
    pursue,
    row_weights,
    single,
    thinned,
)
from coulomb.features import AbstractFeatureMap, Particles
from coulomb.interactions import AbstractInteraction, ExactSum, FarFieldSum
from coulomb.objectives import (
    AbstractJoint,
    AbstractSampled,
    Alignment,
    FourierAlignment,
    GaussianPrior,
    Sample,
    SharedScales,
)

# Fewer different rows than this cannot tell laws apart.
ENOUGH_TO_CHOOSE = 50
_ROWS_TO_CHOOSE = 2000  # more rows change a choice little and cost much
_ROWS_TO_WEIGH = 20_000  # for the energies of thousands of candidates
_ROWS_TO_JUDGE = 4000
_ROWS_TO_MOVE = 8000  # to draw the batches of a joint energy from
# Nats by which labels bend a law through exp(-beta V), with few rows less.
# The first is taken unless another is clearly better: before a joint energy, none.
_DIVERGENCES, _ALIGNED_DIVERGENCES = (0.0, 1.0, 0.5, 2.0), (1.0, 0.0, 0.5, 2.0)
_CAUTIOUS_DIVERGENCE = 0.5
_POOL = 1000
# Held out from learning by a joint energy: every fourth row, once if rows are many and
# otherwise several times.
_PARTS, _MANY_ROWS = 4, 2000
_COUNTS = (8, 16, 32, 64, 128)  # of features that are pursued
_ROWS_PER_PURSUED = 10
_MARGIN = 1.0  # standard errors by which more learning must be better
_PATIENCE = 2  # stages without a gain, after which none is tried
_SCALE_MARKS, _SCALE_STEP_SIZE = (10, 20), 0.05
_MOST_SCALED = 128  # features that tell how scales move
_MARKS = (5, 10, 20, 40, 80, 160)  # steps of the particles after which they are judged
_PARTICLE_STEP_SIZE = 0.02
_LEAST_BATCH = 1024
_MOST_MOVING = 512  # more particles only have their shared scales moved
_LAWS_FOR_COLUMNS, _FEATURES_FOR_COLUMNS = ("smoother", "mixed"), 128
_MANY_PARTICLES = 5000  # above, pairs are summed with a far field
_MANY_STEPS = 200  # from here on the steps are what a fit takes its time for
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
    "resampling": 6,
    "phases": 9,
}


@dataclass(frozen=True, eq=False)
class LearningSettings:
    """What a fit is asked to do, with every name resolved.

    `inverse_temperature` None lets the data choose, `n_candidates` None starts from the
    law itself, `step_size` None follows the temperature, `pursuit` None lets the data
    choose how many features are chosen one after the other. `joint` is the energy of
    all features that moves the particles, None for the alignment.
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
    joint: type[AbstractJoint] | None
    stopping: str
    seed: int
    progress: bool

    def generator(self, stream: str) -> torch.Generator:
        """Make the generator of one of the random streams of a fit."""
        return make_generator(self.seed, _STREAMS[stream])

    def with_phases(self, positions: Tensor) -> Particles:
        """Draw the phases, from a stream that learned and random features share."""
        phases = draw_phases(len(positions), generator=self.generator("phases"))
        return Particles(positions.double(), phases)


class FitData(NamedTuple):
    """The rows of a fit."""

    sample: Sample  # standardised inputs, labels, weights
    order: Tensor  # rows sorted by label, for balanced folds
    distinct_rows: int  # how many different ones there are


class Stage(NamedTuple):
    """A point on the path of learning: scales, what was pursued, moves."""

    features: Particles
    pursued: int = 0
    steps: int = 0  # of the particles
    factors: Tensor | None = None  # of the columns, if their scales moved
    divergence: float = 0.0  # of the law, in nats


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
    stage: Stage  # the features: particles, then those that were pursued
    judged: list[tuple[Stage, float]]  # stages that were tried, held-out R^2


def learn(data: FitData, settings: LearningSettings) -> Learned:
    """Learn particles from scratch."""
    fit = _Fit(settings, *data)
    with fit.sensible_threads():
        if settings.joint and data.distinct_rows >= ENOUGH_TO_CHOOSE:
            return _learn_jointly(fit)
        law, trials = fit.choose()
        divergence, judged = fit.divergence(law)
        draw, beta, size = fit.resample(*fit.candidates(law), divergence)
        run = fit.move(draw, beta)
        chosen, weighted_size = fit.choose_particles(run, draw, beta)
        stage = fit.features(run, chosen, law)
    size, found = weighted_size or size, (run, draw, law, divergence, beta, trials)
    return Learned(*found, chosen, size, stage, judged)


def _learn_jointly(whole: "_Fit") -> Learned:
    """Learn on a part of the rows, or on several, and stop where the others say."""
    parts = whole.parts()
    one = len(parts) == 1
    # Of few rows all choose the law.
    law, trials = (parts[0][0] if one else whole).choose()
    paths = [_Path(fit, law, outside) for fit, outside in parts]
    phases = (_Path.bent, _Path.scaled, _Path.pursued, _Path.moved)
    stage, ends, judged = _search(paths, phases)
    path = paths[0]
    if not one:
        path = _Path(whole, law, whole.sample)
        stage = path.start()
        for phase, end in zip(phases, ends, strict=True):
            stage = [stage, *islice(phase(path, stage), end)][-1]
    return path.learned(stage, trials, judged)


def _search(
    paths: list["_Path"], phases: "tuple[Phase, ...]"
) -> tuple[Stage, list[int], list[tuple[Stage, float]]]:
    """Go through phases, in each as far as the rows outside of the paths say.

    Returns the last stage of the first path, how far each phase went, and what was
    tried with its held-out R^2.
    """
    stages = [path.start() for path in paths]
    losses = _pooled(paths, stages)
    variance = float(torch.cat([_spread(path.outside) for path in paths]).mean())
    judged, ends = [(stages[0], 1 - float(losses.mean()) / variance)], []
    for phase in phases:
        tried, found = [stages], [losses]
        ways = zip(paths, stages, strict=True)
        for following in zip(*(phase(*way) for way in ways), strict=True):
            tried.append(list(following))
            found.append(_pooled(paths, tried[-1]))
            judged.append((following[0], 1 - float(found[-1].mean()) / variance))
            lowest = min(range(len(found)), key=lambda i: float(found[i].sum()))
            if len(found) - lowest > _PATIENCE:
                break
        asked = phase is _Path.pursued and paths[0].fit.settings.pursuit
        margin = CAREFUL if phase is _Path.bent else _MARGIN
        end = 1 if asked else furthest_gain(found, margin)
        stages, losses = tried[end], found[end]
        ends.append(end)
    return stages[0], ends, judged


def _pooled(paths: list["_Path"], stages: list[Stage]) -> Tensor:
    """Judge a stage of every path on the rows that were held out from it."""
    ways = zip(paths, stages, strict=True)
    return torch.cat([path.losses(stage) for path, stage in ways])


def _spread(sample: Sample) -> Tensor:
    centred = sample.labels - sample.probabilities @ sample.labels
    return row_weights(sample) * centred.square().sum(dim=-1)


class _Path:
    """The way of one set of rows: a law is bent, scales and particles move."""

    def __init__(self, fit: "_Fit", law: str, outside: Sample) -> None:
        self.fit, self.law, self.outside = fit, law, outside
        self.candidates, settings = fit.candidates(law), fit.settings
        self.divergences = _DIVERGENCES if settings.joint else _ALIGNED_DIVERGENCES
        self.chosen = choose_uniformly(
            settings.n_particles,
            settings.n_components,
            generator=settings.generator("choice"),
        )
        self.history: list[dict[str, Any]] = []

    @cached_property
    def inside(self) -> Sample:
        return self.fit.some_rows(_ROWS_TO_JUDGE)

    @cached_property
    def moves(self) -> "_JointMoves":
        """Prepare moves, in the precision that the angles allow."""
        rows = self.fit.some_rows(_ROWS_TO_MOVE)
        reach = self.candidates[0].positions
        return _JointMoves(self.fit.settings, single(rows, reach))

    def losses(self, stage: Stage) -> Tensor:
        """Judge a stage on rows that it has not seen."""
        feature_map = self.fit.settings.feature_map
        return held_out_losses(stage.features, self.inside, self.outside, feature_map)

    def start(self) -> Stage:
        """Give the features of the law, bent as usual."""
        return self.drawn(self.divergences[0])

    def bent(self, stage: Stage) -> Iterator[Stage]:
        """Bend the law less, or more."""
        for divergence in self.divergences[1:]:
            yield self.drawn(divergence)

    def drawn(self, divergence: float) -> Stage:
        draw = self.fit.resample(*self.candidates, divergence)[0]
        features = self.fit.settings.with_phases(draw.positions[self.chosen])
        return Stage(features, divergence=divergence)

    def scaled(self, stage: Stage) -> Iterator[Stage]:
        """Move the scales of the columns, which all particles share."""
        for factors in self.moves.rescale(stage.features):
            features = _rescaled(stage.features, factors)
            yield stage._replace(features=features, factors=factors)

    def pursued(self, stage: Stage) -> Iterator[Stage]:
        """Replace some of the features by others that complete the rest."""
        settings = self.fit.settings
        most = min(settings.n_components, self.fit.distinct_rows // _ROWS_PER_PURSUED)
        counts = [count for count in _COUNTS if count <= most]
        if settings.pursuit is not None:
            counts = [settings.pursuit] if settings.pursuit else []
        if counts:
            found = self.fit.pursued(self.law, counts[-1], stage.factors)
        for count in counts:
            features = complete(stage.features, found, count)
            yield stage._replace(features=features, pursued=count)

    def moved(self, stage: Stage) -> Iterator[Stage]:
        """Let every particle move on its own coordinates."""
        settings = self.fit.settings
        if stage.features.n_particles > _MOST_MOVING:
            return
        run = self.moves.begin(stage.features)
        for steps in (mark for mark in _MARKS if mark <= settings.max_iter):
            features = self.moves.go_on(run, steps)
            self.history = run.history
            yield stage._replace(features=features, steps=steps)

    def learned(
        self, stage: Stage, trials: list[Trial], judged: list[tuple[Stage, float]]
    ) -> Learned:
        """Say where the path ended."""
        if not self.history:
            run = self.moves.begin(stage.features)
            self.moves.go_on(run, 0)
            self.history = run.history
        draw, beta, size = self.fit.resample(*self.candidates, stage.divergence)
        positions = draw.positions.double().clone()
        positions[self.chosen] = stage.features.positions
        run = loop.Run(
            State(Particles(positions), stage.steps),
            self.fit.settings.generator("moves"),
            [record for record in self.history if record["step"] <= stage.steps],
            reason=StopReason.HELD_OUT,
        )
        draw = draw._replace(positions=positions)
        found = run, draw, self.law, stage.divergence, beta, trials, self.chosen
        return Learned(*found, size, stage, judged)


Phase = Callable[[_Path, Stage], Iterator[Stage]]


class _JointMoves:
    """Moves under a joint energy; a phase is the frequency of a constant column."""

    def __init__(self, settings: LearningSettings, sample: Sample) -> None:
        assert settings.joint is not None
        self.settings = settings
        self.generator = settings.generator("moves")
        x = torch.cat([sample.x, torch.ones_like(sample.x[:, :1])], dim=1)
        self.sample = replace(sample, x=x)
        self.objective: AbstractJoint = settings.joint(
            self.sample, settings.feature_map
        )

    def tuned(self, particles: Particles) -> AbstractJoint:
        """Give the energy the penalty that suits the particles, by some of the rows."""
        some = thinned(torch.arange(self.sample.size), _ROWS_TO_CHOOSE)
        tuned = self.objective.on(self.sample.take(some)).with_best_penalty(particles)
        return replace(tuned, sample=self.sample)

    def adam(self, step_size: float, free: Tensor, count: int) -> AdamLangevin:
        return AdamLangevin(
            step_size,
            domain=Masked(Space(), free),
            batch_size=max(_LEAST_BATCH, 4 * count),
        )

    def rescale(self, features: Particles) -> Iterator[Tensor]:
        """Move the logarithms of scales; give the scales after each mark."""
        some = self.with_phase_column(features.take(slice(_MOST_SCALED)))
        free = torch.ones_like(some.positions[:1])
        free[:, -1] = 0  # the phases stay
        sampler = self.adam(_SCALE_STEP_SIZE, free, some.n_particles)
        start = Particles(torch.zeros_like(free))
        run = loop.init_run(sampler, start, generator=self.generator)
        energy = Hamiltonian(SharedScales(self.tuned(some), some))
        for steps in _SCALE_MARKS:
            limits = loop.RunSettings(steps, record_every=steps)
            loop.run(run, sampler, energy, limits)
            yield run.particles.positions[0, :-1].double().exp()

    def begin(self, features: Particles) -> loop.Run:
        """Prepare the moves of the particles, each on its own coordinates."""
        particles, settings = self.with_phase_column(features), self.settings
        free = (particles.positions != 0).to(particles.positions)
        free[:, -1] = 1
        self.energy = Hamiltonian(
            self.tuned(particles), settings.interaction, settings.strength
        )
        self.sampler = self.adam(_PARTICLE_STEP_SIZE, free, settings.n_components)
        return loop.init_run(self.sampler, particles, generator=self.generator)

    def go_on(self, run: loop.Run, steps: int) -> Particles:
        """Move until a step."""
        limits = loop.RunSettings(
            steps, record_every=max(1, steps), progress=self.settings.progress
        )
        loop.run(run, self.sampler, self.energy, limits)
        positions = run.particles.positions.double()
        return Particles(
            self.settings.domain.project(positions[:, :-1]), positions[:, -1]
        )

    def with_phase_column(self, features: Particles) -> Particles:
        positions, phases = features
        assert phases is not None
        positions = torch.cat([positions, phases.unsqueeze(-1)], dim=1)
        return Particles(positions, torch.zeros_like(phases)).to(self.sample.x.dtype)


def _rescaled(features: Particles, factors: Tensor | None) -> Particles:
    if factors is None:
        return features
    return features._replace(positions=features.positions * factors)


def continue_fit(
    data: FitData, learned: Learned, settings: LearningSettings
) -> Learned:
    """Let learned particles move on, with other data."""
    fit = _Fit(settings, *data)
    draw = learned.draw._replace(positions=learned.run.particles.positions)
    with fit.sensible_threads():
        moved = fit.move(draw, learned.inverse_temperature, learned.run)
        stage = fit.features(moved, learned.chosen, learned.law)
    return learned._replace(run=moved, draw=draw, stage=stage)


def choose_columns(
    data: FitData, variants: list[Tensor], settings: LearningSettings
) -> int:
    """Choose among columns scaled in several ways, by leave-one-out errors.

    The features are those of a smooth and of a mixed law, which see no labels.
    """
    errors = []
    for x in variants:
        fit = _Fit(settings, replace(data.sample, x=x), *data[1:])
        rows = fit.some_rows(_ROWS_TO_CHOOSE)
        generator = settings.generator("selection")
        losses = []
        for name in _LAWS_FOR_COLUMNS:
            drawn = draw_from(LAWS[name], _FEATURES_FOR_COLUMNS, x.shape[1], generator)
            losses.append(mean_loss(drawn, rows, settings.feature_map))
        errors.append(min(losses))
    return min(range(len(errors)), key=errors.__getitem__)


def draw_random_features(dim: int, settings: LearningSettings) -> tuple[Particles, str]:
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
        threads = torch.get_num_threads()
        with threadpool_limits(limits=1 if small else None):
            torch.set_num_threads(1 if small else threads)
            try:
                yield
            finally:
                torch.set_num_threads(threads)

    def choose(self) -> tuple[str, list[Trial]]:
        """Choose a law, by leave-one-out errors if there is a choice."""
        settings, laws = self.settings, self.settings.laws
        fourier = settings.feature_map.averages_phases
        few = self.distinct_rows < ENOUGH_TO_CHOOSE
        given = settings.inverse_temperature is not None
        if len(laws) == 1 or few or not fourier or given:
            return REFERENCE if REFERENCE in laws else next(iter(laws)), []
        return choose_law(
            self.some_rows(_ROWS_TO_CHOOSE),
            laws=laws,
            feature_map=settings.feature_map,
            n_features=settings.n_components,
            generator=settings.generator("selection"),
        )

    def divergence(self, law: str) -> tuple[float | None, list[tuple[Stage, float]]]:
        """Choose how far labels bend the law, None if the temperature is given."""
        if self.settings.inverse_temperature is not None:
            return None, []
        if self.distinct_rows < ENOUGH_TO_CHOOSE:
            return _CAUTIOUS_DIVERGENCE, []
        if not self.settings.feature_map.averages_phases:
            return _ALIGNED_DIVERGENCES[0], []
        paths = [_Path(fit, law, outside) for fit, outside in self.parts()]
        stage, _, judged = _search(paths, (_Path.bent,))
        return stage.divergence, judged

    def some_rows(self, most: int) -> Sample:
        """Take some rows if there are many; they stay sorted by label."""
        rows = self.order
        if len(rows) > most:
            generator = self.settings.generator("held-out")
            drawn = torch.randperm(len(rows), generator=generator)
            rows = rows[drawn[:most].sort().values]
        return self.sample.take(rows)

    def candidates(self, law: str) -> tuple[SpectralDraw, Tensor]:
        """Draw candidates, and evaluate their energies."""
        count = self.settings.n_candidates or self.settings.n_particles
        draw = self.draw(law, count, self.settings.generator("start"))
        sample = self.sample
        if self.settings.n_candidates is None:  # all are taken
            return draw, torch.zeros(count)
        if sample.size > _ROWS_TO_WEIGH:
            sample = self.split(_ROWS_TO_WEIGH)[0]
        objective = self.objective(sample)
        phases = torch.zeros(512, dtype=sample.x.dtype)
        with torch.no_grad():
            parts = [
                objective.field(Particles(block, phases[: len(block)])).potential
                for block in torch.split(draw.positions, 512)
            ]
        return draw, torch.cat(parts)

    def draw(self, law: str, count: int, generator: torch.Generator) -> SpectralDraw:
        """Draw particles from a law."""
        settings, x = self.settings, self.sample.x
        draw = settings.laws[law].draw_parts(count, x.shape[1], generator=generator)
        draw = draw._replace(positions=settings.domain.project(draw.positions))
        return SpectralDraw(*(part.to(x) for part in draw))

    def resample(
        self, draw: SpectralDraw, energy: Tensor, divergence: float | None
    ) -> tuple[SpectralDraw, float, float]:
        """Keep `n_particles` of the candidates by their Gibbs weights."""
        settings, beta = self.settings, self.settings.inverse_temperature
        if beta is None:
            beta = temperature_of_divergence(energy, divergence or 0.0)
        if settings.n_candidates is None:
            return draw, beta, float(settings.n_particles)
        weights = gibbs_weights(energy.double(), beta)
        generator = settings.generator("resampling")
        chosen = Resampler("systematic")(
            weights, settings.n_particles, generator=generator
        )
        kept = SpectralDraw(*(part[chosen] for part in draw))
        return kept, beta, effective_sample_size(weights)

    def split(self, count: int) -> tuple[Sample, Sample]:
        """Take `count` rows at random, and the others."""
        generator = self.settings.generator("held-out")
        order = torch.randperm(self.sample.size, generator=generator)
        return self.sample.take(order[:count]), self.sample.take(order[count:])

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
            run.state = run.state._replace(particles=run.particles.to(dtype))
        most = settings.max_iter if beta > 0 else 0
        every = _RECORD_EVERY
        if not rules:
            # Nobody asks between records: long runs keep fewer.
            every = max(every, settings.max_iter // _MOST_RECORDS)
        run = loop.run(
            run,
            sampler,
            self.hamiltonian(training.to(dtype), draw, beta),
            loop.RunSettings(
                run.state.step + most,
                record_every=every,
                stop=rules,
                held_out=self.objective(held_out.to(dtype)) if held_out else None,
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
        if self.settings.max_iter < _MANY_STEPS or reach > LARGEST_SINGLE_ANGLE:
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
        particles = run.particles.to(self.sample.x.dtype)
        energies = energy.energy_per_particle(particles, generator=generator)
        weights = gibbs_weights(energies, beta)
        chosen = Resampler("systematic")(weights, keep, generator=generator)
        return chosen, effective_sample_size(weights)

    def features(self, run: loop.Run, chosen: Tensor, law: str) -> Stage:
        """Turn particles into features; the last may be chosen one after the other."""
        drawn = self.settings.with_phases(run.particles.positions[chosen])
        count = self.settings.pursuit or 0
        if count == 0 or self.distinct_rows < ENOUGH_TO_CHOOSE:
            return Stage(drawn)
        return Stage(complete(drawn, self.pursued(law, count), count), count)

    def pursued(self, law: str, count: int, factors: Tensor | None = None) -> Particles:
        """Choose features of a pool one after the other."""
        pool = _rescaled(self.draw_pool(law), factors)
        rows = single(self.some_rows(_ROWS_TO_CHOOSE), pool.positions)
        values = self.settings.feature_map(rows.x, pool.to(rows.x.dtype))
        return pool.take(pursue(values, rows, count))

    def parts(self) -> list[tuple["_Fit", Sample]]:
        """Hold out every fourth row in the order of labels, once or several times."""
        number = torch.arange(len(self.order)) % _PARTS
        found = []
        for part in range(min(_PARTS, math.ceil(_MANY_ROWS / len(self.order)))):
            inside = thinned(self.order[number != part], _ROWS_TO_WEIGH)
            outside = thinned(self.order[number == part], _ROWS_TO_JUDGE)
            kept = self.sample.take(inside)
            fit = replace(self, sample=kept, order=torch.arange(len(inside)))
            found.append((fit, self.sample.take(outside)))
        return found

    def draw_pool(self, law: str) -> Particles:
        """Draw from the law that was chosen and, if all were open, from a broad one."""
        settings, generator = self.settings, self.settings.generator("pool")
        laws = [settings.laws[law]] + [BROAD] * (settings.laws is LAWS)
        size = math.ceil(max(_POOL, settings.pursuit or 0) / len(laws))
        dim = self.sample.x.shape[1]
        parts = [each.draw(size, dim, generator=generator) for each in laws]
        positions = settings.domain.project(torch.cat(parts))
        return Particles(positions, draw_phases(len(positions), generator=generator))
