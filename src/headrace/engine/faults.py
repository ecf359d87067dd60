"""Faults on purpose, for tests: `HEADRACE_FAULT`, read once when an engine process starts. Several, with commas between:

step:17:raise    the 17th step raises; also `step:17:kill` (the process ends at once) and `step:17:hang` (the step never ends)
step:slow:2s     every step takes that much longer (`s` or `ms`)
alloc:fail:3     the third step that gives out KV blocks finds no memory
preempt:random   before one step in sixteen (by chance), some running sample loses its row and its blocks

What is counted, counts from the first step for a client, and only in a server's first engine process: the next one has to live. The
others hold in every one.
"""

from __future__ import annotations

import os
import random
import re
import time
from dataclasses import dataclass

from headrace.engine.executor import Executor
from headrace.engine.loop import Engine
from headrace.engine.plan import Plan
from headrace.errors import UsageError
from headrace.request import Command, StepEvents, TokenLogprob

ENVIRONMENT = "HEADRACE_FAULT"
FORMS = "step:N:raise, step:N:kill, step:N:hang, step:slow:TIME, alloc:fail:N, preempt:random"
_FORM = re.compile(
    r"step:([1-9]\d{0,8}):(raise|kill|hang)|step:slow:(\d{1,6}(?:\.\d{1,3})?)(ms|s)|alloc:fail:([1-9]\d{0,8})|(preempt:random)"
)
_PREEMPT_PROBABILITY = 1 / 16  # rare enough that a long prompt gets through
_HANG_S = 3600.0


@dataclass(frozen=True, slots=True)
class Faults:
    """`at_step`: what happens in which step, from 1. `fail_alloc`: which allocation fails, from 1; 0: none."""

    at_step: dict[int, str]
    slow_s: float = 0.0
    fail_alloc: int = 0
    preempt: bool = False


def parse(text: str) -> Faults | None:
    """None where nothing is to go wrong. Raises UsageError for what is none of FORMS."""
    if not text:
        return None
    at_step: dict[int, str] = {}
    slow_s, fail_alloc, preempt = 0.0, 0, False
    for form in text.split(","):
        found = _FORM.fullmatch(form.strip())
        if found is None:
            raise UsageError(f"{ENVIRONMENT}: expected {FORMS}, got {form.strip()!r}")
        step, what, slow, unit, alloc, random_preemption = found.groups()
        if step:
            at_step[int(step)] = what
        elif slow:
            slow_s = float(slow) / (1000 if unit == "ms" else 1)
        elif alloc:
            fail_alloc = int(alloc)
        preempt |= bool(random_preemption)
    return Faults(at_step, slow_s, fail_alloc, preempt)


def inject(faults: Faults | None, engine: Engine, restarted: bool) -> Engine | FaultyEngine:
    """An engine with faults; the engine itself without. `restarted`: not a server's first."""
    if faults is None:
        return engine
    if restarted:
        faults = Faults({}, faults.slow_s, 0, faults.preempt)
    engine.executor = _FaultyExecutor(faults, engine.executor)
    return FaultyEngine(engine, faults.preempt)


class FaultyEngine:
    """An engine whose samples are preempted at random."""

    def __init__(self, engine: Engine, preempt: bool, seed: int = 0) -> None:
        self.engine = engine
        self._preempt = preempt
        self._random = random.Random(seed)

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def apply(self, command: Command) -> StepEvents | None:
        return self.engine.apply(command)

    def step(self) -> StepEvents | None:
        scheduler = self.engine.scheduler
        if self._preempt and scheduler.running and self._random.random() < _PREEMPT_PROBABILITY:
            scheduler.preempt(self._random.choice(scheduler.running))
        return self.engine.step()


class _FaultyExecutor:
    def __init__(self, faults: Faults, executor: Executor) -> None:
        self._faults = faults
        self._executor = executor
        self._steps = self._allocs = 0

    def forward(self, plan: Plan) -> None:
        faults = self._faults
        self._steps += 1
        if faults.slow_s:
            time.sleep(faults.slow_s)
        what = faults.at_step.get(self._steps)
        if what == "raise":
            raise RuntimeError(f"{ENVIRONMENT}: step {self._steps}")
        if what == "kill":
            os._exit(9)
        if what == "hang":
            time.sleep(_HANG_S)
        self._allocs += bool(plan.new_blocks)
        if plan.new_blocks and self._allocs == faults.fail_alloc:
            raise MemoryError(f"{ENVIRONMENT}: allocation {self._allocs}")
        self._executor.forward(plan)

    def sample(self, plan: Plan, masks: dict[int, bytes] | None = None) -> tuple[list[int], list[TokenLogprob | None]]:
        return self._executor.sample(plan, masks)
