import pytest
import torch
from packed_cases import LENGTHS, make_batch, make_model

from coulomb._support.errors import ParameterError
from coulomb.attention.align.problem import as_batch
from coulomb.attention.encoder.layout import pad
from coulomb.attention.encoder.packed import feature_function


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def _loops(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setenv("COULOMB_NUMBA", "0")


def padded_weights(model, token_ids, mask):
    """Ask every layer of the padded encoder for its attention matrix."""
    x = model.embedding_norm(
        model.token_embedding(token_ids)
        + model.position_embedding(torch.arange(token_ids.shape[1]))
    )
    found = []
    for layer in model.layers:
        attention = layer.attention
        q, k, _ = attention.project(x, x, x)
        found.append(attention.weights(q, k, mask, causal=False))
        x = layer(x, ~mask)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("row", ["shared-softmaxfeat", "learned-favor"])
def test_weights_and_gradients_are_those_of_the_padded_encoder(row):
    model, batch = make_model(row), make_batch()
    token_ids, mask = pad(batch)
    labels = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    parameters = dict(model.named_parameters())
    (shown,) = feature_function("weights")(model, parameters, as_batch((batch, labels)))
    ours = shown.unflatten(-1, (4, -1)).transpose(1, 2)
    theirs = padded_weights(model, token_ids, mask)
    # Rows of padding are nobody's.
    real = mask[:, None, :, None].to(theirs)
    torch.testing.assert_close(ours * real, theirs * real, rtol=1e-4, atol=1e-5)
    source = torch.Generator().manual_seed(0)
    weight = real * torch.randn(theirs.shape, generator=source)
    particles = [layer.attention.particles for layer in model.layers]
    one, two = (
        torch.autograd.grad((weight * each).sum(), particles) for each in (ours, theirs)
    )
    for first, second in zip(one, two, strict=True):
        assert (first - second).norm() < 1e-3 * second.norm()


@pytest.mark.parametrize(
    ("kind", "pool", "shapes"),
    [
        ("heads", "mean", [(8, 32), (8, 32)]),
        ("heads", "none", [(1, 45, 32), (1, 45, 32)]),
        ("weights", "mean", [(8, 12, 4 * 12)]),
        ("logits", "mean", [(8, 3)]),
    ],
)
def test_what_it_gives(kind, pool, shapes):
    model, batch = make_model("shared-elu"), as_batch((make_batch(), torch.arange(8)))
    found = feature_function(kind, pool)(model, dict(model.named_parameters()), batch)
    assert [tuple(each.shape) for each in found] == shapes


def test_other_parameters_are_used_and_the_model_stays():
    model, batch = make_model("shared-elu"), as_batch((make_batch(), torch.arange(8)))
    own = dict(model.named_parameters())
    before = {name: each.detach().clone() for name, each in own.items()}
    first, _ = feature_function()(model, own, batch)
    other, _ = feature_function()(model, {n: 2 * p for n, p in own.items()}, batch)
    assert not torch.allclose(first, other)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("words", [("head", "mean"), ("heads", "man")])
def test_unknown_names_are_refused(words):
    with pytest.raises(ParameterError, match="did you mean"):
        feature_function(*words)
