"""Recurrent decoding against the parallel causal form."""

import pytest
import torch
from attention_cases import MAPS, make_case, padding

from coulomb.attention import decode_step, init_state, kernel_attention, prefill
from coulomb.features import Particles


def decode(state, case, name, start=0):
    outputs = []
    for t in range(start, case.q.shape[2]):
        q, k, v = (x[:, :, t] for x in case[:3])
        out, state = decode_step(state, q, k, v, case.particles, name)
        outputs.append(out)
    return torch.stack(outputs, dim=2), state


@pytest.mark.parametrize("name", ["favor", "softmaxfeat"])
def test_a_thousand_tokens_equal_the_parallel_form(name):
    case = make_case(name, n=1000, dim=8, n_particles=32, dtype=torch.float32)
    state = init_state(case.particles, name, batch=2, heads=2, dim_v=2)
    out, _ = decode(state, case, name)
    expected = kernel_attention(*case, name, causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MAPS)
def test_prefill_then_decode(name):
    case = make_case(name, n=12)
    expected = kernel_attention(*case, name, causal=True)
    state = prefill(case.k[:, :, :5], case.v[:, :, :5], case.particles, name)
    state = prefill(
        case.k[:, :, 5:8], case.v[:, :, 5:8], case.particles, name, state=state
    )
    out, _ = decode(state, case, name, start=8)
    torch.testing.assert_close(out, expected[:, :, 8:])


@pytest.mark.parametrize("name", MAPS)
def test_prefill_with_padding(name):
    case = make_case(name, batch=3)
    mask = padding(case)
    full = prefill(case.k, case.v, case.particles, name, mask)
    for b in range(3):
        keep = mask[b]
        k, v = (x[b : b + 1, :, keep] for x in case[1:3])
        if not keep.any():
            assert not full.normaliser[b].any()
            continue
        alone = prefill(k, v, case.particles, name)
        for a, whole in zip(alone, full, strict=True):
            torch.testing.assert_close(a[0], whole[b])


def test_large_keys_do_not_overflow_the_state():
    case = make_case("favor", n=50, dtype=torch.float32)
    case = case._replace(k=1e4 * case.k, q=1e4 * case.q)
    state = init_state(case.particles, "favor", batch=2, heads=2, dim_v=2)
    out, state = decode(state, case, "favor")
    assert out.isfinite().all()
    assert all(x.isfinite().all() for x in state)
    torch.testing.assert_close(out, kernel_attention(*case, "favor", causal=True))


def test_the_state_is_not_changed_and_keeps_its_size():
    case = make_case("elu")
    state = init_state(case.particles, "elu", batch=2, heads=2, dim_v=2)
    _, after = decode(state, case, "elu")
    assert not state.sums.any()
    assert [x.shape for x in state] == [x.shape for x in after]


def test_half_precision_decodes_into_a_float32_state():
    case = make_case("favor", dtype=torch.float32)
    state = init_state(case.particles, "favor", batch=2, heads=2, dim_v=2)
    q, k, v = (x[:, :, 0].bfloat16() for x in case[:3])
    out, state = decode_step(state, q, k, v, case.particles, "favor")
    assert out.dtype == torch.bfloat16
    assert state.sums.dtype == torch.float32
    torch.testing.assert_close(out, v)


def test_message():
    case = make_case("elu")
    state = init_state(case.particles, "elu", batch=2, heads=2, dim_v=2)
    with pytest.raises(ValueError, match=r"must have shape \(batch, heads, dim\); got"):
        decode_step(state, *case, "elu")


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 4, 3), (3, 5, 3)])
def test_wrong_particles_are_named_before_the_loops_see_them(shape, monkeypatch):
    monkeypatch.setattr("coulomb.attention.ops.compiled._FEWEST_DECODED", 0)
    case = make_case("favor", dtype=torch.float32)
    state = init_state(case.particles, "favor", batch=2, heads=2, dim_v=2)
    q, k, v = (x[:, :, 0] for x in case[:3])
    # Particles of another number than those that the state was made with, or odd ones.
    words = "`state` must" if shape == (2, 4, 3) else r"particles.positions` must have"
    with pytest.raises(ValueError, match=words):
        decode_step(state, q, k, v, Particles(torch.zeros(shape)), "favor")
    with pytest.raises(ValueError, match="must have shape"):
        decode_step(state, q, k, v[..., 0], case.particles, "favor")


@pytest.mark.parametrize("name", ["favor", "elu"])
def test_an_empty_prompt_leaves_the_state(name):
    case = make_case(name)
    empty = case.k[:, :, :0], case.v[:, :, :0]
    state = prefill(*empty, case.particles, name)
    assert not state.sums.any()
    assert prefill(*empty, case.particles, name, state=state) is state
