"""The measured choice between forms: kept, validated, and a function of shapes."""

import json
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from attention_cases import gradients, make_case

import attention_twins as twins
from coulomb.attention import kernel_attention
from coulomb.attention.ops import api, tuning
from coulomb.attention.ops import compiled as _compiled
from coulomb.features import Particles
from coulomb.kernels import available

needs_numba = pytest.mark.skipif(not available(), reason="needs numba")
NAMES = [
    tuning.form_name(kind, engine, passes)
    for kind in tuning.KINDS
    for engine in tuning.ENGINES
    for passes in tuning.PASSES
]
WORK = tuning.Work(tokens=4096, pairs=1 << 20, dim=64, dim_v=64, features=256)


def costs(**changes):
    """Equal costs, but for some forms, named with underscores."""
    table = {name: [1e-4, 1e-11] for name in NAMES}
    for name, cost in changes.items():
        for passes in tuning.PASSES:
            table[f"{name.replace('_', ' ')} {passes}"] = cost
    return table


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty place for models, and nothing known yet; measuring is counted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("COULOMB_TUNE")
    monkeypatch.setattr(tuning, "_known", {})
    measured = []

    def measure():
        measured.append(1)
        return costs(linear_torch=[0.0, 1e-12])

    monkeypatch.setattr(tuning, "_measure_all", measure)
    return measured


def forget(monkeypatch):
    monkeypatch.setattr(tuning, "_known", {})


@needs_numba
def test_a_model_is_measured_once_and_kept(folder, monkeypatch):
    assert tuning.load(measure=False) is None
    first = tuning.load()
    forget(monkeypatch)
    assert tuning.load() == tuning.load(measure=False) == first
    assert len(folder) == 1
    assert tuning.identity() == first.identity
    content = json.loads(tuning.model_file().read_text())
    assert content["machine"]["threads"] == torch.get_num_threads()
    assert not [x for x in tuning.model_file().parent.iterdir() if x.name[0] == "."]


@needs_numba
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"costs": 3}',
        '{"costs": {}}',
        json.dumps({"costs": costs(linear_loops=[1e-4])}),
        json.dumps({"costs": costs(linear_loops=[1e-4, "x"])}),
        json.dumps({"costs": costs(linear_loops=[-1.0, 1e-9])}),
        json.dumps({"costs": costs(linear_loops=[0.0, float("nan")])}),
        json.dumps({"costs": costs(), "more": "x" * (1 << 17)}),
        "[" * 60000,
    ],
)
def test_a_broken_file_is_measured_anew(text, folder):
    file = tuning.model_file()
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert tuning.load() is not None
    assert folder == [1]
    assert json.loads(file.read_text())["costs"].keys() == set(NAMES)


@needs_numba
@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_without_a_place_the_rule_is_fixed(folder, tmp_path):
    tmp_path.chmod(0o500)
    assert tuning.identity() == "fixed"
    assert folder == []


@needs_numba
def test_where_a_file_is_in_the_way_the_rule_is_fixed(folder, tmp_path):
    (tmp_path / "coulomb").write_text("not a folder")
    assert tuning.identity() == "fixed"
    assert folder == []


@needs_numba
def test_other_threads_have_another_model(folder, monkeypatch):
    first = tuning.model_file()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert tuning.model_file() != first


def test_the_fixed_rule_counts_multiplications():
    assert os.environ["COULOMB_TUNE"] == "0"
    assert tuning.identity() == "fixed"
    forms = [(kind, "torch") for kind in ("linear", "quadratic")]
    short, long = WORK._replace(pairs=1 << 16), WORK
    assert tuning.choose(forms, short, backward=False) == ("quadratic", "torch")
    assert tuning.choose(forms, long, backward=False) == ("linear", "torch")
    forms = [("linear", "torch"), ("linear", "loops")]
    assert tuning.choose(forms, long, backward=True) == ("linear", "loops")


@needs_numba
def test_the_cheapest_of_the_model_is_taken(folder, monkeypatch):
    forms = [("linear", "loops"), ("linear", "torch")]
    assert tuning.choose(forms, WORK, backward=False) == ("linear", "torch")
    slow_start = costs(linear_torch=[1.0, 1e-12])
    monkeypatch.setattr(tuning, "_measure_all", lambda: slow_start)
    tuning.model_file().unlink()
    forget(monkeypatch)
    assert tuning.choose(forms, WORK, backward=False) == ("linear", "loops")
    large = WORK._replace(tokens=1 << 40)
    assert tuning.choose(forms, large, backward=False) == ("linear", "torch")


@needs_numba
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("engine", tuning.ENGINES)
@pytest.mark.parametrize("kind", ["linear", "quadratic"])
def test_every_choice_gives_the_same(kind, engine, causal, folder, monkeypatch):
    name = "causal" if causal else kind
    table = costs(**{f"{name}_{engine}": [0.0, 1e-14]})
    monkeypatch.setattr(tuning, "_measure_all", lambda: table)
    monkeypatch.setattr(_compiled, "_FEWEST", 0)
    taken = []
    forward = api._forward

    def spy(problem, loops, *rest):
        taken.append("loops" if loops else "torch")
        return forward(problem, loops, *rest)

    monkeypatch.setattr(api, "_forward", spy)
    sizes = {"n": 70, "dim": 16, "dim_v": 32, "n_particles": 48}
    case = make_case("favor", **sizes, dtype=torch.float32)
    case = case._replace(q=case.q / 2, k=case.k / 2)
    wide = case._replace(
        **{x: getattr(case, x).double() for x in "qkv"},
        particles=Particles(*(x.double() for x in case.particles)),
    )

    def run(attention, q, k, v, particles):
        return attention(q, k, v, particles, "favor", causal=causal)

    ours = gradients(lambda *x: run(kernel_attention, *x), case)
    twin = gradients(lambda *x: run(twins.kernel_attention, *x), wide)
    assert taken == [engine]
    for a, b in zip(ours, twin, strict=True):
        close = {"rtol": 2e-4, "atol": 2e-5 * float(b.abs().max())}
        torch.testing.assert_close(a, b.float(), **close)


@needs_numba
@pytest.mark.parametrize("inference", [False, True])
def test_measuring_leaves_no_trace(inference, monkeypatch):
    """The state of torch's own generator and of gradients is as before."""
    monkeypatch.setattr(tuning, "_HEADS", 1)
    monkeypatch.setattr(tuning, "_ROUNDS", 1)
    before = torch.get_rng_state()
    with torch.inference_mode(inference):
        table = tuning._measure_all()
        assert torch.is_inference_mode_enabled() == inference
    assert torch.equal(torch.get_rng_state(), before)
    assert table.keys() == set(NAMES)


def test_what_others_compute_meanwhile_does_not_count(monkeypatch):
    clock = {"wall": 0.0, "own": 0.0}

    def call(wall, own):
        clock["wall"] += wall
        clock["own"] += own

    times = {"perf_counter": lambda: clock["wall"], "thread_time": lambda: clock["own"]}
    monkeypatch.setattr(tuning, "time", SimpleNamespace(**times))
    calls = {"fast": partial(call, 0.3, 0.25), "slow": partial(call, 0.1, 0.5)}
    assert tuning._race(calls) == {"fast": 0.25, "slow": 0.5}


def test_processors_have_names():
    assert tuning.processor_name()
    assert {"processor", "threads", "torch"} <= tuning.machine().keys()
