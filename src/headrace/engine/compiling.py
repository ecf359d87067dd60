"""Requests whose grammar is being compiled: nobody waits for them, and they are not in the queue yet."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from headrace.engine.executor import Grammars
from headrace.engine.plan import Plan
from headrace.errors import InvalidRequest, QueueFull
from headrace.request import Abort, StepEvents, Submit

MAX_COMPILING = 256
_PATIENCE_S = 0.05  # how long an idle engine waits for a compilation before it looks for commands again


class Compiling:
    """In order of arrival. A request leaves when its grammar is ready, whatever came before it."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._waiting: dict[int, tuple[Submit, Future[Any]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, submit: Submit) -> None:
        """Raises RequestError."""
        if self._grammars is None:
            raise InvalidRequest("this engine takes no grammars")
        if len(self._waiting) >= MAX_COMPILING:
            raise QueueFull(f"{MAX_COMPILING} requests wait for their grammars already")
        self._waiting[submit.request_id] = (submit, self._grammars.compile(submit.params.grammar))

    def drop(self, abort: Abort) -> bool:
        """Whether the request was here, and is gone. One sample of it cannot have ended yet."""
        return self._waiting.pop(abort.request_id, None) is not None

    def take(self, wait_for_one: bool) -> tuple[Submit, BaseException | None] | None:
        """A request whose grammar is ready, or has failed. With `wait_for_one`, waits for it a little."""
        if wait_for_one and self._waiting:
            wait([future for _, future in self._waiting.values()], _PATIENCE_S, FIRST_COMPLETED)
        for request_id, (submit, future) in self._waiting.items():
            if future.done():
                del self._waiting[request_id]
                return submit, future.exception()
        return None


def end_broken(events: StepEvents, plan: Plan, broken: Collection[int]) -> None:
    """Rows whose grammar gave up have ended by an end token: not as if their text were complete."""
    rows = [chunk.row for chunk in plan.chunks if chunk.samples]
    ended = {(events.request_ids[i], events.samples[i]) for i, row in enumerate(rows) if row in broken}
    events.finished[:] = [
        (request_id, sample, "error" if (request_id, sample) in ended else reason) for request_id, sample, reason in events.finished
    ]
