"""From data to particles: choose a law, draw, let the particles move.

Particles move by one of two energies. Under the paper's *alignment* each follows the
labels on its own, with the noise of its temperature, from candidates that the labels
have weighted. Under a *joint* energy, of a ridge regression on all features, they
complete each other; then the labels have been used to the full, so a part of the rows
is held out from all of it and decides how far to go: whether the scales of the columns
move (shared by all particles), how many features are pursued, and how many steps the
particles make on their own.

A *law* is where the frequencies come from: how many coordinates each lives on and how
wide it spreads there. Laws do not see the labels, so the exact leave-one-out error of a
ridge regression on features of a law judges it, at the cost of one fit. Few rows and
features are enough to see which laws are hopeless; the others are compared on more.

Particles that are drawn by their own energies know nothing of each other: where two say
the same about the rows, one is wasted. *Pursued* features repel each other where it
matters, in their values on the data: of a pool, the next feature is the one that lowers
the squared error of a regression on all that are chosen already the most (orthogonal
least squares),

    argmax_k  |<f_k, R>|^2 / (|f_k|^2 + ridge),

with R what the earlier ones leave of the labels and f_k what they leave of feature k.
Few features gain much by it, many fit the noise of the labels.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from coulomb._support.checks import make_generator
from coulomb.domains import AbstractDomain, Masked, Space
from coulomb.dynamics import loop
from coulomb.dynamics.initial import (
    Component,
    Resampler,
    SpectralDraw,
    SpectralMixture,
    choose_uniformly,
    draw_phases,
    effective_sample_size,
    gibbs_weights,
    temperature_of_divergence,
)
from coulomb.dynamics.langevin import AdamLangevin, ProjectedLangevin, State
from coulomb.dynamics.loop import AbstractStopRule, HeldOut, Settled, StopReason
from coulomb.energy import Hamiltonian
from coulomb.features import AbstractFeatureMap, Particles
from coulomb.interactions import AbstractInteraction, ExactSum, FarFieldSum
from coulomb.objectives import (
    AbstractJoint,
    Alignment,
    FourierAlignment,
    GaussianPrior,
    LeaveOneOut,
    Sample,
    SharedScales,
)


def _law(counts: Sequence[int], multiples: Sequence[float]) -> SpectralMixture:
    """Mix numbers of coordinates (0: all) and multiples of the "scale" bandwidth."""
    parts = [Component(k, m) for k in counts for m in multiples]
    return SpectralMixture(tuple(parts))


LAWS = {
    "dense": _law((0,), (1.0,)),
    "smooth": _law((0,), (0.5,)),
    "smoother": _law((0,), (0.25,)),
    "smoothest": _law((0,), (0.06,)),
    "rough": _law((0,), (2.0,)),
    "rougher": _law((0,), (4.0,)),
    "pairs": _law((1, 2), (1.0, 2.0)),
    "mixed": _law((1, 2, 3, 0), (1.0, 2.0)),
    "wide": _law((1, 2, 3, 0), (4.0, 8.0, 16.0)),
}
# What the pool of `pursue` has beside the chosen law: every scale that may be of use.
BROAD = _law((1, 2, 3, 0), (0.25, 0.5, 1.0, 2.0))
# What is taken unless another choice is better by 1.5 standard errors: the best of many
# noisy scores is too often the luckiest.
REFERENCE = "mixed"
CAREFUL = 1.5
LARGEST_SINGLE_ANGLE = 1e3  # rounded to 6e-5 in single precision
_MOST_JUDGED = 512
_RIDGE = 2.0  # the mean square of a feature is one
# Rows and features of the first round of laws, and how many go to the second.
_FIRST_ROWS, _FIRST_FEATURES, _SECOND_ROUND = 600, 128, 4
_MOST_FEATURES = 256
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
_PATIENCE = 1  # stages without a gain, after which none is tried
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


class Trial(NamedTuple):
    """One law, scored."""

    law: str
    score: float
    losses: Tensor  # (n,), squared error of each row by a fit that has not seen it


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
    spread = torch.cat([label_variance(path.outside) for path in paths])
    variance = float(spread.mean())
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


class _Path:
    """The way of one set of rows: a law is bent, scales and particles move."""

    def __init__(self, fit: "_Fit", law: str, outside: Sample) -> None:
        self.fit, self.law, self.outside = fit, law, outside
        self.candidates, settings = fit.candidates(law), fit.settings
        self.divergences = _DIVERGENCES if settings.joint else _ALIGNED_DIVERGENCES
        counts = settings.n_particles, settings.n_components
        self.chosen = choose_uniformly(*counts, generator=settings.generator("choice"))
        self.generator = settings.generator("moves")
        self.history: list[dict[str, Any]] = []

    @cached_property
    def inside(self) -> Sample:
        return self.fit.some_rows(_ROWS_TO_JUDGE)

    @cached_property
    def objective(self) -> AbstractJoint:
        """The energy of all features; a phase is the frequency of a constant column."""
        assert self.fit.settings.joint is not None
        rows = self.fit.some_rows(_ROWS_TO_MOVE)
        rows = single(rows, self.candidates[0].positions)
        x = torch.cat([rows.x, torch.ones_like(rows.x[:, :1])], dim=1)
        return self.fit.settings.joint(
            replace(rows, x=x), self.fit.settings.feature_map
        )

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
        some = self.with_phase_column(stage.features.take(slice(_MOST_SCALED)))
        free = torch.ones_like(some.positions[:1])
        free[:, -1] = 0  # the phases stay
        sampler = _adam(_SCALE_STEP_SIZE, free, some.n_particles)
        start = Particles(torch.zeros_like(free))
        state = sampler.init(start)
        energy = Hamiltonian(SharedScales(self.tuned(some), some))
        for mark in _SCALE_MARKS:
            left = mark - state.step
            state, _ = sampler.advance(state, energy, left, generator=self.generator)
            factors = state.particles.positions[0, :-1].double().exp()
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
        if stage.features.n_particles <= _MOST_MOVING:
            most = self.fit.settings.max_iter
            yield from self.steps(stage, [mark for mark in _MARKS if mark <= most])

    def steps(self, stage: Stage, marks: Sequence[int]) -> Iterator[Stage]:
        """Move every particle, and give where they are at some steps."""
        particles, settings = self.with_phase_column(stage.features), self.fit.settings
        free = (particles.positions != 0).to(particles.positions)
        free[:, -1] = 1
        energy = Hamiltonian(
            self.tuned(particles), settings.interaction, settings.strength
        )
        sampler = _adam(_PARTICLE_STEP_SIZE, free, settings.n_components)
        run = loop.init_run(sampler, particles, generator=self.generator)
        self.history = run.history
        for steps in marks:
            limits = loop.RunSettings(
                steps, record_every=max(1, steps), progress=settings.progress
            )
            positions = loop.run(run, sampler, energy, limits).particles.positions
            positions, phases = positions.double().tensor_split([-1], dim=1)
            positions = settings.domain.project(positions)
            features = Particles(positions, phases.squeeze(1))
            yield stage._replace(features=features, steps=steps)

    def tuned(self, particles: Particles) -> AbstractJoint:
        """Give the energy the penalty that suits the particles, by some of the rows."""
        sample = self.objective.sample
        some = sample.take(thinned(torch.arange(sample.size), _ROWS_TO_CHOOSE))
        tuned = self.objective.on(some).with_best_penalty(particles)
        return replace(tuned, sample=sample)

    def with_phase_column(self, features: Particles) -> Particles:
        positions, phases = features
        assert phases is not None
        positions = torch.cat([positions, phases.unsqueeze(-1)], dim=1)
        dtype = self.objective.sample.x.dtype
        return Particles(positions, torch.zeros_like(phases)).to(dtype)

    def learned(
        self, stage: Stage, trials: list[Trial], judged: list[tuple[Stage, float]]
    ) -> Learned:
        """Say where the path ended."""
        if not self.history:  # nothing has moved: the energy of some is told
            few = stage.features.take(slice(_MOST_JUDGED))
            list(self.steps(stage._replace(features=few), [0]))
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


def _adam(step_size: float, free: Tensor, count: int) -> AdamLangevin:
    batch_size = max(_LEAST_BATCH, 4 * count)
    domain = Masked(Space(), free)
    return AdamLangevin(step_size, domain=domain, batch_size=batch_size)


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
            found = leave_one_out_losses(drawn, rows, settings.feature_map)
            losses.append(float(found.mean()))
        errors.append(min(losses))
    return errors.index(min(errors))


def draw_random_features(dim: int, settings: LearningSettings) -> Learned:
    """Draw features that have learned nothing, from the first law."""
    name, law = next(iter(settings.laws.items()))
    count, generator = settings.n_components, settings.generator("start")
    draw = SpectralDraw(*(torch.empty(count, 0, dtype=torch.float64),) * 3)
    if dim:
        draw = law.draw_parts(count, dim, generator=generator)
        draw = draw._replace(positions=settings.domain.project(draw.positions))
    run = loop.Run(State(Particles(draw.positions)), generator)
    stage = Stage(settings.with_phases(draw.positions))
    chosen = torch.arange(count)
    return Learned(run, draw, name, 0.0, 0.0, [], chosen, float(count), stage, [])


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
            sample = self.some_rows(_ROWS_TO_WEIGH)
        # The alignment alone stays exact: there a weight is a repeated row.
        if self.settings.joint and self.distinct_rows >= ENOUGH_TO_CHOOSE:
            sample = single(sample, draw.positions)
        objective = self.objective(sample)
        particles = Particles(draw.positions, torch.zeros(count)).to(sample.x.dtype)
        blocks = (slice(start, start + 512) for start in range(0, count, 512))
        with torch.no_grad():
            parts = [objective.potential(particles.take(block)) for block in blocks]
        return draw, torch.cat(parts).to(draw.positions)

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

    def objective(self, sample: Sample) -> Alignment | FourierAlignment:
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
        rules: list[AbstractStopRule] = [Settled(settings.tol)] * (settings.tol > 0)
        if settings.stopping == "held-out":
            count = max(2, round(_VALIDATION * training.size))
            generator = settings.generator("held-out")
            order = torch.randperm(training.size, generator=generator)
            held_out, training = map(training.take, order.tensor_split([count]))
            rules.append(HeldOut(settings.tol))
        # Short runs cost little, and in double precision an integer weight is a
        # repeated row to the last digit; the noise of long ones hides rounding.
        dtype = training.x.dtype
        if settings.max_iter >= _MANY_STEPS:
            dtype = single(self.sample, draw.positions).x.dtype
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


def single(sample: Sample, positions: Tensor) -> Sample:
    """Turn to single precision if angles with such frequencies allow it."""
    reach = float(sample.x.norm(dim=-1).max() * positions.norm(dim=-1).max())
    return sample if reach > LARGEST_SINGLE_ANGLE else sample.to(torch.float32)


def draw_from(
    law: SpectralMixture, count: int, dim: int, generator: torch.Generator
) -> Particles:
    """Draw frequencies of a law, and phases."""
    positions = law.draw(count, dim, generator=generator)
    return Particles(positions, draw_phases(count, generator=generator))


def row_weights(sample: Sample) -> Tensor:
    """Give the weights of the rows with a mean of one."""
    return sample.size * sample.probabilities


def label_variance(sample: Sample) -> Tensor:
    """Give the squared deviations of the labels, what a constant would lose."""
    centred = sample.labels - sample.probabilities @ sample.labels
    return row_weights(sample) * centred.square().sum(dim=-1)


def choose_law(
    sample: Sample,
    *,
    laws: dict[str, SpectralMixture],
    feature_map: AbstractFeatureMap,
    n_features: int,
    generator: torch.Generator,
) -> tuple[str, list[Trial]]:
    """Choose a law by leave-one-out errors; only the best of few rows see all."""
    dim, count = sample.x.shape[1], min(n_features, _MOST_FEATURES)
    # Few columns make some laws the same; the first name stays.
    distinct = {laws[name].resolve(dim): name for name in reversed(laws)}
    names = [name for name in laws if name in distinct.values()]

    def tried(names: list[str], rows: Sample, count: int) -> list[Trial]:
        found = []
        for name in names:
            drawn = draw_from(laws[name], count, dim, generator)
            losses = leave_one_out_losses(drawn, rows, feature_map)
            score = 1 - float(losses.mean()) / float(label_variance(rows).mean())
            found.append(Trial(name, score, losses))
        # What is taken unless another is clearly better comes first.
        return sorted(found, key=lambda trial: trial.law != REFERENCE)

    dropped: list[Trial] = []
    if len(names) > _SECOND_ROUND and sample.size > 2 * _FIRST_ROWS:
        few = sample.take(thinned(torch.arange(sample.size), _FIRST_ROWS))
        first = tried(names, few, min(count, _FIRST_FEATURES))
        first.sort(key=lambda trial: (trial.law != REFERENCE, -trial.score))
        dropped = first[_SECOND_ROUND:]
        names = [trial.law for trial in first[:_SECOND_ROUND]]
    trials = tried(names, sample, count)
    margin = CAREFUL if trials[0].law == REFERENCE else -math.inf
    best = furthest_gain([trial.losses for trial in trials], margin)
    return trials[best].law, trials + dropped


def thinned(rows: Tensor, most: int) -> Tensor:
    """Keep about `most` of the rows, evenly."""
    return rows[:: -(-len(rows) // most)]


def leave_one_out_losses(
    features: Particles, sample: Sample, feature_map: AbstractFeatureMap
) -> Tensor:
    """Compute squared leave-one-out errors of rows, by the best ridge regression."""
    rows = single(sample, features.positions)
    errors = LeaveOneOut(rows, feature_map).tuned(features.to(rows.x.dtype)).errors
    return (row_weights(rows) * errors.square().sum(dim=-1)).double()


def held_out_losses(
    features: Particles,
    inside: Sample,
    outside: Sample,
    feature_map: AbstractFeatureMap,
) -> Tensor:
    """Compute squared errors of held-out rows, as a user of the features would.

    The penalty is that of the lowest leave-one-out error inside. Features that have
    fitted noise there mislead it, which the rows outside see.
    """
    # Those that were pursued are the last.
    features = features.take(slice(-_MOST_JUDGED, None))
    inside = single(inside, features.positions)
    features = features.to(inside.x.dtype)
    objective = LeaveOneOut(inside, feature_map)
    weights = objective.tuned(features).weights
    predictions = objective.predict(features, outside.x.to(inside.x), weights)
    errors = (predictions - outside.labels).square().sum(dim=-1)
    return (row_weights(outside) * errors).double()


def furthest_gain(losses: list[Tensor], margin: float) -> int:
    """Take the stage of lowest loss, or the first if that is no clear gain.

    A gain is clear if it is more than `margin` of its standard errors.
    """
    best = min(range(len(losses)), key=lambda i: float(losses[i].sum()))
    gain = losses[0] - losses[best]
    error = float(gain.std()) / math.sqrt(len(gain))
    return best if float(gain.mean()) > margin * error else 0


def complete(drawn: Particles, found: Particles, count: int) -> Particles:
    """Replace the last of the drawn features by the first of those found."""
    kept, found = drawn.take(slice(len(drawn[0]) - count)), found.take(slice(count))
    assert kept.phases is not None
    assert found.phases is not None
    return Particles(
        torch.cat([kept.positions, found.positions]),
        torch.cat([kept.phases, found.phases]),
    )


def pursue(
    features: Tensor, sample: Sample, count: int, ridge: float = _RIDGE
) -> Tensor:
    """Choose features one after the other by orthogonal least squares.

    Examples
    --------
    The second feature repeats the first, and the third says less but something new:

    >>> f = torch.tensor([[2.0, 2.1, 0.0], [0.0, 0.0, 1.0], [-2.0, -2.1, -1.0]])
    >>> y = torch.tensor([[3.0], [1.0], [-4.0]])
    >>> pursue(f, Sample(torch.zeros(3, 1), y), 2, ridge=0.1)
    tensor([1, 2])
    """
    root, share = row_weights(sample).sqrt().unsqueeze(-1), sample.probabilities
    features = root * (features - share @ features)
    labels = root * (sample.labels - share @ sample.labels)
    gram, cross = (features.mT @ features).double(), (features.mT @ labels).double()
    left = gram.diagonal().clone()
    tiny = torch.finfo(gram.dtype).eps * left.max()
    columns = gram.new_zeros(len(gram), count)
    free = torch.ones(len(gram), dtype=torch.bool)
    chosen = []
    for i in range(count):
        gain = cross.square().sum(dim=1) / (left + ridge)
        k = int(torch.where(free, gain, -1.0).argmax())
        free[k] = False
        chosen.append(k)
        size = left[k].clamp_min(tiny).sqrt()
        column = (gram[:, k] - columns[:, :i] @ columns[k, :i]) / size
        columns[:, i] = column
        cross -= torch.outer(column, cross[k] / size)
        left = (left - column.square()).clamp_min(tiny)
    return torch.tensor(chosen, dtype=torch.long)
