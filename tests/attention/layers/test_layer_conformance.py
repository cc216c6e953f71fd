"""What must hold for every layer that is registered."""

import copy
import pickle

import pytest
import torch
from layer_cases import CAUSAL_LAYERS, LAYERS, close, make_layer, normal
from safetensors.torch import load_file, save_file
from torch import nn

every_layer = pytest.mark.parametrize("name", LAYERS)


def self_attention(layer, x, padding=None, **options):
    return layer(
        x, x, x, key_padding_mask=padding, **{"need_weights": False, **options}
    )


@every_layer
def test_padding_changes_nothing(name):
    layer, x = make_layer(name).eval(), normal(2, 5, 8)
    expected = self_attention(layer, x)[0]
    for extra in (3, 6):
        padded = torch.cat([x, 10 * normal(2, extra, 8, seed=1)], dim=1)
        padded.requires_grad_()
        padding = torch.arange(5 + extra).expand(2, -1) >= 5
        out = self_attention(layer, padded, padding)[0][:, :5]
        close(out, expected)
        (grad,) = torch.autograd.grad(out.square().sum(), padded)
        assert not grad[:, 5:].any()
        as_numbers = torch.zeros(2, 5 + extra).masked_fill(padding, -torch.inf)
        close(self_attention(layer, padded, as_numbers)[0][:, :5], expected)


@every_layer
@pytest.mark.parametrize("masked", [False, True])
def test_output_is_the_matrix_times_the_values(name, masked):
    layer, x = make_layer(name).eval(), normal(2, 5, 8)
    padding = torch.arange(5).expand(2, -1) >= 3 if masked else None
    out, weights = self_attention(
        layer, x, padding, need_weights=True, average_attn_weights=False
    )
    _, _, v = layer.project(x, x, x)
    close(out, layer.join(weights @ v))
    if masked:
        assert not weights[..., 3:].any()
    if name != "linformer":
        close(weights.sum(dim=-1), torch.ones(2, 2, 5, dtype=torch.float64))
    averaged = self_attention(layer, x, padding, need_weights=True)[1]
    close(averaged, weights.mean(dim=1))


@pytest.mark.parametrize("name", CAUSAL_LAYERS)
def test_causal_never_sees_the_future(name):
    layer, x = make_layer(name).eval(), normal(2, 6, 8)
    out, weights = self_attention(layer, x, is_causal=True, need_weights=True)
    changed = torch.cat([x[:, :4], normal(2, 2, 8, seed=1)], dim=1)
    again = self_attention(layer, changed, is_causal=True)[0]
    close(out[:, :4], again[:, :4], 1e-14)
    assert not weights.triu(1).any()
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    numbers = nn.Transformer.generate_square_subsequent_mask(6)
    for mask in (future, numbers, future.expand(4, 6, 6)):
        assert torch.equal(self_attention(layer, x, attn_mask=mask)[0], out)
    always = make_layer(name, causal=True).eval()
    assert torch.equal(self_attention(always, x)[0], out)


@pytest.mark.parametrize("name", CAUSAL_LAYERS)
def test_causal_with_padding_on_either_side(name):
    layer, x = make_layer(name, causal=True).eval(), normal(2, 6, 8)
    expected = self_attention(layer, x[:, 2:5])[0]
    padding = torch.tensor([True, True, False, False, False, True]).expand(2, -1)
    close(self_attention(layer, x, padding)[0][:, 2:5], expected)


@every_layer
def test_sequences_of_padding_give_zero_and_finite_gradients(name):
    layer, x = make_layer(name), normal(2, 5, 8).requires_grad_()
    padding = torch.tensor([False, True]).unsqueeze(1).expand(2, 5)
    out, weights = self_attention(layer, x, padding, need_weights=True)
    close(out[1], layer.out_proj.bias.expand(5, 8))
    assert not weights[1].any()
    out.sum().backward()
    gradients = [x.grad, *(p.grad for p in layer.parameters() if p.requires_grad)]
    assert all(grad.isfinite().all() for grad in gradients)
    assert not x.grad[1].any()


@every_layer
@pytest.mark.parametrize("qkv", ["learned", "shared"])
def test_gradients_reach_every_weight(name, qkv):
    layer, x = make_layer(name, qkv=qkv), normal(2, 5, 8).requires_grad_()
    if name in ("kernel", "favor"):
        layer.unfreeze_particles()
    self_attention(layer, x)[0].square().sum().backward()
    assert x.grad.abs().max() > 0
    for key, parameter in layer.named_parameters():
        assert parameter.grad is not None, key
        if "weight" in key or key in ("particles", "key_mixture", "value_mixture"):
            assert parameter.grad.abs().max() > 0, key


