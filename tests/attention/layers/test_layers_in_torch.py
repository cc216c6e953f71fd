"""Inside torch's own modules, in training and in evaluation."""

import warnings

import pytest
import torch
from layer_cases import LAYERS, close, make_layer, normal
from torch import nn

from coulomb.attention.layers.kernel import KernelAttention
from coulomb.attention.layers.replace import replace_attention

PADDING = torch.arange(6).expand(2, -1) >= torch.tensor([[6], [4]])


def encoder_layer(attention, **settings):
    shape = {"dim_feedforward": 16, "batch_first": True, "dropout": 0.0}
    layer = nn.TransformerEncoderLayer(8, 2, dtype=torch.float64, **shape | settings)
    layer.self_attn = attention
    return layer


def by_hand(layer, x, padding):
    attended = layer.self_attn(x, x, x, padding, need_weights=False)[0]
    x = layer.norm1(x + attended)
    return layer.norm2(x + layer.linear2(layer.linear1(x).relu()))


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("name", LAYERS)
def test_encoder_layer_in_training_and_evaluation(name, padding):
    attention = make_layer(name, **({"redraw_every": 0} if name == "performer" else {}))
    layer, x = encoder_layer(attention), normal(2, 6, 8)
    expected = by_hand(layer, x, padding)
    out = layer(x, src_key_padding_mask=padding)
    close(out, expected)
    out.square().sum().backward()
    assert layer.self_attn.out_proj.weight.grad.abs().max() > 0
    layer.eval()
    close(layer(x, src_key_padding_mask=padding), expected)
    with torch.no_grad():  # where torch would bypass the layer's forward
        close(layer(x, src_key_padding_mask=padding), expected)
    layer.requires_grad_(False)
    close(layer(x, src_key_padding_mask=padding), expected)


def test_encoder_layer_with_the_causal_mask():
    layer, x = encoder_layer(make_layer("kernel")), normal(2, 6, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    out = layer(x, src_mask=mask)
    close(out[:, :3], layer(x[:, :3], src_mask=mask[:3, :3]))
    close(layer(x, src_mask=mask, is_causal=True), out)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_encoder_built_around_another_layer():
    """It packs padded batches into nested tensors before our layer sees them."""
    x = normal(2, 6, 8)
    theirs = encoder_layer(nn.MultiheadAttention(8, 2, batch_first=True))
    encoder = nn.TransformerEncoder(theirs.double(), num_layers=2)
    for layer in encoder.layers:
        layer.self_attn = make_layer("kernel")
    assert encoder.use_nested_tensor
    expected = encoder.train()(x, src_key_padding_mask=PADDING)
    encoder.eval()
    with torch.no_grad():
        out = encoder(x, src_key_padding_mask=PADDING)
    close(out[0], expected[0])
    close(out[1, :4], expected[1, :4])
    nested = torch.nested.as_nested_tensor([x[0], x[1, :4]])
    with pytest.raises(ValueError, match="the same nested tensor"):
        encoder.layers[0].self_attn(nested, nested, nested, need_weights=True)


def test_whole_transformer():
    """Encoder, causal decoder and cross-attention, after one line."""
    shape = {"num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 16}
    model = nn.Transformer(8, 2, **shape, dropout=0.0, batch_first=True).double()
    names = replace_attention(model, n_features=16, generator=0)
    assert names == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    ]
    source, target = normal(2, 6, 8), normal(2, 5, 8, seed=1)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)

    def run(source, target, mask):
        return model(
            source,
            target,
            tgt_mask=mask,
            src_key_padding_mask=PADDING,
            memory_key_padding_mask=PADDING,
        )

    out = run(source, target, mask)
    close(out[:, :3], run(source, target[:, :3], mask[:3, :3]))
    out.square().sum().backward()
    with torch.no_grad():
        close(run(source, target, mask), out)
        close(model.eval() and run(source, target, mask), out)


def test_replacing_keeps_the_parameters_themselves():
    model = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dtype=torch.float64)
    model.self_attn.in_proj_bias.requires_grad_(False)
    before = dict(model.named_parameters())
    assert replace_attention(model.eval(), n_features=16) == ["self_attn"]
    after = dict(model.named_parameters())
    assert after.pop("self_attn.particles").dtype == torch.float64
    assert all(after[name] is parameter for name, parameter in before.items())
    assert model.self_attn.dropout == pytest.approx(0.1)
    assert not model.self_attn.training


