"""The scheduler's contracts, one at a time: plans in, tokens back, no executor. Blocks have four tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from engine_oracle import END, END_TOKENS, ids, submit

from headrace.config import EngineConfig
from headrace.engine.blocks import BlockPool
from headrace.engine.budget import FIRST_TOKENS, MIN_CHUNK, StepBudget
from headrace.engine.plan import Plan
from headrace.engine.prefix import PrefixHasher
from headrace.engine.samples import Request
from headrace.engine.scheduler import Scheduler
from headrace.engine.sharing import Sharing
from headrace.errors import ContextLengthExceeded, InvalidRequest, QueueFull, UsageError
from headrace.executors.simulated import VirtualClock
from headrace.request import StepEvents, Submit, TokenLogprob


class Driver:
    """A scheduler, a clock that a step moves by one second, and what came out, by request."""

    def __init__(self, **fields: object) -> None:
        config = {"context_length": 256, "num_blocks": 64, "step_target_s": 0.0, "policy": "fcfs", **fields}
        self.clock = VirtualClock(1.0)
        self.scheduler = Scheduler(EngineConfig(**config), self.clock, END_TOKENS, block_tokens=4)  # type: ignore[arg-type]
        self.rows: dict[int, tuple[int, int]] = {}  # row -> request, sample
        self.tables: dict[int, list[int]] = {}
        self.ended: dict[tuple[int, int], str] = {}
        self.events: list[StepEvents] = []

    def add(self, *commands: Submit) -> None:
        for command in commands:
            events = self.scheduler.add(command)
            if events is not None:
                self.hear(events)

    def abort(self, request_id: int, sample: int = -1) -> None:
        events = self.scheduler.abort(request_id, sample)
        if events is not None:
            self.hear(events)
        self.scheduler.check()

    def hear(self, events: StepEvents) -> None:
        self.events.append(events)
        self.ended.update({(request_id, sample): reason for request_id, sample, reason in events.finished})

    def schedule(self) -> Plan:
        plan = self.scheduler.schedule()
        for row in plan.freed_rows:
            del self.rows[row]
        running = {sample.row: sample for sample in self.scheduler._rows.running}
        for new in plan.new_rows:
            assert new.row not in self.rows
            self.rows[new.row] = (running[new.row].request_id, new.sample_index)
            self.tables[new.row] = []
        for row, first, blocks in plan.new_blocks:
            assert len(self.tables[row]) == first
            self.tables[row] += blocks
        return plan

    def step(self, token: int = 0) -> dict[tuple[int, int], tuple[int, int]]:
        """One step in which every sample chooses `token`. Which tokens [start, stop) of (request, sample) it computed."""
        plan = self.schedule()
        self.clock.advance(1.0)
        self.hear(self.scheduler.commit(plan, [token] * sum(chunk.samples for chunk in plan.chunks)))
        self.scheduler.check()
        return {self.rows[chunk.row]: (chunk.start, chunk.stop) for chunk in plan.chunks}

    def finish(self) -> int:
        """Steps until idle."""
        steps = 0
        while not self.scheduler.is_idle:
            self.step()
            steps += 1
            assert steps < 1000
        assert self.scheduler.pool.num_held == 0
        return steps

    @property
    def admitted(self) -> list[tuple[int, float, int]]:
        return [entry for events in self.events for entry in events.admitted]

    @property
    def stalled(self) -> list[tuple[int, float]]:
        return [entry for events in self.events for entry in events.stalled]


def count(steps: list[dict[tuple[int, int], tuple[int, int]]]) -> int:
    return sum(stop - start for step in steps for start, stop in step.values())


A, B, C = (1, 0), (2, 0), (3, 0)  # first samples of requests 1, 2, 3
LONG = [7] * 30  # not a multiple of four


# Chunks and budgets


def test_a_prompt_goes_in_chunks_and_then_decodes() -> None:
    it = Driver(max_batch_tokens=4)
    it.add(submit(1, [7] * 10, max_tokens=3))
    plans = []
    while not it.scheduler.is_idle:
        plans.append(it.schedule())
        it.hear(it.scheduler.commit(plans[-1], [5] if plans[-1].chunks[0].samples else []))
    chunks = [(chunk.start, chunk.stop, chunk.logits_start, chunk.samples) for plan in plans for chunk in plan.chunks]
    assert chunks == [(0, 4, 4, False), (4, 8, 8, False), (8, 10, 9, True), (10, 11, 10, True), (11, 12, 11, True)]
    (new,) = plans[0].new_rows
    assert (new.tokens, new.num_prompt, new.sample_index) == (ids([7] * 10), 10, 0)
    assert [len(blocks) for plan in plans for _, _, blocks in plan.new_blocks] == [3]
    assert it.ended == {A: "length"}
    it.add(submit(2, [7]))
    assert it.schedule().freed_rows == [new.row]


def test_the_last_token_takes_no_block() -> None:
    it = Driver()
    it.add(submit(1, [7] * 4, max_tokens=1), submit(2, [8] * 4, max_tokens=2))
    it.step()
    assert it.ended == {A: "length"}
    assert it.scheduler.pool.num_held == 1
    it.step()
    assert it.ended == {A: "length", B: "length"}


def test_every_decoding_sample_gets_its_token_before_prompts_get_more() -> None:
    it = Driver(max_batch_tokens=8, policy="priority")
    it.add(submit(1, [1], 50, priority=1), submit(2, [2], 50, priority=1))
    it.step()
    it.add(submit(3, LONG, priority=0))  # first in policy order from now on
    assert it.step() == {A: (1, 2), B: (1, 2), C: (0, 6)}
    assert it.step() == {C: (6, 12), A: (2, 3), B: (2, 3)}


def test_batch_size_and_batch_tokens_bound_the_rows() -> None:
    it = Driver(max_batch_size=2)
    it.add(*(submit(request_id, [request_id]) for request_id in range(1, 6)))
    assert len(it.step()) == 2
    it = Driver(max_batch_tokens=3)
    it.add(*(submit(request_id, [request_id], 9) for request_id in range(1, 6)))
    assert [len(it.step()) for _ in range(3)] == [3, 3, 3]


def drive(budget: StepBudget, fixed: float, per_token: float, steps: int) -> list[float]:
    """Steps that take all the budget gives, on a machine with these costs. Their seconds."""
    times = []
    for _ in range(steps):
        seconds = fixed + per_token * budget.tokens
        budget.observe(budget.tokens, seconds)
        times.append(seconds)
    return times


@pytest.mark.parametrize(("fixed", "per_token"), [(0.002, 0.0002), (0.02, 0.002), (0.001, 0.01), (0.05, 0.0001)])
def test_the_time_budget_finds_the_chunk(fixed: float, per_token: float) -> None:
    budget = StepBudget(0.1, 4096)
    times = drive(budget, fixed, per_token, 60)
    ideal = fixed + per_token * max(MIN_CHUNK, min(4096, (0.1 - fixed) / per_token))
    assert times[-1] == pytest.approx(ideal, rel=0.15)
    # It comes from below: no step overshoots by more than a doubling of what was known to be short enough, or the first guess.
    assert max(times) <= max(2 * ideal, fixed + per_token * FIRST_TOKENS)


def test_the_time_budget_remembers_prompts_through_a_thousand_decode_steps() -> None:
    budget = StepBudget(0.1, 4096)
    drive(budget, 0.005, 0.0005, 60)
    before = budget.tokens
    for step in range(1000):
        budget.observe(8, (0.005 + 0.0005 * 8) * (1.2 if step % 2 else 0.8))
    assert budget.tokens == pytest.approx(before, rel=0.15)


def test_the_time_budget_survives_a_machine_that_slept_and_follows_one_that_slowed() -> None:
    budget = StepBudget(0.1, 4096)
    drive(budget, 0.005, 0.0005, 60)
    before = budget.tokens
    budget.observe(before, 3600.0)
    assert budget.tokens > before / 4
    drive(budget, 0.005, 0.0005, 30)
    assert budget.tokens == pytest.approx(before, rel=0.15)
    assert drive(budget, 0.005, 0.002, 60)[-1] == pytest.approx(0.1, rel=0.15)


def test_the_time_budget_trusts_no_size_far_beyond_those_it_has_seen() -> None:
    budget = StepBudget(0.1, 4096)
    for tokens, seconds, most in ((1, 0.01, 64), (8, 0.01, 64), (64, 0.0101, 128), (128, 0.0102, 256), (256, 0.09, 512)):
        budget.observe(tokens, seconds)
        assert budget.tokens <= most


@pytest.mark.parametrize("seconds", [0.2, 1.0, 100.0])
@pytest.mark.parametrize("tokens", [1, 20, 64, 500])
def test_the_time_budget_recovers_from_a_slow_first_step(tokens: int, seconds: float) -> None:
    budget = StepBudget(0.1, 4096)
    budget.observe(tokens, seconds)
    drive(budget, 0.005, 0.0005, 60)
    assert budget.tokens == pytest.approx(190, rel=0.15)


def test_the_time_budget_is_bounded_and_can_be_off() -> None:
    off = StepBudget(0.0, 300)
    assert drive(off, 10.0, 1.0, 3) == [310.0] * 3
    quick = StepBudget(0.1, 300)
    drive(quick, 1e-6, 1e-9, 20)
    assert quick.tokens == 300
    slow = StepBudget(0.1, 300)
    drive(slow, 1.0, 1.0, 20)
    assert slow.tokens == MIN_CHUNK


def test_chunks_follow_the_measured_time() -> None:
    it = Driver(max_batch_tokens=256, step_target_s=0.1, num_blocks=1000, context_length=4000)
    it.add(submit(1, [7] * 2000))
    sizes = []
    while not it.ended:
        plan = it.schedule()
        it.clock.advance(0.01 + 0.001 * plan.num_tokens)
        it.hear(it.scheduler.commit(plan, [0] * plan.chunks[0].samples))
        sizes.append(plan.num_tokens)
    assert sizes[0] == FIRST_TOKENS
    assert sizes[12] == pytest.approx(90, abs=10)


# What need not be computed


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 3), (5, 4), (7, 4), (8, 7), (9, 8), (11, 8), (12, 11)])
def test_a_prompt_sent_again_computes_what_is_not_in_full_blocks(length: int, cached: int) -> None:
    it = Driver()
    prompt = list(range(10, 10 + length))
    it.add(submit(1, prompt, 1))
    it.finish()
    it.add(submit(2, prompt, 1))
    plan = it.schedule()
    assert [(chunk.start, chunk.stop) for chunk in plan.chunks] == [(cached, length)]
    # Where the prompt ends with its block, that one is copied: its last token is computed again, and nobody writes into a shared block.
    assert len(plan.copies) == (length % 4 == 0)
    it.hear(it.scheduler.commit(plan, [0]))
    assert it.admitted[-1][2] == cached
    assert it.scheduler.tally.cached_tokens == cached
    it.scheduler.check()


def test_the_next_turn_finds_the_answer_in_the_cache() -> None:
    it = Driver()
    it.add(submit(1, [7] * 6, 7))  # computes 12 tokens
    it.finish()
    it.add(submit(2, [7] * 6 + [0] * 7 + [8] * 3, 1))
    assert it.step() == {B: (12, 16)}


def test_no_sharing_across_salts_nor_without_a_prefix_cache() -> None:
    it = Driver()
    it.add(submit(1, LONG, 1), submit(2, LONG, 1, cache_salt="other"))
    assert it.step() == {A: (0, 30), B: (0, 30)}
    it = Driver(prefix_cache=False)
    it.add(submit(1, LONG, 1), submit(2, LONG, 1))
    assert it.step() == {A: (0, 30), B: (0, 30)}
    assert it.scheduler.pool.num_cached == 0


def test_identical_prompts_share_within_the_step() -> None:
    it = Driver()
    it.add(submit(1, LONG), submit(2, LONG))
    assert it.step() == {A: (0, 30), B: (28, 30)}
    tables = {key: it.tables[row] for row, key in it.rows.items()}
    assert tables[A][:7] == tables[B][:7]
    assert tables[A][7] != tables[B][7]


def test_a_prompt_in_the_making_is_shared_as_soon_as_it_is_made() -> None:
    it = Driver(max_batch_tokens=16)
    it.add(submit(1, LONG), submit(2, LONG))
    assert it.step() == {A: (0, 16)}
    assert it.step() == {A: (16, 30), B: (28, 30)}
    assert it.scheduler.tally.prompt_tokens == 32


def test_a_running_prompt_lends_its_tail() -> None:
    it = Driver()
    it.add(submit(1, LONG))
    it.step()
    it.add(submit(2, LONG))
    plan = it.schedule()
    assert [(chunk.start, chunk.stop) for chunk in plan.chunks] == [(30, 31), (29, 30)]
    ((source, target),) = plan.copies
    tables = {key: it.tables[row] for row, key in it.rows.items()}
    assert (source, target) == (tables[A][7], tables[B][7])


def test_sharers_wait_for_the_producer_and_one_of_them_takes_over() -> None:
    it = Driver(max_batch_tokens=10, batching="static")  # a batch is admitted at once, so that prompts wait for their turn in rows
    it.add(submit(1, LONG, 1), submit(2, LONG, 1), submit(3, LONG, 1))
    assert it.step() == {A: (0, 10)}
    assert it.scheduler.pool.num_held == 7 + 3
    it.abort(1)
    assert it.step() == {B: (10, 20)}, "it goes on in the middle of a block"
    assert it.step() == {B: (20, 30)}
    assert it.step() == {C: (28, 30)}
    assert it.scheduler.tally.prompt_tokens == 32


def test_sharers_fill_a_block_together() -> None:
    it = Driver(max_batch_tokens=10, batching="static", policy="priority")
    it.add(submit(1, [*LONG, 1], 1, priority=2), submit(2, [*LONG, 2], 1, priority=1), submit(3, [9], 30, priority=1))
    assert it.step() == {B: (0, 10)}
    assert it.step() == {B: (10, 20)}
    assert it.step() == {B: (20, 30)}
    assert it.step() == {B: (30, 31), C: (0, 1), A: (28, 31)}


def test_no_block_is_copied_while_those_before_it_are_in_the_making() -> None:
    pool = BlockPool(4, block_tokens=4)
    hasher = PrefixHasher()
    sharing = Sharing(pool, hasher, enabled=True, caching=True)
    (sample,) = Request(submit(1, [1] * 8), (), 64).samples
    first = hasher.extend(hasher.root(""), ids([1] * 4))
    second = hasher.extend(first, ids([1] * 4))
    blocks = pool.take(2)
    assert blocks is not None
    pool.promise(blocks[0], first)
    pool.publish(blocks[1], second)  # its own beginning was another copy, since evicted
    assert sharing.find(sample) == ([blocks[0]], -1, 0)
    pool.publish(blocks[0], first)
    assert sharing.find(sample) == ([blocks[0]], blocks[1], 7)


# Samples of one request


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_share_the_prompt_with_its_tail(prefix_cache: bool) -> None:
    it = Driver(prefix_cache=prefix_cache)
    it.add(submit(1, LONG, 9, num_samples=4))
    assert it.step() == {A: (0, 30)}
    plan = it.schedule()
    assert len(plan.copies) == 3
    assert len({source for source, _ in plan.copies}) == 1
    assert len({target for _, target in plan.copies}) == 3
    assert [(chunk.start, chunk.stop) for chunk in plan.chunks] == [(30, 31)] + [(29, 30)] * 3
    it.hear(it.scheduler.commit(plan, [0] * 4))
    assert it.scheduler.pool.num_held == 7 + 4
    assert [new.sample_index for new in plan.new_rows] == [1, 2, 3]
    assert it.admitted == [(1, 1.0, 0)]
    it.finish()
    assert it.ended == {(1, index): "length" for index in range(4)}


def test_samples_of_a_prompt_that_ends_with_its_block() -> None:
    it = Driver()
    it.add(submit(1, [7] * 8, 5, num_samples=2))
    it.step()
    plan = it.schedule()
    assert [(chunk.start, chunk.stop) for chunk in plan.chunks] == [(8, 9), (7, 8)]
    assert len(plan.copies) == 1
    it.hear(it.scheduler.commit(plan, [0, 0]))
    it.finish()


def test_samples_without_a_donor_compute_the_tail_themselves() -> None:
    it = Driver()
    it.add(submit(1, LONG, 1, num_samples=3))
    assert it.step() == {A: (0, 30)}
    assert it.step() == {(1, 1): (28, 30), (1, 2): (28, 30)}
    assert it.ended == {(1, 0): "length", (1, 1): "length", (1, 2): "length"}


def test_samples_get_rows_before_later_requests() -> None:
    it = Driver(max_batch_size=2)
    it.add(submit(1, LONG, 3, num_samples=3), submit(2, [1], 1))
    assert set(it.step()) == {A, B}
    for expected in ({A, (1, 1)}, {A, (1, 1)}, {(1, 1), (1, 2)}):
        assert set(it.step()) == expected


def test_one_sample_can_be_aborted() -> None:
    it = Driver(max_batch_tokens=8)
    it.add(submit(1, LONG, 5, num_samples=3))
    it.step()
    it.abort(1, 2)  # parked
    it.abort(1, 0)  # the one that computes the prompt: another takes its place, and finds the full blocks
    it.abort(1, 7)
    assert it.ended == {(1, 2): "abort", (1, 0): "abort"}
    assert it.step() == {(1, 1): (8, 16)}
    it.finish()
    assert it.ended[1, 1] == "length"


# Too little memory


def test_the_last_in_order_gives_way_and_the_first_always_advances() -> None:
    it = Driver(num_blocks=9, context_length=36, prefix_cache=False)
    it.add(*(submit(request_id, [request_id] * 4, 20) for request_id in (1, 2, 3)))
    while not it.scheduler.is_idle:
        running = [(sample.request_id, sample.index) for sample in it.scheduler._rows.running]
        step = it.step()
        assert not running or min(running) in step
    assert list(it.ended) == [A, B, C]
    assert it.scheduler.tally.preemptions >= 1
    assert it.scheduler.tally.recomputed_tokens > 0
    assert [entry[0] for entry in it.admitted] == [1, 2, 3], "queueing ends once, whatever happens later"


def test_priority_decides_who_gives_way() -> None:
    it = Driver(num_blocks=6, context_length=24, policy="priority")
    it.add(submit(1, [1] * 8, 12, priority=1), submit(2, [2] * 8, 12, priority=0))
    while it.scheduler.tally.preemptions == 0 and not it.stalled:
        assert B in it.step()
    it.finish()
    assert list(it.ended) == [B, A]


def test_preemption_is_told_in_seconds_and_tokens() -> None:
    it = Driver(num_blocks=6, context_length=24, prefix_cache=False)
    it.add(submit(1, [1] * 7, 9), submit(2, [2] * 7, 17))
    steps = []
    while not it.scheduler.is_idle:
        steps.append(it.step())
    ran = [number for number, step in enumerate(steps) if B in step]
    gap = max(after - before for before, after in pairwise(ran))
    assert gap > 1
    assert sum(seconds for _, seconds in it.stalled) == sum(after - before - 1 for before, after in pairwise(ran))
    computed = count(steps)
    assert computed == (7 + 8) + (7 + 16) + it.scheduler.tally.recomputed_tokens
    assert it.ended == {A: "length", B: "length"}


def test_a_preempted_sample_computes_only_what_the_pool_forgot() -> None:
    it = Driver(num_blocks=8, context_length=32)
    it.add(submit(1, [1] * 8, 17), submit(2, [2] * 8, 13))
    it.finish()
    # With four full blocks each, A takes B's last one for its tokens 16 to 20, and one more for 20 to 24; the other two are found again.
    assert it.scheduler.tally.preemptions == 1
    assert it.scheduler.tally.recomputed_tokens == 8


def test_the_last_one_waits_in_its_row_when_it_lacks_a_block_itself() -> None:
    it = Driver(num_blocks=6, context_length=24)
    it.add(submit(1, [1] * 12, 4), submit(2, [2] * 7, 4))
    # A takes the last block in the second step, B needs one in the third, A is over after the fourth.
    assert [B in it.step() for _ in range(6)] == [True, True, False, False, True, True]
    assert it.scheduler.is_idle
    assert it.scheduler.tally.preemptions == it.scheduler.tally.recomputed_tokens == 0
    assert it.stalled == [(2, 2.0)]


def test_newcomers_leave_room_for_those_who_run() -> None:
    it = Driver(num_blocks=8, context_length=32)
    it.add(submit(1, [1] * 12, 20), submit(2, [2] * 20, 5))  # three blocks and five: they fit, but then A could not grow
    assert it.step() == {A: (0, 12)}
    it.abort(1)
    assert it.step() == {B: (0, 20)}


def test_a_request_is_not_stalled_while_one_of_its_samples_runs() -> None:
    it = Driver(num_blocks=9, context_length=36)
    it.add(submit(1, [1] * 8, 21, num_samples=2))
    while A not in it.ended:
        step = it.step()
    assert it.scheduler.tally.preemptions == 1
    assert (1, 1) not in step
    it.clock.advance(5.0)
    it.finish()
    assert it.stalled == [(1, 5.0)], "from the end of the first to the return of the second"


def test_blocks_let_go_by_a_preemption_let_others_in_at_once() -> None:
    it = Driver(num_blocks=12, context_length=40, policy="priority", prefix_cache=False)
    it.add(submit(1, [1] * 4, 20, priority=0), submit(2, [2] * 31, 9, priority=2))
    it.step()
    it.add(submit(3, [3] * 7, 9, priority=1))
    while it.scheduler.tally.preemptions == 0:
        assert C not in it.step()
    assert set(it.step()) == {A, C}
    it.finish()


def test_a_smaller_newcomer_with_priority_is_not_held_up_by_a_larger_one() -> None:
    it = Driver(num_blocks=10, context_length=40, policy="priority")
    it.add(submit(1, [1] * 4, 20), submit(2, [2] * 36, 4, priority=1))
    it.step()
    it.step()
    it.add(submit(3, [3], 4))
    assert set(it.step()) == {A, C}


def test_a_newcomer_with_priority_goes_before_a_preempted_sample() -> None:
    it = Driver(num_blocks=6, context_length=24, policy="priority", max_batch_size=2)
    it.add(submit(1, [1] * 7, 10, priority=1), submit(2, [2] * 7, 10, priority=1))
    while it.scheduler.tally.preemptions == 0:
        it.step()
    it.add(submit(3, [3] * 5, 3, priority=0))
    it.finish()
    assert list(it.ended) == [C, A, B] or list(it.ended) == [A, C, B]
    assert list(it.ended)[-1] == B


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    it = Driver(context_length=16)
    it.add(submit(1, [7] * 15, 1))
    with pytest.raises(ContextLengthExceeded, match="16 tokens; the context length is 16 tokens"):
        it.add(submit(2, [7] * 16, 1))
    it.finish()
    it = Driver(num_blocks=8, context_length=100)
    with pytest.raises(ContextLengthExceeded, match=r"33 tokens .* up to 1 needs 9 KV blocks; there are 8, enough for 32 tokens"):
        it.add(submit(1, [7] * 33, 1))
    with pytest.raises(ContextLengthExceeded, match="needs 11 KV blocks"):
        it.add(submit(1, [7] * 4, 40))
    it.add(submit(2, [7] * 32, 1), submit(3, [7] * 4, 29))
    it.finish()
    assert it.ended == {B: "length", C: "length"}


def test_the_queue_has_a_limit() -> None:
    it = Driver(max_waiting=2, max_batch_size=1)
    it.add(submit(1, [1]))
    it.step()
    it.add(submit(2, [1], num_samples=9), submit(3, [1]))
    with pytest.raises(QueueFull, match="2 requests are waiting, the limit is 2"):
        it.add(submit(4, [1]))
    it.add(submit(5, [1], emitted=(b"",)))  # was accepted before the engine was started again
    it.finish()


def test_malformed_commands_are_refused() -> None:
    it = Driver()
    it.add(submit(1, [1]))
    for command in (
        submit(1, [1]), submit(2, []), submit(2, [1], max_tokens=0), submit(2, [1], num_samples=0), submit(2, [1], emitted=(b"", b"")),
        submit(2, [1], emitted=(b"12345",)), Submit(2, b"12345", submit(2, [1]).params, 0, 0.0),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest):
            it.add(command)
    it.scheduler.check()


# Other policies


def test_a_short_prompt_passes_a_long_one_that_came_just_before() -> None:
    it = Driver(max_batch_tokens=8, policy="shortest")
    it.add(submit(1, LONG))
    assert it.step() == {A: (0, 8)}
    it.add(submit(2, [1] * 6))  # 8 computed and 6 to come: before the 30 of the first
    assert it.step() == {B: (0, 6), A: (8, 10)}
    assert it.step() == {B: (6, 7), A: (10, 17)}
    assert it.finish() < 8


def test_who_waits_under_shortest_falls_behind_by_its_own_length_at_most() -> None:
    """Short prompts that keep coming, a step's budget each, and a long one: it waits until as many tokens as it has were computed."""
    it = Driver(max_batch_tokens=8, policy="shortest", num_blocks=512)
    it.add(submit(1, LONG, max_tokens=1))
    waited = 0
    for request_id in range(2, 50):
        it.add(submit(request_id, [request_id] * 8, max_tokens=1))
        if A in it.step():
            break
        waited += 8
    assert len(LONG) - 2 * 8 <= waited <= len(LONG)
    it.finish()


