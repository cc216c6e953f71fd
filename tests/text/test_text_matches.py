"""Labels of pairs choose how closely words must agree: choice, controls, diagnosis."""

import random

import pytest
import torch
from text_cases import particles_of, set_up_start

from coulomb._support.errors import CoulombError
from coulomb.text import (
    align,
    build_corpus,
    diagnose_run,
    train_in_folder,
)
from coulomb.text.align import (
    FACTORS,
    choose_pair_norm,
    measure_cross_attention,
    run_phase_a,
)
from coulomb.text.predictor import Predictor

WORDS = [f"{a}{b}" for a in "bdfklm" for b in ("ar", "el", "in", "os", "un")]


def pairs(*, n=400, shuffled=False):
    """Texts that share words, or none."""
    draw, words = random.Random(0), list(WORDS)
    texts, labels = [], []
    for row in range(n):
        draw.shuffle(words)
        first, rest = words[:6], words[6:]
        second = first[2:] + rest[:2] if row % 2 else rest[:6]
        texts.append((" ".join(first), " ".join(second)))
        labels.append("same" if row % 2 else "other")
    if shuffled:
        draw.shuffle(labels)
    return build_corpus("pairs", (texts, labels), validation_share=0.2)


def made(corpus, **changes):
    return set_up_start(corpus, 120, **{"positions": "parts"} | changes)


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch):
    monkeypatch.setattr(align, "ENOUGH", 300)


def test_labels_choose_particles_that_do_not_see_the_part():
    setup, _ = made(pairs())
    before = particles_of(setup)
    start = choose_pair_norm(setup)
    assert start.choice.factor in FACTORS
    assert start.choice.explained > 2 * start.choice.drawn
    for kept, now in zip(before, particles_of(setup), strict=True):
        assert torch.equal(kept, now)
    facts = run_phase_a(setup, None, lambda record: None)
    assert facts["begun"] == "matches"
    assert facts["chosen"] == start.choice._asdict()
    assert "Labels chose particles blind to the part" in facts["summary"]
    table = setup.model.position_embedding.weight.detach()
    apart = (table[0] - table[1]).view(setup.settings.n_heads, 1, -1)
    for layer, found in enumerate(particles_of(setup)):
        assert torch.equal(found, start.positions[layer])
        assert float((found * apart).sum(dim=-1).abs().max()) < 1e-5


def test_shuffled_labels_leave_particles_alone():
    setup, _ = made(pairs(shuffled=True))
    before = particles_of(setup)
    assert run_phase_a(setup, None, lambda record: None)["begun"] == "drawn"
    for kept, now in zip(before, particles_of(setup), strict=True):
        torch.testing.assert_close(kept, now)


@pytest.mark.parametrize(
    "changes", [{"positions": "learned"}, {"align_start": "drawn"}]
)
def test_pairs_keep_drawn_particles_otherwise(changes):
    setup, _ = made(pairs(n=60), **changes)
    before = particles_of(setup)
    assert run_phase_a(setup, None, lambda record: None)["begun"] == "drawn"
    for kept, now in zip(before, particles_of(setup), strict=True):
        torch.testing.assert_close(kept, now)


def test_few_pairs_keep_drawn_particles(monkeypatch):
    monkeypatch.setattr(align, "ENOUGH", 400)
    setup, _ = made(pairs())  # of which a fifth is for validation
    assert run_phase_a(setup, None, lambda record: None)["begun"] == "drawn"


def test_single_texts_have_no_parts():
    texts = [" ".join(WORDS[:4])] * 20 + [" ".join(WORDS[4:8])] * 20
    corpus = build_corpus("one", (texts, ["a"] * 20 + ["b"] * 20), validation_share=0.2)
    setup, _ = made(corpus)
    assert setup.rows["train"].parts is None
    assert run_phase_a(setup, None, lambda record: None)["begun"] == "drawn"


def test_controls_of_pairs():
    """The norms without the directions, the directions without the norms, neither."""
    corpus, found = pairs(), {}
    for row in ("kernel", "vanilla", "control", "noise", "placed"):
        setup, _ = made(corpus, attention=f"{row}-softmaxfeat")
        run_phase_a(setup, None, lambda record: None)
        found[row] = particles_of(setup)[0]
    norms = {row: each.norm(dim=-1) for row, each in found.items()}
    assert torch.equal(found["noise"], found["vanilla"])
    torch.testing.assert_close(norms["control"], norms["kernel"])
    torch.testing.assert_close(norms["placed"], norms["vanilla"])
    for one, two in (("control", "vanilla"), ("placed", "kernel")):
        cosine = torch.cosine_similarity(found[one], found[two], dim=-1)
        assert float(cosine.min()) > 1 - 1e-5
    setup, _ = made(corpus, attention="strewn-softmaxfeat")
    with pytest.raises(CoulombError, match="`positions` must be 'learned'"):
        run_phase_a(setup, None, lambda record: None)


def test_the_look_across_does_not_depend_on_the_loops(monkeypatch):
    setup, _ = made(pairs(n=100))
    fast, labels = measure_cross_attention(setup)
    monkeypatch.setenv("COULOMB_NUMBA", "0")
    slow, same = measure_cross_attention(setup)
    assert torch.equal(labels, same)
    for factor, shares in fast.items():
        torch.testing.assert_close(shares, slow[factor], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_run_of_pairs_is_diagnosed_by_its_choice(tmp_path, shuffled):
    corpus = pairs(shuffled=shuffled)
    setup, vocabulary = made(corpus)
    folder = tmp_path / "run"
    train_in_folder(folder, corpus, setup.settings, vocabulary)
    found = diagnose_run(folder, corpus=corpus, n_twins=2, n_shuffles=120)
    assert found.learned is not shuffled
    told = "did not learn: particles stay" if shuffled else "learned: labels chose"
    assert found.verdict.startswith(f"Phase A {told}")
    record = found.record()["chosen"]
    assert record["alone"].keys() == {"0.0", *map(str, FACTORS)}
    predictor = Predictor.load(folder)
    texts = corpus.split("validation").texts
    whole = predictor.predict_proba(texts)
    one_by_one = [predictor.predict_proba([text])[0] for text in texts[:3]]
    for row, alone in zip(whole[:3], one_by_one, strict=True):
        torch.testing.assert_close(torch.tensor(row), torch.tensor(alone))
