"""The HTTP side: routes, admission of a request, and the small answers. Generation itself leaves through `answer.py`."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.errors import (
    EngineFailed,
    HeadraceError,
    QueueFull,
    RequestError,
    Unavailable,
)
from headrace.request import StepEvents
from headrace.server import protocol
from headrace.server.answer import Answer
from headrace.server.auth import Guarded, Keys, WrongHost, check_host, refuse
from headrace.server.codec import TextCodec
from headrace.server.formats import encode, error_body
from headrace.server.front import Front
from headrace.server.generation import INLINE_CHARS, Disconnected, Generate, unknown_model
from headrace.server.logs import fields
from headrace.server.messages import Ready
from headrace.server.metrics import Metrics, exposition
from headrace.server.openapi import describe
from headrace.server.queue import Queue
from headrace.server.quotas import NO_QUOTA, Quota, Quotas
from headrace.server.report import Reporter, Tracer
from headrace.server.structured import GrammarChecks
from headrace.server.tokens import Tokens
from headrace.server.worker import Worker

log = logging.getLogger("headrace.http")

Scope = MutableMapping[str, Any]
T = TypeVar("T")
MAX_PENDING_TEXTS = 256
PROBES = ("/health", "/ready", "/metrics")  # asked every few seconds by machines: not logged
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What the HTTP side needs to know."""

    model_names: tuple[str, ...]  # the first is the one shown
    max_body_bytes: int = 4 << 20
    has_priorities: bool = False
    keys: Keys = field(default_factory=lambda: Keys({}))  # none: every caller is let in
    allowed_hosts: frozenset[str] = frozenset()  # of the Host header; none: all
    max_queue_time_s: float = 0.0  # 0: no bound
    quota: Quota = NO_QUOTA  # of each key that has none of its own
    cors_origins: tuple[str, ...] = ()
    log_content: bool = False


