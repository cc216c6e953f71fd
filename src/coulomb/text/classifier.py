"""Models of texts with scikit-learn's manners."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from coulomb._support.archive import write_archive, write_json
from coulomb._support.checks import check_labels, check_seed
from coulomb._support.errors import ParameterError, ParameterTypeError, shown
from coulomb.text import run_folder
from coulomb.text.data import as_list, build_corpus
from coulomb.text.predictor import Predictor
from coulomb.text.pretrained import ENCODER, PretrainedEncoder
from coulomb.text.run_folder import CONFIG, METRICS, WEIGHTS, Config
from coulomb.text.settings import preset
from coulomb.text.tokens import choose_vocabulary
from coulomb.text.training import train


@dataclass(eq=False, repr=False)
class _AbstractTextModel(BaseEstimator):  # type: ignore[misc]
    """What models of texts share; a final class knows what labels are."""

    attention: str | None = None
    _: KW_ONLY
    preset: str = "default"
    settings: Mapping[str, Any] | None = None
    encoder: str | Path | None = None
    vocabulary: str | Path | None = None
    validation_share: float = 0.1
    random_state: int = 0
    verbose: bool | None = False
    _target: ClassVar[str]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.string = True
        return tags

    def fit(self, X: Sequence[Any], y: Sequence[Any]) -> Self:
        """Train on texts and labels.

        Parameters
        ----------
        X
            Strings, or pairs of strings.
        y
            Their labels: of any type that can be sorted, or numbers for a regressor.

        Returns
        -------
        Self
            The estimator.
        """
        seed = check_seed("random_state", self.random_state)
        given: Any = self.settings
        if not isinstance(given, Mapping | None):
            found = shown(given)
            raise ParameterTypeError(f"`settings` must be a mapping; got {found}.")
        changes = {"seed": seed} | dict(given or {})
        if self.attention is not None:
            changes["attention"] = self.attention
        if self.encoder is not None:
            changes["encoder"] = str(self.encoder)
        usual = self.preset == "default" and changes.get("encoder")
        chosen = preset("pretrained" if usual else self.preset, changes)
        corpus = build_corpus(
            "texts",
            (as_list("X", X), as_list("y", y, "labels")),
            validation_share=self.validation_share,
            seed=chosen.train.seed,
            target=self._target,
        )
        if corpus.kind == "token":
            raise ParameterError(
                "`y` must hold one label per text; got sequences. Train a tagger with "
                "`coulomb train` or `coulomb.text.train`."
            )
        if corpus.classes:
            check_labels("y", corpus.classes)
        vocabulary = choose_vocabulary(corpus, chosen, self.vocabulary)
        trained = train(corpus, chosen, vocabulary, progress=self.verbose)
        data = {"name": corpus.name, "pairs": corpus.pairs}
        config = Config(chosen, corpus.kind, corpus.classes, data, "")
        self.predictor_ = Predictor(config, vocabulary, trained.weights)
        self._learn_classes(corpus.classes)
        self.history_ = trained.history
        self.metrics_ = trained.metrics
        return self

    def _learn_classes(self, classes: tuple[Any, ...]) -> None:
        """Keep the names of classes, where there are any."""

    def save(self, folder: str | Path) -> None:
        """Write the fitted model to a folder that `coulomb predict` reads too.

        Parameters
        ----------
        folder
            New, empty, or of a model saved before, which is replaced.
        """
        check_is_fitted(self)
        folder, predictor = Path(folder), self.predictor_
        if folder.is_dir() and any(folder.iterdir()) and not (folder / CONFIG).exists():
            raise ParameterError(
                f"`folder` must be new, empty or a saved classifier; {str(folder)!r} "
                "holds other files."
            )
        write_archive(folder / WEIGHTS, predictor.model.state_dict(), {})
        if isinstance(predictor.model, PretrainedEncoder):
            shutil.rmtree(folder / ENCODER, ignore_errors=True)
            predictor.save_pretrained(folder / ENCODER)
        run_folder.write_run(folder, predictor.config, predictor.vocabulary)
        write_json(folder / METRICS, self.metrics_)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a model from a folder.

        Parameters
        ----------
        folder
            Of `save` or of `coulomb train`.

        Returns
        -------
        Self
            Fitted.
        """
        predictor = Predictor.load(folder)
        kind, wanted = predictor.config.kind, cls._target
        if kind != {"classes": "sequence"}.get(wanted, wanted):
            does = {"token": "tags words", "number": "gives numbers"}
            does["sequence"] = "tells classes apart"
            others = {"token": "Predictor", "number": "TextRegressor"}
            raise ParameterError(
                f"`folder` must hold a model of {wanted} for texts; {str(folder)!r} "
                f"{does[kind]}. Use coulomb.text.{others.get(kind, 'TextClassifier')}."
            )
        settings = predictor.config.settings
        model = cls(settings=settings.plain(), random_state=settings.train.seed)
        model.predictor_ = predictor
        model._learn_classes(predictor.classes)
        model.history_ = []
        model.metrics_ = run_folder.read_metrics(Path(folder))
        return model


