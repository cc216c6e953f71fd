"""Numbers at the edge: large norms, half precision, empty sequences, bad arguments."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attention_cases import MAPS, gradients, make_case, padding

import attention_twins as twins
from coulomb.attention import (
    kernel_attention,
    kernel_weights,
    linear_attention,
    packed_attention,
)
from coulomb.features import Particles, feature_maps

POSITIVE = [name for name in MAPS if feature_maps.build(name).positive]


LOGARITHMIC = [name for name in MAPS if feature_maps.build(name).has_log_features]


def log_twin(q, k, v, particles, causal=False, name="favor"):
    """Attend in logarithms, so that nothing can leave the range."""
    phi = feature_maps.build(name)
    left, right = (phi.log_features(x, particles) for x in (q, k))
    logs = torch.logsumexp(left.unsqueeze(-2) + right.unsqueeze(-3), dim=-1)
    if causal:
        future = torch.ones(logs.shape[-2:], dtype=torch.bool).triu(1)
        logs = logs.masked_fill(future, -torch.inf)
    return logs.softmax(dim=-1) @ v


@pytest.mark.parametrize("norm", [1.0, 30.0, 1e3, 1e4])
@pytest.mark.parametrize("causal", [False, True])
def test_favor_is_exact_at_every_norm(norm, causal):
    case = make_case("favor", n=80, dim=8, n_particles=16)
    q, k = (norm * torch.nn.functional.normalize(x, dim=-1) for x in case[:2])
    out = kernel_attention(q, k, case.v, case.particles, "favor", causal=causal)
    expected = log_twin(q, k, case.v, case.particles, causal)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def scaled_case(name, scale, dtype):
    case = make_case(name, n=9, dim=8, n_particles=16, dtype=torch.float32)
    q, k, v = scale * case.q, scale * case.k, case.v
    return case._replace(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1, 5, 20, 100, 1000])
@pytest.mark.parametrize("form", ["linear", "quadratic"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LOGARITHMIC)
def test_far_features_keep_output_and_gradients(name, causal, form, scale, dtype):
    """Features of queries and keys whose products vanish in this precision."""
    case = scaled_case(name, scale, dtype)
    ours = gradients(
        lambda *a: kernel_attention(*a, name, causal=causal, form=form), case
    )
    double = case._replace(
        **{x: getattr(case, x).double() for x in "qkv"},
        particles=Particles(*(x.double() for x in case.particles)),
    )
    truth = gradients(lambda *a: log_twin(*a, causal=causal, name=name), double)
    # Rounding of an exponent of the size of `scale` squared, or of the result.
    step = max(torch.finfo(dtype).eps, 2e-6 * scale)
    for a, b in zip(ours, truth, strict=True):
        assert a.isfinite().all()
        slack = 20 * step * max(1.0, float(b.abs().max()))
        torch.testing.assert_close(a.double(), b, rtol=0.01, atol=slack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1, 5, 20, 100, 1000])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LOGARITHMIC)
def test_the_twin_is_exact_at_every_norm(name, causal, scale, dtype):
    case = scaled_case(name, scale, dtype)
    out = twins.kernel_attention(*case, name, causal=causal)
    double = [x.double() for x in case[:3]]
    particles = Particles(*(x.double() for x in case.particles))
    expected = log_twin(*double, particles, causal, name)
    error = min(20 * torch.finfo(dtype).eps * scale**2, 1e-3)
    torch.testing.assert_close(out.double(), expected, rtol=error, atol=error)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_twins_without_keys(name, causal):
    case = make_case(name, n=0 if causal else 3, m=0)
    mask = torch.ones(2, 0, dtype=torch.bool)
    for key_mask in (None, mask):
        options = {"key_mask": key_mask, "causal": causal}
        out = twins.kernel_attention(*case, name, **options)
        assert torch.equal(out, torch.zeros_like(case.q[..., :2]))
        rows = kernel_weights(*case[:2], case.particles, name, **options)
        assert rows.shape == (2, 2, case.q.shape[2], 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_large_norms_stay_finite_in_float32(name, causal):
    case = make_case(name, n=70, dim=16, dtype=torch.float32)
    q, k = (1e4 * torch.nn.functional.normalize(x, dim=-1) for x in case[:2])
    results = gradients(
        lambda q, k, v, p: kernel_attention(q, k, v, p, name, causal=causal),
        case._replace(q=q, k=k),
    )
    assert all(x.isfinite().all() for x in results)


def test_a_huge_key_does_not_erase_the_rows_before_it():
    case = make_case("favor", n=40, dtype=torch.float32)
    k = case.k.clone()
    # Along a particle the exponent of a key is |w|^2 / 2 at most.
    positions = 30 * case.particles.positions
    k[:, :, 20] = positions[:, 0]
    particles = Particles(positions)
    args = (0.1 * case.q, 0.1 * case.k, case.v, particles, "favor")
    before = kernel_attention(*args, causal=True)
    args = (0.1 * case.q, torch.where(k == case.k, 0.1 * k, k), *args[2:])
    after = kernel_attention(*args, causal=True)
    torch.testing.assert_close(after[:, :, :20], before[:, :, :20])
    assert not torch.allclose(after[:, :, 20:], before[:, :, 20:])


def test_the_stabiliser_cancels():
    case = make_case("favor", n=20)
    out = kernel_attention(*case, "favor")
    torch.testing.assert_close(out, twins.kernel_attention(*case, "favor"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", ["linear", "quadratic"])
@pytest.mark.parametrize("name", MAPS)
def test_without_a_real_key_output_and_gradients_are_zero(name, form, causal):
    case = make_case(name)
    mask = torch.tensor([[True] * 7, [False] * 7])
    results = gradients(
        lambda *a: kernel_attention(*a, name, mask, causal=causal, form=form), case
    )
    assert all(x.isfinite().all() for x in results)
    out, grad_q, grad_k, grad_v = results[:4]
    assert not any(x[1].any() for x in (out, grad_q, grad_k, grad_v))
    assert out[0].all()


@pytest.mark.parametrize("name", MAPS)
def test_padding_may_hold_anything(name):
    case = make_case(name)
    mask = padding(case)
    k, v = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in case[1:3])
    dirty = kernel_attention(case.q, k, v, case.particles, name, mask)
    assert torch.equal(dirty, kernel_attention(*case, name, mask))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", POSITIVE)
def test_half_precision_accumulates_in_float32(name, dtype, causal):
    case = make_case(name, n=200, dtype=torch.float32)
    half = case._replace(**{x: getattr(case, x).to(dtype) for x in "qkv"})
    exact = half._replace(**{x: getattr(half, x).float() for x in "qkv"})
    ours = gradients(lambda *a: kernel_attention(*a, name, causal=causal), half)
    assert ours[0].dtype == ours[1].dtype == dtype
    assert ours[4].dtype == torch.float32
    expected = kernel_attention(*exact, name, causal=causal)
    torch.testing.assert_close(ours[0], expected.to(dtype))
    assert all(x.isfinite().all() for x in ours)


@pytest.mark.parametrize("causal", [False, True])
def test_autocast_leaves_the_sums_in_float32(causal):
    case = make_case("favor", n=70, dtype=torch.float32)
    plain = gradients(lambda *a: kernel_attention(*a, "favor", causal=causal), case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = gradients(lambda *a: kernel_attention(*a, "favor", causal=causal), case)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_nothing_is_drawn():
    case = make_case("favor")
    before = torch.get_rng_state()
    first = kernel_attention(*case, "favor", causal=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, kernel_attention(*case, "favor", causal=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_cuda_equals_cpu(name, causal):
    case = make_case(name, n=200)
    mask = padding(case)
    device = case._replace(
        **{x: getattr(case, x).cuda() for x in "qkv"},
        particles=Particles(*(x.cuda() for x in case.particles)),
    )
    here = kernel_attention(*case, name, mask, causal=causal)
    there = kernel_attention(*device, name, mask.cuda(), causal=causal)
    torch.testing.assert_close(there.cpu(), here)


def test_messages():
    case = make_case("elu")
    q, k, v, particles = case
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    with pytest.raises(ValueError, match=r"`key_mask` must have shape \(batch, leng"):
        kernel_attention(*case, "elu", torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(TypeError, match="`key_mask` must be boolean"):
        kernel_attention(*case, "elu", torch.ones(2, 7))
    with pytest.raises(ValueError, match="did you mean 'linear'"):
        kernel_attention(*case, "elu", form="lineer")
    with pytest.raises(ValueError, match="did you mean 'favor'"):
        kernel_attention(*case, "favour")
    with pytest.raises(ValueError, match="needs as many queries as keys; got 7 and 5"):
        kernel_attention(q, k[:, :, :5], v[:, :, :5], particles, "elu", causal=True)
    with pytest.raises(ValueError, match="`k` and `v` must agree"):
        kernel_attention(q, k, v[:, :, :5], particles, "elu")
    with pytest.raises(ValueError, match="`phi_q` and `phi_k` must agree"):
        linear_attention(q[:1], k, v)
    with pytest.raises(ValueError, match=r"`q` must have shape \(batch, heads, length"):
        kernel_attention(q[0], k, v, particles, "elu")
    with pytest.raises(TypeError, match="`v` must be a floating-point tensor"):
        kernel_attention(q, k, v.long(), particles, "elu")
    with pytest.raises(ValueError, match="one group for each of 2 heads; got 1"):
        kernel_attention(q, k, v, Particles(particles.positions[:1]), "elu")
    with pytest.raises(ValueError, match="with dim = 3; got"):
        kernel_attention(q, k, v, Particles(particles.positions[..., :2]), "elu")
    wrong = particles._replace(phases=particles.phases[:, :2])
    with pytest.raises(ValueError, match="phases` must have shape"):
        kernel_attention(q, k, v, wrong, "elu")
    with pytest.raises(ValueError, match="rise from 0 to the number of tokens, 7"):
        packed_attention(*packed, particles, "elu", torch.tensor([0, 3]))
    with pytest.raises(TypeError, match="vector of whole numbers"):
        packed_attention(*packed, particles, "elu", torch.tensor([0.0, 7]))


@pytest.mark.parametrize("causal", [False, True])
def test_inference_mode_leaves_nothing_behind(causal):
    case = make_case("favor", n=70)
    with torch.inference_mode():
        first = kernel_attention(*case, "favor", causal=causal)
    results = gradients(lambda *a: kernel_attention(*a, "favor", causal=causal), case)
    assert torch.equal(first, results[0])


@pytest.mark.parametrize("causal", [False, True])
def test_the_backward_pass_can_be_repeated(causal):
    case = make_case("favor", n=70)
    q = case.q.clone().requires_grad_()
    out = kernel_attention(q, *case[1:], "favor", causal=causal).sum()
    first, second = (torch.autograd.grad(out, q, retain_graph=True) for _ in range(2))
    assert torch.equal(*first, *second)


def test_a_map_may_use_attention_itself():
    # The arrays of the outer call must not be lent to the inner one.
    case = make_case("favor", n=70)

    def nested(x, particles):
        inner = kernel_attention(
            x[None], x[None], x[None], particles, "softmaxfeat", form="linear"
        )
        return (inner[0] @ particles.positions.transpose(-1, -2)).square()

    ours = gradients(lambda *a: kernel_attention(*a, nested, form="linear"), case)
    assert all(x.isfinite().all() for x in ours)
    again = gradients(lambda *a: kernel_attention(*a, nested, form="quadratic"), case)
    assert not torch.allclose(ours[0], case.v.mean(dim=2, keepdim=True))
    torch.testing.assert_close(ours[0], again[0])


def test_threads_do_not_share_arrays():
    cases = [make_case("favor", n=200, seed=s) for s in range(4)]
    alone = [kernel_attention(*case, "favor", causal=True) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        run = [
            pool.submit(kernel_attention, *case, "favor", causal=True)
            for case in cases * 5
        ]
    for out, expected in zip(run, alone * 5, strict=True):
        assert torch.equal(out.result(), expected)
