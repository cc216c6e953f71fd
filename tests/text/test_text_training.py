"""Both phases: what is learned, what repeats, what controls do."""

import math
import random

import pytest
import torch
from text_cases import (
    reviews,
    tagged,
    tiny_corpus,
    tiny_settings,
    tiny_vocabulary,
)

from coulomb._support.errors import CoulombError
from coulomb.attention.align.problem import build_problem
from coulomb.attention.encoder.layout import padded_logits
from coulomb.features import Particles
from coulomb.text import VARIANTS, Split, build_corpus, train, train_vocabulary
from coulomb.text.align import (
    alignment_batches,
    alignment_features,
    alignment_settings,
    run_phase_a,
    window_start,
)
from coulomb.text.evaluate import log_probabilities, score_split, tag_words
from coulomb.text.setup import set_up
from coulomb.text.tokens import encode_split


@pytest.fixture(scope="module")
def corpus():
    return tiny_corpus()


@pytest.fixture(scope="module")
def vocabulary(corpus):
    return tiny_vocabulary(corpus)


def train_tiny(corpus, vocabulary, **changes):
    return train(corpus, tiny_settings(**changes), vocabulary, progress=False)


def test_it_learns(corpus, vocabulary):
    trained = train_tiny(corpus, vocabulary, epochs=12, lr=5e-3)
    assert trained.metrics["metrics"]["accuracy"] >= 0.9
    losses = [row["loss"] for row in trained.history if row["phase"] == "B"]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_row_trains(name, corpus, vocabulary):
    trained = train_tiny(corpus, vocabulary, attention=name, epochs=2)
    phases = [row["phase"] for row in trained.history]
    assert ("A" in phases) == (VARIANTS[name].phase_a == "align" or "control" in name)
    assert phases.count("B") == 2
    assert trained.metrics["alignment"].get("kind", "none") == VARIANTS[name].phase_a


