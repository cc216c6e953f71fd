"""The run loop: history, stopping, resuming to the bit."""

import math

import pytest
import torch

from coulomb._support.archive import read_archive, write_archive
from coulomb._support.errors import DivergedError, FileFormatError, ParameterError
from coulomb.domains import Ball
from coulomb.dynamics import loop
from coulomb.dynamics.langevin import ProjectedLangevin
from coulomb.dynamics.loop import (
    DISTANCES,
    HeldOut,
    RunSettings,
    Settled,
    StopReason,
    energy_distance,
    init_run,
    load_run,
    max_displacement,
    save_run,
    sliced_wasserstein,
    stop_rules,
)
from coulomb.energy import Hamiltonian
from coulomb.features import Particles
from coulomb.interactions import Riesz
from coulomb.objectives import FourierAlignment, GaussianPrior, Sample


@pytest.fixture
def system():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    labels = (x[:, :1] * x[:, 1:2]).sign()
    sample = Sample(x[:40], labels[:40])
    energy = Hamiltonian(
        FourierAlignment(sample), Riesz(0.0), 0.01, GaussianPrior(1.0, 50.0)
    )
    particles = Particles(
        torch.randn(20, 3, generator=generator, dtype=torch.float64),
        torch.rand(20, generator=generator, dtype=torch.float64),
    )
    return energy, particles, Sample(x[40:], labels[40:])


def run_to(system, steps, *, batch_size=None, **settings):
    energy, particles, _ = system
    sampler = ProjectedLangevin(0.5, 50.0, Ball(3.0), batch_size=batch_size)
    run = init_run(sampler, particles, generator=torch.Generator().manual_seed(7))
    return sampler, loop.run(run, sampler, energy, RunSettings(steps, **settings))


def test_history(system):
    _, run = run_to(system, 25, record_every=10)
    assert [record["step"] for record in run.history] == [0, 10, 20, 25]
    assert run.reason is StopReason.MAX_STEPS
    first, last = run.history[0], run.history[-1]
    assert last["alignment"] > first["alignment"]
    assert {"energy", "repulsion", "prior"} <= set(first)
    assert {"displacement", "drift", "noise", "accepted"} <= set(last)
    total = -last["alignment"] + 0.01 * last["repulsion"] + last["prior"]
    assert last["energy"] == pytest.approx(total)


def test_no_steps_leave_the_particles(system):
    _, run = run_to(system, 0)
    assert torch.equal(run.particles.positions, system[1].positions)
    assert run.reason is StopReason.MAX_STEPS


@pytest.mark.parametrize("batch_size", [None, 8])
@pytest.mark.parametrize("interruption", [10, 13, 29])
def test_resuming_gives_the_same_run_to_the_bit(
    system, tmp_path, batch_size, interruption
):
    settings = {"record_every": 5, "window": 2}
    _, whole = run_to(system, 40, batch_size=batch_size, **settings)
    sampler, part = run_to(system, interruption, batch_size=batch_size, **settings)
    save_run(part, tmp_path / "run.safetensors")
    resumed = load_run(tmp_path / "run.safetensors")
    loop.run(resumed, sampler, system[0], RunSettings(40, **settings))
    assert torch.equal(resumed.particles.positions, whole.particles.positions)
    assert torch.equal(resumed.particles.phases, whole.particles.phases)
    assert torch.equal(resumed.generator.get_state(), whole.generator.get_state())
    if interruption % 5 == 0:  # otherwise the interruption itself is on record
        assert resumed.history == whole.history
        for mine, theirs in zip(resumed.windows, whole.windows, strict=True):
            assert torch.equal(mine, theirs)


def test_looking_does_not_change_the_run(system):
    ends = [
        run_to(system, 30, record_every=every)[1].particles.positions
        for every in (1, 7, 30)
    ]
    for end in ends[1:]:
        assert torch.equal(end, ends[0])


def test_settled_stops_without_noise(system):
    energy, particles, _ = system
    sampler = ProjectedLangevin(0.5, math.inf, Ball(3.0))
    for distance in DISTANCES:
        run = init_run(sampler, particles, generator=torch.Generator())
        rule = Settled(tol=1e-6, distance=distance)
        loop.run(run, sampler, energy, RunSettings(20_000, stop=[rule]))
        assert run.reason is StopReason.SETTLED
        assert run.state.step < 20_000


def test_tolerance_zero_runs_all_steps(system):
    _, run = run_to(system, 30, stop=[Settled(tol=0.0)])
    assert run.reason is StopReason.MAX_STEPS
    assert run.state.step == 30


def test_held_out_alignment_stops_when_it_no_longer_improves(system):
    energy, _, held_out = system
    _, run = run_to(
        system,
        5000,
        held_out=energy.objective.on(held_out),
        stop=[HeldOut(patience=5)],
    )
    assert run.reason is StopReason.HELD_OUT
    scores = [record["held_out"] for record in run.history]
    assert max(scores[-5:]) <= max(scores[:-5])


def test_callbacks_see_the_run_and_can_stop_it(system):
    seen = []

    def watch(run):
        seen.append(run.state.step)
        return run.state.step >= 20

    _, run = run_to(system, 100, callbacks=[watch])
    assert seen == [10, 20]
    assert run.reason is StopReason.CALLBACK


def test_progress_is_silent_where_nobody_watches(system, capsys):
    run_to(system, 20, progress=None)
    run_to(system, 20, progress=False)
    assert capsys.readouterr() == ("", "")
    run_to(system, 20, progress=True)
    assert "moving particles" in capsys.readouterr().err