@every_layer
def test_state_dict_round_trip(name, tmp_path):
    layer, other = make_layer(name), make_layer(name, generator=1)
    x = normal(2, 5, 8)
    assert not torch.equal(self_attention(layer, x)[0], self_attention(other, x)[0])
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    for _ in range(3):  # of which Performer draws in one
        assert torch.equal(self_attention(layer, x)[0], self_attention(other, x)[0])


@every_layer
def test_copies_and_pickles(name):
    layer, x = make_layer(name), normal(2, 5, 8)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(
            self_attention(layer.eval(), x)[0], self_attention(twin.eval(), x)[0]
        )
        assert repr(twin) == repr(layer)


@every_layer
def test_a_seed_fixes_everything_and_touches_nothing_global(name):
    before = torch.get_rng_state()
    first, again = make_layer(name, generator=3), make_layer(name, generator=3)
    stream = torch.Generator().manual_seed(0)
    other = make_layer(name, generator=stream)
    assert torch.equal(before, torch.get_rng_state())
    states = [layer.state_dict() for layer in (first, again, other)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not torch.equal(states[0]["in_proj_weight"], states[2]["in_proj_weight"])
    float32 = make_layer(name, generator=3, dtype=torch.float32)
    close(float32.in_proj_weight.double(), first.in_proj_weight, 1e-6)


@every_layer
def test_evaluation_is_deterministic_and_training_without_dropout_draws_nothing(name):
    layer, x = make_layer(name, dropout=0.5).eval(), normal(2, 5, 8)
    before = torch.get_rng_state()
    outputs = [self_attention(layer, x)[0] for _ in range(4)]
    assert all(torch.equal(outputs[0], out) for out in outputs)
    self_attention(make_layer(name).train(), x)
    assert torch.equal(before, torch.get_rng_state())
    layer.train()
    assert not torch.equal(self_attention(layer, x)[0], outputs[0])


@every_layer
def test_shapes_are_those_of_torch(name):
    theirs = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, dtype=torch.float64)
    ours = make_layer(name, kdim=6, vdim=4, batch_first=False)
    query, key, value = normal(5, 3, 8), normal(7, 3, 6), normal(7, 3, 4)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    calls = [
        ((query, key, value), {}),
        ((query, key, value, padding), {"average_attn_weights": False}),
        ((query, key, value), {"need_weights": False}),
        ((query[:, 0], key[:, 0], value[:, 0], padding[0]), {}),
        ((query[:, 0], key[:, 0], value[:, 0]), {"average_attn_weights": False}),
    ]
    for arguments, options in calls:
        expected, found = theirs(*arguments, **options), ours(*arguments, **options)
        assert [None if x is None else x.shape for x in found] == [
            None if x is None else x.shape for x in expected
        ]
    assert set(theirs.state_dict()) <= set(ours.state_dict())
    first = make_layer(name, kdim=6, vdim=4, batch_first=True).eval()
    swapped = first(*(x.transpose(0, 1) for x in (query, key, value)))[0]
    ours = make_layer(name, kdim=6, vdim=4, batch_first=False).eval()
    close(ours(query, key, value)[0].transpose(0, 1), swapped)


@every_layer
def test_half_precision_and_autocast(name):
    x = normal(2, 5, 8, dtype=torch.float32)
    layer = make_layer(name, dtype=torch.float32).eval()
    expected = self_attention(layer, x)[0]
    half = copy.deepcopy(layer).to(torch.bfloat16)
    out = self_attention(half, x.bfloat16())[0]
    assert out.dtype == torch.bfloat16
    close(out.float(), expected, 0.1)
    layer.train()
    with torch.autocast("cpu", torch.bfloat16):
        out = self_attention(layer, x)[0]
    assert out.dtype == torch.bfloat16
    close(out.float(), expected, 0.1)
    out.float().square().sum().backward()
    assert layer.in_proj_weight.grad.isfinite().all()


@every_layer
def test_without_numbers_until_they_are_loaded(name):
    """Built on the meta device, as loaders of large models do."""
    layer, full = make_layer(name, device="meta"), make_layer(name)
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device="cpu").load_state_dict(full.state_dict())
    x = normal(2, 5, 8)
    assert torch.equal(self_attention(layer, x)[0], self_attention(full, x)[0])


@every_layer
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(name):
    x = normal(2, 5, 8)
    out = self_attention(make_layer(name, device="cuda").eval(), x.cuda())[0]
    close(out.cpu(), self_attention(make_layer(name).eval(), x)[0], 1e-6)
