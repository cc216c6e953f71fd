"""The energy of a model's outputs: which of them count, and its gradient."""

from dataclasses import replace

import pytest
import torch
from align_cases import TinyModel, random_batches

from coulomb.attention.align.problem import (
    LEVELS,
    Batch,
    ModelAlignment,
    Network,
    NoAlignment,
    ParticleLayers,
    View,
    as_batch,
)
from coulomb.attention.align.scores import IGNORED, Rows, Target, as_score, scores
from coulomb.features import Particles

F64 = torch.float64


def make_model(**options):
    return TinyModel(dtype=F64, **options).eval()


def make_objective(batches, *, model=None, level="sequence", score="centred", **view):
    model = model or make_model()
    network = Network(model, ParticleLayers.find(model))
    numbers = tuple(range(len(batches)))
    return ModelAlignment(
        network, as_score(score), View(level, **view), batches, numbers
    )


def particles_of(objective):
    network = objective.network
    return Particles(network.layers.read(network.model))


def attention_outputs(model, batch):
    """What each layer gives, written out by hand."""
    inputs, mask, _ = batch
    outputs, x = [], inputs
    for layer in model.attention:
        out = layer(model.norm(x), mask)
        outputs.append(out)
        x = x + out
    return outputs


def token_labels(batches, seed=5):
    generator = torch.Generator().manual_seed(seed)
    for inputs, mask, _ in batches:
        labels = torch.randint(2, mask.shape, generator=generator)
        labels[:, 1] = IGNORED
        yield inputs, mask, labels


@pytest.mark.parametrize("score", ["centred", "within-class"])
def test_sequence_level_pools_real_tokens_of_the_last_layer(score):
    batches = random_batches(2, dtype=F64)
    objective = make_objective(batches, score=score)
    expected = []
    for batch in batches:
        out = attention_outputs(objective.network.model, batch)[-1]
        pooled = torch.stack([o[m].mean(0) for o, m in zip(out, batch[1], strict=True)])
        expected.append(as_score(score)(Rows(pooled, batch[2])))
    energy = objective.energy(particles_of(objective))
    torch.testing.assert_close(energy, -sum(expected) / 2)


@pytest.mark.parametrize("score", ["centred", "within-class"])
def test_token_level_takes_labelled_real_tokens(score):
    batches = list(token_labels(random_batches(1, dtype=F64)))
    objective = make_objective(batches, level="token", score=score)
    _, mask, labels = batches[0]
    out = attention_outputs(objective.network.model, batches[0])[-1]
    places = [
        (i, t)
        for i in range(mask.shape[0])
        for t in range(mask.shape[1])
        if mask[i, t] and labels[i, t] != IGNORED
    ]
    features = torch.stack([out[place] for place in places])
    target = torch.stack([labels[place] for place in places])
    energy = objective.energy(particles_of(objective))
    torch.testing.assert_close(energy, -as_score(score)(Rows(features, target)))


def test_the_paper_s_token_objective_is_its_double_sum():
    batches = list(token_labels(random_batches(1, size=3, dtype=F64)))
    objective = make_objective(batches, level="token", score="within-class")
    _, mask, labels = batches[0]
    out = attention_outputs(objective.network.model, batches[0])[-1]
    union = (mask & (labels != IGNORED)).nonzero().tolist()
    total = sum(
        out[tuple(a)] @ out[tuple(b)]
        for a in union
        for b in union
        if a < b and labels[tuple(a)] == labels[tuple(b)]
    )
    expected = total / (len(union) * (len(union) - 1))
    energy = objective.energy(particles_of(objective))
    torch.testing.assert_close(energy, -expected)


@pytest.mark.parametrize("tokens", [False, True])
def test_layer_level_averages_over_layers_and_head_level_over_heads(tokens):
    batches = random_batches(1, dtype=F64)
    batches = list(token_labels(batches)) if tokens else batches
    layer, head = (make_objective(batches, level=name) for name in ("layer", "head"))
    particles = particles_of(layer)
    outputs = attention_outputs(layer.network.model, batches[0])
    _, mask, labels = batches[0]
    by_layer, by_head = [], []
    for out in outputs:
        if tokens:
            kept = mask & (labels != IGNORED)
            features, target = out[kept], labels[kept]
        else:
            weight = mask.to(F64).unsqueeze(-1)
            features, target = (weight * out).sum(1) / weight.sum(1), labels
        by_layer.append(as_score("centred")(Rows(features, target)))
        by_head += [
            as_score("centred")(Rows(part, target)) for part in features.chunk(2, -1)
        ]
    torch.testing.assert_close(layer.energy(particles), -sum(by_layer) / 2)
    torch.testing.assert_close(head.energy(particles), -sum(by_head) / 4)


