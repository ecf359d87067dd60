"""What steps cost those who wait: `itl_target_s` bounds a step beside a running answer, and the batch tier only fills idle steps."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise

from headrace.config import EngineConfig
from headrace.engine.loop import Engine, StepRecord
from headrace.engine.scheduler import Scheduler
from headrace.executors.simulated import SimulatedExecutor, StepCost, VirtualClock
from headrace.request import Abort, Command, SamplingParams, StepEvents, Submit

COST = StepCost(fixed=2.7e-3, per_token=3.7e-4, per_context_token=1.6e-7)  # about the default model's on two cores


class Life:
    """An engine on a virtual clock, fed with requests as they come, and what was heard of it."""

    def __init__(self, **config: object) -> None:
        self.clock = VirtualClock(1.0)
        self.config = EngineConfig(context_length=8192, num_blocks=4000, **config)  # type: ignore[arg-type]
        scheduler = Scheduler(self.config, self.clock)
        self.steps: list[StepRecord] = []
        executor = SimulatedExecutor(self.clock, 4000, COST, verify=False)
        self.engine = Engine(scheduler, executor, record=self._record)
        self.times: dict[int, list[float]] = {}
        self.done: set[int] = set()

    def _record(self, event: Command | StepRecord) -> None:
        if isinstance(event, StepRecord):
            self.steps.append(event)

    def _hear(self, events: StepEvents | None) -> None:
        if events is not None:
            for request_id in events.request_ids:
                self.times[request_id].append(events.time)
            self.done |= {request_id for request_id, _, _ in events.finished}

    def run(self, arrivals: list[Submit], until: float) -> None:
        """Submit each at its `received`, and step in between."""
        waiting = sorted(arrivals, key=lambda submit: submit.received)
        while self.clock.now < until and (waiting or self.engine.has_work):
            while waiting and (waiting[0].received <= self.clock.now or not self.engine.has_work):
                submit = waiting.pop(0)
                self.clock.now = max(self.clock.now, submit.received)
                self.times[submit.request_id] = []
                self._hear(self.engine.apply(submit))
            self._hear(self.engine.step())
        self.engine.scheduler.check()


def request(request_id: int, at: float, prompt: int, answer: int, batch: bool = False) -> Submit:
    rng = random.Random(request_id)
    ids = array("i", (rng.randrange(1000) for _ in range(prompt)))
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    return Submit(request_id, ids.tobytes(), params, request_id, at, batch=batch)


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def test_itl_target() -> None:
    """16 answers are being written; a prompt of 4,000 tokens comes every 2 s. p99 of the gaps stays near the target, at little cost."""
    load = [request(i, 1.0, 50, 4000) for i in range(16)] + [request(100 + i, 3.0 + 2 * i, 4000, 1) for i in range(15)]

    def run(itl_target_s: float) -> tuple[list[float], float]:
        life = Life(itl_target_s=itl_target_s)
        life.run(load, until=31.0)
        gaps = [b - a for i in range(16) for a, b in pairwise(life.times[i]) if a > 3.0]
        return gaps, sum(step.plan.num_tokens for step in life.steps) / (life.clock.now - 1.0)

    bounded, rate = run(0.030)
    free, free_rate = run(0.0)
    assert quantile(free, 0.99) > 0.150
    assert quantile(bounded, 0.99) <= 0.036
    assert rate >= 0.85 * free_rate


def load(seed: int) -> list[Submit]:
    """Interactive requests, half of what the machine could do."""
    rng = random.Random(seed)
    at, submits = 1.0, []
    for i in range(400):
        at += rng.expovariate(1 / 0.45)
        submits.append(request(i, at, rng.randint(20, 500), rng.randint(5, 60)))
    return submits


def test_the_batch_tier_fills_idle_steps() -> None:
    alone, beside = Life(), Life()
    alone.run(load(1), until=1e9)
    batch = [request(1000 + i, 1.0, 700, 150, batch=True) for i in range(120)]
    beside.run(load(1) + batch, until=1e9)
    first = {life: [life.times[s.request_id][0] - s.received for s in load(1)] for life in (alone, beside)}
    assert quantile(first[beside], 0.99) <= 1.10 * quantile(first[alone], 0.99)
    assert all(len(beside.times[submit.request_id]) == 150 for submit in batch)
    last_interactive = load(1)[-1].received
    assert sum(t < last_interactive for s in batch for t in beside.times[s.request_id]) > 0.5 * 120 * 150  # most of it in between


def test_no_step_mixes_the_tiers() -> None:
    rows: dict[int, int] = {}
    life = Life()
    life.run(load(2)[:60] + [request(1000 + i, 1.0 + i, 300, 40, batch=True) for i in range(20)], until=1e9)
    seen = set()
    for step in life.steps:
        rows |= {new.row: new.seed for new in step.plan.new_rows}
        tiers = {rows[chunk.row] >= 1000 for chunk in step.plan.chunks}
        assert len(tiers) == 1
        seen |= tiers
    assert seen == {False, True}
    assert life.engine.scheduler.tally.preemptions > 0


def test_an_abort_lets_the_batch_tier_in() -> None:
    life = Life()
    life.run([request(1, 1.0, 40, 1000), request(2, 1.0, 40, 5, batch=True)], until=1.5)
    assert life.times[1]
    assert not life.times[2]
    life.engine.apply(Abort(1))
    life.run([], until=1e9)
    assert len(life.times[2]) == 5
    assert life.done == {2}
