"""`coulomb reproduce`, `claims`, `report`: the paper's tables, figures, sentences."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Argument, Option

from coulomb._support.errors import CoulombError, ParameterError
from coulomb.cli import output

if TYPE_CHECKING:
    from coulomb.experiments.claims import Result

_ALL = "noise, strength, budget, runtime, text, phase-a, meanfield or deviations"
_NOTES = 20  # that are printed
_STYLES = {"holds": "green", "does not hold": "red", "inconclusive": "yellow"}


def reproduce(
    name: str = Argument(help=f"The experiment: {_ALL}."),
    preset: str = Option(
        "paper", help="smoke (seconds), paper, or full (more trials)."
    ),
    jobs: int = Option(1, min=1, max=1024, help="Workers, of one thread each."),
    scheduler: str | None = Option(
        None,
        metavar="tcp://HOST:PORT|local:N",
        help="Dask cluster to run the jobs on, instead of workers here.",
    ),
    out: Path = Option(
        Path("results"), help="Folder of the records; finished jobs are kept."
    ),
    task: list[str] | None = Option(
        None, help="Text data set, for text, budget and phase-a; may be repeated."
    ),
    data_dir: Path | None = Option(
        None, envvar="COULOMB_DATA", help="Folder of the text data sets."
    ),
    only: list[str] | None = Option(
        None,
        metavar="NAME=VALUE,...",
        help="Some jobs of the plan, by method, constants, control, seed and the "
        "like; may be repeated.",
    ),
    csv: Path | None = Option(
        None, help="Also write summary tables and compressed records to this folder."
    ),
) -> None:
    """Repeat a table or figure of the paper, with the controls it lacks.

    Every job adds its records to `OUT/NAME/records.jsonl` when it is done. Interrupted,
    the same command goes on where it stopped; so it does from compressed records in
    `OUT/NAME.csv.gz`. The numbers do not depend on `--jobs` or `--scheduler`; the jobs
    of a worker that dies run on another.

    **Examples**

    `coulomb reproduce noise --preset smoke`

    `coulomb reproduce strength --jobs 2 --out results`

    `coulomb reproduce noise --scheduler tcp://10.0.0.7:8786`

    `coulomb reproduce text --task rotten_tomatoes --data-dir data --jobs 2`

    `coulomb reproduce text --task sst2 --only method=softmax,kernel-cos2 --only seed=0`
    """
    from coulomb.experiments import Settings, load_records
    from coulomb.experiments.runner import run_experiment
    from coulomb.experiments.summary import write_tables

    settings = Settings(preset, tuple(task or ()), data_dir, _choices(only or []))
    output.check_outputs(folder=out / name)
    output.check_outputs(folder=csv)
    saved = f"Finished jobs are in {out / name}; the same command goes on from there."
    with output.resumable(saved):
        account = run_experiment(name, out, settings, n_jobs=jobs, scheduler=scheduler)
    output.say(
        f"{name}: {account.planned} jobs, {account.found} found, {account.done} done, "
        f"{len(account.failures)} failed. Records: {out / name}"
    )
    records = load_records(out / name)
    _print_summary(name, records)
    if csv is not None:
        for path in write_tables(csv, {name: records}):
            output.say(f"Table: {path}")
    if account.failures:
        raise CoulombError(
            f"{len(account.failures)} jobs failed; run the command again to retry. The "
            f"first: {account.failures[0]}"
        )


def _choices(only: list[str]) -> dict[str, tuple[str, ...]]:
    chosen: dict[str, tuple[str, ...]] = {}
    for each in only:
        name, found, values = each.partition("=")
        if not (name and found and values):
            raise ParameterError(
                f"`only` must look like method=softmax,kernel-cos2; got {each!r}."
            )
        chosen[name] = chosen.get(name, ()) + tuple(values.split(","))
    return chosen


def claims(
    out: Path = Argument(
        Path("results"), help="Folder of records, as files or compressed."
    ),
    json: Path | None = Option(None, "--json", help="Write everything to this file."),
) -> None:
    """Hold the paper's claims against our records.

    Each claim is shown with the paper's number, ours (with the paper's constants and
    with our defaults), the paired difference with its standard error, and a verdict
    with its criterion: holds, does not hold, or inconclusive. Below them is what the
    paper's tables say about themselves. Claims whose records are missing are "not
    tested here"; those of a row that is its own control are "not applicable".

    **Examples**

    `coulomb claims results`

    `coulomb claims docs/results/records --json claims.json`
    """
    from coulomb._support.archive import plain
    from coulomb.experiments import load_experiments
    from coulomb.experiments.claims import SMOKE, is_smoke, judge_claims
    from coulomb.experiments.paper import check_paper

    if not out.is_dir():
        raise ParameterError(
            f"`out` must be a folder of records; there is none at {str(out)!r}. "
            "`coulomb reproduce NAME --out DIR` makes one."
        )
    output.check_outputs(json)
    problems: list[str] = []
    evidence = load_experiments(out, problems)
    results, checks = judge_claims(evidence, problems), check_paper()
    _print_claims(results)
    rows = [(c.title, c.found, "yes" if c.confirmed else "no") for c in checks]
    title = "What the paper's tables say about themselves"
    output.print_table(title, ("check", "found", "anomaly"), rows, words=3, width=160)
    counts = Counter(f.verdict.value for result in results for f in result.findings)
    output.say(", ".join(f"{count} {word}" for word, count in counts.items()) + ".")
    if is_smoke(record for part in evidence.values() for record in part):
        output.say(SMOKE)
    for problem in problems[:_NOTES]:
        output.say(f"Note: {problem}")
    if len(problems) > _NOTES:
        output.say(f"Note: and {len(problems) - _NOTES} more of the kind.")
    told = {"claims": _plain(results), "checks": plain(checks), "notes": problems}
    output.write_numbers(json, told)


def _print_summary(name: str, records: Any) -> None:
    from coulomb.experiments.claims import SMOKE, is_smoke
    from coulomb.experiments.summary import METRICS, summarise

    smoke = is_smoke(records)
    metric = METRICS.get(name, ("accuracy",))[0]
    varied = ("task", "noise", "n_samples", "n_components", "n_features")
    summaries = summarise(records, metric)
    shown = [v for v in varied if len({s.row.get(v) for s in summaries}) > 1]
    rows = []
    for each in sorted(summaries, key=lambda s: [str(s.row.get(v)) for v in shown]):
        cells = [str(each.row.get(v)) for v in shown]
        error = "" if smoke or each.n < 2 else f"{each.standard_error:.4f}"
        rows.append((each.title, *cells, f"{each.mean:.4f}", error, str(each.n)))
    headers = ("row", *shown, "mean", "standard error", "n")
    output.print_table(f"{name}: {metric}", headers, rows, width=160)
    if smoke:
        output.say(SMOKE)


def _print_claims(results: "list[Result]") -> None:
    from coulomb.experiments.claims import words

    rows = []
    for result in results:
        claim = (result.claim.text, result.claim.paper)
        for found in result.findings:
            gap = words(found.difference) if found.difference else ""
            verdict = (found.verdict.value, _STYLES.get(found.verdict.value, "dim"))
            why = f"{found.criterion} {found.note}".strip()
            rows.append((*claim, found.constants, found.ours, gap, verdict, why))
            claim = ("", "")
    headers = ("claim", "paper", "constants", "ours", "difference", "verdict", "why")
    output.print_table(
        "The paper's claims", headers, rows, words=7, lines=True, width=160
    )


def _plain(results: "list[Result]") -> list[dict[str, Any]]:
    from coulomb._support.archive import plain

    names = ("name", "source", "text", "paper")
    return [
        {name: getattr(claim, name) for name in names}
        | {"findings": [plain(vars(x)) | {"verdict": x.verdict.value} for x in found]}
        for claim, found in results
    ]


def report(
    folder: Path = Argument(metavar="DIR", help="The folder of `coulomb reproduce`."),
    out: Path | None = Option(
        None, help="The page to write; DIR/report.html if not given."
    ),
    open_page: bool = Option(False, "--open", help="Show the page in the web browser."),
) -> None:
    """Write one page with every figure, table and claim of a folder of results.

    The page is a single HTML file. It needs no network and no other file, so it can be
    sent by mail. Experiments that have not been run are left out, and it says so.

    **Examples**

    `coulomb report results`

    `coulomb report results --out page.html --open`
    """
    from coulomb.report.page import write_report

    page = write_report(folder, out)
    output.say(f"Page: {page}")
    if open_page and typer.launch(page.resolve().as_uri()):
        output.say("coulomb: no web browser could be started.", err=True)
