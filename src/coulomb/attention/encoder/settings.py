"""The settings of the encoder, checked once."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import ParameterError, ParameterTypeError, unknown_name

Weights = Callable[[Tensor, Tensor], Tensor]

_POOLINGS = ("cls", "mean")
_POSITIONS = ("learned", "parts", "none")
_NORMS = ("post", "pre")
_HEADS = ("sequence", "token")


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
        for name in ("vocab_size", "n_classes", "n_layers", "width", "n_heads"):
            check_count(name, getattr(self, name))
        for name in ("ffn_width", "max_length"):
            check_count(name, getattr(self, name))
        check_real("dropout", self.dropout, at_least=0, below=1)
        for name, known in (
            ("positions", _POSITIONS),
            ("norm", _NORMS),
            ("head", _HEADS),
        ):
            if getattr(self, name) not in known:
                raise unknown_name(name, getattr(self, name), known)
        self._check_pooling()

    def _check_pooling(self) -> None:
        pooling = self.pooling
        if isinstance(pooling, str):
            if pooling not in _POOLINGS:
                raise unknown_name("pooling", pooling, _POOLINGS)
            return
        if isinstance(pooling, tuple | list | Tensor):
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
