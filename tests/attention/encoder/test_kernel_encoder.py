"""The encoder: shapes, pooling, norms, positions, and that it can learn."""

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from coulomb._support.errors import CoulombError
from coulomb.attention import attention_layers
from coulomb.attention.encoder.encoder import EncoderSettings, KernelEncoder
from coulomb.attention.encoder.layout import TokenBatch
from coulomb.attention.encoder.packed import packed_logits
from coulomb.attention.layers.kernel import KernelAttention

SHAPE = {"width": 8, "ffn_width": 16, "max_length": 32}
ATTENTION = partial(KernelAttention, n_features=16)


def make_encoder(attention=ATTENTION, *, generator=0, **settings):
    settings = {"vocab_size": 20, "n_classes": 3, **SHAPE, **settings}
    return KernelEncoder(EncoderSettings(**settings), attention, generator=generator)


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def make_tokens(batch=3, length=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 20, (batch, length), generator=generator)


def test_defaults_are_the_paper():
    settings = EncoderSettings(30_522, 2)
    shape = (settings.n_layers, settings.width, settings.n_heads, settings.ffn_width)
    assert shape == (2, 128, 2, 256)
    assert (settings.dropout, settings.max_length, settings.pooling) == (
        0.1,
        128,
        "mean",
    )
    model = KernelEncoder(settings, partial(KernelAttention, qkv="shared"), generator=0)
    layers = [m for m in model.modules() if isinstance(m, KernelAttention)]
    assert [layer.particles.shape for layer in layers] == [(2, 256, 64)] * 2
    assert not torch.equal(layers[0].particles, layers[1].particles)
    assert model.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize("pooling", ["mean", "cls", (0.5, 0.25) + (0.25 / 30,) * 30])
