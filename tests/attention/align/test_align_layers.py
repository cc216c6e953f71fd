"""Phase A of the library's own layers and encoder, and of torch's encoder layer."""

from functools import partial

import pytest
import torch
from torch import nn

from coulomb.attention.align.diagnosis import diagnose
from coulomb.attention.align.problem import Network, ParticleLayers, as_batch
from coulomb.attention.align.run import CrossEntropy, align

layers = pytest.importorskip("coulomb.attention.layers.kernel")
encoder = pytest.importorskip("coulomb.attention.encoder.encoder")

QUICK = {"max_epochs": 1, "watched": 1}


def make_encoder(head="sequence"):
    settings = encoder.EncoderSettings(
        30, 2, width=8, n_heads=2, ffn_width=8, max_length=6, head=head
    )
    attention = partial(layers.KernelAttention, qkv="shared", n_features=5)
    return encoder.KernelEncoder(settings, attention, generator=0)


def make_batches(count=4, *, tokens=False):
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        ids = torch.randint(1, 30, (8, 6), generator=generator)
        ids[::2, 4:] = 0
        shape = (8, 6) if tokens else (8,)
        labels = torch.randint(2, shape, generator=generator)
        batches.append((ids, ids != 0, labels))
    return batches


@pytest.mark.parametrize("level", ["sequence", "token", "layer", "head"])
def test_the_encoder_is_aligned_at_every_level(level):
    model = make_encoder("token" if level == "token" else "sequence")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = align(model, make_batches(tokens=level == "token"), level=level, **QUICK)
    assert result.positions.shape == (2, 2, 5, 4)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) != name.endswith(".particles")
    assert not model.layers[0].attention.particles.requires_grad
    assert diagnose(result, n_twins=2, n_shuffles=3).verdict


def test_outputs_are_what_the_heads_give_before_the_projection():
    model = make_encoder().eval()
    network = Network(model, ParticleLayers.find(model))
    batch = as_batch(make_batches(1)[0])
    outputs = network(network.layers.read(model), batch)
    attention = model.layers[0].attention
    x = model.embedding_norm(
        model.token_embedding(batch.arguments[0]) + model.position_embedding.weight[:6]
    )
    expected, _ = attention(x, x, x, key_padding_mask=~batch.key_mask)
    torch.testing.assert_close(attention.out_proj(outputs[0]), expected)


def test_the_states_of_the_encoder_can_be_aligned_instead():
    result = align(make_encoder(), make_batches(), output="final_norm", **QUICK)
    assert result.positions.isfinite().all()


def test_warm_up_and_value_projections():
    model = make_encoder()
    value = model.layers[0].attention.v_proj_weight.detach().clone()
    align(
        model,
        make_batches(),
        warm_up=CrossEntropy(epochs=1),
        also=("norm", "value"),
        **QUICK,
    )
    assert not torch.equal(model.layers[0].attention.v_proj_weight, value)


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_s_encoder_layer_with_kernel_attention(batch_first):
    """Masks of another convention go through `evaluate`."""
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=batch_first)
    layer.self_attn = layers.KernelAttention(
        8, 2, n_features=5, batch_first=batch_first, generator=0
    )
    model = nn.Sequential(nn.Embedding(30, 8), layer)

    def evaluate(model, parameters, batch):
        ids = batch.arguments[0]
        ids = ids if batch_first else ids.mT
        return torch.func.functional_call(model, parameters, (ids,))

    result = align(model, make_batches(), evaluate=evaluate, **QUICK)
    assert result.problem.network.layers.names == ("1.self_attn",)
    assert (result.positions != result.stats.start).all()
