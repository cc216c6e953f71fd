"""`coulomb train`, `evaluate`, `predict`, `runs`: text classifiers."""

import csv
import inspect
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coulomb._support.errors import FileFormatError, ParameterError, unknown_name
from coulomb.text.settings import TextSettings

if TYPE_CHECKING:
    from coulomb.text.data import Corpus
    from coulomb.text.predictor import Predictor

_RUNS = Path("runs")
_AT_ONCE = 4096
_FORMATS = ("csv", "jsonl")


def with_settings(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb one flag per setting."""
    own = inspect.signature(verb)
    flags = [_flag(part) for part in fields(TextSettings)]
    kept = [p for p in own.parameters.values() if p.name != "settings"]

    @wraps(verb)
    def called(**given: Any) -> None:
        names = [flag.name for flag in flags]
        changes = {n: given.pop(n) for n in names if n in given}
        chosen = {name: value for name, value in changes.items() if value is not None}
        verb(**given, settings=chosen)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept]
    called.__signature__ = own.replace(parameters=[*parameters, *flags])  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in (*parameters, *flags)}
    return called


def _flag(part: Any) -> inspect.Parameter:
    option = typer.Option(
        help=part.metadata["help"],
        rich_help_panel=part.metadata["group"],
        show_default=False,
    )
    annotation = Annotated[part.type | None, option]
    return inspect.Parameter(
        part.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=annotation,
    )


@with_settings
def train(
    data: Annotated[
        Path | None,
        typer.Argument(help="CSV, TSV, JSON-lines or Parquet file of training rows."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Column of texts; give it twice for pairs."),
    ] = None,
    label: Annotated[str | None, typer.Option(help="Column of labels.")] = None,
    validation: Annotated[
        Path | None, typer.Option(help="File of validation rows.")
    ] = None,
    test: Annotated[Path | None, typer.Option(help="File of test rows.")] = None,
    validation_share: Annotated[
        float | None, typer.Option(help="Share of training rows kept back.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="sst2, qqp, rotten_tomatoes, imdb, mrpc, conll2003 or hkcancor."
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of data sets [env: COULOMB_DATA].")
    ] = None,
    vocabulary: Annotated[
        Path | None, typer.Option(help="vocab.txt or tokenizer.json.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="default, tagging (for tags if none is named), pairs (for pairs), "
            "paper-main or paper-supplement."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file of settings; flags win.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run [default: runs/NAME-N].")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with an interrupted run.")
    ] = None,
    save_every: Annotated[
        int, typer.Option(min=1, help="Steps between checkpoints.")
    ] = 500,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; 1 repeats to the bit.")
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write logs for TensorBoard.")
    ] = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Train a text classifier or a tagger, in two phases.

    Reads a file with a header, or a public data set. The folder of the run receives
    configuration, vocabulary, weights, particles, metrics, history and environment.
    Interrupted runs go on with `--resume` and end with the same weights.

    **Examples**

    `coulomb train reviews.csv --text review --label sentiment`

    `coulomb train pairs.jsonl --text first --text second --label same`

    `coulomb train --task sst2 --data-dir data --attention kernel-softmaxfeat --seed 1`

    `coulomb train --task mrpc --preset paper-supplement --epochs 3`

    `coulomb train --resume runs/reviews-1`
    """
    from coulomb.text import resume_folder, train_in_folder
    from coulomb.text.run_folder import new_folder
    from coulomb.text.tasks import load_data
    from coulomb.text.tokens import choose_vocabulary

    _use_threads(threads)
    if resume is not None:
        others = (data, task, preset, config, out, *(settings or {}))
        if any(value is not None for value in others):
            raise ParameterError(
                "`--resume` takes data and settings from the run; drop the others."
            )
        trained = resume_folder(resume, save_every=save_every, tensorboard=tensorboard)
        _print_end(resume, trained.metrics)
        return
    chosen = _settings(preset, config, settings or {})
    source = _source(data, text, label, validation, test, task, data_dir)
    source["validation_share"] = validation_share
    corpus = load_data(source)
    chosen = _settings(preset, config, settings or {}, usual=_usual_preset(corpus))
    source["name"] = corpus.name
    for note in corpus.notes:
        typer.echo(note, err=True)
    folder = out or new_folder(_RUNS, corpus.name)
    words = choose_vocabulary(corpus, chosen, vocabulary, data_dir)
    trained = train_in_folder(
        folder,
        corpus,
        chosen,
        words,
        data=source,
        save_every=save_every,
        tensorboard=tensorboard,
    )
    _print_end(folder, trained.metrics)


def _usual_preset(corpus: "Corpus") -> str:
    if corpus.kind == "token":
        return "tagging"
    return "default" if isinstance(corpus.split("train").texts[0], str) else "pairs"


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _settings(
    preset: str | None,
    config: Path | None,
    flags: dict[str, Any],
    *,
    usual: str = "default",
) -> Any:
    from coulomb.text.settings import preset as find_preset
    from coulomb.text.settings import read_toml

    named, values = read_toml(config) if config is not None else (None, {})
    return find_preset(preset or named or usual, values | flags)


def _source(
    data: Path | None,
    text: list[str] | None,
    label: str | None,
    validation: Path | None,
    test: Path | None,
    task: str | None,
    data_dir: Path | None,
) -> dict[str, Any]:
    if (data is None) == (task is None):
        raise ParameterError("Give a file or `--task`, one of them.")
    if task is not None:
        if text or label or validation or test:
            raise ParameterError(
                "`--text`, `--label`, `--validation` and `--test` are for files; a "
                "task has its own."
            )
        folder = None if data_dir is None else str(data_dir.resolve())
        return {"task": task, "data_dir": folder}
    if not text or label is None:
        raise ParameterError(
            f"Name the columns of {data}: `--text COLUMN --label COLUMN`."
        )

    def whole(path: Path | None) -> str | None:
        return None if path is None else str(path.resolve())

    return {
        "train": whole(data),
        "validation": whole(validation),
        "test": whole(test),
        "text": text,
        "label": label,
    }


def _print_end(folder: Path, found: dict[str, Any]) -> None:
    typer.echo(f"Best epoch: {found['best_epoch']}")
    _print_metrics(found["metrics"], found["split"], found["rows"])
    summary = found["alignment"].get("summary")
    if summary:
        typer.echo(summary)
    for note in found["notes"]:
        typer.echo(f"Note: {note}")
    typer.echo(f"Run: {folder}")


def _print_metrics(metrics: dict[str, Any], split: str, rows: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{split}, {rows} texts")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        if isinstance(value, dict):
            for kind, number in value.items():
                table.add_row(f"{name} {kind}", f"{number:.4f}")
        elif isinstance(value, float):
            table.add_row(name, f"{value:.4f}")
        else:
            table.add_row(name, "-" if value is None else str(value))
    Console().print(table)


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    data: Annotated[
        Path | None,
        typer.Argument(help="File with the run's columns; none: the run's own data."),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of the run's own data.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="Column of texts, if not as in training.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Column of labels, if not as in training.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, not a table.")
    ] = False,
) -> None:
    """Compute the metrics of a trained run.

    On the split its metrics are reported on, on another one, or on a file.

    **Examples**

    `coulomb evaluate runs/reviews-1`

    `coulomb evaluate runs/sst2-1 --split test_labeled --json`

    `coulomb evaluate runs/reviews-1 new.csv --label sentiment`
    """
    from coulomb.text import Predictor
    from coulomb.text.tasks import load_data

    predictor = Predictor.load(run)
    config = predictor.config
    if data is None:
        corpus = load_data(config.data)
        name = split or corpus.reported_on
        part = corpus.split(name)
        if corpus.classes != predictor.classes:
            raise ParameterError(
                f"The classes of {run} are not those of its data any more."
            )
    else:
        part, name = _labelled(data, predictor, text, label), data.name
    found = predictor.score(part)
    if as_json:
        content = {"split": name, "rows": len(part), "metrics": found}
        typer.echo(json.dumps(content, indent=2))
    else:
        _print_metrics(found, name, len(part))


def _labelled(
    data: Path, predictor: Any, text: list[str] | None, label: str | None
) -> Any:
    from coulomb.text.data import numbered_split
    from coulomb.text.files import read_columns

    names = text or _text_columns(predictor.config)
    column = label or _label_column(predictor.config)
    if not names or column is None:
        raise ParameterError(
            f"Name the columns of {data}: `--text COLUMN --label COLUMN`."
        )
    columns = read_columns(data, [*names, column])
    parts = [columns[name] for name in names]
    texts = parts[0] if len(parts) == 1 else list(zip(*parts, strict=True))
    return numbered_split(data.name, (texts, columns[column]), predictor.classes)


def _text_columns(config: Any) -> list[str]:
    from coulomb.text.tasks import TASKS

    if config.data.get("task") in TASKS:
        return list(TASKS[config.data["task"]].columns)
    return list(config.data.get("text") or ())


def _label_column(config: Any) -> str | None:
    from coulomb.text.tasks import TASKS

    if config.data.get("task") in TASKS:
        return TASKS[config.data["task"]].label
    column: str | None = config.data.get("label")
    return column


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts; none reads lines of standard input."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="CSV, TSV, JSON-lines, Parquet, or .txt with a text a line."),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="Column of texts, if not as in training.")
    ] = None,
    output: Annotated[str, typer.Option("--format", help="jsonl or csv.")] = "jsonl",
    out: Annotated[
        Path | None, typer.Option(help="File to write [default: standard output].")
    ] = None,
) -> None:
    """Classify texts, or tag words, with a trained run.

    The two texts of a pair are separated by a tab, the words of a text to tag by
    spaces. Each row of the output has the prediction and the probabilities.

    **Examples**

    `coulomb predict runs/reviews-1 "a fine film"`

    `coulomb predict runs/reviews-1 --file new.csv --format csv --out predictions.csv`

    `cat lines.txt | coulomb predict runs/reviews-1`
    """
    from coulomb.text import Predictor

    if texts and file is not None:
        raise ParameterError("Give texts or `--file`, not both.")
    predictor = Predictor.load(run)
    names = text or _text_columns(predictor.config)
    chunks = read_texts(texts, file, names, predictor.config.kind)
    write_predictions(predictor, chunks, output, out)


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs.")] = _RUNS,
    metric: Annotated[str, typer.Option(help="Metric to compare by.")] = "accuracy",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, not a table.")
    ] = False,
) -> None:
    """List what was trained, the best first.

    **Examples**

    `coulomb runs`

    `coulomb runs experiments --metric log_loss --json`
    """
    from rich.console import Console
    from rich.table import Table

    from coulomb.text import list_runs
    from coulomb.text.evaluate import LOWER_IS_BETTER

    rows = list_runs(folder)
    lower = metric in LOWER_IS_BETTER

    def place(row: dict[str, Any]) -> tuple[bool, float]:
        value = row.get("metrics", {}).get(metric)
        return value is None, (value if lower else -value) if value is not None else 0.0

    rows.sort(key=place)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(title=str(folder))
    for name in ("run", "data", "attention", "seed", "split"):
        table.add_column(name)
    table.add_column(metric, justify="right")
    for row in rows:
        value = row.get("metrics", {}).get(metric)
        state = "not finished" if row.get("finished") is False else "-"
        shown = row.get("problem") or (state if value is None else f"{value:.4f}")
        cells = [str(row.get(n, "")) for n in ("data", "attention", "seed", "split")]
        table.add_row(row["run"], *cells, shown)
    Console(width=None if Console().is_terminal else 110).print(table)


