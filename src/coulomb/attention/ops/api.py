"""Linearised attention as pure functions.

`a_i = phi(q_i)' G / phi(q_i)' z` with the sums `G = sum_j phi(k_j) v_j'` and
`z = sum_j phi(k_j)`. A mask multiplies `phi(k)`, in numerator and normaliser alike. A
query that sees no real key gets zero. Nothing is drawn at random and no constant is
added to a normaliser.

Half-precision operands are computed in float32; the output has the precision of `v`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coulomb._support.checks import sequence_bounds
from coulomb.attention.ops import blocked, checks, compiled, traceable, tuning
from coulomb.attention.ops.block_maps import Kept, Side, Workspace, borrowed, make_map
from coulomb.attention.ops.blocked import Block, BlockIndex, Gradients, Problem
from coulomb.attention.ops.checks import FeatureMap, Given, Inputs, check_inputs
from coulomb.features import DEFAULT_MAP, Particles

# Features that take up no more than this, all together, are kept for the backward pass
# and not evaluated again: a seventh of the time of short sequences, where they are not
# yet what the peak of memory depends on.
_KEPT_BYTES = 1 << 22


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
    offsets: tuple[Tensor, Tensor] | None = None,
    causal: bool = False,
    form: str = "auto",
) -> Tensor:
    """Attend with features that are evaluated block by block and not stored.

    The same number as `linear_attention(phi(q), phi(k), v)`. The backward pass
    evaluates features again (loops only if they are many); it gives gradients of
    queries, keys, values, weights, positions, phases and offsets, once (not of
    gradients).

    Where numba is installed, large problems with exponential maps in float32 on a CPU
    are computed in compiled loops, if dimensions and the number of particles are
    multiples of 16; the first call ever compiles them. The environment variable
    ``COULOMB_NUMBA=0`` turns them off.

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
    offsets
        What is added to the projections of queries and of keys, `w.x + a`: two tensors
        `(heads, n_particles)`; None for zero.
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
    options = key_mask, key_particles, key_log_weight, offsets
    inputs = check_inputs((q, k, v), particles, feature_map, *options, causal=causal)
    return _attend(inputs, form)