def test_a_preempted_sample_under_shortest_comes_back() -> None:
    it = Driver(policy="shortest", num_blocks=12, max_batch_tokens=16)
    it.add(submit(1, LONG, 12, ignore_eos=True), submit(2, [2] * 4, 12, ignore_eos=True), submit(3, [3] * 4, 12, ignore_eos=True))
    it.finish()
    assert it.ended == {A: "length", B: "length", C: "length"}


def test_fair_serves_the_tenant_that_was_served_least() -> None:
    it = Driver(policy="fair", max_batch_size=1)
    it.add(*(submit(request_id, [1], 4, tenant="many") for request_id in range(1, 7)))
    it.step()
    it.add(submit(10, [1], 4, tenant="few"), submit(11, [1], 4, tenant="few"))
    it.finish()
    assert [request_id for request_id, _ in it.ended] == [1, 10, 2, 11, 3, 4, 5, 6]


def test_fair_gives_no_credit_for_idle_time() -> None:
    it = Driver(policy="fair", max_batch_size=1)
    it.add(*(submit(request_id, [1], 4, tenant="busy") for request_id in range(1, 7)))
    for _ in range(14):
        it.step()
    it.add(*(submit(request_id, [1], 4, tenant="late") for request_id in (10, 11, 12)))
    it.finish()
    assert [request_id for request_id, _ in it.ended] == [1, 2, 3, 4, 10, 5, 11, 6, 12]


