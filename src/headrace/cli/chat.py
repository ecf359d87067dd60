"""`headrace chat`: a conversation in the terminal, with a model here or behind a URL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import uvloop

from headrace.cli.session import Session
from headrace.errors import HeadraceError, UsageError
from headrace.server.messages import EngineSettings

PATH = "/v1/chat/completions"


async def _remote(url: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """Events of a stream from any OpenAI-compatible server. Raises HeadraceError."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=10)) as http,
            http.post(base + PATH, json=body | {"stream": True}) as response,
        ):
            if response.status != 200:
                text = await response.text()
                try:
                    text = json.loads(text)["error"]["message"]
                except (ValueError, KeyError, TypeError):
                    text = text[:200]
                raise HeadraceError(f"{response.status}: {text}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise HeadraceError(str(event["error"].get("message")))
                    yield event
    except (aiohttp.ClientError, ValueError) as error:
        raise HeadraceError(f"{url}: {error}") from None


def run_chat(reference: str | None, url: str, settings: EngineSettings, *, system: str, temperature: float, max_tokens: int) -> int:
    """Talk until the end of input. Returns the exit code."""
    if url and reference is not None:
        raise UsageError("chat: give a model or --url, not both")
    body: dict[str, Any] = {"temperature": temperature}
    if max_tokens:
        body["max_tokens"] = max_tokens
    start = [{"role": "system", "content": system}] if system else []
    return uvloop.run(_chat(reference, url, settings, body, start))


async def _chat(reference: str | None, url: str, settings: EngineSettings, body: dict[str, Any], start: list[dict[str, str]]) -> int:
    async with contextlib.AsyncExitStack() as stack:
        session = None if url else await stack.enter_async_context(Session(settings, reference))
        messages = list(start)
        while (text := await asyncio.to_thread(_ask)) is not None:
            if text == "/new":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": text})
            request = body | {"messages": messages}
            events = session.stream(PATH, request) if session is not None else _remote(url, request)
            try:
                answer = await _show(events)
            except HeadraceError as error:
                print(f"error: {error}", file=sys.stderr)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})
    return 0


def _ask() -> str | None:
    """The next line; None at the end or for an empty one."""
    try:
        text = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return text or None


async def _show(events: AsyncGenerator[dict[str, Any], None]) -> str:
    """Print an answer as it comes; Ctrl-C ends it (and the request), not the conversation. Returns its text."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    parts: list[str] = []

    async def read() -> None:
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    for choice in event["choices"]:
                        piece = choice["delta"].get("content") or ""
                        parts.append(piece)
                        print(piece, end="", flush=True)
        finally:
            stopped.set()

    task = loop.create_task(read())
    loop.add_signal_handler(signal.SIGINT, stopped.set)
    try:
        await stopped.wait()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        print()
    if not task.done():
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return "".join(parts)