def test_a_seed_decides_everything(corpus, vocabulary):
    runs = [train_tiny(corpus, vocabulary, seed=seed).weights for seed in (1, 1, 2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert not all(torch.equal(runs[0][name], runs[2][name]) for name in runs[0])


def test_the_best_epoch_is_the_earliest_of_the_best(corpus, vocabulary):
    trained = train_tiny(corpus, vocabulary, epochs=6, lr=5e-3, align_after=0)
    rows = [row for row in trained.history if row["phase"] == "B"]
    accuracies = [row["validation_accuracy"] for row in rows]
    assert trained.metrics["best_epoch"] == 1 + accuracies.index(max(accuracies))
    assert trained.metrics["chosen_by"]["validation"] == max(accuracies)
    # Metrics are those of the weights that are kept.
    assert trained.metrics["metrics"]["accuracy"] == max(accuracies)


def test_an_epoch_before_phase_a_is_never_the_best(corpus, vocabulary):
    trained = train_tiny(corpus, vocabulary, epochs=3, align_after=2)
    assert trained.metrics["best_epoch"] == 3


def test_phase_a_interrupts_phase_b_where_it_is_asked_to(corpus, vocabulary):
    trained = train_tiny(corpus, vocabulary, epochs=3, align_after=1)
    phases = "".join(row["phase"] for row in trained.history)
    assert phases.startswith("BA")
    assert phases.endswith("ABB")


def test_rows_share_their_draws_until_phase_a(corpus, vocabulary):
    """A Kernel row is paired with its Vanilla row: same start, batches, dropout."""
    pair = [
        train_tiny(corpus, vocabulary, attention=name, epochs=2, align_after=1)
        for name in ("vanilla-softmaxfeat", "kernel-softmaxfeat")
    ]
    first = [
        next(row for row in trained.history if row["phase"] == "B") for trained in pair
    ]
    assert first[0]["loss"] == first[1]["loss"]


def test_more_epochs_for_few_texts(corpus, vocabulary):
    trained = train_tiny(corpus, vocabulary, epochs=2, min_steps=20)
    last = trained.history[-1]
    assert (last["epoch"], last["step"]) == (4, 24)


def test_phase_b_leaves_the_particles(corpus, vocabulary):
    name = "layers.0.attention.particles"
    settings = tiny_settings(attention="vanilla-softplus")
    start = set_up(corpus, settings, vocabulary).model.state_dict()[name].clone()
    trained = train(corpus, settings, vocabulary, progress=False)
    assert torch.equal(trained.weights[name], start)


@pytest.mark.parametrize("radius", [1.0, math.inf])
def test_controls_have_the_norms_and_not_the_alignment(radius, corpus, vocabulary):
    """Norms of the aligned particles (or of the projected start), directions of the
    start, whatever the labels say."""
    changes = {"align_radius": radius, "start_norm": 2.0, "align_epochs": 2.0}
    found = {}
    for kind in ("vanilla", "kernel", "control", "noise"):
        settings = tiny_settings(attention=f"{kind}-softmaxfeat", **changes)
        setup = set_up(corpus, settings, vocabulary)
        run_phase_a(setup, None, lambda record: None)
        found[kind] = setup.model.layers[0].attention.particles.detach().clone()
    start = found["vanilla"]
    cosine = torch.cosine_similarity(found["control"], start, dim=-1)
    assert float(cosine.min()) > 1 - 1e-5
    norms = found["control"].norm(dim=-1)
    if math.isinf(radius):
        assert torch.allclose(norms, found["kernel"].norm(dim=-1), rtol=1e-4)
    else:
        assert torch.allclose(norms, start.norm(dim=-1).clamp_max(radius), rtol=1e-4)
    assert not torch.allclose(found["noise"], found["kernel"], atol=1e-3)
    assert not torch.allclose(found["kernel"], start, atol=1e-3)


def test_placed_particles_look_at_windows_of_positions(corpus, vocabulary):
    settings = tiny_settings(attention="placed-softmaxfeat", start_norm=2.0)
    setup = set_up(corpus, settings, vocabulary)
    drawn = setup.model.layers[1].attention.particles.detach().clone()
    windows = window_start(setup)
    assert torch.equal(setup.model.layers[1].attention.particles, drawn)
    run_phase_a(setup, None, lambda record: None)
    found = setup.model.layers[1].attention.particles
    assert torch.equal(found, windows[1])
    norms = found.norm(dim=-1)
    torch.testing.assert_close(norms, norms.mean().expand_as(norms))
    with pytest.raises(CoulombError, match="`positions` must be 'learned'"):
        train_tiny(corpus, vocabulary, attention="placed-cos2", positions="none")


def neighbours(n=240):
    """Words whose tag is said by a word next to them."""
    draw = random.Random(0)
    texts, tags = [], []
    for _ in range(n):
        words = draw.choices(["left", "film", "plot", "cast", "story", "actor"], k=12)
        said = [word == "left" for word in words]
        texts.append(words)
        near = [any(said[max(0, i - 1) : i + 2]) for i in range(12)]
        tags.append(["B-X" if each else "O" for each in near])
    return texts, tags


def test_tags_begin_at_windows():
    corpus = build_corpus("neighbours", neighbours(), validation_share=0.2)
    vocabulary = train_vocabulary(corpus.split("train").texts, size=60)
    settings = tiny_settings(
        n_features=16,
        width=32,
        align_after=0,
        align_start="windows",
        align_epochs=0.0,
        batch_size=8,
    )
    setup = set_up(corpus, settings, vocabulary)
    windows = window_start(setup)
    facts = run_phase_a(setup, None, lambda record: None)
    assert facts["begun"] == "windows"
    assert facts["steps"] == 0
    assert torch.equal(setup.model.layers[0].attention.particles, windows[0])
    assert facts["summary"].startswith("Particles began at windows of positions.")


def test_tags_without_positions_keep_drawn_particles():
    corpus = build_corpus("names", tagged(40), validation_share=0.2)
    vocabulary = train_vocabulary(corpus.split("train").texts, size=60)
    options = {"positions": "none", "align_start": "windows", "align_epochs": 0.0}
    setup = set_up(corpus, tiny_settings(**options), vocabulary)
    assert run_phase_a(setup, None, lambda record: None)["begun"] == "drawn"


def test_pooled_texts_keep_drawn_particles():
    """With the default Phase A the row is its vanilla row, bit for bit."""
    corpus = build_corpus("some", reviews(80), validation_share=0.25)
    vocabulary = train_vocabulary(corpus.split("train").texts, size=150)
    options = {"align_after": 0, "align_start": "windows", "align_epochs": 0.0}
    runs = {
        row: train_tiny(corpus, vocabulary, attention=f"{row}-cos2", **options)
        for row in ("kernel", "vanilla")
    }
    facts = runs["kernel"].metrics["alignment"]
    assert facts["begun"] == "drawn"
    assert "where they were: it was asked for no steps" in facts["summary"]
    kernel, vanilla = (run.weights for run in runs.values())
    assert all(torch.equal(kernel[name], vanilla[name]) for name in vanilla)


@pytest.mark.parametrize("tagging", [False, True])
def test_the_likelihood_of_packed_texts_is_that_of_padded_ones(tagging):
    """What Phase A sees of packed batches, against logits of padded batches."""
    rows = tagged(20) if tagging else reviews(20)
    corpus = build_corpus("some", rows, validation_share=0.25)
    vocabulary = train_vocabulary(corpus.split("train").texts, size=150)
    settings = tiny_settings(
        align_objective="likelihood",
        align_sampler="adam",
        align_inverse_temperature=math.inf,
        align_step_size=0.01,
    )
    setup = set_up(corpus, settings, vocabulary)
    batches = alignment_batches(setup.rows["train"], 5, seed=0)
    chosen = alignment_settings(settings, corpus.kind)
    problem = build_problem(
        setup.model,
        batches,
        chosen,
        evaluate=alignment_features(settings, corpus.kind),
        held_out=None,
    )
    setup.model.eval()
    layers = problem.network.layers
    for number, (batch, _) in enumerate(batches[:2]):
        logits = padded_logits(setup.model, batch)
        loss = torch.nn.functional.cross_entropy(logits, batch.labels)
        found = problem.objective.score_batch(
            Particles(layers.read(setup.model)), number
        )
        torch.testing.assert_close(-found, loss, atol=1e-5, rtol=1e-4)
    facts = run_phase_a(setup, None, lambda record: None)
    assert facts["steps"] > 0
    assert facts["after"]["alignment"] > facts["before"]["alignment"]


def test_phase_a_uses_the_labels_of_texts_once_each(corpus, vocabulary):
    rows = encode_split(
        vocabulary, corpus.split("train"), kind="sequence", max_length=24
    )
    batches = alignment_batches(rows, 16, seed=0)
    assert sum(len(labels) for _, labels in batches) == len(rows)
    assert sum(len(batch.token_ids) for batch, _ in batches) == len(rows.token_ids)


def test_rare_tokens_are_all_the_unknown_one(corpus, vocabulary):
    """A token that training does not know has the row of the unknown token, in the
    weights too, so that prediction needs no list of tokens."""
    settings = tiny_settings(rare_tokens=2)
    setup = set_up(corpus, settings, vocabulary)
    table = setup.whole()["token_embedding.weight"]
    unseen = [i for i in range(vocabulary.size) if i not in setup.kept.tolist()]
    assert unseen
    assert torch.equal(table[unseen], table[vocabulary.unknown].expand(len(unseen), -1))
    # The trimmed model and the whole one say the same.
    setup.full.load_state_dict(setup.whole())
    split = corpus.split("validation")
    raw = encode_split(vocabulary, split, kind="sequence", max_length=24)
    trimmed = log_probabilities(setup.model, setup.rows["validation"])
    assert torch.allclose(log_probabilities(setup.full, raw), trimmed, atol=1e-6)


def test_every_token_stays_itself_without_rare_tokens(corpus, vocabulary):
    setup = set_up(corpus, tiny_settings(rare_tokens=0), vocabulary)
    before = setup.full.state_dict()["token_embedding.weight"].clone()
    assert torch.equal(setup.whole()["token_embedding.weight"], before)


def test_scores_do_not_depend_on_company(corpus, vocabulary):
    """Sorted, packed and evaluated together, a text is scored as when it is alone."""
    setup = set_up(corpus, tiny_settings(), vocabulary)
    rows = setup.rows["validation"]
    together = log_probabilities(setup.model, rows)
    setup.model.eval()
    for number in (0, 7, 11):
        with torch.no_grad():
            alone = padded_logits(setup.model, rows.batch(torch.tensor([number])))
        assert torch.allclose(alone.log_softmax(-1)[0], together[number], atol=1e-5)


def test_tagging_end_to_end():
    corpus = build_corpus("names", tagged(80), validation_share=0.25)
    vocabulary = train_vocabulary(corpus.split("train").texts, size=150)
    trained = train_tiny(corpus, vocabulary, epochs=10, lr=5e-3)
    found = trained.metrics["metrics"]
    assert found["entity_f1"] > 0.9
    assert set(found["entity_f1_by_type"]) == {"PER"}
    rows = [row for row in trained.history if row["phase"] == "B"]
    assert trained.metrics["chosen_by"]["validation"] == max(
        row["validation_entity_f1"] for row in rows
    )


def test_tags_that_mark_no_entities_are_scored_by_words():
    """By entities every tag of one word would be right."""
    texts, tags = tagged(80)
    plain = [["NAME" if tag != "O" else "OTHER" for tag in row] for row in tags]
    corpus = build_corpus("kinds", (texts, plain), validation_share=0.25)
    vocabulary = train_vocabulary(corpus.split("train").texts, size=150)
    trained = train_tiny(corpus, vocabulary, epochs=10, lr=5e-3)
    found = trained.metrics["metrics"]
    assert found["accuracy"] > 0.95
    assert "entity_f1" not in found
    rows = [row for row in trained.history if row["phase"] == "B"]
    assert rows[0]["validation_accuracy"] < 1
    assert trained.metrics["chosen_by"]["validation"] == max(
        row["validation_accuracy"] for row in rows
    )


def test_words_that_were_cut_off_count_as_outside():
    """The score of a tagger is over all words of the data, not over those it saw."""
    corpus = build_corpus("names", tagged(40), validation_share=0.25)
    vocabulary = train_vocabulary(corpus.split("train").texts, size=150)
    settings = tiny_settings(max_length=4)
    setup = set_up(corpus, settings, vocabulary)
    split = corpus.split("validation")
    rows = setup.rows["validation"]
    scores = log_probabilities(setup.model, rows)
    tags = tag_words(rows, scores, corpus.classes)
    assert [len(row) for row in tags] == [6] * len(split)
    found = score_split(setup.model, rows, split, corpus.classes)
    assert found["entities"] == len(split)


def test_pairs_train():
    texts, labels = reviews(80)
    pairs = [(text, "and a film") for text in texts]
    corpus = build_corpus("pairs", (pairs, labels), validation_share=0.2)
    vocabulary = train_vocabulary(pairs, size=150)
    assert train_tiny(corpus, vocabulary).metrics["rows"] == 16


def test_a_loss_that_explodes_is_told(corpus, vocabulary):
    with pytest.raises(CoulombError, match="smaller `lr`"):
        train_tiny(corpus, vocabulary, lr=1e30, warm_up_share=0.0, attention="softmax")


def test_tensorboard_logs(tmp_path, corpus, vocabulary):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing import event_accumulator

    settings = tiny_settings()
    train(corpus, settings, vocabulary, progress=False, log_dir=tmp_path)
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    names = events.Tags()["scalars"]
    assert {"loss", "validation/accuracy", "phase_a/alignment"} <= set(names)
    assert len(events.Scalars("validation/accuracy")) == 3


def test_splits_without_labels_can_be_encoded(corpus, vocabulary):
    rows = encode_split(vocabulary, Split(["a film"]), kind="sequence", max_length=8)
    assert rows.batch(torch.tensor([0])).labels is None