def test_divergence_is_an_error_with_a_way_out(system):
    _, particles, _ = system
    steep = Hamiltonian(GaussianPrior(1e-6, 1.0))
    sampler = ProjectedLangevin(1e300, math.inf)
    run = init_run(sampler, particles, generator=torch.Generator())
    with pytest.raises(DivergedError, match="smaller `step_size`"):
        loop.run(run, sampler, steep, RunSettings(50))


class TestDistances:
    def test_known_values(self, generator):
        cloud = torch.randn(200, 3, generator=generator)
        shift = torch.tensor([3.0, 0.0, 4.0])
        assert max_displacement(cloud, cloud + shift) == pytest.approx(5)
        # Slices see the shift's projection: 5 / sqrt(3) on average over directions,
        # with 64 directions to within a few per cent.
        assert sliced_wasserstein(cloud, cloud + shift) == pytest.approx(2.887, rel=0.2)
        assert energy_distance(cloud, cloud) == pytest.approx(0, abs=1e-6)

    @pytest.mark.parametrize("name", ["sliced-wasserstein", "energy-distance"])
    def test_order_of_particles_does_not_matter(self, name, generator):
        cloud = torch.randn(50, 2, generator=generator)
        shuffled = cloud[torch.randperm(50, generator=generator)]
        assert DISTANCES[name](cloud, shuffled) == pytest.approx(0, abs=1e-6)
        assert DISTANCES[name](cloud, shuffled + 1) > 0.5


class TestFiles:
    def test_damaged_files_are_refused(self, system, tmp_path):
        path = tmp_path / "run.safetensors"
        _, run = run_to(system, 5)
        save_run(run, path)
        whole = path.read_bytes()
        for content in (b"", b"not a run", whole[: len(whole) // 2]):
            path.write_bytes(content)
            with pytest.raises(FileFormatError, match="is not a saved run"):
                load_run(path)

    def test_other_safetensors_files_are_refused(self, tmp_path):
        from safetensors.torch import save_file

        save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
        with pytest.raises(FileFormatError, match="format is not 'coulomb-run-1'"):
            load_run(tmp_path / "other.safetensors")

    def test_an_unwritable_place_leaves_nothing(self, system, tmp_path):
        _, run = run_to(system, 5)
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(OSError):
            save_run(run, tmp_path / "file" / "run.safetensors")
        assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_messages():
    assert set(stop_rules) == {"settled", "held-out"}
    with pytest.raises(ParameterError, match="`max_steps` must be at least 0; got -1"):
        RunSettings(max_steps=-1)
    with pytest.raises(ParameterError, match="`distance` must be one of"):
        Settled(tol=1.0, distance="wasserstein")
    with pytest.raises(ParameterError, match="`patience` must be at least 1"):
        HeldOut(patience=0)


def test_old_names_still_work(system):
    sampler = ProjectedLangevin(0.5, 50.0)
    with pytest.warns(DeprecationWarning, match="now called `init_run`"):
        begun = loop.start(sampler, system[1], generator=torch.Generator())
    with pytest.warns(DeprecationWarning, match="now called `run`"):
        ended = loop.proceed(begun, sampler, system[0], RunSettings(3))
    assert ended.state.step == 3
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = loop.nothing


def test_recorded_energies_are_the_hamiltonian_s(system):
    """The compiled loop hands over what it evaluated; it must be of the same place."""
    energy, particles, _ = system
    ends = {}
    for compiled in (True, False):
        sampler = ProjectedLangevin(0.5, 50.0, Ball(3.0), compiled=compiled)
        begun = init_run(sampler, particles, generator=torch.Generator().manual_seed(7))
        ends[compiled] = loop.run(begun, sampler, energy, RunSettings(20))
        terms = energy.terms(ends[compiled].particles)
        record = ends[compiled].history[-1]
        assert record["energy"] == pytest.approx(float(terms.total), rel=1e-12)
        assert record["repulsion"] == pytest.approx(float(terms.repulsion), rel=1e-12)
    assert ends[True].state.evaluated is not None
    assert ends[False].state.evaluated is None


def test_what_was_evaluated_elsewhere_is_not_used(system):
    """Other particles, or another energy, are evaluated anew."""
    energy, particles, _ = system
    other = Hamiltonian(energy.objective, Riesz(0.0), 0.5)
    sampler = ProjectedLangevin(0.5, math.inf, Ball(3.0))
    generator = torch.Generator()
    state, _ = sampler.advance(sampler.init(particles), energy, 3, generator=generator)
    for start, law in (
        (state._replace(particles=particles), energy),
        (state, other),
        (state, energy),
    ):
        expected = sampler.init(start.particles)
        assert torch.equal(
            *(
                sampler.advance(each, law, 2, generator=generator)[0].particles[0]
                for each in (start, expected)
            )
        )


@pytest.mark.parametrize("name", ["step", "window_count"])
@pytest.mark.parametrize("count", [-1, 1.5, True, "2", None])
def test_counters_of_a_file_are_checked(system, tmp_path, name, count):
    path = tmp_path / "run.safetensors"
    save_run(run_to(system, 2)[1], path)
    tensors, facts = read_archive(path, complaint="is damaged")
    write_archive(path, tensors, facts | {name: count})
    with pytest.raises(FileFormatError, match="a run cannot have made"):
        load_run(path)
