"""Feature maps evaluated block by block, with the pull-back of their gradients.

Features are four times wider than queries and keys; a block of them stays in the cache,
a whole sequence of them does not. A block map evaluates one block, and again in the
backward pass, so that features are never stored.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from coulomb.attention.ops.workspace import Workspace
from coulomb.features import AbstractFeatureMap, Favor, Particles, SoftmaxFeatures

# Receives the gradient of a block's features, which it may overwrite, adds to the
# gradients of the particles and returns the gradient of the block's inputs.
Pull = Callable[[Tensor], Tensor]

# The exponent of a key that is not there: far below any other and yet finite, since
# the difference of two infinities is not a number.
ABSENT = -1e30


class BlockMap(ABC):
    """Features of blocks `(groups, rows, dim)`, for keys and for queries.

    The groups of a head follow one another: there are `heads * batch` of them.

    A *shift*, shape `(groups, 1, features)`, is subtracted from the logarithms of the
    keys' features and added to those of the queries: it cancels in every product.
    Features of a query may be multiplied by any number, which cancels in the ratio.
    Both serve only to keep numbers inside the range; maps without need ignore them.
    Before the first key there is no shift.
    """

    # Whether features of queries are exponentials: a factor of a feature can then be
    # added to its shift as a logarithm.
    exponential = False

    def __init__(
        self, particles: Particles, work: Workspace, *, track: bool = False
    ) -> None:
        self.particles = particles
        self.work = work
        self.track = track
        self.grad_positions = torch.zeros_like(particles.positions) if track else None
        self.grad_phases: Tensor | None = None
        if track and particles.phases is not None:
            self.grad_phases = torch.zeros_like(particles.phases)

    def _by_head(self, x: Tensor) -> Tensor:
        # (heads * batch, rows, ...) as (heads, batch * rows, ...)
        return x.reshape(len(self.particles.positions), -1, x.shape[-1])

    @abstractmethod
    def n_features(self, dim: int) -> int:
        """Count the features of inputs with `dim` coordinates."""

    @abstractmethod
    def keys(
        self, x: Tensor, dead: Tensor | None, shift: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Evaluate keys; the shift rises where a key's features exceed it."""

    @abstractmethod
    def queries(self, x: Tensor, shift: Tensor | None) -> Tensor:
        """Evaluate queries."""

    @abstractmethod
    def record_keys(
        self,
        x: Tensor,
        dead: Tensor | None,
        shift: Tensor | None,
        known: Tensor | None = None,
    ) -> tuple[Tensor, Pull]:
        """Evaluate keys at a given shift, and give their pull-back."""

    @abstractmethod
    def record_queries(
        self, x: Tensor, shift: Tensor | None, known: Tensor | None = None
    ) -> tuple[Tensor, Pull]:
        """Evaluate queries, and give their pull-back."""