@dataclass(eq=False, repr=False)
class TextClassifier(ClassifierMixin, _AbstractTextModel):  # type: ignore[misc]
    """Classify texts, or pairs of texts, with a small encoder around kernel attention.

    Parameters
    ----------
    attention
        A row of the paper's tables, such as "kernel-softmaxfeat", "vanilla-cos2" or
        "softmax"; None for the preset's.
    preset
        "default", "pairs" (for pairs of texts), "tagging", "pretrained", "paper-main",
        "paper-supplement" or "paper-plain".
    settings
        Other hyper-parameters by name; see `coulomb.text.TextSettings`.
    encoder
        A pretrained encoder: a folder, a name on the Hugging Face hub, or "auto" for
        one that is installed, with the preset "pretrained"; None trains from scratch.
    vocabulary
        A `vocab.txt` or `tokenizer.json`; None trains a vocabulary on the texts.
    validation_share
        The share of the texts that chooses the best epoch.
    random_state
        A seed: the same seed, the same classifier, on one thread.
    verbose
        Show a bar; None shows it on a terminal only.

    Attributes
    ----------
    classes_ : numpy.ndarray
        The classes, sorted.
    history_ : list of dict
        What every epoch gave.
    metrics_ : dict
        Of the best epoch on the texts kept back.
    predictor_ : Predictor
        Weights and vocabulary.

    Examples
    --------
    >>> from coulomb.text import TextClassifier
    >>> texts, labels = ["a fine film", "a dull film"] * 16, ["good", "bad"] * 16
    >>> small = {"width": 16, "n_features": 8, "min_steps": 50, "lr": 0.01}
    >>> model = TextClassifier(settings=small).fit(texts, labels)
    >>> model.predict(["a fine film", "a dull film"]).tolist()
    ['good', 'bad']
    """

    _target = "classes"

    def _learn_classes(self, classes: tuple[Any, ...]) -> None:
        self.classes_ = np.asarray(classes)

    def predict_proba(self, X: Sequence[Any]) -> NDArray[np.float64]:
        """Give the probabilities of the classes.

        Parameters
        ----------
        X
            Strings, or pairs of strings.

        Returns
        -------
        numpy.ndarray
            Shape `(n_texts, n_classes)`, in the order of `classes_`.
        """
        check_is_fitted(self)
        return self.predictor_.predict_proba(as_list("X", X))

    def predict(self, X: Sequence[Any]) -> NDArray[Any]:
        """Give the most probable classes.

        Parameters
        ----------
        X
            Strings, or pairs of strings.

        Returns
        -------
        numpy.ndarray
            Shape `(n_texts,)`.
        """
        best = self.predict_proba(X).argmax(axis=1)
        chosen: NDArray[Any] = self.classes_[best]
        return chosen


@dataclass(eq=False, repr=False)
class TextRegressor(RegressorMixin, _AbstractTextModel):  # type: ignore[misc]
    """Predict a number for each text, or pair of texts, by a pretrained encoder.

    Parameters
    ----------
    attention
        "softmax", "linear" or "auto", which is linear for long texts; None for auto.
    preset
        "pretrained" holds the constants.
    settings
        Other hyper-parameters by name; see `coulomb.text.TextSettings`.
    encoder
        A folder, a name on the Hugging Face hub, or "auto" for one that is installed.
    vocabulary
        None: a pretrained encoder has its own.
    validation_share
        The share of the texts that chooses the best epoch.
    random_state
        A seed: the same seed, the same regressor, on one thread.
    verbose
        Show a bar; None shows it on a terminal only.

    Attributes
    ----------
    history_ : list of dict
        What every epoch gave.
    metrics_ : dict
        Of the best epoch on the texts kept back.
    predictor_ : Predictor
        Weights and vocabulary.

    See Also
    --------
    TextClassifier : The same for classes.
    """

    encoder: str | Path | None = "auto"
    _target = "number"

    def predict(self, X: Sequence[Any]) -> NDArray[np.float64]:
        """Predict numbers.

        Parameters
        ----------
        X
            Strings, or pairs of strings.

        Returns
        -------
        numpy.ndarray
            Shape `(n_texts,)`.
        """
        check_is_fitted(self)
        return np.asarray(self.predictor_.predict(as_list("X", X)), dtype=np.float64)