class Application:
    """The ASGI application and the state it serves from."""

    def __init__(self, settings: ServerSettings, worker: Worker, metrics: Metrics | None = None, tracer: Tracer | None = None) -> None:
        self.settings = settings
        self.metrics = metrics or Metrics()
        self.front = Front(
            Queue(worker.settings.policy, worker.settings.max_waiting, settings.max_queue_time_s),
            Quotas(settings.quota, settings.keys.quotas),
            Reporter(with_content=settings.log_content, tracer=tracer),
        )
        self.codec: TextCodec | None = None
        self.draining = False
        self.created = int(time.time())
        self.answers: set[Answer] = set()
        self.idle = asyncio.Event()  # set when the last open answer ends
        self.when_ready: Callable[[], None] = lambda: None
        self.when_fatal: Callable[[HeadraceError], None] = lambda error: None
        self.worker = worker
        worker.listen(on_ready=self._on_ready, on_fatal=self._on_fatal, on_events=self._on_events)
        self._texts = ThreadPoolExecutor(2, "headrace-text")
        self._pending_texts = 0
        self.grammars = GrammarChecks()
        tokens = Tokens(self)
        guard = [Middleware(Guarded, settings.keys)] if len(settings.keys) else []

        def route(path: str, endpoint: Any, method: str, *, open_to_all: bool = False) -> Route:
            return Route(path, endpoint, methods=[method], middleware=[] if open_to_all else guard)

        self._router = Starlette(
            routes=[
                route("/v1/chat/completions", Generate(self, "chat"), "POST"),
                route("/v1/completions", Generate(self, "completions"), "POST"),
                route("/v1/responses", Generate(self, "responses"), "POST"),
                route("/v1/messages", Generate(self, "messages"), "POST"),
                route("/v1/messages/count_tokens", tokens.count_tokens, "POST"),
                route("/v1/embeddings", Generate(self, "embeddings"), "POST"),
                route("/v1/models", self._models, "GET"),
                route("/v1/models/{name:path}", self._model, "GET"),
                route("/tokenize", tokens.tokenize, "POST"),
                route("/detokenize", tokens.detokenize, "POST"),
                route("/openapi.json", self._openapi, "GET"),
                route("/queue", self._queue, "GET"),
                route("/metrics", self._metrics, "GET"),
                route("/health", self._health, "GET", open_to_all=True),
                route("/ready", self._ready, "GET", open_to_all=True),
            ],
            exception_handlers={
                HTTPException: _http_error,
                RequestError: _request_error,
                Disconnected: _nobody_there,
                Exception: _internal_error,
            },
        )
        # A path with a slash too many is unknown, as everywhere: a redirect would lose a POST's body.
        self._router.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["headrace.arrived"] = (scope.get("extensions") or {}).get("headrace.received") or time.monotonic()
            scope["headrace.send"] = send
            scope["headrace.request_id"] = _request_id(scope)
            sent = send if scope["path"] in PROBES else _logged(scope, send)
            try:
                check_host(scope["headers"], self.settings.allowed_hosts)
            except WrongHost as error:
                await refuse(scope, sent, error)
                return
            send = sent
        await self._router(scope, receive, send)

    # What the worker tells

    def _on_ready(self, ready: Ready) -> None:
        self.metrics.start_engine(ready.num_blocks)
        self.when_ready()

    def _on_fatal(self, error: HeadraceError) -> None:
        self.when_fatal(error)

    def _on_events(self, events: StepEvents) -> None:
        if events.stats is not None:
            self.metrics.observe_step(events.stats)
            self.front.queue.computed(events.stats.step_tokens)

    @property
    def is_ready(self) -> bool:
        return self.worker.ready is not None and self.codec is not None and not self.draining

    @property
    def limits(self) -> protocol.Limits:
        """Raises Unavailable or EngineFailed while there are none."""
        if self.draining:
            raise Unavailable("the server is shutting down")
        if self.worker.fatal is not None:
            raise EngineFailed("the engine has stopped")
        engine = self.worker.limits
        if engine is None or self.codec is None:
            raise Unavailable("the model is still loading")
        return protocol.Limits(engine.vocab_size, _longest(engine), self.settings.has_priorities)

    def fail_all(self, error: RequestError) -> None:
        for answer in list(self.answers):
            answer.fail(error)

    async def off_loop(self, work: Callable[[], T], chars: int) -> T:
        """Run text work: small at once, large in the pool. Raises QueueFull when the pool is far behind."""
        if chars <= INLINE_CHARS:
            return work()
        if self._pending_texts >= MAX_PENDING_TEXTS:
            raise QueueFull("too many large prompts are waiting to be tokenized")
        self._pending_texts += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._texts, work)
        finally:
            self._pending_texts -= 1

    # Small answers

    def _describe(self, name: str) -> dict[str, Any]:
        described: dict[str, Any] = {"id": name, "object": "model", "created": self.created, "owned_by": "headrace"}
        if self.worker.limits is not None:
            described["max_model_len"] = self.worker.limits.context_length
        return described

    async def _models(self, request: Request) -> Response:
        return _json(request, 200, {"object": "list", "data": [self._describe(name) for name in self.settings.model_names]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.settings.model_names:
            raise unknown_model(name)
        return _json(request, 200, self._describe(name))

    async def _openapi(self, request: Request) -> Response:
        return _json(request, 200, describe())

    async def _health(self, request: Request) -> Response:
        if self.worker.fatal is not None:
            return _json(request, 503, {"status": "failed"})
        return _json(request, 200, {"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        if self.is_ready:
            return _json(request, 200, {"status": "ready"})
        if self.worker.fatal is not None:
            status = "failed"
        elif self.draining:
            status = "draining"
        else:
            status = "loading" if self.worker.limits is None or self.codec is None else "restarting"
        response = _json(request, 503, {"status": status})
        response.headers["retry-after"] = "1"
        return response

    async def _queue(self, request: Request) -> Response:
        """The caller's own requests that wait, and what a newcomer of its would."""
        tenant, queue = request.scope.get("headrace.tenant", ""), self.front.queue
        now = time.monotonic()
        waiting = [
            {
                "request_id": it.request_id, "position": position, "waited_ms": round(1000 * (now - it.since), 1),
                "expected_wait_ms": round(1000 * expected_s, 1),
            }
            for it, position, expected_s in queue.places(tenant)
        ]  # fmt: skip
        expected_ms = round(1000 * queue.expected_s(tenant), 1)
        return _json(request, 200, {"object": "queue", "waiting": len(queue), "expected_wait_ms": expected_ms, "data": waiting})

    async def _metrics(self, request: Request) -> Response:
        self.metrics.queue_expected_s = self.front.queue.expected_s()
        self.metrics.engine_up = self.worker.ready is not None
        self.metrics.engine_restarts = self.worker.restarts
        self.metrics.memory = self.worker.memory
        text, content_type = exposition(self.metrics, self.settings.model_names[0], request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type, "x-request-id": request.scope["headrace.request_id"]})


def _longest(engine: Ready) -> int:
    """Tokens a request can have: what the model knows, and what the KV pool holds."""
    return min(engine.context_length, engine.num_blocks * engine.block_tokens)


def _logged(scope: Scope, send: Any) -> Any:
    """`send` with a line in the log when the response begins. Generation has its own `send`, and its own line."""

    async def logged(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start" and log.isEnabledFor(logging.INFO):
            took = 1000 * (time.monotonic() - scope["headrace.arrived"])
            log.info(
                "request",
                extra=fields(
                    request_id=scope["headrace.request_id"], key=scope.get("headrace.tenant") or None, method=scope["method"],
                    path=scope["path"][:100], status=message["status"], duration_ms=round(took, 3),
                ),
            )  # fmt: skip
        await send(message)

    return logged


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if isinstance(text, str) and _REQUEST_ID.fullmatch(text):
                return text
    return f"req-{random.getrandbits(96):024x}"


def _json(request: Request, status: int, value: Any) -> Response:
    headers = {"x-request-id": request.scope["headrace.request_id"]}
    return Response(encode(value), status, media_type="application/json", headers=headers)


def _error(request: Request, status: int, body: bytes, more: dict[str, str] | None = None) -> Response:
    headers = {"x-request-id": request.scope["headrace.request_id"], **(more or {})}
    return Response(body, status, media_type="application/json", headers=headers)


async def _request_error(request: Request, error: Exception) -> Response:
    refusal = error if isinstance(error, RequestError) else EngineFailed("internal error")
    return _error(request, refusal.status, error_body(refusal))


async def _nobody_there(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # the client has left: nobody reads it


async def _http_error(request: Request, error: Exception) -> Response:
    """404, 405 and whatever else the router says, in the form of all errors."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = {404: "no such route", 405: "method not allowed on this route"}.get(status, "bad request")
    refusal = RequestError(
        f"{request.method} {request.url.path[:100]}: {text}", code={404: "not_found", 405: "method_not_allowed"}.get(status)
    )
    allowed = [value for name, value in (getattr(error, "headers", None) or {}).items() if name.lower() == "allow"]
    headers = {"allow": ", ".join(sorted(allowed[0].split(", ")))} if allowed else {}
    return _error(request, status, error_body(refusal), headers)


async def _internal_error(request: Request, error: Exception) -> Response:
    log.error("%s: internal error", request.scope.get("headrace.request_id"), exc_info=error)
    return _error(request, 500, error_body(EngineFailed("internal error")))