def test_fair_forgets_no_debt_while_anyone_is_busy() -> None:
    it = Driver(policy="fair", max_batch_size=1)
    it.add(submit(1, LONG, 1, tenant="greedy"), *(submit(request_id, [1], 4, tenant="other") for request_id in (2, 3, 4)))
    it.step()
    it.step()
    it.add(submit(5, [1], 4, tenant="greedy"))
    it.finish()
    assert [request_id for request_id, _ in it.ended] == [1, 2, 3, 4, 5]


def test_fair_lets_the_preempted_back_before_anyone_new() -> None:
    it = Driver(policy="fair", num_blocks=6, context_length=24, prefix_cache=False, max_batch_size=2)
    it.add(submit(1, [1] * 7, 14, tenant="a"))
    it.step()
    it.add(submit(2, [2] * 19, 1, tenant="a"), submit(3, [3] * 7, 14, tenant="b"))
    next(iter(it.scheduler._queues.fair._accounts.values())).served += 1  # "a" is ahead by a token: the third goes before the second
    while it.scheduler.tally.preemptions == 0:
        it.step()
    while not (step := it.step().keys() & {B, C}):
        pass
    assert step == {C}, "the third was preempted; the second came earlier, and they do not fit together"
    it.finish()


def test_static_batches_run_to_completion() -> None:
    it = Driver(batching="static", max_batch_size=2)
    it.add(submit(1, [1], 2), submit(2, [2], 4), submit(3, [3], 2))
    assert [set(it.step()) for _ in range(6)] == [{A, B}, {A, B}, {B}, {B}, {C}, {C}], "a finished row is not computed"
    assert it.scheduler.is_idle
    it = Driver(batching="continuous", max_batch_size=2)
    it.add(submit(1, [1], 2), submit(2, [2], 4), submit(3, [3], 2))
    assert [set(it.step()) for _ in range(4)] == [{A, B}, {A, B}, {B, C}, {B, C}]


