"""Linear attention with learnable kernels, called like torch's own layer."""

from abc import abstractmethod
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support.checks import check_count, check_memory
from coulomb._support.errors import ParameterError, ParameterTypeError
from coulomb.attention.layers.base import (
    AbstractAttention,
    LayerOptions,
    PackedTokens,
    Seed,
    as_generator,
    attention_layers,
    check_input,
    real_keys,
)
from coulomb.attention.ops import api, decoding
from coulomb.attention.ops.checks import FeatureMap, must_be_traceable
from coulomb.attention.ops.decoding import AttentionState
from coulomb.dynamics import initial
from coulomb.dynamics.initial import AbstractLaw
from coulomb.features import (
    DEFAULT_MAP,
    SOFTMAX_KERNEL_MAP,
    AbstractFeatureMap,
    CustomMap,
    Particles,
    as_feature_map,
)

__all__ = ["AbstractAttention", "KernelAttention", "attention_layers"]

# Norm of a particle at the start, for maps without a norm of their own. Longer ones
# make the features too sharp to learn from.
_START_NORM = 1.5


def _as_law(
    start: AbstractLaw | str | None, feature_map: AbstractFeatureMap, dim: int
) -> AbstractLaw:
    if start is None:
        # What imitates softmax is unbiased at unit variance and at no other.
        unit = feature_map.imitates_softmax
        return initial.Orthogonal(1.0 if unit else _START_NORM**2 / dim)
    if isinstance(start, AbstractLaw):
        return start
    if isinstance(start, str):
        return initial.starting_laws.build(start)
    raise ParameterTypeError(
        f"`start` must be a starting law, its name or None; got {start!r}."
    )


