"""Feature maps evaluated block by block, with the pull-back of their gradients.

Features are four times wider than queries and keys; a block of them stays in the cache,
a whole sequence of them does not. A block map evaluates one block, and again in the
backward pass, so that features are stored only where all of them are few.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coulomb.attention.ops.checks import with_offset_column
from coulomb.features import AbstractFeatureMap, Particles

# Receives the gradient of a block's features, which it may overwrite, adds to the
# gradients of the particles and returns the gradient of the block's inputs.
Pull = Callable[[Tensor], Tensor]

# Features by what they are of, "queries" or "keys", and their first row.
Kept = dict[tuple[str, int], Tensor]

# The exponent of a key that is not there: far below any other and yet finite, since
# the difference of two infinities is not a number.
ABSENT = -1e30

# What is kept between calls. Blocks fit the cache, so that this is rarely exceeded.
_MOST_BYTES = 1 << 25

_lent = threading.local()


class Workspace:
    """Arrays by name, in the working precision, used again by later blocks and calls.

    Fresh memory costs as much in page faults as the arithmetic on it. A caller who has
    to keep several blocks gives each a `slot` of its own, with its own set of arrays.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.slot = 0
        self._arrays: dict[tuple[str, int], Tensor] = {}

    def get(self, name: str, *shape: int, fresh: bool = False) -> Tensor:
        """Give the array of this name in this shape, with whatever it contains."""
        if fresh:  # it outlives the call
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        size = math.prod(shape)
        key = (name, self.slot)
        array = self._arrays.get(key)
        if array is None or array.numel() < size:
            # Arrays made in inference mode could not be used outside of it.
            with torch.inference_mode(False):
                array = torch.empty(size, dtype=self.dtype, device=self.device)
            self._arrays[key] = array
        return array[:size].view(shape)

    def zeros(self, *shape: int) -> Tensor:
        """Make an array that nobody else uses."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def bytes(self) -> int:
        """Count the memory of all arrays."""
        return sum(x.numel() * x.element_size() for x in self._arrays.values())


@contextmanager
def borrowed(dtype: torch.dtype, device: torch.device) -> Iterator[Workspace]:
    """Lend this thread's workspace, or a new one while it is lent already."""
    work: Workspace | None = getattr(_lent, "workspace", None)
    _lent.workspace = None
    if work is None or work.dtype != dtype or work.device != device:
        work = Workspace(dtype, device)
    work.slot = 0
    yield work
    if device.type == "cpu" and work.bytes() <= _MOST_BYTES:
        _lent.workspace = work


class KeyRows(NamedTuple):
    """Rows of keys and values `(groups, rows, dim)`; what the mask removes is zero."""

    keys: Tensor
    values: Tensor  # with a last column of ones, or of weights
    dead: Tensor | None  # (groups, rows, 1), True where the mask removes a key
    log_weight: Tensor | None  # (groups, rows, 1)


class Side:
    """Particles that queries or keys meet, and what was added to their gradients."""

    def __init__(self, particles: Particles, *, track: bool) -> None:
        self.particles = particles
        self.grads = [
            torch.zeros_like(x) if track and x is not None else None for x in particles
        ]

    def add(self, other: "Side") -> None:
        """Add the gradients of another block, once."""
        for total, part in zip(self.grads, other.grads, strict=True):
            if total is not None and part is not None:
                total += part
        other.grads = [None, None]

    def by_head(self, x: Tensor) -> Tensor:
        """View `(heads * batch, rows, ...)` as `(heads, batch * rows, ...)`."""
        return x.reshape(len(self.particles.positions), -1, x.shape[-1])


def _same(x: Tensor) -> Tensor:
    return x


def _highest(x: Tensor, shift: Tensor | None) -> Tensor:
    highest = x.amax(dim=1, keepdim=True)
    return highest if shift is None else torch.maximum(highest, shift)


