"""The encoder on sequences without padding.

`packed_form` gives the encoder on one batch in parts: `TorchForm` with torch's own
operations, or its fast twin, `packed_compiled.CompiledForm`. Only attention knows where
sequences begin and end; everything else works on tokens.

Dropout has masks that are a function of seed, place and element: no state, no draws.
Element i at a place is dropped if the upper 16 bits of a hash of key and i are below
`round(65536 p)`; the key is itself a hash of seed and place. A step that is repeated,
on another day or after an interruption, drops the same elements.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.weak import WeakTensorKeyDictionary

from coulomb._support.checks import check_member
from coulomb.attention.encoder.encoder import EncoderLayer, KernelEncoder
from coulomb.attention.encoder.layout import Layout, TokenBatch, make_layout
from coulomb.attention.layers.base import AbstractAttention, PackedTokens, in_mode
from coulomb.kernels import available

_WORD = 0xFFFFFFFF
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B  # of the 32-bit mixer "lowbias32"
_LEVELS = 1 << 16

# Numbers of the places that drop: the embedding, and four in each layer, the first
# where attention drops and the others those of `EncoderLayer`.
EMBEDDING, PER_LAYER = 0, 4
ATTENDED = 1


class Dropout(NamedTuple):
    """What one place drops."""

    key: int
    threshold: int

    @property
    def scale(self) -> float:
        """The factor of what is kept, so that means stay as they are."""
        return _LEVELS / (_LEVELS - self.threshold)

    def drop(self, x: Tensor) -> Tensor:
        """Set elements to zero and scale the others."""
        return x * kept(self, tuple(x.shape)).to(x.device) * self.scale


def mix(word: int) -> int:
    """Hash a 32-bit number."""
    word = (word ^ (word >> 16)) * _FIRST & _WORD
    word = (word ^ (word >> 15)) * _SECOND & _WORD
    return word ^ (word >> 16)


def make_dropout(seed: int | None, place: int, rate: float) -> Dropout | None:
    """Choose what one place drops."""
    if seed is None or rate == 0:
        return None
    key = 0
    for word in (seed & _WORD, seed >> 32 & _WORD, seed >> 64 & _WORD, place):
        key = mix((key * 31 + word + 0x9E3779B9) & _WORD)
    return Dropout(key, min(round(rate * _LEVELS), _LEVELS - 1))


def kept(dropout: Dropout, shape: tuple[int, ...]) -> Tensor:
    """Say which elements a place keeps."""
    x = torch.arange(math.prod(shape)).add_(dropout.key).bitwise_and_(_WORD)
    x = (x ^ (x >> 16)).mul_(_FIRST).bitwise_and_(_WORD)
    x = (x ^ (x >> 15) ^ dropout.key).mul_(_SECOND).bitwise_and_(_WORD)
    return ((x ^ (x >> 16)) >> 16 >= dropout.threshold).view(shape)


class LayerDropout(NamedTuple):
    """What the places of one layer of an encoder drop: nothing without a seed."""

    seed: int | None = None
    layer: int = 0

    def at(self, rate: float, place: int = ATTENDED) -> Dropout | None:
        """Choose what a place of the layer drops."""
        return make_dropout(self.seed, PER_LAYER * self.layer + place, rate)

    def drop(self, x: Tensor, rate: float, place: int = ATTENDED) -> Tensor:
        """Drop at a place of the layer."""
        dropout = self.at(rate, place)
        return x if dropout is None else dropout.drop(x)


__all__ = ["PackedHeads", "feature_function", "packed_logits"]

Parameters = dict[str, Tensor]
FeatureFunction = Callable[[nn.Module, Parameters, Any], list[Tensor]]

# Gradients of embeddings that are all zero, by the table they are of.
_SPARE = WeakTensorKeyDictionary()


def packed_logits(
    model: KernelEncoder, batch: TokenBatch, *, dropout_seed: int | None = None
) -> Tensor:
    """Evaluate the encoder on tokens that follow one another, without padding.

    The value and the gradients of `padded_logits`, at a cost that knows no padding.
    Float32 on the CPU runs in compiled loops where numba is there; gradients can be
    taken once, not of gradients.

    Parameters
    ----------
    model
        The encoder, around any attention layer. Whether it is in training mode matters
        only to a Performer, which then draws its features anew when due.
    batch
        The sequences.
    dropout_seed
        A number that decides what dropout drops: the same number, the same elements,
        on every call. None drops nothing. Attention layers that are not of this package
        drop by torch's own generator.

    Returns
    -------
    Tensor
        Logits, `(sequences, classes)`, or `(tokens, classes)` from a token head.

    Examples
    --------
    >>> from coulomb.attention import EncoderSettings, KernelAttention
    >>> model = KernelEncoder(EncoderSettings(100, 2), KernelAttention, generator=0)
    >>> batch = TokenBatch(torch.tensor([5, 7, 9]), torch.tensor([0, 2, 3]))
    >>> packed_logits(model, batch).shape
    torch.Size([2, 2])
    """
    logits: Tensor = model.head(packed_states(model, batch, dropout_seed=dropout_seed))
    return logits


def packed_states(
    model: KernelEncoder, batch: TokenBatch, *, dropout_seed: int | None = None
) -> Tensor:
    """Give what the head sees: a vector for each sequence, or for each token."""
    form = packed_form(model, batch, dropout_seed)
    x = form.embed()
    for number in range(len(model.layers)):
        x = form.finish(number, x, form.attend(number, x))
    states: Tensor = model.final_norm(x)
    return form.pool(states) if model.settings.head == "sequence" else states


@dataclass(frozen=True)
class PackedHeads:
    """What Phase A looks at, without padding: `align(..., evaluate=PackedHeads())`.

    Batches are then `(TokenBatch, labels)`. Each attention layer shows what its heads
    give, pooled, instead of a padded array: one vector per sequence, with labels
    `(sequences,)`, or with `pool="none"` one per token, with labels `(1, tokens)`.

    Parameters
    ----------
    pool
        "mean" over the tokens of a sequence, "cls" for its first, or "none".

    Examples
    --------
    >>> from coulomb.attention import EncoderSettings, KernelAttention, align
    >>> model = KernelEncoder(EncoderSettings(100, 2), KernelAttention, generator=0)
    >>> batch = TokenBatch(torch.tensor([5, 7, 9]), torch.tensor([0, 2, 3]))
    >>> batches = [(batch, torch.tensor([0, 1]))]
    >>> result = align(
    ...     model, batches, held_out=None, evaluate=PackedHeads(), max_steps=1
    ... )
    >>> result.positions.shape
    torch.Size([2, 2, 256, 64])
    """

    pool: str = "mean"

    def __post_init__(self) -> None:
        feature_function("heads", self.pool)  # refuses a pool that there is not

    def __call__(
        self, model: nn.Module, parameters: Parameters, batch: Any
    ) -> list[Tensor]:
        """Evaluate the encoder with other parameters, up to its last attention."""
        return feature_function("heads", self.pool)(model, parameters, batch)


def feature_function(kind: str = "heads", pool: str = "mean") -> FeatureFunction:
    """Make the function `(model, parameters, batch)` that Phase A sees an encoder by.

    It evaluates the encoder with other parameters on a batch whose first argument is a
    `TokenBatch`, and gives a list of tensors. By `kind`:

    - "heads": for each layer what its heads give, side by side, `(sequences, width)`;
      without pooling `(1, tokens, width)`.
    - "weights": one tensor `(sequences, longest, layers * heads * longest)`, the
      attention of every layer and head.
    - "logits": one tensor `(sequences, classes)`, or `(1, tokens, classes)`.
    """
    check_member("pool", pool, ("mean", "cls", "none"))
    kinds: dict[str, Callable[[KernelEncoder, TokenBatch], list[Tensor]]] = {
        "heads": lambda model, batch: _head_outputs(model, batch, pool),
        "weights": _attention_weights,
        "logits": _logits,
    }
    check_member("kind", kind, kinds)

    def evaluate(model: nn.Module, parameters: Parameters, batch: Any) -> list[Tensor]:
        named = {f"model.{name}": value for name, value in parameters.items()}
        called = _Call(model, kinds[kind])
        found: list[Tensor] = functional_call(called, named, batch.arguments)
        return found

    return evaluate


class _Call(nn.Module):
    """A function of a module as a module, for `functional_call`."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *arguments: Any) -> Any:
        return self.function(self.model, *arguments)


