"""The engine: take in commands, schedule, run, sample, commit. Everything else serves this page.

It owns no thread, no socket, no file and no clock: commands come from an inbox, events go to `publish`, the scheduler has the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from headrace.engine.compiling import Compiling, end_broken
from headrace.engine.executor import Executor, Grammars, Scorer
from headrace.engine.plan import Plan
from headrace.engine.scheduler import Scheduler
from headrace.engine.tally import events_between_steps
from headrace.errors import RequestError
from headrace.request import Abort, Command, Refusal, StepEvents, Submit


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
    """`grammars` holds what rows may say, `scorer` is the executor where things of prompts can be asked for; `record` is told
    each command and each step."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        grammars: Grammars | None = None,
        record: Callable[[Command | StepRecord], None] | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._grammars = grammars
        self._compiling = Compiling(grammars)
        self._record = record
        self._scorer = scorer

    @property
    def has_work(self) -> bool:
        """False: `step` would do nothing until the next command."""
        return bool(self._compiling) or not self.scheduler.is_idle

    def apply(self, command: Command) -> StepEvents | None:
        """Take in one command. A refusal is an event, never silence. A request with a grammar joins the queue once that is compiled."""
        if isinstance(command, Submit) and command.params.grammar:
            try:
                self._compiling.add(command)
            except RequestError as error:
                return _refusal(command, error)
            return None
        if isinstance(command, Abort) and self._compiling.drop(command):
            return None
        return self.admit(command)

    def admit(self, command: Command) -> StepEvents | None:
        """Give a command to the scheduler; a request's grammar is compiled by now."""
        if self._record is not None:
            self._record(command)
        if not isinstance(command, Submit):
            return self.scheduler.abort(command.request_id, command.sample)
        try:
            return self.scheduler.add(command)
        except RequestError as error:
            return _refusal(command, error)

    def _start_compiled(self) -> StepEvents | None:
        """Queue what is ready, up to the first that is refused."""
        events = None
        while events is None and (taken := self._compiling.take(wait_for_one=self.scheduler.is_idle)) is not None:
            submit, error = taken
            if error is None:
                events = self.admit(submit)
            elif isinstance(error, RequestError):
                events = _refusal(submit, error)
            else:
                raise error
        return events

    def step(self) -> StepEvents | None:
        """Advance everything that is scheduled once. None: there was nothing to tell."""
        scheduler, grammars = self.scheduler, self._grammars
        if self._compiling and (events := self._start_compiled()) is not None:
            return events
        if scheduler.is_idle:
            return None
        plan = scheduler.schedule()
        if grammars is not None:
            grammars.begin(plan)
        self.executor.forward(plan)
        scores = self._scorer.score(plan) if plan.scored and self._scorer is not None else ()
        tokens, logprobs = self.executor.sample(plan, grammars.masks() if grammars is not None else None)
        events = scheduler.commit(plan, tokens, logprobs, scores)
        if grammars is not None and (broken := grammars.accept(plan, tokens)):
            end_broken(events, plan, broken)
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


def _refusal(submit: Submit, error: RequestError) -> StepEvents | None:
    refusal = Refusal(submit.request_id, type(error).__name__, error.message, error.param)
    return events_between_steps(submit.received, [], [refusal])
