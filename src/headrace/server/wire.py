"""Sends ASGI messages from a plain callback: at once while the client keeps up, through one task while it does not."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator, MutableMapping
from types import coroutine
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Coroutine[Any, Any, None]]

MAX_QUEUED_BYTES = 1 << 20  # on top of what the transport and the kernel hold


class SlowReader(Exception):
    """The client takes its answer more slowly than it is made, and the limit of what is kept for it is reached."""


@coroutine
def _resume(call: Coroutine[Any, Any, None], waiting_for: Any) -> Generator[Any, Any, None]:
    """Drive a coroutine on that was already driven up to its first wait."""
    while True:
        try:
            value = yield waiting_for
        except BaseException as error:
            try:
                waiting_for = call.throw(error)
            except StopIteration:
                return
        else:
            try:
                waiting_for = call.send(value)
            except StopIteration:
                return


class Wire:
    """The sending half of one response."""

    __slots__ = ("_abort", "_direct", "_queue", "_queued_bytes", "_send", "_started", "_task")

    def __init__(self, send: Send, abort: Callable[[], None] | None = None, direct: Callable[[bytes], bool] | None = None) -> None:
        self._send = send
        self._abort = abort
        self._direct = direct  # writes a part of the body at once, or says no
        self._started = False
        self._task: asyncio.Task[None] | None = None
        self._queue: deque[Message] = deque()
        self._queued_bytes = 0

    @property
    def started(self) -> bool:
        """The status line is out: what goes wrong now can only be told in the body."""
        return self._started

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        self._put({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, body: bytes, *, more: bool = True) -> None:
        """Raises SlowReader when too much is waiting already."""
        if more and self._task is None and self._direct is not None and self._direct(body):
            return
        self._put({"type": "http.response.body", "body": body, "more_body": more})

    def respond(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """A whole response with its length."""
        self.start(status, [*headers, (b"content-length", str(len(body)).encode())])
        self.write(body, more=False)

    def close(self) -> None:
        """Send nothing more, and break the connection off if something is still unsent."""
        self._queue.clear()
        if self._task is not None:
            self._task.cancel()
            if self._abort is not None:
                self._abort()

    def _put(self, message: Message) -> None:
        if self._task is None:
            # The server's `send` does not wait while there is room in the transport, so it ends on its first run and needs no task.
            call = self._send(message)
            try:
                waiting_for = call.send(None)
            except StopIteration:
                return
            self._task = asyncio.get_running_loop().create_task(self._drain(call, waiting_for))
            return
        self._queued_bytes += len(message.get("body", b""))
        if self._queued_bytes > MAX_QUEUED_BYTES:
            raise SlowReader
        self._queue.append(message)

    async def _drain(self, call: Coroutine[Any, Any, None], waiting_for: Any) -> None:
        await _resume(call, waiting_for)
        while self._queue:
            message = self._queue.popleft()
            self._queued_bytes -= len(message.get("body", b""))
            await self._send(message)
        self._task = None
