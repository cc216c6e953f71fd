"""Linearised attention as pure functions.

`a_i = phi(q_i)' G / phi(q_i)' z` with the sums `G = sum_j phi(k_j) v_j'` and
`z = sum_j phi(k_j)`. A mask multiplies `phi(k)`, in numerator and normaliser alike. A
query that sees no real key gets zero. Nothing is drawn at random and no constant is
added to a normaliser.

Half-precision operands are computed in float32; the output has the precision of `v`.
"""

import torch
from torch import Tensor

from coulomb._support.checks import sequence_bounds
from coulomb.attention.ops import checks, traceable
from coulomb.attention.ops.autograd import FusedAttention, cheaper_form
from coulomb.attention.ops.blocked import BlockIndex, Problem
from coulomb.attention.ops.checks import FeatureMap, Given, Inputs, check_inputs
from coulomb.features import Particles

# A block has at least this many sequences times heads: fewer do not occupy the cores,
# more would leave each too short a block of rows in the cache.
_GROUPS = 8

# Features that take up no more than this, all together, are kept for the backward pass
# instead of being evaluated again.
_KEPT_BYTES = 1 << 25

# Short sequences share a block, as long as its features stay in the cache.
_BLOCK_ELEMENTS = 1 << 19


def linear_attention(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool = False,
    form: str = "auto",
) -> Tensor:
    """Attend with given features, `a_i = phi(q_i)' G / phi(q_i)' z`.

    Parameters
    ----------
    phi_q, phi_k
        Features, shapes `(batch, heads, n, n_features)` and
        `(batch, heads, m, n_features)`; n and m may differ (cross-attention).
    v
        Values, shape `(batch, heads, m, dim_v)`.
    key_mask
        Shape `(batch, m)`, True = real token; None if all are.
    causal
        Whether query i sees the keys j <= i only.
    form
        `"linear"` sums over keys first, `"quadratic"` forms `phi_q phi_k'` first; the
        numbers are the same. `"auto"` takes the cheaper.

    Returns
    -------
    Tensor
        Shape `(batch, heads, n, dim_v)`.

    Examples
    --------
    >>> phi = torch.ones(1, 1, 3, 2)
    >>> v = torch.tensor([1.0, 2.0, 6.0]).view(1, 1, 3, 1)
    >>> linear_attention(phi, phi, v).flatten()
    tensor([3., 3., 3.])
    >>> linear_attention(phi, phi, v, causal=True).flatten()
    tensor([1.0000, 1.5000, 3.0000])
    """
    checks.check_form(form)
    checks.check_operands(("phi_q", "phi_k", "v"), (phi_q, phi_k, v), causal=causal)
    checks.check_mask(key_mask, phi_k)
    shape = phi_q.shape[1], phi_q.shape[-1], 0
    none = torch.empty(shape, dtype=checks.working_dtype(v), device=v.device)
    operands = phi_q, phi_k, v, None, key_mask
    return _attend(Inputs(*operands, Particles(none), None, Given(), causal), form)


def kernel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    particles: Particles,
    feature_map: FeatureMap,
    key_mask: Tensor | None = None,
    *,
    key_particles: Particles | None = None,
    key_log_weight: Tensor | None = None,
    causal: bool = False,
    form: str = "auto",
) -> Tensor:
    """Attend with features that are evaluated block by block and not stored.

    The same number as `linear_attention(phi(q), phi(k), v)`. The backward pass
    evaluates the features again (unless they are few); it gives gradients of queries,
    keys, values, weights, positions and phases, once (not of gradients).

    Where numba is installed, large problems with exponential maps in float32 on a CPU
    are computed in compiled loops, if dimensions and the number of particles are
    multiples of 16, queries and keys meet the same particles and keys have no weights;
    the first call ever compiles them. The environment variable ``COULOMB_NUMBA=0``
    turns them off.

    Parameters
    ----------
    q, k
        Queries `(batch, heads, n, dim)` and keys `(batch, heads, m, dim)`.
    v
        Values, shape `(batch, heads, m, dim_v)`.
    particles
        Positions `(heads, n_particles, dim)`, or `(n_particles, dim)` for all heads;
        phases without the last axis, where the map needs them.
    feature_map
        A map, its name, or a function of `(x, particles)`.
    key_mask
        Shape `(batch, m)`, True = real token; None if all are.
    key_particles
        What keys meet, as many as `particles` and shaped like them, which then meet
        queries alone; None for the same.
    key_log_weight
        Logarithms of factors `c_j` of the keys' features, `c_j phi(k_j)`, finite, shape
        `(batch, heads, m)`; None for ones.
    causal
        Whether query i sees the keys j <= i only.
    form
        `"linear"`, `"quadratic"`, or `"auto"` for the cheaper; the numbers are the
        same.

    Returns
    -------
    Tensor
        Shape `(batch, heads, n, dim_v)`.

    Examples
    --------
    >>> x = torch.eye(3).view(1, 1, 3, 3)
    >>> particles = Particles(4 * torch.eye(3))
    >>> kernel_attention(x, x, x, particles, "softmaxfeat").argmax(-1)
    tensor([[[0, 1, 2]]])
    """
    checks.check_form(form)
    options = key_mask, key_particles, key_log_weight
    inputs = check_inputs((q, k, v), particles, feature_map, *options, causal=causal)
    return _attend(inputs, form)


