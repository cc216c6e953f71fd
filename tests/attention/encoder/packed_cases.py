"""Encoders of every kind, packed batches, and how well two ways agree."""

from functools import partial

import torch

from coulomb.attention import (
    EncoderSettings,
    KernelAttention,
    KernelEncoder,
    Linformer,
    Performer,
    SoftmaxAttention,
)
from coulomb.attention.encoder.layout import TokenBatch
from coulomb.features import feature_maps

MAPS = sorted(name for name in feature_maps if feature_maps.build(name).positive)
LENGTHS = (3, 1, 7, 12, 7, 2, 4, 9)
TOLERANCE = 1e-4


def relu_features(x, particles):
    return (x @ particles.positions.transpose(-1, -2)).relu() + 0.1


ROWS = {
    **{
        f"{qkv}-{name}": partial(
            KernelAttention, qkv=qkv, feature_map=name, n_features=24
        )
        for qkv in ("shared", "learned")
        for name in MAPS
    },
    **{
        f"untied-{qkv}-{name}": partial(
            KernelAttention, qkv=qkv, feature_map=name, n_features=24, tied=False
        )
        for qkv, name in [*(("shared", name) for name in MAPS), ("learned", "favor")]
    },
    "untied-causal": partial(KernelAttention, causal=True, n_features=24, tied=False),
    "custom": partial(KernelAttention, feature_map=relu_features, n_features=24),
    "causal": partial(KernelAttention, causal=True, n_features=24),
    "no-bias": partial(KernelAttention, qkv="shared", bias=False, n_features=24),
    "softmax": SoftmaxAttention,
    "softmax-shared": partial(SoftmaxAttention, qkv="shared"),
    "softmax-causal": partial(SoftmaxAttention, causal=True),
    "performer": partial(Performer, n_features=24),
    "linformer": partial(Linformer, max_length=16, rank=6),
}


def make_model(row, *, width=32, unfrozen=True, seed=0, **changes):
    """Build an encoder whose parameters are all away from their special start."""
    usual = {"vocab_size": 40, "n_classes": 3, "width": width, "ffn_width": 48}
    settings = EncoderSettings(**usual | {"max_length": 16} | changes)
    factory = ROWS[row] if isinstance(row, str) else row
    model = KernelEncoder(settings, factory, generator=seed).eval()
    source = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=source)
        parameter.data += 0.1 * noise
        if name.endswith("particles"):
            parameter.requires_grad_(unfrozen)
    return model


def make_batch(lengths=LENGTHS, *, size=40, seed=0):
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(size, (sum(lengths),), generator=source)
    return TokenBatch(ids, torch.tensor([0, *lengths]).cumsum(0))


def gradients(model, logits, seed=1):
    """Give the gradients, by name, of a random combination of the logits."""
    source = torch.Generator().manual_seed(seed)
    weights = torch.randn(logits.shape, generator=source).to(logits)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = (weights * logits).sum()
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return dict(zip(named, found, strict=True))


def assert_same(model, first, second, tolerance=TOLERANCE):
    """Compare logits, and gradients by the norm of each parameter's."""
    torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)
    one, two = gradients(model, first), gradients(model, second)
    assert one.keys() == two.keys()
    largest = max(float(g.norm()) for g in two.values() if g is not None)
    for name, expected in two.items():
        if expected is None:
            assert one[name] is None or not one[name].any(), name
            continue
        error = float((one[name] - expected).norm())
        # A gradient that is zero but for rounding has no relative error.
        assert error <= tolerance * (float(expected.norm()) + 1e-3 * largest), name
