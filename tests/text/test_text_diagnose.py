"""Phase A of a run is judged from its folder, as it would have been on the spot."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from text_cases import (
    TINY,
    reviews,
    tagged,
    tiny_corpus,
    tiny_settings,
    tiny_vocabulary,
    write_csv,
)

from coulomb._support.errors import CoulombError
from coulomb.attention import align, diagnose
from coulomb.text import (
    TextClassifier,
    build_corpus,
    diagnose_run,
    preset,
    read_corpus,
    train,
    train_in_folder,
)
from coulomb.text.align import alignment_problem
from coulomb.text.run_folder import Store, read_tensors
from coulomb.text.setup import set_up

QUICK = {"n_twins": 3, "n_shuffles": 120}
# Smaller than the paper's model; its Phase A is literally the paper's.
SHORT = {"epochs": 1, "batch_size": 16, "width": 32, "ffn_width": 32, "n_features": 32}


@pytest.fixture(scope="module")
def corpus():
    return tiny_corpus(240)


@pytest.fixture(scope="module")
def vocabulary(corpus):
    return tiny_vocabulary(corpus)


@pytest.fixture(scope="module")
def late(tmp_path_factory, corpus, vocabulary):
    """A run whose Phase A came after an epoch of Phase B."""
    folder = tmp_path_factory.mktemp("runs") / "late"
    settings = tiny_settings(align_after=1, align_epochs=2.0, epochs=3)
    train_in_folder(folder, corpus, settings, vocabulary)
    return folder


@pytest.fixture
def copy(late, tmp_path):
    """The same, to be damaged."""
    return shutil.copytree(late, tmp_path / "copy")


def snapshot(folder):
    return {
        path.name: (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.iterdir()
    }


def aligned(corpus, settings, vocabulary):
    """Phase A on the spot, where it begins with what was drawn."""
    setup = set_up(corpus, settings, vocabulary)
    return align(setup.model, **alignment_problem(setup), progress=False)


def test_a_drift_without_the_factor_n_does_not_learn(tmp_path, corpus, vocabulary):
    settings = preset("paper-plain", SHORT)
    train_in_folder(tmp_path / "run", corpus, settings, vocabulary)
    found = diagnose_run(tmp_path / "run", corpus=corpus, **QUICK)
    assert not found.learned
    assert found.verdict.startswith("Phase A did not learn: its drift is drowned by")
    assert "its objective hardly sees the labels (gradient cosine 0.9" in found.verdict
    assert float(found.drift_to_noise.max()) < 0.02
    assert float(found.cosines.mean()) > 0.9
    torch.testing.assert_close(found.moved, found.moved_by_noise, rtol=0.05, atol=0)


def test_a_run_that_learned(tmp_path, vocabulary):
    """What the paper lacks: an objective that sees labels, more drift, less noise."""
    corpus = tiny_corpus(1000)
    changes = {
        "align_after": 1,
        "align_objective": "centred",
        "align_drift": "N",
        "align_step_size": 0.3,
        "align_inverse_temperature": 1e5,
        "align_clip": 1.0,
        "align_radius": "inf",
        "start_norm": 1.5,
        "batch_size": 32,
        "epochs": 2,
        "lr": 1e-3,
    }
    settings = preset("paper-main", TINY | changes)
    train_in_folder(tmp_path / "run", corpus, settings, vocabulary)
    found = diagnose_run(tmp_path / "run", corpus=corpus, n_twins=5, n_label_twins=3)
    assert found.learned
    assert found.verdict.startswith("Phase A learned: held-out alignment (centred)")


def test_a_folder_tells_what_was_to_be_told_on_the_spot(tmp_path, corpus, vocabulary):
    settings = tiny_settings(align_after=0)
    train_in_folder(tmp_path / "run", corpus, settings, vocabulary)
    found = diagnose_run(tmp_path / "run", corpus=corpus, **QUICK)
    told = diagnose(aligned(corpus, settings, vocabulary), **QUICK)
    assert found.record() == told.record()


def test_a_late_phase_a_is_judged_with_the_weights_it_had(late, corpus, vocabulary):
    """Those of the last checkpoint before it, not the drawn ones."""
    seen = {}

    class Watching(Store):
        def save(self, checkpoint):
            if not checkpoint.facts["aligned"]:
                prefix = "model."
                seen.update(
                    (name.removeprefix(prefix), value.clone())
                    for name, value in checkpoint.tensors.items()
                    if name.startswith(prefix)
                )
            super().save(checkpoint)

    settings = tiny_settings(align_after=1, align_epochs=2.0, epochs=3)
    folder = late.with_name("watched")
    folder.mkdir()
    train(corpus, settings, vocabulary, store=Watching(folder))
    kept = load_file(late / "start.safetensors")
    assert kept.keys() == seen.keys()
    for name, value in kept.items():
        assert torch.equal(value, seen[name]), name
    drawn = set_up(corpus, settings, vocabulary).model.state_dict()
    assert not torch.equal(kept["head.weight"], drawn["head.weight"])
    found = diagnose_run(late, corpus=corpus, **QUICK)
    history = json.loads(read_about(late)["coulomb"])["history"]
    # The library's objective is normalised, so it is what the run itself recorded.
    assert found.before == pytest.approx(history[0]["held_out"], rel=1e-4)
    assert found.after == pytest.approx(history[-1]["held_out"], rel=1e-4)
    assert found.steps == history[-1]["step"]


def read_about(folder):
    from safetensors import safe_open

    with safe_open(folder / "particles.safetensors", framework="pt") as file:
        return file.metadata()


def test_groups_have_the_names_of_their_layers(late, corpus):
    found = diagnose_run(late, corpus=corpus, **QUICK)
    assert found.layers == ("layers.0.attention", "layers.1.attention")
    assert found.drift_to_noise.shape == (2, 2)
    json.dumps(found.record(), allow_nan=False)


def test_runs_on_shuffled_labels(late, corpus):
    found = diagnose_run(late, corpus=corpus, n_label_twins=2, **QUICK)
    assert len(found.label_twins) == 2
    assert "trained on shuffled labels" in found.verdict


def test_nothing_in_the_folder_is_changed(late, corpus):
    before = snapshot(late)
    records = [diagnose_run(late, corpus=corpus, **QUICK).record() for _ in range(2)]
    assert records[0] == records[1]
    assert snapshot(late) == before


def test_phase_b_need_not_be_over(copy, late, corpus):
    for name in ("metrics.json", "weights.safetensors", "checkpoint.safetensors"):
        (copy / name).unlink()
    mine, theirs = (diagnose_run(f, corpus=corpus, **QUICK) for f in (copy, late))
    assert mine.record() == theirs.record()


def test_taggers(tmp_path, vocabulary):
    corpus = build_corpus("tags", tagged(), validation_share=0.2)
    train_in_folder(tmp_path / "run", corpus, tiny_settings(), vocabulary)
    found = diagnose_run(tmp_path / "run", corpus=corpus, **QUICK)
    assert found.moved.isfinite().all()


def test_a_phase_a_without_steps(tmp_path, corpus, vocabulary):
    settings = tiny_settings(align_epochs=0.0)
    train_in_folder(tmp_path / "run", corpus, settings, vocabulary)
    found = diagnose_run(tmp_path / "run", corpus=corpus, **QUICK)
    assert found.verdict.startswith("Phase A did not learn: it made no steps")


def test_a_phase_a_without_noise(tmp_path, corpus, vocabulary):
    """Its drift is infinitely larger; a file says null."""
    settings = tiny_settings(align_inverse_temperature="inf")
    train_in_folder(tmp_path / "run", corpus, settings, vocabulary)
    found = diagnose_run(tmp_path / "run", corpus=corpus, **QUICK)
    assert found.record()["drift_to_noise"] == [[None] * 2] * 2
    json.dumps(found.record(), allow_nan=False)


def test_particles_and_other_parameters(tmp_path, corpus, vocabulary):
    settings = tiny_settings(align_also="norm")
    train_in_folder(tmp_path / "run", corpus, settings, vocabulary)
    diagnose_run(tmp_path / "run", corpus=corpus, **QUICK)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("softmax", "which has none. Train with `--attention kernel-softmaxfeat`"),
        ("vanilla-elu", "which has none. Train with `--attention kernel-elu`"),
        ("noise-cos2", "without labels. Train with `--attention kernel-cos2`"),
        ("control-elu", "is a control, without labels"),
    ],
)
def test_rows_without_phase_a(row, message, copy):
    path = copy / "config.json"
    values = json.loads(path.read_text())
    values["settings"]["attention"] = row
    path.write_text(json.dumps(values))
    with pytest.raises(CoulombError, match=message):
        diagnose_run(copy)


def test_controls_keep_no_start(tmp_path, corpus, vocabulary):
    settings = tiny_settings(attention="noise-elu")
    train_in_folder(tmp_path / "run", corpus, settings, vocabulary)
    assert not (tmp_path / "run" / "start.safetensors").exists()


def test_no_run_there(tmp_path):
    with pytest.raises(CoulombError, match=r"must be a folder with a config.json"):
        diagnose_run(tmp_path)


def test_a_saved_classifier_has_no_phase_a_to_look_at(tmp_path):
    texts, labels = reviews(60)
    model = TextClassifier(settings=TINY | {"epochs": 2}, random_state=0)
    model.fit(texts, labels).save(tmp_path / "saved")
    with pytest.raises(CoulombError, match="keeps its weights alone: use `coulomb tra"):
        diagnose_run(tmp_path / "saved")


def test_a_phase_a_that_is_not_over(copy, corpus):
    about = read_about(copy)
    values = json.loads(about["coulomb"]) | {"reason": None}
    tensors = load_file(copy / "particles.safetensors")
    metadata = {"coulomb": json.dumps(values)}
    save_file(tensors, copy / "particles.safetensors", metadata=metadata)
    (copy / "metrics.json").unlink()
    with pytest.raises(CoulombError, match=r"over with Phase A.*--resume .*copy"):
        diagnose_run(copy, corpus=corpus)


@pytest.mark.parametrize("name", ["particles", "start"])
@pytest.mark.parametrize("keep", [0, 100, 3000])
def test_files_that_were_cut_short(name, keep, copy, corpus):
    path = copy / f"{name}.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    before = snapshot(copy)
    with pytest.raises(CoulombError, match=rf"{path.name} is (damaged|not a saved)"):
        diagnose_run(copy, corpus=corpus)
    assert snapshot(copy) == before


@pytest.mark.parametrize("name", ["start.safetensors", "vocabulary.json"])
def test_files_that_are_missing(name, copy, corpus):
    (copy / name).unlink()
    with pytest.raises(CoulombError, match=rf"{name} is missing. Train the run again"):
        diagnose_run(copy, corpus=corpus)


def change_tensors(path, change):
    tensors, _ = read_tensors(path)
    metadata = read_about(path.parent) if path.name.startswith("particles") else None
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def test_particles_without_an_account(copy, corpus):
    path = copy / "particles.safetensors"
    change_tensors(path, lambda tensors: tensors.pop("align.drift"))
    with pytest.raises(
        CoulombError, match=r"damaged run: .align\.drift. must have the shape"
    ):
        diagnose_run(copy, corpus=corpus)


def test_particles_of_another_shape(copy, corpus):
    def cut(tensors):
        for name in ("positions", "align.start", "align.drift"):
            tensors[name] = tensors[name][:, :, :-1].contiguous()

    change_tensors(copy / "particles.safetensors", cut)
    with pytest.raises(CoulombError, match=r"does not fit config.json"):
        diagnose_run(copy, corpus=corpus)


def test_weights_of_another_moment_are_noticed(copy, corpus, vocabulary):
    """The drawn weights, which Phase A did not begin with."""
    config = json.loads((copy / "config.json").read_text())["settings"]
    drawn = set_up(corpus, tiny_settings(**config), vocabulary).model.state_dict()
    save_file(dict(drawn), copy / "start.safetensors")
    with pytest.raises(CoulombError, match="does not give its own Phase A again"):
        diagnose_run(copy, corpus=corpus)


def test_data_that_is_elsewhere(tmp_path, vocabulary):
    data = write_csv(tmp_path / "reviews.csv", *reviews(160))
    corpus = read_corpus(data, text=["review"], label="sentiment")
    source = {"train": str(data), "text": ["review"], "label": "sentiment"}
    run = tmp_path / "run"
    train_in_folder(run, corpus, tiny_settings(), vocabulary, data=source)
    found = diagnose_run(run, **QUICK)
    assert found.record() == diagnose_run(run, corpus=corpus, **QUICK).record()
    data.rename(tmp_path / "elsewhere.csv")
    with pytest.raises(CoulombError, match=r"needs its data again.*reviews.csv"):
        diagnose_run(run)
    write_csv(data, *reviews(158))
    with pytest.raises(CoulombError, match="has changed since the run began"):
        diagnose_run(run)


def test_data_that_was_in_memory(late):
    with pytest.raises(CoulombError, match=r"on data in memory. Pass it in Python"):
        diagnose_run(late)


def test_one_batch_leaves_none_to_judge_by(tmp_path, corpus, vocabulary):
    settings = tiny_settings(batch_size=512)
    train_in_folder(tmp_path / "run", corpus, settings, vocabulary)
    with pytest.raises(CoulombError, match="at least two batches"):
        diagnose_run(tmp_path / "run", corpus=corpus)
