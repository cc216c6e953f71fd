"""Where Phase A begins: windows of positions, and the choice among starts."""

import math

import pytest
import torch
from align_cases import TinyModel, marked_batches, marked_model, random_batches

from coulomb._support.errors import ParameterError
from coulomb.attention.align import align
from coulomb.attention.windows import window_particles
from coulomb.features import Particles, as_feature_map

STILL = {"max_steps": 0, "inverse_temperature": math.inf}


def looking_at(model, direction):
    """All particles along one direction; a token begins with its mark."""
    return torch.tensor(direction).expand(1, *model.particles.shape).clone()


def test_windows_by_hand():
    table = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    found = window_particles(table, n_heads=2, n_particles=4, span=6, norm=2.0)
    for head in range(2):
        part = table[:, 2 * head : 2 * head + 2]
        for k in range(4):
            total = torch.zeros(2)
            for t in range(9):
                # Centres are 2 positions apart, which is more than the width of 1.5.
                weight = math.exp(-((t - 2 * k) ** 2) / (2 * 2.0**2))
                total += weight * part[t] / part[t].norm()
            torch.testing.assert_close(found[head, k], 2 * total / total.norm())


@pytest.mark.parametrize("count", [1, 3, 40])
def test_windows_have_the_norm_and_stay_in_the_table(count):
    table = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    found = window_particles(table, n_heads=3, n_particles=count, span=100, norm=1.5)
    assert found.shape == (3, count, 2)
    torch.testing.assert_close(found.norm(dim=-1), torch.full((3, count), 1.5))
    assert (
        window_particles(0 * table, n_heads=3, n_particles=count, span=4)
        .isfinite()
        .all()
    )


def test_the_kernel_of_windows_is_local():
    """With orthogonal embeddings it falls with the distance of two positions."""
    table = 8 * torch.eye(24)
    particles = Particles(
        window_particles(table, n_heads=1, n_particles=24, span=23, norm=3.0)
    )
    features = as_feature_map("softmaxfeat")(table.unsqueeze(0), particles)[0]
    kernel = features @ features.T
    near = kernel[8, 8:16]
    assert (near.diff() < 0).all()
    assert near[0] > 5 * near[6]


def test_the_start_that_aligns_best_is_taken():
    model, batches = marked_model(), marked_batches(20)
    starts = {
        "marks": looking_at(model, [3.0, 0.0]),
        "signs": looking_at(model, [0.0, 0.01]),
    }
    own = model.particles.detach().clone()
    result = align(model, batches, starts=starts, **STILL)
    assert result.begun == "marks"
    assert max(result.starts, key=result.starts.get) == "marks"
    assert set(result.starts) == {"own", "marks", "signs"}
    assert torch.equal(model.particles, starts["marks"][0])
    assert torch.equal(result.account.start[0], own)
    torch.testing.assert_close(
        result.account.drift, (starts["marks"] - own).double(), atol=1e-6, rtol=1e-6
    )
    assert not result.drowned
    assert "it took 'marks'" in result.summary()
    assert result.history[-1]["held_out"] == pytest.approx(
        result.starts["marks"], abs=0.2
    )


def test_scores_of_starts_are_the_mean_over_training_batches():
    model, batches = TinyModel(classes=3), random_batches(4)
    own = torch.stack([layer.particles.detach() for layer in model.attention])
    result = align(model, batches, starts={"twice": 2 * own}, held_out=None, **STILL)
    model.eval()
    energy = result.problem.objective.on(batches).energy(Particles(2 * own))
    assert result.starts["twice"] == pytest.approx(-float(energy), abs=1e-6)


def test_labels_without_meaning_choose_nothing():
    """No start is better by two standard errors: the model keeps its own particles.

    Four of 100 would be wrong by chance if gains were normal; here none of 3 is.
    """
    kept = 0
    for seed in range(3):
        model = marked_model(seed)
        starts = {"marks": looking_at(model, [3.0, 0.0])}
        generator = torch.Generator().manual_seed(seed)
        batches = [
            (x, y[torch.randperm(len(y), generator=generator)])
            for x, y in marked_batches(20, seed=seed)
        ]
        kept += align(model, batches, starts=starts, **STILL).begun == "own"
    assert kept == 3


def test_in_doubt_the_preferred_start_is_taken():
    """Labels without meaning do not veto; clear ones do."""
    model, batches = marked_model(), marked_batches(20)
    marks, signs = ([3.0, 0.0], [0.0, 0.01])
    starts = {"marks": looking_at(model, marks), "signs": looking_at(model, signs)}
    shuffled = [(x, y.roll(3)) for x, y in batches]
    assert align(marked_model(), shuffled, starts=starts, **STILL).begun == "own"
    kept = align(marked_model(), shuffled, starts=starts, prefer="marks", **STILL)
    assert kept.begun == "marks"
    moved = align(marked_model(), batches, starts=starts, prefer="signs", **STILL)
    assert moved.begun == "marks"
    with pytest.raises(ParameterError, match=r"prefer.*did you mean 'marks'"):
        align(marked_model(), batches, starts=starts, prefer="mark", **STILL)


def test_a_resumed_run_does_not_choose_again(tmp_path):
    batches = marked_batches(6)
    options = {"seed": 2, "max_steps": 5, "record_every": 1}
    whole_model = marked_model()
    starts = {"marks": looking_at(whole_model, [3.0, 0.0])}
    whole = align(whole_model, batches, starts=starts, **options)
    model = marked_model()
    options["max_steps"] = 2
    align(model, batches, starts=starts, **options).save(tmp_path / "run")
    options["max_steps"] = 5
    rest = align(
        marked_model(), batches, starts=starts, resume=tmp_path / "run", **options
    )
    assert torch.equal(rest.positions, whole.positions)
    assert torch.equal(rest.account.start, whole.account.start)
    assert rest.starts == {}


def test_mistakes_are_named():
    model = marked_model()
    with pytest.raises(ParameterError, match="`starts` must hold particles of shape"):
        align(model, marked_batches(3), starts={"odd": torch.zeros(1, 1, 8, 3)})
    with pytest.raises(ParameterError, match="`positions` must have shape"):
        window_particles(torch.zeros(4, 5), n_heads=2, n_particles=3, span=4)