def read_texts(
    given: Sequence[str] | None, file: Path | None, columns: Sequence[str], kind: str
) -> Iterator[list[Any]]:
    """Go through the texts to predict, in lists."""
    from coulomb.text.files import read_columns

    if file is not None and file.suffix.lower() != ".txt":
        if not columns:
            raise ParameterError(f"Name the column of {file}: `--text COLUMN`.")
        table = read_columns(file, columns)
        parts = [table[name] for name in columns]
        rows: Iterable[Any] = parts[0] if len(parts) == 1 else zip(*parts, strict=True)
        yield from _in_lists(rows)
        return
    lines: Iterable[str] = given or _lines(file)
    yield from _in_lists(_parsed(line, len(columns), kind) for line in lines)


def _lines(file: Path | None) -> Iterator[str]:
    name = "Standard input" if file is None else str(file)
    stream = sys.stdin.buffer if file is None else file.open("rb")
    with stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise FileFormatError(
                    f"{name} is not UTF-8: byte 0x{line[error.start]:02x} in line "
                    f"{number}."
                ) from error


def _parsed(line: str, n_columns: int, kind: str) -> Any:
    if kind == "token":
        return tuple(line.split())
    if n_columns < 2:
        return line
    parts = line.split("\t")
    if len(parts) != 2:
        raise ParameterError(
            f"A pair must be two texts separated by a tab; got {line[:60]!r}."
        )
    return tuple(parts)


