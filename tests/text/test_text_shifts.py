"""Tags choose where heads look: the windows, their controls, their diagnosis."""

import random

import pytest
import torch
from text_cases import particles_of, reviews, set_up_start

from coulomb._support.errors import CoulombError
from coulomb.text import (
    build_corpus,
    diagnose_run,
    train_in_folder,
)
from coulomb.text.align import (
    POOL,
    choose_windows,
    judge_start,
    measure_windows,
    run_phase_a,
)
from coulomb.text.predictor import Predictor

WORDS = ["left", "film", "plot", "cast", "story", "actor"]


def told_by_neighbours(shifts, *, n=400, shuffled=False):
    """Words whose tag says which of the words at these shifts is "left"."""
    draw = random.Random(0)
    texts, tags = [], []
    for _ in range(n):
        words = draw.choices(WORDS, k=14)
        said = [
            "".join(
                "x" if 0 <= i + shift < 14 and words[i + shift] == "left" else "o"
                for shift in shifts
            )
            for i in range(14)
        ]
        texts.append(words)
        tags.append(said)
    if shuffled:  # over all texts: what a text's words say of its tags is gone, too
        every = [tag for said in tags for tag in said]
        draw.shuffle(every)
        tags = [every[14 * row : 14 * (row + 1)] for row in range(n)]
    return build_corpus("told", (texts, tags), validation_share=0.2)


def made(corpus, **changes):
    return set_up_start(corpus, 60, **{"start_norm": 3.0} | changes)


@pytest.mark.parametrize("shifts", [(-1, 1), (2, -2)])
def test_labels_choose_the_windows_that_tell_them(shifts):
    setup, _ = made(told_by_neighbours(shifts))
    assert not setup.model.layers[0].attention.tied
    before = particles_of(setup)
    start = choose_windows(setup)
    assert set(start.shifts) == set(shifts)
    assert start.choice.explained > 2 * max(start.choice.centred, 0.01)
    for kept, now in zip(before, particles_of(setup), strict=True):
        assert torch.equal(kept, now)
    facts = run_phase_a(setup, None, lambda record: None)
    assert facts["shifts"] == start.shifts
    assert "The labels chose that" in facts["summary"]
    for layer, found in enumerate(particles_of(setup)):
        assert torch.equal(found, start.positions[layer])


def test_a_finished_phase_a_is_taken_up_as_it_was(tmp_path):
    corpus, file = told_by_neighbours((-1, 1)), tmp_path / "particles.safetensors"
    found = []
    for _ in range(2):
        setup, _ = made(corpus, align_epochs=0.5, align_step_size=1e-3)
        facts = run_phase_a(setup, file, lambda record: None)
        found.append((facts | {"seconds": 0}, particles_of(setup)))
    assert found[0][0] == found[1][0]
    assert found[0][0]["steps"] > 0
    for one, two in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(one, two)


def test_shuffled_labels_choose_nothing():
    setup, _ = made(told_by_neighbours((-1, 1), shuffled=True))
    assert choose_windows(setup).shifts == (0,)


def test_the_choice_does_not_depend_on_the_loops(monkeypatch):
    setup, _ = made(told_by_neighbours((-1,)))
    fast = measure_windows(setup)
    monkeypatch.setenv("COULOMB_NUMBA", "0")
    slow = measure_windows(setup)
    for shift in POOL:
        one, two = fast.explained([shift]), slow.explained([shift])
        assert one == pytest.approx(two, abs=1e-4)


def test_shifts_can_be_given_and_drawn():
    corpus = told_by_neighbours((-1, 1))
    setup, _ = made(corpus, align_shifts="3,-3")
    facts = run_phase_a(setup, None, lambda record: None)
    assert facts["shifts"] == (3, -3)
    assert facts["chosen"] == {}
    drawn = set()
    for seed in range(4):
        setup, _ = made(corpus, attention="strewn-softmaxfeat", seed=seed)
        facts = run_phase_a(setup, None, lambda record: None)
        assert len(set(facts["shifts"])) == 2
        drawn.add(facts["shifts"])
        halves = particles_of(setup)[0].split(16, dim=-1)
        assert not torch.allclose(*halves)
    assert len(drawn) > 1


def test_controls_of_the_choice():
    """Norm-matched keeps drawn directions; noise without steps is vanilla."""
    corpus = told_by_neighbours((-1, 1))
    found = {}
    for row in ("vanilla", "control", "noise", "placed"):
        setup, _ = made(corpus, attention=f"{row}-softmaxfeat")
        run_phase_a(setup, None, lambda record: None)
        found[row] = particles_of(setup)[0]
    assert torch.equal(found["noise"], found["vanilla"])
    assert found["placed"].shape == found["vanilla"].shape
    learned, _ = made(corpus)
    run_phase_a(learned, None, lambda record: None)
    for half, aligned in zip(
        found["control"].split(16, dim=-1),
        particles_of(learned)[0].split(16, dim=-1),
        strict=True,
    ):
        cosine = torch.cosine_similarity(half, found["vanilla"], dim=-1)
        assert float(cosine.min()) > 1 - 1e-5
        torch.testing.assert_close(half.norm(dim=-1), aligned.norm(dim=-1))


@pytest.mark.parametrize("row", ["kernel", "control", "noise"])
def test_texts_with_one_label_keep_tied_drawn_particles(row):
    corpus = build_corpus("some", reviews(40), validation_share=0.25)
    setup, _ = made(corpus, attention=f"{row}-softmaxfeat")
    before = particles_of(setup)
    assert setup.model.layers[0].attention.tied
    run_phase_a(setup, None, lambda record: None)
    for kept, now in zip(before, particles_of(setup), strict=True):
        torch.testing.assert_close(kept, now)


def test_without_positions_there_are_no_windows():
    setup, _ = made(told_by_neighbours((-1,)), positions="none")
    assert setup.model.layers[0].attention.tied
    assert run_phase_a(setup, None, lambda record: None)["begun"] == "drawn"
    setup, _ = made(
        told_by_neighbours((-1,)), positions="none", attention="strewn-cos2"
    )
    with pytest.raises(CoulombError, match="`positions` must be 'learned'"):
        run_phase_a(setup, None, lambda record: None)


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_run_is_diagnosed_by_its_choice(tmp_path, shuffled):
    corpus = told_by_neighbours((-1, 1), shuffled=shuffled)
    setup, vocabulary = made(corpus)
    folder = tmp_path / "run"
    train_in_folder(folder, corpus, setup.settings, vocabulary)
    found = diagnose_run(folder, corpus=corpus, n_twins=2, n_shuffles=120)
    assert found.learned is not shuffled
    told = "did not learn" if shuffled else "learned"
    assert found.verdict.startswith(f"Phase A {told}: windows chosen by the labels")
    again = judge_start(made(corpus)[0], 3)
    assert again.choice.shifts == found.chosen.choice.shifts
    assert again.choice.explained == pytest.approx(found.chosen.choice.explained)
    assert len(again.shuffled) == 3
    told = found.record()["chosen"]
    assert told["choice"]["shifts"] == list(again.choice.shifts)
    assert told["alone"].keys() == {str(shift) for shift in POOL}
    predictor = Predictor.load(folder)
    assert predictor.tag(corpus.split("validation").texts[:2])
