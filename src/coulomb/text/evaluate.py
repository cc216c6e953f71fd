"""Metrics of classifiers and taggers, what a model says of a split, bags of words."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coulomb._support.checks import check_member
from coulomb._support.errors import ParameterError
from coulomb.attention.encoder.encoder import KernelEncoder
from coulomb.attention.encoder.layout import TokenBatch
from coulomb.attention.encoder.packed import packed_logits, packed_states
from coulomb.attention.layers.base import in_mode
from coulomb.text.data import Corpus, Split, Text
from coulomb.text.tokens import TokenRows

Numbers = NDArray[np.floating[Any]]
_BINS = 15


def classification_metrics(labels: Any, probabilities: Any) -> dict[str, float | None]:
    """Compute the metrics of the paper's tables.

    Parameters
    ----------
    labels
        Numbers of the true classes, `(n,)`.
    probabilities
        Of the classes, `(n, classes)`.

    Returns
    -------
    dict
        Accuracy, F1 (micro, macro, weighted), ROC-AUC, PR-AUC, MCC, balanced accuracy,
        log loss, Brier, ECE; None for what is not defined, such as the ROC-AUC of one
        class. With more than two classes, areas are means over one against the rest.

    Examples
    --------
    >>> found = classification_metrics([0, 1, 1], [[0.8, 0.2], [0.4, 0.6], [0.7, 0.3]])
    >>> round(found["accuracy"], 3), found["roc_auc"], round(found["brier"], 3)
    (0.667, 1.0, 0.23)
    """
    from sklearn import metrics

    y, p = np.asarray(labels), np.asarray(probabilities, dtype=np.float64)
    if p.ndim != 2 or p.shape[1] < 2 or y.shape != p.shape[:1] or not len(y):
        raise ParameterError(
            "`probabilities` must be (n, classes) with two classes or more and a label "
            f"for each row; got {p.shape} and labels {y.shape}."
        )
    # float32 probabilities sum to one only to their own rounding
    p = p / p.sum(axis=1, keepdims=True)
    guess = p.argmax(axis=1)
    every = np.arange(p.shape[1])
    # One against the rest, for classes that occur and are not all there is.
    rest = every[1:] if len(every) == 2 else every
    present = [c for c in rest if 0 < (y == c).sum() < len(y)]
    areas = {"roc_auc": metrics.roc_auc_score}
    areas["pr_auc"] = metrics.average_precision_score
    # scikit-learn's warns of predicted classes that do not occur
    balanced = np.mean([(guess[y == c] == c).mean() for c in np.unique(y)])
    found: dict[str, Any] = {
        "accuracy": metrics.accuracy_score(y, guess),
        "f1_micro": metrics.f1_score(y, guess, average="micro", zero_division=0),
        "f1_macro": metrics.f1_score(y, guess, average="macro", zero_division=0),
        "f1_weighted": metrics.f1_score(y, guess, average="weighted", zero_division=0),
        "mcc": metrics.matthews_corrcoef(y, guess),
        "balanced_accuracy": balanced,
        "log_loss": metrics.log_loss(y, p, labels=every),
        "brier": metrics.brier_score_loss(y, p, labels=every),
        "ece": expected_calibration_error(y, p),
        "ece_paper": paper_calibration_error(y, p) if p.shape[1] == 2 else None,
        **{
            name: np.mean([area(y == c, p[:, c]) for c in present]) if present else None
            for name, area in areas.items()
        },
    }
    return {
        name: None if value is None or math.isnan(value) else float(value)
        for name, value in found.items()
    }


def number_metrics(labels: Any, predictions: Any) -> dict[str, float | None]:
    """Compute the metrics of predicted numbers.

    Parameters
    ----------
    labels, predictions
        Numbers, `(n,)`.

    Returns
    -------
    dict
        R^2, root mean square error, mean absolute error, and the correlations of
        Pearson and Spearman; None where all labels are equal.

    Examples
    --------
    >>> found = number_metrics([1.0, 2.0, 3.0], [1.0, 2.0, 6.0])
    >>> found["r2"], found["mae"], round(found["spearman"], 3)
    (-3.5, 1.0, 1.0)
    """
    from scipy import stats

    y, guess = (np.asarray(x, dtype=np.float64) for x in (labels, predictions))
    errors, spread = np.square(y - guess), np.square(y - y.mean())
    found = {"rmse": math.sqrt(errors.mean()), "mae": float(np.abs(y - guess).mean())}
    told = bool(np.ptp(y)) and bool(np.ptp(guess))
    return {
        "r2": 1.0 - float(errors.sum() / spread.sum()) if np.ptp(y) else None,
        **found,
        "pearson": float(np.corrcoef(y, guess)[0, 1]) if told else None,
        "spearman": float(stats.spearmanr(y, guess).statistic) if told else None,
    }


def expected_calibration_error(labels: Any, probabilities: Any) -> float:
    """Compare confidence with accuracy, `sum_b (n_b / n) |acc_b - conf_b|`.

    Bins are of equal width in the confidence of the predicted class. Never above the
    root of the Brier score of that class.

    Examples
    --------
    >>> expected_calibration_error([1, 1], [[0.25, 0.75], [0.25, 0.75]])
    0.25
    """
    y, p = np.asarray(labels), np.asarray(probabilities, dtype=np.float64)
    return _binned_gap(p.max(axis=1), p.argmax(axis=1) == y)


def fit_temperature(scores: Tensor, labels: Tensor) -> float:
    """Find the `T` for which `softmax(scores / T)` makes labels the most likely.

    Examples
    --------
    >>> sure = torch.tensor([[0.9, 0.1]] * 4).log()  # right three times of four
    >>> round(fit_temperature(sure, torch.tensor([0, 0, 0, 1])), 3)
    2.0
    """
    from scipy.optimize import minimize_scalar

    exact = scores.double()

    def loss(logarithm: float) -> float:
        cooled = exact / math.exp(logarithm)
        return float(torch.nn.functional.cross_entropy(cooled, labels))

    found = minimize_scalar(loss, bounds=(-3, 3), options={"xatol": 1e-6})
    return math.exp(float(found.x))


def paper_calibration_error(labels: Any, probabilities: Any) -> float:
    """Bin P(class 1) and compare it with whether the *prediction* is correct.

    Not a calibration error: a sure and correct "class 0" counts as wholly wrong. It
    gives values of the size of the paper's ECE column, which no ECE can have.

    Examples
    --------
    >>> paper_calibration_error([0, 1], [[1.0, 0.0], [0.0, 1.0]])
    0.5
    """
    y, p = np.asarray(labels), np.asarray(probabilities, dtype=np.float64)
    return _binned_gap(p[:, 1], p.argmax(axis=1) == y)


def _binned_gap(scores: Numbers, correct: NDArray[Any]) -> float:
    place = np.minimum((scores * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(place, weights=correct - scores, minlength=_BINS)
    return float(np.abs(gaps).sum() / len(scores))


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Read the entities out of IOB2 tags, as conlleval and seqeval do.

    An entity begins at `B-X`, or at an `I-X` that continues no X.

    Examples
    --------
    >>> entities(["B-PER", "I-PER", "O", "I-LOC"])
    [('PER', 0, 1), ('LOC', 3, 3)]
    """
    found = []
    begin, current = 0, ""
    for place, tag in enumerate([*tags, "O"]):
        mark, _, kind = tag.partition("-")
        kind = kind or ("_" if mark != "O" else "")
        if current and (mark != "I" or kind != current):
            found.append((current, begin, place - 1))
            current = ""
        if mark != "O" and not current:
            begin, current = place, kind
    return found


