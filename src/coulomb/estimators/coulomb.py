"""`CoulombSampler`: random features that learn from labels."""

import copy
import math
import warnings
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from coulomb._support.checks import (
    check_count,
    check_member,
    check_memory,
    check_real,
    make_generator,
    packaged,
)
from coulomb._support.errors import ParameterError, ParameterTypeError, shown
from coulomb.domains import AbstractDomain, Ball, domains
from coulomb.dynamics.initial import Component, SpectralMixture
from coulomb.dynamics.loop import StopReason
from coulomb.estimators.base import (
    AbstractFourierSampler,
    Columns,
    RowReservoir,
    Target,
    describe_columns,
    draw_seed,
    drop_weightless,
    is_name,
    label_columns,
    read_target,
)
from coulomb.estimators.chunked import (
    Chunks,
    as_chunks,
    has_parts,
    open_spool,
    summarise,
)
from coulomb.estimators.learning import (
    ENOUGH_TO_CHOOSE,
    LAWS,
    FitData,
    Learned,
    LearningSettings,
    choose_columns,
    continue_fit,
    draw_random_features,
    learn,
)
from coulomb.features import (
    DEFAULT_ESTIMATOR_MAP,
    Particles,
    as_feature_map,
    feature_maps,
)
from coulomb.interactions import AbstractInteraction, interactions
from coulomb.objectives import AbstractJoint, Evidence, LeaveOneOut, Sample

# A dense copy of sparse rows holds this many numbers.
_MOST_NUMBERS = 50_000_000
# A column that is this far out somewhere is heavy-tailed, and may be cut there.
_HEAVY, _CUT = 5.0, 3.0
# Whole numbers with more values than this are not classes unless the user says so, and
# with more than this it is worth a warning.
_MOST_CLASSES, _MANY_CLASSES = 50, 20
_PAPER = packaged("coulomb.estimators", "paper.toml")
_PAPER |= {"n_candidates": None, "batch_size": None, "domain": Ball(5.0)}


_JOINT: dict[str, type[AbstractJoint]] = {
    "evidence": Evidence,
    "leave-one-out": LeaveOneOut,
}
_FULL_BATCH, _BATCH = 20_000, 4096
_STRONGEST = 1e8  # of a repulsion beside which labels do not vanish in rounding
_CHOICES = {
    "resample": ("uniform", "gibbs"),
    "stopping": ("settled", "held-out"),
    "labels": ("centred", "balanced", "paper"),
    "objective": ("auto", "alignment", *_JOINT),
}


class ScaledRows(NamedTuple):
    """Standardised rows with their targets and weights."""

    x: np.ndarray
    target: Target
    weight: np.ndarray


