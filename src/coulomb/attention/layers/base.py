"""What every attention layer shares: torch's call signature."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from coulomb._support.errors import ParameterError
from coulomb._support.registry import Registry
from coulomb.attention.layers.masks import causal_from_mask, check_inputs, real_keys
from coulomb.attention.layers.projections import Projections

if TYPE_CHECKING:
    from coulomb.attention.encoder.dropout import Dropout, LayerDropout
    from coulomb.attention.encoder.layout import Layout


@contextmanager
def in_mode(model: nn.Module, *, train: bool) -> Iterator[None]:
    """Switch the mode in the block, and every module back to its own after it."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(train)
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class AbstractAttention(Projections, ABC):
    """A layer that is called like `torch.nn.MultiheadAttention`.

    Parameters
    ----------
    embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first, device, dtype
        As in `torch.nn.MultiheadAttention`.
    qkv
        `"learned"` projects queries, keys and values; `"shared"` only values.
    causal
        Whether every call is causal, whatever its `is_causal`.
    """

    # torch's encoder layers bypass `forward` in evaluation if this is True.
    _qkv_same_embed_dim = False
    bias_k = None
    bias_v = None
    add_zero_attn = False

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        """Attend in every head.

        Parameters
        ----------
        q, k, v
            Shapes `(batch, heads, n, head_dim)` and `(batch, heads, m, head_dim)`.
        key_mask
            Shape `(batch, m)`, True = real token; None if all are.
        causal
            Whether query i sees the keys j <= i only.

        Returns
        -------
        Tensor
            Shape `(batch, heads, n, head_dim)`.
        """

    @abstractmethod
    def weights(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        """Write out the matrix that `attend` multiplies the values with.

        Parameters
        ----------
        q, k, key_mask, causal
            As in `attend`.

        Returns
        -------
        Tensor
            Shape `(batch, heads, n, m)`.
        """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Packed forms are not inherited: what a user's class overrides is what runs.
        for name in ("attend_packed", "attend_dropped", "attend_compiled"):
            if name not in vars(cls):
                setattr(cls, name, vars(AbstractAttention)[name])

    def attend_packed(
        self, x: Tensor, layout: "Layout", dropout: "LayerDropout"
    ) -> Tensor:
        """Attend inside each of several sequences that follow one another.

        From states to what the heads give, side by side, both `(tokens, embed_dim)`.
        Here by padding them; a class may define a way without.
        """
        padded, key_mask = layout.pad(torch.stack(self.project_packed(x), dim=1))
        q, k, v = padded.permute(2, 0, 3, 1, 4)  # (batch, heads, longest, head_dim)
        dropped = dropout.of_heads(self.dropout)
        if dropped is not None:
            out = self.attend_dropped(q, k, v, key_mask, dropped)
        else:
            with in_mode(self, train=dropout.seed is not None):
                out = self.attend(q, k, v, key_mask, causal=self.causal)
        return layout.unpad(out.transpose(1, 2)).flatten(1)

    def attend_dropped(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, dropout: "Dropout"
    ) -> Tensor:
        """Attend with dropout; here with torch's, by its own generator."""
        with in_mode(self, train=True):
            return self.attend(q, k, v, key_mask, causal=self.causal)

    def attend_compiled(
        self, x: Tensor, layout: "Layout", dropout: "LayerDropout"
    ) -> Tensor | None:
        """Do the same as `attend_packed` in compiled loops; None where there are none.

        Called for float32 on the CPU, with numba there.
        """
        return None

    def project_packed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project packed states, `(tokens, heads, head_dim)` each."""
        rows = x.unsqueeze(0)
        q, k, v = self.project(rows, rows, rows)
        q, k, v = (part.squeeze(0).transpose(0, 1) for part in (q, k, v))
        return q, k, v

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, with the arguments of `torch.nn.MultiheadAttention.forward`.

        Parameters
        ----------
        query, key, value
            Shapes `(n, batch, dim)`, with `batch_first` `(batch, n, dim)`, or `(n,
            dim)`.
        key_padding_mask
            Shape `(batch, m)`, **True = padding**; or 0 for a token and -inf for
            padding.
        need_weights
            Whether to write out the attention matrix, at a cost of n times m. True is
            torch's default; say False wherever you do not look at it.
        attn_mask
            None or the causal mask: no other can be expressed without the matrix.
        average_attn_weights
            Whether the matrix is averaged over heads.
        is_causal
            Whether query i sees the keys j <= i only; `attn_mask` is then not read.

        Returns
        -------
        tuple
            The output, shaped like `query`; and None, or the matrix `(batch, n, m)`,
            `(batch, heads, n, m)` if not averaged, without the batch if there is none.
        """
        if query.is_nested:
            return self._forward_nested(query, key, value, need_weights, is_causal)
        batched = check_inputs(query, key, value)
        same = query is key, key is value
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        # `project` takes one product for the three of them if they are one tensor.
        key = query if same[0] else key
        value = key if same[1] else value
        causal = self.causal or is_causal
        causal = causal or causal_from_mask(attn_mask, query.shape[1], key.shape[1])
        key_mask = real_keys(key_padding_mask, key, batched=batched)
        q, k, v = self.project(query, key, value)
        out = self.join(self.attend(q, k, v, key_mask, causal=causal))
        weights = None
        if need_weights:
            weights = self.weights(q, k, key_mask, causal=causal)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, weights: bool, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        # torch's encoder packs padded batches like this in evaluation, if it was built
        # around another attention layer.
        if query is not key or key is not value or weights:
            raise ParameterError(
                "`query` must be the same nested tensor as `key` and `value`, with "
                "need_weights=False; pad it with `to_padded_tensor` instead."
            )
        lengths = [part.shape[0] for part in query.unbind()]
        padded = query.to_padded_tensor(0.0)
        steps = torch.arange(padded.shape[1], device=padded.device)
        key_mask = steps < torch.tensor(lengths, device=padded.device).unsqueeze(1)
        q, k, v = self.project(padded, padded, padded)
        heads = self.attend(q, k, v, key_mask, causal=self.causal or causal)
        rows = zip(self.join(heads), lengths, strict=True)
        return torch.nested.as_nested_tensor([row[:n] for row, n in rows]), None

    def extra_repr(self) -> str:
        """Show the settings that differ from torch's."""
        shown = f"{self.embed_dim}, num_heads={self.num_heads}"
        for name, usual in (("qkv", "learned"), ("causal", False), ("dropout", 0.0)):
            if getattr(self, name) != usual:
                shown += f", {name}={getattr(self, name)!r}"
        return shown


attention_layers: Registry[AbstractAttention] = Registry("attention")
