"""Write the Hong Kong Cantonese Corpus as a tagging task, from a package's own files.

    pip install pycantonese pyarrow
    python benchmarks/hkcancor.py --out DIR
    coulomb train --task hkcancor --data-dir DIR

58 conversations, 16,162 utterances, words with universal parts of speech (the package's
own map from the corpus' finer ones). Whole conversations make up the splits, so that a
speaker is in one of them: of every ten in the order of their names one is for
validation and two are for test. The corpus (Luke and Wong, 2015) is under CC BY 4.0.
"""

import argparse
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
    names, files = corpus.file_paths, corpus.tokens(by_utterance=True, by_file=True)
    for place, i in enumerate(sorted(range(len(names)), key=lambda i: names[i])):
        for tokens in files[i]:
            known = [token for token in tokens if token.word]
            rows[SPLITS[place % len(SPLITS)]].append(
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


def kind(tag: str) -> str:
    return str(hkcancor_to_ud(tag)) if tag else "PUNCT"


if __name__ == "__main__":
    main()