def _head_outputs(model: KernelEncoder, batch: TokenBatch, pool: str) -> list[Tensor]:
    form = packed_form(model, batch)
    x = form.embed()
    heads = [form.attend(0, x)]
    for number in range(1, len(model.layers)):
        x = form.finish(number - 1, x, heads[-1])
        heads.append(form.attend(number, x))
    return [form.layout.pool(out, pool) for out in heads]


def _attention_weights(model: KernelEncoder, batch: TokenBatch) -> list[Tensor]:
    form = packed_form(model, batch)
    x = form.embed()
    weights = [form.weights(0, x)]
    for number in range(1, len(model.layers)):
        x = form.finish(number - 1, x, form.attend(number - 1, x))
        weights.append(form.weights(number, x))
    return [torch.cat(weights, dim=1).transpose(1, 2).flatten(2)]


def _logits(model: KernelEncoder, batch: TokenBatch) -> list[Tensor]:
    logits = packed_logits(model, batch)
    return [logits.unsqueeze(0) if model.settings.head == "token" else logits]


@dataclass(frozen=True, eq=False)
class AbstractForm(ABC):
    """The encoder on one packed batch, in parts."""

    model: KernelEncoder
    token_ids: Tensor
    layout: Layout
    dropout_seed: int | None = None
    compiled: ClassVar[bool] = False

    @abstractmethod
    def embed(self) -> Tensor:
        """Look tokens up, `(tokens, width)`."""

    @abstractmethod
    def finish(self, number: int, x: Tensor, out: Tensor) -> Tensor:
        """Do what a layer of the encoder does after attention."""

    @abstractmethod
    def weighted_sums(self, x: Tensor, weights: NDArray[np.float64]) -> Tensor:
        """Sum the tokens of each sequence with weights."""

    def attend(self, number: int, x: Tensor) -> Tensor:
        """Attend inside every sequence, up to the output projection."""
        layer = self.layer(number)
        x, attention = layer.attention_input(x), layer.attention
        if isinstance(attention, AbstractAttention):
            about = self.layout, self.dropout(number), self.compiled
            return attention.attend_packed(PackedTokens(x, *about))
        padded, mask = self.layout.pad(x)
        words = {"key_padding_mask": ~mask, "need_weights": False}
        with in_mode(attention, train=self.dropout_seed is not None):
            out: Tensor = attention(padded, padded, padded, **words)[0]
        return self.layout.unpad(out)

    def weights(self, number: int, x: Tensor) -> Tensor:
        """Give attention weights, `(sequences, heads, longest, longest)`."""
        layer = self.layer(number)
        attention = layer.attention
        assert isinstance(attention, AbstractAttention)
        padded, mask = self.layout.pad(layer.attention_input(x))
        q, k, _ = attention.project(padded, padded, padded)
        return attention.weights(q, k, mask, causal=attention.causal)

    def pool(self, x: Tensor) -> Tensor:
        """Average the states of each sequence with the weights of the encoder."""
        if callable(self.model.settings.pooling):
            return self.model.pool(*self.layout.pad(x))
        return self.weighted_sums(x, self.layout.pooling_weights(self.model))

    def dropout(self, number: int) -> LayerDropout:
        """Give what a layer drops."""
        return LayerDropout(self.dropout_seed, number)

    def layer(self, number: int) -> EncoderLayer:
        """Give a layer of the encoder."""
        layer = self.model.layers[number]
        assert isinstance(layer, EncoderLayer)
        return layer


