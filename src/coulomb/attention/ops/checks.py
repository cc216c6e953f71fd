"""Shapes and precision of the operands, each with one sentence for the user."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from coulomb._support.errors import ParameterError, ParameterTypeError, unknown_name
from coulomb.features import AbstractFeatureMap, Particles, as_feature_map

FORMS = ("auto", "linear", "quadratic")
NO_ARRAY = np.empty(0, np.float32)  # in place of None, for compiled loops

FeatureMap = str | AbstractFeatureMap | Callable[[Tensor, Particles], Tensor]


class Given(AbstractFeatureMap):
    """Inputs that are features already."""

    def __call__(self, x: Tensor, particles: Particles) -> Tensor:
        return x


class Inputs(NamedTuple):
    """What attention is computed of, checked, with particles of every head."""

    q: Tensor  # (batch, heads, n, dim), or packed (tokens, heads, dim)
    k: Tensor
    v: Tensor
    log_weight: Tensor | None  # (batch, heads, m, 1), or (tokens, heads, 1)
    key_mask: Tensor | None  # (batch, m)
    particles: Particles
    key_particles: Particles | None
    feature_map: AbstractFeatureMap
    causal: bool

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What may have a gradient."""
        keys = self.key_particles or (None, None)
        return (*self[:4], *self.particles, *keys)

    def with_offset_columns(self) -> "Inputs":
        """Write offsets of particles as columns, for forms that know no offsets."""
        keys = self.key_particles
        if not self.feature_map.exponential or keys is None:
            return self
        q, queries = with_offset_column(self.q, self.particles)
        k, keys = with_offset_column(self.k, keys)
        return self._replace(q=q, k=k, particles=queries, key_particles=keys)

    def cast(self) -> "Inputs":
        """Give everything in the working precision."""
        dtype = self.particles.positions.dtype
        q, k, v, weight = (x if x is None else x.to(dtype) for x in self[:4])
        return self._replace(q=q, k=k, v=v, log_weight=weight)  # type: ignore[arg-type]


def check_inputs(
    operands: tuple[Tensor, Tensor, Tensor],
    particles: Particles,
    feature_map: FeatureMap,
    key_mask: Tensor | None,
    key_particles: Particles | None,
    key_log_weight: Tensor | None,
    offsets: tuple[Tensor, Tensor] | None = None,
    *,
    causal: bool = False,
    packed: bool = False,
) -> Inputs:
    """Check everything that attention is computed of."""
    q, k, v = operands
    if packed:
        check_operands(("q", "k", "v"), operands, ("tokens", "heads", "dim"))
    else:
        check_operands(("q", "k", "v"), operands, causal=causal)
        check_mask(key_mask, k)
    if key_log_weight is not None:
        check_float("key_log_weight", key_log_weight)
        if key_log_weight.shape != k.shape[:-1]:
            raise ParameterError(
                f"`key_log_weight` must have shape {tuple(k.shape[:-1])}, as `k` "
                f"without its last axis; got {tuple(key_log_weight.shape)}."
            )
        key_log_weight = key_log_weight.unsqueeze(-1)
    feature_map = as_feature_map(feature_map)
    if offsets is not None and key_particles is None:
        key_particles = particles
    queries, keys = side_particles(particles, key_particles, q)
    if feature_map.exponential:
        # These maps have no phases: offsets stand in their place.
        queries = queries._replace(phases=None)
        keys = None if keys is None else keys._replace(phases=None)
    if offsets is not None and keys is not None:
        phases = queries.phases, keys.phases
        queries = _offset("offsets[0]", offsets[0], queries)
        keys = _offset("offsets[1]", offsets[1], keys)
        if not feature_map.exponential:
            q, queries = with_offset_column(q, queries)
            k, keys = with_offset_column(k, keys)
            queries = queries._replace(phases=phases[0])
            keys = keys._replace(phases=phases[1])
    return Inputs(q, k, v, key_log_weight, key_mask, queries, keys, feature_map, causal)


def _offset(name: str, offsets: Tensor, particles: Particles) -> Particles:
    check_float(name, offsets)
    positions = particles.positions
    if offsets.shape != positions.shape[:-1]:
        raise ParameterError(
            f"`{name}` must have shape (heads, n_particles) = "
            f"{tuple(positions.shape[:-1])}; got {tuple(offsets.shape)}."
        )
    return particles._replace(phases=offsets.to(positions.dtype))


def with_offset_column(x: Tensor, particles: Particles) -> tuple[Tensor, Particles]:
    """Write offsets, in the place of phases, as one more column of positions."""
    positions, offsets = particles
    if offsets is None:
        return x, particles
    column = offsets.unsqueeze(-1)
    ones = functional.pad(x, (0, 1), value=1.0)
    return ones, Particles(torch.cat([positions, column], dim=-1))


def check_form(form: str) -> None:
    """Refuse a form that does not exist."""
    if form not in FORMS:
        raise unknown_name("form", form, FORMS)


