"""Commands that are killed, at random moments and at every rename and flush.

They are begun again until they end: with what an undisturbed one gives, and with no
file left behind that it would not have. `make attack KILLS=100` kills more often.
"""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from attack_cases import (
    JOBS,
    SECONDS,
    STOPPED,
    Child,
    dying_at,
    outcome,
    write_data,
    write_encoder,
)

KILLS = int(os.environ.get("KILLS", "5"))
MOMENTS = 40  # renames and flushes of a small command, about

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    write_encoder(folder / "bert")
    return folder


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Run a command undisturbed, once; give its end and how long it took."""
    known = {}

    def run(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            # Here, not in a child, so that children find the loops compiled.
            assert JOBS[name](data, folder / "out") == 0
            again = tmp_path_factory.mktemp(name)
            began = time.monotonic()
            child = Child(lambda: JOBS[name](data, again / "out"), again)
            assert child.end(3 * SECONDS) == 0, child.told()
            seconds = time.monotonic() - began
            expected = outcome(folder / "out")
            assert outcome(again / "out") == expected
            known[name] = expected, seconds
        return known[name]

    return run


def killed_until_it_ends(name, data, folder, seconds, kills, moments):
    """Kill a command so often, and let it end; give how often it was hit."""

    def target():
        return JOBS[name](data, folder / "out")

    for kill in range(kills + 1):
        place, after = moments.randint(1, MOMENTS), moments.random() < 0.5
        if kill == kills or kill % 2 == 0:
            child = Child(target, folder)
            if kill < kills and child.wait(moments.uniform(0, seconds)) is None:
                child.kill()
        else:
            child = Child(dying_at(target, place, after=after), folder)
        code = child.end(3 * SECONDS)
        # A command that was over before has nothing left to do.
        if code == 0 or "must be a new or empty folder" in child.told():
            return kill
        assert code == -signal.SIGKILL, child.told()
    raise AssertionError("an undisturbed command was killed")


@pytest.mark.parametrize("name", JOBS)
def test_killed_commands_end_as_if_nothing_had_happened(name, data, whole, tmp_path):
    expected, seconds = whole(name)
    moments = random.Random(name)
    wanted = max(1, KILLS // len(JOBS))
    hits = chains = 0
    while hits < wanted and chains < 10 * wanted:
        folder = tmp_path / str(chains)
        folder.mkdir()
        some = min(4, wanted - hits)
        hits += killed_until_it_ends(name, data, folder, seconds, some, moments)
        found = outcome(folder / "out")
        assert found.keys() == expected.keys()
        for file in expected:
            assert found[file] == expected[file], file
        chains += 1
    assert hits >= wanted
    print(f"{name}: {hits} kills, {chains} runs, all equal, nothing left behind")


def test_linearise_ends_what_was_killed_at_the_very_end(data, whole, tmp_path):
    """Between the rename of the model and the removal of what it was made of."""
    expected, _ = whole("linearise")

    def target():
        return JOBS["linearise"](data, tmp_path / "out")

    def killed():
        rename = os.replace

        def last(source, to):
            rename(source, to)
            if to == tmp_path / "out":
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = last
        return target()

    child = Child(killed, tmp_path)
    assert child.end(3 * SECONDS) == -signal.SIGKILL
    assert (tmp_path / "out.partial").is_dir()
    child = Child(target, tmp_path)
    assert child.end(3 * SECONDS) == 0, child.told()
    assert child.printed() == f"Model: {tmp_path / 'out'}\n"
    assert outcome(tmp_path / "out") == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "name, place", [("csv", 12), ("linearise", 5), ("reproduce", 4)]
)
def test_signals_end_in_one_sentence(name, place, number, data, whole, tmp_path):
    expected, _ = whole(name)

    def target():
        return JOBS[name](data, tmp_path / "out")

    child = Child(dying_at(target, place, after=True, number=number), tmp_path)
    assert child.end(3 * SECONDS) == 128 + number in STOPPED
    last = child.told().strip().splitlines()[-1]
    assert last.startswith("coulomb: stopped.")
    assert "Traceback" not in child.told()
    on = "the same command goes on"
    if name == "csv":
        on = f"coulomb train --resume {tmp_path / 'out'}"
    assert on.lower() in last.lower()
    child = Child(target, tmp_path)
    assert child.end(3 * SECONDS) == 0, child.told()
    assert outcome(tmp_path / "out") == expected


EARLY = """
import importlib.abc, os, sys

class Signals(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "typer":
            try:
                os.kill(os.getpid(), {number})
            except BaseException:
                {then}

from coulomb.cli import run_command
sys.meta_path.insert(0, Signals())
sys.argv = ["coulomb", "--help"]
run_command()
"""


AGAIN = """
import signal

def change(number, how, real=signal.signal):
    if how == signal.SIG_IGN:
        signal.signal = real
        os.kill(os.getpid(), number)
    return real(number, how)

signal.signal = change
run_command()
"""


HALF = "raise ImportError('half of numpy')"
ONCE = "run_command()"


@pytest.mark.parametrize(
    "number, then, last",
    [
        (signal.SIGINT, "raise", ONCE),
        (signal.SIGTERM, "raise", ONCE),
        (signal.SIGINT, HALF, ONCE),
        (signal.SIGTERM, HALF, ONCE),
        (signal.SIGTERM, "raise", AGAIN),
    ],
)
def test_a_signal_while_modules_are_imported(number, then, last):
    """Whoever imports may answer it with an error of its own; a second may follow."""
    code = EARLY.format(number=int(number), then=then).replace(ONCE, last)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 128 + number
    assert found.stderr == "coulomb: stopped.\n"
