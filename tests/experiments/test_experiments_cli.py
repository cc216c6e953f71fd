import json

import pytest
import typer
from typer.testing import CliRunner

from coulomb._support.errors import ParameterError
from coulomb.cli.experiments import claims, reproduce
from coulomb.experiments import Settings, load_records
from coulomb.experiments.base import experiments
from coulomb.experiments.runner import write_sample

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(reproduce)
app.command()(claims)


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_reproduce_writes_records_and_tables(tmp_path):
    arguments = (
        "reproduce", "meanfield", "--preset", "smoke", "--out", tmp_path / "out",
        "--csv", tmp_path / "csv",
    )  # fmt: skip
    first = run(*arguments)
    assert first.exit_code == 0
    assert "meanfield: 2 jobs, 0 found, 2 done, 0 failed" in first.stdout
    assert "A smoke run: two trials, no verdicts." in first.stdout
    records = load_records(tmp_path / "out" / "meanfield")
    assert len(records) == 2
    compressed = load_records(tmp_path / "csv" / "records" / "meanfield.csv.gz")
    assert [r.metrics for r in compressed] == [r.metrics for r in records]
    judged = run("claims", tmp_path / "csv" / "records")
    assert "A smoke run: two trials, no verdicts." in judged.stdout
    assert " hold" not in judged.stdout.splitlines()[-2]
    assert (tmp_path / "csv" / "meanfield-summary.csv").read_text().startswith("metric")
    assert "2 found, 0 done" in run(*arguments).stdout
    # Compressed records are gone on from as well.
    elsewhere = ("--out", tmp_path / "csv" / "records")
    assert "2 found, 0 done" in run(*arguments[:4], *elsewhere).stdout


def test_part_of_a_plan_is_run_and_the_rest_follows(tmp_path):
    arguments = ("reproduce", "meanfield", "--preset", "smoke", "--out", tmp_path)
    plan = experiments.build("meanfield").plan(Settings("smoke"))
    method = plan[0]["method"]
    assert (
        "1 jobs, 0 found, 1 done"
        in run(*arguments, "--only", f"method={method}").stdout
    )
    assert "2 jobs, 1 found, 1 done" in run(*arguments).stdout


def test_claims_print_verdicts_and_write_them(tmp_path):
    write_sample(tmp_path)
    result = run("claims", tmp_path, "--json", tmp_path / "claims.json")
    assert result.exit_code == 0
    assert "not tested here" in result.stdout
    found = json.loads((tmp_path / "claims.json").read_text())
    assert len(found["claims"]) >= 20
    verdicts = {f["verdict"] for c in found["claims"] for f in c["findings"]}
    assert verdicts >= {"inconclusive", "not tested here"}
    tested = [f for c in found["claims"] for f in c["findings"] if f["difference"]]
    assert all(f["criterion"].startswith("Holds if") for f in tested)
    assert sum(check["confirmed"] for check in found["checks"]) == 8


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["reproduce", "nois"], "did you mean 'noise'"),
        (["reproduce", "noise", "--preset", "papers"], "did you mean 'paper'"),
        (["reproduce", "noise", "--only", "seed"], "must look like method="),
        (["reproduce", "noise", "--only", "sed=0"], "did you mean 'seed'"),
        (["reproduce", "noise", "--only", "method=fixd"], "did you mean 'fixed'"),
        (["claims", "nowhere"], "there is none at 'nowhere'"),
    ],
)
def test_mistakes_end_in_a_sentence(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParameterError, match=message):
        run(*arguments)


@pytest.mark.parametrize("verb", ["reproduce", "claims"])
def test_help_has_examples(verb):
    assert f"coulomb {verb} " in run(verb, "--help").stdout
