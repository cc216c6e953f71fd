"""TextClassifier among scikit-learn's tools."""

import numpy as np
import pandas
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from text_cases import TINY, reviews

from coulomb import TextClassifier
from coulomb._support.errors import CoulombError

SMALL = TINY | {"epochs": 6, "lr": 5e-3}


@pytest.fixture(scope="module")
def fitted():
    texts, labels = reviews(160)
    return TextClassifier(settings=SMALL).fit(texts, labels)


def test_predictions(fitted):
    texts, labels = reviews(60, seed=1)
    assert fitted.score(texts, labels) > 0.9
    probabilities = fitted.predict_proba(texts)
    assert probabilities.shape == (60, 2)
    assert np.allclose(probabilities.sum(axis=1), 1)
    assert (
        fitted.classes_[probabilities.argmax(axis=1)] == fitted.predict(texts)
    ).all()


def test_parameters_are_scikit_learns():
    model = TextClassifier("softmax", settings={"epochs": 3}, random_state=4)
    again = clone(model)
    assert again.get_params() == model.get_params()
    assert again.set_params(attention="linformer").attention == "linformer"
    assert repr(model).startswith("TextClassifier(attention='softmax'")


def test_cross_validation():
    texts, labels = reviews(90)
    model = TextClassifier(settings=SMALL)
    scores = cross_val_score(model, texts, labels, cv=2)
    assert scores.mean() > 0.8


def test_grid_search():
    texts, labels = reviews(60)
    model = TextClassifier(settings=TINY | {"epochs": 2})
    rows = ["vanilla-elu", "softmax"]
    search = GridSearchCV(model, {"attention": rows}, cv=2).fit(texts, labels)
    assert search.best_params_["attention"] in rows


@pytest.mark.parametrize(
    "container", [list, np.array, pandas.Series, lambda x: np.array(x, dtype=object)]
)
def test_texts_in_any_container(container, fitted):
    texts, _ = reviews(6, seed=2)
    expected = fitted.predict(texts)
    assert (fitted.predict(container(texts)) == expected).all()


@pytest.mark.parametrize("labels", [[0, 1], [True, False], ["a", "b"], [0.5, 2.0]])
def test_classes_keep_their_type(labels):
    texts, _ = reviews(40)
    y = [labels[i % 2] for i in range(40)]
    model = TextClassifier(settings=TINY).fit(texts, y)
    assert model.classes_.dtype == np.asarray(labels).dtype
    assert set(model.predict(texts[:4])) <= set(labels)


def test_three_classes_and_pairs():
    texts, _ = reviews(90)
    pairs = [(text, "third" if i % 3 == 2 else "none") for i, text in enumerate(texts)]
    labels = ["both" if i % 3 == 2 else str(i % 2) for i in range(90)]
    model = TextClassifier(settings=SMALL).fit(pairs, labels)
    assert model.predict_proba(pairs).shape == (90, 3)


def test_saving_and_loading(fitted, tmp_path):
    fitted.save(tmp_path / "model")
    again = TextClassifier.load(tmp_path / "model")
    texts, _ = reviews(30, seed=3)
    assert np.array_equal(again.predict_proba(texts), fitted.predict_proba(texts))
    assert again.metrics_["metrics"] == fitted.metrics_["metrics"]
    assert clone(again).fit(*reviews(40)).score(*reviews(40)) >= 0
    fitted.save(tmp_path / "model")  # a saved classifier is replaced
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("mine")
    with pytest.raises(CoulombError, match="holds other files"):
        fitted.save(tmp_path / "other")


def test_a_prediction_is_a_function_of_the_text(fitted):
    texts, _ = reviews(10, seed=4)
    together = fitted.predict_proba(texts)
    alone = np.concatenate([fitted.predict_proba([text]) for text in texts])
    assert np.allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize(
    "text", ["", "😀", "مرحبا بالعالم", "word " * 20_000, "\u202e"]
)
def test_odd_texts_are_classified(text, fitted):
    assert np.isfinite(fitted.predict_proba([text])).all()


def test_no_texts_give_no_predictions(fitted):
    assert fitted.predict_proba([]).shape == (0, 2)


def test_one_string_is_not_a_list(fitted):
    with pytest.raises(CoulombError, match="list of texts"):
        fitted.predict("a film")


def test_not_fitted():
    with pytest.raises(NotFittedError):
        TextClassifier().predict(["a"])


def test_tags_are_for_taggers():
    with pytest.raises(CoulombError, match="one label per text"):
        TextClassifier(settings=TINY).fit([["a", "b"]] * 20, [["O", "B-X"]] * 20)


def test_unknown_settings_are_refused():
    with pytest.raises(CoulombError, match="did you mean 'epochs'"):
        TextClassifier(settings={"epoch": 1}).fit(*reviews(20))


@pytest.mark.parametrize("settings", ["a", True, 2.5])
def test_settings_are_a_mapping(settings):
    with pytest.raises(CoulombError, match="`settings` must be a mapping"):
        TextClassifier(settings=settings).fit(["a", "b"], [0, 1])


def test_a_huge_number_is_no_list_of_labels():
    with pytest.raises(CoulombError, match="`y` must be a list of labels; got a num"):
        TextClassifier().fit(["a", "b"], 10**6000)
