"""The layer that stands where softmax was: learned heads, and heads kept exact.

A head has query particles `(w, a)` and key particles `(u, b)` in `R^(d + 1)`:
`phi_m(q) = f(w_m . q + a_m)` of a query and
`exp((t + mean_l u_l) . k) f(u_m . k + b_m)` of a key, where `f` is any feature map
and `t` is the head's tilt. A tilt is exact for softmax: with the mean query `c`,
`exp(q . k) = exp(c . k) exp((q - c) . k)`, so that the features have to imitate centred
queries only. It moves with the mean of the key particles, which features that are
normalised over the particles do not see otherwise.

With a `window` the tokens that close to a query are compared exactly, and the features
stand for all others: a sum of a band and of a product of thin matrices, in linear time.
In sequences of at most `exact_length` tokens, where the square of the length costs less
than features do, all keys are compared exactly.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support.checks import check_count
from coulomb._support.errors import ParameterError
from coulomb.attention import AbstractAttention, kernel_attention
from coulomb.attention.layers.base import options_of
from coulomb.attention.ops import compiled
from coulomb.features import DEFAULT_MAP, AbstractFeatureMap, Particles, feature_maps

# Norm of a random particle of a map without a norm of its own.
_RANDOM_NORM = 1.5


def as_positive_map(name: str) -> AbstractFeatureMap:
    """Build a feature map that can stand in attention without phases.

    Examples
    --------
    >>> as_positive_map("softmaxfeat")
    SoftmaxFeatures(temperature=1.0)
    """
    kinds = {
        known: feature_maps.build(known) for known in [name, *sorted(feature_maps)]
    }
    fits = [n for n, kind in kinds.items() if kind.positive and not kind.needs_phases]
    if name not in fits:
        raise ParameterError(
            "`feature_map` must be positive and need no phases; got "
            f"{name!r}. Use one of {', '.join(fits)}."
        )
    return kinds[name]


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
    window: int = 0  # keys at most so far from a query are compared exactly
    exact_length: int = 0  # in sequences of at most so many tokens all keys are

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
        weight, _ = key_weight(k, self.key_tilt, key_mask)
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

    def _far(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate features; their products times `exp(scale_i)` imitate `exp(q.k)`."""
        dim = q.shape[-1]
        if key_mask is not None:
            k = k.masked_fill(~key_mask[:, None, :, None], 0)
        queries, keys = self._sides()
        phi_q, phi_k = (
            (x @ side[..., :dim].transpose(-1, -2)).add_(side[..., dim].unsqueeze(-2))
            for x, side in ((q, queries), (k, keys))
        )
        weight, top = key_weight(k, self.key_tilt, key_mask)
        scale = phi_q.logsumexp(dim=-1, keepdim=True) + top
        return phi_q.softmax(dim=-1), phi_k.softmax(dim=-1) * weight, scale

    def rows(
        self,
        q: Tensor,
        k: Tensor,
        key_mask: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Write out the rows: products of features, exact in the band, by their sums.

        The slow twin of `attend`, and what is compared with the teacher's rows.
        `places` are the positions of the queries, if they are not those of the keys.
        """
        if not self.window:
            phi_q, phi_k = self.features(q, k, key_mask)
            products = phi_q @ phi_k.transpose(-1, -2)
        else:
            phi_q, phi_k, scale = self._far(q, k, key_mask)
            least = torch.finfo(q.dtype).tiny
            far = (phi_q @ phi_k.transpose(-1, -2)).clamp_min(least).log() + scale
            near = in_band(places, q.shape[2], k.shape[2], self.window, q.device)
            logarithms = torch.where(near, softmax_scores(q, k, None), far)
            if key_mask is not None:
                hidden = ~key_mask[:, None, None, :]
                logarithms = logarithms.masked_fill(hidden, -torch.inf)
            top = logarithms.detach().amax(dim=-1, keepdim=True)
            products = (logarithms - top.nan_to_num(neginf=0.0)).exp()
        total = products.sum(dim=-1, keepdim=True)
        products = products / total.clamp_min(torch.finfo(products.dtype).tiny)
        if not self.exact_length:
            return products
        short = ends_within(self.exact_length, k.shape[2], key_mask, q.device)
        return torch.where(short, softmax_rows(q, k, key_mask), products)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None
    ) -> Tensor:
        """Attend in linear time."""
        dtype = torch.promote_types(v.dtype, torch.float32)
        q, k, values = (x.to(dtype) for x in (q, k, v))
        full, n = self.to(q), k.shape[2]
        if self.exact_length and n <= self.exact_length:
            out = compiled.attend_near(q, k, values, (), (n, 0), key_mask)
            if out is None:
                out = _softmax_attention(q, k, values, key_mask)
            return out.to(v.dtype)
        out = full.attend_compiled(q, k, values, key_mask)
        if out is not None:
            return out.to(v.dtype)
        if self.window:
            far = full._far(q, k, key_mask)
            out = near_attention(q, k, values, key_mask, self.window, far)
        else:
            out = full._attend_far(q, k, values, key_mask)
        if self.exact_length and key_mask is not None:
            cut = slice(None), slice(None), slice(self.exact_length)
            mask = key_mask[:, : self.exact_length]
            exact = _softmax_attention(q[cut], k[cut], values[cut], mask)
            exact = functional.pad(exact, (0, 0, 0, n - exact.shape[2]))
            short = ends_within(self.exact_length, n, key_mask, q.device)
            out = torch.where(short, exact, out)
        return out.to(v.dtype)

    def attend_compiled(self, *given: Any) -> Tensor | None:
        """Attend as `compiled.attend_near` does, if it does."""
        if not (self.window and self.feature_map.softmax_over_features):
            return None
        dim = self.tilt.shape[-1]
        particles = [
            x
            for side in self._sides()
            for x in (side[..., :dim].contiguous(), side[..., dim].contiguous())
        ]
        reach = self.window, self.exact_length
        q, k, v, *rest = given
        return compiled.attend_near(q, k, v, (*particles, self.key_tilt), reach, *rest)

    def _sides(self) -> tuple[Tensor, ...]:
        temperature = getattr(self.feature_map, "temperature", 1.0)
        return (self.positions / temperature).chunk(2, dim=-1)

    def _attend_far(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
    ) -> Tensor:
        weight, dim = tilted(k, self.key_tilt), q.shape[-1]
        q, k = self._scaled(q, k)
        # In the order of the projections, so that heads are joined without a copy.
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        queries, keys = self.positions.chunk(2, dim=-1)
        return kernel_attention(
            q,
            k,
            v,
            Particles(queries[..., :dim]),
            self.feature_map,
            key_mask,
            key_particles=Particles(keys[..., :dim]),
            key_log_weight=weight,
            offsets=(queries[..., dim], keys[..., dim]),
        )


def mean_key_particle(positions: Tensor) -> Tensor:
    """Average the key particles without their offsets, `mean_l u_l`."""
    half = positions.shape[-1] // 2
    return positions[..., half:-1].mean(dim=-2)


def untilted(rows: Tensor, feature_map: AbstractFeatureMap) -> HeadParticles:
    """Use the same particles for queries and keys, whose weights are all one."""
    positions = for_both(rows)
    return HeadParticles(positions, -mean_key_particle(positions), feature_map)


def drawn(
    size: tuple[int, ...],
    feature_map: AbstractFeatureMap,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw particles `(heads, n_features, dim)` of the norm that suits a map."""
    rows = torch.randn(size, generator=generator)
    return (
        rows if feature_map.imitates_softmax else _RANDOM_NORM * size[-1] ** -0.5 * rows
    )


def for_both(rows: Tensor) -> Tensor:
    """Use the same particles, without offsets, for queries and keys."""
    return functional.pad(rows, (0, 1)).repeat(1, 1, 2)


def tilted(k: Tensor, tilt: Tensor) -> Tensor:
    """Evaluate `t . k`, shape `(batch, heads, n)`."""
    # A row times a matrix: libraries are slower by times at a matrix times a column.
    flat = k.transpose(0, 1).reshape(len(tilt), -1, k.shape[-1]).transpose(1, 2)
    exponent = torch.bmm(tilt.unsqueeze(1), flat).view(len(tilt), len(k), -1)
    return exponent.transpose(0, 1)


def key_weight(
    k: Tensor, tilt: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Evaluate `exp(t . k - top)`, 0 in the padding, and the largest of a sequence."""
    exponent = tilted(k, tilt)
    if key_mask is not None:
        exponent = exponent.masked_fill(~key_mask.unsqueeze(1), -torch.inf)
    top = exponent.detach().amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0)
    return (exponent - top).exp().unsqueeze(-1), top.unsqueeze(-1)


def ends_within(
    length: int, n: int, key_mask: Tensor | None, device: torch.device
) -> Tensor:
    """Tell which sequences of `n` places end within a length, `(batch, 1, 1, 1)`."""
    if key_mask is None:
        return torch.full((1, 1, 1, 1), n <= length, device=device)
    return ~key_mask[:, length:].any(dim=1)[:, None, None, None]


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> Tensor:
    """Attend by softmax; what the mask removes may be nan."""
    mask = None
    if key_mask is not None:
        mask = key_mask[:, None, None, :]
        k, v = (x.masked_fill(~mask.transpose(2, 3), 0) for x in (k, v))
        low = torch.finfo(q.dtype).min
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, low)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def in_band(
    places: Tensor | None, n: int, m: int, window: int, device: torch.device
) -> Tensor:
    """Tell which of `m` keys are at most `window` from each of `n` queries."""
    keys = torch.arange(m, device=device)
    queries = torch.arange(n, device=device) if places is None else places
    return (queries[:, None] - keys).abs() <= window


def near_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    window: int,
    far: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Attend exactly to keys at most `window` away, and by features to the others.

    Blocks of queries meet their own block of keys and a window on either side. What the
    features gave to keys of the band is taken away again:
    `sum_near exp(s_ij) v_j + exp(c_i) (sum_j R_ij v_j - sum_near R_ij v_j)`.

    Examples
    --------
    >>> x, v = torch.zeros(1, 1, 5, 2), torch.arange(5.0).view(1, 1, 5, 1)
    >>> near_attention(x, x, v, None, 1).flatten()
    tensor([0.5000, 1.0000, 2.0000, 3.0000, 3.5000])
    """
    batch, heads, n, dim = q.shape
    if far is None:
        out = compiled.attend_near(q, k, v, (), (window, 0), key_mask)
        if out is not None:
            return out
    size = max(window, 8)
    room, wide = -(n + window) % size + window, size + 2 * window
    real = torch.ones_like(k[:, :1, :, 0], dtype=torch.bool)
    real = real if key_mask is None else real & key_mask.unsqueeze(1)
    values = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    if key_mask is not None:
        values = values.masked_fill(~real.unsqueeze(-1), 0)
        k = k.masked_fill(~real.unsqueeze(-1), 0)

    # Sequences follow one another with nothing between them for as long as a window, so
    # that blocks that overlap are views of one array, and products need no copies.
    def spaced(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(*x.shape[:2], room, x.shape[3])], dim=2)

    def blocks(x: Tensor) -> Tensor:  # (all blocks, size, columns)
        return x.view(-1, size, x.shape[3])

    def around(x: Tensor) -> Tensor:  # (all blocks, columns, size + 2 window)
        end = x.new_zeros(window, x.shape[3])
        return torch.cat([end, spaced(x).flatten(0, 2), end]).unfold(0, wide, size)

    def grouped(x: Tensor) -> Tensor:  # (batch, head, block, size, columns)
        return x.view(batch, heads, -1, *x.shape[1:])

    band = in_band(None, wide, wide, window, q.device)[window : window + size]
    near = band & around(real.unsqueeze(-1)).view(batch, 1, -1, 1, wide)
    scores = blocks(spaced(q * dim**-0.5)) @ around(k)
    grouped(scores).add_(near.to(q.dtype).log())
    top = scores.detach().amax(dim=-1, keepdim=True)
    if far is None:
        out = (scores - top.nan_to_num(neginf=0.0)).exp() @ around(values).mT
    else:
        phi_q, phi_k, scale = spaced(far[0]), far[1], blocks(spaced(far[2]))
        total = blocks(phi_q @ (phi_k.transpose(-1, -2) @ values))
        products = blocks(phi_q) @ around(phi_k)
        grouped(products).mul_(near)
        # Below rounding nothing is left for keys outside of the band.
        left = total[..., -1:] - products.sum(dim=-1, keepdim=True)
        few = 64 * torch.finfo(q.dtype).eps
        top = torch.maximum(top, scale.detach())
        factor = (scale - top).exp() * (left > few * total[..., -1:])
        weights = torch.addcmul((scores - top).exp(), factor, products, value=-1)
        out = torch.addcmul(weights @ around(values).mT, factor, total)
    out = grouped(out).flatten(2, 3)[:, :, :n]
    # In the order of the projections, so that heads are joined without a copy.
    total = out[..., -1:].clamp_min(torch.finfo(q.dtype).tiny)
    out = (out[..., :-1] / total).transpose(1, 2).contiguous()
    return out.transpose(1, 2)


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
    window
        Tokens at most so far from a query are compared exactly; 0 for none.
    exact_length
        In sequences of at most so many tokens all heads attend by softmax; not in
        exported graphs.

    Attributes
    ----------
    particles : torch.nn.Parameter
        Positions `(num_heads, n_features, 2 head_dim + 2)`, drawn or zero until
        they are learned; they receive no gradient unless unfrozen.
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
        window: int = 0,
        exact_length: int = 0,
    ) -> None:
        super().__init__()
        check_count("n_features", n_features)
        self.window = check_count("window", window, at_least=0)
        self.exact_length = check_count("exact_length", exact_length, at_least=0)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.map_name = feature_map
        self.feature_map = as_positive_map(feature_map)
        check_places(exact_heads, num_heads)
        self.exact_heads = tuple(sorted(set(map(int, exact_heads))))
        learned = set(range(num_heads)) - set(self.exact_heads)
        self.learned_heads = tuple(sorted(learned))
        rows = torch.zeros(num_heads, n_features, 2 * head_dim + 2)
        self.particles = nn.Parameter(rows, requires_grad=False)
        self.register_buffer("tilt", torch.zeros(num_heads, head_dim))

    @torch.no_grad()
    def draw(self, *, generator: torch.Generator | None = None) -> "LinearisedHeads":
        """Draw particles, the same for queries and keys.

        Parameters
        ----------
        generator
            None draws from torch's own, as every torch module does.

        Returns
        -------
        LinearisedHeads
            The module itself.
        """
        size = (*self.particles.shape[:2], self.head_dim)
        rows = drawn(size, self.feature_map, generator)
        return self.fill(untilted(rows, self.feature_map))

    @torch.no_grad()
    def fill(self, learned: Any) -> "LinearisedHeads":
        """Take over positions and tilts.

        Parameters
        ----------
        learned
            What has `positions` and `tilt`.

        Returns
        -------
        LinearisedHeads
            The module itself.
        """
        self.particles.copy_(learned.positions)
        self.tilt.copy_(learned.tilt)
        return self

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
        every = self._head_particles()
        if not self.exact_heads or (
            every.exact_length and k.shape[2] <= every.exact_length
        ):
            return every.attend(q, k, v, key_mask)
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

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[int]
    ) -> Tensor | None:
        """Attend inside sequences that follow one another, without gradients.

        Parameters
        ----------
        q, k, v
            Shape `(tokens, heads, dim)`.
        bounds
            Where sequences begin and end, `[0, n_1, n_1 + n_2, ..., tokens]`.

        Returns
        -------
        Tensor or None
            Shape `(tokens, heads, dim)`; None where no compiled loop does it.
        """
        if self.exact_heads:
            return None
        return self._head_particles().attend_compiled(q, k, v, None, bounds)

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
        particles, tilt = self.particles[heads], self.tilt[heads]
        # Which of two ways a graph takes would be that of its example.
        exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
        reach = self.window, 0 if exporting() else self.exact_length
        return HeadParticles(particles, tilt, self.feature_map, *reach)

    def extra_repr(self) -> str:
        """Show the settings."""
        heads, features, _ = self.particles.shape
        shown = f"heads={heads}, n_features={features}, feature_map={self.map_name!r}"
        for name in ("window", "exact_length"):
            shown += f", {name}={getattr(self, name)}" if getattr(self, name) else ""
        return shown + (f", exact_heads={self.exact_heads}" if self.exact_heads else "")


def check_places(numbers: Sequence[Any], count: int, what: str = "heads") -> None:
    """Say which of the numbers in `keep_exact` there is not."""
    for number in numbers:
        if check_count("keep_exact", number, at_least=0) >= count:
            raise ParameterError(
                f"`keep_exact` must name {what} from 0 to {count - 1}; got {number}."
            )


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
    **options
        `n_features`, `feature_map`, `exact_heads`, `window` and `exact_length` of
        `LinearisedHeads`.

    Examples
    --------
    >>> layer = LinearisedAttention(nn.MultiheadAttention(8, 2), n_features=4)
    >>> x = torch.ones(3, 1, 8)
    >>> layer(x, x, x, need_weights=False)[0].shape
    torch.Size([3, 1, 8])
    """

    def __init__(self, attention: nn.MultiheadAttention, **options: Any) -> None:
        size = attention.embed_dim, attention.num_heads
        super().__init__(*size, **options_of(attention))
        self.adopt(attention)
        self.coulomb = LinearisedHeads(self.num_heads, self.head_dim, **options)
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