def test_a_teacher_between_the_tokens_of_each_sequence():
    inputs, mask, _ = random_batches(1, size=3, dtype=F64)[0]
    gram = torch.rand(3, 5, 5, generator=torch.Generator(), dtype=F64)
    objective = make_objective([(inputs, mask, gram)], level="token", score="target")
    out = attention_outputs(objective.network.model, (inputs, mask, gram))[-1]
    alone = [
        Target()(Rows(out[i, mask[i]], gram[i][mask[i]][:, mask[i]])) for i in range(3)
    ]
    energy = objective.energy(particles_of(objective))
    torch.testing.assert_close(energy, -sum(alone) / 3)


def make_labels(batches, level, score):
    if scores.build(score).pairwise:
        size, length = batches[0][0].shape[:2]
        shape = (size, length, length) if level == "token" else (size, size)
        gram = torch.rand(*shape, generator=torch.Generator(), dtype=F64)
        return [(inputs, mask, gram) for inputs, mask, _ in batches]
    return list(token_labels(batches)) if level == "token" else batches


# Logits are of no layer and no head.
KINDS = [
    (level, score)
    for level in LEVELS
    for score in sorted(scores)
    if level in ("sequence", "token") or not scores.build(score).of_logits
]


@pytest.mark.parametrize(("level", "score"), KINDS)
def test_gradient_through_the_model(level, score):
    batches = make_labels(random_batches(1, size=4, dtype=F64), level, score)
    model = make_model(n_particles=2, feature_map="softplus")
    objective = make_objective(batches, model=model, level=level, score=score)
    positions = particles_of(objective).positions.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda p: objective.energy(Particles(p)), positions, atol=1e-6
    )


@pytest.mark.parametrize(("level", "score"), KINDS)
def test_field_is_n_times_the_gradient_of_the_mean_over_batches(level, score):
    batches = make_labels(random_batches(3, dtype=F64), level, score)
    objective = make_objective(batches, level=level, score=score)
    particles = particles_of(objective)
    positions = particles.positions.clone().requires_grad_()
    energy = objective.energy(Particles(positions))
    (gradient,) = torch.autograd.grad(energy, positions)
    field = objective.field(particles)
    torch.testing.assert_close(field.gradient, 6 * gradient)
    assert field.potential.shape == positions.shape[:-1]
    torch.testing.assert_close(field.potential[0, 0, 0], energy.detach())


def test_order_of_particles_does_not_matter_and_padding_neither():
    batches = random_batches(2, dtype=F64)
    objective = make_objective(batches, level="layer")
    particles = particles_of(objective)
    energy = objective.energy(particles)
    mixed = Particles(particles.positions[:, :, torch.tensor([3, 0, 5, 1, 4, 2])])
    torch.testing.assert_close(objective.energy(mixed), energy)
    longer = [
        (
            torch.cat([inputs, 7 * torch.ones_like(inputs)], dim=1),
            torch.cat([mask, torch.zeros_like(mask)], dim=1),
            labels,
        )
        for inputs, mask, labels in batches
    ]
    torch.testing.assert_close(
        replace(objective, batches=longer).energy(particles), energy
    )


def test_pooling():
    batch = random_batches(1, dtype=F64)[0]

    def last(out, mask):
        return out[:, -1]

    for pool, place in (("cls", 0), (last, -1)):
        objective = make_objective([batch], pool=pool)
        out = attention_outputs(objective.network.model, batch)[-1][:, place]
        expected = -as_score("centred")(Rows(out, batch[2]))
        energy = objective.energy(particles_of(objective))
        torch.testing.assert_close(energy, expected)


@pytest.mark.parametrize("output", ["", "head"])
def test_outputs_of_the_model_and_of_a_named_module(output):
    batch = random_batches(1, dtype=F64)[0]
    model = make_model()
    network = Network(model, ParticleLayers.find(model), output=output)
    objective = ModelAlignment(network, as_score("centred"), View(), [batch], (0,))
    expected = -as_score("centred")(Rows(model(*batch[:2]), batch[2]))
    torch.testing.assert_close(objective.energy(particles_of(objective)), expected)


