"""Vocabularies, and splits as rows of tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from text_cases import reviews, tagged, tiny_corpus, tiny_vocabulary

from coulomb._support.errors import CoulombError
from coulomb.attention.encoder.layout import IGNORED
from coulomb.text import Split, Vocabulary, build_corpus, read_vocabulary
from coulomb.text.tokens import encode_split, train_vocabulary


@pytest.fixture(scope="module")
def vocabulary():
    return tiny_vocabulary(tiny_corpus())


def test_texts_and_pairs_are_framed(vocabulary):
    (single,) = vocabulary.encode(["fine film"], 24)
    (pair,) = vocabulary.encode([("fine", "film")], 24)
    cls, end = vocabulary.cls, vocabulary.end
    assert [single[0], single[-1]] == [cls, end]
    assert (single == end).sum() == 1
    assert pair[0] == cls
    assert (pair == end).sum() == 2


def test_tokens_know_their_text_of_a_pair(vocabulary):
    pairs = [("a fine film", "a dull film"), ("a film", "")]
    found = vocabulary.encode_pairs(pairs, max_length=12)
    plain = vocabulary.encode(pairs, max_length=12)
    for (ids, parts), same, (first, second) in zip(found, plain, pairs, strict=True):
        assert ids.tolist() == same.tolist()
        lengths = [len(vocabulary.encode([text], 12)[0]) for text in (first, second)]
        ends = lengths[0], lengths[1] - 1 if second else 0
        assert parts.tolist()[: lengths[0]] == [0] * lengths[0]
        assert parts.sum() == ends[1]


def test_long_texts_are_cut(vocabulary):
    long = "fine film " * 50
    (single,) = vocabulary.encode([long], 10)
    assert len(single) == 10
    assert single[-1] == vocabulary.end
    (pair,) = vocabulary.encode([(long, "film")], 10)
    assert len(pair) == 10
    assert (pair == vocabulary.end).sum() == 2


@pytest.mark.parametrize(
    "text", ["", " ", "😀🎬", "שלום עולם", "x" * 10**6, "\x00\ufffd"]
)
def test_odd_texts_have_tokens(vocabulary, text):
    (row,) = vocabulary.encode([text], 24)
    assert 2 <= len(row) <= 24
    assert row.max() < vocabulary.size


def test_json_round_trip(vocabulary):
    again = Vocabulary.from_json(vocabulary.to_json())
    texts = reviews(20)[0]
    for a, b in zip(vocabulary.encode(texts, 24), again.encode(texts, 24), strict=True):
        assert (a == b).all()


def test_the_same_texts_give_the_same_vocabulary():
    """Also in another process: the library's own trainer depends on the order of a
    hash table, which differs from one process to the next."""
    code = (
        "from text_cases import reviews; from coulomb.text import train_vocabulary;"
        "print(train_vocabulary(reviews(200)[0], size=120).to_json())"
    )
    there = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    ).stdout
    texts = reviews(200)[0]
    here = {train_vocabulary(texts, size=120).to_json() for _ in range(8)}
    assert here == {there.strip()}


def test_bert_by_both_files(data_dir):
    lines = read_vocabulary(data_dir / "bert-base-uncased" / "vocab.txt")
    library = read_vocabulary(data_dir / "bert-base-uncased" / "tokenizer.json")
    assert lines.size == library.size == 30522
    assert lines.encode(["Hello world"], 8)[0].tolist() == [101, 7592, 2088, 102]
    texts = ["Café, résumé — naïve?", "don't\tstop 😀", "ﬁne"]
    for a, b in zip(lines.encode(texts, 64), library.encode(texts, 64), strict=True):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize(
    ("name", "content"),
    [("vocab.txt", "a\nb\n"), ("tokenizer.json", "{"), ("vocab.txt", "\xe9")],
)
def test_files_that_are_no_vocabulary(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(CoulombError, match=r"has no \[UNK\]|not a tokenizer|not UTF-8"):
        read_vocabulary(tmp_path / name)


def test_batches_hold_the_texts_asked_for(vocabulary):
    corpus = tiny_corpus()
    rows = encode_split(
        vocabulary, corpus.split("train"), kind="sequence", max_length=24
    )
    some = torch.tensor([5, 0, 17])
    batch = rows.batch(some)
    alone = vocabulary.encode([corpus.split("train").texts[i] for i in some], 24)
    bounds = batch.cu_seqlens.tolist()
    for place, row in enumerate(alone):
        begin, end = bounds[place : place + 2]
        assert batch.token_ids[begin:end].tolist() == row.tolist()
    assert batch.labels.tolist() == [corpus.split("train").labels[i] for i in some]


def test_labels_of_words_are_on_their_first_pieces(vocabulary):
    texts, tags = tagged(6)
    corpus = build_corpus("tags", (texts, tags), validation_share=0.5)
    split = corpus.split("train")
    rows = encode_split(vocabulary, split, kind="token", max_length=64)
    labelled = rows.labels[rows.labels != IGNORED]
    assert labelled.tolist() == [tag for tags in split.labels for tag in tags]
    assert (rows.labels[rows.first] != IGNORED).all()
    # "Lovelace" is not in the vocabulary: it has several pieces, or is unknown.
    batch = rows.batch(torch.tensor([1]))
    begin, end = rows.offsets[1], rows.offsets[2]
    assert batch.labels.tolist() == rows.labels[begin:end].tolist()


def test_words_that_are_cut_off_have_no_place(vocabulary):
    split = Split([("fine",) * 30], [(0,) * 30])
    rows = encode_split(vocabulary, split, kind="token", max_length=12)
    assert int((rows.first < 0).sum()) == 20


def test_renumbering(vocabulary):
    rows = encode_split(
        vocabulary, tiny_corpus().split("train"), kind="sequence", max_length=24
    )
    kept = rows.token_ids.unique()
    same = rows.renumber(kept, unknown=0)
    assert torch.equal(kept[same.token_ids], rows.token_ids)
    fewer = rows.renumber(kept[:-1], unknown=1)
    lost = rows.token_ids == kept[-1]
    assert (fewer.token_ids[lost] == 1).all()
    assert torch.equal(kept[fewer.token_ids[~lost]], rows.token_ids[~lost])


@pytest.mark.parametrize("number", [2 * 10**8, 4 * 10**9])
def test_a_number_far_from_the_others_is_refused(vocabulary, number):
    """The library would end the process, or a table of embeddings have as many rows."""
    found = json.loads(vocabulary.to_json())
    found["model"]["vocab"]["far"] = number
    with pytest.raises(CoulombError, match=f"numbers up to {number:,}"):
        Vocabulary.from_json(json.dumps(found))


def test_a_few_numbers_may_be_of_no_token(vocabulary):
    found = json.loads(vocabulary.to_json())
    found["model"]["vocab"]["far"] = number = len(found["model"]["vocab"]) + 500
    assert Vocabulary.from_json(json.dumps(found)).size == number + 1
