"""Metrics against identities, closed forms and other libraries."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seqeval.metrics import classification_report, f1_score
from sklearn import metrics as sk

from coulomb._support.errors import CoulombError
from coulomb.text import bag_of_words_baseline, build_corpus, load_task
from coulomb.text.evaluate import (
    classification_metrics,
    entities,
    entity_metrics,
    expected_calibration_error,
    paper_calibration_error,
    tags_beside_words,
    word_metrics,
)


def drawn(n, classes, seed):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(classes), size=n)
    return rng.integers(classes, size=n), p


@given(st.integers(2, 60), st.integers(2, 5), st.integers(0, 10**6))
def test_calibration_error_is_at_most_the_root_of_brier(n, classes, seed):
    """`ECE <= E|c - p| <= sqrt(E (c - p)^2)`, c whether the prediction is correct."""
    y, p = drawn(n, classes, seed)
    sure, correct = p.max(axis=1), p.argmax(axis=1) == y
    bound = np.sqrt(np.mean((correct - sure) ** 2))
    assert expected_calibration_error(y, p) <= bound + 1e-12


def test_calibration_error_by_the_double_loop():
    y, p = drawn(200, 3, 0)
    sure, correct = p.max(axis=1), p.argmax(axis=1) == y
    total = 0.0
    for low in np.arange(15) / 15:
        inside = (sure >= low) & (sure < low + 1 / 15)
        if inside.any():
            total += inside.mean() * abs(correct[inside].mean() - sure[inside].mean())
    assert expected_calibration_error(y, p) == pytest.approx(total)


def test_the_papers_error_exceeds_what_a_calibration_error_can_be():
    y = np.array([0, 1] * 50)
    p = np.where(y[:, None] == [0, 1], 0.99, 0.01)
    found = classification_metrics(y, p)
    assert found["ece"] == pytest.approx(0.01)
    assert found["ece_paper"] > np.sqrt(found["brier"])
    assert paper_calibration_error(y, p) == pytest.approx(0.5)


@pytest.mark.parametrize("classes", [2, 4])
def test_against_scikit_learn(classes):
    y, p = drawn(300, classes, 1)
    found = classification_metrics(y, p)
    guess = p.argmax(axis=1)
    assert found["accuracy"] == pytest.approx((y == guess).mean())
    assert found["f1_micro"] == pytest.approx(found["accuracy"])
    assert found["balanced_accuracy"] == pytest.approx(
        sk.balanced_accuracy_score(y, guess)
    )
    assert found["log_loss"] == pytest.approx(-np.log(p[np.arange(300), y]).mean())
    if classes == 2:
        assert found["brier"] == pytest.approx(((p[:, 1] - y) ** 2).mean())
        assert found["roc_auc"] == pytest.approx(sk.roc_auc_score(y, p[:, 1]))
    else:
        assert found["roc_auc"] == pytest.approx(
            sk.roc_auc_score(y, p, multi_class="ovr")
        )
        assert found["ece_paper"] is None


def test_one_class_in_the_split_leaves_areas_undefined():
    found = classification_metrics([1, 1], [[0.2, 0.8], [0.6, 0.4]])
    assert found["roc_auc"] is None
    assert found["accuracy"] == 0.5


def test_shapes_are_checked():
    with pytest.raises(CoulombError, match="`probabilities` must be"):
        classification_metrics([0, 1], [[1.0], [1.0]])


TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
sentence = st.lists(st.tuples(st.sampled_from(TAGS), st.sampled_from(TAGS)), min_size=1)


@given(st.lists(sentence, min_size=1, max_size=6))
def test_entities_are_those_of_seqeval(pairs):
    """Also for tags that break the rules, such as an I- that continues nothing."""
    true = [[a for a, _ in row] for row in pairs]
    guess = [[b for _, b in row] for row in pairs]
    found = entity_metrics(true, guess)
    assert found["entity_f1"] == pytest.approx(f1_score(true, guess, zero_division=0))
    if found["entities"]:
        report = classification_report(true, guess, output_dict=True, zero_division=0)
        average = report["micro avg"]
        assert found["entity_precision"] == pytest.approx(average["precision"])
        assert found["entity_recall"] == pytest.approx(average["recall"])
        for kind, value in found["entity_f1_by_type"].items():
            if kind in report:
                assert value == pytest.approx(report[kind]["f1-score"])


@given(st.lists(sentence, min_size=1, max_size=6))
def test_scores_of_words_follow_from_counts(pairs):
    true = [[a for a, _ in row] for row in pairs]
    guess = [[b for _, b in row] for row in pairs]
    found = word_metrics(true, guess)
    flat = [pair for row in pairs for pair in row]
    assert found["words"] == len(flat)
    assert found["accuracy"] == pytest.approx(sum(a == b for a, b in flat) / len(flat))
    f1, share = {}, {}
    for tag in {tag for pair in flat for tag in pair}:
        both = sum(a == b == tag for a, b in flat)
        f1[tag] = 2 * both / sum((a == tag) + (b == tag) for a, b in flat)
        share[tag] = sum(a == tag for a, _ in flat) / len(flat)
    assert found["f1_macro"] == pytest.approx(sum(f1.values()) / len(f1))
    weighted = sum(share[tag] * f1[tag] for tag in f1)
    assert found["f1_weighted"] == pytest.approx(weighted)


def test_words_of_no_text():
    assert word_metrics([], []) == {"accuracy": None, "words": 0}
    with pytest.raises(CoulombError, match="a tag for each word"):
        word_metrics([["NOUN"]], [[]])


def test_entities_of_neighbours():
    tags = ["B-PER", "B-PER", "I-PER", "I-LOC", "O"]
    assert entities(tags) == [("PER", 0, 0), ("PER", 1, 2), ("LOC", 3, 3)]


def test_tags_of_another_length_are_refused():
    with pytest.raises(CoulombError, match="a tag for each word"):
        entity_metrics([["O", "O"]], [["O"]])


def test_bag_of_words_on_rotten_tomatoes(data_dir):
    """What the issue of beating it is about; accuracies are deterministic."""
    corpus = load_task("rotten_tomatoes", data_dir)
    plain = bag_of_words_baseline(corpus)
    weighted = bag_of_words_baseline(corpus, "nb-bigrams")
    assert 0.765 < plain["accuracy"] < 0.79
    assert 0.78 < weighted["accuracy"] < 0.80


def test_bag_of_words_of_pairs_and_of_many_classes():
    pairs = [("good", "bad"), ("bad", "good")] * 20
    corpus = build_corpus("pairs", (pairs, [0, 1] * 20))
    assert bag_of_words_baseline(corpus)["accuracy"] == 1.0
    three = build_corpus("three", (["a", "b", "c"] * 20, [0, 1, 2] * 20))
    assert bag_of_words_baseline(three)["accuracy"] == 1.0
    with pytest.raises(CoulombError, match="must be 'unigrams'"):
        bag_of_words_baseline(three, "nb-bigrams")


def test_the_usual_tag_of_each_word():
    """`a` is N twice, V once; a word that training lacks gets the most common tag."""
    train = [["a", "b"], ["a", "a"], ["c"]], [["N", "V"], ["N", "V"], ["V"]]
    rows = [["a", "b", "new"]], [["N", "N", "V"]]
    corpus = build_corpus("tags", train, validation=rows)
    found = tags_beside_words(corpus, {"accuracy": 1.0})
    assert found["rows"] == 1
    assert found["model"] == {"accuracy": 1.0}
    assert found["bag_of_words"]["accuracy"] == pytest.approx(2 / 3)
    assert found["bag_of_words"]["words"] == 3
