"""Many steps at once, for a simulation: those of which `Scheduler.steps_until_event` says that they only decode."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from headrace.engine.scheduler import Scheduler


def skip_steps(scheduler: Scheduler, rows: int, seconds: Sequence[float], ended: float, token: int = 0) -> None:
    """What schedule and commit would have done in `len(seconds)` steps of `rows` rows, the last of which ended now, at `ended`.

    Every running sample chose `token`, which must end none. The clock has advanced already. Raises RuntimeError for more steps than
    `steps_until_event` allows.
    """
    count = len(seconds)
    if count > scheduler.steps_until_event() or rows != len(scheduler.running):
        raise RuntimeError(f"[skip_steps] {count} steps of {rows} rows: something happens in them")
    tokens = array("i", (token,)) * count
    size, queues = scheduler.pool.block_tokens, scheduler._queues
    for sample in scheduler.running:
        start = sample.num_computed
        stop = sample.num_computed = start + count
        sample.tokens.extend(tokens)
        # Only in the last of the steps can a block have become full, so the order of publishing is that of stepping.
        if start // size != stop // size:
            scheduler._sharing.publish(sample, start, stop)
        if queues.fair is not None:
            queues.fair.charge(sample, count)
    scheduler._num_computed += count * rows
    scheduler.tally.steps += count
    for duration in seconds:
        scheduler.budget.observe(rows, duration)
    scheduler.step_started, scheduler.step_ended = ended - seconds[-1], ended
