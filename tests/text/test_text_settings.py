"""Settings, presets, TOML, and the rows of the paper's tables."""

import copy
import json
import math
import pickle
from dataclasses import replace

import pytest
import torch
from text_cases import tiny_settings

from coulomb._support.errors import CoulombError
from coulomb.text import PAPER_ROWS, PRESETS, VARIANTS, TextSettings, preset
from coulomb.text.settings import GROUPS, SETTINGS, read_toml, to_toml
from coulomb.text.setup import build_model
from coulomb.text.training import learning_rate


def test_settings_have_no_defaults():
    """So that a preset states everything, and inherits nothing."""
    with pytest.raises(CoulombError, match=r"missing: attention, .*, seed"):
        TextSettings()
    assert len(SETTINGS) == 51
    for record in GROUPS.values():
        with pytest.raises(TypeError, match="missing"):
            record()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name):
    chosen = preset(name)
    text = json.dumps(chosen.plain(), allow_nan=False)
    assert TextSettings.from_plain(json.loads(text)) == chosen


def test_the_papers_constants():
    for name in ("paper-main", "paper-supplement"):
        chosen = preset(name)
        assert (chosen.n_layers, chosen.width, chosen.n_heads) == (2, 128, 2)
        assert (chosen.ffn_width, chosen.dropout, chosen.n_features) == (256, 0.1, 256)
        assert (chosen.max_length, chosen.batch_size, chosen.epochs) == (128, 64, 10)
        assert chosen.align_step_size == 2e-3
        assert chosen.align_inverse_temperature == 50
        assert (chosen.align_strength, chosen.align_clip) == (1e-3, 10)
        assert chosen.align_radius == 1.5
        assert (chosen.align_start, chosen.align_sampler) == ("drawn", "langevin")
        assert chosen.align_drift == "N"  # eta N grad H in both of its algorithms
    plain = preset("paper-supplement", {"align_drift": "plain"})
    assert preset("paper-plain") == plain
    main, supplement = preset("paper-main"), preset("paper-supplement")
    assert (supplement.optimiser, supplement.lr) == ("adam", 2e-4)
    assert supplement.align_epochs == 10
    assert (main.optimiser, main.schedule) == ("adamw", "cosine")
    share = main.align_epochs / (main.align_epochs + main.epochs)
    assert share == pytest.approx(0.2)


def test_unknown_keys_are_refused_with_the_nearest():
    with pytest.raises(CoulombError, match="did you mean 'dropout'"):
        preset("default", {"droput": 0.2})
    with pytest.raises(CoulombError, match="did you mean 'default'"):
        preset("defualt")
    with pytest.raises(CoulombError, match="did you mean 'kernel-softplus'"):
        preset("default", {"attention": "kernel-sofplus"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("epochs", 2.5),
        ("lr", -1.0),
        ("lr", "fast"),
        ("dropout", 1.0),
        ("lower_case", 1),
        ("seed", True),
        ("norm", "middle"),
        ("width", 127),
        ("max_length", 2),
        ("weight_decay", 0.1),
        ("align_after", 10),
        ("align_radius", 0.0),
        ("align_start", "anywhere"),
        ("align_shifts", "left,right"),
        ("align_sampler", "rmsprop"),
        ("average_epochs", -0.5),
    ],
)
def test_values_that_break_a_rule_are_refused(name, value):
    with pytest.raises(CoulombError, match=f"`{name}`"):
        preset("default", {name: value})


def test_missing_settings_are_named():
    values = preset("default").plain()
    del values["lr"]
    with pytest.raises(CoulombError, match="missing: lr"):
        TextSettings.from_plain(values)


def test_settings_of_earlier_versions_mean_what_they_meant():
    values = preset("paper-main").plain()
    for name in ("align_start", "align_shifts", "align_sampler", "average_epochs"):
        del values[name]
    assert TextSettings.from_plain(values) == preset("paper-main")


def test_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('preset = "paper-main"\nlr = 1e-3\nalign_radius = inf\n')
    name, values = read_toml(path)
    chosen = preset(name, values)
    assert chosen.lr == 1e-3
    assert math.isinf(chosen.align_radius)
    path.write_text("lrr = 1\n")
    with pytest.raises(CoulombError, match=r"run.toml.*did you mean 'lr'"):
        read_toml(path)
    path.write_text("lr = \n")
    with pytest.raises(CoulombError, match="not TOML"):
        read_toml(path)
    for text, told in {
        f"{'.'.join('a' * 3000)} = 1\n": "a line has more than 4,096 characters",
        "# a\n" * 20_000: "80,000 bytes; at most 65,536",
        "seed = " + "[" * 4000: "not TOML",
    }.items():
        path.write_text(text)
        with pytest.raises(CoulombError, match=told):
            read_toml(path)
    path.write_text('preset = "paper"\n')
    with pytest.raises(CoulombError, match="`preset` has no member 'paper'"):
        read_toml(path)


