"""Queries and keys that meet their own particles, and keys with weights."""

import pytest
import torch
from attention_cases import MAPS, make_case, padding

import attention_twins as twins
from coulomb.attention import (
    decode_step,
    init_state,
    kernel_attention,
    kernel_weights,
    packed_attention,
    prefill,
)
from coulomb.features import Particles, feature_maps

POSITIVE = [name for name in MAPS if feature_maps.build(name).positive]
FORMS = ["linear", "quadratic", "auto"]


def sides(name, **options):
    """Draw a case, other particles for its keys, and logarithms of weights."""
    case = make_case(name, **options)
    other = make_case(name, **{**options, "seed": 7})
    weights = 3 * torch.randn(case.k.shape[:3], generator=torch.Generator()).to(case.k)
    return case, other.particles, weights


def results(function, case, keys, weights, name, **options):
    """Give the output and every gradient."""
    leaves = [*case[:3], *case.particles, *keys, weights]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    q, k, v, positions, phases, key_positions, key_phases, log_weight = leaves
    out = function(
        *(q, k, v, Particles(positions, phases), name),
        key_particles=Particles(key_positions, key_phases),
        key_log_weight=log_weight,
        **options,
    )
    loss = (out * torch.linspace(-1, 1, out.numel()).to(out).view(out.shape)).sum()
    return out, *torch.autograd.grad(
        loss, leaves, allow_unused=True, materialize_grads=True
    )