def test_a_static_batch_counts_all_samples_and_takes_none_in_later() -> None:
    it = Driver(batching="static", max_batch_size=4, max_batch_tokens=8)
    it.add(submit(1, LONG, 3, num_samples=3), submit(2, [2], 1), submit(3, [3], 1))
    seen = [set(it.step()) for _ in range(4)]
    assert seen == [{A}, {A}, {A}, {A, B}]
    assert set(it.step()) == {(1, 0), (1, 1), (1, 2)}
    it.add(submit(4, [4], 1))
    assert set(it.step()) == {(1, 0), (1, 1), (1, 2)}
    assert set(it.step()) == {(1, 1), (1, 2)}
    assert set(it.step()) == {C, (4, 0)}


def test_static_and_continuous_do_the_same_on_equal_lengths() -> None:
    steps = []
    for batching in ("static", "continuous"):
        it = Driver(batching=batching, max_batch_size=4)
        it.add(*(submit(request_id, [request_id] * 6, 9) for request_id in range(8)))
        steps.append(it.finish())
    assert steps[0] == steps[1] == 18


def test_full_reservation_takes_a_whole_context_at_once() -> None:
    it = Driver(kv_reservation="full", context_length=32, num_blocks=20)
    it.add(*(submit(request_id, [7] * 4, 20) for request_id in (1, 2, 3)))
    assert it.step() == {A: (0, 4), B: (0, 4)}
    assert it.scheduler.pool.num_held == 16
    plans = []
    while not it.scheduler.is_idle:
        plan = it.schedule()
        it.hear(it.scheduler.commit(plan, [0] * len(plan.chunks)))
        plans.append(plan)
    assert [row for plan in plans for row, _, _ in plan.new_blocks] == [new.row for plan in plans for new in plan.new_rows]
    assert it.scheduler.tally.preemptions == it.scheduler.pool.num_cached == 0
    it.add(submit(4, [7] * 5, 3, num_samples=2))
    assert it.step() == {(4, 0): (0, 5), (4, 1): (0, 5)}, "nobody shares"
    with pytest.raises(UsageError, match="8 KV blocks, there are 7"):
        Driver(kv_reservation="full", context_length=32, num_blocks=7)