class TorchForm(AbstractForm):
    """The encoder on packed tokens with torch's own operations."""

    def embed(self) -> Tensor:
        model = self.model
        x = model.token_embedding(self.token_ids)
        if model.position_embedding is not None:
            x = x + model.position_embedding(self.layout.embedded)
        x = model.embedding_norm(x)
        return self.dropout(0).drop(x, model.dropout.p, EMBEDDING)

    def finish(self, number: int, x: Tensor, out: Tensor) -> Tensor:
        layer, dropout = self.layer(number), self.dropout(number)
        rate = layer.dropout.p
        if isinstance(layer.attention, AbstractAttention):
            out = layer.attention.out_proj(out)
        return layer.finish(x, out, lambda x, place: dropout.drop(x, rate, place))

    def weighted_sums(self, x: Tensor, weights: NDArray[np.float64]) -> Tensor:
        return self.layout.sum(torch.from_numpy(weights).to(x).unsqueeze(1) * x)


def packed_form(
    model: KernelEncoder, batch: TokenBatch, dropout_seed: int | None = None
) -> AbstractForm:
    """Check a batch, and give the encoder on it in the fastest form there is."""
    layout = make_layout(model, batch)
    form = TorchForm(model, batch.token_ids, layout, dropout_seed)
    if not _can_be_compiled(form):
        return form
    # Only here: it imports numba.
    from coulomb.attention.encoder.packed_compiled import CompiledForm

    return CompiledForm(model, batch.token_ids, layout, dropout_seed)


def _can_be_compiled(form: TorchForm) -> bool:
    """Say whether the compiled loops know every part of the model."""
    model, ids = form.model, form.token_ids
    linears: list[nn.Module] = []
    norms: list[nn.Module] = [model.embedding_norm]
    for layer in map(form.layer, range(len(model.layers))):
        if not isinstance(layer.attention, AbstractAttention):
            return False
        linears += layer.attention.out_proj, layer.widen, layer.narrow
        norms += layer.attention_norm, layer.ffn_norm
    return (
        ids.dtype == torch.int64
        and ids.device.type == "cpu"
        and len(ids) > 0
        and _simple(model.token_embedding, nn.Embedding)
        and all(_simple(part, nn.LayerNorm) for part in norms)
        and all(_simple(part, nn.Linear) for part in linears)
        and available()
    )


def _simple(part: nn.Module, kind: type[nn.Module]) -> bool:
    """Say whether a part is torch's own, in float32 on the CPU, not one's own kind."""
    weight = getattr(part, "weight", None)
    return (
        type(part) is kind
        and isinstance(weight, Tensor)
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
    )


def recycle_gradient(table: Tensor, token_ids: Tensor) -> None:
    """Take the gradient of embeddings away, and keep it for the next backward pass.

    Only the rows of a batch are not zero. To clear these costs nothing; a new gradient
    of zeros for some ten thousand tokens costs a twentieth of a training step.
    """
    grad, table.grad = table.grad, None
    if grad is not None and not grad.is_sparse:
        _SPARE[table] = grad.index_fill_(0, token_ids, 0.0)


def spare_gradient(table: Tensor) -> Tensor | None:
    """Give the gradient that was kept, once."""
    found: Tensor | None = _SPARE.pop(table, None)  # type: ignore[no-untyped-call]
    return found
