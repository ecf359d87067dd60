"""What a step's policy costs: schedule, commit and the events, with every running sample decoding. (A small model's step takes 2 to 15 ms.)

python benchmarks/policy.py
"""

from __future__ import annotations

import gc
import statistics
import time
from array import array

from headrace.config import EngineConfig, Policy
from headrace.engine.scheduler import Scheduler
from headrace.request import SamplingParams, Submit

STEPS, PROMPT = 2000, 300


def scheduler_with(running: int, waiting: int, policy: Policy) -> Scheduler:
    """`running` samples past their prompts, `waiting` requests that find no row."""
    config = EngineConfig(
        context_length=PROMPT + STEPS + 100,
        num_blocks=running * 80,
        max_batch_size=running,
        max_batch_tokens=8192,
        policy=policy,
        max_waiting=2000,
    )
    scheduler = Scheduler(config, time.perf_counter, end_token_ids=(1, 2))
    for request_id in range(running + waiting):
        prompt = array("i", [request_id] * PROMPT).tobytes()
        params = SamplingParams(max_tokens=STEPS + 50)
        scheduler.add(Submit(request_id, prompt, params, seed=0, received=0.0, tenant=f"tenant {request_id % 7}"))
    while True:
        plan = scheduler.schedule()
        scheduler.commit(plan, [5] * sum(chunk.samples for chunk in plan.chunks))
        if len(plan.chunks) == running and all(chunk.samples for chunk in plan.chunks):
            return scheduler


def measure(running: int, waiting: int = 0, policy: Policy = "fcfs") -> tuple[float, float]:
    """Median and mean seconds a step; the mean has the block boundaries in it."""
    scheduler = scheduler_with(running, waiting, policy)
    tokens = [5] * running
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(STEPS - 200):
        start = time.perf_counter()
        scheduler.commit(scheduler.schedule(), list(tokens))
        times.append(time.perf_counter() - start)
    return statistics.median(times), statistics.fmean(times)


def main() -> None:
    print("policy of a step: schedule + commit + events            median     mean")
    cases: list[tuple[int, int, Policy]] = [(1, 0, "fcfs"), (8, 0, "fcfs"), (32, 0, "fcfs"), (32, 1000, "fcfs"), (32, 1000, "fair")]
    for running, waiting, policy in [*cases, (256, 1000, "fcfs")]:
        median, mean = measure(running, waiting, policy)
        print(f"{running:4d} decoding, {waiting:4d} waiting, {policy:8s}               {median * 1e6:8.1f} {mean * 1e6:8.1f} us")


if __name__ == "__main__":
    main()
