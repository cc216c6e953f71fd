"""The layer that stands where softmax was: learned heads, and heads kept exact."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support.checks import check_count
from coulomb._support.errors import ParameterError
from coulomb.attention import AbstractAttention
from coulomb.features import AbstractFeatureMap, feature_maps
from coulomb.linearise.pairs import paired_attention, paired_weights

__all__ = ["LinearisedAttention", "LinearisedHeads", "as_positive_map"]


def as_positive_map(name: str) -> AbstractFeatureMap:
    """Build a feature map that can stand in attention without phases.

    Examples
    --------
    >>> as_positive_map("softmaxfeat")
    SoftmaxFeatures(temperature=1.0)
    """
    feature_map = feature_maps.build(name)
    if not feature_map.positive or feature_map.needs_phases:
        known = [n for n in feature_maps if _fits(feature_maps.build(n))]
        raise ParameterError(
            "`feature_map` must be positive and need no phases; got "
            f"{name!r}. Use one of {', '.join(sorted(known))}."
        )
    return feature_map


def _fits(feature_map: AbstractFeatureMap) -> bool:
    return feature_map.positive and not feature_map.needs_phases


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
        feature_map: str = "softmaxfeat",
        exact_heads: Sequence[int] = (),
    ) -> None:
        super().__init__()
        check_count("n_features", n_features)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.map_name = feature_map
        self.feature_map = as_positive_map(feature_map)
        self.exact_heads = check_heads(exact_heads, num_heads)
        self.learned_heads = tuple(
            head for head in range(num_heads) if head not in self.exact_heads
        )
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
            return paired_attention(
                q, k, v, self.particles, self.tilt, self.feature_map, key_mask
            )
        out = torch.empty_like(v[:, :, :1]).expand_as(q).clone()
        learned, exact = list(self.learned_heads), list(self.exact_heads)
        mask = None if key_mask is None else key_mask[:, None, None, :]
        if bias is not None:
            low = torch.finfo(bias.dtype).min
            added = bias[:, exact]
            mask = added if mask is None else added.masked_fill(~mask, low)
        out[:, exact] = functional.scaled_dot_product_attention(
            q[:, exact], k[:, exact], v[:, exact], attn_mask=mask
        )
        if learned:
            out[:, learned] = paired_attention(
                q[:, learned],
                k[:, learned],
                v[:, learned],
                self.particles[learned],
                self.tilt[learned],
                self.feature_map,
                key_mask,
            )
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
        rows = paired_weights(
            q, k, self.particles, self.tilt, self.feature_map, key_mask
        )
        if not self.exact_heads:
            return rows
        exact = torch.zeros(self.num_heads, dtype=torch.bool, device=rows.device)
        exact[list(self.exact_heads)] = True
        softmax = softmax_rows(q, k, key_mask)
        return torch.where(exact[:, None, None], softmax, rows)

    def extra_repr(self) -> str:
        """Show the settings."""
        heads, features, _ = self.particles.shape
        shown = f"heads={heads}, n_features={features}, feature_map={self.map_name!r}"
        return shown + (f", exact_heads={self.exact_heads}" if self.exact_heads else "")


def check_heads(heads: Sequence[int], num_heads: int) -> tuple[int, ...]:
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
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if key_mask is not None:
        low = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~key_mask[:, None, None, :], low)
    return scores.softmax(dim=-1)


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
        feature_map: str = "softmaxfeat",
        exact_heads: Sequence[int] = (),
    ) -> None:
        super().__init__(
            attention.embed_dim,
            attention.num_heads,
            dropout=attention.dropout,
            bias=attention.in_proj_bias is not None,
            kdim=attention.kdim,
            vdim=attention.vdim,
            batch_first=attention.batch_first,
            device=attention.out_proj.weight.device,
            dtype=attention.out_proj.weight.dtype,
        )
        self.out_proj = attention.out_proj
        for name, parameter in attention.named_parameters(recurse=False):
            setattr(self, name, parameter)
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