# Ends


@pytest.mark.parametrize(
    ("fields", "length", "reason"),
    [
        ({}, 1, "stop"),
        ({"ignore_eos": True}, 6, "length"),
        ({"ignore_eos": True, "stop_token_ids": (END,)}, 1, "stop"),
        ({"stop_token_ids": (9,)}, 1, "stop"),
        ({"min_tokens": 2}, 3, "stop"),
        ({"min_tokens": 9}, 6, "length"),
    ],
)
def test_end_tokens(fields: dict[str, object], length: int, reason: str) -> None:
    it = Driver()
    it.add(submit(1, [1], 6, **fields))
    while not it.scheduler.is_idle:
        it.step(END)
    assert it.ended == {A: reason}
    assert sum(len(events.tokens) for events in it.events) == length


def test_other_stop_tokens_and_what_min_tokens_must_forbid() -> None:
    it = Driver()
    it.add(submit(1, [1], 6, stop_token_ids=(9,)), submit(2, [2], 6, stop_token_ids=(9,), ignore_eos=True))
    plan = it.schedule()
    assert [new.end_token_ids for new in plan.new_rows] == [(END, 9), (9,)]
    it.hear(it.scheduler.commit(plan, [9, END]))
    assert it.ended == {A: "stop"}


def test_an_end_token_in_the_prompt_ends_nothing() -> None:
    it = Driver()
    it.add(submit(1, [1, END], 3))
    assert not it.ended
    it.finish()
    assert it.ended == {A: "length"}


