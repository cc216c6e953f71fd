"""Bags of words: what a text classifier must beat."""

from typing import Any

from coulomb._support.errors import ParameterError, unknown_name
from coulomb.text.data import Corpus, Text
from coulomb.text.evaluate import classification_metrics

KINDS = ("unigrams", "nb-bigrams")


def bag_of_words_baseline(
    corpus: Corpus, kind: str = "unigrams", *, split: str | None = None
) -> dict[str, float | None]:
    """Fit logistic regression on word counts and score it.

    "unigrams" uses which words occur. "nb-bigrams" uses which words and pairs of words
    occur, each weighted by its naive-Bayes log-odds ratio (Wang and Manning 2012).

    Parameters
    ----------
    corpus
        One label per text; two texts of a pair are joined, their words kept apart.
    kind
        One of `KINDS`; "nb-bigrams" needs two classes.
    split
        What to score on; None for the split the corpus reports on.

    Returns
    -------
    dict
        As in `classification_metrics`.

    Examples
    --------
    >>> from coulomb.text.data import build_corpus
    >>> rows = ["good film", "bad film"] * 10, ["+", "-"] * 10
    >>> bag_of_words_baseline(build_corpus("tiny", rows))["accuracy"]
    1.0
    """
    import numpy as np
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    if kind not in KINDS:
        raise unknown_name("kind", kind, KINDS)
    if corpus.kind != "sequence":
        raise ParameterError("`corpus` must have one label per text; got tags.")
    if kind == "nb-bigrams" and len(corpus.classes) != 2:
        raise ParameterError(
            "`kind` must be 'unigrams' with more than two classes; got 'nb-bigrams' "
            f"and {len(corpus.classes)} classes."
        )
    train = corpus.split("train")
    scored = corpus.split(split or corpus.reported_on)
    words = CountVectorizer(
        binary=True,
        token_pattern=r"\S+",
        lowercase=True,
        ngram_range=(1, 2) if kind == "nb-bigrams" else (1, 1),
    )
    X = words.fit_transform([_joined(text) for text in train.texts]).astype(float)
    new = words.transform([_joined(text) for text in scored.texts]).astype(float)
    y = np.asarray(train.labels)
    if kind == "nb-bigrams":
        odds = _log_odds(X, y)
        X, new = X.multiply(odds).tocsr(), new.multiply(odds).tocsr()
    solver = "liblinear" if len(corpus.classes) == 2 else "lbfgs"  # faster for two
    model = LogisticRegression(max_iter=2000, solver=solver).fit(X, y)
    probabilities = np.zeros((len(scored), len(corpus.classes)))
    probabilities[:, model.classes_] = model.predict_proba(new)
    return classification_metrics(np.asarray(scored.labels), probabilities)


def _log_odds(X: Any, y: Any) -> Any:
    import numpy as np

    counts = [1.0 + np.asarray(X[y == c].sum(axis=0)).ravel() for c in (0, 1)]
    first, second = (np.log(count / count.sum()) for count in counts)
    return second - first


def _joined(text: Text) -> str:
    if isinstance(text, str):
        return text
    first, second = text
    return f"{first} " + " ".join(f"2:{word}" for word in second.split())