def check_float(name: str, x: Any, dims: str = "", n_dims: int | None = None) -> None:
    """Refuse what is no floating-point tensor, or has another number of axes."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ParameterTypeError(
            f"`{name}` must be a floating-point tensor; got {kind}."
        )
    if n_dims is not None and x.dim() != n_dims:
        raise ParameterError(f"`{name}` must have shape {dims}; got {tuple(x.shape)}.")


def check_operands(
    names: tuple[str, str, str],
    operands: Sequence[Tensor],
    axes: tuple[str, ...] = ("batch", "heads", "length", "dim"),
    *,
    causal: bool = False,
) -> None:
    """Check queries, keys and values `(batch, heads, length, dim)`, or other axes."""
    q, k, v = operands
    for name, x in zip(names, operands, strict=True):
        check_float(name, x, f"({', '.join(axes)})", len(axes))
    name_q, name_k, name_v = names
    if q.dtype != k.dtype:
        raise ParameterTypeError(
            f"`{name_q}` and `{name_k}` must have one dtype; got {q.dtype} and "
            f"{k.dtype}. Convert one of them."
        )
    if not q.shape[1] or not q.shape[-1]:
        raise ParameterError(
            f"`{name_q}` must have at least one head and one coordinate; got shape "
            f"{tuple(q.shape)}."
        )
    if q.shape[:2] != k.shape[:2] or q.shape[-1] != k.shape[-1]:
        raise ParameterError(
            f"`{name_q}` and `{name_k}` must agree in {axes[0]}, heads and last axis; "
            f"got {tuple(q.shape)} and {tuple(k.shape)}."
        )
    if k.shape[:-1] != v.shape[:-1]:
        raise ParameterError(
            f"`{name_k}` and `{name_v}` must agree in {', '.join(axes[:-1])}; got "
            f"{tuple(k.shape)} and {tuple(v.shape)}."
        )
    if causal and q.shape[2] != k.shape[2]:
        raise ParameterError(
            f"`causal=True` needs as many queries as keys; got {q.shape[2]} and "
            f"{k.shape[2]}. For a prefix of keys use `prefill` and `decode_step`."
        )


def check_mask(key_mask: Tensor | None, k: Tensor) -> None:
    """Check the key mask `(batch, length)`."""
    if key_mask is None:
        return
    if not isinstance(key_mask, Tensor):
        raise ParameterTypeError(
            f"`key_mask` must be a boolean tensor; got {type(key_mask).__name__}."
        )
    if key_mask.dtype != torch.bool:
        raise ParameterTypeError(
            f"`key_mask` must be boolean, True = real token; got {key_mask.dtype}."
        )
    if key_mask.shape != (k.shape[0], k.shape[2]):
        raise ParameterError(
            f"`key_mask` must have shape (batch, length) = {(k.shape[0], k.shape[2])}; "
            f"got {tuple(key_mask.shape)}."
        )


def side_particles(
    particles: Particles, key_particles: Particles | None, x: Tensor
) -> tuple[Particles, Particles | None]:
    """Give every head what its queries and, if that differs, what its keys meet."""
    queries = head_particles(particles, x)
    if key_particles is None:
        return queries, None
    keys = head_particles(key_particles, x)
    if keys.n_particles != queries.n_particles:
        raise ParameterError(
            "`key_particles` must be as many as `particles`; got "
            f"{keys.n_particles} and {queries.n_particles}."
        )
    return queries, keys


def check_particles(particles: Particles) -> None:
    """Refuse what is not `Particles`, and particles without any."""
    if not isinstance(particles, Particles):
        raise ParameterTypeError(
            "`particles` must be coulomb.Particles(positions, phases); got "
            f"{type(particles).__name__}."
        )
    for name, part in zip(("positions", "phases"), particles, strict=True):
        if name == "positions" or part is not None:
            check_float(f"particles.{name}", part)
    if 0 in particles.positions.shape:
        raise ParameterError(
            "`particles.positions` must hold at least one particle with one "
            f"coordinate; got shape {tuple(particles.positions.shape)}."
        )


def head_particles(particles: Particles, x: Tensor) -> Particles:
    """Give every head its particles, in the working precision."""
    check_particles(particles)
    positions, phases = particles
    heads, dim = x.shape[1], x.shape[-1]
    if positions.dim() not in (2, 3) or positions.shape[-1] != dim:
        raise ParameterError(
            "`particles.positions` must have shape (heads, n_particles, dim) or "
            f"(n_particles, dim) with dim = {dim}; got {tuple(positions.shape)}."
        )
    if positions.dim() == 3 and positions.shape[0] != heads:
        raise ParameterError(
            f"`particles.positions` must have one group for each of {heads} heads; got "
            f"{positions.shape[0]}."
        )
    if phases is not None and phases.shape not in (
        positions.shape[:-1],
        positions.shape[-2:-1],
    ):
        raise ParameterError(
            f"`particles.phases` must have shape {tuple(positions.shape[:-1])}; got "
            f"{tuple(phases.shape)}."
        )
    dtype = working_dtype(x)
    positions = positions.to(dtype)
    if positions.dim() == 2:
        positions = positions.expand(heads, -1, -1)
    if phases is not None:
        phases = phases.to(dtype).expand(heads, -1)
    return Particles(positions, phases)


def working_dtype(x: Tensor) -> torch.dtype:
    """Give the precision to compute in: that of `x`, but at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def as_array(x: Any) -> Any:
    """View a tensor as an array, None as an empty one; tuples item by item."""
    if isinstance(x, Tensor):
        return x.detach().contiguous().numpy()
    if isinstance(x, tuple):
        return tuple(map(as_array, x))
    return NO_ARRAY if x is None else x


def must_be_traceable(x: Tensor) -> bool:
    """Say whether someone is tracing or transforming the present call."""
    return (
        x.is_meta
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
    )


def full_precision(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Leave autocast, whose matrix products would accumulate in half precision."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()
