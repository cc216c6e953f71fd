"""Small corpora and settings that train in a moment."""

import csv
import random

from coulomb.text import build_corpus, preset, train_vocabulary
from coulomb.text.setup import set_up

GOOD = ["fine", "lovely", "great", "superb", "warm", "clever", "moving", "bright"]
BAD = ["dull", "poor", "awful", "weak", "cold", "clumsy", "boring", "bleak"]
OTHER = ["the", "a", "film", "plot", "with", "cast", "and", "story", "of", "actor"]
TINY = {
    "width": 16,
    "ffn_width": 16,
    "n_features": 8,
    "dropout": 0.1,
    "max_length": 24,
    "epochs": 3,
    "min_steps": 0,
    "batch_size": 16,
    "vocabulary_size": 150,
    "align_after": 1,
    "align_start": "drawn",
    "align_epochs": 1.0,
}


def reviews(n=120, seed=0):
    """Texts whose class is plain from two of their words."""
    draw = random.Random(seed)
    texts, labels = [], []
    for row in range(n):
        words = draw.choices(OTHER, k=draw.randint(2, 9))
        words += draw.choices(GOOD if row % 2 else BAD, k=2)
        draw.shuffle(words)
        texts.append(" ".join(words))
        labels.append("pos" if row % 2 else "neg")
    return texts, labels


def tagged(n=60, seed=0):
    """Sentences with names that are always the same words."""
    draw = random.Random(seed)
    texts, tags = [], []
    for _ in range(n):
        words = draw.choices(OTHER, k=4)
        marks = ["O"] * 4
        place = draw.randint(0, 4)
        words[place:place] = ["Ada", "Lovelace"]
        marks[place:place] = ["B-PER", "I-PER"]
        texts.append(words)
        tags.append(marks)
    return texts, tags


def tiny_corpus(n=120):
    return build_corpus("reviews", reviews(n), validation_share=0.2)


def tiny_settings(**changes):
    return preset("default", TINY | changes)


def set_up_start(corpus, size, **changes):
    """Set up a run whose Phase A begins with what the labels choose, and ends there."""
    vocabulary = train_vocabulary(corpus.split("train").texts, size=size)
    options = {
        "n_features": 16,
        "width": 32,
        "align_after": 0,
        "align_start": "chosen",
        "align_epochs": 0.0,
        "epochs": 1,
        "rare_tokens": 0,
    }
    settings = tiny_settings(**options | changes)
    return set_up(corpus, settings, vocabulary), vocabulary


def particles_of(setup):
    return [layer.attention.particles.detach().clone() for layer in setup.model.layers]


def tiny_vocabulary(corpus):
    return train_vocabulary(corpus.split("train").texts, size=150)


def write_csv(path, texts, labels, names=("review", "sentiment")):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(zip(texts, labels, strict=True))
    return path
