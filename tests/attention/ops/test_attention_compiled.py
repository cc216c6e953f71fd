"""The compiled loops against the quadratic twin and against the torch path."""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from attention_cases import gradients, make_case, padding

import attention_twins as twins
from coulomb.attention import (
    Decoder,
    decode_step,
    init_state,
    kernel_attention,
    packed_attention,
    prefill,
)
from coulomb.attention.ops import compiled as _compiled
from coulomb.features import Particles, SoftmaxFeatures
from coulomb.kernels import available

pytestmark = pytest.mark.skipif(not available(), reason="needs numba")

NAMES = ["favor", "softmaxfeat"]
SHAPE = {"batch": 3, "heads": 2, "dim": 16, "dim_v": 32, "n_particles": 48}


@pytest.fixture
def kinds(monkeypatch):
    """Let the loops take everything they know; list what they gave."""
    monkeypatch.setattr(_compiled, "_FEWEST", 0)
    monkeypatch.setattr(_compiled, "_FEWEST_DECODED", 0)
    found = []
    forward = _compiled.forward

    def spy(*arguments):
        kept = forward(*arguments)
        found.append(kept.kind if kept else None)
        return kept

    monkeypatch.setattr(_compiled, "forward", spy)
    return found


def single(name, **options):
    """Draw a case in float32 whose exponents stay in the range."""
    case = make_case(name, **{**SHAPE, **options}, dtype=torch.float32)
    return case._replace(q=case.q / 2, k=case.k / 2)


def attend(name, **options):
    def run(q, k, v, particles):
        return kernel_attention(q, k, v, particles, name, **options)

    return run


def twin(name, case, key_mask=None, causal=False):
    def run(q, k, v, particles):
        return twins.kernel_attention(q, k, v, particles, name, key_mask, causal=causal)

    double = case._replace(
        **{x: getattr(case, x).double() for x in "qkv"},
        particles=Particles(*(x.double() for x in case.particles)),
    )
    return gradients(run, double)


def assert_close(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(
            a, b.float(), rtol=2e-4, atol=2e-5 * float(b.abs().max())
        )


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "kind, n", [("linear", 210), ("causal", 610), ("causal", 5), ("quadratic", 20)]
)
@pytest.mark.parametrize("name", NAMES)
def test_equals_its_twin(name, kind, n, masked, kept, kinds, monkeypatch):
    monkeypatch.setattr("coulomb.attention.ops.api._KEPT_BYTES", kept << 40)
    case = single(name, n=n)
    options = {
        "key_mask": padding(case) if masked else None,
        "causal": kind == "causal",
    }
    ours = gradients(attend(name, **options), case)
    assert kinds == [kind]
    assert_close(ours, twin(name, case, **options))


class Sides(NamedTuple):
    """What keys meet, offsets of both sides and logarithms of weights."""

    keys: torch.Tensor
    offset: torch.Tensor
    key_offset: torch.Tensor
    weights: torch.Tensor


def draw_sides(case):
    other = single("favor", n=1, seed=5).particles.positions
    generator = torch.Generator().manual_seed(3)
    offsets = torch.randn(2, *other.shape[:-1], generator=generator)
    weights = torch.randn(case.k.shape[:-1], generator=generator)
    return Sides(other, *offsets, weights)


def with_sides(attention, name, case, sides, **options):
    """Give the output and every gradient, with what may differ between the sides."""
    leaves = [*case[:3], case.particles.positions, *sides]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    q, k, v, positions, keys, offset, key_offset, weights = leaves
    out = attention(
        *(q, k, v, Particles(positions), name),
        key_particles=Particles(keys),
        key_log_weight=weights,
        offsets=(offset, key_offset),
        **options,
    )
    loss = (out * torch.linspace(-1, 1, out.numel()).to(out).view(out.shape)).sum()
    return out.detach(), *torch.autograd.grad(loss, leaves)


