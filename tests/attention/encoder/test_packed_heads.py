import pytest
import torch
from packed_cases import LENGTHS, make_batch, make_model

from coulomb._support.errors import ParameterError
from coulomb.attention import align
from coulomb.attention.align.problem import (
    ModelAlignment,
    Network,
    ParticleLayers,
    View,
    as_batch,
    call_model,
)
from coulomb.attention.align.scores import IGNORED, as_score
from coulomb.attention.encoder.layout import pad
from coulomb.attention.encoder.packed import PackedHeads
from coulomb.features import Particles


def objective(model, batch, evaluate, view):
    network = Network(model, ParticleLayers.find(model), evaluate)
    return ModelAlignment(network, as_score("centred"), view, [batch], (0,))


def forces(model, level, pool, *, tags=False):
    """Give the forces by the packed way and by the padded one."""
    batch = make_batch()
    labels = torch.arange(len(LENGTHS)) % 2
    padded_labels, packed_labels = labels, labels
    token_ids, mask = pad(batch)
    if tags:
        packed_labels = (batch.token_ids % 3).unsqueeze(0)
        padded_labels = torch.full_like(token_ids, IGNORED)
        padded_labels[mask] = packed_labels[0]
    view = View(level, "mean" if pool == "none" else pool)
    ways = (
        objective(model, (batch, packed_labels), PackedHeads(pool), view),
        objective(model, (token_ids, mask, padded_labels), call_model, view),
    )
    particles = Particles(ParticleLayers.find(model).read(model))
    return [way.forces(particles)[0].gradient for way in ways]


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def _loops(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setenv("COULOMB_NUMBA", "0")


@pytest.mark.parametrize("row", ["shared-softmaxfeat", "learned-favor"])
@pytest.mark.parametrize("level", ["sequence", "layer", "head"])
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_forces_are_those_of_padded_batches(row, level, pool):
    ours, theirs = forces(make_model(row), level, pool)
    assert (ours - theirs).norm() < 1e-4 * theirs.norm()


@pytest.mark.parametrize("level", ["token", "head"])
def test_forces_of_tags(level):
    ours, theirs = forces(make_model("shared-elu"), level, "none", tags=True)
    assert (ours - theirs).norm() < 1e-4 * theirs.norm()


def test_phase_a_ends_where_the_padded_one_does():
    ends = []
    for packed in (True, False):
        model = make_model("shared-softmaxfeat")
        batches = []
        for seed in range(3):
            batch = make_batch(seed=seed)
            labels = torch.arange(len(LENGTHS)) % 2
            padded = (*pad(batch), labels)
            batches.append((batch, labels) if packed else padded)
        evaluate = PackedHeads() if packed else None
        align(model, batches, held_out=None, evaluate=evaluate, max_steps=4, seed=1)
        ends.append(ParticleLayers.find(model).read(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-5)


def test_an_unknown_pool_is_refused():
    with pytest.raises(ParameterError, match="did you mean 'mean'"):
        PackedHeads("man")


def test_only_chosen_layers_count():
    model, batch = make_model("shared-elu"), make_batch()
    labels = torch.arange(len(LENGTHS)) % 2
    layers = ParticleLayers.find(model, ["layers.0.attention"])
    features = {}
    for evaluate in (PackedHeads(), call_model):
        packed = evaluate is not call_model
        given = (batch, labels) if packed else (*pad(batch), labels)
        network = Network(model, layers, evaluate)
        features[packed] = network(layers.read(model), as_batch(given))
    assert [len(found) for found in features.values()] == [1, 1]
    mask = pad(batch)[1].unsqueeze(-1)
    pooled = (mask * features[False][0]).sum(dim=1) / mask.sum(dim=1).clamp_min(1)
    torch.testing.assert_close(features[True][0], pooled, rtol=1e-4, atol=1e-5)
