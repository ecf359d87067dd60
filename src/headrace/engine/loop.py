"""The engine: take in commands, schedule, run, sample, commit. Everything else serves this page.

It owns no thread, no socket, no file and no clock: commands come from an inbox, events go to `publish`, the scheduler has the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from headrace.engine.executor import Executor
from headrace.engine.plan import Plan
from headrace.engine.scheduler import Scheduler
from headrace.engine.tally import events_between_steps
from headrace.errors import RequestError
from headrace.request import Command, Refusal, StepEvents, Submit


class Inbox(Protocol):
    """Where commands come from."""

    @property
    def closed(self) -> bool:
        """Nothing will come any more."""

    def take(self, wait: bool) -> Iterable[Command]:
        """What has come. With `wait`, not before there is something or the inbox closes."""


class StepRecord(NamedTuple):
    """One step, for a replay: with the same commands and times a scheduler makes the same plan."""

    started: float
    ended: float
    plan: Plan
    tokens: list[int]


class Engine:
    """`masks` gives the grammar masks of a plan's rows, between forward and sample; `record` is told each command and each step."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        masks: Callable[[Plan], dict[int, bytes]] | None = None,
        record: Callable[[Command | StepRecord], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._masks = masks
        self._record = record

    @property
    def has_work(self) -> bool:
        """False: `step` would do nothing until the next command."""
        return not self.scheduler.is_idle

    def apply(self, command: Command) -> StepEvents | None:
        """Take in one command. A refusal is an event, never silence."""
        if self._record is not None:
            self._record(command)
        if not isinstance(command, Submit):
            return self.scheduler.abort(command.request_id, command.sample)
        try:
            return self.scheduler.add(command)
        except RequestError as error:
            refusal = Refusal(command.request_id, type(error).__name__, error.message, error.param)
            return events_between_steps(command.received, [], [refusal])

    def step(self) -> StepEvents | None:
        """Advance everything that is scheduled once. None: there was nothing to do."""
        scheduler = self.scheduler
        if scheduler.is_idle:
            return None
        plan = scheduler.schedule()
        self.executor.forward(plan)
        tokens, logprobs = self.executor.sample(plan, self._masks(plan) if self._masks is not None else None)
        events = scheduler.commit(plan, tokens, logprobs)
        if self._record is not None:
            self._record(StepRecord(scheduler.step_started, scheduler.step_ended, plan, tokens))
        return events

    def run(self, inbox: Inbox, publish: Callable[[StepEvents], None]) -> None:
        """Serve until the inbox closes. A failed step ends every request, and then the loop."""
        try:
            while not inbox.closed:
                for command in inbox.take(wait=not self.has_work):
                    if (events := self.apply(command)) is not None:
                        publish(events)
                if (events := self.step()) is not None:
                    publish(events)
        except Exception:
            if (events := self.scheduler.fail()) is not None:
                publish(events)
            raise
