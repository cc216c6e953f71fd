"""Tiny encoders with random weights, and texts for them."""

import torch

FAMILIES = ("bert", "roberta", "distilbert", "mpnet", "modernbert")
WORDS = 60


def tiny_model(family, kind="AutoModel", seed=0, layers=2):
    """Weights are large enough for attention that is not uniform."""
    import transformers

    sizes = {
        "vocab_size": WORDS + 4,
        "hidden_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 40,
        "initializer_range": 0.5,
        "pad_token_id": 1 if family in ("roberta", "mpnet") else 0,
    }
    if family == "distilbert":
        names = {
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
        }
        sizes = {names.get(name, name): size for name, size in sizes.items()}
    if family == "modernbert":  # local and global layers
        sizes |= {"bos_token_id": 2, "cls_token_id": 2}
        sizes |= {"eos_token_id": 3, "sep_token_id": 3}
        local, full = "sliding_attention", "full_attention"
        sizes |= {"local_attention": 6, "layer_types": [full, local, full]}
        sizes |= {"num_hidden_layers": 3}
    config = transformers.CONFIG_MAPPING[family](**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return getattr(transformers, kind).from_config(config).eval()


def tokenizer_for(family):
    pad = 1 if family in ("roberta", "mpnet") else 0

    def tokenize(texts):
        rows = [[2 + ord(c) % WORDS for c in text[:36]] for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids != pad).long()}

    return tokenize


def make_texts(n=24, seed=0):
    source = torch.Generator().manual_seed(seed)
    texts = []
    for _ in range(n):
        length = int(torch.randint(5, 30, (1,), generator=source))
        letters = torch.randint(97, 123, (length,), generator=source).tolist()
        texts.append("".join(map(chr, letters)))
    return texts


def bert_tokenizer(folder):
    import transformers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [chr(c) for c in range(97, 123)] + [f"##{chr(c)}" for c in range(97, 123)]
    (folder / "vocab.txt").write_text("\n".join(words))
    return transformers.BertTokenizerFast(str(folder / "vocab.txt"))


QUICK = {
    "n_features": 8,
    "steps": 20,
    "distil_steps": 4,
    "check_every": 10,
    "max_length": 36,
    "window": 2,
    "exact_length": 0,
    "measure": False,
}


def batch_of(family, n=5, seed=1):
    return tokenizer_for(family)(make_texts(n, seed))


def rows_case(*, batch=2, heads=3, n=7, dim=4, seed=0, dtype=torch.float64):
    """Queries, keys, values and a mask with padding in the second sequence."""
    source = torch.Generator().manual_seed(seed)
    shape = (batch, heads, n, dim)
    q, k, v = (torch.randn(shape, generator=source, dtype=dtype) for _ in range(3))
    mask = torch.ones(batch, n, dtype=torch.bool)
    mask[1:, n - 2 :] = False
    return q, k, v, mask


def particles_case(*, heads=3, n=5, dim=4, seed=1, dtype=torch.float64):
    source = torch.Generator().manual_seed(seed)
    positions = torch.randn(heads, n, 2 * dim + 2, generator=source, dtype=dtype)
    tilt = 0.3 * torch.randn(heads, dim, generator=source, dtype=dtype)
    return positions, tilt
