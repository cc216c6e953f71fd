"""A trained classifier that is only asked."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coulomb._support.archive import write_archive, write_folder
from coulomb._support.errors import FileFormatError, ParameterError
from coulomb.text import pretrained, run_folder
from coulomb.text.data import Split, as_list, check_pairs, check_texts
from coulomb.text.evaluate import (
    log_probabilities,
    outputs_of,
    pooled_states,
    score_split,
    tag_words,
)
from coulomb.text.run_folder import CONFIG, WEIGHTS, Config, check_tensors
from coulomb.text.setup import build_model
from coulomb.text.tokens import Vocabulary, encode_split


class Predictor:
    """Weights, vocabulary and classes: all that prediction needs. It draws nothing.

    Parameters
    ----------
    config
        Of the run.
    vocabulary
        What to cut texts with.
    weights
        Of the encoder, by name.
    source
        Where they are from, for messages.
    encoder
        The folder of the pretrained encoder they belong to; None to look for it again
        if there is one.
    """

    def __init__(
        self,
        config: Config,
        vocabulary: Vocabulary,
        weights: dict[str, Tensor],
        source: str | Path = WEIGHTS,
        *,
        encoder: Path | None = None,
    ) -> None:
        self.config, self.vocabulary = config, vocabulary
        self.model: Any
        named, n_layers = config.settings.model.encoder, config.settings.model.n_layers
        if named:
            self.encoder = encoder or pretrained.find_encoder(named)
            self.model = pretrained.with_shape(self.encoder, config, weights)
            check_tensors(source, weights, self.model.state_dict())
        else:
            sizes = {"vocab_size": vocabulary.size, "n_classes": len(config.classes)}
            build = partial(build_model, config.settings, kind=config.kind, **sizes)
            # Layers cost time to make even where no memory is behind their tensors.
            if n_layers > len(weights):
                raise FileFormatError(
                    f"{source} has {len(weights)} tensors, too few for `n_layers` = "
                    f"{n_layers} of {CONFIG}."
                )
            with torch.device("meta"):
                check_tensors(source, weights, build().state_dict())
            self.model = build()
        self.model.load_state_dict(weights)
        self.model.eval()

    @classmethod
    def load(cls, folder: str | Path) -> "Predictor":
        """Read a run.

        Parameters
        ----------
        folder
            Of `coulomb train` or `TextClassifier.save`.

        Returns
        -------
        Predictor
            With the weights of the best epoch.
        """
        folder = Path(folder)
        config = run_folder.read_config(folder)
        if not (folder / run_folder.METRICS).is_file():
            raise ParameterError(
                f"`run` must be a finished run; {str(folder)!r} is not. Go on with "
                f"`coulomb train --resume {folder}`."
            )
        vocabulary = run_folder.load_vocabulary(folder)
        weights, _ = run_folder.read_tensors(folder / WEIGHTS)
        encoder = folder / pretrained.ENCODER if config.settings.model.encoder else None
        return cls(config, vocabulary, weights, folder / WEIGHTS, encoder=encoder)

    def save_pretrained(self, folder: str | Path, *, onnx: bool = False) -> None:
        """Export a fine-tuned encoder: `AutoModel` and `AutoTokenizer` load the folder.

        The head is in `head.safetensors`, "weight" and "bias", for the pooled last
        states of a text (their mean, or the first with `pooling="cls"`), or for each
        token; the configuration has the names of the classes, `id2label`.

        Parameters
        ----------
        folder
            New or empty.
        onnx
            Write `model.onnx` too, with the head: it takes `input_ids` and
            `attention_mask` (for pairs in BERT also `token_type_ids`), shape
            `(texts, tokens)`, and gives `logits`, or `numbers`.
        """
        if not self.config.settings.model.encoder:
            raise ParameterError(
                "`run` must have a pretrained encoder to be exported; this one was "
                "trained from scratch. Train with `--encoder`."
            )
        model: pretrained.PretrainedEncoder = self.model
        names = {number: str(name) for number, name in enumerate(self.classes)}
        head = {"weight": model.head.weight, "bias": model.head.bias}
        if model.numbers:
            names = {0: "number"}
            head = {name: model.scale * x for name, x in head.items()}
            head["bias"] = head["bias"] + model.location
        model.body.config.id2label = names
        model.body.config.label2id = {name: number for number, name in names.items()}
        tokenizer = pretrained.load_tokenizer(self.encoder, self.config.kind)

        def write(path: Path) -> None:
            model.save_pretrained(path, tokenizer)
            write_archive(path / "head.safetensors", head, {"classes": names})
            if onnx:
                pairs = bool(self.config.data.get("pairs"))
                pretrained.write_onnx(model, path / "model.onnx", pairs=pairs)

        write_folder(Path(folder), write)

    @property
    def classes(self) -> tuple[Any, ...]:
        """What the columns of probabilities stand for."""
        return self.config.classes

    def predict_proba(self, texts: Sequence[Any]) -> NDArray[np.float64]:
        """Give the probabilities of the classes.

        Parameters
        ----------
        texts
            Strings or pairs of strings, as in training.

        Returns
        -------
        numpy.ndarray
            Shape `(texts, classes)`; rows sum to one.
        """
        others = {
            "token": ("tags words", "tag"),
            "number": ("gives numbers", "predict"),
        }
        if self.config.kind in others:
            does, use = others[self.config.kind]
            raise ParameterError(
                f"`run` must classify texts; this one {does} ({CONFIG}). Use `{use}`."
            )
        scores = log_probabilities(self.model, self._rows(texts))
        return scores.double().softmax(dim=-1).numpy()

    def predict(self, texts: Sequence[Any]) -> list[Any]:
        """Give the most probable classes, or the numbers that were learned.

        Parameters
        ----------
        texts
            As in `predict_proba`.

        Returns
        -------
        list
            One class, or number, per text.
        """
        if self.config.kind == "number":
            return list(outputs_of(self.model, self._rows(texts))[:, 0].tolist())
        best = self.predict_proba(texts).argmax(axis=1)
        return [self.classes[number] for number in best]

    def tag(self, texts: Sequence[Any]) -> list[list[Any]]:
        """Give every word its tag.

        Parameters
        ----------
        texts
            Sequences of words.

        Returns
        -------
        list of list
            Tags; words beyond `max_length` are "O".
        """
        if self.config.kind != "token":
            raise ParameterError("`run` must tag words; this one classifies texts.")
        rows = self._rows(texts)
        return tag_words(rows, log_probabilities(self.model, rows), self.classes)

    def answers(self, texts: Sequence[Any]) -> list[dict[str, Any]]:
        """Describe texts one by one, in plain data.

        Parameters
        ----------
        texts
            As in `predict_proba`, or as in `tag`.

        Returns
        -------
        list of dict
            "prediction" and, but for tags and numbers, "probabilities" by class.
        """
        if self.config.kind != "sequence":
            give = self.tag if self.config.kind == "token" else self.predict
            return [{"prediction": found} for found in give(texts)]
        names = [str(name) for name in self.classes]
        return [
            {
                "prediction": self.classes[row.argmax()],
                "probabilities": dict(zip(names, row.tolist(), strict=True)),
            }
            for row in self.predict_proba(texts)
        ]

    def embed(self, texts: Sequence[Any]) -> NDArray[np.float32]:
        """Give the vectors that the head sees: pooled last states.

        Parameters
        ----------
        texts
            As in `predict_proba`.

        Returns
        -------
        numpy.ndarray
            Shape `(texts, width)`.
        """
        if self.config.kind == "token":
            raise ParameterError(
                "`run` must classify texts to embed them; this one tags words."
            )
        return pooled_states(self.model, self._rows(texts)).numpy()

    def score(self, split: Split) -> dict[str, Any]:
        """Compute the metrics on texts with labels.

        Parameters
        ----------
        split
            The texts, with numbers of classes, or quantities.

        Returns
        -------
        dict
            As in `coulomb.text.evaluate.score_split`.
        """
        rows = self._encode(split)
        return score_split(self.model, rows, split, self.classes)

    def _rows(self, texts: Sequence[Any]) -> Any:
        given, tagged = as_list("texts", texts), self.config.kind == "token"
        return self._encode(Split(check_texts(given, tagged=tagged)))

    def _encode(self, split: Split) -> Any:
        pairs = self.config.data.get("pairs")  # not known of runs before it was kept
        kind, most = self.config.kind, self.config.settings.model.max_length
        if kind != "token" and isinstance(pairs, bool):
            check_pairs(split.texts, pairs)
        return encode_split(self.vocabulary, split, kind=kind, max_length=most)
