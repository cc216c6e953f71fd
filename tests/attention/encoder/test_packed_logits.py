import copy

import pytest
import torch
from packed_cases import (
    LENGTHS,
    MAPS,
    ROWS,
    assert_same,
    gradients,
    make_batch,
    make_model,
    relu_features,
)
from torch import nn

from coulomb._support.errors import CoulombError
from coulomb.attention import (
    KernelAttention,
    Performer,
    SoftmaxAttention,
    attention_layers,
)
from coulomb.attention.encoder.layout import TokenBatch, padded_logits
from coulomb.attention.encoder.packed import TorchForm, packed_form, packed_logits
from coulomb.kernels import available

SHAPES = {
    "paper": {},
    "tags": {"norm": "pre", "head": "token"},
    "first": {"pooling": "cls", "positions": "none", "n_layers": 1},
    "weights": {"pooling": tuple([0.5] + [0.5 / 15] * 15), "n_layers": 1},
    "function": {"pooling": lambda x, mask: x[..., 0].sigmoid(), "n_layers": 1},
}


@pytest.fixture(params=["compiled", "plain"])
def loops(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setenv("COULOMB_NUMBA", "0")
    elif not available():
        pytest.skip("numba is missing or switched off")
    return request.param


@pytest.mark.parametrize("row", ROWS)
def test_the_paper_s_encoder_agrees_with_its_padded_twin(row, loops):
    model, batch = make_model(row), make_batch()
    assert_same(model, packed_logits(model, batch), padded_logits(model, batch))


@pytest.mark.parametrize("row", ["shared-softmaxfeat", "learned-favor", "softmax"])
@pytest.mark.parametrize("shape", list(SHAPES)[1:])
def test_every_shape_of_encoder_agrees_with_its_padded_twin(row, shape, loops):
    model, batch = make_model(row, **SHAPES[shape]), make_batch()
    assert_same(model, packed_logits(model, batch), padded_logits(model, batch))


@pytest.mark.parametrize("row", ["shared-softmaxfeat", "learned-favor", "softmax"])
@pytest.mark.parametrize("known", [True, False])
def test_parts_of_pairs_agree_with_their_padded_twin(row, known, loops):
    model, batch = make_model(row, positions="parts"), make_batch()
    parts = torch.arange(len(batch.token_ids)) % 3 % 2
    batch = batch._replace(parts=parts if known else None)
    logits = packed_logits(model, batch)
    assert_same(model, logits, padded_logits(model, batch))
    other = packed_logits(model, batch._replace(parts=1 - parts))
    assert not torch.allclose(logits, other)


def test_an_encoder_of_parts_takes_texts_of_any_length():
    model = make_model("shared-softmaxfeat", positions="parts")
    batch = make_batch((20,))
    assert packed_logits(model, batch).shape == (1, 3)
    assert model.position_embedding.num_embeddings == 2


@pytest.mark.parametrize("parts", [[0, 1], [0, 1, 2], [0, -1, 0]])
def test_parts_that_are_none(parts):
    model, batch = make_model("softmax", positions="parts"), make_batch((3,))
    words = "`parts` must (hold numbers from 0 to 1|have shape)"
    with pytest.raises(CoulombError, match=words):
        packed_logits(model, batch._replace(parts=torch.tensor(parts)))


def test_rows_are_all_layers_and_maps_there_are():
    covered = {getattr(row, "func", row) for row in ROWS.values()}
    for name in attention_layers:
        built = attention_layers.build(name, embed_dim=4, num_heads=1)
        assert type(built) in covered, name
    assert {f"shared-{name}" for name in MAPS} <= ROWS.keys()


@pytest.mark.parametrize("row", ROWS)
def test_compiled_loops_are_used_where_they_can_be(row):
    form = packed_form(make_model(row), make_batch())
    assert isinstance(form, TorchForm) is not available()


@pytest.mark.parametrize("row", ["shared-cos2", "learned-elu", "softmax", "linformer"])
@pytest.mark.parametrize("width", [6, 20, 44])  # heads of 3, 10 and 22
def test_heads_of_odd_widths(row, width):
    model, batch = make_model(row, width=width), make_batch()
    assert_same(model, packed_logits(model, batch), padded_logits(model, batch))


@pytest.mark.parametrize(
    "row", ["shared-softplus", "learned-softmaxfeat", "performer", "softmax"]
)
def test_long_sequences(row):
    model = make_model(row, n_layers=1, max_length=300)
    batch = make_batch((300, 5, 260))
    assert_same(model, packed_logits(model, batch), padded_logits(model, batch))


def test_lengths_of_sentences():
    model = make_model("shared-softmaxfeat", width=64, max_length=80)
    batch = make_batch(tuple(range(1, 80, 3)))
    assert_same(model, packed_logits(model, batch), padded_logits(model, batch))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("qkv", ["shared", "learned"])
def test_long_particles_neither_overflow_nor_vanish(name, qkv):
    model = make_model(f"{qkv}-{name}", n_layers=1)
    layer = model.layers[0].attention
    layer.particles.data *= 20
    layer.particles.data -= 8  # every projection of some tokens is very negative
    batch = make_batch()
    logits = packed_logits(model, batch)
    exact = copy.deepcopy(model).double()
    expected = padded_logits(exact, batch)
    assert torch.isfinite(logits).all()
    # Angles of some hundreds have an error of their own in float32.
    torch.testing.assert_close(logits.double(), expected, rtol=1e-3, atol=1e-3)
    assert all(g.isfinite().all() for g in gradients(model, logits).values())


def test_float64_agrees_to_rounding():
    model, batch = make_model("shared-softmaxfeat").double(), make_batch()
    logits = packed_logits(model, batch)
    assert logits.dtype == torch.float64
    assert_same(model, logits, padded_logits(model, batch), tolerance=1e-10)


@pytest.mark.parametrize("row", ["shared-softmaxfeat", "learned-favor", "softmax"])
def test_evaluation_gives_the_numbers_of_training(row):
    model, batch = make_model(row), make_batch()
    logits = packed_logits(model, batch)
    with torch.inference_mode():
        assert torch.equal(packed_logits(model, batch), logits)


def test_frozen_parts_get_no_gradient_and_others_the_same():
    model, batch = make_model("shared-softmaxfeat"), make_batch()
    whole = gradients(model, packed_logits(model, batch))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("particles"))
    some = gradients(model, packed_logits(model, batch))
    assert len(some) == 2
    for name, found in some.items():
        torch.testing.assert_close(found, whole[name])


