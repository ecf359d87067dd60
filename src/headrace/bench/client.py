"""The HTTP side: connections that cost little a token, each chunk stamped when its bytes are read.

asyncio's protocols and httptools' parser without the layers of a client library: at thousands of chunks a second those layers' work
would delay the very times that are measured.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from headrace.bench.record import Record
from headrace.bench.stream import Answer, reason_of
from headrace.errors import UsageError

CONNECT_S = 10.0
MAX_ERROR_BYTES = 1 << 16
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and how long one may take."""

    host: str
    port: int
    path: str  # of the endpoint
    base: str  # of the path, before /v1
    tls: bool
    api_key: str = field(default="", repr=False)
    timeout_s: float = 600.0

    @classmethod
    def parse(cls, url: str, *, endpoint: str = "chat", api_key: str = "", timeout_s: float = 600.0) -> Target:
        """From a server's URL, with or without /v1 or the endpoint's own path. Raises UsageError."""
        if endpoint not in PATHS:
            raise UsageError(f"--endpoint: expected {' or '.join(PATHS)}, got {endpoint!r}")
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme not in ("http", "https") or parts.query or parts.fragment or any(not "!" <= c <= "~" for c in url):
            raise UsageError(f"URL: expected http://HOST:PORT, or https, got {url!r}")
        if any(not " " < c < "\x7f" for c in api_key):
            raise UsageError("--api-key: expected letters, digits and signs, no spaces")
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/")
        for path in PATHS.values():
            base = base.removesuffix(path)
        base = base.removesuffix("/v1")
        return cls(host, port or (443 if tls else 80), base + PATHS[endpoint], base, tls, api_key, timeout_s)

    def head(self, method: str, path: str, body: bytes) -> bytes:
        """The request up to its body."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {path} HTTP/1.1", f"host: {host}:{self.port}", "accept: text/event-stream, application/json"]
        if self.api_key:
            lines.append(f"authorization: Bearer {self.api_key}")
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "\r\n"]).encode()


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._over: asyncio.Future[str] | None = None
        self._now = 0.0
        self.is_open = False
        self.uses = 0

    def begin(self, request: bytes, answer: Answer) -> asyncio.Future[str]:
        """Send a request. The future holds what went wrong, or nothing, when the response is over."""
        if self._transport is None:
            raise RuntimeError("begin: not connected")
        self.uses += 1
        self._answer, self._body, self._keep = answer, b"", True
        self._parser = httptools.HttpResponseParser(self)
        self._over = over = asyncio.get_running_loop().create_future()
        answer.record.sent = self._clock()
        self._transport.write(request)
        return over

    def abort(self, reason: str) -> None:
        """End what is open at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()
        self._finish(reason)

    def close(self) -> None:
        """After what was written is sent."""
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def _finish(self, reason: str) -> None:
        over, self._over, self._answer = self._over, None, None
        if over is not None and not over.done():
            over.set_result(reason)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        if self._answer is None:  # after the end of a response nothing may come
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort("the answer is not HTTP")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._now = self._clock()
        answer = self._answer
        if answer is not None and answer.is_done:  # a body without a length ends with the connection
            self._end(answer)
        else:
            self._finish(f"connection lost: {type(exc).__name__}" if exc else "connection closed early")

    # What the parser calls.

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.record.status = self._parser.get_status_code()
            self._answer.record.head = self._now
            self._keep = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        if answer.record.status == 200:
            answer.feed(body, self._now)
        elif len(self._body) < MAX_ERROR_BYTES:
            self._body += body

    def on_message_complete(self) -> None:
        if self._answer is not None:
            self._end(self._answer)
        if not self._keep:
            self.close()

    def _end(self, answer: Answer) -> None:
        record = answer.record
        record.end = self._now
        self._finish(answer.close() if record.status == 200 else f"HTTP {record.status}{reason_of(self._body)}")


class Client:
    """Sends requests, over as many connections as there are requests open, kept for the next ones."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.begun = time.perf_counter()
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if target.tls else None

    def now(self) -> float:
        """Seconds on the run's clock, which every record is on."""
        return time.perf_counter() - self.begun

    def restart(self) -> None:
        """The clock is 0 now."""
        self.begun = time.perf_counter()

    async def send(self, answer: Answer, body: bytes) -> None:
        """One request to its end. Whatever goes wrong is noted in the record; nothing is raised."""
        record = answer.record
        record.started = self.now()
        request = self.target.head("POST", self.target.path, body) + body
        record.error = await self._send(answer, request)
        if record.end is None:
            record.end = self.now()

    async def _send(self, answer: Answer, request: bytes) -> str:
        while True:
            try:
                connection = self._reuse() or await self._connect()
            except TimeoutError:
                return "no connection: timeout"
            except OSError as error:
                return f"no connection: {getattr(error, 'reason', None) or error.strerror or error}"
            over = connection.begin(request, answer)
            limit = asyncio.get_running_loop().call_later(self.target.timeout_s, connection.abort, "timeout")
            try:
                reason = await over
            finally:
                limit.cancel()
            # The server may have closed an idle connection while the request was on its way to it: once more, on a fresh one.
            if connection.uses == 1 or answer.record.status or not reason.startswith("connection"):
                break
        if connection.is_open:
            self._idle.append(connection)
        return reason

    def _reuse(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(
                lambda: Connection(self.now), self.target.host, self.target.port, ssl=self._tls,
                server_hostname=self.target.host if self._tls else None,
            )  # fmt: skip
        return connection

    async def models(self) -> list[str]:
        """The models the server says it has. Raises UsageError when it cannot be reached or does not say."""
        try:
            connection = await self._connect()
        except (TimeoutError, OSError) as error:
            raise UsageError(f"{self.target.host}:{self.target.port} cannot be reached: {_why(error)}") from None
        answer = _Whole(Record(0))
        limit = asyncio.get_running_loop().call_later(CONNECT_S, connection.abort, "timeout")
        reason = await connection.begin(self.target.head("GET", f"{self.target.base}/v1/models", b""), answer)
        limit.cancel()
        if connection.is_open:
            self._idle.append(connection)
        try:
            names = [str(model["id"]) for model in json.loads(answer.body)["data"]]
        except (ValueError, KeyError, TypeError):
            names = []
        if reason or not names:
            raise UsageError(f"{self.target.host}:{self.target.port}: /v1/models: {reason or 'no model in it'}; --model names one")
        return names

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


def _why(error: BaseException) -> Any:
    return "timeout" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or error


class _Whole(Answer):
    """A response that is no stream, kept as it is."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self.body = b""

    def feed(self, data: bytes, now: float) -> None:
        self.body += data

    def close(self) -> str:
        return ""
