"""Energies of a whole feature set: what ridge regression on it leaves of the labels.

They are ours, beyond the paper. Its alignment rewards each particle for agreeing with
the labels and never sees what the others already say. Here the features of all
particles go into one ridge regression whose weights are solved for in closed form,

    A = F'F + alpha I,   w = A^-1 F'Y,   R = Y - F w,

with `F` the features over the root of their number and `Y` the labels, both centred,
row i of both times the root of its weight. A particle moves to where it completes the
others, and repulsion between features is a part of the energy: two particles that say
the same lower the determinant of `A` and the leverage of no row.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from coulomb._support.checks import check_real
from coulomb._support.errors import ParameterError
from coulomb.features import AbstractFeatureMap, Particles
from coulomb.objectives.alignment import AbstractSampled, Field, Sample

# Leverages stay below one by this much: a row that only its own feature explains would
# have an infinite error.
_LEAST_SLACK = 1e-3
PENALTIES = tuple(math.exp(k) for k in range(-9, 6, 2))


class TunedRidge(NamedTuple):
    """A ridge regression whose penalty leave-one-out has chosen."""

    penalty: float
    weights: Tensor  # (N, n_labels)
    errors: Tensor  # (n, n_labels), of each row by a fit that has not seen it


class _Ridge(NamedTuple):
    """A ridge regression on the features of a configuration, solved."""

    features: Tensor  # F, (*groups, n, N), centred and weighted
    labels: Tensor  # Y, (n, labels), the same
    inverse: Tensor  # A^-1, (*groups, N, N)
    log_determinant: Tensor  # of A / alpha, (*groups,)
    weights: Tensor  # w, (*groups, N, labels)
    residuals: Tensor  # R, (*groups, n, labels)


@dataclass(frozen=True, eq=False)
class AbstractJoint(AbstractSampled):
    """An energy of a ridge regression on the features of all particles.

    Parameters
    ----------
    sample
        The data. Weights are relative: their mean counts as one.
    feature_map
        Any map.
    penalty
        `alpha`, positive: the noise, in units of the mean squared feature.
    """

    sample: Sample
    feature_map: AbstractFeatureMap
    penalty: float = 1.0

    def __post_init__(self) -> None:
        check_real("penalty", self.penalty, above=0)
        if self.sample.size < 2:
            raise ParameterError(
                f"`sample` must have at least two rows; got {self.sample.size}."
            )

    @abstractmethod
    def _value_and_slope(self, ridge: _Ridge) -> tuple[Tensor, Tensor]:
        """Evaluate the energy and its gradient for the features, in closed form."""

    @abstractmethod
    def _values(self, ridge: "_Spectrum", penalties: Tensor) -> Tensor:
        """Evaluate the energy for each of several penalties."""

    def energy(self, particles: Particles) -> Tensor:
        features = self.feature_map(self.sample.x, particles)
        return self._value_and_slope(self._solve(features))[0]

    def field(self, particles: Particles) -> Field:
        with torch.enable_grad():
            positions = particles.positions.detach().requires_grad_(True)
            moving = particles._replace(positions=positions)
            features = self.feature_map(self.sample.x, moving)
            with torch.no_grad():
                value, slope = self._value_and_slope(self._solve(features))
                slope = self._uncentred(slope) / math.sqrt(features.shape[-1])
            # As a product: what `grad` is given it compares by importing sympy.
            (gradient,) = torch.autograd.grad((features * slope).sum(), positions)
        shared = value.to(positions).unsqueeze(-1).expand(positions.shape[:-1])
        return Field(shared, particles.n_particles * gradient)

    def on(self, sample: Sample) -> Self:
        return replace(self, sample=sample)

    def batch(self, indices: Tensor) -> Self:
        """Evaluate the energy of some rows instead of all, with the same penalty.

        Unlike that of a one-body energy this estimate is biased: it is the energy of a
        smaller sample, so a batch should have several times as many rows as there are
        features.

        Parameters
        ----------
        indices
            Sample numbers.

        Returns
        -------
        AbstractJoint
            The objective of the batch.
        """
        return replace(self, sample=self.sample.batch(indices))

    def with_best_penalty(
        self, particles: Particles, penalties: tuple[float, ...] = PENALTIES
    ) -> Self:
        """Take the penalty of lowest energy, from one decomposition for all.

        Parameters
        ----------
        particles
            The configuration, without groups.
        penalties
            Those to choose from.

        Returns
        -------
        AbstractJoint
            The same objective with that penalty.
        """
        with torch.no_grad():
            spectrum = self._spectrum(particles)
            values = self._values(spectrum, torch.tensor(penalties))
        return replace(self, penalty=penalties[int(values.argmin())])

    def predict(
        self, particles: Particles, x: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Predict labels of new rows by the ridge regression on the sample.

        Parameters
        ----------
        particles
            The configuration.
        x
            New inputs, shape `(m, dim)`.
        weights
            Those of a regression that is solved already; None solves it.

        Returns
        -------
        Tensor
            Shape `(*groups, m, n_labels)`.
        """
        share = self.sample.probabilities.unsqueeze(-2)
        features = self.feature_map(self.sample.x, particles)
        new = self.feature_map(x, particles) - share @ features
        if weights is None:
            weights = self._solve(features).weights
        predicted = new / math.sqrt(features.shape[-1]) @ weights
        return predicted + share @ self.sample.labels

    def _root(self) -> Tensor | None:
        """Give the root of each row's weight, None for equal ones."""
        if self.sample.weights is None:
            return None
        return (self.sample.size * self.sample.weights).sqrt().unsqueeze(-1)

    def _centred(self, features: Tensor) -> Tensor:
        features = features / math.sqrt(features.shape[-1])
        return self._weighted(features)

    def _weighted(self, rows: Tensor) -> Tensor:
        root = self._root()
        if root is None:
            return rows - rows.mean(dim=-2, keepdim=True)
        return root * (rows - self.sample.probabilities.unsqueeze(-2) @ rows)

    def _uncentred(self, slope: Tensor) -> Tensor:
        """Take a gradient back through weighting and centring."""
        root = self._root()
        if root is None:
            return slope - slope.mean(dim=-2, keepdim=True)
        slope = root * slope
        share = self.sample.probabilities.unsqueeze(-1)
        return slope - share * slope.sum(dim=-2, keepdim=True)

    def _spectrum(self, particles: Particles) -> "_Spectrum":
        features = self._centred(self.feature_map(self.sample.x, particles))
        return _Spectrum.of(features, self._labels())

    def _labels(self) -> Tensor:
        return self._weighted(self.sample.labels)

    def _solve(self, features: Tensor) -> _Ridge:
        features, labels = self._centred(features), self._labels()
        # Products in the precision of the data, their inverse in double precision.
        gram = (features.mT @ features).double()
        shift = self.penalty * torch.eye(gram.shape[-1], dtype=torch.float64)
        factor, failed = torch.linalg.cholesky_ex(gram + shift)
        if failed.any():  # the penalty is below the rounding of the products
            gram = features.double().mT @ features.double()
            factor = torch.linalg.cholesky(gram + shift)
        cross = (features.mT @ labels).double()
        weights = torch.cholesky_solve(cross, factor).to(features)
        logs = factor.diagonal(dim1=-2, dim2=-1).log().sum(dim=-1)
        return _Ridge(
            features,
            labels,
            torch.cholesky_inverse(factor).to(features),
            2 * logs - gram.shape[-1] * math.log(self.penalty),
            weights,
            labels - features @ weights,
        )