def doubled(values):
    return type(values)(*(x.double() for x in values))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "kind, n", [("linear", 210), ("causal", 610), ("causal", 5), ("quadratic", 20)]
)
@pytest.mark.parametrize("name", NAMES)
def test_sides_offsets_and_weights(name, kind, n, masked, kept, kinds, monkeypatch):
    monkeypatch.setattr("coulomb.attention.ops.api._KEPT_BYTES", kept << 40)
    case = single(name, n=n)
    sides = draw_sides(case)
    options = {
        "key_mask": padding(case) if masked else None,
        "causal": kind == "causal",
    }
    ours = with_sides(kernel_attention, name, case, sides, **options)
    assert kinds == [kind]
    wide = case._replace(
        **{x: getattr(case, x).double() for x in "qkv"},
        particles=doubled(case.particles),
    )
    twin = with_sides(twins.kernel_attention, name, wide, doubled(sides), **options)
    assert_close(ours, twin)


@pytest.mark.parametrize("name", NAMES)
def test_weights_far_apart_are_left_to_torch(name, kinds):
    case = single(name, n=210)
    sides = draw_sides(case)
    sides = sides._replace(weights=40 * sides.weights)
    ours = with_sides(kernel_attention, name, case, sides)
    assert kinds == [None]
    wide = case._replace(
        **{x: getattr(case, x).double() for x in "qkv"},
        particles=doubled(case.particles),
    )
    assert_close(ours, with_sides(twins.kernel_attention, name, wide, doubled(sides)))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "bounds, causal",
    [
        ([0, 4, 4, 5, 25, 40], False),
        ([0, 4, 4, 5, 185, 800], False),
        ([0, 4, 4, 5, 185, 800], True),
        ([0, 0, 30], True),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences(name, bounds, causal, weighted, kept, kinds, monkeypatch):
    monkeypatch.setattr("coulomb.attention.ops.api._KEPT_BYTES", kept << 40)
    case = single(name, batch=1, n=bounds[-1])
    weights = torch.randn(bounds[-1], 2, generator=torch.Generator().manual_seed(3))
    cu_seqlens = torch.tensor(bounds)

    def run(attention, q, k, v, particles):
        rows = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
        weight = {"key_log_weight": weights.to(q)} if weighted else {}
        return attention(*rows, particles, name, cu_seqlens, causal=causal, **weight)

    ours = gradients(partial(run, packed_attention), case)
    short = max(b - a for a, b in pairwise(bounds)) <= 96
    assert kinds == ["causal" if causal else "quadratic" if short else "linear"]
    wide = case._replace(
        **{x: getattr(case, x).double() for x in "qkv"},
        particles=doubled(case.particles),
    )
    assert_close(ours, gradients(partial(run, twins.packed_attention), wide))


@pytest.mark.parametrize("name", NAMES)
def test_cross_attention(name, kinds):
    case = single(name, n=30, m=200)
    assert_close(gradients(attend(name), case), twin(name, case))
    assert kinds == ["linear"]


def test_temperature(kinds):
    case = single("softmaxfeat", n=130)
    name = SoftmaxFeatures(temperature=2.0)
    for causal in (False, True):
        ours = gradients(attend(name, causal=causal), case)
        assert_close(ours, twin(name, case, causal=causal))
    assert kinds == ["linear", "causal"]


EVERY_KIND = pytest.mark.parametrize(
    "kind, n", [("linear", 130), ("causal", 130), ("quadratic", 9)]
)


@EVERY_KIND
@pytest.mark.parametrize("name", NAMES)
def test_large_keys_are_left_to_torch(name, kind, n, kinds, monkeypatch):
    case = single(name, n=n)
    case = case._replace(k=12 * case.k)
    run = attend(name, causal=kind == "causal")
    ours = gradients(run, case)
    assert kinds == [None]
    monkeypatch.setenv("COULOMB_NUMBA", "0")
    for a, b in zip(ours, gradients(run, case), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kept", [False, True])
@EVERY_KIND
@pytest.mark.parametrize("name", NAMES)
def test_queries_may_be_large(name, kind, n, kept, kinds, monkeypatch):
    """Exponents far above those of keys: their largest cancels."""
    monkeypatch.setattr("coulomb.attention.ops.api._KEPT_BYTES", kept << 40)
    case = single(name, n=n)
    case = case._replace(q=12 * case.q, k=case.k / 2)
    options = {"causal": kind == "causal"}
    ours = gradients(attend(name, **options), case)
    assert kinds == [kind]
    assert_close(ours, twin(name, case, **options))


@EVERY_KIND
@pytest.mark.parametrize("where", ["q", "k", "v", "particles"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_is_not_hidden(name, value, where, kind, n, kinds):
    """Just as without the loops; elsewhere nothing changes."""
    case = single(name, n=n)
    wrong = {x: getattr(case, x).clone() for x in "qkv"}
    wrong["particles"] = case.particles.positions.clone()
    wrong[where][..., 5, 3] = value
    out = attend(name, causal=kind == "causal")(
        *(wrong[x] for x in "qkv"), Particles(wrong["particles"])
    )
    expected = attend(name, causal=kind == "causal")(*case)
    seen = ~out.isfinite().all(dim=-1)  # (batch, heads, n)
    assert seen[..., 5].all()
    if where == "q":
        rest = [r for r in range(n) if r != 5]
        torch.testing.assert_close(
            out[..., rest, :], expected[..., rest, :], rtol=1e-4, atol=1e-5
        )
    else:
        assert seen[..., 5:].all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [9, 130])
@pytest.mark.parametrize("name", NAMES)
def test_padding_may_hold_anything_and_gets_nothing(name, n, causal, kinds):
    case = single(name, n=n)
    mask = padding(case)
    hidden = ~mask[:, None, :, None]
    dirty = case._replace(
        **{x: getattr(case, x).masked_fill(hidden, torch.nan) for x in "kv"}
    )
    options = {"key_mask": mask, "causal": causal}
    clean = gradients(attend(name, **options), case)
    for a, b in zip(clean, gradients(attend(name, **options), dirty), strict=True):
        assert torch.equal(a, b)
    assert not any((x * hidden).any() for x in clean[2:4])
    assert not clean[0][-1].any()  # no real key at all
    assert None not in kinds


@pytest.mark.parametrize("name", NAMES)
def test_more_padding_changes_not_one_bit(name, kinds):
    case, outputs = single(name, n=120), []
    for more in (7, 300):
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, more), value=3) for x in case[1:3])
        mask = (torch.arange(120 + more) < 120).expand(3, -1)
        outputs.append(kernel_attention(case.q, k, v, case.particles, name, mask))
    assert torch.equal(*outputs)
    assert kinds == ["linear"] * 2