def test_the_context_ends_what_max_tokens_does_not() -> None:
    it = Driver(context_length=8)
    it.add(submit(1, [1] * 5, 100))
    it.finish()
    assert it.ended == {A: "length"}
    assert sum(len(events.tokens) for events in it.events) == 3


def test_a_resumed_request_goes_on_after_what_was_sent() -> None:
    it = Driver()
    it.add(submit(1, [1] * 6, 5, num_samples=4, emitted=(ids([0, 0, 0]), ids([0] * 5), ids([0, END]), b"")))
    assert it.ended == {(1, 1): "length", (1, 2): "stop"}
    plan = it.schedule()
    (new,) = plan.new_rows
    assert (new.tokens, new.num_prompt, new.sample_index) == (ids([1] * 6 + [0] * 3), 6, 0)
    it.hear(it.scheduler.commit(plan, [0]))
    assert it.scheduler.tally.prompt_tokens == 6
    assert it.step() == {(1, 0): (9, 10), (1, 3): (5, 6)}, "the fourth shares the prompt"
    it.finish()
    assert it.ended == {(1, 0): "length", (1, 1): "length", (1, 2): "stop", (1, 3): "length"}
    it.add(submit(2, [1], 1, emitted=(ids([0]),)))
    assert it.ended[B] == "length"
    assert it.scheduler.is_idle


