"""Training in a folder: begin a run, go on with one, read its data again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coulomb._support.archive import write_json, write_whole
from coulomb._support.errors import FileFormatError, ParameterError
from coulomb.text.corpora import Corpus, read_corpus
from coulomb.text.runs import (
    CONFIG,
    ENVIRONMENT,
    METRICS,
    VOCABULARY,
    Config,
    read_config,
    read_history,
    read_json,
    read_tensors,
    write_config,
)
from coulomb.text.runs import HISTORY as HISTORY_FILE
from coulomb.text.runs import WEIGHTS as WEIGHTS_FILE
from coulomb.text.settings import TextSettings
from coulomb.text.setup import describe_environment
from coulomb.text.stores import FolderStore
from coulomb.text.tasks import TASKS, data_folder, load_task
from coulomb.text.tokens import (
    Vocabulary,
    find_vocabulary,
    read_vocabulary,
    train_vocabulary,
)
from coulomb.text.training import Trained, train

_DATA_KEYS = {
    "name",
    "task",
    "data_dir",
    "train",
    "validation",
    "test",
    "text",
    "label",
    "validation_share",
}


def load_data(data: Mapping[str, Any]) -> Corpus:
    """Load the corpus that a run's configuration describes.

    Parameters
    ----------
    data
        "task", with "data_dir", or "train", "validation", "test", "text" and "label";
        and "validation_share".

    Returns
    -------
    Corpus
        The same for the same files.
    """
    odd = set(data) - _DATA_KEYS
    if odd:
        raise ParameterError(
            f"`data` must have the keys {', '.join(sorted(_DATA_KEYS))} only; got "
            f"{', '.join(sorted(odd))}."
        )
    share = data.get("validation_share")
    if data.get("task"):
        folder = data.get("data_dir")
        return load_task(data["task"], folder, validation_share=share)
    if not data.get("train"):
        raise ParameterError(
            "`run` has no data of its own: it was trained on data in memory. Name a "
            "file."
        )
    options = {} if share is None else {"validation_share": share}
    return read_corpus(
        data["train"],
        text=data["text"],
        label=data["label"],
        validation=data.get("validation"),
        test=data.get("test"),
        **options,
    )


def choose_vocabulary(
    corpus: Corpus,
    settings: TextSettings,
    file: str | Path | None = None,
    folder: str | Path | None = None,
) -> Vocabulary:
    """Take the vocabulary of a file, of the data folder, or train one."""
    lower = settings.lower_case
    if file is not None:
        return read_vocabulary(file, lower_case=lower)
    found = find_vocabulary(data_folder(folder))
    english = corpus.name in TASKS and TASKS[corpus.name].english
    if found is not None and lower and english:
        return read_vocabulary(found)
    texts = corpus.split("train").texts
    return train_vocabulary(texts, size=settings.vocabulary_size, lower_case=lower)


def train_in_folder(
    folder: str | Path,
    corpus: Corpus,
    settings: TextSettings,
    vocabulary: Vocabulary,
    *,
    data: Mapping[str, Any] | None = None,
    save_every: int = 500,
    progress: bool | None = None,
    tensorboard: bool = False,
) -> Trained:
    """Begin a run in a new folder.

    Parameters
    ----------
    folder
        New or empty.
    corpus, settings, vocabulary
        As in `coulomb.text.train`.
    data
        Where the corpus came from, so that the run can be resumed; see `load_data`.
    save_every, progress
        As in `coulomb.text.train`.
    tensorboard
        Write logs for TensorBoard into the folder.

    Returns
    -------
    Trained
        Also written into the folder.
    """
    folder = Path(folder)
    _must_be_free(folder)
    text = vocabulary.to_json()
    described = {"name": corpus.name} | dict(data or {})
    config = Config(
        settings, corpus.kind, corpus.classes, described, corpus.fingerprint()
    )
    write_json(folder / ENVIRONMENT, describe_environment())
    write_whole(folder / VOCABULARY, lambda path: path.write_text(text, "utf-8"))
    # Last: a folder with a configuration is a run that can be resumed.
    write_config(folder, config)
    return _run(folder, corpus, settings, vocabulary, save_every, progress, tensorboard)


def resume_folder(
    folder: str | Path,
    *,
    corpus: Corpus | None = None,
    save_every: int = 500,
    progress: bool | None = None,
    tensorboard: bool = False,
) -> Trained:
    """Go on with an interrupted run.

    Parameters
    ----------
    folder
        Of the run.
    corpus
        Its data, if it was passed in memory; None reads the files again.
    save_every, progress, tensorboard
        As in `train_in_folder`.

    Returns
    -------
    Trained
        The weights an uninterrupted run would have; of a finished run, what it has.
    """
    folder = Path(folder)
    config = read_config(folder)
    if (folder / METRICS).is_file():
        weights, _ = read_tensors(folder / WEIGHTS_FILE)
        history = read_history(folder / HISTORY_FILE)
        return Trained(weights, read_json(folder / METRICS), history)
    if corpus is None:
        corpus = load_data(config.data)
    if corpus.fingerprint() != config.fingerprint:
        raise FileFormatError(
            f"The data of {folder} has changed since the run began: its texts or "
            "labels have another fingerprint. Bring it back, or train in a new folder."
        )
    path = folder / VOCABULARY
    vocabulary = Vocabulary.from_json(path.read_text("utf-8"), str(path))
    settings = config.settings
    return _run(folder, corpus, settings, vocabulary, save_every, progress, tensorboard)


def _run(
    folder: Path,
    corpus: Corpus,
    settings: TextSettings,
    vocabulary: Vocabulary,
    save_every: int,
    progress: bool | None,
    tensorboard: bool,
) -> Trained:
    trained = train(
        corpus,
        settings,
        vocabulary,
        store=FolderStore(folder),
        save_every=save_every,
        progress=progress,
        log_dir=folder / "tensorboard" if tensorboard else None,
    )
    write_json(folder / METRICS, trained.metrics)
    return trained


def _must_be_free(folder: Path) -> None:
    if (folder / CONFIG).exists():
        raise ParameterError(
            f"`out` must be a new folder; {str(folder)!r} holds a run. Go on with "
            f"`--resume {folder}`, or choose another."
        )
    if folder.is_dir():
        # What a run that was killed in its first moments leaves behind.
        ours = {VOCABULARY, ENVIRONMENT}
        others = [
            path.name
            for path in folder.iterdir()
            if path.name not in ours and not path.name.startswith(".")
        ]
        if others:
            raise ParameterError(
                f"`out` must be a new or empty folder; {str(folder)!r} holds "
                f"{others[0]!r}."
            )
