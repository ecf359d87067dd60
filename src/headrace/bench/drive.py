"""A run: requests sent at their times or as others end, and what the client itself was late by."""

from __future__ import annotations

import asyncio
import gc
import itertools
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.bench.client import Client
from headrace.bench.prompts import Ruler, text
from headrace.bench.record import Record
from headrace.bench.stream import Answer
from headrace.bench.workload import Asking, Job, Jobs
from headrace.errors import UsageError

TICK_S = 0.02  # between looks at how late the event loop is
WATCH_S = 0.5  # between calls of `watch`: drawing a bar takes a millisecond of the loop that stamps chunks
MAX_BODIES = 1 << 30  # bytes of requests made before an open loop begins
PROBE_WORDS = (32, 288)


@dataclass(slots=True)
class Run:
    """What a run leaves. Times in seconds on its clock."""

    records: list[Record] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)  # how late the event loop was, at equal intervals
    cpu_s: float = 0.0  # of this process
    wall_s: float = 0.0
    open: int = 0
    done: int = 0
    failed: int = 0


Watch = Callable[[Run], None]


def _ignore(run: Run) -> None:
    pass


async def probe(client: Client, asking: Asking) -> Ruler:
    """How the server counts tokens, from two short requests, which also show that it answers. Raises UsageError if it does not."""
    tokens = []
    for words in PROBE_WORDS:
        record = Record(-1)
        body = asking.body([{"role": "user", "content": text(words, f"{time.time_ns()}/probe")}], 1)
        await client.send(Answer(record), body)
        if record.error and record.error != "empty answer":
            hint = "; a server that does not know ignore_eos needs --no-ignore-eos" if record.status == 400 and asking.ignore_eos else ""
            raise UsageError(f"{client.target.host}:{client.target.port}: the first request failed: {record.error}{hint}")
        tokens.append(record.prompt_tokens)
    few, many = tokens
    if few is None or many is None or many <= few:
        return Ruler()  # it does not count: a word is a token
    per_word = (many - few) / (PROBE_WORDS[1] - PROBE_WORDS[0])
    return Ruler(few - per_word * PROBE_WORDS[0], per_word)


async def open_loop(client: Client, asking: Asking, jobs: Jobs, times: list[float], *, think_s: float = 0.0, watch: Watch = _ignore) -> Run:
    """Request i at times[i], whatever the server does. All that can be made before the first is."""
    made = [jobs(number) for number in range(len(times))]
    bodies, size = [], 0
    for job in made:
        bodies.append(_first_body(asking, job))
        size += len(bodies[-1])
        if size > MAX_BODIES:
            raise UsageError(f"the requests are more than {MAX_BODIES >> 30} GiB: fewer of them (--requests), or shorter ones")
    run = Run()
    async with _Measured(client, run, watch), asyncio.TaskGroup() as group:
        for number, (job, body, due) in enumerate(zip(made, bodies, times, strict=True)):
            await _until(client, due)
            group.create_task(_converse(client, asking, run, number, job, body, due, think_s))
    return run


async def closed_loop(
    client: Client, asking: Asking, jobs: Jobs, concurrency: int, *, count: int | None = None, seconds: float | None = None,
    think_s: float = 0.0, watch: Watch = _ignore,
) -> Run:  # fmt: skip
    """So many users, each of whom asks again when answered, until `count` conversations have begun or `seconds` are over.

    A request is scheduled when its user is free, so a server that stalls is asked less: that is what a closed loop is.
    """
    run = Run()
    numbers = iter(range(count)) if count is not None else itertools.count()

    async def user() -> None:
        for number in numbers:
            job = jobs(number)
            body = _first_body(asking, job)
            if seconds is not None and client.now() >= seconds:
                return
            await _converse(client, asking, run, number, job, body, client.now(), think_s)
            if think_s:
                await asyncio.sleep(think_s)

    async with _Measured(client, run, watch), asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(user())
    return run


def _first_body(asking: Asking, job: Job) -> bytes:
    return asking.body([*job.conversation.history, job.conversation.turns[0]], job.wanted)


async def _converse(client: Client, asking: Asking, run: Run, number: int, job: Job, body: bytes, due: float, think_s: float) -> None:
    """All turns of a conversation; one that fails takes those after it along, for their users do not get them."""
    messages = list(job.conversation.history)
    turns = job.conversation.turns
    failed = False
    for turn, message in enumerate(turns):
        record = Record(number, turn, due, job.wanted, job.aimed)
        run.records.append(record)
        if failed:
            record.error = "an earlier turn failed"
            run.failed += 1
            continue
        messages.append(message)
        answer = Answer(record, keep_text=turn + 1 < len(turns))
        run.open += 1
        await client.send(answer, body if turn == 0 else asking.body(messages, job.wanted))
        run.open -= 1
        failed = bool(record.error)
        run.done += not failed
        run.failed += failed
        if answer.text is not None and not failed:
            messages.append({"role": "assistant", "content": "".join(answer.text)})
            due = client.now() + think_s
            await _until(client, due)


async def _until(client: Client, due: float) -> None:
    while (left := due - client.now()) > 0:  # noqa: ASYNC110  # once more, because the loop rounds its timers to milliseconds
        await asyncio.sleep(left)


class _Measured:
    """Around a run: its clock, the client's own CPU time and lateness, and nobody collecting garbage in between."""

    def __init__(self, client: Client, run: Run, watch: Watch) -> None:
        self._client, self._run, self._watch = client, run, watch

    async def __aenter__(self) -> None:
        gc.collect()
        gc.disable()  # a collection stops the loop for milliseconds; what a run makes has no cycles to speak of
        self._client.restart()
        self._cpu = _cpu_s()
        self._tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._show())]

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        self._run.wall_s = self._client.now()
        self._run.cpu_s = _cpu_s() - self._cpu
        gc.enable()
        self._watch(self._run)

    async def _tick(self) -> None:
        due = self._client.now()
        while True:
            due += TICK_S
            await asyncio.sleep(max(0.0, due - self._client.now()))
            self._run.delays.append(max(0.0, self._client.now() - due))

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self._watch(self._run)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
