"""The compiled loops against torch, where a twin of the whole would hide an error."""

import numpy as np
import pytest
import torch
from packed_cases import MAPS

from coulomb.features import Particles, feature_maps
from coulomb.kernels import available

if not available():
    pytest.skip("numba is missing or switched off", allow_module_level=True)

from coulomb.attention.encoder.packed import kept, make_dropout
from coulomb.attention.encoder.packed_compiled import loop_map
from coulomb.kernels import packed_encoder as loops


def test_gelu_and_its_slope():
    x = torch.linspace(-9, 9, 4096).requires_grad_()
    out, slope = np.empty((1, 4096), np.float32), x.detach().numpy().copy()[None]
    loops.gelu_rows(slope, np.zeros(4096, np.float32), (0, 0, 1.0), out)
    expected = torch.nn.functional.gelu(x)
    (derivative,) = torch.autograd.grad(expected.sum(), x)
    np.testing.assert_allclose(out[0], expected.detach(), atol=1e-6)
    np.testing.assert_allclose(slope[0], derivative, atol=1e-6)


def test_a_loop_drops_what_the_hash_says():
    dropout = make_dropout(9, 2, 0.25)
    slope = np.full((50, 33), 40, np.float32)  # where gelu is the identity
    out, bias = np.empty_like(slope), np.zeros(33, np.float32)
    loops.gelu_rows(slope, bias, (*dropout, dropout.scale), out)
    expected = kept(dropout, (50, 33)) * dropout.scale
    np.testing.assert_allclose(out / 40, expected, rtol=1e-6)
    np.testing.assert_allclose(slope, expected, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in MAPS if name != "favor"])
@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
def test_features_up_to_a_factor(name, scale):
    feature_map = feature_maps.build(name)
    source = torch.Generator().manual_seed(0)
    x = scale * torch.randn(200, 5, generator=source, dtype=torch.float64)
    x[:, 0] -= 3 * scale  # rows whose projections are all negative, too
    positions = torch.rand(40, 5, generator=source, dtype=torch.float64)
    phases = torch.rand(40, generator=source, dtype=torch.float64)
    found = feature_map(
        x, Particles(positions, phases if feature_map.needs_phases else None)
    )
    a = (x @ positions.T).float().numpy()
    options = loop_map(feature_map, 5).options
    weights, slopes = np.empty(len(a), np.float32), np.empty_like(a)
    angles = phases.float().numpy()[None]
    loops.map_rows(options, angles, a, slopes, weights)
    share = found / found.sum(dim=1, keepdim=True)
    # Projections of size s are known to 1e-7 s.
    tolerance = 2e-6 * (1 + 10 * scale)
    np.testing.assert_allclose(a * weights[:, None], share, atol=tolerance)


def test_favor_features_have_the_right_products():
    source = torch.Generator().manual_seed(0)
    x = 4 * torch.randn(9, 6, generator=source, dtype=torch.float64)
    positions = 3 * torch.randn(20, 6, generator=source, dtype=torch.float64)
    exponents = x @ positions.T - 0.5 * x.square().sum(dim=1, keepdim=True)
    log_kernel = torch.logsumexp(exponents[:, None] + exponents[None], dim=2)
    expected = log_kernel.softmax(dim=1)  # what attention weights are
    q = (x @ positions.T).float().numpy()
    k, halves = q.copy(), (0.5 * x.square().sum(dim=1)).float().numpy()
    loops.favor_rows(1.0, np.array([0, 9]), q, k, halves)
    products = q.astype(float) @ k.T.astype(float)
    found = products / products.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert 0 <= min(q.min(), k.min()) <= max(q.max(), k.max()) <= 1


def test_compiling_leaves_nothing_to_compile():
    from packed_cases import ROWS, make_batch, make_model

    from coulomb.attention.encoder.packed import packed_logits
    from coulomb.attention.encoder.packed_compiled import compile_loops

    compile_loops()
    entries = [
        thing
        for name, thing in vars(loops).items()
        if hasattr(thing, "signatures") and not name.startswith("_")
    ]
    before = [len(entry.signatures) for entry in entries]
    for row in ROWS:
        model = make_model(row)
        packed_logits(model, make_batch(), dropout_seed=1).sum().backward()
        with torch.inference_mode():
            packed_logits(model, make_batch())
    assert before == [len(entry.signatures) for entry in entries]
