"""`coulomb diagnose`: tell whether Phase A of a run learned."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coulomb._support.errors import ParameterError

if TYPE_CHECKING:
    from coulomb.attention import Diagnosis
    from coulomb.attention.align.starts import ChoiceTest, MatchTest


def diagnose(
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as runs/sst2-1.")],
    twins: Annotated[
        int, typer.Option(min=2, help="Runs of Phase A by noise alone: cheap.")
    ] = 9,
    label_twins: Annotated[
        int,
        typer.Option(
            min=0,
            help="Runs of Phase A on shuffled labels, 0 or from 2 on; each costs as "
            "much as Phase A.",
        ),
    ] = 0,
    shuffles: Annotated[
        int,
        typer.Option(min=100, help="Permutations of the held-out labels."),
    ] = 199,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads.")] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to this file.")
    ] = None,
) -> None:
    """Tell whether Phase A of a run learned from the labels, and if not, why.

    Compares the run with twins that feel its noise and no labels, its gain on held-out
    texts with the gain on shuffled labels, and its first gradient with theirs. Where
    labels chose the windows that heads look at, so do shuffled labels. Needs the data
    of the run again. The folder of the run is not changed.

    **Examples**

    `coulomb diagnose runs/reviews-1`

    `coulomb diagnose runs/sst2-1 --twins 19 --label-twins 3 --json diagnosis.json`
    """
    if label_twins == 1:
        raise ParameterError("`--label-twins` must be 0 or at least 2; got 1.")
    from coulomb.text import diagnose_run

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    found = diagnose_run(
        run, n_twins=twins, n_label_twins=label_twins, n_shuffles=shuffles
    )
    if found.chosen is not None:
        _print_choice(found.chosen)
    if found.steps or found.chosen is None:
        _print_groups(found)
        _print_alignment(found)
    typer.echo(found.verdict)
    if json is not None:
        from coulomb._support.archive import write_json

        write_json(json, {"run": run.resolve().name} | found.record())
        typer.echo(f"Numbers: {json}")


def _print_choice(found: "ChoiceTest | MatchTest") -> None:
    from coulomb.attention.align.starts import MatchTest

    if not isinstance(found, MatchTest):
        _print_windows(found)
        return
    table = _table("Attention between the texts", ("particles",), ("told", "chosen"))
    for factor, share in found.alone.items():
        name = f"blind to the part, {factor:g} times as long" if factor else "as drawn"
        mark = "1" if factor == found.choice.factor else ""
        table.add_row(name, f"{100 * share:.2f} %", mark)
    _show(table)


def _print_windows(found: "ChoiceTest") -> None:
    table = _table("Windows of tokens", ("tokens away",), ("tells", "chosen"))
    chosen = {shift: str(place) for place, shift in enumerate(found.choice.shifts, 1)}
    for shift, share in found.alone.items():
        name = f"{shift:+d}" if shift else "0, the token itself"
        table.add_row(name, f"{100 * share:.2f} %", chosen.get(shift, ""))
    _show(table)
    typer.echo(
        "tells: the share of what a token leaves open of its label that a window alone "
        "predicts on other texts, below 0 if guessing does better; chosen: in which "
        "order, by what a window adds to those before it."
    )


def _print_groups(found: "Diagnosis") -> None:
    table = _table(
        f"Phase A, {found.steps} steps",
        ("layer", "head"),
        ("drift / noise", "moved", "noise alone", "apart", "cosine"),
    )
    columns = (
        found.drift_to_noise,
        found.moved,
        found.moved_by_noise,
        found.apart,
        found.cosines,
    )
    for number, layer in enumerate(found.layers):
        for head in range(found.moved.shape[1]):
            values = [f"{float(column[number, head]):.3g}" for column in columns]
            table.add_row(layer, str(head), *values)
    _show(table)
    typer.echo(
        "moved: how far particles are from their start, root mean square; noise alone: "
        "the same for a twin with this noise and no labels; apart: between the two, "
        "what labels did; cosine: of the first gradients with true and shuffled labels."
    )


def _print_alignment(found: "Diagnosis") -> None:
    def mean(values: tuple[float, ...]) -> float:
        return sum(values) / len(values)

    table = _table(
        f"Alignment ({found.judged_by}) of held-out texts",
        ("after",),
        ("value", "gain", "p"),
    )

    def add(name: str, value: float | None, gain: float, p: float | None) -> None:
        shown = "" if value is None else f"{value:.4g}"
        table.add_row(name, shown, f"{gain:.2g}", "" if p is None else f"{p:.2g}")

    table.add_row("nothing, at the start", f"{found.before:.4g}", "", "")
    add("Phase A", found.after, found.gain, None)
    chance = mean(found.twins)
    name = f"noise alone, {len(found.twins)} runs"
    add(name, chance, chance - found.before, found.p_value)
    if found.label_twins:
        theirs = mean(found.label_twins)
        name = f"shuffled training labels, {len(found.label_twins)} runs"
        add(name, theirs, theirs - found.before, found.p_labels)
    gain = mean(found.shuffled_gains)
    name = f"Phase A, by {len(found.shuffled_gains)} shuffles of held-out labels"
    add(name, None, gain, found.p_shuffled)
    _show(table)


def _table(title: str, words: tuple[str, ...], numbers: tuple[str, ...]) -> Any:
    from rich.table import Table

    table = Table(title=title)
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _show(table: Any) -> None:
    from rich.console import Console

    Console(width=None if Console().is_terminal else 110).print(table)
