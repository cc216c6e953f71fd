import kernel_twins as plain
import numpy as np
import pytest

from coulomb._support.errors import ParameterError
from coulomb.kernels.particles import (
    FourierData,
    compile_loops,
    langevin_steps,
    riesz_sums,
)

STEPS = 6


def setting(rng, n=50, count=12, p=3, c=2):
    x, y = rng.normal(size=(n, p)), rng.normal(size=(n, c))
    noise = 0.1 * rng.normal(size=(STEPS, count, p))
    return x, y, rng.normal(size=(count, p)), noise, np.linspace(0.3, 0.1, STEPS)


CASES = {
    "plain": {},
    "prior": {"prior_precision": 0.5},
    "rates": {"rates": np.linspace(0.1, 2, 12), "prior_precision": np.arange(12.0)},
    "log": {"strength": 0.2},
    "riesz": {"strength": 0.2, "s": 1.3, "truncation": 0.3},
    "clip": {"strength": 0.2, "clip": 0.05},
    "ball": {"strength": 0.2, "radius": 1.5},
    "all": {
        "strength": 0.1,
        "s": 1.0,
        "clip": 0.3,
        "radius": 2.0,
        "prior_precision": 1,
    },
}


@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize("extra", ["", "batches", "mask"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_loop(rng, case, extra, noisy):
    x, y, w, noise, steps = setting(rng)
    options = {"scale": 0.01, **CASES[case]}
    if extra == "batches":
        options["batches"] = rng.integers(0, len(x), size=(STEPS, 17))
    if extra == "mask":
        options["mask"] = (rng.random(w.shape) < 0.5).astype("f8")
    noise = noise if noisy else None
    start = w.copy()
    result = langevin_steps(w, noise, steps, FourierData.of(x, y), **options)
    expected = plain.langevin(w, noise, steps, x, y, **options)
    np.testing.assert_array_equal(w, start)
    for ours, theirs in zip(result[:3], expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)
    if extra == "mask" and "radius" not in options:
        still = options["mask"] == 0
        np.testing.assert_array_equal(result.positions[still], start[still])


def test_no_data_term(rng):
    x, y, w, noise, steps = setting(rng)
    options = {"scale": 0.0, "strength": 0.2, "prior_precision": 0.1}
    result = langevin_steps(w, noise, steps, FourierData.of(x, y), **options)
    expected = plain.langevin(w, noise, steps, x, y, **options)
    np.testing.assert_allclose(result.positions, expected[0], atol=1e-10)


@pytest.mark.parametrize("count", [1, 2])
def test_few_particles_in_one_dimension(rng, count):
    x, y, w, noise, steps = setting(rng, count=count, p=1, c=3)
    options = {"scale": 0.01, "strength": 0.1}
    result = langevin_steps(w, noise, steps, FourierData.of(x, y), **options)
    expected = plain.langevin(w, noise, steps, x, y, **options)
    np.testing.assert_allclose(result.positions, expected[0], atol=1e-10)


def test_coincident_particles_separate_under_a_clip(rng):
    x, y, w, _, steps = setting(rng)
    result = langevin_steps(
        *(np.zeros_like(w), None, steps, FourierData.of(x, y)),
        scale=0.01,
        strength=0.1,
        clip=1.0,
    )
    gaps = result.positions[:, None] - result.positions[None]
    apart = np.linalg.norm(gaps, axis=2) + np.eye(len(w))
    assert np.isfinite(result.positions).all()
    assert apart.min() > 1e-3


@pytest.mark.parametrize("strength", [0.0, 0.1])
@pytest.mark.parametrize("batch", [None, 256])
def test_float32_threads_change_no_bit(rng, strength, batch):
    x, y = rng.normal(size=(3000, 5)).astype("f4"), rng.normal(size=(3000, 1))
    w = rng.normal(size=(301, 5)).astype("f4")
    noise = 0.1 * rng.normal(size=(4, 301, 5)).astype("f4")
    batches = None if batch is None else rng.integers(0, 3000, size=(4, batch))
    options = {"scale": 1e-4, "batches": batches, "strength": strength, "radius": 3.0}
    data = FourierData.of(x, y)
    steps = np.full(4, 0.5)
    one, two = (
        langevin_steps(w, noise, steps, data, threads=t, **options) for t in (1, 2)
    )
    assert one.positions.dtype == np.float32
    for a, b in zip(one[:3], two[:3], strict=True):
        np.testing.assert_array_equal(a, b)


def test_calls_chain(rng):
    x, y, w, noise, steps = setting(rng)
    data, options = FourierData.of(x, y), {"scale": 0.01, "strength": 0.1}
    whole = langevin_steps(w, noise, steps, data, **options)
    part = langevin_steps(w, noise[:3], steps[:3], data, **options)
    rest = langevin_steps(part.positions, noise[3:], steps[3:], data, **options)
    np.testing.assert_array_equal(whole.positions, rest.positions)


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise": np.zeros((STEPS, 11, 3))},
        {"mask": np.ones((12, 2))},
        {"rates": np.ones(11)},
        {"prior_precision": np.ones(11)},
        {"batches": np.full((STEPS, 4), 50)},
        {"batches": np.full((STEPS - 1, 4), 0)},
    ],
)
def test_wrong_shapes_and_indices_are_refused(rng, wrong):
    x, y, w, noise, steps = setting(rng)
    options = {"noise": noise, **wrong}
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        langevin_steps(
            w, step_sizes=steps, data=FourierData.of(x, y), scale=1.0, **options
        )


