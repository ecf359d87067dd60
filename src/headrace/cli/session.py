"""The server without sockets: requests go to the very application that serves HTTP, so that an offline answer is the online one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from headrace.cli.serve import engine_settings, load_codec
from headrace.errors import HeadraceError
from headrace.server.app import Application, ServerSettings
from headrace.server.messages import EngineSettings
from headrace.server.worker import Worker


class Session:
    """An engine process and the application in front of it. Use as an async context manager; raises HeadraceError if it cannot start."""

    def __init__(self, settings: EngineSettings, reference: str | None) -> None:
        self.settings = engine_settings(settings, reference)
        self._worker = Worker(self.settings)
        self._worker.spawn()
        self._app = Application(ServerSettings(("offline",), max_body_bytes=64 << 20), self._worker)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        self._app.when_ready = lambda: None if over.done() else over.set_result(None)
        self._app.when_fatal = lambda error: None if over.done() else over.set_exception(error)
        try:
            await self._worker.connect()
            self._app.codec = await loop.run_in_executor(None, load_codec(self.settings.model))
            await over
        except BaseException:
            await self._worker.close()
            raise
        self._app.when_fatal = lambda error: None
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._worker.close()

    async def call(self, path: str, body: bytes, request_id: str) -> tuple[int, Any]:
        """Status and body of one request."""
        status, parts = 0, bytearray()
        async for message in self._exchange(path, body, request_id):
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts += message.get("body", b"")
        if not status:
            raise HeadraceError("the request was not answered")
        return status, json.loads(bytes(parts))

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streaming request. Raises HeadraceError with the server's message. Leaving early cancels the request."""
        pending, status = b"", 0
        async with aclosing(self._exchange(path, json.dumps(body | {"stream": True}).encode())) as messages:
            async for message in messages:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    continue
                pending += message.get("body", b"")
                *lines, pending = pending.split(b"\n\n") if status == 200 else [pending]
                for line in lines:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise HeadraceError(event["error"]["message"])
                        yield event
        if status != 200:
            raise HeadraceError(json.loads(pending)["error"]["message"])

    async def _exchange(self, path: str, body: bytes, request_id: str = "") -> AsyncGenerator[dict[str, Any], None]:
        sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})

        async def send(message: dict[str, Any]) -> None:
            sent.put_nowait(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                sent.put_nowait(None)
                inbox.put_nowait({"type": "http.disconnect"})

        scope: dict[str, Any] = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"x-request-id", request_id.encode())], "http_version": "1.1", "scheme": "http", "client": None, "server": None,
        }  # fmt: skip
        task = asyncio.get_running_loop().create_task(self._app(scope, inbox.get, send))
        try:
            while (message := await sent.get()) is not None:
                yield message
        finally:
            inbox.put_nowait({"type": "http.disconnect"})
            await task