def _attend(inputs: Inputs, form: str) -> Tensor:
    q, k, v, _, key_mask = inputs[:5]
    with checks.full_precision(v):
        if checks.must_be_traceable(v):
            return traceable.attend(inputs, quadratic=form == "quadratic")
        n_particles = inputs.particles.n_particles
        blocks = _batch_blocks(k, key_mask, n_particles)
        if form == "auto":
            n_features = inputs.feature_map.n_features(n_particles)
            form = cheaper_form(q.shape[2], k.shape[2], n_features, v.shape[3])
            form = "linear" if inputs.causal else form
        return _run(inputs, form, blocks)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    particles: Particles,
    feature_map: FeatureMap,
    cu_seqlens: Tensor,
    *,
    key_particles: Particles | None = None,
    key_log_weight: Tensor | None = None,
    causal: bool = False,
    max_length: int | None = None,
) -> Tensor:
    """Attend inside each of several sequences that follow one another, unpadded.

    The same as `kernel_attention` of each sequence by itself.

    Parameters
    ----------
    q, k
        Queries and keys, shape `(tokens, heads, dim)`.
    v
        Values, shape `(tokens, heads, dim_v)`.
    particles, feature_map
        As in `kernel_attention`.
    cu_seqlens
        Cumulative lengths `[0, n_1, n_1 + n_2, ..., tokens]`, whole numbers.
    key_particles
        As in `kernel_attention`.
    key_log_weight
        As in `kernel_attention`, shape `(tokens, heads)`.
    causal
        Whether a query sees only the keys up to its own position.
    max_length
        The longest sequence. Needed only under `torch.compile(fullgraph=True)`,
        `torch.export` and `torch.func.vmap`, which cannot read `cu_seqlens`.

    Returns
    -------
    Tensor
        Shape `(tokens, heads, dim_v)`.

    Examples
    --------
    >>> x = torch.ones(3, 1, 2)
    >>> v = torch.tensor([1.0, 3.0, 5.0]).view(3, 1, 1)
    >>> bounds = torch.tensor([0, 2, 3])
    >>> packed_attention(x, x, v, Particles(torch.ones(4, 2)), "elu", bounds).flatten()
    tensor([2., 2., 5.])
    """
    options = key_particles, key_log_weight
    inputs = check_inputs(
        (q, k, v), particles, feature_map, None, *options, causal=causal, packed=True
    )
    with checks.full_precision(v):
        if checks.must_be_traceable(v):
            if max_length is None:
                max_length = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
            rows, mask = _padding(cu_seqlens[:-1], cu_seqlens[1:], max_length)
            q, k, v, weight = (BlockIndex(0, 0, rows).take(x) for x in inputs[:4])
            padded = inputs._replace(q=q, k=k, v=v, log_weight=weight, key_mask=mask)
            out = traceable.attend(padded, quadratic=False)
            # Rows beyond a sequence are masked keys and unused queries.
            tokens = torch.arange(len(inputs.q), device=q.device)
            owner = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
            return out.transpose(1, 2)[owner, tokens - cu_seqlens[owner]]
        bounds = sequence_bounds(cu_seqlens, q.shape[0])
        blocks = _packed_blocks(bounds, q, inputs.particles.n_particles)
        return _run(inputs, "auto", blocks)


def _batch_blocks(
    k: Tensor, key_mask: Tensor | None, n_features: int
) -> tuple[BlockIndex, ...]:
    batch, heads, length = k.shape[:3]
    if k.device.type != "cpu":
        step = batch
    else:
        if key_mask is not None:
            # Not the padded length: more padding must not change the sums.
            length = int(key_mask.sum(dim=1).max()) if batch else 0
        few = _BLOCK_ELEMENTS // max(heads * length * n_features, 1)
        step = max(1, _GROUPS // max(heads, 1), few)
    starts = range(0, batch, max(step, 1))
    return tuple(BlockIndex(start, min(start + step, batch)) for start in starts)


def _packed_blocks(
    bounds: tuple[tuple[int, int], ...], q: Tensor, n_features: int
) -> tuple[BlockIndex, ...]:
    # Short sequences share a block with those of about their length; long ones, whose
    # features fill the cache, are blocks by themselves.
    row = max(q.shape[1] * n_features, 1)
    blocks: list[BlockIndex] = []
    together: list[tuple[int, int]] = []
    for bound in sorted(bounds, key=lambda bound: bound[1] - bound[0]):
        longest = bound[1] - bound[0]
        if together and (len(together) + 1) * longest * row > _BLOCK_ELEMENTS:
            blocks.append(_packed_block(together, q.device))
            together = []
        together.append(bound)
    if together:
        blocks.append(_packed_block(together, q.device))
    return tuple(blocks)


def _packed_block(bounds: list[tuple[int, int]], device: torch.device) -> BlockIndex:
    if len(bounds) == 1:
        return BlockIndex(*bounds[0])
    starts, stops = torch.tensor(bounds, device=device).unbind(1)
    longest = bounds[-1][1] - bounds[-1][0]
    return BlockIndex(0, 0, *_padding(starts, stops, longest))


def _padding(starts: Tensor, stops: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    steps = torch.arange(max_length, device=starts.device)
    rows = starts.unsqueeze(1) + steps
    mask = rows < stops.unsqueeze(1)
    return rows.masked_fill(~mask, 0), mask


def _run(inputs: Inputs, form: str, blocks: tuple[BlockIndex, ...]) -> Tensor:
    (q, k), tensors = inputs[:2], inputs.tensors
    backward = keep = False
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in tensors
    ):
        positions = inputs.particles.positions
        rows = (q.numel() + k.numel()) // max(q.shape[-1], 1)
        size = rows * positions.shape[-2] * positions.element_size()
        backward, keep = True, size <= _KEPT_BYTES
    about = inputs.feature_map, inputs.causal, form, blocks, backward, keep
    out: Tensor = FusedAttention.apply(  # type: ignore[no-untyped-call]
        Problem(*about), inputs.key_mask, *tensors
    )
    return out
