"""The whole engine on a simulated executor: whatever happens around a request, it gets the answer it would get alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from conftest import ScriptedExecutor
from engine_oracle import FUZZ, World, random_config, random_submit, submit
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headrace.config import EngineConfig
from headrace.engine.loop import Engine
from headrace.engine.plan import Chunk, NewRow, Plan
from headrace.engine.scheduler import Scheduler
from headrace.executors.simulated import PagingError, SimulatedExecutor, StepCost, VirtualClock
from headrace.request import Abort, Command, SamplingParams, StepEvents, TokenLogprob


def random_life(seed: int) -> World:
    """A random engine with random requests, aborts, restarts and idle times, run to its end."""
    rng = random.Random(seed)
    block_tokens = rng.choice([1, 2, 4, 4, 5])
    world = World(random_config(rng, block_tokens), block_tokens, constant_digest=rng.random() < 0.1)
    prompts: list[list[int]] = []
    for _ in range(rng.randint(5, 60)):
        action = rng.random()
        if action < 0.25:
            for _ in range(rng.choice([1, 1, 3])):
                world.submit(random_submit(rng, len(world.heard), world.clock.now, prompts))
        elif action < 0.32 and world.heard:
            world.abort(rng.choice(list(world.heard)))
        elif action < 0.36:
            world.clock.advance(rng.random())
        elif action < 0.37:
            world.restart()
        else:
            world.step()
    world.finish()
    return world


@pytest.mark.parametrize("block", range(10))
def test_random_schedules(block: int) -> None:
    count = int(150 * FUZZ)
    seen: Counter[str] = Counter()
    for seed in range(block * count, (block + 1) * count):
        try:
            world = random_life(seed)
        except Exception as error:
            error.add_note(f"random_life({seed})")
            raise
        for plan in world.plans:
            seen["copies"] += len(plan.copies)
            seen["mixed steps"] += len({chunk.num_tokens == 1 for chunk in plan.chunks}) == 2
        seen["preemptions"] += world.scheduler.tally.preemptions
        seen["recomputed"] += world.scheduler.tally.recomputed_tokens
        seen["cached"] += world.scheduler.tally.cached_tokens
        for heard in world.heard.values():
            seen[heard.refused or str(heard.reasons[0])] += 1
            seen["stalled"] += heard.stalled > 0
    # None of this means anything unless the worlds were hard.
    for what in ("copies", "mixed steps", "preemptions", "recomputed", "cached", "stop", "length", "abort", "QueueFull", "stalled"):
        assert seen[what] >= 20 * min(1.0, FUZZ), (what, seen)
    assert seen["ContextLengthExceeded"] >= 5 * min(1.0, FUZZ)


class EngineMachine(RuleBasedStateMachine):
    """The same world, with the choices made by hypothesis, which finds and shortens what random seeds miss."""

    @initialize(seed=st.integers(0, 2**32), block_tokens=st.sampled_from([1, 2, 4]), collide=st.booleans())
    def start(self, seed: int, block_tokens: int, collide: bool) -> None:
        self.world = World(random_config(random.Random(seed), block_tokens), block_tokens, constant_digest=collide)
        self.prompts: list[list[int]] = []

    @rule(seed=st.integers(0, 2**32))
    def submit(self, seed: int) -> None:
        self.world.submit(random_submit(random.Random(seed), len(self.world.heard), self.world.clock.now, self.prompts))

    @precondition(lambda self: self.world.heard)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.heard))))

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @rule()
    def restart(self) -> None:
        self.world.restart()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=int(100 * FUZZ), stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


# The loop


class Inbox:
    """Gives out one list of commands after the other, then closes."""

    def __init__(self, *batches: list[Command]) -> None:
        self.batches = list(batches)
        self.waits: list[bool] = []

    @property
    def closed(self) -> bool:
        return not self.batches

    def take(self, wait: bool) -> list[Command]:
        self.waits.append(wait)
        return self.batches.pop(0)


def engine_with(clock: VirtualClock, executor: ScriptedExecutor, **config: object) -> Engine:
    fields = {"context_length": 64, "num_blocks": 16, "step_target_s": 0.0, **config}
    return Engine(Scheduler(EngineConfig(**fields), clock, block_tokens=4), executor)  # type: ignore[arg-type]


def test_the_loop_answers_until_the_inbox_closes(clock: VirtualClock, scripted: Callable[..., ScriptedExecutor]) -> None:
    engine = engine_with(clock, scripted([7, 8, 9]))
    inbox = Inbox([], [submit(1, [1, 2], max_tokens=3)], [], [submit(2, [5] * 64)], [])
    published: list[StepEvents] = []
    engine.run(inbox, published.append)
    assert inbox.waits == [True, True, False, False, True]
    assert [token for events in published for token in events.tokens] == [7, 8, 9]
    assert [entry for events in published for entry in events.finished] == [(1, 0, "length")]
    (refusal,) = [refusal for events in published for refusal in events.refused]
    assert (refusal.request_id, refusal.kind) == (2, "ContextLengthExceeded")
    assert not engine.has_work


def test_a_failed_step_ends_every_request_and_the_loop(clock: VirtualClock, scripted: Callable[..., ScriptedExecutor]) -> None:
    engine = engine_with(clock, scripted(fail_at=2), max_batch_size=2)
    commands: list[Command] = [submit(1, [1] * 9, num_samples=2), submit(2, [2] * 9), submit(3, [3])]
    published: list[StepEvents] = []
    with pytest.raises(RuntimeError, match="stumbled"):
        engine.run(Inbox(commands, [], [], [], []), published.append)
    finished = sorted(entry for events in published for entry in events.finished)
    assert finished == [(1, 0, "error"), (1, 1, "error"), (2, 0, "error"), (3, 0, "error")]
    assert not engine.has_work
    engine.scheduler.check()
    assert engine.scheduler.pool.num_held == 0


def test_masks_are_made_between_forward_and_sample(clock: VirtualClock) -> None:
    calls: list[str] = []

    class Executor:
        def forward(self, plan: Plan) -> None:
            calls.append("forward")

        def sample(self, plan: Plan, masks: dict[int, bytes] | None = None) -> tuple[list[int], list[TokenLogprob | None]]:
            calls.append(f"sample {masks}")
            return [0], []

    class Grammars:
        def compile(self, grammar: str) -> Future[None]:
            raise AssertionError

        def begin(self, plan: Plan) -> None:
            calls.append("begin")
            self.row = plan.chunks[0].row

        def masks(self) -> dict[int, bytes]:
            calls.append("masks")
            return {self.row: b"\x01"}

        def accept(self, plan: Plan, tokens: list[int]) -> tuple[int, ...]:
            calls.append(f"accept {tokens}")
            return ()

    scheduler = Scheduler(EngineConfig(context_length=64, num_blocks=4), clock)
    engine = Engine(scheduler, Executor(), Grammars())
    engine.apply(submit(1, [1]))
    engine.step()
    assert calls == ["begin", "forward", "masks", "sample {0: b'\\x01'}", "accept [0]"]


def test_idle_steps_do_nothing(clock: VirtualClock, scripted: Callable[..., ScriptedExecutor]) -> None:
    executor = scripted()
    engine = engine_with(clock, executor)
    assert engine.step() is None
    assert engine.apply(Abort(17)) is None
    assert not executor.plans


# The simulated executor is an oracle only if it objects


def row(tokens: list[int], number: int = 0) -> NewRow:
    command = submit(1, tokens)
    return NewRow(number, command.prompt, len(tokens), command.params, 0, 0, ())


def executor() -> SimulatedExecutor:
    return SimulatedExecutor(VirtualClock(), num_blocks=8, block_tokens=4)


def test_the_oracle_accepts_a_right_plan_and_takes_its_time() -> None:
    it = SimulatedExecutor(VirtualClock(), 8, StepCost(1.0, 0.5, 0.25), block_tokens=4)
    plan = Plan([Chunk(0, 0, 5, 4, True)], [row([1] * 5)], new_blocks=[(0, 0, [3, 2])])
    it.forward(plan)
    assert it.clock.now == 1.0 + 0.5 * 5 + 0.25 * (1 + 2 + 3 + 4 + 5)
    (token,), _ = it.sample(plan)
    assert 0 <= token < it.vocab_size
    it.forward(Plan([Chunk(0, 5, 6, 5, True)]))


ALONE = {"new_rows": [row([1] * 5)], "new_blocks": [(0, 0, [0, 1])]}
FIVE = Chunk(0, 0, 5, 4, True)


@pytest.mark.parametrize(
    ("what", "plan"),
    [
        ("tokens that nobody computed", Plan([Chunk(0, 4, 5, 4, True)], **ALONE)),
        ("no block", Plan([FIVE], [row([1] * 5)], new_blocks=[(0, 0, [0])])),
        ("more tokens than there are", Plan([Chunk(0, 0, 6, 5, True)], **ALONE)),
        ("a sample too early", Plan([Chunk(0, 0, 4, 3, True)], **ALONE)),
        ("an unknown row", Plan([Chunk(1, 0, 4, 4, False)], **ALONE)),
        ("two chunks of a row", Plan([Chunk(0, 0, 4, 4, False), Chunk(0, 4, 5, 4, True)], **ALONE)),
        ("a copy of a copy", Plan([FIVE], **ALONE, copies=[(4, 5), (5, 6)])),
        ("two copies to one place", Plan([FIVE], **ALONE, copies=[(4, 6), (5, 6)])),
        ("a row freed twice", Plan(freed_rows=[3])),
        ("a row taken twice", Plan(new_rows=[row([1]), row([2])])),
        ("a gap in the table", Plan(new_rows=[row([1] * 9)], new_blocks=[(0, 1, [0])])),
        (
            "one block written by two",
            Plan([FIVE, Chunk(1, 0, 5, 4, True)], [row([1] * 5), row([1] * 5, 1)], new_blocks=[(0, 0, [0, 1]), (1, 0, [0, 2])]),
        ),
        (
            "another prompt's block",
            Plan([FIVE, Chunk(1, 4, 5, 4, True)], [row([1] * 5), row([2] * 5, 1)], new_blocks=[(0, 0, [0, 1]), (1, 0, [0, 2])]),
        ),
        (
            "a copy of what comes only later in the step",
            Plan([FIVE, Chunk(1, 4, 5, 4, True)], [row([1] * 5), row([1] * 5, 1)], [], [(0, 0, [0, 1]), (1, 0, [2, 3])], [(0, 2)]),
        ),
    ],
)
def test_the_oracle_objects_to(what: str, plan: Plan) -> None:
    with pytest.raises(PagingError):
        executor().forward(plan)


def test_a_block_written_in_the_same_step_may_be_read() -> None:
    rows, blocks = [row([1] * 5), row([1] * 5, 1)], [(0, 0, [0, 1]), (1, 0, [0, 3])]
    executor().forward(Plan([FIVE, Chunk(1, 4, 5, 4, True)], rows, new_blocks=blocks))


def test_masks_and_min_tokens_forbid_tokens() -> None:
    it = SimulatedExecutor(VirtualClock(), 8, vocab_size=4, block_tokens=4)
    params = SamplingParams(max_tokens=9, min_tokens=1, logprobs=2)
    plan = Plan([Chunk(0, 0, 1, 0, True)], [NewRow(0, submit(1, [1]).prompt, 1, params, 0, 0, (0, 1))], new_blocks=[(0, 0, [0])])
    it.forward(plan)
    (token,), (logprob,) = it.sample(plan, {0: b"\x0b"})  # 0, 1 and 3
    assert token == 3
    assert logprob is not None
    assert len(logprob.top_ids) == 2
