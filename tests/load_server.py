"""A server that answers by a script, on asyncio, and notes when it wrote each part of it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(content: str | None = None, *, finish: str | None = None, logprobs: int = 0, **more: Any) -> bytes:
    """A chat chunk; `more` are fields of its delta, but for usage."""
    usage = more.pop("usage", None)
    said = more if content is None else {"content": content} | more
    listed = {"content": [{"token": "x", "logprob": -1.0}] * logprobs} if logprobs else None
    return event(choices=[{"index": 0, "delta": said, "finish_reason": finish, "logprobs": listed}], usage=usage)


ROLE = delta(None, role="assistant")


def usage(completion: int, prompt: int = 10, **more: Any) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion}, **more)


@dataclass
class Reply:
    """Parts with the seconds to wait before each, or what to wait for. `cut`: the connection breaks after them."""

    parts: list[tuple[float | asyncio.Event, bytes]]
    status: int = 200
    bytewise: bool = False
    cut: bool = False


def answer(*texts: str, gap: float = 0.01, first: float = 0.0, **more: Any) -> Reply:
    """A plain stream of one token a chunk, as most servers write it."""
    parts: list[tuple[float | asyncio.Event, bytes]] = [(first, ROLE)]
    parts += [(gap, delta(text)) for text in texts]
    return Reply([*parts, (0.0, delta(None, finish="length")), (0.0, usage(len(texts), **more)), (0.0, DONE)])


@dataclass
class Exchange:
    """A request as it came in, and the times (perf_counter) at which the parts of the reply were written."""

    path: str
    headers: dict[str, str]
    body: Any
    came: float
    sent: list[float] = field(default_factory=list)


class Server:
    def __init__(self, script: Callable[[int, Any], Reply], *, ssl: Any = None) -> None:
        """`script` gives the reply to a request by its number (from 0, without probes of one token) and its body."""
        self.log: list[Exchange] = []
        self.connections = 0
        self.url = ""
        self._script = script
        self._ssl = ssl
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[Any] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0, ssl=self._ssl)
        scheme = "https" if self._ssl else "http"
        self.url = f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Break what is open, and let its tasks end: a loop that is closed before them says so."""
        self._server.close()
        for writer in self._writers:
            writer.close()
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        await asyncio.sleep(0.01)  # TLS says goodbye a little later

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        self._tasks.append(asyncio.current_task())
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:]) if name}
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        path = lines[0].split(" ")[1]
        if path.endswith("/models"):
            body = b'{"data":[{"id":"scripted"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            return True
        exchange = Exchange(path, headers, json.loads(raw), time.perf_counter())
        if path != "/v1/chat/completions":
            reply = Reply([(0.0, b'{"error": {"code": "not_found"}}')], status=404)
        elif exchange.body.get("max_tokens") == 1:  # a probe: a word is a token, and the template has five
            reply = answer("a", gap=0.0, prompt=5 + len(exchange.body["messages"][-1]["content"].split()))
        else:
            self.log.append(exchange)
            reply = self._script(len(self.log) - 1, exchange.body)
        kind = b"text/event-stream" if reply.status == 200 else b"application/json"
        writer.write(b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % (reply.status, kind))
        for wait, part in reply.parts:
            if isinstance(wait, asyncio.Event):
                await wait.wait()
            elif wait:
                await asyncio.sleep(wait)
            framed = b"%x\r\n%b\r\n" % (len(part), part)
            if reply.bytewise:
                for i in range(len(framed) - 1):
                    writer.write(framed[i : i + 1])
                    await asyncio.sleep(0)
                framed = framed[-1:]
            exchange.sent.append(time.perf_counter())
            writer.write(framed)
        if reply.cut:
            await writer.drain()
            return False
        writer.write(b"0\r\n\r\n")
        return True


@asynccontextmanager
async def serving(script: Callable[[int, Any], Reply], *, ssl: Any = None) -> AsyncIterator[Server]:
    """On this loop, so that nothing comes between its clock and the client's."""
    server = Server(script, ssl=ssl)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextmanager
def apart(script: Callable[[int, Any], Reply]) -> Iterator[Server]:
    """In a thread with a loop of its own, for commands that run theirs."""
    server, loop = Server(script), asyncio.new_event_loop()
    loop.run_until_complete(server.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(server.stop())
        loop.close()
