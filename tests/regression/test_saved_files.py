"""Files written by version 0.1 are read, and give the numbers that they gave.

Made on another processor than the one that reads them now, so numbers are compared to
the rounding of single precision, not to the last bit.
"""

import json
import shutil
from pathlib import Path

import flows
import numpy as np
import pytest
import torch

import coulomb
from coulomb.attention import KernelEncoder
from coulomb.dynamics.loop import load_run
from coulomb.experiments import load_records
from coulomb.text import (
    Predictor,
    TextClassifier,
    build_corpus,
    diagnose_run,
    list_runs,
    resume_folder,
)

SAVED = Path(__file__).parent / "saved"
EXPECTED = json.loads((SAVED / "expected.json").read_text())
REVIEWS = ["the film is fine and warm", "a dull cold plot"]


def close(found, name):
    found = np.asarray(found, dtype=float).ravel()
    np.testing.assert_allclose(found, EXPECTED[name], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "name", ["CoulombSampler", "ImportanceSampler", "OrthogonalSampler"]
)
def test_estimators(name):
    model = getattr(coulomb, name).load(SAVED / f"{name}.safetensors")
    close(model.transform([[0.5, -1.0, 0.25]]), name)


def test_run_of_the_particles():
    run = load_run(SAVED / "run.safetensors")
    assert run.state.step == EXPECTED["run"]["step"]
    positions = EXPECTED["run"]["positions"]
    assert run.particles.positions.ravel().tolist() == positions
    assert run.history


def test_run_folder_predicts():
    predictor = Predictor.load(SAVED / "reviews")
    assert isinstance(predictor.model, KernelEncoder)
    close(predictor.predict_proba(REVIEWS), "reviews")
    assert {run["run"] for run in list_runs(SAVED)} >= {"reviews", "tags"}


@pytest.mark.parametrize("name", ["reviews", "tags"])
def test_run_folder_resumes(name, tmp_path):
    """From the last checkpoint, to the same best epoch; Phase A can be diagnosed."""
    folder = shutil.copytree(SAVED / name, tmp_path / name)
    (folder / "metrics.json").unlink()
    texts = flows.reviews() if name == "reviews" else flows.tagged()
    corpus = build_corpus(name, texts, validation_share=0.2)
    resume_folder(folder, corpus=corpus)
    before = json.loads((SAVED / name / "metrics.json").read_text())
    after = json.loads((folder / "metrics.json").read_text())
    # A run from scratch is now judged beside a baseline too.
    assert set(after) - set(before) == {"validation"}
    assert set(before) <= set(after)
    assert before["best_epoch"] == after["best_epoch"]
    judged = diagnose_run(folder, corpus=corpus)
    assert str(judged)


def test_classifier():
    model = TextClassifier.load(SAVED / "classifier")
    close(model.predict_proba(REVIEWS[:1]), "classifier")


def test_linearised_model():
    pytest.importorskip("transformers")
    from coulomb.linearise import load_pretrained

    model = load_pretrained(SAVED / "linearised")
    with torch.no_grad():
        out = model(**flows.tokenize(flows.strings(1, seed=1))).last_hidden_state
    close(out[0, 0], "linearised")


def test_records():
    records = load_records(SAVED / "records" / "noise")
    lines = (SAVED / "records" / "noise" / "records.jsonl").read_text().splitlines()
    assert len(records) == len(lines) > 20
