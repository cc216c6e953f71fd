"""The layer that stands where softmax was: learned heads, and heads kept exact.

A head has query particles `(w, a)` and key particles `(u, b)` in `R^(d + 1)`:
`phi_m(q) = f(w_m . q + a_m)` of a query and
`exp((t + mean_l u_l) . k) f(u_m . k + b_m)` of a key, where `f` is any feature map
and `t` is the head's tilt. A tilt is exact for softmax: with the mean query `c`,
`exp(q . k) = exp(c . k) exp((q - c) . k)`, so that the features have to imitate centred
queries only. It moves with the mean of the key particles, which features that are
normalised over the particles do not see otherwise.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support.checks import check_count
from coulomb._support.errors import ParameterError
from coulomb.attention import AbstractAttention, kernel_attention
from coulomb.attention.layers.base import options_of
from coulomb.features import DEFAULT_MAP, AbstractFeatureMap, Particles, feature_maps


def as_positive_map(name: str) -> AbstractFeatureMap:
    """Build a feature map that can stand in attention without phases.

    Examples
    --------
    >>> as_positive_map("softmaxfeat")
    SoftmaxFeatures(temperature=1.0)
    """
    feature_map = feature_maps.build(name)
    if not _fits(feature_map):
        known = [n for n in feature_maps if _fits(feature_maps.build(n))]
        raise ParameterError(
            "`feature_map` must be positive and need no phases; got "
            f"{name!r}. Use one of {', '.join(sorted(known))}."
        )
    return feature_map


def _fits(feature_map: AbstractFeatureMap) -> bool:
    return feature_map.positive and not feature_map.needs_phases


class HeadParticles(NamedTuple):
    """Query and key particles of some heads, side by side, and the tilts.

    Examples
    --------
    >>> x, v = torch.zeros(1, 1, 3, 2), torch.tensor([1.0, 2.0, 6.0]).view(1, 1, 3, 1)
    >>> feature_map = as_positive_map("softmaxfeat")
    >>> particles = HeadParticles(torch.ones(1, 4, 6), torch.zeros(1, 2), feature_map)
    >>> particles.features(x, x)[0][0, 0, 0]
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    >>> particles.rows(x, x)[0, 0, 0]
    tensor([0.3333, 0.3333, 0.3333])
    >>> particles.attend(x, x, v).flatten()
    tensor([3., 3., 3.])
    """

    positions: Tensor  # (heads, n_features, 2 dim + 2), the columns w, a, u, b
    tilt: Tensor  # (heads, dim)
    feature_map: AbstractFeatureMap

    def to(self, like: Tensor) -> "HeadParticles":
        """Give the numbers the precision and the device of a tensor."""
        return self._replace(positions=self.positions.to(like), tilt=self.tilt.to(like))

    @property
    def key_tilt(self) -> Tensor:
        """The exponent of keys, `t + mean_l u_l`."""
        return self.tilt + mean_key_particle(self.positions)

    def features(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Evaluate the features of queries and keys."""
        weight = key_log_weight(k, self.key_tilt, key_mask).exp().unsqueeze(-1)
        if key_mask is not None:
            weight = weight.masked_fill(~key_mask[:, None, :, None], 0)
        # A one is appended for the offsets.
        q, k = (functional.pad(x, (0, 1), value=1.0) for x in self._scaled(q, k))
        sides = map(Particles, self.positions.chunk(2, dim=-1))
        phi_q, phi_k = map(self.feature_map, (q, k), sides)
        return phi_q, phi_k * weight

    def _scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if not self.feature_map.imitates_softmax:
            return q, k
        scale = q.shape[-1] ** -0.25
        return q * scale, k * scale

    def kernel(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Write out `phi(q_i) . phi(k_j)`."""
        phi_q, phi_k = self.features(q, k, key_mask)
        return phi_q @ phi_k.transpose(-1, -2)

    def rows(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Write out the rows, the kernel divided by its sums.

        The slow twin of `attend`, and what is compared with the teacher's rows.
        """
        products = self.kernel(q, k, key_mask)
        total = products.sum(dim=-1, keepdim=True)
        return products / total.clamp_min(torch.finfo(products.dtype).tiny)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None
    ) -> Tensor:
        """Attend in linear time."""
        dtype = torch.promote_types(v.dtype, torch.float32)
        q, k, values = (x.to(dtype) for x in (q, k, v))
        full, dim = self.to(q), q.shape[-1]
        weight = tilted(k, full.key_tilt)
        q, k = self._scaled(q, k)
        # In the order of the projections, so that heads are joined without a copy.
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        queries, keys = full.positions.chunk(2, dim=-1)
        return kernel_attention(
            q,
            k,
            values,
            Particles(queries[..., :dim]),
            self.feature_map,
            key_mask,
            key_particles=Particles(keys[..., :dim]),
            key_log_weight=weight,
            offsets=(queries[..., dim], keys[..., dim]),
        ).to(v.dtype)