def test_every_setting_says_what_it_is():
    for group, part in SETTINGS.values():
        assert part.metadata["help"]
        assert group in GROUPS


@pytest.mark.parametrize("name", PRESETS)
def test_settings_are_read_by_group_and_by_their_own_names(name):
    chosen = preset(name)
    for flat, (group, part) in SETTINGS.items():
        value = getattr(getattr(chosen, group), part.name)
        assert getattr(chosen, flat) == value
        assert chosen.plain()[flat] == ("inf" if value == math.inf else value)
    with pytest.raises(AttributeError, match="no setting 'lrr'"):
        _ = chosen.lrr


def test_settings_are_built_from_groups_and_single_names():
    """Own names win, whatever way the others are given."""
    main = preset("paper-main")
    wanted = main.changed({"lr": 1.0, "align_clip": 3})
    groups = {name: getattr(main, name) for name in GROUPS}
    assert TextSettings(**groups, lr=1.0, align_clip=3.0) == wanted
    assert TextSettings(**main.plain() | {"lr": 1.0, "align_clip": 3.0}) == wanted
    assert replace(main, lr=1, align_clip=3) == wanted
    faster = replace(main.train, lr=1.0)
    assert replace(main, train=faster, align_clip=3) == wanted
    assert main.changed({"train": faster, "align_clip": 3}) == wanted
    for copied in (copy.deepcopy(wanted), pickle.loads(pickle.dumps(wanted))):
        assert copied == wanted
        assert hash(copied) == hash(wanted)
    with pytest.raises(CoulombError, match="`settings` has no member 'train'"):
        main.changed({"train": {"lr": 1.0}})


def test_there_are_eighteen_rows_and_four_controls_of_every_map():
    assert len(PAPER_ROWS) == 18
    assert len(VARIANTS) == 18 + 4 * 7


@pytest.mark.parametrize("name", VARIANTS)
def test_every_row_builds_and_computes(name):
    settings = tiny_settings(attention=name)
    model = build_model(settings, vocab_size=20, n_classes=3, kind="sequence")
    again = build_model(settings, vocab_size=20, n_classes=3, kind="sequence")
    tokens = torch.arange(12).view(2, 6)
    model.eval()
    again.eval()
    with torch.no_grad():
        out = model(tokens)
        assert torch.equal(out, again(tokens))
    assert out.shape == (2, 3)


def test_particles_start_as_the_preset_says():
    """Norms of N(0, I) in 64 dimensions are about 8, and 1.5 by default."""
    for name, norm in (("paper-supplement", 8.0), ("default", 1.5)):
        chosen = preset(name, {"attention": "vanilla-softplus"})
        model = build_model(chosen, vocab_size=9, n_classes=2, kind="sequence")
        found = model.layers[0].attention.particles.norm(dim=-1)
        # the mean norm is sqrt(d - 1/2) / sqrt(d) of the root mean square
        assert float(found.mean()) == pytest.approx(norm, rel=0.02)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rates_rise_then_follow_the_schedule(schedule):
    chosen = preset("paper-main", {"schedule": schedule, "lr": 1.0}).train
    rates = [learning_rate(chosen, step, 1000) for step in range(1000)]
    assert rates[:100] == pytest.approx([(step + 1) / 100 for step in range(100)])
    assert rates[100] == pytest.approx(1.0)
    assert rates[549] == pytest.approx(1.0 if schedule == "constant" else 0.5, abs=2e-3)
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.0, abs=2e-3)


@pytest.mark.parametrize("name", list(PRESETS))
def test_settings_go_to_toml_and_back(name, tmp_path):
    changes = {"align_radius": math.inf, "align_shifts": "-1,1", "lower_case": False}
    settings = preset(name, changes)
    path = tmp_path / "settings.toml"
    path.write_text(to_toml(settings), encoding="utf-8")
    base, values = read_toml(path)
    assert base is None
    assert set(values) == set(SETTINGS)
    other = "default" if name != "default" else "pretrained"
    assert preset(other, values) == settings