def assert_all_close(ours, theirs, rtol=1e-9, atol=1e-11):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MAPS)
def test_equals_its_twin_in_value_and_gradient(name, form, causal, masked):
    case, *others = sides(name, batch=3, n=9)
    options = {"key_mask": padding(case) if masked else None, "causal": causal}
    ours = results(kernel_attention, case, *others, name, form=form, **options)
    assert_all_close(
        ours, results(twins.kernel_attention, case, *others, name, **options)
    )


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["favor", "softmaxfeat", "softplus"])
def test_equals_its_twin_over_several_blocks(name, causal, kept, monkeypatch):
    monkeypatch.setattr("coulomb.attention.ops.api._KEPT_BYTES", kept << 40)
    case, keys, weights = sides(name, batch=5, heads=3, n=150, n_particles=300)
    # Later weights are larger, so that their shift rises from block to block.
    weights = weights + torch.linspace(0, 40, 150, dtype=torch.float64)
    options = {"key_mask": padding(case), "causal": causal}
    ours = results(
        kernel_attention, case, keys, weights, name, form="linear", **options
    )
    twin = results(twins.kernel_attention, case, keys, weights, name, **options)
    assert_all_close(ours, twin, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", POSITIVE)
def test_packed_sequences(name, causal):
    case, keys, weights = sides(name, batch=1, n=90)
    case = case._replace(
        **{x: getattr(case, x).squeeze(0).transpose(0, 1) for x in "qkv"}
    )
    weights = weights.squeeze(0).t()
    options = {"cu_seqlens": torch.tensor([0, 4, 4, 5, 85, 90]), "causal": causal}
    ours = results(packed_attention, case, keys, weights, name, **options)
    twin = results(twins.packed_attention, case, keys, weights, name, **options)
    assert_all_close(ours, twin)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", POSITIVE)
def test_implied_weights(name, causal):
    case, keys, weights = sides(name, batch=3)
    mask = padding(case)
    options = {"key_particles": keys, "key_log_weight": weights, "causal": causal}
    rows = kernel_weights(*case[:2], case.particles, name, mask, **options)
    torch.testing.assert_close(
        rows @ case.v, kernel_attention(*case, name, mask, **options)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", POSITIVE)
def test_transforms_give_the_same(name, causal):
    case, keys, weights = sides(name, batch=3, n=70)
    mask = padding(case)

    def run(q, k, v, positions, log_weight):
        return kernel_attention(
            *(q, k, v, case.particles, name, mask),
            key_particles=keys._replace(positions=positions),
            key_log_weight=log_weight,
            causal=causal,
        )

    operands = [*case[:3], keys.positions, weights]
    leaves = [x.clone().requires_grad_() for x in operands]
    out = run(*leaves)
    ours = torch.autograd.grad(out.square().sum(), leaves)
    theirs = torch.func.grad(
        lambda *args: run(*args).square().sum(), argnums=tuple(range(5))
    )(*operands)
    assert_all_close(ours, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", MAPS)
def test_a_weight_is_a_factor_of_the_features_of_a_key(name):
    case, _, weights = sides(name, n=9)
    twice = kernel_attention(
        *case[:1], *(torch.cat([x, x[:, :, :3]], dim=2) for x in case[1:3]),
        case.particles, name,
    )  # fmt: skip
    weights = torch.zeros_like(weights)
    weights[:, :, :3] = torch.log(torch.tensor(2.0))
    out = kernel_attention(*case, name, key_log_weight=weights)
    torch.testing.assert_close(out, twice)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", POSITIVE)
def test_weights_may_be_of_any_size(name, causal):
    """Only their differences count, among the keys that a query sees."""
    case, keys, weights = sides(name, n=70, dtype=torch.float32)
    weights = 50 * weights
    double = case._replace(
        **{x: getattr(case, x).double() for x in "qkv"},
        particles=Particles(*(x.double() for x in case.particles)),
    )
    run = results(
        kernel_attention, case, keys, weights + 1e4, name, causal=causal, form="linear"
    )
    truth = results(
        twins.kernel_attention, double, Particles(*(x.double() for x in keys)),
        (weights + 1e4).double(), name, causal=causal,
    )  # fmt: skip
    if name in ("favor", "softmaxfeat", "sigmoid2"):
        torch.testing.assert_close(run[0].double(), truth[0], rtol=2e-2, atol=2e-3)
    assert all(x.isfinite().all() for x in run)


@pytest.mark.parametrize("name", MAPS)
def test_decoding(name):
    case, keys, _ = sides(name, n=12)
    expected = kernel_attention(*case, name, causal=True, key_particles=keys)
    empty = init_state(case.particles, name, batch=2, heads=2, dim_v=2)
    prefix = prefill(case.k[:, :, :5], case.v[:, :, :5], keys, name)
    for start, before in ((0, empty), (5, prefix)):
        state = before
        for t in range(start, 12):
            token = (x[:, :, t] for x in case[:3])
            out, state = decode_step(
                state, *token, case.particles, name, key_particles=keys
            )
            torch.testing.assert_close(out, expected[:, :, t])


def test_messages():
    case, keys, weights = sides("elu")
    few = Particles(keys.positions[:, :3])
    with pytest.raises(ValueError, match="as many as `particles`; got 3 and 5"):
        kernel_attention(*case, "elu", key_particles=few)
    with pytest.raises(
        ValueError, match=r"key_log_weight` must have shape \(2, 2, 7\)"
    ):
        kernel_attention(*case, "elu", key_log_weight=weights[:, :1])
    with pytest.raises(TypeError, match="`key_log_weight` must be a floating-point"):
        kernel_attention(*case, "elu", key_log_weight=weights.long())
    offsets = keys.positions[..., 0], keys.positions[:, :3, 0]
    with pytest.raises(ValueError, match=r"offsets\[1\]` must have shape \(heads"):
        kernel_attention(*case, "elu", offsets=offsets)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_offsets_are_one_more_column(name, causal, traced):
    """`w.x + a` is the product of `(w, a)` and `(x, 1)`."""
    case, keys, weights = sides(name, n=20)
    drawn = torch.randn(2, 2, 5, generator=torch.Generator()).to(case.q)
    column = torch.ones_like(case.q[..., :1])
    options = {"causal": causal, "key_log_weight": weights}

    def ours(q, k, positions, key_positions, offsets):
        return kernel_attention(
            *(q, k, case.v, Particles(positions, case.particles.phases), name),
            key_particles=Particles(key_positions, keys.phases),
            offsets=tuple(offsets),
            **options,
        )

    def columns(q, k, positions, key_positions, offsets):
        q, k = (torch.cat([x, column], dim=-1) for x in (q, k))
        w, u = (
            torch.cat([x, a.unsqueeze(-1)], dim=-1)
            for x, a in zip((positions, key_positions), offsets, strict=True)
        )
        return kernel_attention(
            *(q, k, case.v, Particles(w, case.particles.phases), name),
            key_particles=Particles(u, keys.phases),
            **options,
        )

    leaves = *case[:2], case.particles.positions, keys.positions, drawn
    results = []
    for function in (ours, columns):
        grad = torch.func.grad if traced else _grad
        every = grad(
            lambda *x, f=function: f(*x).square().sum(), argnums=tuple(range(5))
        )(*leaves)
        results.append((function(*leaves), *every))
    assert_all_close(*results, rtol=1e-7, atol=1e-9)


def _grad(function, argnums):
    def run(*values):
        leaves = [x.clone().requires_grad_() for x in values]
        return torch.autograd.grad(function(*leaves), leaves)

    return run
