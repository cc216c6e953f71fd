"""Every torch path of attention runs on any device; the compiled loops fall back."""

from functools import partial

import pytest
import torch
from torch import nn

from coulomb.attention import (
    EncoderSettings,
    KernelAttention,
    KernelEncoder,
    attention_layers,
    decode_step,
    kernel_attention,
    linear_attention,
    packed_attention,
    prefill,
)
from coulomb.attention.encoder.layout import TokenBatch
from coulomb.attention.encoder.packed import TorchForm, packed_form, packed_logits
from coulomb.attention.ops import blocked, checks, compiled
from coulomb.features import Particles, feature_maps

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
# Meta tensors have no numbers, but refuse to meet tensors of another device.
DEVICES = ["cpu", "meta", pytest.param("cuda", marks=NO_GPU)]
MAPS = [name for name in sorted(feature_maps) if feature_maps.build(name).positive]
HEADS, N, DIM, M = 2, 150, 16, 32
BOUNDS = torch.tensor([0, 40, 45, N])


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """Give a device, on which the forms in blocks run as on any other."""
    if request.param == "meta":
        monkeypatch.setattr(checks, "must_be_traceable", lambda x: False)
        monkeypatch.setattr(
            blocked.Block, "in_range", lambda self, normaliser, *, causal: True
        )
    return request.param


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def operands(*, packed=False):
    shape = (N, HEADS, DIM) if packed else (2, HEADS, N, DIM)
    return [scale * draw(*shape) for scale in (0.5, -0.4, 1.0)]


def assert_same(function, tensors, device):
    """Compare outputs and gradients with those in double precision on the CPU."""
    results = []
    for place, dtype in ((device, torch.float32), ("cpu", torch.float64)):
        leaves = [x.to(place, dtype).requires_grad_() for x in tensors]
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for found, expected in zip(*results, strict=True):
        assert (found.device.type, found.shape) == (device, expected.shape)
        if device != "meta":
            torch.testing.assert_close(
                found.cpu().double(), expected, rtol=1e-3, atol=1e-4
            )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_attention(name, causal, device):
    def attend(q, k, v, positions, phases, weights):
        mask = torch.ones(2, N, dtype=torch.bool, device=q.device)
        keys = Particles(positions.flip(1), phases)
        options = {"key_particles": keys, "key_log_weight": weights, "causal": causal}
        particles = Particles(positions, phases)
        needs = feature_maps.build(name).needs_phases
        return kernel_attention(q, k, v, particles, name, mask, **options) + (
            0 if needs else 0 * phases.sum()
        )

    others = draw(HEADS, M, DIM), draw(HEADS, M), draw(2, HEADS, N)
    assert_same(attend, [*operands(), *others], device)


@pytest.mark.parametrize("form", ["linear", "quadratic"])
def test_given_features(form, device):
    q, k, v = operands()
    assert_same(
        lambda *x: linear_attention(*x, form=form), [q.exp(), k.exp(), v], device
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["favor", "elu"])
def test_packed_attention(name, causal, device):
    if device == "meta":
        pytest.skip("where sequences begin and end has to be read")

    def attend(q, k, v, positions):
        about = Particles(positions), name, BOUNDS
        return packed_attention(q, k, v, *about, causal=causal)

    assert_same(attend, [*operands(packed=True), draw(HEADS, M, DIM)], device)


@pytest.mark.parametrize("name", ["favor", "softmaxfeat", "elu"])
def test_decoding(name, device):
    def decode(q, k, v, positions):
        particles = Particles(positions)
        state = prefill(k, v, particles, name)
        return decode_step(state, q[:, :, 0], k[:, :, 0], v[:, :, 0], particles, name)[
            0
        ]

    tensors = [*operands(), draw(HEADS, M, DIM)]
    assert_same(decode, tensors, device)


@pytest.mark.parametrize("name", sorted(attention_layers))
def test_layers(name, device):
    options = {"embed_dim": 16, "num_heads": 2, "batch_first": True, "generator": 0}
    layer = attention_layers.build(name, **options).to(device)
    x = draw(2, 9, 16).to(device)
    out, weights = layer(x, x, x)
    out.sum().backward()
    assert out.device.type == weights.device.type == device
    wanted = [p for p in layer.parameters() if p.requires_grad]
    assert {p.grad.device.type for p in wanted} == {device}


@pytest.mark.parametrize("packed", [False, True])
def test_encoder(packed, device):
    settings = EncoderSettings(20, 3, width=16, ffn_width=16, dropout=0.1)
    attention = partial(KernelAttention, n_features=M)
    model = KernelEncoder(settings, attention, generator=0).to(device)
    if packed:
        ids = (torch.arange(N) % 20).to(device)
        batch = TokenBatch(ids, BOUNDS.to(device if device != "meta" else "cpu"))
        if device != "cpu":
            assert isinstance(packed_form(model, batch), TorchForm)
        if device == "meta":
            return  # where sequences begin has to be read
        logits = packed_logits(model, batch, dropout_seed=0)
    else:
        logits = model(torch.ones(3, 7, dtype=torch.long, device=device))
    assert (logits.device.type, logits.shape) == (device, (3, 3))
    nn.functional.cross_entropy(logits, torch.ones_like(logits[:, 0]).long()).backward()
    assert model.token_embedding.weight.grad.device.type == device


@pytest.mark.parametrize("place", DEVICES)
def test_loops_take_what_is_on_the_cpu(place):
    x = torch.ones(1, 1, 1, DIM, device=place).expand(1, 8, 4096, DIM)
    particles = Particles(torch.ones(64, DIM, device=place))
    inputs = checks.check_inputs((x, x, x), particles, "favor", None, None, None)
    known = compiled.knows(inputs)
    assert known is (place == "cpu" and compiled.available())
