"""The paper's encoder. It receives the attention layer and knows no variant of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from coulomb._support.checks import check_count, check_member, check_memory, check_real
from coulomb._support.errors import ParameterError, ParameterTypeError
from coulomb.attention.layers.base import Seed, as_generator, make_linear
from coulomb.attention.ops.checks import check_mask, must_be_traceable

__all__ = ["AttentionFactory", "EncoderLayer", "EncoderSettings", "KernelEncoder"]

# Of embeddings, which a layer norm follows. Unit variance without one learns badly.
_EMBEDDING_STD = 0.02
_N_PARTS = 2  # texts of a pair
# Places of a layer that drop after attention.
BRANCH, INNER, OUTER = range(2, 5)

Weights = Callable[[Tensor, Tensor], Tensor]
# Builds the attention of one layer, which is called like torch.nn.MultiheadAttention:
# `factory(embed_dim, num_heads, batch_first=True, generator=...)`.
AttentionFactory = Callable[..., nn.Module]

_CHOICES = {
    "positions": ("learned", "parts", "none"),
    "norm": ("post", "pre"),
    "head": ("sequence", "token"),
}
_COUNTS = "vocab_size n_classes n_layers width n_heads ffn_width max_length"


@dataclass(frozen=True)
class EncoderSettings:
    """The shape of an encoder; the defaults are the paper's.

    Parameters
    ----------
    vocab_size
        Number of token ids.
    n_classes
        Numbers that the head gives for a sequence or for each token.
    n_layers, width, n_heads, ffn_width
        Layers, width of a token's state, heads, width inside the feed-forward network.
    dropout
        On embeddings, on both branches of each layer, and inside the feed-forward
        network. Attention has a dropout of its own.
    max_length
        The longest sequence; it matters only with learned positions.
    positions
        `"learned"`; `"parts"` for a model that sees which text of a pair a token is
        from, and not the order; or `"none"`.
    norm
        `"post"` normalises after each branch is added, `"pre"` before it is computed.
    pooling
        `"mean"` over real tokens, `"cls"` for the first token, weights of the positions
        (a point of the simplex, renormalised over real tokens), or a function of
        `(states, key_mask)` that gives weights `(batch, length)`.
    head
        `"sequence"` or `"token"`.

    Examples
    --------
    >>> EncoderSettings(vocab_size=100, n_classes=2).width
    128
    >>> EncoderSettings(100, 2, pooling=torch.tensor([0.5, 0.5])).pooling
    (0.5, 0.5)
    """

    vocab_size: int
    n_classes: int
    n_layers: int = 2
    width: int = 128
    n_heads: int = 2
    ffn_width: int = 256
    dropout: float = 0.1
    max_length: int = 128
    positions: str = "learned"
    norm: str = "post"
    pooling: str | tuple[float, ...] | Tensor | Weights = "mean"
    head: str = "sequence"

    def __post_init__(self) -> None:
        for name in _COUNTS.split():
            most = {"at_most": 1000} if name == "n_layers" else {}
            check_count(name, getattr(self, name), **most)
        layer = 4 * self.width + 2 * self.ffn_width
        rows = self.vocab_size + self.max_length + self.n_layers * layer
        check_memory("width and the other sizes", 4 * rows * self.width)
        check_real("dropout", self.dropout, at_least=0, below=1)
        for name, known in _CHOICES.items():
            check_member(name, getattr(self, name), known)
        self._check_pooling()

    def _check_pooling(self) -> None:
        pooling = self.pooling
        if isinstance(pooling, str):
            check_member("pooling", pooling, ("cls", "mean"))
        elif isinstance(pooling, tuple | list | Tensor):
            weights = torch.as_tensor(pooling, dtype=torch.float64)
            total = weights.sum().item()
            if weights.dim() != 1 or (weights < 0).any() or abs(total - 1) > 1e-6:
                raise ParameterError(
                    "`pooling` must be a vector of non-negative weights that sum to "
                    f"one; got shape {tuple(weights.shape)} and sum {total:g}. Divide "
                    "them by their sum."
                )
            # Plain numbers, so that settings can be compared, hashed and written down.
            object.__setattr__(self, "pooling", tuple(weights.tolist()))
        elif not callable(pooling):
            raise ParameterTypeError(
                "`pooling` must be 'cls', 'mean', weights or a function of (states, "
                f"key_mask); got {pooling!r}."
            )


class EncoderLayer(nn.Module):
    """Attention and a feed-forward network, each added to its input.

    `x + f(x)`, normalised afterwards (`"post"`) or inside f (`"pre"`).
    """

    def __init__(
        self,
        settings: EncoderSettings,
        attention: nn.Module,
        *,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        width, inner = settings.width, settings.ffn_width
        self.attention = attention
        self.attention_norm = nn.LayerNorm(width)
        self.widen = make_linear(width, inner, generator=generator)
        self.narrow = make_linear(inner, width, generator=generator)
        self.ffn_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(settings.dropout)
        self.pre_norm = settings.norm == "pre"

    def attention_input(self, x: Tensor) -> Tensor:
        """Give what attention sees of the states."""
        normed: Tensor = self.attention_norm(x) if self.pre_norm else x
        return normed

    def finish(
        self, x: Tensor, out: Tensor, drop: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        """Add the output of attention, and that of the feed-forward network.

        `drop` is dropout, a function of a tensor and the number of its place.
        """
        x = x + drop(out, BRANCH)
        x = x if self.pre_norm else self.attention_norm(x)
        inside = self.ffn_norm(x) if self.pre_norm else x
        inner = drop(functional.gelu(self.widen(inside)), INNER)
        x = x + drop(self.narrow(inner), OUTER)
        return x if self.pre_norm else self.ffn_norm(x)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Transform the states."""
        seen = self.attention_input(x)
        options = {"key_padding_mask": padding, "need_weights": False}
        out = self.attention(seen, seen, seen, **options)[0]
        return self.finish(x, out, lambda part, _: self.dropout(part))


