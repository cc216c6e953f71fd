"""What must hold for every shape, mask and map."""

from itertools import pairwise

import pytest
import torch
from attention_cases import MAPS, gradients, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from coulomb.attention import (
    decode_step,
    init_state,
    kernel_attention,
    packed_attention,
)

settings.register_profile("attention", deadline=None, max_examples=25, derandomize=True)
few = settings(settings.get_profile("attention"))

names = st.sampled_from(MAPS)
sizes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "heads": st.integers(1, 3),
        "n": st.integers(1, 140),
        "dim": st.integers(1, 4),
        "dim_v": st.integers(1, 3),
        "n_particles": st.integers(1, 9),
        "seed": st.integers(0, 99),
    }
)
dtypes = st.sampled_from([torch.float32, torch.float64])


def close(a, b):
    tolerance = 1e-6 if a.dtype == torch.float64 else 5e-5
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@few
@given(names, sizes, dtypes, st.booleans(), st.integers(0, 150))
def test_padding_changes_nothing(name, size, dtype, causal, extra):
    case = make_case(name, dtype=dtype, **size)
    n = size["n"]
    mask = (torch.arange(n + extra) < n).expand(size["batch"], -1)
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, extra), value=3) for x in case[:3])
    padded = kernel_attention(q, k, v, case.particles, name, mask, causal=causal)
    close(padded[:, :, :n], kernel_attention(*case, name, causal=causal))


@few
@given(names, sizes, st.integers(1, 60))
def test_doubling_the_padding_changes_not_one_bit(name, size, extra):
    case = make_case(name, dtype=torch.float32, **size)
    n, outputs = size["n"], []
    for more in (extra, 2 * extra):
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, more)) for x in case[1:3])
        mask = (torch.arange(n + more) < n).expand(size["batch"], -1)
        outputs.append(
            kernel_attention(case.q, k, v, case.particles, name, mask, form="linear")
        )
    assert torch.equal(*outputs)


@few
@given(names, sizes, st.booleans(), st.data())
def test_packed_equals_separate(name, size, causal, data):
    n = size["n"]
    case = make_case(name, **{**size, "batch": 1})
    q, k, v = (x[0].transpose(0, 1) for x in case[:3])
    inner = data.draw(st.lists(st.integers(0, n), max_size=4).map(sorted))
    bounds = [0, *inner, n]
    packed = packed_attention(
        q, k, v, case.particles, name, torch.tensor(bounds), causal=causal
    )
    for start, stop in pairwise(bounds):
        one = (x[:, :, start:stop] for x in case[:3])
        alone = kernel_attention(*one, case.particles, name, causal=causal)
        close(packed[start:stop].transpose(0, 1), alone[0])


@few
@given(names, sizes, dtypes, st.data())
def test_the_future_changes_nothing_before_it(name, size, dtype, data):
    case = make_case(name, dtype=dtype, **size)
    t = data.draw(st.integers(0, size["n"] - 1))
    factor = data.draw(st.sampled_from([-1.0, 3.0, 100.0]))
    changed = [torch.cat([x[:, :, :t], factor * x[:, :, t:]], dim=2) for x in case[:3]]
    before = kernel_attention(*case, name, causal=True)[:, :, :t]
    after = kernel_attention(*changed, case.particles, name, causal=True)[:, :, :t]
    close(before, after)


@few
@given(names, sizes, st.booleans(), st.data())
def test_masked_tokens_get_no_gradient(name, size, causal, data):
    case = make_case(name, **size)
    shape = (size["batch"], size["n"])
    bits = st.lists(st.booleans(), min_size=shape[1], max_size=shape[1])
    mask = torch.tensor([data.draw(bits) for _ in range(shape[0])])
    _, _, grad_k, grad_v, *_ = gradients(
        lambda *a: kernel_attention(*a, name, mask, causal=causal), case
    )
    hidden = ~mask[:, None, :, None]
    assert not (grad_k * hidden).any()
    assert not (grad_v * hidden).any()


@settings(few, max_examples=8)
@given(names, sizes)
def test_recurrent_equals_parallel(name, size):
    case = make_case(name, **size)
    state = init_state(
        case.particles,
        name,
        batch=size["batch"],
        heads=size["heads"],
        dim_v=size["dim_v"],
    )
    expected = kernel_attention(*case, name, causal=True)
    for t in range(size["n"]):
        q, k, v = (x[:, :, t] for x in case[:3])
        out, state = decode_step(state, q, k, v, case.particles, name)
        close(out, expected[:, :, t])


@few
@given(names, sizes, dtypes, st.booleans(), st.integers(0, 40))
def test_linear_equals_quadratic(name, size, dtype, causal, m):
    case = make_case(name, dtype=dtype, **size, m=None if causal else m)
    both = [
        kernel_attention(*case, name, causal=causal, form=form)
        for form in ("linear", "quadratic")
    ]
    close(*both)


@few
@given(names, sizes, st.permutations(range(6)))
def test_the_order_of_keys_does_not_matter(name, size, order):
    case = make_case(name, **{**size, "m": 6})
    out = kernel_attention(*case, name)
    k, v = (x[:, :, order] for x in case[1:3])
    close(out, kernel_attention(case.q, k, v, case.particles, name))


@few
@given(st.sampled_from([n for n in MAPS if "fourier" not in n]), sizes)
def test_outputs_are_averages_of_values(name, size):
    case = make_case(name, **size)
    out = kernel_attention(*case, name)
    low, high = case.v.aminmax(dim=2, keepdim=True)
    assert ((out >= low - 1e-9) & (out <= high + 1e-9)).all()


def test_maps_are_found_through_the_registry():
    assert {"favor", "softmaxfeat", "elu"} <= set(MAPS)
    with pytest.raises(ValueError, match="has no member"):
        kernel_attention(*make_case("elu"), "unknown")
