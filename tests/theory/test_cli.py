import json

import pytest
import typer
from typer.testing import CliRunner

from coulomb._support.errors import ParameterError
from coulomb.cli.theory import deviations, meanfield

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(meanfield)
app.command()(deviations)


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_meanfield_prints_exponents_and_writes_its_numbers(tmp_path):
    out = tmp_path / "out.json"
    result = run(
        "meanfield", "2*x**2", "--cells", 60, "--counts", "4,8,16", "--replicas", 4,
        "--time", 0.1, "--step-size", 0.01, "--json", out,
    )  # fmt: skip
    assert result.exit_code == 0
    assert "W1 falls as N^-0" in result.stdout
    numbers = json.loads(out.read_text())
    assert len(numbers["flow"]["densities"]) == 3
    assert len(numbers["flow"]["densities"][0]) == 60
    assert numbers["gap"]["counts"] == [4, 8, 16]
    assert numbers["equilibrium"]["converged"] is True
    energies = numbers["flow"]["free_energies"]
    assert energies == sorted(energies, reverse=True)


def test_meanfield_on_a_disc_at_zero_temperature(tmp_path):
    result = run(
        "meanfield", "x**2 + y**2", "--domain", "disc", "--cells", 12, "--beta", "inf",
        "--start", "exp(-2*r**2)", "--counts", "4,8,16", "--replicas", 3,
        "--time", 0.05, "--step-size", 0.01, "--json", tmp_path / "out.json",
    )  # fmt: skip
    assert result.exit_code == 0
    assert "observable falls as" in result.stdout
    assert json.loads((tmp_path / "out.json").read_text())["gap"]["first"][0] is None


def test_deviations_print_the_rate_and_write_their_numbers(tmp_path):
    out = tmp_path / "out.json"
    result = run(
        "deviations", "x**2", "--cells", 100, "--counts", "4,8,16",
        "--configurations", 500, "--json", out,
    )  # fmt: skip
    assert result.exit_code == 0
    assert "-log P grows with N at" in result.stdout
    numbers = json.loads(out.read_text())
    assert numbers["deviations"]["rate"] > 0
    assert len(numbers["free_energy"]["values"]) == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["meanfield", "x.__class__"], "may only use"),
        (["meanfield", "y"], "no variable 'y'"),
        (["meanfield", "x", "--s", "1"], "s < d or a truncation"),
        (["meanfield", "x", "--counts", "a,b"], "whole numbers"),
        (["deviations", "x", "--beta", "-1"], "inverse_temperature"),
        (["meanfield", "x", "--start", "-1"], "at least 0"),
    ],
)
def test_mistakes_end_in_a_sentence(arguments, message):
    with pytest.raises(ParameterError, match=message):
        run(*arguments)


@pytest.mark.parametrize("verb", ["meanfield", "deviations"])
def test_help_has_examples(verb):
    result = run(verb, "--help")
    assert result.exit_code == 0
    assert f'coulomb {verb} "' in result.stdout
