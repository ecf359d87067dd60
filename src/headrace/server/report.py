"""What is told of a request when it ends: a line in the log, and a trace where one is wanted."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.server.logs import fields

log = logging.getLogger("headrace.request")

_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")
_MAX_CONTENT_CHARS = 4096  # of a prompt or an answer in the log, where that was asked for


@dataclass(slots=True)
class Ended:
    """One generation request, after its end. Times are milliseconds."""

    request_id: str
    endpoint: str
    key: str
    status: int  # 499: the client left
    outcome: str
    model: str = ""
    traceparent: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_ms: float | None = None  # None: there was no token
    timings: dict[str, float] = field(default_factory=dict)
    content: Callable[[], tuple[list[str], list[str]]] | None = None  # the prompts and answers, if somebody wants them


class Tracer(Protocol):
    def record(self, ended: Ended, at: float) -> None:
        """`at`: the end, in seconds since 1970."""

    def close(self) -> None:
        """Send what is left."""


class Reporter:
    """Writes the log's line, and tells the tracer."""

    def __init__(self, *, with_content: bool = False, tracer: Tracer | None = None) -> None:
        self._with_content = with_content
        self._tracer = tracer

    def ended(self, it: Ended) -> None:
        if log.isEnabledFor(logging.INFO):
            prompts, answers = it.content() if self._with_content and it.content is not None else (None, None)
            t = it.timings
            log.info(
                "request",
                extra=fields(
                    request_id=it.request_id, trace_id=trace_id(it.traceparent), endpoint=it.endpoint, key=it.key or None,
                    status=it.status, outcome=it.outcome, prompt_tokens=it.prompt_tokens, cached_tokens=it.cached_tokens,
                    completion_tokens=it.completion_tokens, duration_ms=t.get("total"), queue_ms=t.get("queue"),
                    prefill_ms=t.get("prefill"), decode_ms=t.get("decode"), stalled_ms=t.get("stalled") or None, ttft_ms=it.ttft_ms,
                    prompt=_cut(prompts), answer=_cut(answers),
                ),
            )  # fmt: skip
        if self._tracer is not None:
            self._tracer.record(it, time.time())

    def waits(self, request_id: str, key: str, position: int, expected_s: float) -> None:
        """It was sent to an engine that is busy with others."""
        log.info("waits", extra=fields(request_id=request_id, key=key or None, position=position, expected_ms=round(expected_s * 1000, 1)))

    def close(self) -> None:
        if self._tracer is not None:
            self._tracer.close()


def trace_id(traceparent: str) -> str | None:
    """The trace of a W3C `traceparent`, if it is one."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found[1] if found else None


def traceparent_of(headers: Sequence[tuple[bytes, bytes]]) -> str:
    return next((value.decode("latin-1") for name, value in headers if name == b"traceparent"), "")


def _cut(texts: list[str] | None) -> Any:
    if texts is None:
        return None
    cut = [text[:_MAX_CONTENT_CHARS] for text in texts]
    return cut[0] if len(cut) == 1 else cut