@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding", "samples", "parked", "preempted", "over"])
def test_abort_in_every_state_gives_everything_back(state: str) -> None:
    it = Driver(max_batch_tokens=8, max_batch_size=2, num_blocks=10, context_length=40)
    samples = 3 if state in ("samples", "parked") else 1
    if state == "queued":
        it.add(submit(8, [8], 30), submit(9, [9], 30))
        it.step()
    if state == "preempted":
        it.add(submit(9, [9] * 8, 32))
        it.step()
    it.add(submit(1, [1] * 12, 10 if state == "over" else 28, num_samples=samples))
    if state == "preempted":
        while it.scheduler.tally.preemptions == 0:
            it.step()
    for _ in range({"queued": 0, "prefilling": 1, "decoding": 3, "samples": 5, "parked": 1, "preempted": 0, "over": 20}[state]):
        it.step()
    it.abort(1)
    assert it.ended == {(1, index): "length" if state == "over" else "abort" for index in range(samples)}
    for other in (8, 9):
        it.abort(other)
    assert it.scheduler.is_idle
    assert it.scheduler.pool.num_held == 0
    it.abort(1)  # no longer known
    it.add(submit(2, [2] * 12, 9))
    it.finish()
    assert it.ended[B] == "length"


# What is said


def test_times_and_counts_of_a_step() -> None:
    it = Driver()
    it.clock.now = 50.0
    it.add(submit(1, LONG, 2, received=40.0, logprobs=1))
    plan = it.schedule()
    it.clock.advance(0.25)
    logprob = TokenLogprob(-1.0, (3,), (-1.0,))
    events = it.scheduler.commit(plan, [3], [logprob])
    assert (events.time, events.admitted, events.stalled) == (50.25, [(1, 50.0, 0)], [])
    assert (events.request_ids, events.samples, events.tokens, events.logprobs) == ([1], [0], [3], [logprob])
    stats = events.stats
    assert stats is not None
    assert (stats.running, stats.waiting, stats.steps, stats.step_seconds, stats.step_tokens, stats.step_rows) == (1, 0, 1, 0.25, 30, 1)
    assert (stats.blocks_free, stats.blocks_cached, stats.blocks_held) == (56, 0, 8)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.preemptions, stats.recomputed_tokens) == (30, 0, 0, 0)