class _Spectrum(NamedTuple):
    """Features, and the directions of their second moments."""

    features: Tensor  # F
    labels: Tensor  # Y
    directions: Tensor  # V, eigenvectors of F'F
    squares: Tensor  # its eigenvalues
    cross: Tensor  # V'F'Y

    @classmethod
    def of(cls, features: Tensor, labels: Tensor) -> "_Spectrum":
        """Decompose `F'F`."""
        squares, directions = torch.linalg.eigh(features.mT @ features)
        cross = directions.mT @ (features.mT @ labels)
        return cls(features, labels, directions, squares.clamp_min(0), cross)

    def shrinking(self, penalties: Tensor) -> Tensor:
        """Compute the inverses of the eigenvalues of A, `(penalties, N)`."""
        return (self.squares + penalties.to(self.squares).unsqueeze(-1)).reciprocal()


@dataclass(frozen=True, eq=False)
class Evidence(AbstractJoint):
    """Minus the log evidence of the labels, per row and output.

    The labels are a linear function of the features with independent Gaussian weights,
    plus noise: `Y ~ N(0, s^2 (F F'/alpha + I))`. With the best noise, `s^2 = <Y, R> /
    (n c)` for c outputs,

        E = 1/2 log s^2 + (1/2n) logdet(A / alpha)

    up to a constant. The determinant is a repulsion, between features and not between
    positions.

    Parameters
    ----------
    sample, feature_map, penalty
        As in `AbstractJoint`.
    determinant
        A factor of the determinant's term; zero leaves the logarithm of the loss.

    Examples
    --------
    >>> from coulomb.features import Fourier
    >>> sample = Sample(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [-1.0]]))
    >>> particles = Particles(torch.tensor([[torch.pi]]), torch.zeros(1))
    >>> Evidence(sample, Fourier()).energy(particles)  # log(1/5)/2 + log(5)/4
    tensor(-0.4024)
    """

    determinant: float = 1.0

    def _value_and_slope(self, ridge: _Ridge) -> tuple[Tensor, Tensor]:
        size, outputs = ridge.labels.shape
        left = (ridge.labels * ridge.residuals).sum(dim=(-2, -1))
        noise = left.clamp_min(torch.finfo(left.dtype).tiny) / ridge.labels.numel()
        volume = self.determinant * ridge.log_determinant / size
        scale = outputs * noise[..., None, None]
        fit = -ridge.residuals @ ridge.weights.mT / scale
        if self.determinant:
            fit = fit + self.determinant * (ridge.features @ ridge.inverse)
        return 0.5 * (noise.log() + volume.to(noise)), fit / size

    def _values(self, ridge: _Spectrum, penalties: Tensor) -> Tensor:
        # <Y, R> = |Y|^2 - <V'F'Y, (S + alpha)^-1 V'F'Y>
        whole = ridge.labels.double().square().sum()
        fitted = ridge.shrinking(penalties).double() @ ridge.cross.double().square()
        least = torch.finfo(ridge.labels.dtype).eps * whole
        noise = (whole - fitted.sum(dim=-1)).clamp_min(least) / ridge.labels.numel()
        volume = (ridge.squares / penalties.to(noise).unsqueeze(-1)).log1p().sum(dim=-1)
        return 0.5 * (noise.log() + volume / self.sample.size)


