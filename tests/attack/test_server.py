"""Hostile requests to `coulomb serve`: one JSON sentence each, and it goes on."""

import http.client
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing

import pytest
from hostile import WHOLE, cut_and_flipped, json_mutants

from coulomb.text import TextClassifier

FILES = int(os.environ.get("FILES", "0"))
HEADERS = {"Content-Type": "application/json"}
GOOD = {"texts": ["a fine film", "a dull one"], "more": 1}
EVERY = ("/predict", "/embed", "/health", "/metrics", "/")
HANG = 20
# One text each, of what tokenizers and matchers of words are slow or wrong at.
TEXTS = {
    "one long word": "a" * 900_000,
    "many words": "a " * 450_000,
    "marks": "!" * 900_000,
    "accents": "e" + "\u0301" * 400_000,
    "zero bytes": "\0" * 100_000,
    "joined emoji": "\U0001f468\u200d" * 100_000,
    "no characters": "\uffff\ufdd0\U0010ffff",
    "turned": "\u202e" * 1000,
    "markup": "[/]\x1b[2J<script>",
}
RAW = {
    "nothing": b"",
    "no request": b"\0\xff" * 500 + b"\r\n\r\n",
    "no end": b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 20_000,
    "long path": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    "length": b"POST /predict HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    "huge length": b"POST /predict HTTP/1.1\r\nContent-Length: " + b"9" * 400,
    "twice": b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "chunks": b"POST /predict HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "smuggled": b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\n\r\n",
    "version": b"GET / HTTP/9.9\r\n\r\n",
    "upgrade": b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\n\r\n",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A real `coulomb serve` of a tiny run; gives its port."""
    folder = tmp_path_factory.mktemp("served") / "run"
    texts, labels = ["a fine film", "a dull one"] * 8, ["good", "bad"] * 8
    small = {"epochs": 1, "width": 8, "ffn_width": 8, "n_heads": 1, "n_layers": 1}
    small |= {"n_features": 4, "align_epochs": 0.0, "max_length": 16, "min_steps": 0}
    TextClassifier(settings=small, random_state=0).fit(texts, labels).save(folder)
    process = subprocess.Popen(
        [sys.executable, "-m", "coulomb", "serve", str(folder), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COULOMB_TUNE": "0", "COLUMNS": "500"},
    )
    try:
        told = ""
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", told)):
            line = process.stdout.readline()
            assert line, process.communicate()
            told += line
        yield int(found[1])
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=60)[1]
        assert "Traceback" not in errors
    finally:
        process.kill()


def ask(port, path, body, headers=HEADERS, verb="POST"):
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)) as line:
        line.request(verb, path, body, headers)
        answer = line.getresponse()
        return answer.status, answer.read()


def check(name, status, told):
    """There is an answer for each text, or one sentence, and never a failure."""
    assert status in (200, 400, 404, 405, 413, 415), (name, status, told)
    found = json.loads(told)
    if status != 200:
        assert list(found) == ["error"], name
        assert "\x1b" not in found["error"], name


def bodies():
    yield from json_mutants(json.dumps(GOOD))
    yield from WHOLE.items()
    yield from cut_and_flipped(json.dumps(GOOD).encode(), random.Random(0))


def test_bodies(server):
    made = list(bodies())
    chosen = made if FILES else random.Random(1).sample(made, 40)
    for name, body in chosen:
        check(name, *ask(server, "/predict", body))
    print(f"serve: {len(chosen)} of {len(made)} bodies tried, 0 problems")
    assert ask(server, "/predict", json.dumps(GOOD))[0] == 200


@pytest.mark.parametrize("name", TEXTS)
def test_texts(server, name):
    for text in (TEXTS[name], [TEXTS[name], "b"]):
        status, told = ask(server, "/predict", json.dumps({"texts": [text]}))
        check(name, status, told)


@pytest.mark.parametrize("name", RAW)
def test_bytes_on_the_wire(server, name):
    with socket.create_connection(("127.0.0.1", server), timeout=HANG) as line:
        line.sendall(RAW[name])
        select.select([line], [], [], 0.2)
    assert ask(server, "/health", None, verb="GET")[0] == 200


@pytest.mark.parametrize("path", EVERY)
@pytest.mark.parametrize("verb", ["PUT", "DELETE", "OPTIONS", "TRACE", "HEAD", "QUERY"])
def test_verbs_and_headers(server, path, verb):
    odd = HEADERS | {"X-Forwarded-Host": "evil.test", "Content-Encoding": "gzip"}
    status, told = ask(server, path, b"\x1f\x8b\x08", odd, verb)
    assert status in (200, 404, 405)
    if told and status != 200:
        check(verb, status, told)


def test_open_connections_keep_nobody_out(server):
    lines = [socket.create_connection(("127.0.0.1", server)) for _ in range(200)]
    try:
        for line in lines[::2]:
            line.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-")
        began = time.perf_counter()
        assert ask(server, "/predict", json.dumps(GOOD))[0] == 200
        assert time.perf_counter() - began < HANG
    finally:
        for line in lines:
            line.close()
