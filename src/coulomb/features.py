"""Feature maps: pure functions of the inputs and the particles.

A feature map `phi(x, w)` induces the kernel
`K(x, x') = mean_k phi(x, w_k) phi(x', w_k)`.
The particles are data, so one map serves the estimators, attention and the theory.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from coulomb._support.checks import Registry, check_real
from coulomb._support.errors import ParameterError, ParameterTypeError, shown


class Particles(NamedTuple):
    """Particles are rows; groups (layers, heads) are leading axes."""

    positions: Tensor  # (*groups, n_particles, dim)
    phases: Tensor | None = None  # (*groups, n_particles)

    @property
    def n_particles(self) -> int:
        """Particles in each group."""
        return self.positions.shape[-2]

    def take(self, chosen: Tensor | slice) -> "Particles":
        """Keep some particles of one group.

        Parameters
        ----------
        chosen
            Which.

        Returns
        -------
        Particles
            These particles.
        """
        phases = None if self.phases is None else self.phases[chosen]
        return Particles(self.positions[chosen], phases)

    def to(self, dtype: torch.dtype) -> "Particles":
        """Convert to another precision.

        Parameters
        ----------
        dtype
            Of positions and phases.

        Returns
        -------
        Particles
            The same particles.
        """
        phases = None if self.phases is None else self.phases.to(dtype)
        return Particles(self.positions.to(dtype), phases)


class AbstractFeatureMap(ABC):
    """A map from inputs `(*groups, n, dim)` to features `(*groups, n, n_features)`.

    What callers have to know about a map is declared here, so that none of them asks
    for its type or its name.

    Attributes
    ----------
    positive : bool
        Whether no feature is negative.
    needs_phases : bool
        Whether particles must carry phases.
    imitates_softmax : bool
        Whether the kernel is that of softmax attention on average, for particles of
        unit variance and queries and keys scaled by `dim ** -0.25`.
    normalised : bool
        Whether the features of an input sum to `sqrt(M)`; otherwise they may overflow.
    exponential : bool
        Whether `log phi(x, w) = w.x / temperature + c(x)`, with `c` that makes features
        sum to a constant if `normalised`, and `-|x|^2 / 2` if not.
    temperature, floor : float
        What projections are divided by, and the least feature before normalisation.
    tempered : bool
        Whether `temperature` can be chosen.
    averages_phases : bool
        Whether alignment is taken in its closed form, the average over all phases.
    loop_code : int or None
        The number of the map in `coulomb.kernels.packed_encoder`; None without loop.
    feature_gives_slope : bool
        Whether the derivative in the projection is a function of the feature alone.
    """

    positive: ClassVar[bool] = True
    needs_phases: ClassVar[bool] = False
    imitates_softmax: ClassVar[bool] = False
    normalised: ClassVar[bool] = False
    exponential: ClassVar[bool] = False
    tempered: ClassVar[bool] = False
    averages_phases: ClassVar[bool] = False
    loop_code: ClassVar[int | None] = None
    feature_gives_slope: ClassVar[bool] = False
    temperature: float = 1.0
    floor: float = 0.0

    @property
    def needs_shift(self) -> bool:
        """Whether features may overflow, so that sums take them in logarithms."""
        return self.exponential and not self.normalised

    @property
    def softmax_over_features(self) -> bool:
        """Whether the features are `sqrt(M) softmax(w.x / temperature)`."""
        return self.exponential and self.normalised

    @property
    def has_log_features(self) -> bool:
        """Whether `log_features` gives something."""
        return type(self).log_features is not AbstractFeatureMap.log_features

    def n_features(self, n_particles: int) -> int:
        """Count the features that `n_particles` particles give.

        Parameters
        ----------
        n_particles
            Particles in one group.

        Returns
        -------
        int
            The size of the last axis of the features.
        """
        return n_particles

    @abstractmethod
    def __call__(self, x: Tensor, particles: Particles) -> Tensor:
        """Evaluate the features of `x`.

        Parameters
        ----------
        x
            Inputs, shape `(*groups, n, dim)`.
        particles
            Positions `(*groups, n_particles, dim)` and, for some maps, phases.

        Returns
        -------
        Tensor
            Features, shape `(*groups, n, n_features)`.
        """

    def log_features(self, x: Tensor, particles: Particles) -> Tensor | None:
        """Take the logarithm of the features, for sums that must not leave the range.

        Parameters
        ----------
        x, particles
            As in a call.

        Returns
        -------
        Tensor or None
            Shape `(*groups, n, n_features)`; None for maps that have no need of it.
        """
        return None


feature_maps: Registry[AbstractFeatureMap] = Registry("feature_map")

# Names for those who need some map: of attention, of estimators, and one whose kernel
# is that of softmax on average.
DEFAULT_MAP = "softmaxfeat"
DEFAULT_ESTIMATOR_MAP = "fourier"
SOFTMAX_KERNEL_MAP = "favor"


def projections(x: Tensor, particles: Particles) -> Tensor:
    """Project every input on every particle, `a_ik = w_k . x_i`.

    Parameters
    ----------
    x
        Inputs, shape `(*groups, n, dim)`.
    particles
        The particles.

    Returns
    -------
    Tensor
        Shape `(*groups, n, n_particles)`.
    """
    return x @ particles.positions.transpose(-1, -2)


def renormalise(features: Tensor) -> Tensor:
    """Scale the features of each input to sum to `sqrt(M)`.

    Parameters
    ----------
    features
        Non-negative features, shape `(..., M)`.

    Returns
    -------
    Tensor
        The same shape.

    Examples
    --------
    >>> renormalise(torch.tensor([1.0, 2.0, 3.0, 4.0])).sum()
    tensor(2.)
    """
    return features * (
        math.sqrt(features.shape[-1]) / features.sum(dim=-1, keepdim=True)
    )


def _phases(particles: Particles, name: str) -> Tensor:
    if particles.phases is None:
        raise ParameterError(
            f"`particles` must carry phases for the map {name!r}; got None. "
            "Pass Particles(positions, phases)."
        )
    return particles.phases.unsqueeze(-2)  # (*groups, 1, n_particles)


@feature_maps.add("fourier")
@dataclass(frozen=True)
class Fourier(AbstractFeatureMap):
    """Random Fourier features, `sqrt(2) cos(w.x + b)`. [CPM lemma:KTA_energy_bias].

    With `w ~ N(0, 2 gamma I)` the kernel is `exp(-gamma |x - x'|^2)` on average.

    Examples
    --------
    >>> particles = Particles(torch.zeros(4, 2), torch.zeros(4))
    >>> Fourier()(torch.zeros(1, 2), particles)
    tensor([[1.4142, 1.4142, 1.4142, 1.4142]])
    """

    positive: ClassVar[bool] = False
    needs_phases: ClassVar[bool] = True
    averages_phases: ClassVar[bool] = True

    def __call__(self, x: Tensor, particles: Particles) -> Tensor:
        angles = projections(x, particles) + _phases(particles, "fourier")
        return math.sqrt(2) * angles.cos()


@feature_maps.add("fourier-pair")
@dataclass(frozen=True)
class FourierPair(AbstractFeatureMap):
    """Both phases of each frequency, `(cos w.x, sin w.x)`: the phase average.

    Examples
    --------
    >>> FourierPair()(torch.zeros(1, 2), Particles(torch.zeros(2, 2)))
    tensor([[1., 1., 0., 0.]])
    """

    positive: ClassVar[bool] = False

    def n_features(self, n_particles: int) -> int:
        return 2 * n_particles

    def __call__(self, x: Tensor, particles: Particles) -> Tensor:
        angles = projections(x, particles)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


@feature_maps.add("favor")
@dataclass(frozen=True)
class Favor(AbstractFeatureMap):
    """Positive exponential features, `exp(w.x - |x|^2 / 2) / sqrt(M)`.

    Unbiased for the softmax kernel: `E <phi(q), phi(k)> = exp(q.k)` at `w ~ N(0, I)`.

    Examples
    --------
    >>> Favor()(torch.zeros(1, 3), Particles(torch.ones(4, 3)))
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """

    imitates_softmax: ClassVar[bool] = True
    exponential: ClassVar[bool] = True
    loop_code: ClassVar[int] = 5
    feature_gives_slope: ClassVar[bool] = True

    def log_features(self, x: Tensor, particles: Particles) -> Tensor:
        half_square = 0.5 * x.square().sum(dim=-1, keepdim=True)
        half_log = 0.5 * math.log(particles.n_particles)
        return projections(x, particles) - half_square - half_log

    def __call__(self, x: Tensor, particles: Particles) -> Tensor:
        return self.log_features(x, particles).exp()


@dataclass(frozen=True)
class _Tempered(AbstractFeatureMap):
    normalised: ClassVar[bool] = True
    tempered: ClassVar[bool] = True
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_real("temperature", self.temperature, above=0)

    def _scaled(self, x: Tensor, particles: Particles) -> Tensor:
        return projections(x, particles) / self.temperature


@dataclass(frozen=True)
class _Floored(_Tempered):
    floor: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("floor", self.floor, above=0)


@feature_maps.add("elu")
@dataclass(frozen=True)
class Elu(_Floored):
    """`1 + ELU(w.x / tau + b)`, at least `floor`, renormalised.

    Examples
    --------
    >>> Elu()(torch.zeros(1, 3), Particles(torch.ones(4, 3)))
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """

    loop_code: ClassVar[int] = 1
    feature_gives_slope: ClassVar[bool] = True

    def __call__(self, x: Tensor, particles: Particles) -> Tensor:
        angles = self._scaled(x, particles)
        if particles.phases is not None:
            angles = angles + particles.phases.unsqueeze(-2)
        return renormalise((1 + functional.elu(angles)).clamp_min(self.floor))


@feature_maps.add("softplus")
@dataclass(frozen=True)
class Softplus(_Floored):
    """`softplus(w.x / tau) + floor`, renormalised.

    Examples
    --------
    >>> Softplus()(torch.zeros(1, 3), Particles(torch.ones(4, 3)))
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """

    loop_code: ClassVar[int] = 2

    def __call__(self, x: Tensor, particles: Particles) -> Tensor:
        return renormalise(functional.softplus(self._scaled(x, particles)) + self.floor)


@feature_maps.add("sigmoid2")
@dataclass(frozen=True)
class SquaredSigmoid(_Tempered):
    """`sigmoid(w.x / tau)^2`, renormalised.

    Written as a softmax of `2 log sigmoid`, which is the same number and does not
    vanish when every projection is very negative.

    Examples
    --------
    >>> SquaredSigmoid()(torch.zeros(1, 3), Particles(torch.ones(4, 3)))
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """

    loop_code: ClassVar[int] = 3

    def log_features(self, x: Tensor, particles: Particles) -> Tensor:
        logarithms = 2 * functional.logsigmoid(self._scaled(x, particles))
        half_log = 0.5 * math.log(particles.n_particles)
        return logarithms.log_softmax(dim=-1) + half_log

    def __call__(self, x: Tensor, particles: Particles) -> Tensor:
        logarithms = 2 * functional.logsigmoid(self._scaled(x, particles))
        return math.sqrt(particles.n_particles) * logarithms.softmax(dim=-1)


@feature_maps.add("softmaxfeat")
@dataclass(frozen=True)
class SoftmaxFeatures(_Tempered):
    """`sqrt(M) softmax(w.x / tau)` over the features.

    Examples
    --------
    >>> SoftmaxFeatures()(torch.zeros(1, 3), Particles(torch.ones(4, 3)))
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """

    exponential: ClassVar[bool] = True
    loop_code: ClassVar[int] = 0
    feature_gives_slope: ClassVar[bool] = True

    def log_features(self, x: Tensor, particles: Particles) -> Tensor:
        half_log = 0.5 * math.log(particles.n_particles)
        return self._scaled(x, particles).log_softmax(dim=-1) + half_log

    def __call__(self, x: Tensor, particles: Particles) -> Tensor:
        angles = self._scaled(x, particles)
        return math.sqrt(particles.n_particles) * angles.softmax(dim=-1)


@feature_maps.add("cos2")
@dataclass(frozen=True)
class SquaredCosine(AbstractFeatureMap):
    """`cos(w.x + b)^2` with fixed phases, renormalised.

    Examples
    --------
    >>> particles = Particles(torch.ones(4, 3), torch.zeros(4))
    >>> SquaredCosine()(torch.zeros(1, 3), particles)
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """

    needs_phases: ClassVar[bool] = True
    normalised: ClassVar[bool] = True
    loop_code: ClassVar[int] = 4

    def __call__(self, x: Tensor, particles: Particles) -> Tensor:
        angles = projections(x, particles) + _phases(particles, "cos2")
        return renormalise(angles.cos().square())


@dataclass(frozen=True)
class CustomMap(AbstractFeatureMap):
    """A user's function of the projections `a = w.x`, used as a feature map.

    Parameters
    ----------
    function
        Receives `(x, particles)` and returns features `(*groups, n, n_particles)`.
    """

    function: Callable[[Tensor, Particles], Tensor]
    positive: ClassVar[bool] = False

    def __call__(self, x: Tensor, particles: Particles) -> Tensor:
        features = self.function(x, particles)
        expected = (*x.shape[:-1], particles.n_particles)
        if tuple(features.shape) != expected:
            raise ParameterError(
                f"`feature_map` must return features of shape {expected} for inputs of "
                f"shape {tuple(x.shape)}; got {tuple(features.shape)}."
            )
        return features


_built: dict[str, AbstractFeatureMap] = {}


def as_feature_map(
    feature_map: "str | AbstractFeatureMap | Callable[[Tensor, Particles], Tensor]",
) -> AbstractFeatureMap:
    """Turn a name, a map or a user's function into a feature map.

    Parameters
    ----------
    feature_map
        A registered name, an `AbstractFeatureMap`, or a function of `(x, particles)`.

    Returns
    -------
    AbstractFeatureMap
        The map.

    Examples
    --------
    >>> as_feature_map("cos2")
    SquaredCosine()
    >>> relu = as_feature_map(lambda x, particles: projections(x, particles).relu())
    >>> relu(torch.ones(2, 3), Particles(torch.ones(4, 3))).shape
    torch.Size([2, 4])
    """
    if isinstance(feature_map, AbstractFeatureMap):
        return feature_map
    if isinstance(feature_map, str):
        if feature_map not in _built:
            _built[feature_map] = feature_maps.build(feature_map)
        return _built[feature_map]
    if callable(feature_map):
        return CustomMap(feature_map)
    raise ParameterTypeError(
        "`feature_map` must be a name, a feature map or a function of (x, particles); "
        f"got {shown(feature_map)}."
    )


def kernel(
    feature_map: AbstractFeatureMap, x: Tensor, z: Tensor, particles: Particles
) -> Tensor:
    """Evaluate `K(x, z) = mean_k phi(x, w_k) phi(z, w_k)`. [CPM Eq:Monte_Carlo].

    Parameters
    ----------
    feature_map
        The map.
    x, z
        Inputs, shapes `(*groups, n, dim)` and `(*groups, m, dim)`.
    particles
        The particles.

    Returns
    -------
    Tensor
        Shape `(*groups, n, m)`.

    Examples
    --------
    >>> x = torch.tensor([[0.0], [1.0]])
    >>> kernel(FourierPair(), x, x, Particles(torch.zeros(3, 1)))
    tensor([[1., 1.],
            [1., 1.]])
    """
    left, right = feature_map(x, particles), feature_map(z, particles)
    return left @ right.transpose(-1, -2) / particles.n_particles
