"""The part of a problem that is worked on at one time, and what is common to all forms.

Values carry a last column of ones, so that one product gives numerator and normaliser:
`phi(q)' [G z]` with `[G z] = sum_j phi(k_j) [v_j 1]'`. A mask multiplies `[v_j 1]`,
which is the same number as multiplying `phi(k_j)` at a quarter of the cost.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from coulomb.attention.ops.block_maps import BlockMap
from coulomb.attention.ops.workspace import Workspace
from coulomb.features import AbstractFeatureMap


class Bucket(NamedTuple):
    """Packed sequences of about the same length that share a slab."""

    rows: Tensor  # (sequences, longest), the token at each place; any one at padding
    mask: Tensor  # True = real token


# Some of the batch or, if packed, the tokens of one sequence; or of several.
Cut = tuple[int, int] | Bucket


class Plan(NamedTuple):
    """How a problem is cut into slabs, and in which form each is computed."""

    feature_map: AbstractFeatureMap | None
    causal: bool
    form: str  # "auto", "linear" or "quadratic"
    cuts: tuple[Cut, ...]
    packed: bool = False
    backward: bool = False  # whether there will be a backward pass
    keep: bool = False  # whether features are few enough to be kept for it


class Slab(NamedTuple):
    """A few sequences, with all their heads."""

    q: Tensor  # (batch, heads, n, dim)
    k: Tensor  # (batch, heads, m, dim)
    v: Tensor  # (batch, heads, m, dim_v)
    mask: Tensor | None  # (batch, m), True = real token


class SlabGradients(NamedTuple):
    """Where the gradients of a slab are written."""

    q: Tensor
    k: Tensor
    v: Tensor


class Saved(NamedTuple):
    """What the backward pass of a slab needs beside its inputs and outputs."""

    normaliser: Tensor | None = None  # (groups, n, 1), infinite where no key is real
    sums: Tensor | None = None  # (groups, dim_v + 1, features)
    weights: Tensor | None = None  # (groups, 1, features)
    shifts: list[Tensor] | None = None
    chunk: int = 0
    states: list[Tensor] | None = None  # sums before each span of a causal form
    queries: list[Tensor] | None = None  # features of each block, if kept
    keys: list[tuple[Tensor, Tensor | None]] | None = None  # and the shift of each


def block_length(slab: Slab, n_features: int) -> int:
    """Choose how many rows of all heads to work on, so that features stay in cache."""
    elements = 1 << 19 if slab.q.device.type == "cpu" else 1 << 26
    rows = elements // (slab.q.shape[0] * slab.q.shape[1] * max(n_features, 1))
    return min(max(32, rows // 32 * 32), 4096)


def blocks(length: int, step: int) -> list[tuple[int, int]]:
    """Cut rows into blocks."""
    return [(start, min(start + step, length)) for start in range(0, length, step)]


def join_heads(x: Tensor) -> Tensor:
    """Make one axis of heads and batch, head after head.

    The sequences of a head follow one another, so that one matrix product evaluates
    the features of all of them.
    """
    return x.transpose(0, 1).flatten(0, 1)


def rows(x: Tensor, start: int, stop: int, work: Workspace) -> Tensor:
    """Take a block of rows, heads and batch as one axis, in the working precision."""
    return join_heads(x[:, :, start:stop]).to(work.dtype)


def key_rows(
    slab: Slab, start: int, stop: int, work: Workspace
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Take a block of keys and values; what the mask removes is zero."""
    keys = rows(slab.k, start, stop, work)
    batch, heads, _, dim_v = slab.v.shape
    values = work.get("values", batch * heads, stop - start, dim_v + 1)
    split_heads(values, slab.v)[..., :dim_v] = slab.v[:, :, start:stop]
    values[..., dim_v] = 1
    if slab.mask is None:
        return keys, values, None
    dead = join_heads(~slab.mask[:, None, start:stop, None].expand(-1, heads, -1, -1))
    # Also the keys: padding may hold anything, and NaN times zero is NaN.
    return keys.masked_fill(dead, 0), values.masked_fill_(dead, 0), dead


def split_heads(block: Tensor, like: Tensor) -> Tensor:
    """View a block with batch and heads as two axes."""
    batch, heads = like.shape[:2]
    return block.view(heads, batch, *block.shape[1:]).transpose(0, 1)


def write_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Multiply matrices into a block of the output, without a copy where possible."""
    if out.shape[0] == 1 and out.dtype == left.dtype:
        torch.bmm(left, right, out=out[0])
    else:
        out.copy_(split_heads(torch.bmm(left, right), out))


def write_ratio(sums: Tensor, out: Tensor, normaliser: Tensor) -> None:
    """Divide numerators by normalisers; zero where there is nothing to divide by."""
    normaliser.copy_(sums[..., -1:])
    # One division by infinity makes the output zero, and every gradient with it.
    normaliser.masked_fill_(normaliser == 0, torch.inf)
    torch.div(split_heads(sums, out)[..., :-1], split_heads(normaliser, out), out=out)


def grad_rows(
    out: Tensor,
    grad: Tensor,
    normaliser: Tensor | None,
    start: int,
    stop: int,
    work: Workspace,
) -> Tensor:
    """Differentiate the ratio: `g / D` for the numerator, `-(g . out) / D` for `D`."""
    g = rows(grad, start, stop, work)
    y = rows(out, start, stop, work)
    result = work.get("grad_sums", g.shape[0], g.shape[1], g.shape[2] + 1)
    if normaliser is None:
        result[..., :-1] = g
    else:
        torch.div(g, normaliser[:, start:stop], out=result[..., :-1])
    torch.sum(result[..., :-1] * y, dim=-1, out=result[..., -1])
    result[..., -1].neg_()
    return result


def write(block: Tensor, target: Tensor, start: int, stop: int) -> None:
    """Write a block of rows back."""
    part = target[:, :, start:stop]
    part.copy_(split_heads(block, part))


def write_key_gradients(
    grads: SlabGradients,
    keys: Tensor,
    values: Tensor,
    dead: Tensor | None,
    start: int,
    stop: int,
) -> None:
    """Write the gradients of a block of keys and values; masked tokens get zero."""
    if dead is not None:
        # Features of a removed key have no gradient, but its values do.
        keys, values = keys.masked_fill(dead, 0), values.masked_fill(dead, 0)
    write(keys, grads.k, start, stop)
    write(values, grads.v, start, stop)


def groups(slab: Slab) -> int:
    """Count the sequences times the heads of a slab."""
    return slab.q.shape[0] * slab.q.shape[1]


def raise_shift(sums: Tensor, shift: Tensor | None, higher: Tensor | None) -> None:
    """Rescale sums over keys from one shift to another, at least as high."""
    if shift is not None and higher is not None:
        sums.mul_((shift - higher).exp_())


def zero_sums(slab: Slab, features: BlockMap) -> Tensor:
    """Start the sums `[G z]'`; BLAS is fastest with the features in the last axis."""
    n_features = features.n_features(slab.k.shape[-1])
    return features.work.zeros(groups(slab), slab.v.shape[-1] + 1, n_features)
