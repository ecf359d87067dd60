"""`headrace generate`: a file of requests in, a file of answers out, with a progress bar."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headrace.cli.session import Session
from headrace.errors import InvalidRequest, RequestError, UsageError
from headrace.server.messages import EngineSettings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def read_requests(file: Path) -> list[bytes]:
    """The lines that are not empty. Raises UsageError."""
    try:
        lines = [line for line in file.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    if not lines:
        raise UsageError(f"{file}: there is no request in it")
    return lines


def route(line: bytes) -> tuple[str, bytes, str | None]:
    """Path and body of a line, and its custom_id if it is in OpenAI's batch format. Raises InvalidRequest."""
    try:
        request = json.loads(line)
    except ValueError:
        raise InvalidRequest("the line is not valid JSON", code="invalid_json") from None
    if not isinstance(request, dict):
        raise InvalidRequest("expected an object")
    if "custom_id" not in request:
        return CHAT if "messages" in request else COMPLETIONS, line, None
    body = request.get("body")
    if not isinstance(body, dict) or request.get("url") not in (CHAT, COMPLETIONS) or request.get("method", "POST") != "POST":
        raise InvalidRequest(f"expected method POST, a body, and url {CHAT} or {COMPLETIONS}")
    body.pop("model", None)
    return request["url"], json.dumps(body).encode(), str(request["custom_id"])


def batch_line(custom_id: str, status: int, body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "response": {"status_code": status, "body": body}, "error": None}


def run_generate(file: Path, output: Path | None, reference: str | None, settings: EngineSettings) -> int:
    """Returns the exit code: 1 if any line failed."""
    lines = read_requests(file)
    try:
        out: IO[str] = output.open("w") if output is not None else sys.stdout
    except OSError as error:
        raise UsageError(f"{output}: {error.strerror}") from None
    try:
        return uvloop.run(_generate(lines, out, reference, settings))
    finally:
        if output is not None:
            out.close()


async def _generate(lines: list[bytes], out: IO[str], reference: str | None, settings: EngineSettings) -> int:
    answers: list[str | None] = [None] * len(lines)
    written = failed = tokens = 0
    started = time.monotonic()
    todo: Iterator[tuple[int, bytes]] = iter(enumerate(lines))
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip

    async with Session(settings, reference) as session:
        with bar:
            task = bar.add_task("generating", total=len(lines), rate="")

            async def work() -> None:
                nonlocal written, failed, tokens
                for i, line in todo:
                    custom_id = None
                    try:
                        path, body, custom_id = route(line)
                        status, answer = await session.call(path, body)
                    except RequestError as error:
                        status = error.status
                        answer = {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
                    if status == 200:
                        tokens += answer["usage"]["completion_tokens"]
                    else:
                        failed += 1
                    answers[i] = json.dumps(answer if custom_id is None else batch_line(custom_id, status, answer), ensure_ascii=False)
                    while written < len(answers) and (text := answers[written]) is not None:  # in the order of the file
                        out.write(text + "\n")
                        answers[written] = ""
                        written += 1
                    bar.update(task, advance=1, rate=f"{tokens / (time.monotonic() - started):.0f} tok/s")

            # Twice what a step takes, so that a finished sample is replaced in the next one.
            await asyncio.gather(*(work() for _ in range(min(len(lines), 2 * settings.max_batch_size))))
    out.flush()
    seconds = time.monotonic() - started
    console.print(f"{len(lines)} requests, {failed} failed, {tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} tok/s)")
    return 1 if failed else 0