def _in_lists(rows: Iterable[Any]) -> Iterator[list[Any]]:
    items = iter(rows)
    while some := list(islice(items, _AT_ONCE)):
        yield some


def write_predictions(
    predictor: "Predictor", chunks: Iterable[list[Any]], form: str, out: Path | None
) -> None:
    """Predict and write, to standard output or to a file that is whole or not there."""
    from coulomb._support.archive import write_whole

    if form not in _FORMATS:
        raise unknown_name("format", form, _FORMATS)
    lines = _lines_of(predictor, chunks, form)
    if out is None:
        for line in lines:
            typer.echo(line, nl=False)
        return

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8", newline="") as file:
            file.writelines(lines)

    write_whole(out, write)


def _lines_of(
    predictor: "Predictor", chunks: Iterable[list[Any]], form: str
) -> Iterator[str]:
    tagging = predictor.config.kind == "token"
    classes = [str(label) for label in predictor.classes]
    if form == "csv":
        extra = [] if tagging else [f"p_{label}" for label in classes]
        yield _csv_line(["text", "prediction", *extra])
    for texts in chunks:
        if tagging:
            for words, tags in zip(texts, predictor.tag(texts), strict=True):
                yield _row(form, list(words), tags, None, classes)
            continue
        probabilities = predictor.predict_proba(texts)
        for text, row in zip(texts, probabilities.tolist(), strict=True):
            best = predictor.classes[row.index(max(row))]
            yield _row(form, text, best, row, classes)


def _row(
    form: str, text: Any, best: Any, row: list[float] | None, classes: list[str]
) -> str:
    if form == "jsonl":
        content = {"text": text, "prediction": best}
        if row is not None:
            content["probabilities"] = dict(zip(classes, row, strict=True))
        return json.dumps(content, ensure_ascii=False) + "\n"
    shown = text if isinstance(text, str) else ("\t" if row else " ").join(text)
    answer = " ".join(map(str, best)) if isinstance(best, list) else best
    return _csv_line([shown, answer, *(f"{p:.6f}" for p in row or ())])


def _csv_line(cells: Sequence[Any]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()
