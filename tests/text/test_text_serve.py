"""`coulomb serve` as clients meet it: a real server on loopback, and a real browser."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing, contextmanager

import numpy as np
import pytest
import uvicorn
from playwright.sync_api import sync_playwright
from text_cases import TINY, reviews

from coulomb._support.errors import ParameterError
from coulomb.text import TextClassifier
from coulomb.text.serve import Limits, listen, make_app

JSON = {"Content-Type": "application/json"}
TEXTS = ["a fine film", "the plot <b>dull</b>", "", "é " * 50]


@pytest.fixture(scope="module")
def classifier():
    texts, labels = reviews(60)
    small = TINY | {"epochs": 2, "align_epochs": 0.0}
    return TextClassifier(settings=small, random_state=0).fit(texts, labels)


class Slow:
    """A predictor that waits until it is let go, and fails at one text."""

    def __init__(self, predictor):
        self.config, self.classes = predictor.config, predictor.classes
        self.predictor, self.free = predictor, threading.Event()
        self.batches, self.seen, self.busy = [], [], threading.Event()

    def answers(self, texts):
        self.busy.set()
        assert self.free.wait(60)
        self.batches.append(len(texts))
        self.seen += texts
        if "fail" in texts:
            raise ArithmeticError("of the model")
        return self.predictor.answers(texts)


@contextmanager
def servers():
    """Run servers in this process, and say where they are."""
    running = []

    def started(predictor, **limits):
        app = make_app(predictor, "one", limits=Limits(**limits))
        door = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [door]})
        thread.start()
        running.append((server, thread, door))
        return door.getsockname()[1]

    yield started
    for server, thread, door in running:
        server.should_exit = True
        thread.join(30)
        door.close()
        assert not thread.is_alive()


@pytest.fixture
def start():
    with servers() as started:
        yield started


@pytest.fixture(scope="module")
def server(classifier):
    with servers() as started:
        yield started(classifier.predictor_, texts=4, n_bytes=3000)


def call(port, path, texts=None, *, body=None, headers=JSON, verb=None):
    """Send one request; give its status and what came back."""
    if texts is not None:
        body = json.dumps({"texts": texts})
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as line:
        line.request(verb or ("GET" if body is None else "POST"), path, body, headers)
        answer = line.getresponse()
        told = answer.read().decode()
        kind = answer.headers.get_content_type()
        return answer.status, json.loads(told) if kind == "application/json" else told


def test_answers_are_those_of_the_predictor(classifier, start):
    port = start(classifier.predictor_)
    status, found = call(port, "/predict", TEXTS)
    assert status == 200
    assert found == {"predictions": classifier.predictor_.answers(TEXTS)}
    status, found = call(port, "/embed", TEXTS)
    vectors = classifier.predictor_.embed(TEXTS)
    assert status == 200
    np.testing.assert_array_equal(np.float32(found["embeddings"]), vectors)
    status, about = call(port, "/health")
    assert (status, about["run"], about["kind"]) == (200, "one", "texts")
    assert about["classes"] == ["neg", "pos"]


def test_the_head_of_an_embedding_is_the_prediction(classifier):
    predictor = classifier.predictor_
    head = predictor.model.head
    scores = predictor.embed(TEXTS) @ head.weight.detach().numpy().T
    scores = np.exp(scores + head.bias.detach().numpy())
    chances = scores / scores.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(chances, predictor.predict_proba(TEXTS), rtol=1e-5)
    assert predictor.embed([]).shape == (0, predictor.model.settings.width)


def ask_together(port, texts):
    """Send one request for each text from threads of their own."""
    found = {}

    def one(text):
        found[text] = call(port, "/predict", [text])

    threads = [threading.Thread(target=one, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    return threads, found


def wait_for_queue(port, count):
    for _ in range(600):
        told = call(port, "/metrics")[1]
        if f"coulomb_waiting {count}\n" in told:
            return
        threading.Event().wait(0.05)
    raise AssertionError(told)


def test_requests_that_wait_are_evaluated_together(classifier, start):
    slow = Slow(classifier.predictor_)
    port = start(slow)
    first, found = ask_together(port, ["a fine film"])
    assert slow.busy.wait(60)
    texts = [f"film {number}" for number in range(7)]
    threads, others = ask_together(port, texts)
    wait_for_queue(port, 7)
    slow.free.set()
    for thread in first + threads:
        thread.join(60)
    assert slow.batches == [1, 7]
    for text, (status, answer) in (found | others).items():
        expected = classifier.predict_proba([text])[0]
        assert status == 200
        chances = answer["predictions"][0]["probabilities"]
        np.testing.assert_allclose(list(chances.values()), expected, rtol=1e-5)
    told = call(port, "/metrics")[1]
    assert 'coulomb_requests_total{path="/predict",status="200"} 8\n' in told
    assert "coulomb_texts_total 8\n" in told
    assert "coulomb_batches_total 2\n" in told


def test_a_text_that_fails_does_not_fail_the_others(classifier, start):
    slow = Slow(classifier.predictor_)
    port = start(slow)
    first, _ = ask_together(port, ["first"])
    assert slow.busy.wait(60)
    threads, found = ask_together(port, ["fine", "fail", "dull"])
    wait_for_queue(port, 3)
    slow.free.set()
    for thread in first + threads:
        thread.join(60)
    told = {text: status for text, (status, _) in found.items()}
    assert told == {"fine": 200, "fail": 500, "dull": 200}
    assert found["fail"][1] == {"error": "The server failed; its log has more."}


def test_a_full_queue_and_slow_answers_are_told(classifier, start):
    slow = Slow(classifier.predictor_)
    port = start(slow, waiting=1, seconds=1.0)
    threads, found = ask_together(port, ["first"])
    assert slow.busy.wait(60)
    more, waiting = ask_together(port, ["second"])
    wait_for_queue(port, 1)
    status, told = call(port, "/predict", ["third"])
    assert (status, told) == (503, {"error": "Too many requests wait. Try again."})
    for thread in threads + more:
        thread.join(60)
    late = (503, {"error": "There was no answer in 1 s."})
    assert found | waiting == {"first": late, "second": late}
    slow.free.set()
    for _ in range(60):  # on a busy machine a second is short
        if call(port, "/predict", ["fourth"])[0] == 200:
            break
    assert slow.seen[0] == "first"
    assert set(slow.seen[1:]) == {"fourth"}  # nobody waited for the second any more


@pytest.mark.parametrize(
    ("status", "words", "request_"),
    [
        (400, "damaged", {"body": "{"}),
        (400, "nested more than", {"body": "[" * 500}),
        (400, '{"texts": [...]}', {"body": "[]"}),
        (400, '{"texts": [...]}', {"body": '{"texts": "one"}'}),
        (400, '{"texts": [...]}', {"body": '{"texts": []}'}),
        (400, "Row 2: a text must be a string", {"texts": ["a", 3]}),
        (400, "one text is needed", {"texts": [["a", "b"]]}),
        (400, "at most 4; got 5", {"texts": ["a"] * 5}),
        (400, "is damaged", {"body": b'{"texts": ["\xff"]}'}),
        (400, "is damaged", {"body": '{"texts": ["\\ud800"]}'}),
        (413, "3,000 bytes", {"texts": ["a" * 4000]}),
        (415, "application/json", {"body": "{}", "headers": {}}),
        (400, "`Host` must be", {"path": "/health", "headers": {"Host": "evil.test"}}),
        (400, "`Host` must be", {"path": "/health", "headers": {"Host": "{a}.test"}}),
        (400, "`Host` must be", {"path": "/health", "headers": {"Host": "a.test#b"}}),
        (405, "Method Not Allowed", {"verb": "PUT", "body": "{}"}),
        (404, "Not Found", {"path": "/../etc/passwd"}),
    ],
)
def test_bad_requests_get_one_sentence(server, status, words, request_):
    path = request_.pop("path", "/predict")
    found, told = call(server, path, **request_)
    assert found == status
    assert list(told) == ["error"]
    assert words in told["error"]


def test_limits_are_checked():
    with pytest.raises(ParameterError, match="`seconds` must be positive; got 0"):
        Limits(seconds=0)
    with pytest.raises(ParameterError, match="`texts`"):
        Limits(texts=0)


def test_the_page_predicts_in_a_browser(classifier, start):
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip(f"no browser is installed; looked for {', '.join(names)}")
    port = start(classifier.predictor_)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox"]
        )
        tab = launched.new_page(viewport={"width": 390, "height": 844})
        said = []
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto(f"http://127.0.0.1:{port}/")
        tab.get_by_label("A text").fill("a fine <img src=x onerror=alert(1)> film")
        tab.get_by_role("button").click()
        tab.wait_for_selector("td.number")
        shown = tab.locator("td").all_inner_texts()
        wide = tab.evaluate("document.documentElement.scrollWidth")
        launched.close()
    text = "a fine <img src=x onerror=alert(1)> film"
    expected = classifier.predict_proba([text])[0]
    assert {shown[0], shown[3]} == {"neg", "pos"}
    assert shown[2] == f"{100 * expected.max():.1f} %"
    assert wide <= 390
    assert not said


def test_the_command_serves_until_it_is_told_to_stop(classifier, tmp_path):
    classifier.save(tmp_path / "run")
    verb = [sys.executable, "-m", "coulomb", "serve", str(tmp_path / "run")]
    with subprocess.Popen(
        [*verb, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        name, _, url = process.stdout.readline().strip().partition(": ")
        assert name == "run"
        port = int(url.rpartition(":")[2])
        assert call(port, "/predict", ["a fine film"])[0] == 200
        taken = subprocess.run(
            [*verb, "--port", str(port)], capture_output=True, text=True, check=False
        )
        assert (taken.returncode, taken.stderr.count("\n")) == (1, 1)
        assert "ddress already in use" in taken.stderr
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert err == "coulomb: stopped.\n"


def test_the_listener_says_where_it_is(classifier):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listen(make_app(classifier.predictor_), "127.0.0.1", port, started=print)
