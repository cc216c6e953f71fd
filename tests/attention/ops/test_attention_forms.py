"""Every form of every map against its quadratic twin, in value and gradient."""

from functools import partial

import pytest
import torch
from attention_cases import MAPS, gradients, make_case, padding

import attention_twins as twins
from coulomb.attention import (
    attention_weights,
    kernel_attention,
    kernel_weights,
    linear_attention,
    packed_attention,
)
from coulomb.attention.ops.block_maps import ExponentialMap
from coulomb.features import Particles, as_feature_map

FORMS = ["linear", "quadratic", "auto"]
SEVERAL_BLOCKS = {
    "batch": 11,
    "heads": 3,
    "n": 150,
    "dim": 4,
    "dim_v": 3,
    "n_particles": 300,
}


def call(function, name):
    def run(q, k, v, particles, **options):
        return function(q, k, v, particles, name, **options)

    return run


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MAPS)
def test_equals_its_twin_in_value_and_gradient(name, form, causal, masked):
    case = make_case(name, batch=3, n=9)
    options = {"key_mask": padding(case) if masked else None, "causal": causal}
    ours = gradients(call(kernel_attention, name), case, form=form, **options)
    twin = gradients(call(twins.kernel_attention, name), case, **options)
    for a, b in zip(ours, twin, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_equals_its_twin_over_several_blocks_of_rows(name, causal):
    case = make_case(name, **SEVERAL_BLOCKS)
    options = {"key_mask": padding(case), "causal": causal}
    ours = gradients(call(kernel_attention, name), case, form="linear", **options)
    twin = gradients(call(twins.kernel_attention, name), case, **options)
    for a, b in zip(ours, twin, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("form", ["linear", "quadratic", "causal"])
@pytest.mark.parametrize("name", ["favor", "softmaxfeat"])
def test_kept_features_give_the_gradients_of_features_evaluated_again(
    name, form, monkeypatch
):
    # Later keys are larger, so that the shift of favor rises from block to block.
    case, calls = make_case(name, **SEVERAL_BLOCKS), []
    growth = torch.linspace(0.1, 2, 150, dtype=torch.float64).view(150, 1)
    case = case._replace(k=growth * case.k)
    evaluate = ExponentialMap._project
    monkeypatch.setattr(
        ExponentialMap, "_project", lambda *x: calls.append(0) or evaluate(*x)
    )
    options = {"key_mask": padding(case), "causal": form == "causal"}
    options["key_log_weight"] = torch.linspace(-3, 3, 11 * 3 * 150).view(11, 3, 150)
    options["form"] = "linear" if form == "causal" else form
    found, counts = [], []
    for most in (0, 1 << 40):
        monkeypatch.setattr("coulomb.attention.ops.api._KEPT_BYTES", most)
        calls.clear()
        found.append(gradients(call(kernel_attention, name), case, **options))
        counts.append(len(calls))
    assert counts[0] == 2 * counts[1]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", ["linear", "quadratic", "causal"])
@pytest.mark.parametrize("name", MAPS)
def test_gradcheck(name, form):
    case = make_case(name, batch=2, heads=1, n=4, dim=2, n_particles=3)
    mask = padding(case)
    needs_phases = name in ("fourier", "cos2", "elu")
    leaves = [*case[:3], *case.particles[: 1 + needs_phases]]
    leaves = [x.clone().requires_grad_() for x in leaves]

    def run(q, k, v, *particles):
        return kernel_attention(
            q,
            k,
            v,
            Particles(*particles),
            name,
            mask,
            causal=form == "causal",
            form="auto" if form == "causal" else form,
        )

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_given_features(form, causal):
    case = make_case("softplus", batch=3, n=70, dim=5)
    mask = padding(case)
    phi = case._replace(q=case.q.square(), k=case.k.square())

    def run(function, q, k, v, particles, **options):
        return function(q, k, v, mask, causal=causal, **options)

    ours = gradients(partial(run, linear_attention), phi, form=form)
    twin = gradients(partial(run, twins.linear_attention), phi)
    for a, b in zip(ours, twin, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n, m", [(3, 50), (50, 3), (1, 1), (2, 0), (0, 2)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["favor", "softmaxfeat", "softplus"])
def test_cross_attention(name, form, n, m):
    case = make_case(name, n=n, m=m)
    ours = gradients(call(kernel_attention, name), case, form=form)
    twin = gradients(call(twins.kernel_attention, name), case)
    for a, b in zip(ours, twin, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_packed_equals_separate_sequences(name, causal):
    case = make_case(name, batch=1, n=90)
    case = case._replace(
        **{x: getattr(case, x).squeeze(0).transpose(0, 1) for x in "qkv"}
    )
    bounds = torch.tensor([0, 4, 4, 5, 85, 90])
    options = {"cu_seqlens": bounds, "causal": causal}
    ours = gradients(call(packed_attention, name), case, **options)
    twin = gradients(call(twins.packed_attention, name), case, **options)
    for a, b in zip(ours, twin, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_heads_may_share_particles():
    case = make_case("elu")
    shared = Particles(case.particles.positions[0])
    out = kernel_attention(*case[:3], shared, "elu")
    every = Particles(shared.positions.expand(2, -1, -1))
    assert torch.equal(out, kernel_attention(*case[:3], every, "elu"))


def test_heads_split_by_a_transposed_view():
    case = make_case("softmaxfeat", n=80)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in case[:3])
    out = kernel_attention(q, k, v, case.particles, "softmaxfeat")
    torch.testing.assert_close(
        out, kernel_attention(*case, feature_map="softmaxfeat"), rtol=0, atol=1e-14
    )
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_implied_weights(name, causal):
    case = make_case(name, batch=3)
    mask = padding(case)
    weights = kernel_weights(*case[:2], case.particles, name, mask, causal=causal)
    out = kernel_attention(*case, name, mask, causal=causal)
    torch.testing.assert_close(weights @ case.v, out)
    phi_q, phi_k = (as_feature_map(name)(x, case.particles) for x in case[:2])
    torch.testing.assert_close(
        weights, attention_weights(phi_q, phi_k, mask, causal=causal)
    )


def test_custom_map():
    case = make_case("elu")

    def square(x, particles):
        return (x @ particles.positions.transpose(-1, -2)).square()

    ours = gradients(call(kernel_attention, square), case)
    twin = gradients(call(twins.kernel_attention, square), case)
    for a, b in zip(ours, twin, strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives_are_refused():
    case = make_case("favor")
    q = case.q.clone().requires_grad_()
    out = kernel_attention(q, *case[1:], "favor")
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_shapes_without_numbers(name, causal):
    case = make_case(name)
    q, k, v = (x.to("meta").requires_grad_() for x in case[:3])
    particles = Particles(*(x if x is None else x.to("meta") for x in case.particles))
    out = kernel_attention(q, k, v, particles, name, causal=causal)
    assert out.is_meta
    assert out.shape == v.shape
    out.sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("name", ["softmaxfeat", "favor", "cos2"])
def test_many_short_sequences_share_a_block(name):
    """One far longer key in one of them changes nothing in the others."""
    case = make_case(name, batch=40, n=6)
    case.k[3, :, 2] *= 1e3
    mask = padding(case)
    ours = gradients(call(kernel_attention, name), case, key_mask=mask)
    for i in (2, 3, 39):
        one = case._replace(**{x: getattr(case, x)[i : i + 1] for x in "qkv"})
        twin = call(kernel_attention, name)(
            *one[:3], one.particles, key_mask=mask[i : i + 1]
        )
        torch.testing.assert_close(ours[0][i : i + 1], twin, rtol=1e-10, atol=1e-12)