@pytest.mark.parametrize("causal", [False, True])
def test_threads_give_the_same_bits(causal, kinds, monkeypatch):
    case = single("favor", n=130)
    runs = []
    for threads in (1, 2):
        monkeypatch.setattr(_compiled, "threads_for", lambda *_, t=threads: t)
        runs.append(gradients(attend("favor", causal=causal), case))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_views_and_repeated_passes(causal, kinds):
    case = single("favor", n=130)
    run = attend("favor", causal=causal)
    joint = torch.cat([x.transpose(1, 2) for x in case[:3]], dim=-1)
    parts = joint.split((16, 16, 32), dim=-1)
    views = [x.transpose(1, 2).detach().requires_grad_() for x in parts]
    out = run(*views, case.particles)
    assert torch.equal(out, run(*case))
    assert out.transpose(1, 2).is_contiguous()
    passes = [torch.autograd.grad(out.sum(), views, retain_graph=True) for _ in "ab"]
    assert all(torch.equal(a, b) for a, b in zip(*passes, strict=True))


def test_heads_may_share_particles(kinds):
    case = single("favor", n=100)
    shared = case.particles.positions[0].clone().requires_grad_()
    out = kernel_attention(*case[:3], Particles(shared), "favor")
    (grad,) = torch.autograd.grad(out.square().sum(), shared)
    every = shared.detach().expand(2, -1, -1).clone().requires_grad_()
    out = kernel_attention(*case[:3], Particles(every), "favor")
    (grads,) = torch.autograd.grad(out.square().sum(), every)
    torch.testing.assert_close(grad, grads.sum(dim=0))
    assert kinds == ["linear"] * 2


