"""Phase A of tags: whether tokens attend to tokens of their kind."""

import math

import pytest
import torch
from text_cases import tagged, tiny_corpus, tiny_settings, tiny_vocabulary

from coulomb._support.errors import ParameterError
from coulomb.text import build_corpus, train
from coulomb.text.align import (
    alignment_batches,
    alignment_objective,
    neighbour_batches,
    run_phase_a,
)
from coulomb.text.setup import set_up

ADAM = {
    "align_objective": "auto",
    "align_sampler": "adam",
    "align_inverse_temperature": math.inf,
    "align_clip": math.inf,
    "align_strength": 0.0,
    "align_start": "drawn",
    "align_step_size": 0.05,
    "align_after": 0,
}


@pytest.fixture(scope="module")
def corpus():
    return build_corpus("names", tagged(), validation_share=0.2)


@pytest.fixture(scope="module")
def vocabulary(corpus):
    return tiny_vocabulary(corpus)


def test_batches_hold_the_kinds_of_entities(corpus, vocabulary):
    setup = set_up(corpus, tiny_settings(), vocabulary)
    before = alignment_batches(setup.rows["train"], 16, seed=0)
    after = neighbour_batches(before, corpus.classes)
    for (batch, tags), (_, labels) in zip(before, after, strict=True):
        lengths = batch.cu_seqlens.diff()
        assert labels.shape == (len(lengths), int(lengths.max()))
        real = torch.arange(labels.shape[1]) < lengths.unsqueeze(1)
        assert (labels[~real] == -100).all()
        found, flat = labels[real], tags.flatten()
        assert torch.equal(found == -100, flat == -100)
        # Both tags of a person are of one kind, and nothing else is of it.
        names = [corpus.classes[tag] for tag in flat[flat >= 0]]
        kinds = found[flat >= 0].tolist()
        person = {kind for kind, name in zip(kinds, names, strict=True) if name != "O"}
        other = {kind for kind, name in zip(kinds, names, strict=True) if name == "O"}
        assert len(person) == 1
        assert not person & other


def test_tokens_come_to_attend_to_their_kind(corpus, vocabulary):
    settings = tiny_settings(attention="kernel-softmaxfeat", align_epochs=20.0, **ADAM)
    facts = run_phase_a(set_up(corpus, settings, vocabulary), None, lambda record: None)
    assert facts["after"]["held_out"] > facts["before"]["held_out"] + 0.1


def test_a_tagger_is_trained(corpus, vocabulary):
    settings = tiny_settings(attention="kernel-softmaxfeat", **ADAM)
    trained = train(corpus, settings, vocabulary, progress=False)
    assert "neighbours" in trained.metrics["alignment"]["summary"]


def test_texts_with_one_label_have_no_neighbours():
    assert alignment_objective(tiny_settings(**ADAM), "sequence") == "centred"
    assert alignment_objective(tiny_settings(**ADAM), "token") == "neighbours"
    wrong = tiny_settings(**ADAM | {"align_objective": "neighbours"})
    corpus = tiny_corpus(40)
    with pytest.raises(ParameterError, match="use 'auto' or 'centred'"):
        train(corpus, wrong, tiny_vocabulary(corpus), progress=False)
