import math

import pytest
import torch
from packed_cases import ROWS, assert_same, make_batch, make_model

from coulomb.attention.encoder.packed import (
    LayerDropout,
    kept,
    make_dropout,
    mix,
    packed_logits,
)
from coulomb.kernels import available

OWN = ("shared-elu", "performer", "softmax", "softmax-shared", "linformer")


@pytest.mark.parametrize("row", ["shared-softmaxfeat", "learned-favor", "softmax"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_loops_drop_what_their_twin_drops(row, norm, monkeypatch):
    if not available():
        pytest.skip("numba is missing or switched off")
    model, batch = make_model(row, norm=norm, dropout=0.3), make_batch()
    fast = packed_logits(model, batch, dropout_seed=7)
    monkeypatch.setenv("COULOMB_NUMBA", "0")
    assert_same(model, fast, packed_logits(model, batch, dropout_seed=7))


@pytest.mark.parametrize("row", OWN)
def test_dropout_of_the_attention_itself(row, monkeypatch):
    factory = ROWS[row]
    model = make_model(lambda *a, **k: factory(*a, dropout=0.4, **k), dropout=0.0)
    batch = make_batch()
    fast = packed_logits(model, batch, dropout_seed=3)
    assert not torch.allclose(fast, packed_logits(model, batch))
    monkeypatch.setenv("COULOMB_NUMBA", "0")
    assert_same(model, fast, packed_logits(model, batch, dropout_seed=3))


def test_a_seed_decides_and_nothing_else():
    model, batch = make_model("shared-softmaxfeat", dropout=0.2), make_batch()
    state = torch.get_rng_state()
    first = packed_logits(model, batch, dropout_seed=11)
    packed_logits(model, batch, dropout_seed=12)
    model.train()
    again = packed_logits(model, batch, dropout_seed=11)
    assert torch.equal(first, again)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("other", [1, 1 << 32, 1 << 62])
def test_every_part_of_a_seed_matters(other):
    shape = (100, 100)
    first = kept(make_dropout(0, 1, 0.5), shape)
    second = kept(make_dropout(other, 1, 0.5), shape)
    # Independent masks agree at half of the places, s.e. 0.5 / 100.
    assert abs((first == second).double().mean() - 0.5) < 4 * 0.5 / 100


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5, 0.9])
def test_rate_and_mean(rate):
    places = [make_dropout(5, place, rate) for place in range(40)]
    masks = torch.stack([kept(place, (64, 128)) for place in places]).double()
    error = math.sqrt(rate * (1 - rate) / masks.numel())
    # The rate is rounded to one of 65536 levels.
    assert abs(1 - masks.mean() - rate) < 4 * error + 1 / 65536
    # The scatter of means of rows and columns is that of independent draws: for 40 * 64
    # means, the ratio of variances has a standard error of sqrt(2 / 2560).
    for dim, size in ((2, 128), (1, 64)):
        means = masks.mean(dim=dim)
        ratio = float(means.var() / (rate * (1 - rate) / size))
        assert abs(ratio - 1) < 4 * math.sqrt(2 / means.numel()) + 0.01


def test_neighbours_and_places_are_uncorrelated():
    masks = torch.stack(
        [kept(make_dropout(2, place, 0.5), (512, 512)) for place in range(3)]
    ).double()
    centred = masks - masks.mean(dim=(1, 2), keepdim=True)
    size = 512 * 512
    pairs = [
        (centred[0], centred[1]),
        (centred[0], centred[2]),
        (centred[0][:, 1:], centred[0][:, :-1]),
        (centred[0][1:], centred[0][:-1]),
    ]
    for a, b in pairs:
        # The mean of products of independent signs of 1/2 has s.e. 1 / (4 sqrt(n)).
        assert abs(float((a * b).mean())) < 4 / (4 * math.sqrt(size - 512))


def test_dropping_keeps_the_mean():
    x = torch.ones(400, 100)
    out = make_dropout(1, 1, 0.1).drop(x)
    assert set(out.unique().tolist()) == {0.0, float(out.max())}
    # s.e. of the mean of values 0 and 1 / 0.9 is sqrt(0.1 / 0.9 / n).
    assert abs(out.mean() - 1) < 4 * math.sqrt(0.1 / 0.9 / x.numel())
    assert LayerDropout().drop(x, 0.1) is x


def test_nothing_is_dropped_without_a_seed_or_a_rate():
    assert make_dropout(None, 1, 0.1) is None
    assert make_dropout(3, 1, 0.0) is None


def test_the_hash_takes_no_two_numbers_to_one():
    sample = range(0, 1 << 32, 99991)
    assert len({mix(word) for word in sample}) == len(sample)