@pytest.mark.parametrize("wanted", ["q", "k", "v", "particles"])
def test_one_gradient_alone(wanted, kinds):
    case = single("softmaxfeat", n=100)
    every = dict(zip("qkv", gradients(attend("softmaxfeat"), case)[1:4], strict=True))
    every["particles"] = gradients(attend("softmaxfeat"), case)[4]
    leaves = {"particles": case.particles.positions}
    leaves |= {x: getattr(case, x) for x in "qkv"}
    leaf = leaves[wanted] = leaves[wanted].clone().requires_grad_()
    out = attend("softmaxfeat")(
        *(leaves[x] for x in "qkv"), Particles(leaves["particles"])
    )
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (grad,) = torch.autograd.grad((out * weights).sum(), leaf)
    torch.testing.assert_close(grad, every[wanted])


def test_without_numba_torch_gives_the_same(kinds, monkeypatch):
    case = single("favor", n=130)
    ours = gradients(attend("favor", causal=True), case)
    monkeypatch.setenv("COULOMB_NUMBA", "0")
    assert_close(ours, gradients(attend("favor", causal=True), case))
    assert kinds == ["causal"]


@pytest.mark.parametrize("name", NAMES)
def test_decoding(name, kinds, monkeypatch):
    """Token by token from an empty state and from a prefix; the state before stays."""
    case = single(name, n=40)
    shape = {"batch": 3, "heads": 2, "dim_v": 32}
    empty = init_state(case.particles, name, **shape)
    prefix = prefill(case.k[:, :, :20], case.v[:, :, :20], case.particles, name)
    before = [x.clone() for x in (*empty, *prefix)]
    decode = partial(decode_all, case, name)
    outputs = decode(empty, 0), decode(prefix, 20)
    for a, b in zip(before, (*empty, *prefix), strict=True):
        assert torch.equal(a, b)
    monkeypatch.setenv("COULOMB_NUMBA", "0")
    for (ours, state), (theirs, other) in zip(
        outputs, (decode(empty, 0), decode(prefix, 20)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        for a, b in zip(state, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    expected = kernel_attention(*case, name, causal=True)
    torch.testing.assert_close(outputs[0][0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_decoder_gives_the_bits_of_single_steps(name, kinds):
    case = single(name, n=20)
    state = init_state(case.particles, name, batch=3, heads=2, dim_v=32)
    decoder = Decoder(state, case.particles, name)
    expected, after = decode_all(case, name, state, 0)
    for t in range(20):
        if t == 10:
            assert decoder._step is not None
            # A token that the loops do not take: the next ones go on from its state.
            q = case.q[:, :, t].double().float().requires_grad_()
        else:
            q = case.q[:, :, t]
        out = decoder.step(q, case.k[:, :, t], case.v[:, :, t]).detach()
        if t < 10:
            assert torch.equal(out, expected[:, :, t])
        torch.testing.assert_close(out, expected[:, :, t], rtol=1e-5, atol=1e-6)
    for a, b in zip(decoder.state, after, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert not state.sums.any()
    with pytest.raises(ValueError, match="must agree"):
        decoder.step(q[:1], case.k[:, :, 0], case.v[:, :, 0])


def decode_all(case, name, state, start):
    outputs = []
    for t in range(start, case.q.shape[2]):
        q, k, v = (x[:, :, t] for x in case[:3])
        out, state = decode_step(state, q, k, v, case.particles, name)
        outputs.append(out)
    return torch.stack(outputs, dim=2), state


def test_decoding_at_large_norms_with_shared_particles(kinds):
    case = single("favor", n=30)
    shared = Particles(case.particles.positions[0])
    case = case._replace(q=1e3 * case.q, k=1e3 * case.k, particles=shared)
    state = init_state(shared, "favor", batch=3, heads=2, dim_v=32)
    out, state = decode_all(case, "favor", state, 0)
    assert all(x.isfinite().all() for x in (out, *state))
    torch.testing.assert_close(out, kernel_attention(*case, "favor", causal=True))


def test_a_decoded_token_can_be_differentiated(kinds):
    case = single("favor", n=3)
    state = prefill(case.k, case.v, case.particles, "favor")
    q, k, v = (x[:, :, 0].clone().requires_grad_() for x in case[:3])
    out, _ = decode_step(state, q, k, v, case.particles, "favor")
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(x.any() for x in grads)
    with torch.no_grad():
        other, _ = decode_step(state, q, k, v, case.particles, "favor")
    torch.testing.assert_close(other, out)
