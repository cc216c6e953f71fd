"""The proof of Phase A: its arms, their pairing, its p-values."""

import pytest

from coulomb._support.errors import ParameterError
from coulomb.experiments import Record, Settings, experiments
from coulomb.experiments.phase_a import arm_settings, compare_arms, load_rows
from coulomb.experiments.text import thinned
from coulomb.text import build_corpus

LEARNED = [0.71, 0.72, 0.69, 0.74]
VANILLA = [0.66, 0.68, 0.67, 0.66]


def made(method, control, budget, scores):
    for seed, score in enumerate(scores):
        job = {
            "task": "t",
            "method": method,
            "control": control,
            "n_components": budget,
            "seed": seed,
            "trial": seed,
        }
        yield Record("phase-a", job, "", "test", {"score": score}, {}, {}, "1")


def test_arms_are_compared_seed_by_seed():
    records = [
        *made("learned", None, 32, LEARNED),
        *made("vanilla", None, 32, VANILLA[:3]),
        *made("learned", "norm-matched", 32, VANILLA),
        *made("vanilla", None, 256, LEARNED),
        *made("softmax", None, None, LEARNED),
    ]
    found = {(r["n_components"], r["against"]): r for r in compare_arms(records)}
    assert set(found) == {
        (32, "vanilla"),
        (32, "norm-matched"),
        (32, "softmax"),
        (32, "vanilla, 256"),
    }
    assert found[32, "vanilla"]["n"] == 3
    assert found[32, "norm-matched"]["mean"] == pytest.approx(0.0475)
    assert found[32, "vanilla, 256"]["mean"] == 0


def test_arms_differ_in_their_particles_only():
    plan = experiments.build("phase-a").plan(Settings("paper", ("conll2003",)))
    first = [
        job
        for job in plan
        if job["seed"] == 0
        and job["n_components"] == 32
        and job["method"] != "neighbours"  # moves particles in another way
    ]
    settings = [arm_settings(job).plain() for job in first]
    for name in settings[0]:
        if name not in ("attention", "align_shifts"):  # the second is by hand
            assert len({str(each[name]) for each in settings}) == 1
    assert {job["seed"] for job in plan} == set(range(5))
    assert {job["n_components"] for job in plan} == {16, 32, 64, 256, None}


def test_splits_are_thinned_at_random_and_say_so():
    texts = [f"text {number}" for number in range(40)]
    labels = ["+", "-"] * 20
    corpus = build_corpus("many", (texts, labels), validation_share=0.25)
    thin = thinned(corpus, {"train": 12})
    assert len(thin.split("train")) == 12
    assert set(thin.split("train").texts) < set(corpus.split("train").texts)
    assert thin.split("validation") is corpus.split("validation")
    assert "12 of 30 rows" in thin.notes[-1]
    assert thinned(corpus, {"train": 100}).notes == corpus.notes


def test_unknown_tasks_are_refused():
    with pytest.raises(ParameterError, match="did you mean 'mrpc'"):
        load_rows("mrcp", None)
