"""One key floods the server with 200 requests; another one's few are served as if the flood were one more user."""

from __future__ import annotations

import random
from array import array

import pytest

from headrace.config import EngineConfig, Policy
from headrace.engine.scheduler import Scheduler
from headrace.executors.simulated import VirtualClock
from headrace.request import SamplingParams, Submit

ROWS, PROMPT, OUTPUT, FLOOD = 8, 48, (16, 48), 200


def queue_times(policy: Policy, seed: int) -> tuple[list[float], int, float]:
    """Of the other key's requests, in steps, while the flood lasts; how many of the flood passed one of them; the steps it lasted."""
    rng, clock = random.Random(seed), VirtualClock(1.0)
    config = EngineConfig(
        context_length=256, num_blocks=256, max_batch_size=ROWS, max_batch_tokens=256, step_target_s=0.0, policy=policy, prefix_cache=False
    )
    scheduler = Scheduler(config, clock)

    def add(request_id: int, tenant: str) -> None:
        prompt = array("i", [rng.randrange(1000) for _ in range(PROMPT)])
        params = SamplingParams(max_tokens=rng.randint(*OUTPUT), ignore_eos=True)
        scheduler.add(Submit(request_id, prompt.tobytes(), params, 0, clock(), tenant=tenant))

    for request_id in range(FLOOD):
        add(request_id, "flood")
    came: dict[int, float] = {}
    waits: list[float] = []
    passed = 0
    flooding, number, next_at = FLOOD, FLOOD, 5.0
    while flooding > ROWS:
        if clock() >= next_at:
            came[number] = clock()
            add(number, "other")
            number += 1
            next_at = clock() + rng.uniform(10, 30)  # far less than its half
        plan = scheduler.schedule()
        clock.advance(1.0)
        events = scheduler.commit(plan, [5] * sum(chunk.samples for chunk in plan.chunks))
        for request_id, at, _ in events.admitted:
            if request_id in came:
                waits.append(at - came.pop(request_id))
            else:
                passed += any(at > since for since in came.values())  # since before this step
        flooding -= sum(request_id < FLOOD for request_id, _, _ in events.finished)
    return waits, passed, clock()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_flood_of_one_key_is_not_felt_by_another(seed: int) -> None:
    """It needs less than its half, so the next row that becomes free is its own; a row becomes free every mean(OUTPUT) / ROWS steps."""
    waits, passed, lasted = queue_times("fair", seed)
    assert len(waits) > 20
    assert passed == 0
    waits.sort()
    assert waits[len(waits) // 2] <= 3 + sum(OUTPUT) / 2 / ROWS
    assert waits[int(0.99 * len(waits))] <= 3 + sum(OUTPUT) / 2
    flooded, _, as_long = queue_times("fcfs", seed)
    assert flooded == [], "by arrival it waits for the whole flood"
    assert lasted <= 1.3 * as_long, "what the other key got is on top"