def test_a_batch_without_pairs_has_no_energy_and_no_gradient():
    inputs, mask, _ = random_batches(1, dtype=F64)[0]
    labels = torch.full(mask.shape, IGNORED)
    labels[0, 0] = 1
    objective = make_objective([(inputs, mask, labels)], level="token")
    field = objective.field(particles_of(objective))
    assert (field.gradient == 0).all()
    assert (field.potential == 0).all()


def test_no_alignment_moves_nothing():
    positions = torch.ones(2, 3, 4, 5)
    field = NoAlignment().field(Particles(positions))
    assert (field.gradient == 0).all()
    assert field.potential.shape == (2, 3, 4)


def test_batches_as_mappings_and_tuples():
    labels = torch.tensor([0, 1])
    words = {
        "x": torch.ones(2, 3),
        "attention_mask": torch.ones(2, 3),
        "labels": labels,
    }
    batch = as_batch(words)
    assert set(batch.keywords) == {"x", "attention_mask"}
    assert batch.key_mask.dtype == torch.bool
    assert as_batch((words["x"], labels)) == Batch((words["x"],), {}, None, labels)
    with pytest.raises(ValueError, match="must hold 'labels'"):
        as_batch({"x": 1})
    with pytest.raises(TypeError, match="got int"):
        as_batch(3)


def test_mistakes_are_named():
    batch = random_batches(1, dtype=F64)[0]
    with pytest.raises(ValueError, match="did you mean 'layer'"):
        View("layers")
    with pytest.raises(ValueError, match="`pool` has no member"):
        View(pool="max")
    objective = make_objective([batch], level="token")
    with pytest.raises(ValueError, match=r"must have the axes \(batch, length\)"):
        objective.energy(particles_of(objective))
    model = make_model()
    with pytest.raises(ValueError, match="did you mean 'head'"):
        Network(model, ParticleLayers.find(model), output="heads")
    with pytest.raises(ValueError, match=r"did you mean 'attention\.0'"):
        ParticleLayers.find(model, ["atention.0"])
    with pytest.raises(ValueError, match="Linear without any"):
        ParticleLayers.find(torch.nn.Linear(1, 1))
    mixed = torch.nn.ModuleList([make_model(), make_model(n_particles=7)])
    with pytest.raises(ValueError, match=r"one shape; got .* Align them one after"):
        ParticleLayers.find(mixed)

    def forgetful(model, parameters, batch):
        return None

    network = Network(model, ParticleLayers.find(model), forgetful)
    with pytest.raises(ValueError, match="none was reached"):
        network(network.layers.read(model), as_batch(batch))
    network = Network(model, ParticleLayers.find(model), forgetful, output="")
    with pytest.raises(TypeError, match="must give a tensor"):
        network(network.layers.read(model), as_batch(batch))


@pytest.mark.parametrize("output", [None, "norm"])
def test_recording_leaves_modules_as_they_were(output):
    model, batch = make_model(), as_batch(random_batches(1, dtype=F64)[0])
    layer = model.attention[1]
    own = layer.forward
    layer.forward = lambda *inputs: own(*inputs)  # somebody else's, such as a wrapper
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    network = Network(model, ParticleLayers.find(model), output=output)
    positions = network.layers.read(model)
    assert len(network(positions, batch)) == 2  # a norm or an attention in each layer

    def fails(model, parameters, batch):
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        replace(network, evaluate=fails)(positions, batch)
    for name, module in model.named_modules():
        assert vars(module) == before[name]


def test_a_function_may_give_the_features_itself():
    model, batch = make_model(), as_batch(random_batches(1, dtype=F64)[0])
    layers = ParticleLayers.find(model, ["attention.1"])
    given = [torch.zeros(6, 4), torch.ones(6, 4)]
    network = Network(model, layers, lambda *_: given)
    (found,) = network(layers.read(model), batch)
    assert torch.equal(found, given[1])
    with pytest.raises(TypeError, match="must give a tensor"):
        replace(network, evaluate=lambda *_: ["no", "tensor"])(
            layers.read(model), batch
        )
