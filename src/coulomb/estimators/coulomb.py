"""`CoulombSampler`: random features that learn from labels."""

import warnings
from typing import Any, Self

import numpy as np
import torch
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    validate_data,
)

from coulomb.dynamics.stopping import StopReason
from coulomb.estimators._columns import Target, label_columns, read_target
from coulomb.estimators._controls import noise_only, norm_matched
from coulomb.estimators._fourier import AbstractFourierSampler, draw_seed
from coulomb.estimators._learning import (
    Learned,
    LearningSettings,
    Table,
    fixed,
    go_on,
    learn,
)
from coulomb.estimators._memory import Memory, Rows
from coulomb.estimators._pursuit import Waves
from coulomb.estimators._settings import PAPER, check_auto_gamma, resolve_settings
from coulomb.features import Fourier, Particles, as_feature_map
from coulomb.objectives import Sample

# A dense copy of sparse rows holds this many numbers.
_MOST_NUMBERS = 50_000_000


class CoulombSampler(AbstractFourierSampler):
    """Random Fourier features whose frequencies are moved by the labels.

    The features are `sqrt(2/D) cos(w_k . z + b_k)` of standardised inputs `z`. The
    frequencies are particles: drawn from a spectral law, attracted by the alignment of
    their feature with the labels, kept apart by a weak repulsion and moved by Langevin
    dynamics towards

        mu(w)  ~  p0(w) exp(-beta V(w)),
        V(w) = -| sum_i q_i Y_i e^{i w.z_i} |^2,

    with `p0` the starting law. Bandwidth, sparsity and temperature are chosen from
    held-out alignment inside `fit`; if no learning scores best, none is done.

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
        Langevin steps; 0 gives fixed random features that never see the labels.
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
        fractions or very many different values.
    resample
        How D of the particles are chosen: "uniform", or "gibbs" by their energies.
    pursuit
        How many of the D features are instead chosen one after the other from a pool,
        each by what the earlier ones leave of the labels. "auto" decides on held-out
        folds, 0 with a given `inverse_temperature`; fewer than 50 different rows pursue
        none in any case.
    stopping
        "settled" or "held-out" (a fifth of the rows is kept aside to decide).
    standardize
        Centre and scale each column first.
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
        Arrays "step", "energy", "alignment", "repulsion", "displacement", ...
    stop_reason_
        Why the run ended, in words.
    n_iter_
        Steps made.
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

    def __init__(
        self,
        n_components: int = 100,
        *,
        n_particles: int | None = None,
        gamma: str | float = "auto",
        coordinates: str | int = "auto",
        inverse_temperature: str | float = "auto",
        n_candidates: int | None = 4000,
        max_iter: int = 50,
        tol: float = 0.0,
        step_size: str | float = "auto",
        interaction: Any = "log",
        interaction_strength: float = 1e-3,
        domain: Any = "space",
        clip: float = 1.0,
        prior: bool = True,
        feature_map: Any = "fourier",
        batch_size: Any = "auto",
        labels: str = "centred",
        target: str = "auto",
        resample: str = "uniform",
        pursuit: str | int = "auto",
        stopping: str = "settled",
        standardize: bool = True,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.n_components = n_components
        self.n_particles = n_particles
        self.gamma = gamma
        self.coordinates = coordinates
        self.inverse_temperature = inverse_temperature
        self.n_candidates = n_candidates
        self.max_iter = max_iter
        self.tol = tol
        self.step_size = step_size
        self.interaction = interaction
        self.interaction_strength = interaction_strength
        self.domain = domain
        self.clip = clip
        self.prior = prior
        self.feature_map = feature_map
        self.batch_size = batch_size
        self.labels = labels
        self.target = target
        self.resample = resample
        self.pursuit = pursuit
        self.stopping = stopping
        self.standardize = standardize
        self.random_state = random_state
        self.verbose = verbose

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
        return cls(n_components, **(PAPER | changes))

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn the particles from the labels.

        Parameters
        ----------
        X
            Dense or sparse data, shape `(n, p)`.
        y
            Labels or numbers, shape `(n,)`.
        sample_weight
            Weights of the rows; an integer weight equals repeating the row.

        Returns
        -------
        CoulombSampler
            The estimator.
        """
        with self._all_or_nothing():
            settings = resolve_settings(self, draw_seed(self.random_state))
            rows, y, weight = self._fit_input(X, y, sample_weight, supervised=True)
            target = read_target(y, target=self.target)
            self._memory: Memory | None = None
            self._learned: Learned | None = None
            self._learn(self._dense(rows, weight, target), settings)
            self._learned = None  # needed by partial_fit alone
        return self

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> Self:
        """Learn from one chunk of rows after another.

        The first call fixes the standardisation and, once there are two classes,
        chooses law and temperature; each call lets the particles move `max_iter` steps
        under a uniform random sample of all rows so far (20,000 are remembered).

        Parameters
        ----------
        X
            A chunk of rows.
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
        with self._all_or_nothing():
            if getattr(self, "_memory", None) is None:
                settings = resolve_settings(self, draw_seed(self.random_state))
                rows, y, weight = self._fit_input(X, y, sample_weight, supervised=True)
                self._seed, self._memory, self._learned = settings.seed, None, None
                known = read_target(y, target=self.target, classes=classes)
                self._classes = known.classes
            else:
                settings = resolve_settings(self, self._seed)
                rows, y, weight = self._check_chunk(X, y, sample_weight)
            kind = "number" if self._classes is None else "classes"
            target = read_target(y, target=kind, classes=self._classes)
            chunk = self._dense(rows, weight, target)
            if self._memory is None:
                self._memory = Memory.begin(chunk, self._seed)
            else:
                self._memory = self._memory.add(chunk, self._seed)
            self._learn(self._memory.rows, settings)
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
        twin: Self = norm_matched(self, draw_seed(random_state))
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
        twin: Self = noise_only(self, draw_seed(random_state))
        return twin

    def _features(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        feature_map = as_feature_map(self.feature_map)
        if isinstance(feature_map, Fourier):
            return super()._features(X)
        X = validate_data(
            self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False
        )
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

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags

    def _learn(self, rows: Rows, settings: LearningSettings) -> None:
        x, target, weight = rows
        if self._waits_for_classes(target):
            self._keep_fixed(x.shape[1], settings)
            return
        sample = self._sample(x, target, weight)
        if settings.max_iter == 0 or x.shape[1] == 0:
            self._keep_fixed(x.shape[1], settings)
            return
        order = torch.from_numpy(np.argsort(target.values, kind="stable"))
        table = Table(sample, order, _count_distinct(x))
        if self._learned is None:
            self._learned = learn(table, settings)
        else:
            self._learned = go_on(table, self._learned, settings)
        self._keep_learned(self._learned)

    def _waits_for_classes(self, target: Target) -> bool:
        """Whether chunks have shown one class so far, and more were announced."""
        return (
            self._memory is not None
            and target.classes is not None
            and len(target.classes) > 1
            and np.unique(target.values).size < 2
        )

    def _sample(self, x: np.ndarray, target: Target, weight: np.ndarray) -> Sample:
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
        self.selection_ = [
            {"law": t.law, "divergence": t.divergence, "score": t.score}
            for t in learned.trials
        ]
        waves, self.n_pursued_, scores = learned.pursuit
        self.selection_ += [{"pursued": k, "score": score} for k, score in scores]
        self._store_waves(waves)
        if self.tol > 0 and reason is StopReason.MAX_STEPS:
            warnings.warn(
                f"CoulombSampler made all {self.max_iter} steps before `tol` = "
                f"{self.tol} was reached; raise `max_iter` or `tol`.",
                ConvergenceWarning,
                stacklevel=4,
            )

    def _keep_fixed(self, dim: int, settings: LearningSettings) -> None:
        waves, self.law_ = fixed(dim, settings)
        self.particles_ = self._embed(waves.positions.numpy().T).T
        self.n_pursued_ = 0
        self.n_iter_, self.history_, self.selection_ = 0, _columns_of([]), []
        self.stop_reason_ = StopReason.MAX_STEPS.value
        self.divergence_, self.inverse_temperature_ = 0.0, 0.0
        self.effective_sample_size_ = float(settings.n_components)
        self._store_waves(waves)

    def _store_waves(self, waves: Waves) -> None:
        self._store_features(waves.positions.numpy().T, waves.phases.numpy())

    def _dense(self, rows: Any, weight: np.ndarray, target: Target) -> Rows:
        """Standardise the columns that vary; of huge sparse data, of some rows."""
        if sparse.issparse(rows):
            most = max(256, _MOST_NUMBERS // max(1, rows.shape[1]))
            step = -(-rows.shape[0] // most)
            rows, weight = rows[::step].toarray(), weight[::step]
            target = target._replace(values=target.values[::step])
        scaled = self._scaled(rows)[:, self._varying]
        return Rows(np.ascontiguousarray(scaled), target, weight)

    def _check_chunk(
        self, X: Any, y: Any, sample_weight: Any
    ) -> tuple[Any, Any, np.ndarray]:
        X, y = validate_data(
            self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False
        )
        weight = _check_sample_weight(
            sample_weight, X, dtype=np.float64, ensure_non_negative=True
        )
        return X, y, weight

    def _resolve_gamma(self, X: Any, weight: np.ndarray) -> float:
        if self.gamma == "auto":
            return 1.0 / max(1, int(self._varying.sum()))
        return super()._resolve_gamma(X, weight)

    def _check_gamma(self) -> None:
        check_auto_gamma(self.gamma)


def _count_distinct(x: np.ndarray) -> int:
    """Count different rows, so that repeated rows and integer weights are the same."""
    if len(x) > 1000:
        return len(x)
    return len(np.unique(x, axis=0))


def _columns_of(history: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for record in history for name in record)
    return {
        name: np.array([record.get(name, np.nan) for record in history])
        for name in names
    }