def attention_weights(
    phi_q: Tensor,
    phi_k: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """Write the attention matrix out, `A_ij = phi(q_i).phi(k_j) / phi(q_i).z`.

    Parameters
    ----------
    phi_q, phi_k
        Features, shapes `(batch, heads, n, n_features)` and
        `(batch, heads, m, n_features)`.
    key_mask
        Shape `(batch, m)`, True = real token; None if all are.
    causal
        Whether query i sees the keys j <= i only.

    Returns
    -------
    Tensor
        Shape `(batch, heads, n, m)`; rows sum to one, or to zero without a real key.

    Examples
    --------
    >>> phi = torch.ones(1, 1, 2, 3)
    >>> attention_weights(phi, phi, causal=True)
    tensor([[[[1.0000, 0.0000],
              [0.5000, 0.5000]]]])
    """
    checks.check_mask(key_mask, phi_k)
    return _normalised(phi_q @ phi_k.transpose(-1, -2), key_mask, causal)


def _normalised(products: Tensor, key_mask: Tensor | None, causal: bool) -> Tensor:
    if key_mask is not None:
        products = products.masked_fill(~key_mask[:, None, None, :], 0)
    if causal:
        products = products.tril()
    total = products.sum(dim=-1, keepdim=True)
    return torch.where(total == 0, 0, products / torch.where(total == 0, 1, total))


def kernel_weights(
    q: Tensor,
    k: Tensor,
    particles: Particles,
    feature_map: FeatureMap,
    key_mask: Tensor | None = None,
    *,
    key_particles: Particles | None = None,
    key_log_weight: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Write out the attention matrix that `kernel_attention` implies.

    Parameters
    ----------
    q, k
        Queries `(batch, heads, n, dim)` and keys `(batch, heads, m, dim)`.
    particles, feature_map
        As in `kernel_attention`.
    key_mask
        Shape `(batch, m)`, True = real token; None if all are.
    key_particles, key_log_weight
        As in `kernel_attention`.
    causal
        Whether query i sees the keys j <= i only.

    Returns
    -------
    Tensor
        Shape `(batch, heads, n, m)`.

    Examples
    --------
    >>> x = torch.zeros(1, 1, 2, 3)
    >>> kernel_weights(x, x, Particles(torch.ones(4, 3)), "favor")
    tensor([[[[0.5000, 0.5000],
              [0.5000, 0.5000]]]])
    """
    options = key_mask, key_particles, key_log_weight
    inputs = check_inputs((q, k, k), particles, feature_map, *options)
    phi_q, phi_k, logs = traceable.feature_pair(inputs._replace(causal=causal))
    products = phi_q @ phi_k.transpose(-1, -2)
    if logs is not None and k.shape[2]:
        highest = logs.cummax(dim=-1).values
        highest = highest if causal else highest[..., -1:]
        factors = logs.unsqueeze(-2) - highest.unsqueeze(-1)
        if causal:
            future = torch.ones_like(factors, dtype=torch.bool).triu(1)
            factors = factors.masked_fill(future, -torch.inf)
        products = products * factors.exp()
    return _normalised(products, key_mask, causal)


def _attend(inputs: Inputs, form: str) -> Tensor:
    with checks.full_precision(inputs.v):
        if checks.must_be_traceable(inputs.v):
            inputs = inputs.with_offset_columns()
            return traceable.attend(inputs, quadratic=form == "quadratic")
        return _run(inputs, form, None)


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
            rows, mask = blocked.padding(cu_seqlens[:-1], cu_seqlens[1:], max_length)
            q, k, v, weight = (BlockIndex(0, 0, rows).take(x) for x in inputs[:4])
            padded = inputs._replace(q=q, k=k, v=v, log_weight=weight, key_mask=mask)
            out = traceable.attend(padded, quadratic=False)
            # Rows beyond a sequence are masked keys and unused queries.
            tokens = torch.arange(len(inputs.q), device=q.device)
            owner = torch.searchsorted(cu_seqlens[1:], tokens, right=True)
            return out.transpose(1, 2)[owner, tokens - cu_seqlens[owner]]
        return _run(inputs, "auto", sequence_bounds(cu_seqlens, q.shape[0]))


def _run(
    inputs: Inputs,
    form: str,
    bounds: tuple[tuple[int, int], ...] | None,
    choice: tuple[str, str] | None = None,
) -> Tensor:
    tensors = inputs.tensors
    backward = keep = False
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in tensors
    ):
        q, k, positions = inputs.q, inputs.k, inputs.particles.positions
        rows = (q.numel() + k.numel()) // max(q.shape[-1], 1)
        size = rows * positions.shape[-2] * positions.element_size()
        backward, keep = True, size <= _KEPT_BYTES
    kind, engine = choice or choose_form(inputs, form, bounds, backward)
    if bounds is None:
        form = "quadratic" if kind == "quadratic" or form == "quadratic" else "linear"
    problem = Problem(inputs.feature_map, inputs.causal, form, bounds, backward, keep)
    loops = kind if engine == "loops" else None
    if not backward:
        return _forward(problem, loops, inputs.key_mask, tensors)[0]
    out: Tensor = FusedAttention.apply(  # type: ignore[no-untyped-call]
        problem, loops, inputs.key_mask, *tensors
    )
    return out


def choose_form(
    inputs: Inputs,
    form: str,
    bounds: tuple[tuple[int, int], ...] | None,
    backward: bool,
) -> tuple[str, str]:
    """Choose an order of the products, and who computes it, of those exact here."""
    q, k, v = inputs[:3]
    n, m = q.shape[-2 if bounds is None else 0], k.shape[-2 if bounds is None else 0]
    pairs, longest, groups = n * m * len(q), max(n, m), len(q)
    if bounds is not None:
        lengths = [end - start for start, end in bounds]
        pairs, longest = sum(x * x for x in lengths), max(lengths, default=0)
        groups = 1
    heads = q.shape[1]
    features = inputs.feature_map.n_features(inputs.particles.n_particles)
    sizes = (n + m) * groups * heads, pairs * heads, q.shape[-1], v.shape[-1]
    work = tuning.Work(*sizes, features)
    if inputs.causal:
        kinds = ["causal"]
    else:
        kinds = ["linear", "quadratic"] if form == "auto" else [form]
    # Packed, torch takes the cheaper for each block of sequences by itself.
    candidates = [(kind, "torch") for kind in kinds[: 1 if bounds else None]]
    if compiled.knows(inputs):
        square = n == m or bounds is not None
        known = {"linear", "causal"} if form != "quadratic" else set()
        if square and longest <= compiled.LONGEST_SQUARE and not inputs.causal:
            known |= {"quadratic"}
        candidates = [(kind, "loops") for kind in kinds if kind in known] + candidates
    return tuning.choose(candidates, work, backward=backward)


def run_form(
    kind: str, engine: str, q: Tensor, k: Tensor, v: Tensor, positions: Tensor
) -> Tensor:
    """Attend in one form, whether it is fast or not: what `tuning` measures."""
    operands = (q, k, v), Particles(positions), DEFAULT_MAP, None, None, None
    inputs = check_inputs(*operands, causal=kind == "causal")
    return _run(inputs, "auto", None, (kind, engine))


def _form(problem: Problem, block: Block, n_features: int) -> blocked.Form:
    n, m, form = block.q.shape[2], block.k.shape[2], problem.form
    if problem.causal:
        return blocked.CAUSAL
    if form == "auto":
        sizes = block.q.shape[3], block.v.shape[3], n_features
        form = tuning.Work(n + m, n * m, *sizes).cheaper()
    return blocked.QUADRATIC if form == "quadratic" and m > 0 else blocked.LINEAR


def _empty_output(q: Tensor, v: Tensor) -> Tensor:
    # In the memory order of `q`: a caller who splits heads by a transposed view joins
    # them again without a copy.
    if q.dim() == 4 and q.stride(1) < q.stride(2):
        batch, heads, length, _ = q.shape
        return v.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    return v.new_empty(*q.shape[:-1], v.shape[-1])


def _sides(tensors: Sequence[Any], *, track: bool = False) -> tuple[Side, Side]:
    queries = Side(Particles(*tensors[4:6]), track=track)
    if tensors[6] is None:
        return queries, queries
    return queries, Side(Particles(*tensors[6:8]), track=track)


def _forward(
    problem: Problem, kind: str | None, key_mask: Tensor | None, tensors: Sequence[Any]
) -> tuple[Tensor, Any]:
    # The output, and what the backward pass needs.
    q, k, v, _, positions = tensors[:5]
    out = _empty_output(q, v)
    if kind is not None:
        kept = compiled.forward(kind, problem, tensors, key_mask, out)
        if kept is not None:
            return out, kept
    saved: list[tuple[BlockIndex, blocked.Saved]] = []
    sides = _sides(tensors)
    with borrowed(positions.dtype, q.device) as work:
        for index in problem.blocks(q, k, key_mask, positions.shape[1]):
            block = _block(tensors, key_mask, index, out, work)
            keep: Kept | None = {} if problem.keep else None
            features = make_map(problem.feature_map, sides, work, kept=keep)
            form = _form(problem, block, features.n_features)
            result = form.forward(features, block, problem)
            if not result.exact and features.retry:
                features = make_map(problem.feature_map, sides, work, logs=True)
                result = form.forward(features, block, problem)
            index.put(block.out, out)
            saved.append((index, result))
    return out, saved


class FusedAttention(torch.autograd.Function):
    """Attention whose features exist one block at a time, forwards and backwards.

    The tensors are those of `Inputs.tensors`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        problem: Problem,
        kind: str | None,
        key_mask: Tensor | None,
        *tensors: Any,
    ) -> Tensor:
        """Compute the output, block by block."""
        out, ctx.state = _forward(problem, kind, key_mask, tensors)
        ctx.problem = problem
        ctx.save_for_backward(key_mask, *tensors, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Evaluate the features again and pull the gradient back."""
        key_mask, *tensors, out = ctx.saved_tensors
        problem: Problem = ctx.problem
        grads: list[Any] = [
            x if x is None else torch.empty_like(x) for x in tensors[:4]
        ]
        track = any(ctx.needs_input_grad[7:])
        sides = _sides(tensors, track=track)
        own = (None, None) if tensors[6] is None else sides[1].grads
        results = (*grads, *sides[0].grads, *own)
        dtype = sides[0].particles.positions.dtype
        with checks.full_precision(grad), borrowed(dtype, grad.device) as work:
            if isinstance(ctx.state, compiled.Kept):
                outputs = out, grad
                compiled.backward(
                    ctx.state, problem, tensors, key_mask, outputs, results
                )
                return (None, None, None, *results)
            for index, saved in ctx.state:
                block = _block(tensors, key_mask, index, out, work)
                parts = _sides(tensors, track=track)
                options = {"record": True, "logs": saved.logs, "kept": saved.kept}
                features = make_map(problem.feature_map, parts, work, **options)
                targets = Gradients(*(index.take(x) for x in (grad, *grads)))
                if index.mask is not None:
                    # At padding stands some other token, that would count twice.
                    padding = ~index.mask[:, None, :, None]
                    grad_out = targets.out.masked_fill(padding, 0)
                    targets = targets._replace(out=grad_out)
                form = _form(problem, block, features.n_features)
                form.backward(features, block, saved, targets)
                for target, whole in zip(targets[1:], grads, strict=True):
                    index.put(target, whole)
                for side, part in zip(sides, parts, strict=True):
                    side.add(part)
        return (None, None, None, *results)


def _block(
    tensors: Sequence[Any], mask: Any, index: BlockIndex, out: Tensor, work: Workspace
) -> Block:
    if index.rows is not None:
        mask = index.mask
    elif mask is not None:
        mask = mask[index.start : index.stop]
    q, k, v, log_weight = (index.take(x) for x in tensors[:4])
    return Block(q, k, v, log_weight, mask, index.take(out), work)