class GivenFeatures(BlockMap):
    """The inputs are features already."""

    def n_features(self, dim: int) -> int:
        return dim

    def keys(
        self, x: Tensor, dead: Tensor | None, shift: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return x, None

    def queries(self, x: Tensor, shift: Tensor | None) -> Tensor:
        return x

    def record_keys(
        self,
        x: Tensor,
        dead: Tensor | None,
        shift: Tensor | None,
        known: Tensor | None = None,
    ) -> tuple[Tensor, Pull]:
        return x, lambda grad: grad

    def record_queries(
        self, x: Tensor, shift: Tensor | None, known: Tensor | None = None
    ) -> tuple[Tensor, Pull]:
        return x, lambda grad: grad


class AnyMap(BlockMap):
    """Any feature map; autograd differentiates it, one block at a time."""

    def __init__(
        self,
        particles: Particles,
        work: Workspace,
        *,
        track: bool = False,
        feature_map: AbstractFeatureMap,
    ) -> None:
        super().__init__(particles, work, track=track)
        self._map = feature_map

    def n_features(self, dim: int) -> int:
        return self._map.n_features(self.particles.n_particles)

    def keys(
        self, x: Tensor, dead: Tensor | None, shift: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.queries(x, shift), None

    def queries(self, x: Tensor, shift: Tensor | None) -> Tensor:
        features = self._map(self._by_head(x), self.particles)
        return features.reshape(*x.shape[:2], -1)

    def record_keys(
        self,
        x: Tensor,
        dead: Tensor | None,
        shift: Tensor | None,
        known: Tensor | None = None,
    ) -> tuple[Tensor, Pull]:
        return self.record_queries(x, shift)

    def record_queries(
        self, x: Tensor, shift: Tensor | None, known: Tensor | None = None
    ) -> tuple[Tensor, Pull]:
        leaves = [x.detach().requires_grad_()]
        positions, phases = self.particles
        if self.track:
            positions = positions.detach().requires_grad_()
            leaves.append(positions)
            if phases is not None:
                phases = phases.detach().requires_grad_()
                leaves.append(phases)
        with torch.enable_grad():
            features = self._map(self._by_head(leaves[0]), Particles(positions, phases))
            features = features.reshape(*x.shape[:2], -1)

        def pull(grad: Tensor) -> Tensor:
            grads = torch.autograd.grad(
                features, leaves, grad, allow_unused=True, materialize_grads=True
            )
            for total, part in zip(
                (self.grad_positions, self.grad_phases), grads[1:], strict=False
            ):
                if total is not None:
                    total += part
            return grads[0]

        return features.detach(), pull


class _ProjectedMap(BlockMap):
    # The features are a function of `scale * positions . x`, written in place.

    exponential = True
    scale = 1.0

    def n_features(self, dim: int) -> int:
        return self.particles.n_particles

    def _project(self, name: str, x: Tensor, offset: Tensor | None = None) -> Tensor:
        columns = self.particles.positions.transpose(1, 2)
        out = self.work.get(name, x.shape[0], x.shape[1], columns.shape[2])
        products = self._by_head(out)
        if offset is None and self.scale == 1.0:
            torch.bmm(self._by_head(x), columns, out=products)
            return out
        # An offset of a whole group is none of a whole head, if that has many groups.
        base = out.zero_() if offset is None else offset
        if len(columns) != len(x):
            base = base.expand(*x.shape[:2], -1)
            base = self._by_head(base)
        torch.baddbmm(base, self._by_head(x), columns, alpha=self.scale, out=products)
        return out

    def _pull_projection(self, x: Tensor, grad: Tensor) -> Tensor:
        inputs, grads = self._by_head(x), self._by_head(grad)
        if self.grad_positions is not None:
            self.grad_positions.baddbmm_(
                grads.transpose(1, 2), inputs, alpha=self.scale
            )
        back = torch.bmm(grads, self.particles.positions).view_as(x)
        return back if self.scale == 1.0 else back.mul_(self.scale)

    def queries(self, x: Tensor, shift: Tensor | None) -> Tensor:
        # A softmax is the exponential up to a factor of the row, which is free, and
        # its largest feature never overflows.
        exponents = self._project("queries", x, shift)
        return torch.softmax(exponents, dim=-1, out=exponents)

    def record_queries(
        self, x: Tensor, shift: Tensor | None, known: Tensor | None = None
    ) -> tuple[Tensor, Pull]:
        features = self.queries(x, shift) if known is None else known
        # The output does not depend on the scale of a query's features, so that
        # `features . grad = 0` and the softmax's own correction vanishes.
        return features, lambda grad: self._pull_projection(x, grad.mul_(features))


class SoftmaxMap(_ProjectedMap):
    """`softmax(w.x / tau)`; the constant `sqrt(M)` cancels."""

    def __init__(
        self,
        particles: Particles,
        work: Workspace,
        *,
        track: bool = False,
        feature_map: SoftmaxFeatures,
    ) -> None:
        super().__init__(particles, work, track=track)
        self.scale = 1.0 / feature_map.temperature

    def keys(
        self, x: Tensor, dead: Tensor | None, shift: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        exponents = self._project("keys", x)
        return torch.softmax(exponents, dim=-1, out=exponents), None

    def record_keys(
        self,
        x: Tensor,
        dead: Tensor | None,
        shift: Tensor | None,
        known: Tensor | None = None,
    ) -> tuple[Tensor, Pull]:
        features = self.keys(x, dead, shift)[0] if known is None else known

        def pull(grad: Tensor) -> Tensor:
            grad.mul_(features)
            grad.addcmul_(features, grad.sum(dim=-1, keepdim=True), value=-1.0)
            return self._pull_projection(x, grad)

        return features, pull


class FavorMap(_ProjectedMap):
    """`exp(w.x - |x|^2 / 2)`, with the largest key of each feature as the shift.

    Some key then has the value one in every feature, so that the normaliser of a query
    is at least the sum of its own features: it can neither overflow nor vanish.
    """

    def _exponents(self, x: Tensor, dead: Tensor | None) -> Tensor:
        half_square = x.square().sum(dim=-1, keepdim=True).mul_(-0.5)
        if dead is not None:
            half_square.masked_fill_(dead, ABSENT)
        return self._project("keys", x, half_square)

    def keys(
        self, x: Tensor, dead: Tensor | None, shift: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        exponents = self._exponents(x, dead)
        highest = exponents.amax(dim=1, keepdim=True)
        if shift is not None:
            highest = torch.maximum(highest, shift)
        return exponents.sub_(highest).exp_(), highest

    def record_keys(
        self,
        x: Tensor,
        dead: Tensor | None,
        shift: Tensor | None,
        known: Tensor | None = None,
    ) -> tuple[Tensor, Pull]:
        if known is not None:
            features = known
        else:
            assert shift is not None
            features = self._exponents(x, dead).sub_(shift).exp_()

        def pull(grad: Tensor) -> Tensor:
            grad.mul_(features)
            total = grad.sum(dim=-1, keepdim=True)
            return self._pull_projection(x, grad).addcmul_(x, total, value=-1.0)

        return features, pull


def block_map(
    feature_map: AbstractFeatureMap | None,
    particles: Particles,
    work: Workspace,
    *,
    track: bool = False,
) -> BlockMap:
    """Choose how the features of blocks are evaluated."""
    if feature_map is None:
        return GivenFeatures(particles, work)
    if isinstance(feature_map, Favor):
        return FavorMap(particles, work, track=track)
    if isinstance(feature_map, SoftmaxFeatures):
        return SoftmaxMap(particles, work, track=track, feature_map=feature_map)
    return AnyMap(particles, work, track=track, feature_map=feature_map)
