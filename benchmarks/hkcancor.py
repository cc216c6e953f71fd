"""Write the Hong Kong Cantonese Corpus as a tagging task, from a package's own files.

    pip install pycantonese pyarrow
    python benchmarks/hkcancor.py --out DIR
    coulomb train --task hkcancor --data-dir DIR

58 files, 16,162 utterances, words with universal parts of speech (the package's own map
from the corpus' finer ones). Whole recordings make up the splits, also those in several
files (a, b, ...): of every ten in the order of their names one is for validation and
two are for test. A speaker may be in several. The corpus is under CC BY 4.0.
"""

import argparse
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pycantonese import hkcancor
from pycantonese.pos_tagging import hkcancor_to_ud

from coulomb.text import TASKS

SPLITS = ("train",) * 7 + ("validation",) + ("test",) * 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="data folder")
    folder = parser.parse_args().out / "hkcancor"
    folder.mkdir(parents=True, exist_ok=True)
    number = {name: place for place, name in enumerate(TASKS["hkcancor"].classes)}
    rows: dict[str, list[dict]] = {name: [] for name in SPLITS}
    corpus = hkcancor()
    names = [recording(path) for path in corpus.file_paths]
    order = sorted(set(names))
    files = corpus.tokens(by_utterance=True, by_file=True)
    for name, utterances in zip(names, files, strict=True):
        split = SPLITS[order.index(name) % len(SPLITS)]
        for tokens in utterances:
            known = [token for token in tokens if token.word]
            rows[split].append(
                {
                    "tokens": [token.word for token in known],
                    "pos_tags": [number[kind(token.pos)] for token in known],
                }
            )
    for name, part in rows.items():
        part = [row for row in part if row["tokens"]]
        pq.write_table(pa.Table.from_pylist(part), folder / f"{name}.parquet")
        words = sum(len(row["tokens"]) for row in part)
        print(f"{name}: {len(part)} utterances, {words} words")


def recording(path: str) -> str:
    """Name what a file is a part of: FC-005 for FC-005a_v2.cha."""
    found = re.match(r"FC-R?\d+", Path(path).name)
    assert found is not None
    return found.group()


def kind(tag: str) -> str:
    return str(hkcancor_to_ud(tag)) if tag else "PUNCT"


if __name__ == "__main__":
    main()
