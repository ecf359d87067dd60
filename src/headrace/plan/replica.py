"""One server of the simulation: the real scheduler and block pool, a clock that passes when told, and a cost model for an executor."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.config import BLOCK_TOKENS, EngineConfig
from headrace.engine.plan import Plan
from headrace.engine.scheduler import Scheduler
from headrace.engine.skip import skip_steps
from headrace.errors import RequestError
from headrace.executors.simulated import VirtualClock
from headrace.plan.cost import CostModel
from headrace.request import StepEvents, Submit

MAX_SKIP = 4096  # steps at once: bounds the list of their durations


@dataclass(slots=True)
class Record:
    """A request's life, in seconds of the virtual clock; -1: not yet."""

    arrived: float
    prompt: int
    answer: int
    received: float  # by the scheduler
    replica: int = -1
    admitted: float = -1.0
    first: float = -1.0
    last: float = -1.0
    ended: float = -1.0
    produced: int = 0
    cached: int = 0
    retries: int = 0
    refused: str = ""


class Usage(NamedTuple):
    """A step (or many alike) as the timeline sees it."""

    start: float
    seconds: float
    running: int
    waiting: int
    held: int  # blocks


@dataclass(slots=True)
class Gaps:
    """Times between tokens, as (seconds, how many)."""

    seconds: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("q"))

    def add(self, seconds: float, count: int = 1) -> None:
        self.seconds.append(seconds)
        self.counts.append(count)


class Replica:
    """`records` is shared by all replicas, by request id. `on_step` is told every plan, for tests that compare; it rules out skipping."""

    def __init__(
        self,
        index: int,
        config: EngineConfig,
        cost: CostModel,
        records: dict[int, Record],
        gaps: Gaps,
        use: Callable[[Usage], None],
        *,
        start: float = 0.0,
        fast: bool = True,
        block_tokens: int = BLOCK_TOKENS,
        on_step: Callable[[Plan, float], None] | None = None,
    ) -> None:
        self.index = index
        self.clock = VirtualClock(start)
        self.scheduler = Scheduler(config, self.clock, block_tokens=block_tokens)
        self.cost = cost
        self.open: dict[int, Submit] = {}
        self.busy = 0.0
        self.steps = self.skipped = 0
        self._records, self._gaps, self._use = records, gaps, use
        self._fast = fast and on_step is None
        self._on_step = on_step
        self._ended_now = 0  # requests that ended in the last step

    def load(self, now: float) -> int:
        """Requests open at `now`: a step in flight has not told of those that end in it."""
        return len(self.open) + (self._ended_now if self.clock.now > now else 0)

    def submit(self, submit: Submit) -> None:
        """At the clock's time or later: a request waits for the step in flight."""
        record = self._records[submit.request_id]
        if self.scheduler.is_idle:
            self.clock.now = max(self.clock.now, submit.received)
        record.replica = self.index
        try:
            self.scheduler.add(submit)
        except RequestError as error:
            record.refused, record.ended = error.message, submit.received
            return
        self.open[submit.request_id] = submit

    def advance(self, until: float) -> None:
        """Step until there is nothing to do or the clock reaches `until`: the first step boundary at or after it."""
        while self.clock.now < until and not self.scheduler.is_idle:
            if not (self._fast and self._skip(until)):
                self._step()

    def _step(self) -> None:
        scheduler, clock = self.scheduler, self.clock
        start = clock.now
        plan = scheduler.schedule()
        seconds = self.cost.step_s(plan.chunks)
        clock.advance(seconds)
        self._use(Usage(start, seconds, len(plan.chunks), len(self.open) - len(plan.chunks), scheduler.pool.num_held))
        self._note(scheduler.commit(plan, [0] * sum([chunk.samples for chunk in plan.chunks])), start)
        self.busy += seconds
        self.steps += 1
        if self._on_step is not None:
            self._on_step(plan, start)

    def _note(self, events: StepEvents, start: float) -> None:
        records, now = self._records, events.time
        for request_id, when, cached in events.admitted:
            record = records[request_id]
            if record.admitted < 0:
                record.admitted, record.cached = when, cached
        alike = 0
        for request_id in events.request_ids:
            record = records[request_id]
            record.produced += 1
            if record.first < 0:
                record.first = now
            elif record.last == start:
                alike += 1
            else:
                self._gaps.add(now - record.last)
            record.last = now
        if alike:
            self._gaps.add(now - start, alike)
        for request_id, _, _ in events.finished:
            records[request_id].ended = now
            del self.open[request_id]
        self._ended_now = len(events.finished)

    def _skip(self, until: float) -> bool:
        """Take the steps in which nothing happens at once, up to the first that ends at or after `until`. False: there is none."""
        scheduler, cost, records = self.scheduler, self.cost, self._records
        most = min(scheduler.steps_until_event(), MAX_SKIP)
        if most < 2:
            return False
        samples = scheduler.running
        rows, now = len(samples), self.clock.now
        running = [records[sample.request_id] for sample in samples]
        weights, overhead = cost.weights_s(rows, rows), cost.overhead_s(rows, rows)
        contexts = [sample.num_computed for sample in samples]
        waiting, held = len(self.open) - rows, scheduler.pool.num_held
        durations = []
        for more in range(1, most + 1):
            seconds = weights + 0.0 + cost.attend_all_s(contexts, more) + overhead
            self._use(Usage(now, seconds, rows, waiting, held))
            before, now = now, now + seconds
            self._gaps.add(now - before, rows)
            self.busy += seconds
            durations.append(now - before)
            if now >= until:
                break
        self.clock.now = now
        skip_steps(scheduler, rows, durations, now)
        for record in running:
            record.produced += len(durations)
            record.last = now
        self.steps += len(durations)
        self.skipped += len(durations)
        self._ended_now = 0
        return True
