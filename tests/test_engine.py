"""The whole engine on a simulated executor: whatever happens around a request, it gets the answer it would get alone."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from engine_oracle import FUZZ, VOCAB, World, expected_answers, random_config, random_submit, submit
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headrace.config import EngineConfig


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