@dataclass
class BlockMap:
    """Features of blocks `(groups, rows, dim)`; autograd differentiates each block.

    The groups of a head follow one another: there are `heads * batch` of them.

    A *shift*, shape `(groups, 1, features)`, is subtracted from the logarithms of the
    keys' features and added to those of the queries: it cancels in every product. It
    rises where a key's features exceed it, and before the first key there is none.
    Where only the weights of keys are shifted it has one column, and queries may ignore
    it: features of a query may be multiplied by any number, which cancels in the ratio.

    In the backward pass (`record`) shifts are given, and pull-backs work. Features that
    are in `kept`, by side and first row, are not evaluated again. With `logs`
    features are taken in logarithms, which never underflow: slower, and not needed
    unless the features of queries and keys lie too far apart.
    """

    map: AbstractFeatureMap
    sides: tuple[Side, Side]  # what queries and what keys meet
    work: Workspace
    record: bool = False
    logs: bool = False
    kept: Kept | None = None

    @property
    def retry(self) -> bool:
        """Whether this form may lose what the logarithms would not."""
        return self.map.has_log_features and not (self.logs or self.map.needs_shift)

    @property
    def n_features(self) -> int:
        """The number of features."""
        return self.map.n_features(self.sides[1].particles.n_particles)

    def _evaluate(
        self, side: Side, x: Tensor, finish: Callable[[Tensor], Tensor] = _same
    ) -> tuple[Tensor, Pull]:
        def features(x: Tensor, particles: Particles) -> Tensor:
            evaluate = self.map.log_features if self.logs else self.map
            rows = side.by_head(x)
            if self.map.exponential:
                rows, particles = with_offset_column(rows, particles)
            result = evaluate(rows, particles)
            assert result is not None
            return finish(result.reshape(*x.shape[:2], -1))

        if not self.record:
            return features(x, side.particles), _same
        x = x.detach().requires_grad_()
        leaves = [x]
        positions, phases = side.particles
        if side.grads[0] is not None:
            positions = positions.detach().requires_grad_()
            leaves.append(positions)
        if phases is not None and side.grads[1] is not None:
            phases = phases.detach().requires_grad_()
            leaves.append(phases)
        with torch.enable_grad():
            result = features(x, Particles(positions, phases))

        def pull(grad: Tensor) -> Tensor:
            first, *others = torch.autograd.grad(
                result, leaves, grad, allow_unused=True, materialize_grads=True
            )
            for total, part in zip(side.grads, others, strict=False):
                if total is not None:
                    total += part
            return first

        return result.detach(), pull

    def queries(
        self, x: Tensor, shift: Tensor | None, start: int
    ) -> tuple[Tensor, Pull]:
        """Evaluate queries, and give their pull-back."""
        if not self.logs or shift is None:
            return self._evaluate(self.sides[0], x)
        return self._evaluate(
            self.sides[0], x, lambda logs: (logs + shift).softmax(dim=-1)
        )

    def keys(
        self, rows: KeyRows, shift: Tensor | None, start: int
    ) -> tuple[Tensor, Tensor | None, Pull]:
        """Evaluate keys, raise the shift and give the pull-back."""
        if not self.logs:
            phi, pull = self._evaluate(self.sides[1], rows.keys)
            return phi, self._weigh(rows, shift), pull

        def weighted(logs: Tensor) -> Tensor:
            if rows.log_weight is not None:
                logs = logs + rows.log_weight
            return logs if rows.dead is None else logs.masked_fill(rows.dead, ABSENT)

        if self.record and shift is not None:
            final = shift
            phi, pull = self._evaluate(
                self.sides[1], rows.keys, lambda logs: (weighted(logs) - final).exp()
            )
            return phi, final, pull
        logs = weighted(self._evaluate(self.sides[1], rows.keys)[0])
        shift = _highest(logs, shift)
        return (logs - shift).exp(), shift, _same

    def _weigh(self, rows: KeyRows, shift: Tensor | None) -> Tensor | None:
        # The same number as weighing features, at a quarter of the cost.
        if rows.log_weight is None:
            return None
        if not self.record:
            shift = _highest(rows.log_weight, shift)
        assert shift is not None
        rows.values.mul_((rows.log_weight - shift).exp_())
        return shift


