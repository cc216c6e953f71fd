"""KernelAttention beside torch's own layer: weights, masks, particles, decoding."""

import pytest
import torch
from layer_cases import close, make_layer, normal
from torch import nn

import attention_twins as twins
from coulomb.attention import attention_weights, kernel_weights
from coulomb.attention.layers.baselines import Linformer, Performer, SoftmaxAttention
from coulomb.attention.layers.kernel import KernelAttention
from coulomb.dynamics.initial import Gaussian, Orthogonal
from coulomb.features import Particles, feature_maps, projections

MAPS = [name for name in sorted(feature_maps) if feature_maps.build(name).positive]
SHAPE = {"n_features": 16, "batch_first": True, "dtype": torch.float64}


@pytest.mark.parametrize("qkv", ["learned", "shared"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_equals_the_quadratic_twin(name, causal, qkv):
    layer = make_layer("kernel", feature_map=name, causal=causal, qkv=qkv)
    x = normal(2, 5, 8)
    padding = torch.arange(5).expand(2, -1) >= 4
    out, weights = layer(x, x, x, padding, average_attn_weights=False)
    q, k, v = layer.project(x, x, x)
    operands = (q, k, layer.as_particles(), name, ~padding)
    close(weights, kernel_weights(*operands, causal=causal))
    twin = twins.kernel_attention(
        q, k, v, layer.as_particles(), name, ~padding, causal=causal
    )
    close(out, layer.join(twin))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_untied_particles_start_as_tied_ones(name, causal):
    settings = {"feature_map": name, "causal": causal, "qkv": "shared"}
    tied = make_layer("kernel", **settings)
    untied = make_layer("kernel", tied=False, **settings)
    assert untied.particles.shape == (2, 16, 8)
    x = normal(2, 5, 8)
    for one, two in zip(untied(x, x, x), tied(x, x, x), strict=True):
        close(one, two)


@pytest.mark.parametrize("name", MAPS)
def test_halves_of_untied_particles_meet_queries_and_keys(name):
    layer = make_layer("kernel", feature_map=name, tied=False)
    with torch.no_grad():
        layer.particles += 0.3 * normal(2, 16, 8, seed=1)
    x, padding = normal(2, 5, 8), torch.arange(5).expand(2, -1) >= 4
    _, weights = layer(x, x, x, padding, average_attn_weights=False)
    phi, half = layer.feature_map, layer.head_dim
    q, k, _ = layer.project(x, x, x)
    asking, asked = (
        Particles(part.contiguous(), layer.phases)
        for part in layer.particles.detach().split(half, dim=-1)
    )
    features = phi(q, asking), phi(k, asked)
    close(weights, attention_weights(*features, ~padding))
    assert not torch.allclose(weights, weights.mT)


def test_untied_particles_decode_what_they_attend_to():
    layer = make_layer("kernel", tied=False, causal=True)
    with torch.no_grad():
        layer.particles += 0.3 * normal(2, 16, 8, seed=1)
    x = normal(2, 5, 8)
    whole, _ = layer(x, x, x)
    _, state = layer.prefill(x[:, :4])
    last, _ = layer.decode(x[:, 4], state)
    close(last, whole[:, 4])
    assert "tied=False" in repr(layer)


def test_weights_of_torch_carry_over():
    for extra in ({}, {"kdim": 6, "vdim": 4}, {"bias": False}):
        theirs = nn.MultiheadAttention(
            8, 2, batch_first=True, dtype=torch.float64, **extra
        )
        ours = KernelAttention(8, 2, **SHAPE, **extra)
        report = ours.load_state_dict(theirs.state_dict(), strict=False)
        assert report == (["particles"], [])
        for key, value in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[key], value)
        softmax = SoftmaxAttention(8, 2, batch_first=True, dtype=torch.float64, **extra)
        softmax.load_state_dict(theirs.state_dict())
        query, key, value = (
            normal(2, n, width, seed=n)
            for n, width in ((5, 8), (7, ours.kdim), (7, ours.vdim))
        )
        padding = torch.arange(7).expand(2, -1) >= 4
        for mask in (None, padding):
            found = softmax(query, key, value, mask)
            for a, b in zip(found, theirs(query, key, value, mask), strict=True):
                close(a, b)
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        if not extra:
            close(
                softmax(query, query, query, attn_mask=mask)[0],
                theirs(query, query, query, attn_mask=mask)[0],
            )


def test_many_favor_features_approach_softmax():
    softmax = make_layer("softmax")
    favor = KernelAttention(
        8, 2, feature_map="favor", **{**SHAPE, "n_features": 20_000}, generator=0
    )
    favor.load_state_dict(softmax.state_dict(), strict=False)
    x = 0.3 * normal(2, 6, 8)
    # One kernel value has a relative error of about sqrt(exp(|q + k|^2) / 20000), that
    # is 0.01 here; a weight is a sixth, on average.
    close(favor(x, x, x)[1], softmax(x, x, x)[1], 0.01)


def test_shared_is_a_reshape_of_the_input():
    layer, x = make_layer("kernel", qkv="shared"), normal(2, 5, 8)
    q, k, _ = layer.project(x, x, x)
    assert torch.equal(q, x.view(2, 5, 2, 4).transpose(1, 2))
    assert torch.equal(q, k)
    names = {"v_proj_weight", "v_proj_bias", "out_proj.weight", "out_proj.bias"}
    assert set(layer.state_dict()) == names | {"particles"}


def test_particles_are_frozen_until_they_are_not():
    layer, x = make_layer("kernel"), normal(2, 5, 8)
    assert not layer.particles.requires_grad
    layer(x, x, x)[0].square().sum().backward()
    assert layer.particles.grad is None
    layer.unfreeze_particles()
    layer(x, x, x)[0].square().sum().backward()
    assert layer.particles.grad.abs().max() > 0
    layer.freeze_particles()
    assert not layer.particles.requires_grad
    assert "phases" not in layer.state_dict()
    assert make_layer("kernel", feature_map="cos2").state_dict()["phases"].std() > 0.5


def test_starting_laws():
    def norms(**settings):
        layer = make_layer("kernel", embed_dim=128, n_features=256, **settings)
        return layer.particles.norm(dim=-1).square().mean().item()

    # Means of 512 chi-square variables with 64 degrees of freedom, divided by their
    # expectation: a standard error of 0.008.
    assert norms(feature_map="favor") == pytest.approx(64, rel=0.05)
    assert norms() == pytest.approx(2.25, rel=0.05)
    assert norms(start=Gaussian(0.5)) == pytest.approx(32, rel=0.05)
    assert norms(start="gaussian") == pytest.approx(64, rel=0.05)
    layer = make_layer("kernel", start=Orthogonal())
    block = layer.particles[0, :4] / layer.particles[0, :4].norm(dim=-1, keepdim=True)
    close(block @ block.T, torch.eye(4, dtype=torch.float64))
    assert not torch.equal(layer.particles[0], layer.particles[1])


def test_a_map_of_ones_own():
    def relu(x, particles):
        return projections(x, particles).relu() + 0.1

    layer, x = make_layer("kernel", feature_map=relu), normal(2, 5, 8)
    out, weights = layer(x, x, x)
    close(weights.sum(dim=-1), torch.ones(2, 5, dtype=torch.float64))
    q, k, v = layer.project(x, x, x)
    particles = Particles(layer.particles)
    close(out, layer.join(twins.kernel_attention(q, k, v, particles, relu)))


@pytest.mark.parametrize("qkv", ["learned", "shared"])
@pytest.mark.parametrize("name", ["favor", "softmaxfeat", "cos2"])
def test_decoding_equals_the_parallel_form(name, qkv):
    layer = make_layer("kernel", feature_map=name, causal=True, qkv=qkv).eval()
    x = normal(2, 9, 8)
    expected = layer(x, x, x, need_weights=False)[0]
    out, state = layer.prefill(x[:, :4])
    close(out, expected[:, :4])
    for t in range(4, 9):
        out, state = layer.decode(x[:, t], state)
        close(out, expected[:, t])
    state = None
    for t in range(9):
        out, state = layer.decode(x[:, t], state)
        close(out, expected[:, t])


def test_prefill_skips_padding():
    layer, x = make_layer("kernel", causal=True).eval(), normal(1, 6, 8)
    padding = torch.tensor([[True, True, False, False, False, False]])
    out, state = layer.prefill(x, padding)
    alone, expected = layer.prefill(x[:, 2:])
    close(out[:, 2:], alone)
    close(state.sums, expected.sums)


def test_performer_redraws_in_training_only():
    layer, x = make_layer("performer", redraw_every=2), normal(2, 5, 8)
    seen = []
    for _ in range(5):
        layer(x, x, x)
        seen.append(layer.particles)
    assert [torch.equal(seen[0], p) for p in seen] == [True, True, False, False, False]
    assert not torch.equal(seen[2], seen[4])
    layer.eval()
    for _ in range(5):
        layer(x, x, x)
    assert torch.equal(layer.particles, seen[4])
    never = make_layer("performer", redraw_every=0)
    first = never.particles
    for _ in range(5):
        never(x, x, x)
    assert never.particles is first


def test_performer_does_not_disturb_passes_that_await_their_backward():
    layer, x = make_layer("performer", redraw_every=1), normal(2, 5, 8)
    first = layer(x, x, x, need_weights=False)[0]
    second = layer(x, x, x, need_weights=False)[0]
    assert not torch.equal(first, second)
    (first.sum() + second.sum()).backward()
    assert layer.in_proj_weight.grad.isfinite().all()


CALLS = [
    (lambda: KernelAttention(8, 3), "`embed_dim` must be divisible by `num_heads`"),
    (lambda: KernelAttention(8, 2, qkv="joint"), "did you mean|Known: learned, shared"),
    (lambda: KernelAttention(8, 2, qkv="shared", kdim=6), "`kdim` must equal"),
    (lambda: KernelAttention(8, 2, feature_map="fourier"), "must be positive"),
    (lambda: KernelAttention(8, 2, feature_map="softplsu"), "did you mean 'softplus'"),
    (lambda: KernelAttention(8, 2, start=3), "`start` must be a starting law"),
    (lambda: KernelAttention(8, 2, generator="zero"), "`generator` must be a whole"),
    (lambda: KernelAttention(8, 2, dropout=2), "`dropout` must be at most 1"),
    (lambda: Performer(8, 2, redraw_every=-1), "`redraw_every` must be at least 0"),
    (
        lambda: Linformer(8, 2, max_length=4)(*[normal(5, 8).float()] * 3),
        "at most max_length = 4 tokens; got 5",
    ),
    (
        lambda: Linformer(8, 2)(*[normal(5, 8).float()] * 3, is_causal=True),
        "`is_causal` must be False for Linformer",
    ),
]


@pytest.mark.parametrize("call, message", CALLS)
def test_what_is_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_masks_that_are_refused():
    layer, x = make_layer("kernel"), normal(2, 4, 8)
    band = torch.ones(4, 4, dtype=torch.bool).triu(2)
    masks = [
        ({"attn_mask": band}, "None or the causal mask"),
        ({"attn_mask": torch.eye(4)}, "nothing but 0 and -inf"),
        ({"attn_mask": band[:2]}, r"must have shape \(4, 4\)"),
        ({"key_padding_mask": torch.zeros(2, 5) > 0}, r"must have shape \(2, 4\)"),
        ({"key_padding_mask": torch.full((2, 4), 0.5)}, "nothing but 0 and -inf"),
        ({"key_padding_mask": torch.zeros(2, 4, dtype=torch.long)}, "must be boolean"),
    ]
    for masks_, message in masks:
        with pytest.raises((ValueError, TypeError), match=message):
            layer(x, x, x, **masks_)
    with pytest.raises(ValueError, match="three axes, or two"):
        layer(x, x[0], x[0])
    nothing = torch.zeros(4, 4, dtype=torch.bool)
    assert torch.equal(layer(x, x, x, attn_mask=nothing)[0], layer(x, x, x)[0])