def test_the_wrong_number_of_tokens_is_an_error() -> None:
    for tokens in ([], [1, 2]):
        it = Driver()
        it.add(submit(1, [1]))
        plan = it.schedule()
        with pytest.raises(RuntimeError, match=f"expected 1, got {len(tokens)}"):
            it.scheduler.commit(plan, tokens)


def test_steps_until_event() -> None:
    it = Driver(max_batch_size=2)
    assert it.scheduler.steps_until_event() == 0
    it.add(submit(1, [1] * 5, 30), submit(2, [2] * 6, 5))
    assert it.scheduler.steps_until_event() == 0, "they are to be let in"
    it.step()
    # A: 5 of 8 slots are computed, B: 6 of 8, and four more tokens to go
    assert it.scheduler.steps_until_event() == 2
    it.step()
    it.step()
    assert it.scheduler.steps_until_event() == 0, "B takes a block"
    it.step()
    assert it.scheduler.steps_until_event() == 0, "A takes a block, and B ends"
    it.step()
    assert it.scheduler.steps_until_event() == 0, "B's row is to be freed"
    it.step()
    assert it.scheduler.steps_until_event() == 2
    it.add(submit(3, [3], 2))
    assert it.scheduler.steps_until_event() == 0
    it.step()
    it.add(submit(4, [4], 2))
    assert it.scheduler.steps_until_event() == 0, "the third ends"


def test_nothing_is_scheduled_when_idle() -> None:
    it = Driver()
    assert it.schedule() == Plan()


def test_check_finds_what_is_lost() -> None:
    it = Driver()
    it.add(submit(1, LONG))
    it.step()
    it.scheduler._rows.running[0].table.pop()
    with pytest.raises(RuntimeError, match="holders of each block"):
        it.scheduler.check()