class ExponentialMap(BlockMap):
    """Exponentials of `(w.x + a) / tau`, written in place; constants cancel.

    The offsets `a` stand in the place of phases, which these maps do not have.

    Keys are normalised over features, or have the factor `exp(-|x|^2 / 2)`. Then the
    shift is the largest key of each feature: some key has the value one in every
    feature, so that the normaliser of a query is at least the sum of its own features
    and can neither overflow nor vanish.
    """

    @property
    def scale(self) -> float:
        """What projections are multiplied with."""
        return 1.0 / self.map.temperature

    def _project(
        self, name: str, side: Side, x: Tensor, offset: Tensor | None = None
    ) -> Tensor:
        columns = side.particles.positions.transpose(1, 2)
        shape = x.shape[0], x.shape[1], columns.shape[2]
        out = self.work.get(name, *shape, fresh=self.kept is not None)
        products = side.by_head(out)
        if side.particles.phases is not None:
            own = side.particles.phases.unsqueeze(1)  # (heads, 1, features)
            own = own.repeat_interleave(len(x) // len(own), dim=0).mul_(self.scale)
            offset = own if offset is None else offset + own
        if offset is None and self.scale == 1.0:
            torch.bmm(side.by_head(x), columns, out=products)
            return out
        # An offset of a whole group is none of a whole head, if that has many groups.
        base = out.zero_() if offset is None else offset
        if len(columns) != len(x):
            base = side.by_head(base.expand(*x.shape[:2], -1))
        torch.baddbmm(base, side.by_head(x), columns, alpha=self.scale, out=products)
        return out

    def _pull_projection(self, side: Side, x: Tensor, grad: Tensor) -> Tensor:
        inputs, grads = side.by_head(x), side.by_head(grad)
        if side.grads[0] is not None:
            side.grads[0].baddbmm_(grads.transpose(1, 2), inputs, alpha=self.scale)
        if side.grads[1] is not None:
            side.grads[1].add_(grads.sum(dim=1), alpha=self.scale)
        back = torch.bmm(grads, side.particles.positions).view_as(x)
        return back if self.scale == 1.0 else back.mul_(self.scale)

    def _known(self, name: str, start: int) -> Tensor | None:
        return self.kept.get((name, start)) if self.record and self.kept else None

    def _keep(self, name: str, start: int, features: Tensor) -> None:
        if self.kept is not None and not self.record:
            self.kept[name, start] = features

    def queries(
        self, x: Tensor, shift: Tensor | None, start: int
    ) -> tuple[Tensor, Pull]:
        side, features = self.sides[0], self._known("queries", start)
        if features is None:
            # A softmax is the exponential up to a factor of the row, which is free, and
            # its largest feature never overflows.
            exponents = self._project("queries", side, x, shift)
            features = torch.softmax(exponents, dim=-1, out=exponents)
            self._keep("queries", start, features)
        # The output does not depend on the scale of a query's features, so that
        # `features . grad = 0` and the softmax's own correction vanishes.
        return features, lambda grad: self._pull_projection(
            side, x, grad.mul_(features)
        )

    def keys(
        self, rows: KeyRows, shift: Tensor | None, start: int
    ) -> tuple[Tensor, Tensor | None, Pull]:
        x, features = rows.keys, self._known("keys", start)
        if self.map.normalised:
            shift = self._weigh(rows, shift)
            if features is None:
                features = self._project("keys", self.sides[1], x)
                torch.softmax(features, dim=-1, out=features)
        elif features is None:
            features = self._project("keys", self.sides[1], x, self._offset(rows))
            shift = shift if self.record else _highest(features, shift)
            assert shift is not None
            features.sub_(shift).exp_()
        self._keep("keys", start, features)

        def pull(grad: Tensor) -> Tensor:
            grad.mul_(features)
            total = grad.sum(dim=-1, keepdim=True)
            if self.map.normalised:
                grad.addcmul_(features, total, value=-1.0)
            back = self._pull_projection(self.sides[1], x, grad)
            return back if self.map.normalised else back.addcmul_(x, total, value=-1.0)

        return features, shift, pull

    def _offset(self, rows: KeyRows) -> Tensor:
        offset = rows.keys.square().sum(dim=-1, keepdim=True).mul_(-0.5)
        if rows.log_weight is not None:
            offset += rows.log_weight
        return offset if rows.dead is None else offset.masked_fill_(rows.dead, ABSENT)


def make_map(
    feature_map: AbstractFeatureMap,
    sides: tuple[Side, Side],
    work: Workspace,
    *,
    record: bool = False,
    logs: bool = False,
    kept: Kept | None = None,
) -> BlockMap:
    """Choose how the features of blocks are evaluated."""
    kind = ExponentialMap if feature_map.exponential and not logs else BlockMap
    return kind(feature_map, sides, work, record, logs, kept)
