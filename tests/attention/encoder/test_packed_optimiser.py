import copy

import pytest
import torch
from packed_cases import make_batch, make_model

from coulomb._support.errors import ParameterError
from coulomb.attention.encoder.packed import (
    packed_logits,
    recycle_gradient,
    spare_gradient,
)
from coulomb.text import preset
from coulomb.text.setup import restore_vocabulary, trim_vocabulary
from coulomb.text.training import make_optimiser


def train(model, optimisers, batches):
    for number, batch in enumerate(batches):
        loss = packed_logits(model, batch, dropout_seed=number).square().mean()
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()


def adam(model, **options):
    return [torch.optim.Adam(model.parameters(), lr=1e-2, **options)]


def adamw(model):
    changes = {"optimiser": "adamw", "lr": 1e-2, "weight_decay": 0.1}
    return [make_optimiser(model, preset("default", changes).train)]


@pytest.mark.parametrize("optimise", [adam, adamw])
def test_training_the_trimmed_copy_is_training_the_whole(optimise):
    whole = make_model("shared-softmaxfeat", vocab_size=400)
    batches = [make_batch(seed=number) for number in range(8)]  # ids below 40
    other = copy.deepcopy(whole)
    before = whole.token_embedding.weight.detach().clone()
    trimmed, kept = trim_vocabulary(other, torch.cat([b.token_ids for b in batches]))
    numbers = torch.zeros(400, dtype=torch.int64)
    numbers[kept] = torch.arange(len(kept))
    few = [b._replace(token_ids=numbers[b.token_ids]) for b in batches]
    train(whole, optimise(whole), batches)
    train(trimmed, optimise(trimmed), few)
    restore_vocabulary(trimmed, other, kept)
    for (name, a), b in zip(whole.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    unseen = torch.ones(400, dtype=torch.bool)
    unseen[kept] = False
    assert torch.equal(whole.token_embedding.weight[unseen], before[unseen])
    assert not torch.equal(whole.token_embedding.weight[kept], before[kept])


def test_a_gradient_that_is_used_again_changes_nothing():
    """Bit for bit, also where a token stays away and comes back."""
    first = make_model("shared-softmaxfeat", vocab_size=400)
    second = copy.deepcopy(first)
    batches = [make_batch((3, 5, 2), seed=number % 3) for number in range(6)]
    tables = first.token_embedding.weight, second.token_embedding.weight
    optimisers = adam(first)[0], adam(second)[0]
    places = set()
    for number, batch in enumerate(batches):
        for model in (first, second):
            packed_logits(model, batch, dropout_seed=number).square().mean().backward()
        assert torch.equal(tables[0].grad, tables[1].grad)
        places.add(tables[1].grad.data_ptr())
        for optimiser in optimisers:
            optimiser.step()
        recycle_gradient(tables[1], batch.token_ids)
        assert tables[1].grad is None
        for optimiser in optimisers:
            optimiser.zero_grad()
    assert len(places) == 1  # it really is the same memory
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_spare_gradient_is_used_once():
    model, batch = make_model("shared-softmaxfeat"), make_batch()
    table = model.token_embedding.weight
    recycle_gradient(table, batch.token_ids)  # there is none yet
    packed_logits(model, batch).sum().backward()
    once = table.grad.clone()
    recycle_gradient(table, batch.token_ids)
    kept = spare_gradient(table)
    assert kept is not None
    assert not kept.any()
    assert spare_gradient(table) is None
    table.grad = kept
    recycle_gradient(table, batch.token_ids)
    loss = packed_logits(model, batch).sum()
    assert spare_gradient(table) is None  # the forward pass took it
    loss.backward(retain_graph=True)
    assert torch.equal(table.grad, once)
    loss.backward()
    assert torch.equal(table.grad, 2 * once)


def test_the_fused_optimiser_is_torch_s():
    first = make_model("shared-softmaxfeat")
    second = copy.deepcopy(first)
    batches = [make_batch(seed=number) for number in range(4)]
    train(first, adam(first, foreach=False), batches)
    settings = preset("default", {"lr": 1e-2}).train
    train(second, [make_optimiser(second, settings)], batches)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_trimming_leaves_the_model_and_gives_its_numbers():
    model, batch = make_model("performer"), make_batch((4, 3))
    state = {name: x.clone() for name, x in model.state_dict().items()}
    model.token_embedding.weight.requires_grad_(False)
    trimmed, kept = trim_vocabulary(model, batch.token_ids)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert trimmed.token_embedding.weight.shape == (len(kept), 32)
    assert not trimmed.token_embedding.weight.requires_grad
    few = batch._replace(token_ids=torch.searchsorted(kept, batch.token_ids))
    assert torch.equal(packed_logits(trimmed, few), packed_logits(model, batch))
    trimmed.layers[0].attention.redraw()
    restore_vocabulary(trimmed, model, kept)
    restored = model.layers[0].attention.get_extra_state()
    assert torch.equal(restored, trimmed.layers[0].attention.get_extra_state())


@pytest.mark.parametrize("ids", [[], [40], [-1]])
def test_ids_that_are_none_are_refused(ids):
    model = make_model("softmax")
    with pytest.raises(ParameterError, match="`token_ids` must hold"):
        trim_vocabulary(model, torch.tensor(ids, dtype=torch.int64))


def test_only_matrices_of_the_layers_decay():
    model = make_model("shared-softmaxfeat")
    settings = preset("default", {"optimiser": "adamw", "weight_decay": 0.1}).train
    decayed, rest = make_optimiser(model, settings).param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    parts = {id(p) for p in (*decayed["params"], *rest["params"])}
    assert parts == {id(p) for p in model.parameters() if p.requires_grad}
    assert all(p.ndim > 1 for p in decayed["params"])
    assert any(p is model.token_embedding.weight for p in rest["params"])