@pytest.mark.parametrize("positions", ["learned", "none"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("name", sorted(attention_layers))
def test_padding_changes_nothing(name, norm, positions, pooling):
    attention = partial(attention_layers.build, name)

    def factory(embed_dim, num_heads, **options):
        return attention(embed_dim=embed_dim, num_heads=num_heads, **options)

    model = make_encoder(factory, norm=norm, positions=positions, pooling=pooling)
    model.double().eval()
    tokens = make_tokens()
    expected = model(tokens)
    for extra in (1, 9):
        padded = torch.cat([tokens, make_tokens(length=extra, seed=1)], dim=1)
        mask = torch.arange(7 + extra).expand(3, -1) < 7
        close(model(padded, mask), expected)


def test_heads_and_shapes():
    tokens = make_tokens()
    assert make_encoder()(tokens).shape == (3, 3)
    model = make_encoder(head="token").eval()
    assert model(tokens).shape == (3, 7, 3)
    close(model(tokens), model.head(model.encode(tokens)))


def test_positions_see_the_order_and_nothing_else_does():
    tokens = make_tokens()
    swapped = tokens.flip(1)
    for positions, same in (("none", True), ("learned", False)):
        model = make_encoder(positions=positions).double().eval()
        assert torch.allclose(model(tokens), model(swapped)) == same


def test_pooling_is_an_average_with_weights_from_the_simplex():
    states = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    assert torch.equal(make_encoder(pooling="cls").pool(states, mask), states[:, 0])
    mean = make_encoder(pooling="mean").pool
    close(mean(states), states.mean(dim=1), 1e-6)
    close(mean(states, mask)[1], states[1, :2].mean(dim=0), 1e-6)
    assert not mean(states, torch.zeros_like(mask)).any()
    weights = torch.tensor([0.1, 0.3, 0.4, 0.2])
    model = make_encoder(pooling=weights)
    close(model.pool(states)[0], weights @ states[0], 1e-6)
    close(model.pool(states, mask)[1], weights[:2] @ states[1, :2] / 0.4, 1e-6)
    assert "pooling_weights" in model.state_dict()
    last = make_encoder(pooling=lambda states, real: real & ~real.roll(-1, 1))
    # The last token that is real, where the next one is not.
    close(last.pool(states, mask)[1], states[1, 1], 1e-6)
    with pytest.raises(ValueError, match="a weight for each of 5 positions; got 4"):
        model.pool(torch.zeros(1, 5, 8))


def test_settings_are_compared_and_hashed():
    weights = torch.tensor([0.5, 0.5])
    first, again = (EncoderSettings(9, 2, pooling=weights) for _ in range(2))
    assert first == again
    assert hash(first) == hash(again)


REFUSED = [
    ({"pooling": "max"}, "Known: cls, mean"),
    ({"pooling": (0.5, 0.6)}, "sum to one; got shape"),
    ({"pooling": (1.5, -0.5)}, "non-negative"),
    ({"pooling": 3}, "`pooling` must be"),
    ({"positions": "sine"}, "Known: learned, none"),
    ({"norm": "both"}, "Known: post, pre"),
    ({"head": "tokens"}, "did you mean 'token'"),
    ({"dropout": 1.0}, "`dropout` must be less than 1"),
    ({"width": 0}, "`width` must be at least 1"),
    ({"n_heads": 3}, "`embed_dim` must be divisible"),
]


@pytest.mark.parametrize("settings, message", REFUSED)
def test_what_is_refused(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_encoder(**settings)


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="at most max_length = 32 columns; got 33"):
        make_encoder()(make_tokens(length=33))
    make_encoder(positions="none")(make_tokens(length=33))


def test_a_seed_fixes_the_model_and_touches_nothing_global():
    before = torch.get_rng_state()
    first, again, other = (make_encoder(generator=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    for key, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])
    assert not torch.equal(first.head.weight, other.head.weight)


@pytest.mark.parametrize("qkv", ["learned", "shared"])
def test_it_learns(qkv):
    """Whether token 1 occurs: the loss falls from log 2 to a tenth of it."""
    attention = partial(ATTENTION, qkv=qkv)
    model = make_encoder(attention, n_classes=2, n_layers=1, dropout=0.0)
    tokens = torch.randint(1, 9, (32, 6), generator=torch.Generator().manual_seed(0))
    labels = (tokens == 1).any(dim=1).long()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(50):
        loss = cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.07


@pytest.mark.parametrize(
    "tokens, words",
    [
        (torch.tensor([[1, 20]]), "numbers from 0 to 19; got numbers from 1 to 20"),
        (torch.tensor([[3, -1]]), "numbers from 0 to 19; got numbers from -1 to 3"),
        (torch.ones(1, 2), "a tensor of int64 or int32; got torch.float32"),
        (torch.ones(1, 2, dtype=torch.bool), "int64 or int32; got torch.bool"),
        ([[1, 2]], "a tensor of int64 or int32; got list"),
        (torch.tensor([1, 2]), r"shape \(batch, length\); got \(2,\)"),
        (torch.ones(1, 2, 3, dtype=torch.long), r"shape \(batch, length\); got"),
    ],
)
def test_token_ids_that_are_none(tokens, words):
    model = make_encoder()
    with pytest.raises(CoulombError, match="`token_ids` must .*" + words):
        model(tokens)
    if isinstance(tokens, torch.Tensor) and tokens.dim() == 2:
        batch = TokenBatch(tokens[0], torch.tensor([0, 2]))
        with pytest.raises(CoulombError, match="`token_ids` must .*" + words):
            packed_logits(model, batch)


def test_masks_and_parts_that_are_none():
    tokens = make_tokens(2, 3)
    with pytest.raises(CoulombError, match="`key_mask` must be boolean"):
        make_encoder()(tokens, torch.ones(2, 3))
    with pytest.raises(CoulombError, match="`key_mask` must have shape"):
        make_encoder()(tokens, torch.ones(2, 4, dtype=torch.bool))
    model = make_encoder(positions="parts")
    with pytest.raises(CoulombError, match="`parts` must hold numbers from 0 to 1"):
        model(tokens, parts=torch.full((2, 3), 2))
    with pytest.raises(CoulombError, match=r"`parts` must have shape \(2, 3\), as"):
        model(tokens, parts=torch.zeros(2, 2, dtype=torch.long))