def mean_key_particle(positions: Tensor) -> Tensor:
    """Average the key particles without their offsets, `mean_l u_l`."""
    half = positions.shape[-1] // 2
    return positions[..., half:-1].mean(dim=-2)


def tilted(k: Tensor, tilt: Tensor) -> Tensor:
    """Evaluate `t . k`, shape `(batch, heads, n)`."""
    # A row times a matrix: libraries are slower by times at a matrix times a column.
    flat = k.transpose(0, 1).reshape(len(tilt), -1, k.shape[-1]).transpose(1, 2)
    exponent = torch.bmm(tilt.unsqueeze(1), flat).view(len(tilt), len(k), -1)
    return exponent.transpose(0, 1)


def key_log_weight(k: Tensor, tilt: Tensor, key_mask: Tensor | None) -> Tensor:
    """Evaluate `t . k` less the largest of its sequence, zero in the padding."""
    exponent = tilted(k, tilt)
    if key_mask is None:
        return exponent - exponent.detach().amax(dim=-1, keepdim=True)
    hidden = ~key_mask.unsqueeze(1)
    real = exponent.detach().masked_fill(hidden, -torch.inf)
    return (exponent - real.amax(dim=-1, keepdim=True)).masked_fill(hidden, 0)


class LinearisedHeads(nn.Module):
    """Attention of given queries, keys and values with learned features.

    Parameters
    ----------
    num_heads, head_dim
        How many heads, and of which width.
    n_features
        Particles of each head.
    feature_map
        The name of a positive map.
    exact_heads
        Numbers of the heads that keep softmax, and its quadratic cost.

    Attributes
    ----------
    particles : torch.nn.Parameter
        Positions `(num_heads, n_features, 2 head_dim + 2)`, zero until they are
        learned; they receive no gradient unless unfrozen.
    tilt : torch.Tensor
        A buffer of shape `(num_heads, head_dim)`.

    Examples
    --------
    >>> heads = LinearisedHeads(2, 4, n_features=8)
    >>> x = torch.ones(1, 2, 3, 4)
    >>> heads(x, x, x).shape
    torch.Size([1, 2, 3, 4])
    """

    particles: nn.Parameter
    tilt: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        n_features: int = 64,
        feature_map: str = DEFAULT_MAP,
        exact_heads: Sequence[int] = (),
    ) -> None:
        super().__init__()
        check_count("n_features", n_features)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.map_name = feature_map
        self.feature_map = as_positive_map(feature_map)
        self.exact_heads = _check_heads(exact_heads, num_heads)
        learned = set(range(num_heads)) - set(self.exact_heads)
        self.learned_heads = tuple(sorted(learned))
        rows = torch.zeros(num_heads, n_features, 2 * head_dim + 2)
        self.particles = nn.Parameter(rows, requires_grad=False)
        self.register_buffer("tilt", torch.zeros(num_heads, head_dim))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Parameters
        ----------
        q, k, v
            Shape `(batch, heads, n, dim)`, as they come from the projections.
        key_mask
            Shape `(batch, n)`, True = real token; None if all are.
        bias
            Added to the scores of exact heads; learned heads cannot express it.

        Returns
        -------
        Tensor
            Shape `(batch, heads, n, dim)`.
        """
        if not self.exact_heads:
            return self._head_particles().attend(q, k, v, key_mask)
        out = torch.empty_like(q, dtype=v.dtype)
        learned, exact = list(self.learned_heads), list(self.exact_heads)
        mask = None if key_mask is None else key_mask[:, None, None, :]
        if bias is not None:
            bias, low = bias[:, exact], torch.finfo(bias.dtype).min
            mask = bias if mask is None else bias.masked_fill(~mask, low)
        out[:, exact] = functional.scaled_dot_product_attention(
            q[:, exact], k[:, exact], v[:, exact], attn_mask=mask
        )
        if learned:
            q, k, v = (x[:, learned] for x in (q, k, v))
            out[:, learned] = self._head_particles(learned).attend(q, k, v, key_mask)
        return out

    def weights(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Write out the matrix that `forward` multiplies the values with.

        Parameters
        ----------
        q, k, key_mask
            As in `forward`.

        Returns
        -------
        Tensor
            Shape `(batch, heads, n, n)`.
        """
        rows = self._head_particles().rows(q, k, key_mask)
        if self.exact_heads:
            exact = list(self.exact_heads)
            rows[:, exact] = softmax_rows(q[:, exact], k[:, exact], key_mask)
        return rows

    def _head_particles(self, heads: list[int] | slice = slice(None)) -> HeadParticles:
        return HeadParticles(self.particles[heads], self.tilt[heads], self.feature_map)

    def extra_repr(self) -> str:
        """Show the settings."""
        heads, features, _ = self.particles.shape
        shown = f"heads={heads}, n_features={features}, feature_map={self.map_name!r}"
        return shown + (f", exact_heads={self.exact_heads}" if self.exact_heads else "")


