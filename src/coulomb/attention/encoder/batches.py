"""Sequences that follow one another without padding, and the twin that pads them."""

from typing import NamedTuple

import torch
from torch import Tensor

from coulomb.attention.encoder.encoder import KernelEncoder

IGNORED = -100  # the label of a token that has none, as in torch's cross-entropy


class TokenBatch(NamedTuple):
    """A few sequences, one after another.

    Parameters
    ----------
    token_ids
        Whole numbers, shape `(tokens,)`.
    cu_seqlens
        Where sequences begin and end, `[0, n_1, n_1 + n_2, ..., tokens]`.
    labels
        Classes, shape `(sequences,)`, or `(tokens,)` for tagging with `IGNORED` where a
        token has no label; None where nothing is known.
    parts
        Which text of a pair each token is from, 0 or 1; None if there are no pairs.

    Examples
    --------
    >>> batch = TokenBatch(torch.tensor([5, 7, 9]), torch.tensor([0, 2, 3]))
    >>> batch.n_sequences
    2
    """

    token_ids: Tensor
    cu_seqlens: Tensor
    labels: Tensor | None = None
    parts: Tensor | None = None

    @property
    def n_sequences(self) -> int:
        """How many sequences there are.

        Returns
        -------
        int
            At least zero.
        """
        return len(self.cu_seqlens) - 1


def pad(batch: TokenBatch, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Write one sequence per row.

    Examples
    --------
    >>> pad(TokenBatch(torch.tensor([5, 7, 9]), torch.tensor([0, 2, 3])))[0]
    tensor([[5, 7],
            [9, 0]])
    """
    lengths = batch.cu_seqlens.diff()
    if length is None:
        length = int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(length, device=lengths.device) < lengths.unsqueeze(1)
    padded = batch.token_ids.new_zeros(mask.shape)
    padded[mask] = batch.token_ids
    return padded, mask


def padded_logits(
    model: KernelEncoder, batch: TokenBatch, length: int | None = None
) -> Tensor:
    """Evaluate the encoder the plain way: pad, and call it.

    Parameters
    ----------
    model
        The encoder, in training or evaluation mode.
    batch
        The sequences.
    length
        Columns of the padded batch; None for the longest sequence.

    Returns
    -------
    Tensor
        Logits, `(sequences, classes)`, or `(tokens, classes)` from a token head.
    """
    token_ids, mask = pad(batch, length)
    parts = None
    if batch.parts is not None:
        parts = pad(batch._replace(token_ids=batch.parts), length)[0]
    logits: Tensor = model(token_ids, key_mask=mask, parts=parts)
    return logits if model.settings.head == "sequence" else logits[mask]