@pytest.mark.parametrize("widths", [{}, {"vdim": 4}])
def test_replacing_by_shared_queries_keeps_the_values(widths):
    model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2, **widths)})
    _, _, v_weight = (
        model["a"].in_proj_weight.chunk(3)
        if not widths
        else (None, None, model["a"].v_proj_weight)
    )
    nn.init.normal_(model["a"].in_proj_bias)
    bias = model["a"].in_proj_bias.chunk(3)[2]
    replace_attention(model, qkv="shared", n_features=16)
    assert torch.equal(model["a"].v_proj_weight, v_weight)
    assert torch.equal(model["a"].v_proj_bias, bias)


def test_replacing_shared_modules_and_a_selection():
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16)
    model = nn.Sequential(layer, layer)
    assert replace_attention(model, n_features=16) == ["0.self_attn"]
    assert model[1].self_attn is model[0].self_attn
    assert isinstance(model[0].self_attn, KernelAttention)
    layers = nn.ModuleList(nn.MultiheadAttention(8, 2) for _ in range(3))
    chosen = replace_attention(layers, select=lambda name: name != "1", generator=0)
    assert chosen == ["0", "2"]
    assert not torch.equal(layers[0].particles, layers[2].particles)


def test_what_replacing_refuses():
    with pytest.raises(ValueError, match="got Linear with 0 of them"):
        replace_attention(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="got one itself"):
        replace_attention(nn.MultiheadAttention(8, 2))
    model = nn.ModuleList(
        [nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2, add_zero_attn=True)]
    )
    with pytest.raises(ValueError, match="add_zero_attn"):
        replace_attention(model)
    assert type(model[0]) is nn.MultiheadAttention
    with pytest.raises(ValueError, match="did you mean 'n_features'"):
        replace_attention(model, num_features=3)


@pytest.fixture
def transformers():
    reason = "transformers is not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers", "5.0", reason=reason)


BERT = {
    "vocab_size": 50,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 40,
}
DISTILBERT = {"vocab_size": 50, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 16}
KIN = {
    "Bert": BERT,
    "Roberta": BERT,
    "Electra": BERT,
    "XLMRoberta": BERT,
    "DistilBert": DISTILBERT,
}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", sorted(KIN))
def test_bert_and_its_kin(transformers, family, implementation):
    config = getattr(transformers, f"{family}Config")(
        **KIN[family], attn_implementation=implementation
    )
    model = getattr(transformers, f"{family}Model")(config).eval()
    tokens = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0
    with torch.no_grad():
        softmax = model(tokens, attention_mask=mask).last_hidden_state
        names = replace_attention(
            model, feature_map="favor", n_features=4000, generator=0
        )
        out = model(tokens, attention_mask=mask).last_hidden_state
        alone = model(tokens[1:, :6]).last_hidden_state
    assert len(names) == 2
    close(out[1:, :6], alone, 1e-5)
    # Projections were carried over if many features give the softmax model again.
    close(out[mask.bool()], softmax[mask.bool()], 1e-3)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_causal_bert(transformers, implementation):
    config = transformers.BertConfig(
        **BERT, is_decoder=True, attn_implementation=implementation
    )
    model = transformers.BertLMHeadModel(config).eval()
    assert len(replace_attention(model, n_features=16, generator=0)) == 2
    tokens = torch.arange(3, 12).unsqueeze(0)
    with torch.no_grad():
        out = model(tokens, use_cache=False).logits
        close(out[:, :5], model(tokens[:, :5], use_cache=False).logits, 1e-5)
    with pytest.raises(ValueError, match="use_cache=False"):
        model(tokens)


def test_bert_trains(transformers):
    config = transformers.BertConfig(**BERT)
    model = transformers.BertForSequenceClassification(config)
    replace_attention(model, qkv="shared", n_features=16, generator=0)
    tokens = torch.arange(3, 12).view(1, 9)
    model(tokens, labels=torch.tensor([1])).loss.backward()
    layer = model.bert.encoder.layer[0].attention.self.attention
    assert layer.v_proj_weight.grad.abs().max() > 0
