"""From data to particles: draw candidates, bend their law, let them move.

Particles move by one of two energies. Under the paper's *alignment* each follows the
labels on its own, with the noise of its temperature. Under a *joint* energy, of a ridge
regression on all features, they complete each other; then the labels have been used to
the full, so a part of the rows is held out from all of it and decides how far to go:
how many features are pursued, whether the scales of the columns move (shared by all
particles), and how many steps the particles make on their own.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from coulomb.domains import Masked, Space
from coulomb.dynamics import loop
from coulomb.dynamics.initial import SpectralDraw, draw_phases
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
    CAUTIOUS,
    COUNTS,
    LARGEST_SINGLE_ANGLE,
    LAWS,
    REFERENCE,
    Features,
    Moments,
    Rows,
    Stage,
    Trial,
    choose_law,
    complete,
    furthest_gain,
    held_out_losses,
    pursue,
)
from coulomb.estimators.settings import JOINT, LearningSettings
from coulomb.features import Particles
from coulomb.interactions import ExactSum, FarFieldSum
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
_ENOUGH_TO_CHOOSE = 50
_ROWS_TO_CHOOSE = 2000  # more rows change a choice little and cost much
_ROWS_TO_WEIGH = 20_000  # for the energies of thousands of candidates
_ROWS_TO_PURSUE = 4000  # for the products of a pool of features
_ROWS_TO_MOVE = 20_000  # to draw the batches of a joint energy from
_POOL = 1000
# Held out from learning by a joint energy: every fourth row, once if rows are many and
# otherwise each once.
_PARTS, _MANY_ROWS = 4, 2000
_ROWS_PER_PURSUED = 10
_MARGIN = 1.0  # standard errors by which more learning must be better
_SCALE_STEPS, _SCALE_STEP_SIZE = 20, 0.05
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
    stage: Stage  # the features: particles, then those that were pursued
    judged: list[tuple[Stage, float]]  # stages that were tried, held-out R^2


def learn(data: FitData, settings: LearningSettings) -> Learned:
    """Learn particles from scratch."""
    fit = _Fit(settings, *data)
    with fit.sensible_threads():
        if settings.joint and data.distinct_rows >= _ENOUGH_TO_CHOOSE:
            return _learn_jointly(fit)
        law, divergence, trials = fit.choose()
        draw, beta, size = fit.draw_start(law, divergence)
        run = fit.move(draw, beta)
        chosen, weighted_size = fit.choose_particles(run, draw, beta)
        stage = fit.features(run, chosen, law)
    size = weighted_size or size
    return Learned(run, draw, law, divergence, beta, trials, chosen, size, stage, [])


def _learn_jointly(whole: "_Fit") -> Learned:
    """Learn on a part of the rows, or on several, and stop where the others say."""
    parts = whole.parts()
    one = len(parts) == 1
    # Of few rows all choose the law and its divergence.
    law, divergence, trials = (parts[0][0] if one else whole).choose()
    paths = [_Path(fit, law, divergence) for fit, _ in parts]
    outside = [rows for _, rows in parts]
    counts = whole.counts()
    pursued = [path.pursued(counts) for path in paths]
    losses = _pooled(paths, pursued, outside)
    best = furthest_gain(losses, _MARGIN)
    moved = [
        path.moved(stages[best]) for path, stages in zip(paths, pursued, strict=True)
    ]
    more = _pooled(paths, moved, outside)
    end = furthest_gain(more, _MARGIN)
    variance = float(torch.cat([_spread(rows) for rows in outside]).mean())
    tried = pursued[0] + moved[0][1:]
    judged = [
        (stage, 1 - float(loss.mean()) / variance)
        for stage, loss in zip(tried, losses + more[1:], strict=True)
    ]
    path, stage = paths[0], moved[0][end]
    if not one:
        path = _Path(whole, law, divergence)
        stage = path.moved(path.pursued(counts[best : best + 1])[0], end)[end]
    return path.learned(stage, trials, judged)


def _pooled(
    paths: list["_Path"], stages: list[list[Stage]], outside: list[Rows]
) -> list[Tensor]:
    """Judge every stage on all rows that were held out from it."""
    losses = [
        [path.losses(stage, rows) for stage in each]
        for path, each, rows in zip(paths, stages, outside, strict=True)
    ]
    return [torch.cat(same) for same in zip(*losses, strict=True)]


def _spread(rows: Rows) -> Tensor:
    centred = rows.labels - rows.weights @ rows.labels / rows.weights.sum()
    return rows.weights * centred.square().sum(dim=-1)


class _Path:
    """The way of one set of rows: particles drawn, some pursued, all moved."""

    def __init__(self, fit: "_Fit", law: str, divergence: float | None) -> None:
        self.fit, self.law, self.divergence = fit, law, divergence
        self.draw, self.beta, self.size = fit.draw_start(law, divergence)
        settings = fit.settings
        self.chosen = choose_uniformly(
            settings.n_particles,
            settings.n_components,
            generator=settings.generator("choice"),
        )
        self.start = settings.with_phases(self.draw.positions[self.chosen])
        self.history: list[dict[str, Any]] = []

    @cached_property
    def inside(self) -> Rows:
        return self.fit.some_rows(_ROWS_TO_PURSUE)

    def losses(self, stage: Stage, outside: Rows) -> Tensor:
        """Judge a stage on rows that it has not seen."""
        feature_map = self.fit.settings.feature_map
        return held_out_losses(stage.features, self.inside, outside, feature_map)

    def pursued(self, counts: tuple[int, ...]) -> list[Stage]:
        """Replace so many of the drawn features by some that complete the others."""
        found = self.start
        if counts[-1]:
            found = self.fit.pursued(self.law, counts[-1])
        return [Stage(complete(self.start, found, k), k) for k in counts]

    def moved(self, stage: Stage, most: int | None = None) -> list[Stage]:
        """Let scales and then particles move; the first stage is the one given."""
        settings, stages = self.fit.settings, [stage]
        marks = [steps for steps in _MARKS if steps <= settings.max_iter]
        if most == 0:
            return stages
        moves = self.moves()
        features = moves.rescale(stage.features)
        stages.append(stage._replace(features=features, scaled=True))
        if len(features.phases) > _MOST_MOVING:
            return stages
        run = moves.begin(features)
        for steps in marks[: None if most is None else most - 1]:
            features = moves.go_on(run, steps)
            stages.append(Stage(features, stage.pursued, steps, scaled=True))
        self.history = run.history
        return stages

    def moves(self) -> "_JointMoves":
        """Prepare moves, in the precision that the angles allow."""
        rows = self.fit.some_rows(_ROWS_TO_MOVE)
        return _JointMoves(self.fit.settings, rows.single(self.start.positions))

    def learned(
        self, stage: Stage, trials: list[Trial], judged: list[tuple[Stage, float]]
    ) -> Learned:
        """Say where the path ended."""
        if not self.history:
            moves = self.moves()
            run = moves.begin(stage.features)
            moves.go_on(run, 0)
            self.history = run.history
        positions = self.draw.positions.double().clone()
        positions[self.chosen] = stage.features.positions
        run = loop.Run(
            State(Particles(positions), stage.steps),
            self.fit.settings.generator("moves"),
            [record for record in self.history if record["step"] <= stage.steps],
            reason=StopReason.HELD_OUT,
        )
        return Learned(
            run,
            self.draw._replace(positions=positions),
            self.law,
            self.divergence,
            self.beta,
            trials,
            self.chosen,
            self.size,
            stage,
            judged,
        )


class _JointMoves:
    """Moves under a joint energy; a phase is the frequency of a constant column."""

    def __init__(self, settings: LearningSettings, rows: Rows) -> None:
        assert settings.joint is not None
        self.settings = settings
        self.generator = settings.generator("moves")
        x, labels, weights = rows
        x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
        equal = bool((weights == weights[0]).all())
        self.sample = Sample(x, labels, None if equal else weights / weights.sum())
        self.objective: AbstractJoint = JOINT[settings.joint](
            self.sample, settings.feature_map
        )
        self.batch_size = max(_LEAST_BATCH, 4 * settings.n_components)

    def rescale(self, features: Features) -> Features:
        """Move the scales of the columns, which all particles share."""
        dtype = self.sample.x.dtype
        some = _with_phase_column(features.take(slice(_MOST_MOVING // 2)), dtype)
        objective = self.objective.with_best_penalty(some)
        scales = SharedScales(objective, some)
        free = torch.ones_like(some.positions[:1])
        free[:, -1] = 0  # the phases stay
        sampler = AdamLangevin(
            _SCALE_STEP_SIZE, domain=Masked(Space(), free), batch_size=self.batch_size
        )
        start = Particles(torch.zeros_like(free))
        run = loop.init_run(sampler, start, generator=self.generator)
        limits = loop.RunSettings(_SCALE_STEPS, record_every=_SCALE_STEPS)
        loop.run(run, sampler, Hamiltonian(scales), limits)
        factors = run.particles.positions[:, :-1].double().exp()
        return features._replace(positions=features.positions * factors)

    def begin(self, features: Features) -> loop.Run:
        """Prepare the moves of the particles, each on its own coordinates."""
        particles = _with_phase_column(features, self.sample.x.dtype)
        mask = (particles.positions != 0).to(particles.positions)
        mask[:, -1] = 1
        settings = self.settings
        self.objective = self.objective.with_best_penalty(particles)
        self.energy = Hamiltonian(
            self.objective, settings.interaction, settings.strength
        )
        self.sampler = AdamLangevin(
            _PARTICLE_STEP_SIZE,
            domain=Masked(Space(), mask),
            batch_size=self.batch_size,
        )
        return loop.init_run(self.sampler, particles, generator=self.generator)

    def go_on(self, run: loop.Run, steps: int) -> Features:
        """Move until a step."""
        limits = loop.RunSettings(
            steps, record_every=max(1, steps), progress=self.settings.progress
        )
        loop.run(run, self.sampler, self.energy, limits)
        positions = run.particles.positions.double()
        return Features(
            self.settings.domain.project(positions[:, :-1]), positions[:, -1]
        )


def _with_phase_column(features: Features, dtype: torch.dtype) -> Particles:
    phases = features.phases.unsqueeze(-1)
    positions = torch.cat([features.positions, phases], dim=1).to(dtype)
    return Particles(positions, torch.zeros(len(positions), dtype=dtype))


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
            count, dim = _FEATURES_FOR_COLUMNS, x.shape[1]
            positions = LAWS[name].draw(count, dim, generator=generator)
            drawn = Features(positions, draw_phases(count, generator=generator))
            left = drawn.errors(rows, settings.feature_map).square().sum(dim=-1)
            losses.append(float((rows.weights * left).mean()))
        errors.append(min(losses))
    return min(range(len(errors)), key=errors.__getitem__)


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
        threads = torch.get_num_threads()
        with threadpool_limits(limits=1 if small else None):
            torch.set_num_threads(1 if small else threads)
            try:
                yield
            finally:
                torch.set_num_threads(threads)

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
            feature_map=settings.feature_map,
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
        return self.rows(rows)

    def rows(self, chosen: Tensor) -> Rows:
        """Take these rows."""
        sample = self.sample
        weights = (sample.probabilities * sample.size)[chosen]
        return Rows(sample.x[chosen], sample.labels[chosen], weights / weights.mean())

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
        particles = _cast(run.particles, self.sample.x.dtype)
        energies = energy.energy_per_particle(particles, generator=generator)
        weights = gibbs_weights(energies, beta)
        chosen = Resampler("systematic")(weights, keep, generator=generator)
        return chosen, effective_sample_size(weights)

    def features(self, run: loop.Run, chosen: Tensor, law: str) -> Stage:
        """Turn particles into features; the last may be chosen one after the other."""
        drawn = self.settings.with_phases(run.particles.positions[chosen])
        count = self.settings.pursuit or 0
        if count == 0 or self.distinct_rows < _ENOUGH_TO_CHOOSE:
            return Stage(drawn)
        return Stage(complete(drawn, self.pursued(law, count), count), count)

    def pursued(self, law: str, count: int) -> Features:
        """Choose features of a pool one after the other."""
        pool, rows = self.draw_pool(law), self.some_rows(_ROWS_TO_PURSUE)
        moments = Moments.of(pool.values(rows.x), rows.labels, rows.weights)
        return pool.take(pursue(*moments.centred(), count))

    def counts(self) -> tuple[int, ...]:
        """List how many features may be pursued."""
        if self.settings.pursuit is not None:
            return (self.settings.pursuit,)
        most = min(self.settings.n_components, self.distinct_rows // _ROWS_PER_PURSUED)
        return (0, *(k for k in COUNTS if k <= most))

    def parts(self) -> list[tuple["_Fit", Rows]]:
        """Hold out every fourth row in the order of labels: once, or each once."""
        number = torch.arange(len(self.order)) % _PARTS
        found = []
        for part in range(1 if len(self.order) >= _MANY_ROWS else _PARTS):
            inside = _thinned(self.order[number != part], _ROWS_TO_WEIGH)
            outside = _thinned(self.order[number == part], _ROWS_TO_PURSUE)
            sample = self.sample
            weights = None
            if sample.weights is not None:
                weights = sample.weights[inside] / sample.weights[inside].sum()
            kept = Sample(sample.x[inside], sample.labels[inside], weights)
            fit = replace(self, sample=kept, order=torch.arange(len(inside)))
            found.append((fit, self.rows(outside)))
        return found

    def draw_pool(self, law: str) -> Features:
        """Draw from the law that was chosen and, if all were open, from a broad one."""
        settings, generator = self.settings, self.settings.generator("pool")
        laws = [settings.laws[law]] + [BROAD] * (settings.laws is LAWS)
        size = math.ceil(max(_POOL, settings.pursuit or 0) / len(laws))
        dim = self.sample.x.shape[1]
        parts = [each.draw(size, dim, generator=generator) for each in laws]
        positions = settings.domain.project(torch.cat(parts))
        return Features(positions, draw_phases(len(positions), generator=generator))


def _thinned(rows: Tensor, most: int) -> Tensor:
    """Keep about `most` of the rows, evenly."""
    return rows[:: -(-len(rows) // most)]


def _cast(particles: Particles, dtype: torch.dtype) -> Particles:
    phases = particles.phases
    return Particles(
        particles.positions.to(dtype), None if phases is None else phases.to(dtype)
    )


def _converted(sample: Sample, dtype: torch.dtype) -> Sample:
    weights = None if sample.weights is None else sample.weights.to(dtype)
    return Sample(sample.x.to(dtype), sample.labels.to(dtype), weights)
