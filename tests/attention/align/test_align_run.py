"""Phase A as a run: the same engine, a model left alone, repeatable, resumable."""

import math

import pytest
import torch
from align_cases import (
    TinyAttention,
    TinyModel,
    marked_batches,
    marked_model,
    random_batches,
)
from torch import nn

from coulomb._support.checks import make_generator
from coulomb.attention.align.problem import (
    MOVES,
    PAPER,
    AlignmentSettings,
    build_problem,
)
from coulomb.attention.align.run import CrossEntropy, align, batch_of_step
from coulomb.attention.align.scores import AbstractScore
from coulomb.domains import Ball
from coulomb.dynamics import loop
from coulomb.dynamics.langevin import Annealed, ProjectedLangevin
from coulomb.dynamics.loop import RunSettings, StopReason, load_run, save_run
from coulomb.energy import Hamiltonian
from coulomb.features import Particles

QUICK = {"max_epochs": 2, "watched": 1}


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def positions_of(model):
    return torch.stack([layer.particles.detach() for layer in model.attention])


def run_quickly(model=None, **options):
    model = model or TinyModel(classes=3)
    return align(model, random_batches(4), **{**QUICK, **options})


def test_it_is_the_engine_s_own_run():
    """With one batch there is nothing that ProjectedLangevin would not do itself."""
    batches, model = random_batches(1), TinyModel()
    options = {"step_size": 0.3, "inverse_temperature": 50.0, "clip": 0.5}
    domain = Ball(1.2)
    problem = build_problem(model, batches, AlignmentSettings(), held_out=None)
    energy = Hamiltonian(problem.objective, strength=0.05)
    sampler = ProjectedLangevin(domain=domain, **options)
    particles = Particles(domain.project(positions_of(model)))
    run = loop.init_run(sampler, particles, generator=make_generator(3, MOVES))
    model.eval()
    expected = loop.run(run, sampler, energy, RunSettings(6)).particles.positions
    result = align(
        model,
        batches,
        held_out=None,
        seed=3,
        max_steps=6,
        strength=0.05,
        domain=domain,
        **options,
    )
    assert torch.equal(result.positions, expected)


