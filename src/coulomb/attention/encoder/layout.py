"""Packed sequences: batches of them, where each begins, and the twin that pads."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coulomb._support.checks import sequence_bounds
from coulomb._support.errors import ParameterError
from coulomb.attention.encoder.encoder import KernelEncoder, check_ids
from coulomb.attention.ops.blocked import padding

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

    def take(self, rows: Tensor) -> "TokenBatch":
        """Take some of the sequences.

        Parameters
        ----------
        rows
            Their numbers.

        Returns
        -------
        TokenBatch
            With their labels and parts.

        Examples
        --------
        >>> batch = TokenBatch(torch.tensor([5, 7, 9]), torch.tensor([0, 2, 3]))
        >>> batch.take(torch.tensor([1])).token_ids
        tensor([9])
        """
        places, bounds = token_places(self.cu_seqlens, rows)
        labels, parts = self.labels, self.parts
        if labels is not None:
            labels = labels[places if len(labels) == len(self.token_ids) else rows]
        if parts is not None:
            parts = parts[places]
        return TokenBatch(self.token_ids[places], bounds, labels, parts)

    @property
    def n_sequences(self) -> int:
        """How many sequences there are.

        Returns
        -------
        int
            At least zero.
        """
        return len(self.cu_seqlens) - 1


def token_places(offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Say where the tokens of some sequences are, and their bounds one after another.

    Examples
    --------
    >>> token_places(torch.tensor([0, 2, 3]), torch.tensor([1, 0]))
    (tensor([2, 0, 1]), tensor([0, 1, 3]))
    """
    lengths = offsets.diff()[rows]
    ends = lengths.cumsum(0)
    bounds = torch.cat([ends.new_zeros(1), ends])
    shift = offsets[rows] - bounds[:-1]
    return torch.arange(int(bounds[-1])) + shift.repeat_interleave(lengths), bounds


@dataclass(frozen=True, eq=False)
class Layout:
    """Where sequences begin and end."""

    cu_seqlens: Tensor
    bounds: NDArray[np.int64]
    parts: Tensor | None = None

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence."""
        return np.diff(self.bounds)

    @property
    def tokens(self) -> int:
        """How many there are."""
        return int(self.bounds[-1])

    @property
    def count(self) -> int:
        """How many sequences there are."""
        return len(self.bounds) - 1

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max(initial=0))

    @cached_property
    def effective_length(self) -> float:
        """Keys that a token sees on average."""
        return float((self.lengths**2).sum()) / max(self.tokens, 1)

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """The position of each token, counted from the first of its sequence."""
        return np.arange(self.tokens) - np.repeat(self.bounds[:-1], self.lengths)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Where the attention matrix of each sequence begins, for one head."""
        n = self.lengths
        return np.concatenate([[0], (n * ((n + 7) // 8 * 8)).cumsum()])

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token, as a tensor."""
        return torch.from_numpy(self.places).to(self.cu_seqlens.device)

    @property
    def embedded(self) -> Tensor:
        """The row of the position embeddings that each token gets."""
        return self.positions if self.parts is None else self.parts

    @cached_property
    def owners(self) -> Tensor:
        """The sequence of each token."""
        owners = np.repeat(np.arange(self.count), self.lengths)
        return torch.from_numpy(owners).to(self.cu_seqlens.device)

    def pad(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Write one sequence per row."""
        ends = self.cu_seqlens[:-1], self.cu_seqlens[1:]
        rows, mask = padding(*ends, self.longest)
        wide = mask.view(*mask.shape, *[1] * (x.dim() - 1))
        return x[rows].masked_fill(~wide, 0), mask

    def unpad(self, x: Tensor) -> Tensor:
        """Take the real tokens of each row."""
        return x[self.owners, self.positions]

    def sum(self, x: Tensor) -> Tensor:
        """Add up the tokens of each sequence."""
        sums = x.new_zeros(self.count, x.shape[1])
        return sums.index_add(0, self.owners, x)

    def pool(self, x: Tensor, how: str) -> Tensor:
        """Give the mean token of each sequence, its first ("cls"), or all ("none")."""
        if how == "none":
            return x.unsqueeze(0)
        if how == "cls":
            return x[self.cu_seqlens[:-1]]
        counts = self.cu_seqlens.diff().clamp_min(1).to(x).unsqueeze(1)
        return self.sum(x) / counts

    def pooling_weights(self, model: KernelEncoder) -> NDArray[np.float64]:
        """Say how much each token counts in the mean of its sequence."""
        given, lengths = model.pooling_weights, self.lengths
        if model.settings.pooling == "cls":
            return (self.places == 0).astype(np.float64)
        if given is None:
            return np.repeat(1 / np.maximum(lengths, 1), lengths)
        weights = given.detach().cpu().double().numpy()
        totals = np.concatenate([[0], weights.cumsum()])[lengths]
        totals[totals == 0] = 1
        found: NDArray[np.float64] = weights[self.places] / np.repeat(totals, lengths)
        return found


def make_layout(model: KernelEncoder, batch: TokenBatch) -> Layout:
    """Check a batch, and read where its sequences are."""
    check_ids("token_ids", batch.token_ids, model.token_embedding)
    sequence_bounds(batch.cu_seqlens, len(batch.token_ids))
    bounds = batch.cu_seqlens.cpu().numpy().astype(np.int64)
    layout = Layout(batch.cu_seqlens, bounds, _parts(model, batch))
    most = model.settings.max_length
    if model.settings.positions == "learned" and layout.longest > most:
        raise ParameterError(
            f"`batch` must hold sequences of at most max_length = {most} tokens; got "
            f"{layout.longest}. Truncate them, or set EncoderSettings(max_length=...)."
        )
    if model.pooling_weights is not None:
        model.given_weights(layout.longest)  # refuses a longer sequence
    if model.settings.pooling == "cls" and (layout.lengths == 0).any():
        raise ParameterError(
            "`batch` must hold no empty sequence with pooling='cls', which takes the "
            "first token; got one. Begin each sequence with a token of its own."
        )
    return layout


def _parts(model: KernelEncoder, batch: TokenBatch) -> Tensor | None:
    """Give the parts of pairs to an encoder that looks at them."""
    if model.settings.positions != "parts":
        return None
    if batch.parts is None:
        return torch.zeros_like(batch.token_ids)
    assert model.position_embedding is not None
    check_ids("parts", batch.parts, model.position_embedding, like=batch.token_ids)
    return batch.parts.long().contiguous()


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
