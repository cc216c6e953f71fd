"""The layers linear attention is compared with, called in the same way."""

import math
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb import features
from coulomb._support.checks import check_count, make_generator
from coulomb._support.errors import ParameterError
from coulomb.attention.layers.base import (
    AbstractAttention,
    LayerOptions,
    Seed,
    as_generator,
    attention_layers,
)
from coulomb.attention.layers.kernel import AbstractFeatureAttention
from coulomb.attention.ops.checks import must_be_traceable
from coulomb.dynamics.initial import Orthogonal
from coulomb.features import AbstractFeatureMap, Particles

if TYPE_CHECKING:
    from coulomb.attention.encoder.packed import Dropout

__all__ = ["Linformer", "Performer", "SoftmaxAttention"]


@attention_layers.add("softmax")
class SoftmaxAttention(AbstractAttention):
    """Softmax attention, `softmax(q k' / sqrt(head_dim)) v`, by torch's fused function.

    The numbers of `torch.nn.MultiheadAttention`, except that a query whose keys are all
    padding gets zero, not NaN.

    Parameters
    ----------
    embed_dim, num_heads
        Width, and the number of heads it is split into.
    generator
        A generator on the CPU or a seed; None draws from torch's own.
    **options
        `dropout`, `bias`, `kdim`, `vdim`, `batch_first`, `device`, `dtype` as in torch;
        `qkv`, `causal` as in `KernelAttention`.

    Examples
    --------
    >>> layer = SoftmaxAttention(8, 2, batch_first=True, generator=0)
    >>> x = torch.ones(1, 2, 8)
    >>> layer(x, x, x)[1]
    tensor([[[0.5000, 0.5000],
             [0.5000, 0.5000]]], grad_fn=...)
    """

    compiled_core = "attend_softmax"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        generator: Seed = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.reset_parameters(generator=generator)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        attention = functional.scaled_dot_product_attention
        if key_mask is None:
            return attention(q, k, v, dropout_p=dropout, is_causal=causal)
        seen, empty = _seen(q, key_mask, causal)
        out = attention(q, k, v, attn_mask=seen | empty, dropout_p=dropout)
        return out.masked_fill(empty, 0)

    def attend_dropped(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, dropout: "Dropout"
    ) -> Tensor:
        return dropout.drop(self.weights(q, k, key_mask, causal=self.causal)) @ v

    def weights(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        logits = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        if key_mask is None:
            key_mask = torch.ones_like(k[:, 0, :, 0], dtype=torch.bool)
        seen, empty = _seen(q, key_mask, causal)
        hidden = logits.masked_fill(~(seen | empty), -torch.inf)
        return hidden.softmax(dim=-1).masked_fill(empty, 0)


def _seen(q: Tensor, key_mask: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    # What each query sees, and which see nothing: these see everything instead, since
    # the softmax of an empty row has no gradient, and are set to zero afterwards.
    seen = key_mask[:, None, None, :].expand(-1, -1, q.shape[2], -1)
    if causal:
        past = torch.ones(seen.shape[2:], dtype=torch.bool, device=q.device).tril()
        seen = seen & past  # (batch, 1, n, m)
    return seen, ~seen.any(dim=-1, keepdim=True)


@attention_layers.add("performer")
class Performer(AbstractFeatureAttention):
    """FAVOR+: softmax attention estimated with orthogonal positive features.

    The features are drawn anew every `redraw_every` training steps and never in
    evaluation. Draw number r comes from the stream `(seed, r)`, and seed, r and the
    steps are in the state dict: a resumed run draws what an uninterrupted one does.
    Compiled and exported models do not redraw by themselves; call `redraw`.

    Parameters
    ----------
    embed_dim, num_heads
        Width, and the number of heads it is split into.
    n_features
        Features of each head.
    redraw_every
        Forward passes in training between two draws; 0 for never.
    generator
        A generator on the CPU or a seed; None draws from torch's own.
    **options
        As in `SoftmaxAttention`; dropout acts on the output of the heads.

    Examples
    --------
    >>> layer = Performer(8, 2, n_features=16, redraw_every=1, generator=0)
    >>> x, first = torch.ones(3, 8), layer.particles
    >>> _ = layer(x, x, x)
    >>> torch.equal(layer.particles, first)
    True
    >>> _ = layer(x, x, x)
    >>> torch.equal(layer.particles, first)
    False
    """

    particles: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        n_features: int = 256,
        redraw_every: int = 1000,
        generator: Seed = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.n_features = check_count("n_features", n_features)
        self.redraw_every = check_count("redraw_every", redraw_every, at_least=0)
        self._seed = self._draws = self._steps = 0
        empty = self.new_empty(num_heads, n_features, self.head_dim)
        self.register_buffer("particles", empty)
        self.reset_parameters(generator=generator)

    def reset_parameters(self, *, generator: Seed = None) -> None:
        source = as_generator(generator)
        super().reset_parameters(generator=source)
        seed = torch.randint(2**62, (1,), generator=source, device="cpu")
        self._seed, self._draws = int(seed), 0
        self.redraw()

    def redraw(self) -> None:
        """Draw the features of every head anew, from the next of the layer's streams.

        Passes that await their backward keep the features they had.
        """
        source = make_generator(self._seed, self._draws)
        size = self.n_features, self.head_dim
        heads = [Orthogonal().draw(*size, generator=source) for _ in self.particles]
        self.particles = torch.stack(heads).to(self.particles)
        self._draws, self._steps = self._draws + 1, 0

    def count_pass(self) -> None:
        """Count a forward pass in training, and draw the features anew if they are due.

        For code that uses the particles without calling the layer. In evaluation, or if
        the features are never redrawn, nothing happens.

        Examples
        --------
        >>> layer = Performer(8, 2, n_features=16, redraw_every=1, generator=0)
        >>> first = layer.particles
        >>> layer.count_pass()
        >>> torch.equal(layer.particles, first)
        True
        >>> layer.count_pass()
        >>> torch.equal(layer.particles, first)
        False
        """
        if not (self.training and self.redraw_every):
            return
        if self._steps >= self.redraw_every:
            self.redraw()
        self._steps += 1

    def get_extra_state(self) -> Tensor:
        """Give what the next draws depend on, for the state dict.

        Returns
        -------
        Tensor
            The seed, the number of draws and the steps since the last.
        """
        return torch.tensor([self._seed, self._draws, self._steps], device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Take up the draws where another layer left them.

        Parameters
        ----------
        state
            What `get_extra_state` gave.
        """
        self._seed, self._draws, self._steps = state.tolist()

    def kernel(self) -> tuple[Particles, AbstractFeatureMap]:
        kind = features.as_feature_map(features.SOFTMAX_KERNEL_MAP)
        return Particles(self.particles), kind


@attention_layers.add("linformer")
class Linformer(AbstractAttention):
    """Softmax attention to `rank` learned mixtures of keys, `softmax(q (E k)') F v`.

    Padding is multiplied with zero before it is mixed. Mixtures of all positions cannot
    be causal. Rows of the attention matrix, `softmax(q (E k)') F`, need not sum to one.

    Parameters
    ----------
    embed_dim, num_heads
        Width, and the number of heads it is split into.
    max_length
        The longest sequence of keys.
    rank
        The number of mixtures.
    generator
        A generator on the CPU or a seed; None draws from torch's own.
    **options
        As in `SoftmaxAttention`.

    Examples
    --------
    >>> layer = Linformer(8, 2, max_length=16, rank=4, generator=0)
    >>> x = torch.ones(3, 8)
    >>> layer(x, x, x)[1].shape
    torch.Size([3, 3])
    """

    compiled_core = "attend_mixtures"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        max_length: int = 512,
        rank: int = 64,
        generator: Seed = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.max_length = check_count("max_length", max_length)
        self.rank = check_count("rank", rank)
        self.key_mixture = nn.Parameter(self.new_empty(rank, max_length))
        self.value_mixture = nn.Parameter(self.new_empty(rank, max_length))
        self.reset_parameters(generator=generator)

    def reset_parameters(self, *, generator: Seed = None) -> None:
        source = as_generator(generator)
        super().reset_parameters(generator=source)
        for mixture in (self.key_mixture, self.value_mixture):
            drawn = torch.randn(mixture.shape, generator=source, device="cpu")
            with torch.no_grad():
                mixture.copy_(drawn / math.sqrt(self.rank))

    def mixtures(
        self, k: Tensor, key_mask: Tensor | None, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Give the mixtures for some keys, `E` and `F` of `softmax(q (E k)') F v`.

        Parameters
        ----------
        k
            Keys of the heads, `(batch, heads, m, head_dim)`.
        key_mask
            True for real tokens, `(batch, m)`; None if all are.
        causal
            Must be False: mixtures of all positions see the future.

        Returns
        -------
        tuple of Tensor
            Each `(rank, m)`, or `(batch, 1, rank, m)` with a mask.

        Examples
        --------
        >>> layer = Linformer(8, 2, max_length=16, rank=4, generator=0)
        >>> k, key_mask = torch.ones(1, 2, 3, 4), torch.tensor([[True, True, False]])
        >>> keys, values = layer.mixtures(k, key_mask, causal=False)
        >>> keys.shape, bool(keys[..., 2].any())
        (torch.Size([1, 1, 4, 3]), False)
        """
        length = k.shape[2]
        if causal:
            raise ParameterError(
                "`is_causal` must be False for Linformer, which mixes all positions; "
                "got True. Use KernelAttention, Performer or SoftmaxAttention."
            )
        if not must_be_traceable(k) and length > self.max_length:
            raise ParameterError(
                f"`key` must have at most max_length = {self.max_length} tokens; got "
                f"{length}."
            )
        mixtures = self.key_mixture[:, :length], self.value_mixture[:, :length]
        if key_mask is None:
            return mixtures  # (rank, m)
        first, second = (x * key_mask[:, None, None, :] for x in mixtures)
        return first, second  # (batch, 1, rank, m)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        keys, values = self.mixtures(k, key_mask, causal=causal)
        dropout = self.dropout if self.training else 0.0
        return functional.scaled_dot_product_attention(
            q, keys @ k, values @ v, dropout_p=dropout
        )

    def attend_dropped(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, dropout: "Dropout"
    ) -> Tensor:
        # It drops what its mixtures receive, as torch's function does.
        keys, values = self.mixtures(k, key_mask, causal=self.causal)
        return dropout.drop(self._shares(q, keys @ k)) @ (values @ v)

    def _shares(self, q: Tensor, keys: Tensor) -> Tensor:
        logits = q @ keys.transpose(-1, -2) / math.sqrt(self.head_dim)
        return logits.softmax(dim=-1)

    def weights(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        keys, values = self.mixtures(k, key_mask, causal=causal)
        return self._shares(q, keys @ k) @ values
