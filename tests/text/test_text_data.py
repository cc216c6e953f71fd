"""Reading, checking and splitting texts."""

import csv
import json
import re

import pyarrow
import pyarrow.parquet
import pytest
from text_cases import reviews, tagged, write_csv

from coulomb._support.errors import CoulombError
from coulomb.text import build_corpus, load_task, preset, read_corpus
from coulomb.text.data import keep_back, numbered_split
from coulomb.text.files import Form, read_columns, read_table
from coulomb.text.tokens import choose_vocabulary


def read(path, **options):
    return read_corpus(path, text=["review"], label="sentiment", **options)


@pytest.fixture(params=["csv", "tsv", "jsonl", "parquet"])
def file(request, tmp_path):
    """The same rows in every format, with quotes, commas and line breaks."""
    texts, labels = reviews(20)
    texts[0] = 'a "quoted", odd\nfilm'
    path = tmp_path / f"rows.{request.param}"
    if request.param == "csv":
        return write_csv(path, texts, labels)
    if request.param == "tsv":
        quoted = ['"' + text.replace('"', '""') + '"' for text in texts]
        lines = [f"{a}\t{b}" for a, b in zip(quoted, labels, strict=True)]
        path.write_text("\n".join(["review\tsentiment", *lines]) + "\n")
    elif request.param == "jsonl":
        rows = [
            {"review": a, "sentiment": b} for a, b in zip(texts, labels, strict=True)
        ]
        path.write_text("\n\n".join(json.dumps(row) for row in rows))
    else:
        table = pyarrow.table({"review": texts, "sentiment": labels})
        pyarrow.parquet.write_table(table, path)
    return path


def test_every_format_gives_the_same_rows(file):
    texts, labels = reviews(20)
    texts[0] = 'a "quoted", odd\nfilm'
    columns = read_columns(file, ["review", "sentiment"])
    assert columns == {"review": texts, "sentiment": labels}
    corpus = read(file, validation_share=0.2)
    assert corpus.classes == ("neg", "pos")
    assert len(corpus.split("validation")) == 4


def test_every_format_names_a_missing_column(file):
    with pytest.raises(CoulombError, match=r"no column 'reveiw'; did you mean 'review"):
        read_columns(file, ["reveiw"])


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_empty_files_are_refused(suffix, tmp_path):
    path = tmp_path / f"rows.{suffix}"
    path.write_bytes(b"")
    with pytest.raises(CoulombError, match=r"empty|no rows|not a Parquet"):
        read(path)


def test_a_header_alone_is_refused(tmp_path):
    with pytest.raises(CoulombError, match="no rows"):
        read(write_csv(tmp_path / "rows.csv", [], []))


@pytest.mark.parametrize(
    ("encoding", "told"),
    [
        ("utf-8", None),
        ("utf-8-sig", "with a byte-order mark"),
        ("utf-16", "utf-16"),
        ("utf-16-le", "utf-16-le"),
        ("utf-16-be", "utf-16-be"),
        ("latin-1", "not UTF-8 (byte 0xe9 in line 3)"),
        ("cp1252", "cp1252"),
    ],
)
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separator_and_encoding_are_found_and_told(encoding, told, separator, tmp_path):
    """Texts are full of what separates columns elsewhere."""
    texts, labels = reviews(20)
    texts[0], texts[1] = "one, two; three | four,,,", "caf\xe9; ol\xe9"
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding=encoding) as file:
        rows = csv.writer(file, delimiter=separator)
        rows.writerows([["review", "sentiment"], *zip(texts, labels, strict=True)])
    found = read_table(path, ["review", "sentiment"])
    assert found.columns == {"review": texts, "sentiment": labels}
    words = " ".join(found.notes)
    assert ("separated by" in words) == (separator != ",")
    assert (told or "") in words
    assert bool(words) == bool(told or separator != ",")
    named = read(path, sep=separator, encoding=encoding, validation_share=0.2)
    assert named.classes == ("neg", "pos")
    assert not any("separated" in note for note in named.notes)