def entity_metrics(
    true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Score tags by entities that match exactly, and by words.

    Parameters
    ----------
    true, predicted
        Tags of the words of each text.

    Returns
    -------
    dict
        Accuracy of words; precision, recall and F1 of entities, and F1 by type.

    Examples
    --------
    >>> entity_metrics([["B-PER", "O"]], [["B-PER", "B-LOC"]])["entity_precision"]
    0.5
    """
    hits: dict[str, list[int]] = {}
    words = right = 0
    for gold, guess in _paired_tags(true, predicted):
        words += len(gold)
        right += sum(a == b for a, b in zip(gold, guess, strict=True))
        there, said = set(entities(gold)), set(entities(guess))
        for place, some in enumerate((there & said, said, there)):
            for entity in some:
                hits.setdefault(entity[0], [0, 0, 0])[place] += 1
    totals = [sum(counts[i] for counts in hits.values()) for i in range(3)]
    precision, recall, f1 = _prf(*totals)
    return {
        "accuracy": right / words if words else None,
        "entity_precision": precision,
        "entity_recall": recall,
        "entity_f1": f1,
        "entity_f1_by_type": {kind: _prf(*hits[kind])[2] for kind in sorted(hits)},
        "entities": totals[2],
    }


def word_metrics(
    true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Score tags word by word, for tags that mark no entities, such as parts of speech.

    Parameters
    ----------
    true, predicted
        Tags of the words of each text.

    Returns
    -------
    dict
        Accuracy, F1 (macro, weighted) and the number of words.

    Examples
    --------
    >>> word_metrics([["NOUN", "VERB"]], [["NOUN", "NOUN"]])["accuracy"]
    0.5
    """
    from sklearn import metrics

    pairs = _paired_tags(true, predicted)
    gold = [tag for tags, _ in pairs for tag in tags]
    guess = [tag for _, tags in pairs for tag in tags]
    averages = {
        f"f1_{name}": metrics.f1_score(gold, guess, average=name, zero_division=0)
        for name in ("macro", "weighted")
        if gold
    }
    accuracy = metrics.accuracy_score(gold, guess) if gold else None
    return {"accuracy": accuracy, **averages, "words": len(gold)}


def _paired_tags(
    true: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> list[tuple[Sequence[str], Sequence[str]]]:
    pairs = list(zip(true, predicted, strict=True))
    for gold, guess in pairs:
        if len(gold) != len(guess):
            raise ParameterError(
                "`predicted` must have a tag for each word; got "
                f"{len(guess)} for {len(gold)} words."
            )
    return pairs


def _prf(both: int, said: int, there: int) -> tuple[float, float, float]:
    precision = both / said if said else 0.0
    recall = both / there if there else 0.0
    total = said + there
    return precision, recall, 2 * both / total if total else 0.0


_TOKENS = 8192  # that are evaluated together


def logits_of(
    model: nn.Module, batch: TokenBatch, dropout_seed: int | None = None
) -> Tensor:
    """Evaluate an encoder, drawn here or pretrained, on packed tokens."""
    if isinstance(model, KernelEncoder):
        return packed_logits(model, batch, dropout_seed=dropout_seed)
    logits: Tensor = model(batch, dropout_seed)
    return logits


def outputs_of(model: Any, rows: TokenRows) -> Tensor:
    """Evaluate a model on all texts, without dropout."""
    return _by_length(model, rows, partial(logits_of, model), model.head.out_features)


def log_probabilities(model: Any, rows: TokenRows) -> Tensor:
    """Evaluate the classes of all texts, without dropout."""
    return outputs_of(model, rows).log_softmax(dim=-1)


def pooled_states(model: Any, rows: TokenRows) -> Tensor:
    """Give what the head of a model sees of all texts."""
    scratch = isinstance(model, KernelEncoder)
    pooled = partial(packed_states, model) if scratch else model.pooled
    return _by_length(model, rows, pooled, model.head.in_features)


def _by_length(
    model: Any, rows: TokenRows, evaluate: Callable[[TokenBatch], Tensor], width: int
) -> Tensor:
    """Evaluate texts of like length together: attention that pads wastes least then."""
    by_token = model.settings.head == "token"
    order = rows.lengths.argsort(stable=True)
    batch_of = rows.lengths[order].cumsum(0) // _TOKENS
    sizes: list[int] = torch.bincount(batch_of).tolist()
    size = int(rows.offsets[-1]) if by_token else len(rows)
    out = torch.empty(size, width)
    with in_mode(model, train=False), torch.no_grad():
        for some in torch.split(order, [size for size in sizes if size]):
            places = rows.places(some)[0] if by_token else some
            out[places] = evaluate(rows.batch(some))
    return out


def tag_words(
    rows: TokenRows, scores: Tensor, classes: tuple[Any, ...]
) -> list[list[Any]]:
    """Give every word the class of its first token, "O" to words that were cut off."""
    assert rows.first is not None
    assert rows.word_offsets is not None
    missing = classes.index("O") if "O" in classes else 0
    there = rows.first >= 0
    chosen = torch.full_like(rows.first, missing)
    chosen[there] = scores.argmax(dim=-1)[rows.first[there]]
    lengths: list[int] = rows.word_offsets.diff().tolist()
    words = torch.split(chosen, lengths)
    return [[classes[number] for number in part.tolist()] for part in words]


def judged_by(kind: str, classes: tuple[Any, ...]) -> str:
    """Name the metric that chooses the checkpoint.

    Examples
    --------
    >>> judged_by("token", ("O", "B-PER", "I-PER"))
    'entity_f1'
    >>> judged_by("token", ("NOUN", "VERB")), judged_by("number", ())
    ('accuracy', 'r2')
    """
    if kind == "number":
        return "r2"
    marked = any(str(name).startswith(("B-", "I-")) for name in classes)
    return "entity_f1" if kind == "token" and marked else "accuracy"


def score_split(
    model: Any, rows: TokenRows, split: Split, classes: tuple[Any, ...]
) -> dict[str, Any]:
    """Compute the metrics of a model on a split with labels."""
    assert split.labels is not None
    if not classes:
        return dict(number_metrics(split.labels, outputs_of(model, rows)[:, 0]))
    scores = log_probabilities(model, rows)
    if model.settings.head == "sequence":
        return dict(classification_metrics(split.labels, scores.exp().numpy()))

    return _score_tags(split, tag_words(rows, scores, classes), classes)


def _score_tags(
    split: Split, guess: list[list[Any]], classes: tuple[Any, ...]
) -> dict[str, Any]:
    true = [[str(classes[number]) for number in row] for row in split.labels or ()]
    marked = judged_by("token", classes) == "entity_f1"
    metrics = entity_metrics if marked else word_metrics
    return metrics(true, [[str(tag) for tag in row] for row in guess])


def tags_beside_words(corpus: Corpus, own: dict[str, Any]) -> dict[str, Any]:
    """Put the tag that each word has most often beside a model, on validation texts."""
    train, rows = corpus.split("train"), corpus.split("validation")
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for words, tags in zip(train.texts, train.labels or (), strict=True):
        for word, tag in zip(words, tags, strict=True):
            counts[word][tag] += 1
    (most, _), *_ = sum(counts.values(), Counter()).most_common(1)
    usual = {word: found.most_common(1)[0][0] for word, found in counts.items()}
    guess = [[corpus.classes[usual.get(w, most)] for w in text] for text in rows.texts]
    words_alone = _score_tags(rows, guess, corpus.classes)
    return {"rows": len(rows), "model": own, "bag_of_words": words_alone}


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
    check_member("kind", kind, KINDS)
    if corpus.kind != "sequence":
        found = "tags" if corpus.kind == "token" else "numbers"
        raise ParameterError(f"`corpus` must have one class per text; got {found}.")
    if kind == "nb-bigrams" and len(corpus.classes) != 2:
        raise ParameterError(
            "`kind` must be 'unigrams' with more than two classes; got 'nb-bigrams' "
            f"and {len(corpus.classes)} classes."
        )
    part = split or corpus.reported_on
    labels = np.asarray(corpus.split(part).labels)
    return classification_metrics(labels, _by_bag_of_words(corpus, kind, part))


def beside_bag_of_words(corpus: Corpus, scores: Tensor) -> dict[str, Any]:
    """Judge log-probabilities of the validation rows, and a bag of words there."""
    labels = torch.tensor(list(corpus.split("validation").labels or ()))
    bag = torch.from_numpy(_by_bag_of_words(corpus, "unigrams", "validation"))
    # A class that the training rows lack has the probability zero.
    own, plain = scores.double(), bag.clamp(min=1e-12).log()
    right, plainly = ((x.argmax(dim=-1) == labels).double() for x in (own, plain))
    found = {"model": own, "bag_of_words": plain}
    judged = {name: _judged(x, labels) for name, x in found.items()}
    # The standard error of the difference of accuracies: the rows are the same.
    spread = float((right - plainly).std(correction=0)) / math.sqrt(len(labels))
    return {"rows": len(labels), **judged, "error": spread}


def numbers_beside_bag_of_words(corpus: Corpus, predictions: Tensor) -> dict[str, Any]:
    """Judge numbers for the validation rows, and a ridge regression on words there."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge

    train, rows = corpus.split("train"), corpus.split("validation")
    words = TfidfVectorizer(token_pattern=r"\S+", sublinear_tf=True)
    X = words.fit_transform([_joined(text) for text in train.texts])
    ridge = Ridge().fit(X, np.asarray(train.labels))
    bag = ridge.predict(words.transform([_joined(text) for text in rows.texts]))
    y, own = np.asarray(rows.labels), predictions.double().numpy()
    gaps = np.square(y - bag) - np.square(y - own)
    # The standard error of the difference of R^2: the rows are the same.
    error = float(gaps.std() / math.sqrt(len(y)) / max(y.var(), 1e-300))
    judged = {"model": number_metrics(y, own), "bag_of_words": number_metrics(y, bag)}
    return {"rows": len(y), **judged, "error": error}


def _judged(scores: Tensor, labels: Tensor) -> dict[str, float]:
    temperature = fit_temperature(scores, labels)
    right = (scores.argmax(dim=-1) == labels).double()
    found = {"temperature": temperature, "accuracy": float(right.mean())}
    for after, heat in (("", 1.0), ("_at_temperature", temperature)):
        cooled = (scores / heat).log_softmax(dim=-1)
        found[f"log_loss{after}"] = float(nn.functional.nll_loss(cooled, labels))
        found[f"ece{after}"] = expected_calibration_error(labels, cooled.exp())
    return found


def _by_bag_of_words(corpus: Corpus, kind: str, split: str) -> Numbers:
    """Give the probabilities of a split by logistic regression on word counts."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    train, scored = corpus.split("train"), corpus.split(split)
    grams = (1, 2) if kind == "nb-bigrams" else (1, 1)
    words = CountVectorizer(binary=True, token_pattern=r"\S+", ngram_range=grams)
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
    return probabilities


def _log_odds(X: Any, y: Any) -> Any:
    counts = [1.0 + np.asarray(X[y == c].sum(axis=0)).ravel() for c in (0, 1)]
    first, second = (np.log(count / count.sum()) for count in counts)
    return second - first


def _joined(text: Text) -> str:
    if isinstance(text, str):
        return text
    first, second = text
    return f"{first} " + " ".join(f"2:{word}" for word in second.split())
