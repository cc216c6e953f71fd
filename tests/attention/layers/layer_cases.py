"""Inputs for the tests of attention layers."""

import torch

import coulomb.attention.layers.baselines
import coulomb.attention.layers.kernel  # noqa: F401  (their members register themselves)
from coulomb.attention.layers.base import attention_layers

LAYERS = sorted(attention_layers)
CAUSAL_LAYERS = [name for name in LAYERS if name != "linformer"]
SMALL = {
    "favor": {"n_features": 16},
    "kernel": {"n_features": 16},
    "linformer": {"max_length": 64, "rank": 4},
    "performer": {"n_features": 16, "redraw_every": 2},
    "softmax": {},
}


def make_layer(name, **settings):
    """Build the registered layer of this name, eight wide, with two heads."""
    usual = {
        "embed_dim": 8,
        "num_heads": 2,
        "batch_first": True,
        "generator": 0,
        "dtype": torch.float64,
    }
    return attention_layers.build(name, **usual | SMALL[name] | settings)


def normal(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
