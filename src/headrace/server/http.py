"""The HTTP server: uvicorn with limits on headers, refusals in the one error form, and our own way of stopping."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from headrace.errors import RequestError, Unavailable
from headrace.server.formats import error_body

MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 128
MAX_URL_BYTES = 8 << 10
OTHER_FILES = 64  # descriptors that are no client's


class _HeaderLimit(Exception):
    """Raised inside the parser's callbacks to stop it."""


class HttpProtocol(HttpToolsProtocol):
    """Counts header bytes before they are kept, gives a request a time to come in, and lets a response break its connection off."""

    read_timeout_s = 30.0  # for a request's head, and again for its body
    max_connections = 1 << 16

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = False
        self._header_bytes = 0
        self._refusal = (400, "the request is not valid HTTP")
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refusal = (503, "there are too many connections")
            self.send_400_response("")
            return
        self._expect_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def _expect_more(self) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(self.read_timeout_s, self._too_slow)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if self.flow.read_paused:  # it is we who do not read
            self._expect_more()
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and (self._in_headers or self.pipeline or self.cycle.response_started):
            self.transport.abort()  # an error now would land in the middle of an answer
        elif not self.transport.is_closing():
            self._refusal = (408, f"the request did not come within {self.read_timeout_s:g} s")
            self.send_400_response("")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_headers and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refusal = (431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = 0
        self._expect_more()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._refusal = (414, f"the URL has more than {MAX_URL_BYTES} bytes")
            raise _HeaderLimit

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            self._refusal = (431, f"there are more than {MAX_HEADERS} headers")
            raise _HeaderLimit
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        received = time.monotonic()  # before it waits for its turn on the event loop
        self._in_headers = False
        self._expect_more()
        super().on_headers_complete()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"] = {
            "headrace.abort": self.transport.abort, "headrace.write": self._direct_write(), "headrace.received": received,
        }  # fmt: skip

    def on_message_complete(self) -> None:
        self._expect_nothing()
        super().on_message_complete()

    def _direct_write(self) -> Callable[[bytes], bool]:
        """What the response's `send` does with one more part of a chunked body, without its cost. False: it must go through `send`."""
        cycle, flow, write = self.cycle, self.flow, self.transport.write

        def direct(body: bytes) -> bool:
            if flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
                return False
            write(b"%x\r\n%b\r\n" % (len(body), body))
            return True

        return direct

    def send_400_response(self, msg: str) -> None:
        status, text = self._refusal
        body = error_body(Unavailable(text) if status == 503 else RequestError(text))
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Runs in a loop somebody else made; signals are that one's business too."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(
    app: Any, *, tls: ssl.SSLContext | None = None, backlog: int = 2048, keep_alive_s: int = 30, read_timeout_s: float = 30.0
) -> HttpServer:
    # Without a descriptor left nobody could even be refused.
    limits = {"read_timeout_s": read_timeout_s, "max_connections": resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES}
    config = uvicorn.Config(
        app,
        http=type("HttpProtocol", (HttpProtocol,), limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=backlog,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=2,
    )
    config.load()
    config.ssl = tls
    return HttpServer(config)
