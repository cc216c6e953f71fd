"""`coulomb diagnose`: tell whether Phase A of a run learned."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coulomb._support.errors import ParameterError
from coulomb.cli.output import print_table, write_numbers

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
    write_numbers(json, {"run": run.resolve().name} | found.record())


def _print_choice(found: "ChoiceTest | MatchTest") -> None:
    from coulomb.attention.align.starts import MatchTest

    rows = []
    if isinstance(found, MatchTest):
        for factor, share in found.alone.items():
            long = f"blind to the part, {factor:g} times as long"
            mark = "1" if factor == found.choice.factor else ""
            rows.append((long if factor else "as drawn", f"{100 * share:.2f} %", mark))
        headers = ("particles", "told", "chosen")
        print_table("Attention between the texts", headers, rows)
        return
    order = {shift: str(place) for place, shift in enumerate(found.choice.shifts, 1)}
    for shift, share in found.alone.items():
        name = f"{shift:+d}" if shift else "0, the token itself"
        rows.append((name, f"{100 * share:.2f} %", order.get(shift, "")))
    print_table("Windows of tokens", ("tokens away", "tells", "chosen"), rows)
    typer.echo(
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
    print_table(title, ("layer", "head", *columns), rows, words=2)
    typer.echo(
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
    print_table(title, ("after", "value", "gain", "p"), rows)
