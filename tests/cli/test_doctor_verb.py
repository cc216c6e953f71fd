"""`coulomb doctor`: the machine in words and numbers, and a test of every loop."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import typer.testing

from coulomb.attention.ops import compiled as _compiled
from coulomb.attention.ops import tuning
from coulomb.cli import doctor as _doctor
from coulomb.cli.main import app
from coulomb.kernels import available

RUNNER = typer.testing.CliRunner()
needs_numba = pytest.mark.skipif(not available(), reason="needs numba")


def run(tmp_path, *options):
    file = tmp_path / "doctor.json"
    result = RUNNER.invoke(app, ["doctor", "--json", str(file), *options])
    return result, json.loads(file.read_text())


@needs_numba
@pytest.mark.slow
def test_every_loop_equals_its_twin(tmp_path):
    importlib.import_module("sklearn")  # sets variables when it is first imported
    before = dict(os.environ)
    result, content = run(tmp_path)
    assert result.exit_code == 0, result.output
    assert dict(os.environ) == before
    differences = content["differences"]
    assert {name.split(":")[0] for name in differences} == {
        "particles", "attention", "encoder",
    }  # fmt: skip
    assert 0 < max(differences.values()) < 1e-4


# What was called has machine code for some types; helpers are not kept on disk.
USED = """
import importlib, pkgutil
from coulomb import kernels
from coulomb.cli import doctor
checks = doctor._particle_checks() | doctor._attention_checks()
for check in (checks | doctor._encoder_checks()).values():
    check()
for file in pkgutil.iter_modules(kernels.__path__):
    module = importlib.import_module(f"coulomb.kernels.{file.name}")
    for key, loop in vars(module).items():
        if type(getattr(loop, "_cache", None)).__name__ == "HashedFunctionCache":
            print(key, len(loop.signatures))
"""


@needs_numba
@pytest.mark.slow
def test_no_loop_is_left_out():
    done = subprocess.run(
        [sys.executable, "-c", USED],
        env=os.environ | {"COULOMB_TUNE": "0", "COULOMB_NUMBA": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    loops = dict(line.split() for line in done.stdout.splitlines())
    assert len(loops) >= 25
    assert not [name for name, count in loops.items() if count == "0"]


@needs_numba
def test_the_loops_are_what_is_tested(monkeypatch):
    """Attention and decoding reach the loops: none of the checks is of torch alone."""
    monkeypatch.setenv("COULOMB_TUNE", "0")
    used = []
    forward, decoder = _compiled.forward, _compiled.decoder
    attend_near = _compiled.attend_near

    def spy_near(*arguments):
        used.append("near keys")
        out = attend_near(*arguments)
        assert out is not None
        return out

    def spy_forward(kind, *arguments):
        used.append(kind)
        kept = forward(kind, *arguments)
        assert kept is not None
        return kept

    def spy_decoder(*arguments):
        step = decoder(*arguments)
        assert step is not None  # torch would decode then

        def counted(*arguments):
            used.append("decode")
            return step(*arguments)

        return counted

    monkeypatch.setattr(_compiled, "forward", spy_forward)
    monkeypatch.setattr(_compiled, "decoder", spy_decoder)
    monkeypatch.setattr(_compiled, "attend_near", spy_near)
    for name, check in _doctor._attention_checks().items():
        used.clear()
        check()
        kind = name.split(": ")[1].split(",")[0]
        expected = {"packed": "linear", "decoding": "decode"}.get(kind, kind)
        assert set(used) == {expected}, name


@needs_numba
def test_a_wrong_loop_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(_doctor, "_particle_checks", dict)
    monkeypatch.setattr(_doctor, "_encoder_checks", dict)
    forward = _compiled.forward

    def wrong(kind, problem, tensors, key_mask, out):
        kept = forward(kind, problem, tensors, key_mask, out)
        if kind == "causal":
            out[0, 0, 3, 5] += 1
        return kept

    monkeypatch.setattr(_compiled, "forward", wrong)
    result, content = run(tmp_path)
    assert result.exit_code == 1
    assert "COULOMB_NUMBA=0" in result.output
    bad = [name for name, x in content["differences"].items() if x > 1e-4]
    assert bad
    assert all("causal" in name for name in bad)


def test_without_numba_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("COULOMB_NUMBA", "0")
    result, content = run(tmp_path)
    assert result.exit_code == 0, result.output
    assert content["machine"]["compiled loops"].startswith("off")
    assert content["model"] == "fixed"
    assert content["differences"] == {}


@needs_numba
def test_the_model_and_what_it_chooses(tmp_path, monkeypatch):
    monkeypatch.delenv("COULOMB_TUNE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "_known", {})
    costs = {
        tuning.form_name(kind, engine, passes): (0.0, 1e-11 if engine == "torch" else 1)
        for kind in tuning.KINDS
        for engine in tuning.ENGINES
        for passes in tuning.PASSES
    }
    monkeypatch.setattr(tuning, "_measure_all", lambda: costs)
    result, content = run(tmp_path, "--no-test")
    assert result.exit_code == 0, result.output
    assert "differences" not in content
    assert content["model"] == tuning.identity() != "fixed"
    assert content["costs"].keys() == costs.keys()
    forms = content["forms"]
    assert forms["causal, forward"]["8192"] == "causal torch"
    assert forms["bidirectional, forward+backward"]["32"] == "quadratic torch"
    assert content["machine"]["processor"] in result.output
