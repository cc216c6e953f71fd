"""A classifier of short reviews
=============================

"not dull" is praise and "not fine" is not. A bag of words sees which words occur, not
which of them was turned around; attention sees both. The rows are softmax attention, a
kernel whose particles stay where they were drawn, and the same kernel after Phase A.
"""

import random

from coulomb.text import TextClassifier, bag_of_words_baseline, build_corpus

GOOD = ["fine", "warm", "clever", "bright"]
BAD = ["dull", "cold", "clumsy", "bleak"]
THINGS = ["plot", "cast", "music", "story"]
SMALL = {"width": 32, "ffn_width": 32, "n_features": 32, "min_steps": 0}
SMALL |= {"epochs": 10, "lr": 5e-3, "max_length": 24, "vocabulary_size": 100}


def write_review(draw):
    """Three remarks; the review is good if most of them are."""
    parts, score = [], 0
    for thing in draw.sample(THINGS, 3):
        good, turned = draw.random() < 0.5, draw.random() < 0.5
        word = draw.choice(GOOD if good else BAD)
        parts.append(f"the {thing} is {'not ' if turned else ''}{word}")
        score += 1 if good != turned else -1
    return ", ".join(parts), "good" if score > 0 else "bad"


def main():
    draw = random.Random(0)
    texts, labels = zip(*(write_review(draw) for _ in range(1200)), strict=True)
    new, truth = zip(*(write_review(draw) for _ in range(400)), strict=True)

    corpus = build_corpus("reviews", (texts, labels), test=(new, truth))
    print("bag of words", f"{bag_of_words_baseline(corpus)['accuracy']:.3f}")

    for attention in ("softmax", "vanilla-softmaxfeat", "kernel-softmaxfeat"):
        model = TextClassifier(attention, settings=SMALL, random_state=0)
        model.fit(texts, labels)
        print(attention, f"{model.score(new, truth):.3f}")

    review = "the plot is not dull, the cast is not cold, the music is bleak"
    chances = model.predict_proba([review])[0]
    for label, chance in zip(model.classes_, chances, strict=True):
        print(f"{review!r} is {label} with probability {chance:.2f}")


if __name__ == "__main__":
    main()
