"""Encoders of torch's own layers, from texts to a linearised copy."""

import copy

import pytest
import torch
from linearise_cases import QUICK, WORDS, make_texts
from torch import nn

from coulomb._support.errors import ParameterError, ParameterTypeError
from coulomb.features import Particles
from coulomb.linearise import LineariseSettings, linearise, linearised_heads
from coulomb.linearise.fit import Distillation, distil, particle_names
from coulomb.linearise.teacher import Recording, Stack, record_texts


class Encoder(nn.Module):
    """Embeddings and torch's encoder; `late` puts the batch on the second axis."""

    def __init__(self, late=False, norm_first=False, dropout=0.1):
        super().__init__()
        self.late = late
        self.words = nn.Embedding(WORDS + 4, 16)
        self.places = nn.Embedding(64, 16)
        layer = nn.TransformerEncoderLayer(
            16, 2, 24, dropout, batch_first=not late, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids, padding):
        x = 3 * self.words(ids) + self.places.weight[: ids.shape[1]]
        x = x.transpose(0, 1) if self.late else x
        out = self.encoder(x, src_key_padding_mask=padding)
        return out.transpose(0, 1) if self.late else out


def tokenize(texts):
    rows = [[1 + ord(c) % WORDS for c in text[:36]] for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return {"ids": ids, "padding": ids == 0}


def encoder(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(**options)


@pytest.fixture(scope="module")
def fast():
    return linearise(encoder(), tokenize, make_texts(), **QUICK)


def test_summary_says_what_was_kept(fast):
    summary = fast.linearise_summary
    assert summary.cosine > summary.cosine_random
    assert all(a < b for a, b in zip(summary.after, summary.before, strict=True))
    assert summary.n_texts == 24
    text = str(summary)
    assert "softmaxfeat, 8 features per head" in text
    assert f"{summary.cosine:.4f}" in text
    assert summary.as_dict()["after"] == summary.after


def test_same_seed_same_model(fast):
    again = linearise(encoder(), tokenize, make_texts(), **QUICK)
    for one, two in zip(fast.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    other = linearise(encoder(), tokenize, make_texts(), seed=1, **QUICK)
    ours, theirs = linearised_heads(fast)[0], linearised_heads(other)[0]
    assert not torch.equal(ours.particles, theirs.particles)


def test_the_model_is_left_as_it_is(fast):
    model = encoder().train()
    model.encoder.layers[0].eval()
    before = copy.deepcopy(model.state_dict())
    linearise(model, tokenize, make_texts(), **QUICK)
    assert model.training
    assert not model.encoder.layers[0].training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    for module in model.modules():
        assert not module._forward_pre_hooks
    kept = {n: p for n, p in fast.named_parameters() if "particles" not in n}
    assert all(torch.equal(p, before[n]) for n, p in kept.items())


def test_padding_changes_nothing(fast):
    batch = tokenize(make_texts(3, seed=5))
    longer = {
        "ids": nn.functional.pad(batch["ids"], (0, 7)),
        "padding": nn.functional.pad(batch["padding"], (0, 7), value=True),
    }
    n = batch["ids"].shape[1]
    real = ~batch["padding"]
    with torch.no_grad():
        torch.testing.assert_close(fast(**longer)[:, :n][real], fast(**batch)[real])


@pytest.mark.parametrize("options", [{}, {"late": True}, {"norm_first": True}], ids=str)
def test_all_layers_exact_is_the_model_itself(options):
    model = encoder(**options).eval()
    kept = linearise(model, tokenize, make_texts(), keep_exact=[0, 1], **QUICK)
    batch = tokenize(make_texts(3, seed=5))
    real = ~batch["padding"]
    with torch.no_grad():
        torch.testing.assert_close(kept(**batch)[real], model(**batch)[real])
    assert kept.linearise_summary.cosine == pytest.approx(1, abs=1e-5)


def test_worst_heads_can_be_kept():
    kept = linearise(encoder(), tokenize, make_texts(), keep_exact=1, **QUICK)
    summary = kept.linearise_summary
    worst = max(
        (value, layer, head)
        for layer, heads in enumerate(summary.head_divergence)
        for head, value in enumerate(heads)
    )
    assert summary.exact_heads[worst[1]] == [worst[2]]
    assert sum(map(len, summary.exact_heads)) == 1


def test_speed_is_measured_when_asked():
    quick = QUICK | {"measure": True, "steps": 1, "distil_steps": 0}
    fast = linearise(encoder(), tokenize, make_texts(), **quick)
    # A torch layer is called with a mask of padding: its length would be another.
    assert fast.linearise_summary.speed == {}


class TestDistillation:
    def case(self):
        model = encoder().eval()
        quick = QUICK | {"distil_steps": 0}
        fast = linearise(model, tokenize, make_texts(), **quick)
        settings = LineariseSettings(max_tokens=5000, max_length=36, batch_tokens=200)
        source = torch.Generator().manual_seed(0)
        teacher, texts = Stack(model), make_texts()
        parts = record_texts(teacher, tokenize, texts, settings, generator=source)
        return teacher, Stack(fast), parts

    def test_energy_is_that_of_the_model_that_holds_the_particles(self):
        teacher, student, (texts, _) = self.case()
        names = particle_names(student)
        assert len(names) == 2
        positions = torch.stack([student.get_parameter(n).detach() for n in names])
        energy = Distillation(student, texts.batches[0], texts.states(0))
        value = energy.energy(Particles(positions)).detach()
        batch = texts.batches[0]
        with torch.no_grad():
            ours, theirs = (s.model(**batch) for s in (student, teacher))
        last = (ours - theirs)[~batch["padding"]].square().sum()
        last = last / theirs[~batch["padding"]].square().sum()
        embed = [(x * ~batch["padding"][..., None]).sum(1) for x in (ours, theirs)]
        cosine = torch.cosine_similarity(*embed).mean()
        assert float(value) > float(last / 2 + 1 - cosine) - 1e-5
        assert float(value) < float(last + 1 - cosine) + 1e-5

    def test_particles_move_only_if_held_out_text_gains(self):
        _, student, recordings = self.case()
        names = particle_names(student)
        start = [student.get_parameter(n).clone() for n in names]
        source = torch.Generator().manual_seed(0)
        settings = LineariseSettings(distil_steps=40, distil_step_size=0.003)
        parts = student, *recordings
        before, after = distil(*parts, settings, generator=source)
        moved = [student.get_parameter(n) for n in names]
        assert after < before
        assert not torch.equal(moved[0], start[0])
        kept = [p.clone() for p in moved]
        wild = LineariseSettings(distil_steps=3, distil_step_size=50.0)
        before, after = distil(*parts, wild, generator=source)
        assert after > before
        for name, part in zip(names, kept, strict=True):
            assert torch.equal(student.get_parameter(name), part)


class TestRecording:
    def test_kept_or_made_again_they_are_the_same(self):
        teacher = Stack(encoder().eval())
        batches = [tokenize(make_texts(4, seed)) for seed in range(3)]
        room = {"all": 1 << 20, "first": 15_000, "none": 0}
        made = {
            name: Recording(teacher, batches, most_bytes=size)
            for name, size in room.items()
        }
        for recording in made.values():
            assert len(list(recording.layers())) == len(teacher.blocks)
        counts = [len(recording.kept) for recording in made.values()]
        assert counts[0] == 3
        assert 0 < counts[1] < 3
        assert counts[2] == 0
        for number in range(3):
            parts = [recording.states(number) for recording in made.values()]
            for state in zip(*parts, strict=True):
                assert torch.equal(state[0], state[1])
                assert torch.equal(state[0], state[2])


class TestRefusals:
    def test_models_without_attention(self):
        with pytest.raises(ParameterError, match="BERT, DistilBERT, MPNet, RoBERTa"):
            linearise(nn.Linear(2, 2), tokenize, make_texts())

    def test_things_that_are_no_models(self):
        with pytest.raises(ParameterTypeError, match=r"AutoModel.from_pretrained"):
            linearise("folder", tokenize, make_texts())

    def test_a_model_twice(self, fast):
        with pytest.raises(ParameterError, match="must have softmax attention"):
            linearise(fast, tokenize, make_texts(), **QUICK)

    def test_causal_encoders(self):
        class Causal(Encoder):
            def forward(self, ids, padding):
                mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
                return self.encoder(self.words(ids), mask=mask)

        with pytest.raises(ParameterError, match="whose tokens all see each other"):
            linearise(Causal(), tokenize, make_texts(), **QUICK)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"n_feature": 3}, "did you mean 'n_features'"),
            ({"keep_exact": [2]}, "layers from 0 to 1; got 2"),
            ({"keep_exact": [(0, 2)]}, "heads from 0 to 1; got 2"),
            ({"seed": -1}, "`seed` must be at least 0"),
            ({"max_tokens": 10}, "room for four texts"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(ParameterError, match=message):
            linearise(encoder(), tokenize, make_texts(), **(QUICK | options))

    def test_texts(self):
        with pytest.raises(ParameterTypeError, match="sequence of strings; got str"):
            linearise(encoder(), tokenize, "one text")
        with pytest.raises(ParameterError, match="at least 4 texts"):
            linearise(encoder(), tokenize, ["a", " ", "b", "c"])


def test_settings_and_arguments_come_together():
    settings = LineariseSettings(n_features=5, steps=2, distil_steps=0, max_length=36)
    fast = linearise(
        encoder(), tokenize, make_texts(), settings=settings, measure=False
    )
    assert fast.linearise_summary.n_features == 5
    fast = linearise(
        encoder(),
        tokenize,
        make_texts(),
        settings=settings,
        n_features=7,
        measure=False,
    )
    assert fast.linearise_summary.n_features == 7


def test_short_texts_are_joined_to_long_ones():
    def record(share):
        settings = LineariseSettings(
            max_tokens=10_000, max_length=36, batch_tokens=200, long_share=share
        )
        source = torch.Generator().manual_seed(0)
        texts = ["abcdefgh" * 2] * 100
        return record_texts(
            Stack(encoder()), tokenize, texts, settings, generator=source
        )

    (plain, held_out), (mixed, _) = record(0.0), record(0.5)
    assert {b["ids"].shape[1] for b in plain.batches} == {16}
    assert {b["ids"].shape[1] for b in mixed.batches} == {16, 36}
    assert (plain.n_texts, held_out.n_texts) == (90, 10)
