"""A load on `coulomb serve`, beside the same model behind plain transformers.

    python benchmarks/serve.py --data-dir DIR
    python benchmarks/serve.py --data-dir DIR --clients 1,8,64 --seconds 10

all-MiniLM-L6-v2 with a head that is fitted to a few hundred reviews of Rotten Tomatoes.
Both servers are Starlette applications under uvicorn, each a process of its own on
loopback; the rival tokenizes every request and calls `AutoModel`, as its documentation
shows, in the framework's pool of threads, and has the same weights. Clients keep one
connection each, send one review at a time and wait for the answer. The servers take
turns, so that what else the machine does meets both. Beside the rate there is processor
time of the server per request: on a busy machine whoever has more threads to run gets
more of the machine, which is not a merit.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from coulomb.text import Predictor, TextClassifier, load_task


def rival(folder, port):
    """Serve the exported encoder with transformers alone."""
    import torch
    import uvicorn
    from safetensors.torch import load_file
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse
    from starlette.routing import Route
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    head = load_file(Path(folder) / "head.safetensors")

    @torch.no_grad()
    def evaluate(texts):
        given = tokenizer(texts, return_tensors="pt", padding=True, truncation=True)
        states = model(**given).last_hidden_state
        mask = given["attention_mask"].unsqueeze(-1)
        pooled = (states * mask).sum(1) / mask.sum(1)
        scores = pooled @ head["weight"].T + head["bias"]
        return scores.softmax(-1).tolist()

    async def predict(request):
        texts = (await request.json())["texts"]
        return JSONResponse({"probabilities": await run_in_threadpool(evaluate, texts)})

    app = Starlette(routes=[Route("/predict", predict, methods=["POST"])])
    uvicorn.run(app, port=port, log_level="warning", access_log=False)


async def client(port, texts, until, seconds):
    """Ask for one text after the other over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for number, text in enumerate(texts):
        if time.perf_counter() > until and number:
            break
        body = json.dumps({"texts": [text]}).encode()
        head = (
            f"POST /predict HTTP/1.1\r\nHost: localhost:{port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        writer.write(head.encode() + body)
        header = await reader.readuntil(b"\r\n\r\n")
        assert header.startswith(b"HTTP/1.1 200"), header
        length = int(header.lower().split(b"content-length:")[1].split()[0])
        answer = json.loads(await reader.readexactly(length))
        seconds.append(time.perf_counter() - began)
    writer.close()
    return answer


def processor_time(process):
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


async def load(port, texts, clients, duration, process):
    """Give requests per second, the 99th percentile of their time, and their cost."""
    spent = processor_time(process)
    seconds, until = [], time.perf_counter() + duration
    began = time.perf_counter()
    parts = [texts[number::clients] for number in range(clients)]
    await asyncio.gather(*(client(port, part, until, seconds) for part in parts))
    passed = time.perf_counter() - began
    cost = (processor_time(process) - spent) / len(seconds)
    return len(seconds) / passed, float(np.quantile(seconds, 0.99)), cost


def wait_for(port, texts):
    """Give the first answer of a server that is starting."""
    for _ in range(240):
        try:
            return asyncio.run(client(port, texts[:1], 0, []))
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(f"no server on port {port}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default=os.environ.get("COULOMB_DATA"))
    parser.add_argument("--clients", default="1,8,64")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rival", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rival:
        rival(asked.rival[0], int(asked.rival[1]))
        return
    corpus = load_task("rotten_tomatoes", asked.data_dir)
    train, test = corpus.split("train"), corpus.split("test")
    texts = list(test.texts) * 20
    with tempfile.TemporaryDirectory() as place:
        run, export = Path(place, "run"), Path(place, "encoder")
        some = list(range(0, len(train), max(1, len(train) // 400)))
        settings = {"tune": "head", "attention": "softmax"}
        model = TextClassifier(encoder="auto", settings=settings)
        part = train.take(some)
        model.fit(part.texts, part.labels).save(run)
        Predictor.load(run).save_pretrained(export)
        ports = {"coulomb": 8765, "transformers": 8766}
        verbs = {
            "coulomb": ["-m", "coulomb", "serve", str(run), "--port", "8765"],
            "transformers": [__file__, "--rival", str(export), "8766"],
        }
        processes = {
            name: subprocess.Popen([sys.executable, *verb])
            for name, verb in verbs.items()
        }
        try:
            ours = wait_for(8765, texts)["predictions"][0]["probabilities"]
            theirs = wait_for(8766, texts)["probabilities"][0]
            np.testing.assert_allclose(list(ours.values()), theirs, atol=1e-4)
            print(
                "clients  server        requests/s   p99, ms   processor, ms"
                "   times transformers   per processor time"
            )
            for clients in map(int, asked.clients.split(",")):
                found = {name: [] for name in ports}
                for _ in range(asked.rounds):
                    for name, port in ports.items():
                        how = texts, clients, asked.seconds, processes[name]
                        found[name].append(asyncio.run(load(port, *how)))
                best = {name: np.mean(rates, axis=0) for name, rates in found.items()}
                rival_rate, _, rival_cost = best["transformers"]
                for name, (rate, late, cost) in best.items():
                    print(
                        f"{clients:7}  {name:12} {rate:11.1f} {1e3 * late:9.1f}"
                        f" {1e3 * cost:15.1f} {rate / rival_rate:20.2f}"
                        f" {rival_cost / cost:20.2f}"
                    )
        finally:
            for process in processes.values():
                process.terminate()
                process.wait(30)


if __name__ == "__main__":
    main()
