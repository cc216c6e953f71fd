"""Where packed sequences are, in the forms that the parts of a network need."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coulomb._support.errors import ParameterError
from coulomb.attention.encoder.batches import TokenBatch
from coulomb.attention.encoder.encoder import KernelEncoder
from coulomb.attention.ops.checks import sequence_bounds


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
        steps = torch.arange(self.longest, device=x.device)
        rows = self.cu_seqlens[:-1, None] + steps
        mask = rows < self.cu_seqlens[1:, None]
        rows = rows.masked_fill(~mask, 0)
        wide = mask.view(*mask.shape, *[1] * (x.dim() - 1))
        return x[rows].masked_fill(~wide, 0), mask

    def unpad(self, x: Tensor) -> Tensor:
        """Take the real tokens of each row."""
        return x[self.owners, self.positions]

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
    ids = batch.token_ids
    sequence_bounds(batch.cu_seqlens, len(ids))
    bounds = batch.cu_seqlens.cpu().numpy().astype(np.int64)
    layout = Layout(batch.cu_seqlens, bounds, _parts(model, batch))
    most, size = model.settings.max_length, model.token_embedding.num_embeddings
    if model.settings.positions == "learned" and layout.longest > most:
        raise ParameterError(
            f"`batch` must hold sequences of at most max_length = {most} tokens; got "
            f"{layout.longest}. Truncate them, or set EncoderSettings(max_length=...)."
        )
    if len(ids):
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if not 0 <= low <= high < size:
            raise ParameterError(
                f"`batch` must hold token ids from 0 to {size - 1}; got ids from {low} "
                f"to {high}."
            )
    weights = model.pooling_weights
    if weights is not None and layout.longest > len(weights):
        raise ParameterError(
            f"`pooling` must have a weight for each of {layout.longest} positions; got "
            f"{len(weights)}."
        )
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
    table = model.position_embedding
    assert table is not None
    if (
        batch.parts.shape != batch.token_ids.shape
        or not ((batch.parts >= 0) & (batch.parts < table.num_embeddings)).all()
    ):
        raise ParameterError(
            f"`parts` must be a number from 0 to {table.num_embeddings - 1} for each "
            f"token; got shape {tuple(batch.parts.shape)} for "
            f"{len(batch.token_ids)} tokens, or other numbers."
        )
    return batch.parts.long().contiguous()
