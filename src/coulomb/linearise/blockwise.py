"""Attention with paired particles where no gradient is asked for.

Features of one block of tokens at a time, always in the same array: they stay in the
cache, and no fresh memory is asked for. Queries, keys and values are read where the
projections have put them, and the output is written in their order, so that nothing is
copied to split the heads or to join them.
"""

import torch
from torch import Tensor

__all__ = ["blockwise_attention", "key_weights"]

# Features of a block, all heads.
_ELEMENTS = 1 << 18

_ROWS = 32


def key_weights(k: Tensor, tilt: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Evaluate `t . k`, less the largest of the sequence, and its exponential."""
    flat = k.reshape(len(k), -1, k.shape[-1])
    # A row times a matrix: libraries are slower by times at a matrix times a column.
    exponent = torch.bmm(tilt.unsqueeze(1), flat.transpose(1, 2)).view(k.shape[:3])
    if mask is None:
        exponent -= exponent.amax(dim=-1, keepdim=True)
        return exponent, exponent.exp()
    hidden = ~mask
    exponent.masked_fill_(hidden, torch.finfo(k.dtype).min)
    exponent -= exponent.amax(dim=-1, keepdim=True)
    weight = exponent.exp().masked_fill_(hidden, 0)
    return exponent.masked_fill_(hidden, 0), weight


def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    tilt: Tensor,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attend with `softmaxfeat` of temperature one; the fast form, without gradients.

    `phi(q)' G / phi(q)' z = softmax(log phi(q) + log z) (G / z)`: a mean, over
    features, of mean values. Nothing is left to divide by.
    """
    batch, heads, n, _ = q.shape
    n_features = positions.shape[1]
    out = v.new_empty(batch, n, heads, v.shape[-1]).transpose(1, 2)
    longest = max(n, k.shape[2], 1)
    step = max(1, _ELEMENTS // (heads * n_features * longest))
    rows = longest
    if step == 1:
        rows = max(_ROWS, _ELEMENTS // (heads * n_features) // _ROWS * _ROWS)
    size = min(step, batch) * heads * min(rows, longest)
    room = v.new_empty(size * (n_features + v.shape[-1] + 1))
    for start in range(0, batch, step):
        some = slice(start, start + step)
        mask = None if key_mask is None else key_mask[some]
        case = _Case(q[some], k[some], v[some], positions, tilt, mask, rows, room)
        case.write(out[some])
    return out


class _Case:
    # Some sequences: several that fit a block together, or one.

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        tilt: Tensor,
        mask: Tensor | None,
        rows: int,
        room: Tensor,
    ) -> None:
        self.q, self.k, self.v = q, k, v
        self.for_queries, self.for_keys = positions.chunk(2, dim=-1)
        _, weight = key_weights(k.transpose(0, 1), tilt, mask)
        self.weight = weight.transpose(0, 1).unsqueeze(-1)  # (batch, heads, n, 1)
        self.rows, self.room = rows, room

    def write(self, out: Tensor) -> None:
        means, offset = self._sums()
        for start in range(0, self.q.shape[2], self.rows):
            block = self.q[:, :, start : start + self.rows]
            phi = self._features(block, self.for_queries, offset)
            part = out[:, :, start : start + self.rows]
            if len(part) == 1:
                torch.bmm(phi, means, out=part[0])
            else:
                part.copy_(_split(torch.bmm(phi, means), part))

    def _sums(self) -> tuple[Tensor, Tensor]:
        batch, heads, length, dim_v = self.v.shape
        offset = _repeat(self.for_keys[..., -1:].transpose(1, 2), batch)
        shape = batch * heads, dim_v + 1, self.for_keys.shape[1]
        sums = self.v.new_zeros(shape)
        for start in range(0, length, self.rows):
            cut = slice(start, start + self.rows)
            phi = self._features(self.k[:, :, cut], self.for_keys, offset)
            used = phi.numel()
            count = phi.shape[0] * phi.shape[1] * (dim_v + 1)
            values = self.room[used : used + count].view(*phi.shape[:2], dim_v + 1)
            by_head, weight = _split(values, self.v), self.weight[:, :, cut]
            torch.mul(self.v[:, :, cut], weight, out=by_head[..., :dim_v])
            by_head[..., dim_v:] = weight
            sums.baddbmm_(values.transpose(1, 2), phi)
        total = sums[:, -1:].clamp_min(torch.finfo(sums.dtype).tiny)
        offset = _repeat(self.for_queries[..., -1:].transpose(1, 2), batch)
        offset = offset + total.log()
        return (sums[:, :-1] / total).transpose(1, 2), offset

    def _features(self, x: Tensor, particles: Tensor, offset: Tensor) -> Tensor:
        batch, heads, rows, dim = x.shape
        n_features = particles.shape[1]
        flat = x.transpose(0, 1).reshape(heads, batch * rows, dim)
        columns = particles[..., :dim].transpose(1, 2)
        logits = self.room[: flat.shape[1] * heads * n_features]
        by_head = logits.view(heads, batch * rows, n_features)
        logits = logits.view(heads * batch, rows, n_features)
        if batch == 1:
            torch.baddbmm(offset, flat, columns, out=by_head)
        else:
            torch.bmm(flat, columns, out=by_head)
            logits += offset
        return torch.softmax(logits, dim=-1, out=logits)


def _repeat(x: Tensor, batch: int) -> Tensor:
    # The sequences of a head follow one another.
    return x if batch == 1 else x.repeat_interleave(batch, dim=0)


def _split(block: Tensor, like: Tensor) -> Tensor:
    batch, heads = like.shape[:2]
    return block.view(heads, batch, *block.shape[1:]).transpose(0, 1)