@dataclass(eq=False, repr=False, kw_only=True)
class CoulombSampler(AbstractFourierSampler):
    """Random Fourier features whose frequencies are moved by the labels.

    The features are `sqrt(2/D) cos(w_k . z + b_k)` of standardised inputs `z`. The
    frequencies are particles. They are drawn from a spectral law `p0` that the labels
    bend,

        mu(w)  ~  p0(w) exp(-beta V(w)),
        V(w) = -| sum_i q_i Y_i e^{i w.z_i} |^2,

    and then an energy of all features together moves them, the `Evidence` of a ridge
    regression: first the scales of the columns, which all particles share; then some
    are replaced, one after the other, by what the others leave of the labels; then each
    particle moves. Every fourth row is held out (of fewer than 2000 rows, two to four
    times) and decides how far each of these goes, if at all.

    With `objective="alignment"` it is the paper's method: each particle moves by
    Langevin dynamics in its own potential `V`, with a weak repulsion.

    Parameters
    ----------
    n_components
        How many features `transform` gives, D.
    n_particles
        How many particles move, at least D; None for D.
    gamma
        Bandwidth of the starting law on standardised columns: "auto" chooses it from
        the data, "scale" is one over the number of coordinates, a number is itself.
    coordinates
        How many columns a particle looks at: "auto", "all" or a number.
    inverse_temperature
        `beta`: "auto" or a positive number; infinity moves without noise.
    n_candidates
        Frequencies to choose the starting particles from, by their Gibbs weights; None
        starts from the law itself and needs a number for `inverse_temperature`.
    max_iter
        Langevin steps, or, under a joint energy, the most steps of a particle that
        held-out rows are asked about; 0 gives fixed random features that never see the
        labels.
    tol
        Stop when the mean positions of two windows are closer than this, or, with
        `stopping="held-out"`, when improvements are smaller; 0 runs all `max_iter`
        steps.
    step_size
        `eta`; "auto" follows the temperature.
    interaction
        The repulsion: "log", "riesz", or an interaction such as `Riesz(s=1)`.
    interaction_strength
        `lambda`, at least 0.
    domain
        Where particles may be: "space", or a domain such as `Ball(5.0)`.
    clip
        Largest drift of a particle.
    prior
        Keep the particles near the starting law.
    feature_map
        "fourier", another registered map, or a function of `(x, particles)`.
    batch_size
        Rows per step: "auto", a number, or None for all.
    labels
        "centred", "balanced" (every class weighs the same) or "paper" (raw signs or
        one-hot vectors).
    target
        Whether `y` holds "classes" or a "number"; "auto" takes numbers if there are
        fractions or many different values, and warns where it had to guess.
    resample
        How D of the particles are chosen: "uniform", or "gibbs" by their energies.
    pursuit
        How many of the D features are instead chosen one after the other from a pool,
        each by what the earlier ones leave of the labels. "auto" decides on held-out
        rows under a joint energy and is 0 under the alignment; fewer than 50 different
        rows pursue none in any case.
    objective
        What moves the particles: "evidence" or "leave-one-out", energies of all
        features together, or "alignment", the paper's. "auto" is evidence unless a
        parameter of the Langevin dynamics is given (`inverse_temperature`, `step_size`,
        `tol`, `resample`, `n_candidates=None`, raw labels) or the features are not
        Fourier's.
    stopping
        "settled" or "held-out" (a fifth of the rows is kept aside to decide). Under a
        joint energy held-out rows decide in any case.
    standardize
        Centre and scale each column first. Under a joint energy, columns with heavy
        tails are cut at three standard deviations and columns of two values keep
        their width, each if leave-one-out errors agree.
    random_state
        Seed, generator or None, as in scikit-learn.
    verbose
        1 shows a progress bar.

    Attributes
    ----------
    particles_
        Positions of all particles on the standardised columns,
        `(n_particles, n_features_in_)`.
    history_
        Arrays "step", "energy", "alignment", "repulsion", "displacement", ... Where
        nothing moved: of 512 particles at most.
    stop_reason_
        Why the run ended, in words.
    n_iter_
        Steps made.
    scaled_
        Whether the scales of the columns were moved.
    effective_sample_size_
        How many equal weights the Gibbs weights of the last weighted choice are worth.
    law_, divergence_, inverse_temperature_
        What was chosen: the starting law, how far (in nats) the labels bent it, `beta`.
    selection_
        Every choice that was tried, with its held-out score.
    n_pursued_
        How many of the features were chosen one after the other; they are the last.
    random_weights_, random_offset_, feature_scale_
        Frequencies, phases and amplitudes of the features.
    mean_, scale_, gamma_
        Location and scale of each column; the bandwidth as given or by "scale".
    column_limits_
        Where scaled columns are cut, infinity for those that are not.

    See Also
    --------
    ImportanceSampler : Chooses among fixed frequencies.
    OrthogonalSampler : Fixed frequencies with smaller variance.

    Examples
    --------
    >>> X = np.random.default_rng(0).normal(size=(300, 5))
    >>> y = np.sin(3 * X[:, 0]) * X[:, 1] > 0
    >>> sampler = CoulombSampler(64, random_state=0).fit(X, y)
    >>> sampler.transform(X).shape
    (300, 64)
    >>> fixed = CoulombSampler(64, max_iter=0, random_state=0).fit(X, y)
    >>> fixed.stop_reason_
    'all steps were made'
    """

    _gammas = ("auto", "scale")

    n_particles: int | None = None
    gamma: str | float = "auto"
    coordinates: str | int = "auto"
    inverse_temperature: str | float = "auto"
    n_candidates: int | None = 4000
    max_iter: int = 50
    tol: float = 0.0
    step_size: str | float = "auto"
    interaction: Any = "log"
    interaction_strength: float = 1e-3
    domain: Any = "space"
    clip: float = 1.0
    prior: bool = True
    feature_map: Any = DEFAULT_ESTIMATOR_MAP
    batch_size: Any = "auto"
    labels: str = "centred"
    target: str = "auto"
    resample: str = "uniform"
    pursuit: str | int = "auto"
    objective: str = "auto"
    stopping: str = "settled"
    verbose: int = 0

    @classmethod
    def paper(cls, n_components: int = 200, **changes: Any) -> Self:
        """Make a sampler with the constants of the paper, which do not win.

        Parameters
        ----------
        n_components
            How many features.
        **changes
            Any other parameter.

        Returns
        -------
        CoulombSampler
            300 particles, step 30, `beta` 100, 2000 steps, log repulsion of strength
            0.5, a ball of radius 5, clipping at 1, raw labels, no prior, Gibbs choice,
            no pursuit.
        """
        return cls(n_components, **(_PAPER | changes))

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Learn the particles from the labels.

        Parameters
        ----------
        X
            Dense or sparse data, shape `(n, p)`; a Dask array or frame, the path of
            Parquet files, or any iterable of chunks `(X, y)` or `(X, y,
            sample_weight)`; those of a generator are kept in a temporary file. Of more
            than 100,000 dense rows all decide mean and scale, and a uniform sample of
            them everything else.
        y
            Labels or numbers, shape `(n,)`; the name of a column of Parquet files or of
            a Dask frame; None for chunks.
        sample_weight
            Weights of the rows; an integer weight equals repeating the row.

        Returns
        -------
        CoulombSampler
            The estimator.
        """
        with self._all_or_nothing(), open_spool() as spool:
            settings = resolve_settings(self, draw_seed(self.random_state))
            chunks = as_chunks(X, y, sample_weight, spool)
            if chunks is None:
                rows, y, weight = self._fit_input(X, y, sample_weight)
                target = _read_target(y, self.target)
            else:
                rows, target, weight = self._fit_parts(chunks, settings.seed)
            self._check_sizes(settings)
            self._reservoir: RowReservoir | None = None
            self._learned: Learned | None = None
            self._learn(self._dense(rows, weight, target), settings)
            self._learned = None  # needed by partial_fit alone
        return self

    def _fit_parts(self, chunks: Chunks, seed: int) -> ScaledRows:
        """Learn the columns from all rows, and give those that features see."""
        summary = summarise(chunks, self, seed)
        X, y, weight = summary.arrays
        if summary.columns is None:
            X, y, weight = self._fit_input(X, y, weight)
        else:
            check_count("n_components", self.n_components)
            X, y, weight = drop_weightless(X, y, weight)
            self._set_columns(summary.columns)
        self.__dict__.update(summary.about)
        target = _read_target(y, self.target)
        if target.classes is not None:
            target = read_target(y, target="classes", classes=summary.classes)
        return ScaledRows(X, target, weight)

    def _check_part(
        self, X: Any, y: Any, weight: Any
    ) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        X, y, weight = self._check_rows(X, y, weight)
        if sparse.issparse(X):
            raise ParameterTypeError(
                "`X` must have dense chunks; got sparse ones. Use partial_fit, or "
                "x.toarray() for each."
            )
        return [X], y, weight

    def _describe_part(self, table: list[np.ndarray], weight: np.ndarray) -> Columns:
        keep = weight > 0
        return describe_columns(table[0][keep], weight[keep])

    def partial_fit(
        self, X: Any, y: Any = None, classes: Any = None, sample_weight: Any = None
    ) -> Self:
        """Learn from one chunk of rows after another.

        The first call fixes the standardisation and, once there are two classes,
        chooses law and temperature; each call lets the particles move `max_iter` steps
        by their alignment with a random sample of all rows so far, of which 20,000 are
        remembered.

        Parameters
        ----------
        X
            A chunk of rows, or parts as in `fit`, read one after the other.
        y
            Their labels or numbers.
        classes
            All classes, if the first chunk may lack some.
        sample_weight
            Weights of the rows.

        Returns
        -------
        CoulombSampler
            The estimator.
        """
        if has_parts(X):
            for part in as_chunks(X, y, sample_weight) or ():
                self.partial_fit(part.X, part.y, classes, part.weight)
            return self
        with self._all_or_nothing():
            before = getattr(self, "_reservoir", None)
            if before is None:
                self._seed = draw_seed(self.random_state)
                settings = resolve_settings(self, self._seed)
                rows, y, weight = self._fit_input(X, y, sample_weight)
                self._check_sizes(settings)
                self._learned = None
                known = (
                    _read_target(y, self.target)
                    if classes is None
                    else read_target(y, target=self.target, classes=classes)
                )
                self._classes = known.classes
            else:
                settings = resolve_settings(self, self._seed)
                rows, y, weight = self._check_rows(X, y, sample_weight, reset=False)
            kind = "number" if self._classes is None else "classes"
            target = read_target(y, target=kind, classes=self._classes)
            x, target, weight = self._dense(rows, weight, target)
            chunk = x, target.values, weight
            self._reservoir = RowReservoir.of(chunk, self._seed, before)
            x, values, weight = self._reservoir.arrays
            seen = ScaledRows(x, Target(values, target.classes), weight)
            self._learn(seen, replace(settings, joint=None))
        return self

    def control(self, random_state: Any = None) -> Self:
        """Make the control of a comparison: everything learned but the alignment.

        Each feature keeps its norm and its number of coordinates, so the bandwidths and
        the sparsity are those that were learned; which coordinates and which direction
        it has is drawn anew. What the learned features do better than this is due to
        the labels having placed them.

        Parameters
        ----------
        random_state
            Seed, generator or None, as in scikit-learn.

        Returns
        -------
        CoulombSampler
            A fitted copy.
        """
        check_is_fitted(self)
        generator = make_generator(draw_seed(random_state))
        weights = self.random_weights_[self._varying].T
        drawn = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
        order = torch.rand(weights.shape, generator=generator).argsort(dim=1).numpy()
        drawn = drawn.numpy() * (order < (weights != 0).sum(axis=1, keepdims=True))
        size = np.linalg.norm(drawn, axis=1, keepdims=True)
        norm = np.linalg.norm(weights, axis=1, keepdims=True)
        twin = copy.deepcopy(self)
        twin.random_weights_ = twin._embed((drawn / np.where(size, size, 1) * norm).T)
        twin.particles_ = twin.random_weights_.T.copy()
        return twin

    def noise_control(self, random_state: Any = None) -> Self:
        """Make the other control: the same fit without the pull of the labels.

        The particles start from the law that was chosen and feel the same repulsion,
        prior, walls and noise, at the same temperature and for as many steps, and D of
        them are kept in the same way; but `V = 0` everywhere. What the learned features
        do better than this is due to the labels having moved and chosen them. Law and
        temperature are the learned ones, which labels may have chosen.

        Parameters
        ----------
        random_state
            Seed, generator or None, as in scikit-learn; the seed of the fit gives the
            same candidates and the same noise.

        Returns
        -------
        CoulombSampler
            A fitted copy with the same phases.

        Examples
        --------
        >>> X = np.random.default_rng(0).normal(size=(60, 3))
        >>> sampler = CoulombSampler(8, random_state=0).fit(X, X[:, 0] > 0)
        >>> sampler.noise_control(0).transform(X).shape
        (60, 8)
        """
        check_is_fitted(self)
        twin, seed = copy.deepcopy(self), draw_seed(random_state)
        dim = int(self._varying.sum())
        if dim == 0:
            return twin
        settings = resolve_settings(self, seed)
        kept = self.random_offset_.shape[0]
        if self.law_ not in settings.laws or settings.n_components != kept:
            raise ParameterError(
                "`gamma`, `coordinates` and `n_components` must be those of the fit, "
                f"which gave {kept} features of the law {self.law_!r}; fit again."
            )
        settings = replace(
            settings,
            laws={self.law_: settings.laws[self.law_]},
            inverse_temperature=self.inverse_temperature_,
            max_iter=self.n_iter_,
            pursuit=0,
            joint=None,
            # Where V = 0 there is nothing to watch, and no rows to choose from.
            tol=0.0,
            stopping="settled",
            batch_size=None,
            progress=False,
        )
        # Without labels two rows serve as well as all.
        x = torch.zeros(2, dim, dtype=torch.float64)
        blind = Sample(x, torch.zeros(2, 1, dtype=torch.float64))
        found = learn(FitData(blind, torch.arange(2), 2), settings)
        positions = found.run.particles.positions.double().numpy()
        twin.particles_ = twin._embed(positions.T).T
        twin.random_weights_ = twin._embed(positions[found.chosen.numpy()].T)
        twin.n_pursued_ = 0
        return twin

    def _check_sizes(self, settings: LearningSettings) -> None:
        """Check what can only be checked beside the data."""
        dim = self.n_features_in_
        if not isinstance(self.coordinates, str) and self.coordinates > dim:
            raise ParameterError(
                f"`coordinates` must be at most the {dim} columns of `X`; got "
                f"{self.coordinates}. Lower it, or use 'all'."
            )
        count = max(settings.n_particles, settings.n_candidates or 0)
        check_memory("n_particles and n_candidates", 32 * dim * count)

    def _features(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        feature_map = as_feature_map(self.feature_map)
        if feature_map.averages_phases:
            return super()._features(X)
        X = self._check_new(X)
        dense = X.toarray() if sparse.issparse(X) else X
        scaled = torch.from_numpy(np.ascontiguousarray(self._scaled(dense)))
        positions = torch.from_numpy(self.random_weights_.T.astype(X.dtype))
        phases = torch.from_numpy(self.random_offset_.astype(X.dtype))
        features = feature_map(scaled, Particles(positions, phases)).numpy()
        return features / np.sqrt(X.dtype.type(self.n_components))

    @property
    def _n_features_out(self) -> int:
        feature_map = as_feature_map(self.feature_map)
        return feature_map.n_features(int(self.random_offset_.shape[0]))

    def _learn(self, rows: ScaledRows, settings: LearningSettings) -> None:
        x, target, _ = rows
        sample = None if self._waits_for_classes(target) else self._sample(rows)
        if sample is None or settings.max_iter == 0 or x.shape[1] == 0:
            self._keep_learned(draw_random_features(x.shape[1], settings))
            return
        order = torch.from_numpy(np.argsort(target.values, kind="stable"))
        # Repeated rows and integer weights are the same: only different rows count.
        distinct = len(x) if len(x) > 1000 else len(np.unique(x, axis=0))
        data = FitData(sample, order, distinct)
        if settings.joint and self.standardize:
            data = self._adapt_columns(data, settings)
        if self._learned is None:
            self._learned = learn(data, settings)
        else:
            self._learned = continue_fit(data, self._learned, settings)
        self._keep_learned(self._learned)

    def _adapt_columns(self, data: FitData, settings: LearningSettings) -> FitData:
        """Cut heavy tails, and leave columns of two values 0 and 1, if that is better.

        A row far out has a feature that says nothing, and a rare value in a column of
        two becomes such a row when it is standardised.
        """
        x = data.sample.x
        low, high = x.min(dim=0).values, x.max(dim=0).values
        binary = ((x == low) | (x == high)).all(dim=0)
        heavy = ~binary & (torch.maximum(high, -low) > _HEAVY)
        if self._sparse:  # zeros are not stored, and must not be cut
            zero = torch.from_numpy(self.mean_ / self.scale_)[self._varying].to(x)
            heavy &= zero.abs() < _CUT
        limits = torch.where(heavy, _CUT, math.inf).to(x)
        widths = torch.where(binary, high - low, torch.ones_like(high))
        cuts = [torch.full_like(limits, math.inf), limits][: 1 + bool(heavy.any())]
        spans = [torch.ones_like(widths), widths][: 1 + bool(binary.any())]
        choices = list(product(cuts, spans))
        if len(choices) == 1 or data.distinct_rows < ENOUGH_TO_CHOOSE:
            return data
        variants = [x.clamp(-cut, cut) / width for cut, width in choices]
        best = choose_columns(data, variants, settings)
        cut, width = choices[best]
        self.column_limits_[self._varying] = cut.double().numpy()
        self.scale_[self._varying] *= width.double().numpy()
        return data._replace(sample=replace(data.sample, x=variants[best]))

    def _check_restored(self) -> None:
        super()._check_restored()
        limits = getattr(self, "column_limits_", self.scale_)
        if limits.shape != self.scale_.shape or not (limits > 0).all():
            raise ValueError("column_limits_ must be positive, one for each column")

    def _scaled(self, X: Any) -> Any:
        limits = getattr(self, "column_limits_", None)  # not in files of old
        if limits is None or np.isinf(limits).all():
            return super()._scaled(X)
        if not sparse.issparse(X):
            scaled = super()._scaled(X)
            return np.clip(scaled, -limits, limits).astype(X.dtype, copy=False)
        reach, cut = limits * self.scale_, X.copy()
        low, high = (self.mean_ - reach)[X.indices], (self.mean_ + reach)[X.indices]
        cut.data = np.clip(X.data, low, high).astype(X.dtype, copy=False)
        return cut

    def _waits_for_classes(self, target: Target) -> bool:
        """Whether chunks have shown one class so far, and more were announced."""
        return (
            self._reservoir is not None
            and target.classes is not None
            and len(target.classes) > 1
            and np.unique(target.values).size < 2
        )

    def _sample(self, rows: ScaledRows) -> Sample:
        x, target, weight = rows
        kinds = {"centred": target.kind, "balanced": "balanced", "paper": "one-hot"}
        kind = kinds[self.labels]
        if target.classes is None:
            kind = "regression"
        elif self.labels == "paper" and len(target.classes) == 2:
            kind = "signs"
        labels = label_columns(target, weight, kind)
        # Small problems are cheap in float64, and then exact to the last weight.
        single = x.size * self.n_components > 20_000_000 or x.dtype == np.float32
        dtype = torch.float32 if single and len(x) > 2000 else torch.float64
        equal = bool((weight == weight[0]).all())
        weights = None if equal else torch.from_numpy(weight / weight.sum()).to(dtype)
        return Sample(torch.from_numpy(x).to(dtype), labels.to(dtype), weights)

    def _keep_learned(self, learned: Learned) -> None:
        run = learned.run
        positions = run.particles.positions.double().numpy()
        self.particles_ = self._embed(positions.T).T
        self.n_iter_ = run.state.step
        self.history_ = _columns_of(run.history)
        reason = run.reason or StopReason.MAX_STEPS
        self.stop_reason_ = reason.value
        self.law_, self.divergence_ = learned.law, learned.divergence
        self.inverse_temperature_ = learned.inverse_temperature
        self.effective_sample_size_ = learned.effective_sample_size
        self.selection_ = [{"law": t.law, "score": t.score} for t in learned.trials]
        self.selection_ += [
            {
                "divergence": stage.divergence,
                "scaled": stage.factors is not None,
                "pursued": stage.pursued,
                "steps": stage.steps,
                "score": score,
            }
            for stage, score in learned.judged
        ]
        stage = learned.stage
        self.n_pursued_, self.scaled_ = stage.pursued, stage.factors is not None
        weights, phases = stage.features
        assert phases is not None
        self._store_features(weights.numpy().T, phases.numpy())
        if self.n_iter_ and self.tol > 0 and reason is StopReason.MAX_STEPS:
            warnings.warn(
                f"CoulombSampler made all {self.max_iter} steps before `tol` = "
                f"{self.tol} was reached; raise `max_iter` or `tol`.",
                ConvergenceWarning,
                stacklevel=4,
            )

    def _dense(self, X: Any, weight: np.ndarray, target: Target) -> ScaledRows:
        """Standardise the columns that vary; of huge sparse data, of some rows."""
        self._sparse = sparse.issparse(X)
        if not hasattr(self, "_reservoir") or self._reservoir is None:
            self.column_limits_ = np.full(X.shape[1], np.inf)
        if self._sparse:
            most = max(256, _MOST_NUMBERS // max(1, X.shape[1]))
            every = slice(None, None, -(-X.shape[0] // most))
            target = target._replace(values=target.values[every])
            X, weight = X[every].toarray(), weight[every]
        scaled = self._scaled(X)[:, self._varying]
        return ScaledRows(np.ascontiguousarray(scaled), target, weight)


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


def _joint_energy(
    sampler: Any, fourier: bool, beta: float | None
) -> type[AbstractJoint] | None:
    """Give the energy of all features that moves the particles, None for alignment."""
    name = sampler.objective
    # Who sets up the Langevin dynamics of the alignment wants them.
    fits = {
        "feature_map": fourier,
        "inverse_temperature": beta is None,
        "n_candidates": sampler.n_candidates is not None,
        "tol": sampler.tol == 0,
        "step_size": sampler.step_size == "auto",
        "resample": sampler.resample == "uniform",
        "labels": sampler.labels != "paper",
    }
    if name == "auto":
        return Evidence if all(fits.values()) else None
    for setting, fit in fits.items():
        if name in _JOINT and not fit:
            raise ParameterError(
                f"`{setting}` must be left at its default with `objective` = {name!r}; "
                f"got {getattr(sampler, setting)!r}. Use objective='alignment'."
            )
    return _JOINT.get(name)


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


def _read_target(y: Any, target: str) -> Target:
    """Tell classes from numbers, and say so where whole numbers could be either."""
    read = read_target(y, target=target)
    if target != "auto" or read.classes is None or read.classes.dtype.kind not in "fiu":
        return read
    count = len(read.classes)
    if count <= _MANY_CLASSES:
        return read
    taken = "classes" if count <= _MOST_CLASSES else "numbers"
    warnings.warn(
        f"`y` holds {count} different whole numbers, which are taken as {taken}; say "
        "target='classes' or target='number'.",
        UserWarning,
        stacklevel=4,
    )
    if taken == "numbers":
        read = read_target(y, target="number")
    return read


def _columns_of(history: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for record in history for name in record)
    return {
        name: np.array([record.get(name, np.nan) for record in history])
        for name in names
    }