def _check_heads(heads: Sequence[int], num_heads: int) -> tuple[int, ...]:
    """Sort the numbers of heads, or say which one there is not."""
    for head in heads:
        if check_count("keep_exact", head, at_least=0) >= num_heads:
            raise ParameterError(
                f"`keep_exact` must name heads from 0 to {num_heads - 1}; got {head}."
            )
    return tuple(sorted({int(head) for head in heads}))


def softmax_rows(
    q: Tensor, k: Tensor, key_mask: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """Write out the rows of softmax attention, `softmax(q k' / sqrt(d) + bias)`."""
    scores = softmax_scores(q, k, bias)
    if key_mask is not None:
        low = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~key_mask[:, None, None, :], low)
    return scores.softmax(dim=-1)


def softmax_scores(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Evaluate `q k' / sqrt(d) + bias`."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores if bias is None else scores + bias


class LinearisedAttention(AbstractAttention):
    """`torch.nn.MultiheadAttention` with its weights and learned features.

    Parameters
    ----------
    attention
        torch's layer; its parameters are taken over, not copied.
    n_features, feature_map, exact_heads
        As in `LinearisedHeads`.

    Examples
    --------
    >>> layer = LinearisedAttention(nn.MultiheadAttention(8, 2), n_features=4)
    >>> x = torch.ones(3, 1, 8)
    >>> layer(x, x, x, need_weights=False)[0].shape
    torch.Size([3, 1, 8])
    """

    def __init__(
        self,
        attention: nn.MultiheadAttention,
        *,
        n_features: int = 64,
        feature_map: str = DEFAULT_MAP,
        exact_heads: Sequence[int] = (),
    ) -> None:
        size = attention.embed_dim, attention.num_heads
        super().__init__(*size, **options_of(attention))
        self.adopt(attention)
        self.coulomb = LinearisedHeads(
            self.num_heads,
            self.head_dim,
            n_features=n_features,
            feature_map=feature_map,
            exact_heads=exact_heads,
        )
        self.train(attention.training)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        self._refuse_causal(causal)
        out: Tensor = self.coulomb(q, k, v, key_mask)
        return functional.dropout(out, self.dropout, self.training)

    def weights(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        self._refuse_causal(causal)
        return self.coulomb.weights(q, k, key_mask)

    def _refuse_causal(self, causal: bool) -> None:
        if causal:
            raise ParameterError(
                "`is_causal` must be False for a linearised encoder; got True. Swap "
                "the layers of a decoder with coulomb.attention.replace_attention."
            )
