"""What code outside the layers may ask Performer and Linformer."""

import torch
from layer_cases import normal

from coulomb.attention.layers.baselines import Linformer, Performer


def test_mixtures_are_what_linformer_attends_to():
    """`softmax(q (E k)') F v`, with padding that counts nothing."""
    layer = Linformer(8, 2, max_length=12, rank=5, generator=0).eval()
    q, k, v = (normal(3, 2, 7, 4, seed=number).float() for number in range(3))
    key_mask = torch.arange(7) < torch.tensor([[7], [3], [1]])
    keys, values = layer.mixtures(k, key_mask, causal=False)
    weights = (q @ (keys @ k).transpose(-1, -2) / 2).softmax(dim=-1)
    expected = weights @ (values @ v)
    found = layer.attend(q, k, v, key_mask, causal=False)
    torch.testing.assert_close(found, expected)
    changed = k.masked_fill(~key_mask[:, None, :, None], 9.0)
    torch.testing.assert_close(
        layer.attend(q, changed, v, key_mask, causal=False), expected
    )


def test_counted_passes_are_passes():
    counted, called = (
        Performer(8, 2, n_features=6, redraw_every=2, generator=0) for _ in range(2)
    )
    x = normal(3, 8, seed=0).float()
    for _ in range(5):
        counted.count_pass()
        called(x, x, x)
        assert torch.equal(counted.particles, called.particles)
        assert torch.equal(counted.get_extra_state(), called.get_extra_state())
    counted.eval().count_pass()
    assert torch.equal(counted.get_extra_state(), called.get_extra_state())