def test_one_column_of_texts_with_semicolons_is_one_column(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("review\na; b\nc; d\n")
    assert read_table(path).columns == {"review": ["a; b", "c; d"]}


def test_a_separator_or_encoding_that_is_none_is_refused(tmp_path):
    path = write_csv(tmp_path / "rows.csv", *reviews(4))
    with pytest.raises(CoulombError, match="`sep` must be one character"):
        read(path, sep="::")
    for name in ("utf-99", "hex"):
        with pytest.raises(CoulombError, match="`encoding` must be one, such"):
            read(path, encoding=name)
    path.write_bytes(b"review,sentiment\nfine,pos\ncaf\xe9,neg\n")
    with pytest.raises(CoulombError, match=r"not UTF-8: byte 0xe9 in line 3"):
        read(path, encoding="utf-8")
    assert read_table(path, form=Form("tab")).columns == {
        "review,sentiment": ["fine,pos", "caf\xe9,neg"]
    }


def test_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("review,review,sentiment\na,b,pos\nc,d,neg\n")
    with pytest.raises(CoulombError, match="2 columns named 'review'"):
        read(path)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_rows_without_text_or_label_are_dropped_or_refused(suffix, tmp_path):
    texts, labels = reviews(20)
    texts[2], texts[5], labels[5], labels[7] = "", "  ", "", ""
    path = tmp_path / f"rows.{suffix}"
    if suffix == "csv":
        write_csv(path, texts, labels)
    else:
        labels[7] = None
        rows = zip(texts, labels, strict=True)
        lines = (json.dumps({"review": a, "sentiment": b}) for a, b in rows)
        path.write_text("\n".join(lines))
    corpus = read(path, validation_share=0.2)
    assert sum(map(len, corpus.splits.values())) == 17
    told = f"rows.{suffix}: 3 of 20 rows lack a text (2) or a label (2); these are"
    assert corpus.notes[0].startswith(told)
    with pytest.raises(CoulombError, match="the first is row 3"):
        read(path, strict=True)


@pytest.mark.parametrize("whole", [True, False])
def test_a_quantity_is_no_class(whole):
    numbers = [n if whole else n / 8 for n in range(60)]
    texts = [f"text {n}" for n in range(180)]
    with pytest.raises(CoulombError, match="60 different numbers in 180 rows"):
        build_corpus("x", (texts, [str(n) for n in numbers * 3]))
    with pytest.raises(CoulombError, match="60 different values in 60 rows"):
        build_corpus("x", (texts[:60], [f"row {n}" for n in numbers]))
    # Stars, and ages in a table that has enough of each.
    assert build_corpus("x", (texts, [n % 5 for n in range(180)])).classes
    if whole:
        assert build_corpus("x", (texts * 4, numbers * 12)).classes


def test_a_class_of_one_row_is_noted():
    texts, labels = reviews(20)
    labels[3] = "odd"
    corpus = build_corpus("x", (texts, labels))
    assert any("1 of 3 classes occur once, such as 'odd'" in x for x in corpus.notes)


def test_rows_of_another_length_name_the_line(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("review,sentiment\nfine,pos\na, dull film,neg\n")
    with pytest.raises(CoulombError, match="line 3: 3 fields, but the header has 2"):
        read(path)


def test_broken_json_names_the_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"review": "a", "sentiment": 1}\n{"review": \n')
    with pytest.raises(CoulombError, match="line 2: not JSON"):
        read(path)


def test_a_line_of_one_megabyte_is_read(tmp_path):
    texts, labels = reviews(20)
    texts[3] = "word " * 200_000
    path = write_csv(tmp_path / "rows.csv", texts, labels)
    assert read_columns(path, ["review"])["review"][3] == texts[3]


def test_unknown_suffixes_are_refused(tmp_path):
    with pytest.raises(CoulombError, match=r"must end in .csv"):
        read(tmp_path / "rows.xlsx")


def test_one_class_is_refused():
    with pytest.raises(CoulombError, match="at least two classes; got only 'pos'"):
        build_corpus("one", (["a", "b"], ["pos", "pos"]))


def test_a_label_seen_only_in_validation_is_refused():
    train, other = reviews(20), (["a", "b"], ["pos", "odd"])
    with pytest.raises(CoulombError, match="row 2: the label 'odd' does not occur"):
        build_corpus("x", train, validation=other)


@pytest.mark.parametrize("label", [None, "", float("nan")])
def test_missing_labels_name_the_row(label):
    with pytest.raises(CoulombError, match="Row 2: the label is missing"):
        build_corpus("x", (["a", "b", "c"], ["pos", label, "neg"]))


@pytest.mark.parametrize("text", [None, 3, ("a",), ("a", 1), ("a", "b", "c")])
def test_texts_of_the_wrong_kind_name_the_row(text):
    with pytest.raises(CoulombError, match="Row 1: a text must be a string"):
        build_corpus("x", ([text, "b"], [0, 1]))


def test_lengths_must_agree():
    with pytest.raises(CoulombError, match="2 texts and 1 labels"):
        build_corpus("x", (["a", "b"], [0]))


@pytest.mark.parametrize(
    "labels", [[0, 1], [True, False], [0.5, 1.5], ["a", "b"], [1, "a"]]
)
def test_labels_of_any_type(labels):
    corpus = build_corpus("x", (["a", "b"] * 10, labels * 10))
    assert set(corpus.classes) == set(labels)
    numbers = corpus.split("train").labels
    texts = corpus.split("train").texts
    of_a = {corpus.classes[n] for t, n in zip(texts, numbers, strict=True) if t == "a"}
    assert of_a == {labels[0]}


def test_empty_texts_are_kept_and_told():
    texts, labels = reviews(40)
    texts[0] = texts[2] = " "
    corpus = build_corpus("x", (texts, labels))
    assert any("2 of 40 texts" in note for note in corpus.notes)


def test_the_validation_share_is_stratified_and_repeats():
    labels = [0] * 90 + [1] * 10 + [2]
    texts = [f"text {i}" for i in range(101)]
    first = build_corpus("x", (texts, labels), validation_share=0.2, seed=1)
    again = build_corpus("x", (texts, labels), validation_share=0.2, seed=1)
    other = build_corpus("x", (texts, labels), validation_share=0.2, seed=2)
    kept = first.split("validation")
    assert [list(kept.labels).count(c) for c in range(3)] == [18, 2, 0]
    assert kept.texts == again.split("validation").texts
    assert kept.texts != other.split("validation").texts
    assert not set(kept.texts) & set(first.split("train").texts)
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()


def test_a_share_too_small_to_keep_a_row_is_refused():
    with pytest.raises(CoulombError, match="keep at least one row"):
        keep_back(build_corpus("x", reviews(20)).split("train"), "sequence", 1e-3, 0)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_share_is_of_each_class_and_the_one_that_is_named_is_enough(size):
    """A tenth of all rows would be some, and a tenth of any class is none."""
    numbers = range(30 * size)
    rows = [f"text {i}" for i in numbers], [f"c{i % 30}" for i in numbers]
    share = 0.4 / size
    with pytest.raises(CoulombError, match=rf"largest class.*of {size}\.") as caught:
        build_corpus("x", rows, validation_share=share)
    named = float(re.search(r"at least (0\.\d+)", str(caught.value))[1])
    found = build_corpus("x", rows, validation_share=named).split("validation")
    assert len(found) == 30


def test_classes_that_look_the_same_are_refused():
    """Answers name classes by what they look like: one would hide the other."""
    rows = list("abcdef"), [1, "1", "x"] * 2
    with pytest.raises(CoulombError, match=r"in one way; got .?1"):
        build_corpus("x", rows)


def test_classes_of_one_row_have_none_to_keep_back():
    with pytest.raises(CoulombError, match=r"got 0.1 of 1\. Give more rows"):
        build_corpus("x", (["good", "bad"], ["+", "-"]))


def test_tags_need_a_label_for_each_word():
    texts, tags = tagged(4)
    assert build_corpus("x", (texts, tags), validation_share=0.5).kind == "token"
    with pytest.raises(CoulombError, match="a label for each word"):
        build_corpus("x", (texts, [tags[0][:-1], *tags[1:]]))


def test_labels_of_a_text_file_are_compared_by_their_looks():
    split = numbered_split("new.csv", (["a", "b"], ["1", "0"]), (0, 1))
    assert split.labels == [1, 0]


def test_tasks(data_dir):
    qqp = load_task("qqp", data_dir)
    assert any("subset" in note for note in qqp.notes)
    assert all(isinstance(text, tuple) for text in qqp.split("train").texts[:5])
    sst2 = load_task("sst2", data_dir)
    assert sst2.reported_on == "validation"
    assert "test" not in sst2.splits  # its labels are -1
    assert len(sst2.split("test_labeled")) == 1821
    assert any("also chose the checkpoint" in note for note in sst2.notes)
    assert load_task("rotten_tomatoes", data_dir).reported_on == "test"
    honest = load_task("sst2", data_dir, validation_share=0.05)
    assert len(honest.split("test")) == 872
    assert not any("also chose" in note for note in honest.notes)


def test_parts_of_speech(tmp_path, monkeypatch):
    """A task that is read from a folder only, with a vocabulary of its own."""
    (tmp_path / "hkcancor").mkdir()
    rows = pyarrow.table(
        {"tokens": [["食", "飯", "."]] * 20, "pos_tags": [[15, 7, 12]] * 20}
    )
    for split in ("train", "validation", "test"):
        pyarrow.parquet.write_table(rows, tmp_path / "hkcancor" / f"{split}.parquet")
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nfilm\n")
    corpus = load_task("hkcancor", tmp_path)
    assert corpus.classes[corpus.split("test").labels[0][1]] == "NOUN"
    found = choose_vocabulary(corpus, preset("default", {}), None, tmp_path)
    assert found.unknown not in found.encode([["食", "飯"]], max_length=8)[0]
    monkeypatch.delenv("COULOMB_DATA", raising=False)
    with pytest.raises(CoulombError, match="is not loaded from the hub"):
        load_task("hkcancor")


def test_a_task_without_validation_keeps_a_share(data_dir):
    imdb = load_task("imdb", data_dir)
    assert len(imdb.split("validation")) == 2500
    assert list(imdb.split("validation").labels).count(1) == 1250


def test_unknown_tasks_and_folders(tmp_path):
    with pytest.raises(CoulombError, match="did you mean 'sst2'"):
        load_task("sst-2", tmp_path)
    with pytest.raises(CoulombError, match=r"must hold sst2/train.parquet"):
        load_task("sst2", tmp_path)
    with pytest.raises(CoulombError, match="must be a folder"):
        load_task("sst2", tmp_path / "none")


@pytest.mark.parametrize("names", [[], ["a", "b", "c"]])
def test_a_text_has_one_column_or_two(tmp_path, names):
    (tmp_path / "rows.csv").write_text("a,b,c,y\n1,2,3,4\n")
    with pytest.raises(CoulombError, match="`text` must name one column, or two"):
        read_corpus(tmp_path / "rows.csv", text=names, label="y")