def test_plain_drift_is_the_n_th_part_of_the_other():
    first = [
        run_quickly(max_steps=1, drift=drift, inverse_temperature=math.inf, clip=1e9)
        for drift in ("N", "plain")
    ]
    large, small = (result.positions - result.stats.start for result in first)
    torch.testing.assert_close(large, 6 * small, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("mode", [True, False])
def test_only_the_particles_change(mode):
    model = TinyModel().train(mode)
    model.dropout.eval()  # a mode of its own, which must come back
    model.head.weight.requires_grad_(False)
    before, flags = state_of(model), [p.requires_grad for p in model.parameters()]
    result = align(model, random_batches(4), **QUICK)
    after = state_of(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"attention.0.particles", "attention.1.particles"}
    assert torch.equal(positions_of(model), result.positions)
    assert model.training is mode
    assert model.head.training is mode
    assert not model.dropout.training
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_failure_leaves_the_model_as_it_was():
    model = TinyModel().train()
    before = state_of(model)

    def stumble(run):
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        align(model, random_batches(4), callbacks=[stumble], **QUICK)
    assert all(torch.equal(before[name], v) for name, v in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_a_seed_decides_everything_and_global_draws_nothing():
    models = [TinyModel(classes=3) for _ in range(3)]
    torch_state = torch.random.get_rng_state()
    first, second, other = (
        run_quickly(model, seed=seed)
        for model, seed in zip(models, (1, 1, 2), strict=True)
    )
    assert torch.equal(first.positions, second.positions)
    assert first.history == second.history
    assert not torch.equal(first.positions, other.positions)
    assert torch.equal(torch.random.get_rng_state(), torch_state)


def test_resumed_to_the_bit(tmp_path):
    options = {
        "inverse_temperature": Annealed(10.0, 1e4, 6),
        "also": ("norm",),
        "watched": 1,
        "seed": 5,
    }
    batches = random_batches(4)
    whole_model, model = TinyModel(), TinyModel()
    whole = align(whole_model, batches, max_epochs=3, **options)
    align(model, batches, max_epochs=1, **options).save(tmp_path / "run.safetensors")
    resumed_model = TinyModel()  # the particles come from the file
    resumed = align(
        resumed_model,
        batches,
        max_epochs=3,
        resume=tmp_path / "run.safetensors",
        **options,
    )
    assert torch.equal(resumed.positions, whole.positions)
    assert resumed.history == whole.history
    assert torch.equal(resumed.stats.drift, whole.stats.drift)
    assert resumed.stats.noise == whole.stats.noise
    assert torch.equal(resumed_model.norm.weight, whole_model.norm.weight)
    assert not torch.equal(resumed_model.norm.weight, TinyModel().norm.weight)


def test_a_plain_saved_run_goes_on_too(tmp_path):
    batches = random_batches(4)
    whole = align(TinyModel(), batches, max_epochs=2)
    half = align(TinyModel(), batches, max_epochs=1)
    save_run(half.run, tmp_path / "run")
    half.save(tmp_path / "more")
    for name in ("run", "more"):  # load_run reads both
        run = load_run(tmp_path / name)
        resumed = align(TinyModel(), batches, max_epochs=2, resume=run)
        assert torch.equal(resumed.positions, whole.positions)


def test_what_cannot_be_resumed(tmp_path):
    half = run_quickly()
    path = tmp_path / "run"
    half.save(path)
    with pytest.raises(ValueError, match="`seed` must be 0"):
        run_quickly(resume=path, seed=1)
    with pytest.raises(ValueError, match=r"must hold 'norm\.weight'"):
        run_quickly(resume=path, also=("norm",))
    with pytest.raises(ValueError, match="particles of shape"):
        align(TinyModel(n_particles=3), random_batches(4), resume=path)


class NoScore(AbstractScore):
    """Labels do not count: repulsion alone moves particles."""

    def __call__(self, rows):
        return 0 * rows.features.sum()


def test_heads_and_layers_do_not_repel_each_other():
    """All groups at the same place: alone, and together, the same repulsion."""
    together, alone = TinyModel(), TinyModel(layers=1, heads=2)
    cloud = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    for model in (together, alone):
        for layer in model.attention:
            layer.particles.data = cloud.expand(2, 6, 2).clone()
    options = {
        "strength": 1.0,
        "inverse_temperature": math.inf,
        "max_steps": 1,
        "clip": math.inf,
        "held_out": None,
        "objective": NoScore(),
    }
    batches = random_batches(1)
    moved = align(together, batches, **options).positions
    expected = align(alone, batches, **options).positions[0, 0]
    assert not torch.allclose(expected, cloud)
    torch.testing.assert_close(moved, expected.expand(2, 2, 6, 2))


def test_particles_stay_in_the_domain_and_the_projection_is_told():
    model = TinyModel(classes=3)
    for layer in model.attention:
        layer.particles.data *= 10
    result = align(model, random_batches(4), settings=PAPER, max_epochs=2)
    assert positions_of(model).norm(dim=-1).max() <= 1.5 + 1e-5
    assert "the domain had brought the mean norm of the particles from" in (
        result.summary()
    )


def test_history_and_summary():
    result = run_quickly(record_every=2, max_epochs=2, held_out=0.5)
    last = result.history[-1]
    assert [record["step"] for record in result.history] == [0, 2, 4]
    assert {"alignment", "held_out", "displacement", "drift", "noise"} <= set(last)
    assert torch.tensor(last["drift_to_noise"]).shape == (2, 2)
    assert torch.tensor(last["moved"]).shape == (2, 2)
    assert list(result.drift_to_noise) == ["attention.0", "attention.1"]
    text = result.summary()
    for words in (
        "2 x 2 x 6 particles",
        "4 steps, 2 epochs",
        "all steps were made",
        "held out",
        "as far as their random walk did",
    ):
        assert words in text
    assert "\n" not in text


def test_drift_and_noise_are_added_up():
    """Without a wall and repulsion, moves are what labels and noise add up to."""
    options = {"strength": 0.0, "max_epochs": 3}
    cold = run_quickly(inverse_temperature=math.inf, **options)
    carried = cold.positions - cold.stats.start
    torch.testing.assert_close(cold.stats.drift.float(), carried)
    assert cold.summary().endswith("There was no noise.")
    warm = run_quickly(inverse_temperature=8.0, step_size=0.5, **options)
    assert warm.stats.noise == pytest.approx(9 * 2 * 0.5 / 8)


def test_drowned_runs_say_so():
    hot = run_quickly(inverse_temperature=1e-3)
    assert hot.drowned
    assert "drowned by the noise" in hot.summary()
    cold = run_quickly(inverse_temperature=1e9)
    assert not cold.drowned
    assert "drowned" not in cold.summary()


def test_every_epoch_sees_every_batch_once_in_its_own_order():
    numbers = (3, 5, 8, 9, 11)
    epochs = [
        [batch_of_step(5 * epoch + i, numbers, 0) for i in range(5)]
        for epoch in range(4)
    ]
    assert all(sorted(epoch) == list(numbers) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_held_out_batches_are_never_trained_on():
    seen = []

    class Watched(list):
        def __getitem__(self, number):
            seen.append(number)
            return super().__getitem__(number)

    batches = Watched(random_batches(6))
    problem = build_problem(TinyModel(), batches, AlignmentSettings(), held_out=0.34)
    kept_back = set(problem.held_out.numbers)
    assert len(kept_back) == 2
    assert kept_back | set(problem.training) == set(range(6))
    for step in range(12):
        batch_of_step(step, problem.training, 0)
        assert batch_of_step(step, problem.training, 0) not in kept_back
    given = build_problem(
        TinyModel(), batches, AlignmentSettings(), held_out=random_batches(2)
    )
    assert given.training == tuple(range(6))
    assert given.held_out.numbers == (0, 1)


def test_stops_when_the_largest_move_is_small():
    result = run_quickly(
        max_epochs=50,
        inverse_temperature=math.inf,
        strength=0.0,
        step_size=1e-7,
        tol=1e-3,
        record_every=1,
    )
    assert result.run.reason is StopReason.SETTLED
    assert result.run.state.step == 10  # two windows of five records
    assert "drift_to_noise" in result.history[-1]


def test_stops_when_held_out_alignment_stops_improving():
    result = run_quickly(
        max_epochs=50, inverse_temperature=0.1, patience=3, record_every=1
    )
    assert result.run.reason is StopReason.HELD_OUT
    with pytest.raises(ValueError, match="`patience` needs `held_out`"):
        run_quickly(patience=3, held_out=None)


def test_other_parameters_move_only_if_asked():
    model = TinyModel(classes=3)
    before = state_of(model)
    align(model, random_batches(4), also=("norm",), level="layer", **QUICK)
    changed = {
        name
        for name, value in model.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert changed == {
        "attention.0.particles",
        "attention.1.particles",
        "norm.weight",
        "norm.bias",
    }
    with pytest.raises(ValueError, match="`also` has 'nrom'"):
        align(model, random_batches(4), also=("nrom",))


def test_other_parameters_lower_the_same_energy():
    model, batches = TinyModel(classes=3), random_batches(1)
    options = {"held_out": None, "max_epochs": 5, "layers": ("attention.0",)}
    still = align(TinyModel(classes=3), batches, step_size=1e-9, **options)
    moving = align(model, batches, step_size=1e-9, also=("norm",), **options)
    gains = [
        r.history[-1]["alignment"] - r.history[0]["alignment"] for r in (still, moving)
    ]
    assert gains[1] > gains[0] + 1e-4


def test_chosen_layers():
    model = TinyModel()
    before = positions_of(model)
    result = align(model, random_batches(4), layers=("attention.1",), **QUICK)
    assert result.positions.shape == (1, 2, 6, 2)
    assert torch.equal(positions_of(model)[0], before[0])
    assert not torch.equal(positions_of(model)[1], before[1])


def test_any_iterable_any_evaluate_and_mappings():
    batches = random_batches(4)
    expected = align(TinyModel(), batches, **QUICK).positions
    once = align(TinyModel(), iter(batches), **QUICK)
    words = [{"x": x, "key_mask": mask, "labels": y} for x, mask, y in batches]
    named = align(TinyModel(), words, **QUICK)
    calls = []

    def evaluate(model, parameters, batch):
        calls.append(sorted(parameters))
        return torch.func.functional_call(
            model, parameters, batch.arguments, batch.keywords
        )

    own = align(TinyModel(), batches, evaluate=evaluate, **QUICK)
    for result in (once, named, own):
        assert torch.equal(result.positions, expected)
    assert calls[0] == sorted(dict(TinyModel().named_parameters()))


def test_a_layer_that_is_the_model():
    result = align(marked_model(), marked_batches(3, size=8), **QUICK)
    assert result.positions.shape == (1, 1, 8, 2)


def test_half_precision_particles_move_in_single():
    model = TinyModel(dtype=torch.bfloat16)
    batches = random_batches(2, dtype=torch.bfloat16)
    result = align(model, batches, held_out=None, **QUICK)
    assert result.positions.dtype == torch.float32
    assert model.attention[0].particles.dtype == torch.bfloat16


def test_shared_layers_have_one_set_of_particles():
    model = TinyModel()
    model.attention[1] = model.attention[0]
    result = align(model, random_batches(2), held_out=None, level="layer", **QUICK)
    assert result.positions.shape[0] == 1


def test_warm_up_trains_everything_but_the_particles():
    model, batches = TinyModel(), random_batches(4, classes=2)
    before, torch_state = state_of(model), torch.random.get_rng_state()
    losses = CrossEntropy(epochs=5, lr=1e-2)(model, batches)
    assert losses[-1] < losses[0]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == name.endswith("particles")
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    assert all(p.grad is None for p in model.parameters())
    seen = []
    align(model, batches, warm_up=lambda m, b: seen.append(len(b)), **QUICK)
    assert seen == [3]  # the held-out batch is not shown


def test_warm_up_is_repeatable_and_comes_first():
    first, second = TinyModel(), TinyModel()
    warm = CrossEntropy(epochs=1, lr=1e-2, seed=3)
    results = [
        align(
            model, random_batches(4, classes=2), warm_up=warm, also=("norm",), **QUICK
        )
        for model in (first, second)
    ]
    assert torch.equal(results[0].positions, results[1].positions)
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert not torch.equal(first.norm.weight, torch.ones(4))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="did you mean 'step_size'"):
        run_quickly(stepsize=1.0)
    with pytest.raises(ValueError, match="`drift` has no member 'n'"):
        run_quickly(drift="n")
    with pytest.raises(ValueError, match="at least one batch"):
        align(TinyModel(), [])
    with pytest.raises(TypeError, match="sequence of batches"):
        align(TinyModel(), torch.ones(3))
    with pytest.raises(ValueError, match="such as KernelAttention; got Linear"):
        align(nn.Linear(2, 2), random_batches(1))


def test_the_paper_s_preset_is_the_paper_s():
    assert (PAPER.step_size, PAPER.inverse_temperature) == (2e-3, 50.0)
    assert (PAPER.strength, PAPER.interaction.s) == (1e-3, 0.0)
    assert (PAPER.clip, PAPER.domain) == (10.0, Ball(1.5))
    assert (PAPER.max_epochs, PAPER.tol, PAPER.drift) == (10, 1e-6, "N")
    assert PAPER.objective == "within-class"


def test_the_stand_in_has_what_a_layer_must_have():
    layer = marked_model()
    assert isinstance(layer, TinyAttention)
    assert layer.particles.shape == (1, 8, 2)


def test_the_statistics_keep_their_former_name():
    result = align(TinyModel(), random_batches(2), max_steps=1)
    with pytest.warns(DeprecationWarning, match="AlignmentResult.stats"):
        assert result.account is result.stats
