"""Tasks read by the Hugging Face library, from a repository that lies on the disk.

`datasets` takes a folder of the same name before it asks the network, so the call is
the one a user makes.
"""

import pytest

from coulomb._support.errors import CoulombError
from coulomb.text import load_task

datasets = pytest.importorskip("datasets")

GLUE = """---
configs:
- config_name: {config}
  data_files:
  - split: train
    path: {config}/train*
  - split: validation
    path: {config}/validation*
---
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder to stand in, with the library's cache beside it and no data folder."""
    monkeypatch.delenv("COULOMB_DATA", raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    datasets.disable_progress_bars()
    yield tmp_path
    datasets.enable_progress_bars()


def write_repository(folder, config, columns):
    """Lay two splits out as the hub does."""
    (folder / config).mkdir(parents=True)
    (folder / "README.md").write_text(GLUE.format(config=config))
    for split in ("train", "validation"):
        table = datasets.Dataset.from_dict(columns)
        table.to_parquet(folder / config / f"{split}.parquet")


def test_a_configuration_of_glue(elsewhere):
    columns = {"sentence": ["fine", "dull", "warm"], "label": [1, 0, 1]}
    write_repository(elsewhere / "nyu-mll" / "glue", "sst2", columns)
    corpus = load_task("sst2")
    assert list(corpus.split("train").texts) == ["fine", "dull", "warm"]
    assert list(corpus.split("train").labels) == [1, 0, 1]
    assert corpus.reported_on == "validation"


def test_pairs(elsewhere):
    columns = {"question1": ["a", "b"], "question2": ["c", "d"], "label": [0, 1]}
    write_repository(elsewhere / "nyu-mll" / "glue", "qqp", columns)
    assert list(load_task("qqp").split("validation").texts) == [("a", "c"), ("b", "d")]


def test_tags(elsewhere):
    columns = {"tokens": [["EU", "rejects"], ["Bonn"]], "ner_tags": [[3, 0], [5]]}
    folder = elsewhere / "lhoestq" / "conll2003"
    folder.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        datasets.Dataset.from_dict(columns).to_parquet(folder / f"{split}.parquet")
    corpus = load_task("conll2003")
    assert corpus.kind == "token"
    assert list(corpus.split("test").labels) == [(3, 0), (5,)]


def test_no_answer_ends_in_a_sentence(elsewhere):
    # A folder without data: the library's own error, whatever the network says.
    (elsewhere / "cornell-movie-review-data" / "rotten_tomatoes").mkdir(parents=True)
    with pytest.raises(CoulombError, match="Pass `data_dir`, or try again"):
        load_task("rotten_tomatoes")
