"""From sentences to a trained classifier: corpora, tokens, two phases, prediction.

Names are imported on first use: torch takes seconds, and the command line reads the
settings of this package before it knows what is asked of it.
"""

from typing import TYPE_CHECKING

from coulomb._support.moved import names_from

if TYPE_CHECKING:
    from coulomb.attention.encoder.layout import TokenBatch, padded_logits
    from coulomb.attention.encoder.packed import PackedHeads, packed_logits
    from coulomb.text.classifier import TextClassifier, TextRegressor
    from coulomb.text.data import Corpus, Split, build_corpus, read_corpus
    from coulomb.text.diagnose import diagnose_run
    from coulomb.text.evaluate import (
        bag_of_words_baseline,
        classification_metrics,
        entity_metrics,
        number_metrics,
        word_metrics,
    )
    from coulomb.text.predictor import Predictor
    from coulomb.text.run_folder import list_runs
    from coulomb.text.settings import (
        PAPER_ROWS,
        PRESETS,
        VARIANTS,
        TextSettings,
        preset,
    )
    from coulomb.text.tasks import TASKS, load_data, load_task
    from coulomb.text.tokens import Vocabulary, read_vocabulary, train_vocabulary
    from coulomb.text.training import resume_folder, train, train_in_folder

__all__ = [
    "PAPER_ROWS",
    "PRESETS",
    "TASKS",
    "VARIANTS",
    "Corpus",
    "PackedHeads",
    "Predictor",
    "Split",
    "TextClassifier",
    "TextRegressor",
    "TextSettings",
    "TokenBatch",
    "Vocabulary",
    "bag_of_words_baseline",
    "build_corpus",
    "classification_metrics",
    "diagnose_run",
    "entity_metrics",
    "list_runs",
    "load_data",
    "load_task",
    "number_metrics",
    "packed_logits",
    "padded_logits",
    "preset",
    "read_corpus",
    "read_vocabulary",
    "resume_folder",
    "train",
    "train_in_folder",
    "train_vocabulary",
    "word_metrics",
]


__getattr__ = names_from(
    "coulomb.text",
    *("text.settings", "text.data", "text.tasks", "text.run_folder", "text.tokens"),
    *("text.evaluate", "text.training", "text.predictor", "text.classifier"),
    *("text.diagnose", "attention.encoder.packed", "attention.encoder.layout"),
    names=__all__,
)


def __dir__() -> list[str]:
    return __all__
