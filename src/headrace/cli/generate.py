"""`headrace generate`: a file of requests in, a file of answers out, with a progress bar."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headrace.cli.session import Session
from headrace.errors import InvalidRequest, RequestError, UsageError
from headrace.server.messages import EngineSettings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
URLS = (CHAT, COMPLETIONS, "/v1/responses")


def read_requests(file: Path) -> list[bytes]:
    """The lines that are not empty. Raises UsageError."""
    try:
        lines = [line for line in file.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    if not lines:
        raise UsageError(f"{file}: there is no request in it")
    return lines


def read_line(line: bytes) -> dict[str, Any]:
    """One request. Raises InvalidRequest."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidRequest("the line is not valid JSON", code="invalid_json") from None
    if not isinstance(request, dict):
        raise InvalidRequest("expected an object")
    return request


def route(request: dict[str, Any], line: bytes) -> tuple[str, bytes]:
    """Path and body of a line. Raises InvalidRequest."""
    if "custom_id" not in request:
        return CHAT if "messages" in request else COMPLETIONS, line
    body = request.get("body")
    if not isinstance(body, dict) or request.get("url") not in URLS or request.get("method", "POST") != "POST":
        raise InvalidRequest(f"expected method POST, a body, and as url one of {', '.join(URLS)}")
    if not isinstance(request["custom_id"], str):
        raise InvalidRequest("custom_id: expected a text", param="custom_id")
    if body.get("stream"):
        raise InvalidRequest("stream: a file cannot be streamed to", param="stream")
    body.pop("model", None)
    return request["url"], json.dumps(body).encode()


def batch_line(batch_id: str, custom_id: Any, status: int, body: Any) -> dict[str, Any]:
    """An answer in OpenAI's batch format."""
    return {
        "id": batch_id, "custom_id": custom_id, "response": {"status_code": status, "request_id": batch_id, "body": body}, "error": None,
    }  # fmt: skip


class Output:
    """The two files. Each has its lines in the order of the requests, whatever order they are done in."""

    def __init__(self, num_lines: int, answers: IO[str], errors: IO[str] | None) -> None:
        self._done: list[tuple[IO[str], str] | None] = [None] * num_lines
        self._written = 0
        self._answers, self._errors = answers, errors

    def put(self, index: int, answer: Any, *, failed: bool) -> None:
        file = self._errors if failed and self._errors is not None else self._answers
        self._done[index] = (file, json.dumps(answer, ensure_ascii=False) + "\n")
        while self._written < len(self._done) and (next_one := self._done[self._written]) is not None:
            next_one[0].write(next_one[1])
            self._done[self._written] = (file, "")
            self._written += 1


def run_generate(file: Path, output: Path | None, errors: Path | None, reference: str | None, settings: EngineSettings) -> int:
    """Returns the exit code: 1 if any line failed. Without `errors`, failed lines are told among the answers."""
    lines = read_requests(file)
    with ExitStack() as files:

        def opened(path: Path) -> IO[str]:
            try:
                return files.enter_context(path.open("w"))
            except OSError as error:
                raise UsageError(f"{path}: {error.strerror}") from None

        answers = sys.stdout if output is None else opened(output)
        failures = None if errors is None else opened(errors)
        code = uvloop.run(_generate(lines, Output(len(lines), answers, failures), reference, settings))
        answers.flush()
        return code


async def _generate(lines: list[bytes], out: Output, reference: str | None, settings: EngineSettings) -> int:
    failed = tokens = 0
    custom_ids: set[str] = set()
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
                nonlocal failed, tokens
                for i, line in todo:
                    request: dict[str, Any] = {}
                    batch_id = f"batch_req_{random.getrandbits(96):024x}"
                    try:
                        request = read_line(line)
                        path, body = route(request, line)
                        custom_id = request.get("custom_id")
                        if custom_id in custom_ids:
                            raise InvalidRequest(f"custom_id: {custom_id[:100]!r} is there twice", param="custom_id")
                        if custom_id is not None:
                            custom_ids.add(custom_id)
                        status, answer = await session.call(path, body, batch_id)
                    except RequestError as error:
                        status = error.status
                        answer = {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
                    if status == 200:
                        usage = answer["usage"]
                        tokens += usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"]
                    else:
                        failed += 1
                    if "custom_id" in request:
                        answer = batch_line(batch_id, request["custom_id"], status, answer)
                    out.put(i, answer, failed=status != 200)
                    bar.update(task, advance=1, rate=f"{tokens / (time.monotonic() - started):.0f} tok/s")

            # Twice what a step takes, so that a finished sample is replaced in the next one.
            await asyncio.gather(*(work() for _ in range(min(len(lines), 2 * settings.max_batch_size))))
    seconds = time.monotonic() - started
    console.print(f"{len(lines)} requests, {failed} failed, {tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} tok/s)")
    return 1 if failed else 0
