"""Compiled, exported, mapped and cast: the plain path gives the same numbers."""

import pytest
import torch
from attention_cases import MAPS, gradients, make_case, padding
from torch import nn

from coulomb.attention import (
    decode_step,
    init_state,
    kernel_attention,
    linear_attention,
    packed_attention,
    prefill,
)
from coulomb.features import Particles


class Layer(nn.Module):
    """As much of a layer as the transforms need."""

    def __init__(self, name, particles, causal=False):
        super().__init__()
        self.name = name
        self.causal = causal
        self.positions = nn.Parameter(particles.positions.clone())
        self.phases = nn.Parameter(particles.phases.clone())

    def forward(self, q, k, v, key_mask=None):
        particles = Particles(self.positions, self.phases)
        return kernel_attention(
            q, k, v, particles, self.name, key_mask, causal=self.causal
        )


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_vmap_over_models_and_sequences(name, causal):
    cases = [make_case(name, n=70, seed=s) for s in range(3)]
    layers = [Layer(name, case.particles, causal) for case in cases]
    stacked, _ = torch.func.stack_module_state(layers)
    q, k, v = (torch.stack(x) for x in list(zip(*cases, strict=True))[:3])

    def run(parameters, q, k, v):
        return torch.func.functional_call(layers[0], parameters, (q, k, v))

    out = torch.func.vmap(run)(stacked, q, k, v)
    for i, (layer, case) in enumerate(zip(layers, cases, strict=True)):
        torch.testing.assert_close(out[i], layer(*case[:3]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["favor", "softmaxfeat", "cos2"])
def test_functional_gradients_equal_ours(name, causal):
    case = make_case(name, batch=3, n=70)
    mask = padding(case)

    def run(q, k, v, particles):
        return kernel_attention(q, k, v, particles, name, mask, causal=causal)

    out, *ours = gradients(run, case)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    theirs = torch.func.grad(
        lambda q, k, v, w, b: (run(q, k, v, Particles(w, b)) * weights).sum(),
        argnums=(0, 1, 2, 3, 4),
    )(*case[:3], *case.particles)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("causal", [False, True])
def test_jacobians(causal):
    case = make_case("favor", n=3)
    forward, backward = (
        jacobian(lambda q: kernel_attention(q, *case[1:], "favor", causal=causal))(
            case.q
        )
        for jacobian in (torch.func.jacfwd, torch.func.jacrev)
    )
    torch.testing.assert_close(forward, backward)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["favor", "softplus"])
def test_compiles_into_one_graph(name, causal):
    case = make_case(name, batch=2, n=70)
    layer = Layer(name, case.particles, causal)
    mask = padding(case)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    q = case.q.clone().requires_grad_()
    out = compiled(q, *case[1:3], mask)
    torch.testing.assert_close(out, layer(*case[:3], mask))
    (ours,) = torch.autograd.grad(layer(q, *case[1:3], mask).square().sum(), q)
    (theirs,) = torch.autograd.grad(out.square().sum(), q)
    torch.testing.assert_close(ours, theirs)


def test_compiles_given_features_decoding_and_packing():
    case = make_case("favor", n=9)
    phi = case.q.square(), case.k.square(), case.v
    bounds = torch.tensor([0, 2, 2])
    packed = [x[:, 0] for x in case[:3]]  # two tokens of seven heads
    wide = Particles(case.particles.positions[0])

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run():
        state = prefill(case.k, case.v, case.particles, "favor")
        q, k, v = (x[:, :, 0] for x in case[:3])
        return (
            linear_attention(*phi, causal=True),
            linear_attention(*phi, form="quadratic"),
            decode_step(state, q, k, v, case.particles, "favor")[0],
            packed_attention(*packed, wide, "favor", bounds, max_length=2),
        )

    with torch.no_grad():
        first = run()
    expected = (
        linear_attention(*phi, causal=True),
        linear_attention(*phi),
        decode_step(
            prefill(case.k, case.v, case.particles, "favor"),
            *(x[:, :, 0] for x in case[:3]),
            case.particles,
            "favor",
        )[0],
        packed_attention(*packed, wide, "favor", bounds),
    )
    for a, b in zip(first, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor():
    case = make_case("softmaxfeat", batch=1, n=40, dtype=torch.float32)
    layer = Layer("softmaxfeat", case.particles)
    out = torch.compile(layer, fullgraph=True)(*case[:3])
    torch.testing.assert_close(out, layer(*case[:3]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["favor", "elu"])
def test_export_with_a_symbolic_length(name, causal):
    case = make_case(name, n=70)
    layer = Layer(name, case.particles, causal)
    mask = torch.ones(2, 70, dtype=torch.bool)
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = ({2: length}, {2: length}, {2: length}, {1: length})
    program = torch.export.export(
        layer, (*case[:3], mask), dynamic_shapes=shapes, strict=False
    )
    for n in (5, 130):
        other = make_case(name, n=n, seed=3)
        mask = padding(other)
        expected = layer(*other[:3], mask)
        torch.testing.assert_close(program.module()(*other[:3], mask), expected)


def test_the_state_is_a_tuple_of_tensors():
    case = make_case("favor")
    state = init_state(case.particles, "favor", batch=2, heads=2, dim_v=2)
    step = torch.func.vmap(
        lambda q, k, v: decode_step(state, q, k, v, case.particles, "favor")
    )
    q, k, v = (x.permute(2, 0, 1, 3) for x in case[:3])
    out, states = step(q, k, v)
    torch.testing.assert_close(out, v)
    assert states.sums.shape == (7, *state.sums.shape)