@dataclass(frozen=True, eq=False)
class LeaveOneOut(AbstractJoint):
    """The squared error of every row by a ridge regression that has not seen it.

    `E = (1/nc) sum_i |R_i|^2 / (1 - h_i)^2`, `h_i` the leverage of row i: exact for
    ridge regression with a free intercept, at the cost of one fit.

    Parameters
    ----------
    sample, feature_map, penalty
        As in `AbstractJoint`.

    Examples
    --------
    >>> from coulomb.features import Fourier
    >>> x = torch.tensor([[0.0], [1.0], [2.0]])
    >>> sample = Sample(x, torch.tensor([[1.0], [-1.0], [1.0]]))
    >>> particles = Particles(torch.tensor([[torch.pi]]), torch.zeros(1))
    >>> LeaveOneOut(sample, Fourier()).energy(particles)
    tensor(1.3600)
    """

    def tuned(
        self, particles: Particles, penalties: tuple[float, ...] = PENALTIES
    ) -> TunedRidge:
        """Fit with the penalty of lowest energy, from one decomposition for all.

        Parameters
        ----------
        particles
            The configuration, without groups.
        penalties
            Those to choose from.

        Returns
        -------
        TunedRidge
            What was found.
        """
        with torch.no_grad():
            spectrum, tried = self._spectrum(particles), torch.tensor(penalties)
            errors = self._errors(spectrum, tried)
            best = int(self._mean_square(errors).argmin())
            shrunk = spectrum.shrinking(tried[best]).unsqueeze(-1) * spectrum.cross
            root = self._root()
            return TunedRidge(
                penalties[best],
                spectrum.directions @ shrunk,
                errors[best] if root is None else errors[best] / root,
            )

    def _errors(self, ridge: _Spectrum, penalties: Tensor) -> Tensor:
        """Compute the errors of all rows for several penalties, `(k, n, labels)`."""
        turned = ridge.features @ ridge.directions
        shrinking = ridge.shrinking(penalties)
        slack = self._slack((turned.square() @ shrinking.mT).mT)
        solved = shrinking.unsqueeze(-1) * ridge.cross  # (k, N, labels)
        fitted = turned @ solved.movedim(0, 1).flatten(1)
        fitted = fitted.reshape(len(turned), len(penalties), -1).movedim(1, 0)
        return (ridge.labels - fitted) / slack

    def _slack(self, leverages: Tensor) -> Tensor:
        """Compute `1 - h`, the leverage of the intercept included."""
        own = self.sample.probabilities
        return (1 - own - leverages).clamp_min(_LEAST_SLACK).unsqueeze(-1)

    def _mean_square(self, errors: Tensor) -> Tensor:
        return errors.square().mean(dim=(-2, -1))

    def _value_and_slope(self, ridge: _Ridge) -> tuple[Tensor, Tensor]:
        features, weights, residuals = ridge.features, ridge.weights, ridge.residuals
        spread = features @ ridge.inverse  # F A^-1
        slack = self._slack((features * spread).sum(dim=-1))
        errors = residuals / slack
        pull = 2 * errors / (slack * ridge.labels.numel())  # dE / dR
        push = (pull * errors).sum(dim=-1, keepdim=True)  # dE / dh
        push = torch.where(slack > _LEAST_SLACK, push, 0.0)
        back = ridge.inverse @ (features.mT @ pull)
        slope = (features @ back - pull) @ weights.mT - residuals @ back.mT
        pushed = push * spread
        slope = slope + 2 * (pushed - features @ (spread.mT @ pushed))
        return self._mean_square(errors), slope

    def _values(self, ridge: _Spectrum, penalties: Tensor) -> Tensor:
        return self._mean_square(self._errors(ridge, penalties))


