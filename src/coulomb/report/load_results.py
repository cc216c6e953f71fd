"""Reading a folder of results: what is whole is used, what is not is named."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coulomb._support.errors import FileFormatError, ParameterError
from coulomb.experiments.records import FILE, FRAMES, Record, load_records
from coulomb.report.movie import Run, read_runs


@dataclass(frozen=True)
class Results:
    """What a folder holds."""

    folder: Path
    records: dict[str, list[Record]]
    runs: list[Run] = field(default_factory=list)
    theory: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def read_results(folder: Path) -> Results:
    """Read every experiment of a folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ParameterError(
            f"`DIR` must be a folder of results; there is none at {str(folder)!r}. "
            "`coulomb reproduce` makes one."
        )
    problems: list[str] = []
    records: dict[str, list[Record]] = {}
    for path in sorted(folder.glob(f"*/{FILE}")):
        try:
            found = load_records(path)
        except FileFormatError as error:
            problems.append(_relative(str(error), folder))
            continue
        if found:
            records[path.parent.name] = found
        else:
            problems.append(f"{path.relative_to(folder)}: holds no finished record.")
    runs: list[Run] = []
    for path in sorted(folder.glob(f"*/{FRAMES}")):
        try:
            runs.extend(read_runs(path))
        except FileFormatError as error:
            problems.append(_relative(str(error), folder))
    theory = _read_theory(folder, problems)
    if not (records or runs or theory):
        detail = f" {problems[0]}" if problems else ""
        raise ParameterError(
            f"`DIR` must hold results, such as noise/{FILE}; found none in "
            f"{str(folder)!r}.{detail} `coulomb reproduce NAME --out DIR` makes some."
        )
    return Results(folder, records, runs, theory, tuple(problems))


def _read_theory(folder: Path, problems: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    paths = [*folder.glob("*.json"), *folder.glob("*/*.json")]
    for path in sorted(paths):
        if path.name == FRAMES:
            continue
        try:
            content = json.loads(path.read_bytes())
        except ValueError as error:
            problems.append(f"{path.relative_to(folder)}: not JSON ({error}).")
            continue
        if isinstance(content, dict) and ({"flow", "deviations"} & set(content)):
            found[str(path.relative_to(folder).with_suffix(""))] = content
    return found


def _relative(sentence: str, folder: Path) -> str:
    """Name files as the reader of the page sees them, not as this machine does."""
    return sentence.replace(f"{folder}/", "")