class AbstractFeatureAttention(AbstractAttention):
    """Attention by features, `a_i = phi(q_i)' G / phi(q_i)' z`."""

    compiled_core = "attend_features"

    @abstractmethod
    def kernel(self) -> tuple[Particles, AbstractFeatureMap]:
        """Give the particles of the heads and the feature map.

        Returns
        -------
        tuple
            The layer's own tensors, not copies, and the map.
        """

    def as_key_particles(self) -> Particles | None:
        """Give what meets keys, for the argument `key_particles` of the operations.

        Returns
        -------
        Particles or None
            The layer's own tensors, not copies; None if they are those of queries.
        """
        return None

    def count_pass(self) -> None:
        """Count a forward pass in training; for layers that draw particles anew."""

    def project(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(query, key, value)
        if self.kernel()[1].imitates_softmax:
            scale = self.head_dim**-0.25
            q, k = q * scale, k * scale
        return q, k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        if not must_be_traceable(q):
            self.count_pass()
        keys = self.as_key_particles()
        operands = q, k, v, *self.kernel(), key_mask
        out = api.kernel_attention(*operands, key_particles=keys, causal=causal)
        return functional.dropout(out, self.dropout, self.training)

    def weights(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        keys = self.as_key_particles()
        operands = q, k, *self.kernel(), key_mask
        weights = api.kernel_weights(*operands, key_particles=keys, causal=causal)
        return weights.to(q.dtype)

    def attend_packed(self, tokens: PackedTokens) -> Tensor:
        self.count_pass()
        out = self.attend_compiled(tokens)
        if out is None:
            keys, bounds = self.as_key_particles(), tokens.layout.cu_seqlens
            operands = *self.project_packed(tokens.states), *self.kernel(), bounds
            out = api.packed_attention(
                *operands, key_particles=keys, causal=self.causal
            )
            out = out.flatten(1)
        return tokens.dropout.drop(out, self.dropout)


@attention_layers.add("kernel")
class KernelAttention(AbstractFeatureAttention):
    """Multi-head linear attention, `a_i = phi(q_i)' G / phi(q_i)' z`.

    `G = sum_j phi(k_j) v_j'` and `z = sum_j phi(k_j)`, where every head has its own
    particles in the feature map `phi`. A drop-in for `torch.nn.MultiheadAttention`: the
    same call, masks, parameter names and initialisation of the projections, so that
    `load_state_dict(torch_layer.state_dict(), strict=False)` carries weights over.

    The particles are in the state dict and, unless unfrozen, receive no gradient.
    Queries and keys are scaled by `head_dim ** -0.25` for maps that imitate softmax.
    Since there is no attention matrix whose entries could be dropped, dropout acts on
    the output of the heads.

    Parameters
    ----------
    embed_dim, num_heads
        Width, and the number of heads it is split into.
    feature_map
        A map, its name, or a function of `(x, particles)`; its features should be
        positive.
    n_features
        Particles of each head.
    qkv
        `"learned"` projects queries, keys and values. `"shared"` is the paper's
        `Q = K = reshape(x)`: only values and output are projected.
    start
        The law of the particles: one of `coulomb.dynamics.initial`, its name, or None
        for orthogonal blocks, of unit variance for maps that imitate softmax and of
        norm about 1.5 for the others.
    tied
        Whether queries and keys meet the same particles, which makes every relation
        symmetric where they are the same vectors. Untied ones have twice as many
        coordinates, first those that meet queries, then those that meet keys; both
        start as the tied ones do.
    causal
        Whether every call is causal, whatever its `is_causal`.
    generator
        A generator on the CPU or a seed; None draws from torch's own, as torch's layers
        do.
    dropout, bias, kdim, vdim, batch_first, device, dtype
        As in `torch.nn.MultiheadAttention`.

    Attributes
    ----------
    particles : torch.nn.Parameter
        Positions, shape `(num_heads, n_features, head_dim)`, untied ones `(num_heads,
        n_features, 2 * head_dim)`.
    phases : torch.Tensor or None
        A buffer of shape `(num_heads, n_features)`, for maps that need it.

    Examples
    --------
    >>> layer = KernelAttention(8, 2, n_features=16, batch_first=True, generator=0)
    >>> x = torch.ones(1, 3, 8)
    >>> out, weights = layer(x, x, x)
    >>> out.shape, weights.detach().sum(dim=-1).round(decimals=4)
    (torch.Size([1, 3, 8]), tensor([[1., 1., 1.]]))
    """

    particles: nn.Parameter
    phases: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        feature_map: FeatureMap = DEFAULT_MAP,
        n_features: int = 256,
        start: AbstractLaw | str | None = None,
        tied: bool = True,
        generator: Seed = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.feature_map = chosen = as_feature_map(feature_map)
        if not chosen.positive and not isinstance(chosen, CustomMap):
            raise ParameterError(
                "`feature_map` must be positive, or the weights of attention could sum "
                f"to zero; got {feature_map!r}. Use 'favor' or 'cos2'."
            )
        self.n_features = check_count("n_features", n_features)
        self.start = _as_law(start, self.feature_map, self.head_dim)
        self.tied = tied
        sides = 1 if tied else 2
        check_memory("n_features", 4 * n_features * sides * self.embed_dim)
        empty = self.new_empty(num_heads, n_features, sides * self.head_dim)
        self.particles = nn.Parameter(empty, requires_grad=False)
        phases = empty[..., 0].clone() if self.feature_map.needs_phases else None
        self.register_buffer("phases", phases)
        self.reset_parameters(generator=generator)

    def reset_parameters(self, *, generator: Seed = None) -> None:
        source = as_generator(generator)
        super().reset_parameters(generator=source)
        size = self.n_features, self.head_dim
        with torch.no_grad():
            for head in self.particles:
                drawn = self.start.draw(*size, generator=source)
                head.copy_(drawn if self.tied else drawn.repeat(1, 2))
            for phase in () if self.phases is None else self.phases:
                phase.copy_(initial.draw_phases(self.n_features, generator=source))

    def freeze_particles(self) -> None:
        """Let no gradient reach the particles; they are frozen at the start."""
        self.particles.requires_grad_(False)

    def unfreeze_particles(self) -> None:
        """Let the particles be trained like any other parameter."""
        self.particles.requires_grad_(True)

    def as_particles(self) -> Particles:
        """Give positions and phases in the form the operations take.

        Returns
        -------
        Particles
            The layer's own tensors, not copies; what meets queries if not `tied`.
        """
        positions: Tensor = self.particles
        if not self.tied:
            positions = positions[..., : self.head_dim]
        return Particles(positions, self.phases)

    def as_key_particles(self) -> Particles | None:
        if self.tied:
            return None
        return Particles(self.particles[..., self.head_dim :], self.phases)

    def kernel(self) -> tuple[Particles, AbstractFeatureMap]:
        return self.as_particles(), self.feature_map

    def prefill(
        self, x: Tensor, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, AttentionState]:
        """Attend causally to a whole prompt, and keep what decoding needs.

        Parameters
        ----------
        x
            The prompt, shape `(batch, length, embed_dim)` whatever `batch_first`.
        key_padding_mask
            Shape `(batch, length)`, True = padding.

        Returns
        -------
        tuple
            The output, shaped like `x`, and the state for `decode`.
        """
        self._check_tokens(x, ("batch", "length", "embed_dim"))
        key_mask = real_keys(key_padding_mask, x, batched=True)
        q, k, v = self.project(x, x, x)
        out = self.join(self.attend(q, k, v, key_mask, causal=True))
        particles = self.as_key_particles() or self.as_particles()
        return out, decoding.prefill(k, v, particles, self.feature_map, key_mask)

    def decode(
        self, x: Tensor, state: AttentionState | None = None
    ) -> tuple[Tensor, AttentionState]:
        """Add one token and attend to all so far, at a cost that knows no length.

        Parameters
        ----------
        x
            The token, shape `(batch, embed_dim)`.
        state
            What `prefill` or the last call returned; None before the first token.

        Returns
        -------
        tuple
            The output, shape `(batch, embed_dim)`, and the next state.

        Examples
        --------
        >>> layer = KernelAttention(8, 2, n_features=16, causal=True, generator=0)
        >>> prompt, token = torch.ones(1, 3, 8), torch.ones(1, 8)
        >>> _, state = layer.prefill(prompt)
        >>> out, state = layer.decode(token, state)
        >>> out.shape
        torch.Size([1, 8])
        """
        self._check_tokens(x, ("batch", "embed_dim"))
        rows = x.unsqueeze(1)
        q, k, v = self.project(rows, rows, rows)
        particles = self.as_particles()
        if state is None:
            sizes = {"batch": len(x), "heads": self.num_heads, "dim_v": self.head_dim}
            state = decoding.init_state(particles, self.feature_map, **sizes)
        token = q[:, :, 0], k[:, :, 0], v[:, :, 0]
        operands = *token, particles, self.feature_map
        keys = self.as_key_particles()
        out, state = decoding.decode_step(state, *operands, key_particles=keys)
        out = functional.dropout(out, self.dropout, self.training)
        return self.join(out.unsqueeze(2)).squeeze(1), state

    def _check_tokens(self, x: Tensor, axes: tuple[str, ...]) -> None:
        check_input("x", x, self.embed_dim, self.dtype)
        if x.dim() != len(axes):
            raise ParameterError(
                f"`x` must have shape ({', '.join(axes)}); got {tuple(x.shape)}."
            )

    def extra_repr(self) -> str:
        features = f"feature_map={self.feature_map!r}, n_features={self.n_features}"
        features += "" if self.tied else ", tied=False"
        return f"{super().extra_repr()}, {features}"


attention_layers.add(SOFTMAX_KERNEL_MAP)(
    partial(KernelAttention, feature_map=SOFTMAX_KERNEL_MAP)
)