@dataclass(frozen=True, eq=False)
class SharedScales(AbstractSampled):
    """A joint energy as a function of one scale per coordinate, shared by particles.

    `E(s) = E_joint(w_1 e^s, ..., w_N e^s)`, coordinate by coordinate: the particle that
    moves is `s`, so few rows can tell which columns matter without fitting their noise.

    Parameters
    ----------
    objective
        The joint energy.
    particles
        The configuration that is rescaled.

    Examples
    --------
    >>> from coulomb.features import Fourier
    >>> sample = Sample(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [-1.0]]))
    >>> particles = Particles(torch.tensor([[torch.pi]]), torch.zeros(1))
    >>> scales = SharedScales(Evidence(sample, Fourier()), particles)
    >>> scales.energy(Particles(torch.zeros(1, 1)))
    tensor(-0.4024)
    """

    objective: AbstractJoint
    particles: Particles

    @property
    def sample(self) -> Sample:  # type: ignore[override]
        """The data."""
        return self.objective.sample

    def rescaled(self, logarithms: Tensor) -> Particles:
        """Rescale the configuration.

        Parameters
        ----------
        logarithms
            `s`, shape `(1, dim)`.

        Returns
        -------
        Particles
            `w e^s`.
        """
        positions = self.particles.positions * logarithms.exp()
        return self.particles._replace(positions=positions)

    def energy(self, particles: Particles) -> Tensor:
        return self.objective.energy(self.rescaled(particles.positions))

    def field(self, particles: Particles) -> Field:
        moved = self.rescaled(particles.positions.detach())
        field = self.objective.field(moved)
        pull = field.gradient * moved.positions / moved.n_particles
        return Field(field.potential[..., :1], pull.sum(dim=-2, keepdim=True))

    def on(self, sample: Sample) -> "SharedScales":
        return replace(self, objective=self.objective.on(sample))

    def batch(self, indices: Tensor) -> "SharedScales":
        return replace(self, objective=self.objective.batch(indices))