def test_no_step_moves_nothing(rng):
    x, y, w, noise, steps = setting(rng)
    data = FourierData.of(x, y)
    result = langevin_steps(w, noise[:0], steps[:0], data, scale=1.0)
    np.testing.assert_array_equal(result.positions, w)


def test_loops_compile():
    compile_loops()


@pytest.mark.parametrize("strength", [0.0, 0.3])
@pytest.mark.parametrize("real", ["f4", "f8"])
def test_fields_between_calls_spare_an_evaluation_and_change_no_bit(
    rng, strength, real
):
    x, y = rng.normal(size=(50, 3)).astype(real), rng.normal(size=(50, 2))
    w = rng.normal(size=(20, 3)).astype(real)
    noise = 0.1 * rng.normal(size=(6, 20, 3)).astype(real)
    data, sizes = FourierData.of(x, y), np.full(6, 0.05)
    settings = {"scale": 0.1, "strength": strength, "s": 1.0, "radius": 4.0}
    whole = langevin_steps(w, noise, sizes, data, **settings)
    assert whole.field is None
    first = langevin_steps(w, noise[:2], sizes[:2], data, **settings, want_field=True)
    potential, gradient = data.alignment(first.positions, scale=0.1)
    np.testing.assert_array_equal(first.field.potential, potential)
    np.testing.assert_array_equal(first.field.gradient, gradient)
    pairs = riesz_sums(first.positions, s=1.0)
    np.testing.assert_array_equal(first.field.repulsion, pairs[0])
    np.testing.assert_array_equal(first.field.force, pairs[1])
    second = langevin_steps(
        first.positions, noise[2:], sizes[2:], data, **settings, field=first.field
    )
    np.testing.assert_array_equal(second.positions, whole.positions)
    other = first.field._replace(gradient=first.field.gradient + 1)
    moved = langevin_steps(
        first.positions, noise[2:], sizes[2:], data, **settings, field=other
    )
    assert not np.array_equal(moved.positions, whole.positions)


def test_batches_have_no_field(rng):
    data = FourierData.of(rng.normal(size=(5, 2)), np.ones((5, 1)))
    batches = np.zeros((1, 2), np.int64)
    with pytest.raises(ParameterError, match="`field` must be None with `batches`"):
        langevin_steps(
            rng.normal(size=(3, 2)), None, np.ones(1), data,
            scale=1.0, batches=batches, want_field=True,
        )  # fmt: skip