class KernelEncoder(nn.Module):
    """Tokens to logits: embeddings, layers around any attention, pooling, a head.

    Parameters
    ----------
    settings
        The shape.
    attention
        Builds the attention of each layer: `KernelAttention`, a `functools.partial` of
        it with other options, or anything that is called alike.
    generator
        A generator on the CPU or a seed; None draws from torch's own.

    Examples
    --------
    >>> from functools import partial
    >>> from coulomb.attention.layers.kernel import KernelAttention
    >>> attention = partial(KernelAttention, qkv="shared", n_features=64)
    >>> model = KernelEncoder(EncoderSettings(100, 2), attention, generator=0)
    >>> tokens = torch.tensor([[5, 7, 9], [5, 8, 0]])
    >>> model(tokens, key_mask=tokens != 0).shape
    torch.Size([2, 2])
    """

    position_embedding: nn.Embedding | None
    pooling_weights: Tensor | None

    def __init__(
        self,
        settings: EncoderSettings,
        attention: AttentionFactory,
        *,
        generator: Seed = None,
    ) -> None:
        super().__init__()
        source = as_generator(generator)
        width = settings.width
        self.settings = settings
        self.token_embedding = _embedding(settings.vocab_size, width, source)
        places = {"learned": settings.max_length, "parts": _N_PARTS, "none": 0}
        rows = places[settings.positions]
        self.position_embedding = _embedding(rows, width, source) if rows else None
        self.embedding_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(settings.dropout)
        self.layers = nn.ModuleList(
            EncoderLayer(
                settings,
                attention(width, settings.n_heads, batch_first=True, generator=source),
                generator=source,
            )
            for _ in range(settings.n_layers)
        )
        last = settings.norm == "pre"
        self.final_norm = nn.LayerNorm(width) if last else nn.Identity()
        self.head = make_linear(width, settings.n_classes, generator=source)
        given = isinstance(settings.pooling, tuple)
        weights = torch.tensor(settings.pooling) if given else None
        self.register_buffer("pooling_weights", weights)

    def encode(
        self,
        token_ids: Tensor,
        key_mask: Tensor | None = None,
        parts: Tensor | None = None,
    ) -> Tensor:
        """Compute the states of the tokens.

        Parameters
        ----------
        token_ids
            Whole numbers, shape `(batch, length)`.
        key_mask
            Shape `(batch, length)`, True = real token; None if all are.
        parts
            For `positions="parts"`: 0 for tokens of the first text of a pair, 1 for
            those of the second, shape `(batch, length)`; None if there is one text.

        Returns
        -------
        Tensor
            Shape `(batch, length, width)`; rows of padding mean nothing.
        """
        check_ids("token_ids", token_ids, self.token_embedding, axes=2)
        check_mask(key_mask, token_ids.unsqueeze(1))
        x = self.token_embedding(token_ids)
        if self.position_embedding is not None and self.settings.positions == "parts":
            which = torch.zeros_like(token_ids) if parts is None else parts
            check_ids("parts", which, self.position_embedding, like=token_ids)
            x = x + self.position_embedding(which)
        elif self.position_embedding is not None:
            length = token_ids.shape[1]
            if not torch.compiler.is_compiling() and length > self.settings.max_length:
                raise ParameterError(
                    "`token_ids` must have at most max_length = "
                    f"{self.settings.max_length} columns; got {length}. Truncate them, "
                    "or set EncoderSettings(max_length=...)."
                )
            x = x + self.position_embedding.weight[:length]
        x = self.dropout(self.embedding_norm(x))
        padding = None if key_mask is None else ~key_mask
        for layer in self.layers:
            x = layer(x, padding)
        out: Tensor = self.final_norm(x)
        return out

    def pool(self, states: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Average states with weights from the simplex, `sum_t w_t x_t`.

        Parameters
        ----------
        states
            Shape `(batch, length, width)`.
        key_mask
            Shape `(batch, length)`, True = real token; None if all are.

        Returns
        -------
        Tensor
            Shape `(batch, width)`; zero for a sequence without real tokens.
        """
        pooling = self.settings.pooling
        if pooling == "cls":
            return states[:, 0]
        real = torch.ones_like(states[..., 0], dtype=torch.bool)
        real = real if key_mask is None else key_mask
        if callable(pooling):
            weights = pooling(states, real)
        elif self.pooling_weights is not None:
            weights = self.given_weights(states.shape[1]).to(states)
        else:
            weights = torch.ones_like(states[..., 0])
        weights = weights * real  # (batch, length)
        total = weights.sum(dim=1, keepdim=True)
        weights = weights / total.masked_fill(total == 0, 1)
        return (weights.unsqueeze(1) @ states).squeeze(1)

    def given_weights(self, length: int) -> Tensor:
        """Give the weights of the first positions, where settings have weights.

        Parameters
        ----------
        length
            How many positions.

        Returns
        -------
        Tensor
            Shape `(length,)`.
        """
        assert self.pooling_weights is not None
        known = len(self.pooling_weights)
        if not torch.compiler.is_compiling() and length > known:
            raise ParameterError(
                f"`pooling` must have a weight for each of {length} positions; got "
                f"{known}."
            )
        return self.pooling_weights[:length]

    def forward(
        self,
        token_ids: Tensor,
        key_mask: Tensor | None = None,
        parts: Tensor | None = None,
    ) -> Tensor:
        """Compute logits.

        Parameters
        ----------
        token_ids
            Whole numbers, shape `(batch, length)`.
        key_mask
            Shape `(batch, length)`, True = real token; None if all are.
        parts
            As in `encode`.

        Returns
        -------
        Tensor
            Shape `(batch, n_classes)`, or `(batch, length, n_classes)` from a token
            head.
        """
        states = self.encode(token_ids, key_mask, parts)
        if self.settings.head == "sequence":
            states = self.pool(states, key_mask)
        logits: Tensor = self.head(states)
        return logits


def check_ids(
    name: str,
    ids: Tensor,
    table: nn.Embedding,
    *,
    axes: int = 1,
    like: Tensor | None = None,
) -> None:
    """Refuse what are no whole numbers below the rows of a table, before it is read."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ParameterTypeError(
            f"`{name}` must be a tensor of int64 or int32; got {kind}."
        )
    wrong = ids.dim() != axes if like is None else ids.shape != like.shape
    if wrong:
        shape = "(batch, length)" if axes == 2 else "(tokens,)"
        shape = shape if like is None else f"{tuple(like.shape)}, as `token_ids`"
        raise ParameterError(
            f"`{name}` must have shape {shape}; got {tuple(ids.shape)}."
        )
    if must_be_traceable(ids) or not ids.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if not 0 <= low <= high < table.num_embeddings:
        raise ParameterError(
            f"`{name}` must hold numbers from 0 to {table.num_embeddings - 1}; got "
            f"numbers from {low} to {high}."
        )


def _embedding(n: int, width: int, generator: torch.Generator) -> nn.Embedding:
    drawn = torch.randn(n, width, generator=generator, device="cpu")
    place = torch.get_default_device()
    weight = (_EMBEDDING_STD * drawn).to(place, torch.get_default_dtype())
    return nn.Embedding(n, width, _weight=weight)
