"""A trained run behind HTTP: `coulomb serve`.

Requests that arrive while the model is busy are evaluated together next: nobody waits
for a batch to fill, and a busy server wastes least.
"""

import asyncio
import logging
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import Any

from coulomb._support.archive import parse_json
from coulomb._support.checks import check_count, check_real
from coulomb._support.errors import CoulombError, ParameterError
from coulomb._version import __version__
from coulomb.text.data import check_pairs, check_texts
from coulomb.text.predictor import Predictor

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise ParameterError(
        "`coulomb serve` needs starlette and uvicorn; install them with: "
        "pip install 'coulomb[serve]'."
    ) from error

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# As `Host` writes them. A URL has the server's own address in place of an odd name.
_CALLED = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)
VERBS = {"predict": "predictions", "embed": "embeddings"}
_SAFE = {
    "Content-Security-Policy": "default-src 'self' data: 'unsafe-inline'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and how many may wait."""

    texts: int = 256
    n_bytes: int = 1 << 20
    seconds: float = 30.0
    waiting: int = 256

    def __post_init__(self) -> None:
        for name in ("texts", "n_bytes", "waiting"):
            check_count(name, getattr(self, name))
        check_real("seconds", self.seconds, above=0)


@dataclass
class _Asked:
    """Texts that one request wants to have evaluated."""

    verb: str
    texts: list[Any]
    answer: asyncio.Future[list[Any]]


@dataclass
class Batcher:
    """Evaluates what is waiting, all at once, in a thread."""

    predictor: Predictor
    limits: Limits
    counts: Counter[str] = field(default_factory=Counter)
    queue: asyncio.Queue[_Asked] = field(init=False)

    def __post_init__(self) -> None:
        self.queue = asyncio.Queue(self.limits.waiting)

    async def ask(self, verb: str, texts: list[Any]) -> list[Any]:
        """Wait for the answers to some texts."""
        asked = _Asked(verb, texts, asyncio.get_running_loop().create_future())
        try:
            self.queue.put_nowait(asked)
        except asyncio.QueueFull:
            raise HTTPException(
                503, "Too many requests wait. Try again.", {"Retry-After": "1"}
            ) from None
        return await asked.answer

    async def run(self) -> None:
        """Serve until cancelled."""
        held: _Asked | None = None
        while True:
            batch = [held or await self.queue.get()]
            held, size = None, len(batch[0].texts)
            while not self.queue.empty() and held is None:
                asked = self.queue.get_nowait()
                size += len(asked.texts)
                if asked.verb == batch[0].verb and size <= self.limits.texts:
                    batch.append(asked)
                else:
                    held = asked
            await self._answer(batch)

    async def _answer(self, batch: list[_Asked]) -> None:
        """Answer requests together, or one by one if that fails."""
        # Whoever has given up is not waited for.
        batch = [asked for asked in batch if not asked.answer.done()]
        texts = [text for asked in batch for text in asked.texts]
        if not texts:
            return
        self.counts["batches"] += 1
        self.counts["texts"] += len(texts)
        embeds = batch[0].verb == "embed"
        evaluate: Any = self.predictor.embed if embeds else self.predictor.answers
        try:
            found = await asyncio.to_thread(evaluate, texts)
        except Exception as error:
            if len(batch) > 1:
                for asked in batch:
                    await self._answer([asked])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        rows = iter(found.tolist() if embeds else found)
        for asked in batch:
            part = [next(rows) for _ in asked.texts]
            if not asked.answer.done():
                asked.answer.set_result(part)


def make_app(
    predictor: Predictor,
    name: str = "run",
    *,
    host: str = LOOPBACK[0],
    limits: Limits | None = None,
) -> Starlette:
    """Build the application that answers for a trained run.

    `POST /predict` and `POST /embed` take `{"texts": [...]}`; `GET /health` describes
    the run, `GET /metrics` counts for Prometheus, and `GET /` is a page to try it on.

    Parameters
    ----------
    predictor
        Of the run.
    name
        What to call it.
    host
        Where it will listen. On an address of this machine alone, requests must call
        it by one: a page of another site reaches it by a name of its own.
    limits
        Of a request.

    Returns
    -------
    Starlette
        For any ASGI server.
    """
    limits = limits or Limits()
    config = predictor.config
    pairs = config.data.get("pairs")
    batcher = Batcher(predictor, limits)
    counts = batcher.counts
    about = {
        "status": "ok",
        "run": name,
        "version": __version__,
        "kind": "tags" if config.kind == "token" else "pairs" if pairs else "texts",
        "classes": [str(label) for label in predictor.classes],
        "max_length": config.settings.model.max_length,
        "limits": vars(limits),
    }

    async def read_body(request: Request) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limits.n_bytes:
                raise HTTPException(
                    413, f"A request may have {limits.n_bytes:,} bytes. Send less."
                )
        return bytes(body)

    async def read_texts(request: Request) -> list[Any]:
        # A page of another site may send plain text here, but no JSON.
        if request.headers.get("content-type", "").split(";")[0] != "application/json":
            raise HTTPException(415, "Send JSON, as `Content-Type: application/json`.")
        given = parse_json(await read_body(request), "The request")
        texts = given.get("texts") if isinstance(given, dict) else None
        if not isinstance(texts, list) or not texts:
            raise ParameterError(
                'The request must be {"texts": [...]} with one text or more.'
            )
        if len(texts) > limits.texts:
            raise ParameterError(
                f"`texts` must be at most {limits.texts}; got {len(texts):,}. Send "
                "them in parts."
            )
        checked = check_texts(texts, tagged=config.kind == "token")
        if config.kind != "token":
            known = isinstance(checked[0], tuple) if pairs is None else pairs
            check_pairs(checked, known)
        return checked

    async def answer(request: Request, verb: str) -> Response:
        if verb == "embed" and config.kind == "token":
            raise ParameterError("This run tags words: it has no `/embed`.")
        texts = await read_texts(request)
        return JSONResponse({VERBS[verb]: await batcher.ask(verb, texts)})

    def counted(handle: Handler) -> Handler:
        """Check the host, bound the time, count, and turn errors into JSON."""

        async def call(request: Request) -> Response:
            started = time.perf_counter()
            try:
                called = request.headers.get("host", "")
                if host in LOOPBACK and not _CALLED.fullmatch(called):
                    raise HTTPException(400, f"`Host` must be one of {LOOPBACK}.")
                async with asyncio.timeout(limits.seconds):
                    response = await handle(request)
            except CoulombError as error:
                response = _told(400, str(error))
            except TimeoutError:
                response = _told(503, f"There was no answer in {limits.seconds:g} s.")
            except HTTPException as error:
                response = _told(error.status_code, error.detail, error.headers)
            except ClientDisconnect:
                response = _told(400, "The request ended early.")
            except Exception:
                logging.getLogger(__name__).exception("A request failed.")
                response = _told(500, "The server failed; its log has more.")
            path = request.url.path
            counts[f'requests{{path="{path}",status="{response.status_code}"}}'] += 1
            passed = time.perf_counter() - started
            counts[f'microseconds{{path="{path}"}}'] += int(1e6 * passed)
            return response

        return call

    async def health(_: Request) -> Response:
        return JSONResponse(about)

    async def metrics(_: Request) -> Response:
        lines = [f"coulomb_waiting {batcher.queue.qsize()}"]
        for key, value in sorted(counts.items()):
            series, brace, labels = key.partition("{")
            lines.append(f"coulomb_{series}_total{brace}{labels} {value}")
        return PlainTextResponse("\n".join(lines) + "\n")

    page = files("coulomb.text").joinpath("assets/serve.html").read_text("utf-8")

    async def show_page(_: Request) -> Response:
        return Response(page, headers=_SAFE, media_type="text/html")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        try:
            yield
        finally:
            task.cancel()

    routes = {"/health": health, "/metrics": metrics, "/": show_page}
    gets = [Route(path, counted(handle)) for path, handle in routes.items()]
    posts = [
        Route(f"/{verb}", counted(partial(answer, verb=verb)), methods=["POST"])
        for verb in VERBS
    ]

    async def retell(_: Request, error: Any) -> Response:
        return _told(error.status_code, error.detail)

    return Starlette(
        routes=[*posts, *gets],
        lifespan=lifespan,
        exception_handlers={HTTPException: retell},
    )


def _told(status: int, sentence: str, headers: Any = None) -> JSONResponse:
    return JSONResponse({"error": sentence}, status, headers)


def listen(
    app: Starlette, host: str, port: int, *, started: Callable[[str], None]
) -> None:
    """Run an application until a signal comes; `started` is told where it is."""
    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as door:
        place = f"[{host}]" if ":" in host else host
        started(f"http://{place}:{door.getsockname()[1]}")
        config = uvicorn.Config(app, log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[door])