def test_a_graph_can_be_gone_back_through_twice():
    model, batch = make_model("shared-softmaxfeat"), make_batch()
    total = packed_logits(model, batch).square().sum()
    weights = model.layers[0].attention.v_proj_weight, model.token_embedding.weight
    first = torch.autograd.grad(total, weights, retain_graph=True)
    second = torch.autograd.grad(total, weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Doubled(KernelAttention):
    """A user's layer: what it overrides must be what runs."""

    def attend(self, q, k, v, key_mask, *, causal):
        return 2 * super().attend(q, k, v, key_mask, causal=causal)


class Stretched(SoftmaxAttention):
    """Another, which projects in its own way."""

    def project(self, query, key, value):
        q, k, v = super().project(query, key, value)
        return 3 * q, k, v


class Halving:
    """What a user mixes into a layer."""

    def attend(self, q, k, v, key_mask, *, causal):
        return super().attend(q, k, v / 2, key_mask, causal=causal)


class Halved(Halving, KernelAttention):
    """A layer that defines nothing itself."""


def torch_layer(embed_dim, num_heads, *, batch_first, generator):
    return nn.MultiheadAttention(embed_dim, num_heads, batch_first=batch_first)


@pytest.mark.parametrize("factory", [Doubled, Halved, Stretched, torch_layer])
def test_layers_of_others(factory):
    model, batch = make_model(factory), make_batch()
    assert_same(model, packed_logits(model, batch), padded_logits(model, batch))


def test_an_empty_sequence_pools_to_zero(loops):
    model = make_model("shared-softmaxfeat")
    batch = make_batch((3, 0, 2))
    logits = packed_logits(model, batch)
    torch.testing.assert_close(logits[1], model.head.bias)
    alone = packed_logits(model, make_batch((3,)))
    torch.testing.assert_close(logits[:1], alone)


def test_no_sequence_at_all():
    model = make_model("shared-softmaxfeat")
    empty = torch.empty(0, dtype=torch.int64)
    batch = TokenBatch(empty, torch.zeros(1, dtype=torch.int64))
    assert packed_logits(model, batch).shape == (0, 3)


def test_order_of_sequences_and_neighbours_do_not_matter():
    model = make_model("learned-favor")
    batch = make_batch()
    logits = packed_logits(model, batch)
    for number, (start, stop) in enumerate(batch.cu_seqlens.unfold(0, 2, 1).tolist()):
        ids = batch.token_ids[start:stop]
        alone = TokenBatch(ids, torch.tensor([0, len(ids)]))
        found = packed_logits(model, alone)[0]
        torch.testing.assert_close(found, logits[number], rtol=1e-4, atol=1e-5)


def test_a_performer_draws_when_due():
    factory = ROWS["performer"]
    packed, padded = (
        make_model(lambda *a, **k: factory(*a, redraw_every=2, **k), dropout=0.0)
        for _ in range(2)
    )
    packed.train(), padded.train()
    for number in range(5):
        batch = make_batch(seed=number)
        ours, theirs = packed_logits(packed, batch), padded_logits(padded, batch)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    layer = packed.layers[0].attention
    assert isinstance(layer, Performer)
    assert torch.equal(
        layer.get_extra_state(), padded.layers[0].attention.get_extra_state()
    )
    assert layer.get_extra_state()[1] == 3  # draws: at the start and twice since


@pytest.mark.parametrize(
    ("ids", "ends", "changes", "words"),
    [
        ([1, 40], [0, 2], {}, "from 0 to 39"),
        ([1, -1], [0, 2], {}, "from 0 to 39"),
        ([1, 2], [0, 1], {}, "must rise from 0"),
        ([1, 2], [0, 3, 2], {}, "must rise from 0"),
        ([1] * 17, [0, 17], {}, "at most max_length = 16"),
        ([1] * 3, [0, 3], {"pooling": (0.5, 0.5)}, "a weight for each of 3"),
        ([1, 2], [0, 2, 2], {"pooling": "cls"}, "no empty sequence"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(ids, ends, changes, words):
    model = make_model("shared-softmaxfeat", **changes)
    batch = TokenBatch(torch.tensor(ids), torch.tensor(ends))
    with pytest.raises(CoulombError, match=words):
        packed_logits(model, batch)


def test_a_function_as_a_map_is_the_user_s():
    model = make_model("custom")
    assert model.layers[0].attention.feature_map.function is relu_features
    assert len(LENGTHS) == len(packed_logits(model, make_batch()))


class Louder(nn.Linear):
    """A user's replacement of a part that the compiled loops know."""

    def forward(self, x):
        return 3 * super().forward(x)


def test_parts_that_somebody_replaced_are_what_runs():
    model, batch = make_model("shared-softmaxfeat"), make_batch()
    louder = Louder(32, 48)
    louder.load_state_dict(model.layers[0].widen.state_dict())
    model.layers[0].widen = louder
    assert_same(model, packed_logits(model, batch), padded_logits(model, batch))
