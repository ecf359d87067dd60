"""The scheduler: which samples get how many tokens in the next step, who waits, and who gives way when blocks run out.

Every step closes some of the gap between what is computed and what is known of the samples that have a row, in policy order; with what
the budget leaves, waiting samples are let in. A prompt, a chunk of one, a cache hit, a resumed request and a decode step are all the
same to it. Why it always gets on: a request whose blocks would not fit alone is refused, and only samples later in policy order give
way, so the first one in it advances in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.config import BLOCK_TOKENS, EngineConfig
from headrace.engine.blocks import BlockPool
from headrace.engine.budget import MIN_CHUNK, StepBudget
from headrace.engine.plan import Chunk, Plan
from headrace.engine.policy import Queues
from headrace.engine.prefix import PrefixHasher
from headrace.engine.rows import Rows
from headrace.engine.samples import Request, Sample, refuse_oversized
from headrace.engine.scoring import Scoring
from headrace.engine.sharing import Sharing
from headrace.engine.tally import Finished, Tally, events_between_steps
from headrace.errors import InvalidRequest, QueueFull, UsageError
from headrace.request import FinishReason, PromptTold, StepEvents, Submit, TokenLogprob

_FOREVER = 1 << 60  # steps, when nothing bounds them


class Scheduler:
    """Call `schedule` and `commit` in turn, `add` and `abort` between steps. Times are the injected clock's, in seconds."""

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float],
        end_token_ids: Sequence[int] = (),  # the model's own
        hasher: PrefixHasher | None = None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        # Blocks a sample gets whatever it needs, as servers did before paging; such a sample shares none.
        self._reserved = -(-config.context_length // block_tokens) if config.kv_reservation == "full" else 0
        if self._reserved > config.num_blocks:
            raise UsageError(f"[kv_reservation full] one context takes {self._reserved} KV blocks, there are {config.num_blocks}")
        self.config = config
        self.pool = BlockPool(config.num_blocks, block_tokens)
        self.budget = StepBudget(config.step_target_s, config.max_batch_tokens, config.itl_target_s)
        self.tally = Tally()
        self.step_started = self.step_ended = 0.0
        self._clock = clock
        self._end_token_ids = tuple(end_token_ids)
        self._size = block_tokens
        self._static = config.batching == "static"
        self._sharing = Sharing(self.pool, hasher or PrefixHasher(), enabled=not self._reserved, caching=config.prefix_cache)
        self._scoring = Scoring()
        self._queues = Queues(config.policy)
        self._rows = Rows(min(config.max_batch_size, config.max_batch_tokens))
        self.running: Sequence[Sample] = self._rows.running  # in policy order
        self._scheduled: list[Sample] = []  # of the plan's chunks
        self._blocked = False  # the next waiting sample lacked blocks, and none was let go since
        self._requests: dict[int, Request] = {}
        self._num_arrived = self._num_admitted = self._num_computed = 0  # requests twice, tokens: ever

    @property
    def is_idle(self) -> bool:
        return not self._requests

    # Commands

    def add(self, submit: Submit) -> StepEvents | None:
        """Queue a request. Events only where a resumed sample turns out to be over. Raises RequestError, and changes nothing then."""
        if submit.request_id in self._requests:
            raise InvalidRequest(f"[Submit] request_id: {submit.request_id} is in use")
        request = Request(submit, self._end_token_ids, self.config.context_length)
        refuse_oversized(request, self.config, self._size)
        # What was taken before the engine was started again is not refused now.
        queue = self._queues.batch if submit.batch else self._queues.fresh
        if not submit.emitted and len(queue) >= self.config.max_waiting:
            raise QueueFull(f"the queue is full: {len(queue)} requests are waiting, the limit is {self.config.max_waiting}")
        finished: Finished = []
        for sample in request.samples:
            reason = sample.end_reason()
            if reason is not None:
                sample.finished = True
                finished.append((request.id, sample.index, reason))
        alive = [sample for sample in request.samples if not sample.finished]
        if alive:
            self._num_arrived += 1
            self._requests[request.id] = request
            request.num_open = len(alive)
            policy = self.config.policy
            place = (submit.priority if policy == "priority" else 0, self._num_computed + request.num_prompt if policy == "shortest" else 0)
            for sample in alive:
                sample.order = (submit.batch, *place, self._num_arrived, sample.index)
            self._queues.num_interactive += not submit.batch
            if self._queues.fair is not None and not submit.batch:
                request.account = self._queues.fair.open(submit.tenant)
            request.parked = alive[1:]
            queue.push(alive[0])
            self._blocked = False
        return events_between_steps(self._clock(), finished)

    def abort(self, request_id: int, sample_index: int = -1) -> StepEvents | None:
        """End a request, or one sample of it, now. None if it is not there: it may have just finished."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        return events_between_steps(self._clock(), self._end_samples(request, "abort", sample_index))

    def fail(self) -> StepEvents | None:
        """End everything with an error, in whatever state: a step has failed."""
        self._sharing.release_sources()
        finished: Finished = []
        for request in list(self._requests.values()):
            finished += self._end_samples(request, "error")
        return events_between_steps(self._clock(), finished)

    # A step

    def schedule(self) -> Plan:
        """What the next step computes; nothing only when idle. `commit` follows before any other call."""
        self.step_started = self._clock()
        running, tally = self._rows.running, self.tally
        while self._queues.num_interactive and self._rows.last_is_batch:
            self.preempt(running[-1])
        plan = Plan(freed_rows=self._rows.take_freed())
        chunks = plan.chunks
        self._scheduled = scheduled = []
        self._scoring.begin()
        decoding = len(running) - self._rows.num_prefilling
        # Every decoding sample gets its token; what is left of the step is for prompts.
        most = self.budget.limit(decoding > 0, self._queues.num_interactive > 0)
        extra = min(self.config.max_batch_tokens, max(most, decoding + MIN_CHUNK)) - decoding
        preemptions = tally.preemptions
        catching_up: list[Sample] = []
        at = 0
        while at < len(running):  # it gets shorter at its end
            sample = running[at]
            at += 1
            if sample.prefilling:
                catching_up.append(sample)
                continue
            start = sample.num_computed
            if start == sample.capacity and not self._grow(sample, plan):
                break
            scheduled.append(sample)
            chunks.append(Chunk(sample.row, start, start + 1, start, True))
        self._fill(plan, catching_up, extra, admitting=tally.preemptions == preemptions)
        if not chunks and self._requests:
            raise RuntimeError(f"[Scheduler.schedule] nothing to compute, but {len(self._requests)} requests are open")
        return plan

    def commit(
        self, plan: Plan, tokens: list[int], logprobs: Sequence[TokenLogprob | None] = (), scores: Sequence[PromptTold | None] = ()
    ) -> StepEvents:
        """The plan was executed, and `tokens` chosen: one for each chunk that samples, in order. Returns what the outside must hear."""
        wanted = sum([chunk.samples for chunk in plan.chunks])
        if len(tokens) != wanted:
            raise RuntimeError(f"[Scheduler.commit] tokens: expected {wanted}, got {len(tokens)}")
        now = self.step_ended = self._clock()
        size = self._size
        request_ids: list[int] = []
        indices: list[int] = []
        ending: list[Sample] = []
        num_tokens = 0
        for chunk, sample in zip(plan.chunks, self._scheduled, strict=True):
            _, start, stop, _, samples = chunk
            num_tokens += stop - start
            sample.num_computed = stop
            if start // size != stop // size:
                self._sharing.publish(sample, start, stop)
            if samples:
                if sample.prefilling:
                    self._end_prefill(sample)
                token = tokens[len(request_ids)]
                sample.tokens.append(token)
                request_ids.append(sample.request_id)
                indices.append(sample.index)
                if stop + 1 >= sample.limit or token in sample.ends:
                    ending.append(sample)
        if self._queues.fair is not None:
            for chunk, sample in zip(plan.chunks, self._scheduled, strict=True):
                self._queues.fair.charge(sample, chunk.stop - chunk.start)
        prompts = self._scoring.commit(plan, self._scheduled, scores) if plan.scored else []
        finished: Finished = []
        for sample in ending:
            reason = sample.end_reason()
            if reason is not None:
                finished.append((sample.request_id, sample.index, reason))
                self._end(sample, now)
        if self._sharing.release_sources():
            self._blocked = False
        self._num_computed += num_tokens
        self.tally.steps += 1
        seconds = now - self.step_started
        self.budget.observe(num_tokens, seconds)
        stats = self.tally.stats(self.pool, self._rows.num_requests, len(self._requests), seconds, num_tokens, len(plan.chunks))
        return self.tally.step_events(now, request_ids, indices, tokens, logprobs, finished, stats, prompts)

    def steps_until_event(self) -> int:
        """How many of the next steps only decode a token of each running sample: no block is taken, none ends by length, none comes in."""
        rows = self._rows
        if not rows.running or rows.num_prefilling or rows.freed or (self._queues.num_interactive and rows.last_is_batch):
            return 0
        if not self._blocked and len(rows.running) < rows.limit and self._queues.next(with_fresh=not self._static) is not None:
            return 0
        steps = _FOREVER
        for sample in rows.running:
            steps = min(steps, sample.limit - 1 - len(sample.tokens), sample.capacity - sample.num_computed)
        return max(0, steps)

    def check(self) -> None:
        """Raises RuntimeError unless every block, row and sample is in its place, once. Between steps only."""
        self.pool.check()
        self._rows.check(self.pool)
        requests = self._requests.values()
        placed = len(self._rows.running) + len(self._queues) + sum(len(request.parked) for request in requests)
        if placed != sum(request.num_open for request in requests):
            raise RuntimeError(f"[Scheduler.check] {placed} samples have a place, not {sum(request.num_open for request in requests)}")

    # How a step is put together

    def _prefill(self, sample: Sample, most: int, plan: Plan) -> int:
        """Give a sample up to `most` of the tokens it lacks, past what others computed or will in this step. Returns how many."""
        size, table, filled = self._size, sample.table, self.pool.filled
        num_tokens, start = len(sample.tokens), sample.num_computed
        last = (num_tokens - 1) // size  # this block is its own
        for i in range(start // size, last):
            there = filled[table[i]]
            start = max(start, i * size + there)
            if there < size:
                break
        sample.num_computed = start
        stop = logits_start = min(num_tokens, start + most)
        if not sample.request.is_scored:
            stop, logits_start = self._scoring.cut(plan, sample.request, start, stop)
            if stop == start:
                return 0
        for i in range(start // size, (stop - 1) // size + 1):
            filled[table[i]] = min(stop - i * size, size)
        samples = stop == num_tokens
        plan.chunks.append(Chunk(sample.row, start, stop, min(logits_start, stop - samples), samples))
        self._scheduled.append(sample)
        self.tally.count_chunk(start, stop, sample.request.num_prompt, sample.computed_before)
        return stop - start

    def _grow(self, sample: Sample, plan: Plan) -> bool:
        """One more block for a sample that decodes; the last ones in policy order give way. False: it is the last, and waits in place."""
        while (blocks := self.pool.take(1)) is None:
            victim = self._rows.running[-1]
            if victim is sample:
                # Waiting in place loses nothing; whoever is earlier may still send it away.
                if not sample.paused:
                    sample.request.pause(sample, self.step_started)
                return False
            self.preempt(victim)
        if sample.paused:
            self._activate(sample)
        plan.new_blocks.append((sample.row, len(sample.table), blocks))
        sample.table.append(blocks[0])
        sample.capacity += self._size
        return True

    def preempt(self, sample: Sample) -> None:
        """Take a sample's row and blocks. What the pool has forgotten when it runs again, it computes again."""
        sample.computed_before = max(sample.computed_before, sample.num_computed)
        self._vacate(sample)
        if not sample.paused:
            sample.request.pause(sample, self.step_started)
        self._queues.resuming.push(sample)
        self.tally.preemptions += 1

    def _fill(self, plan: Plan, prefilling: list[Sample], extra: int, admitting: bool) -> None:
        """Share `extra` tokens out in policy order: to samples that catch up, and to waiting ones while there are rows and blocks."""
        forming = self._static and not self._rows.running and self._queues.next(with_fresh=False) is None
        members = 0  # samples of the batch that is formed, with those that come later
        at = 0
        while extra > 0 or forming:
            sample = prefilling[at] if at < len(prefilling) else None
            if admitting and not self._blocked and len(self._rows.running) < self._rows.limit:
                waiting = self._queues.next(with_fresh=forming or not self._static)
                if waiting is not None and (sample is None or waiting.order < sample.order):
                    if forming:
                        members += waiting.request.num_open
                        if members > self._rows.limit and self._rows.running:
                            return
                    self._blocked = not self._admit(waiting, plan)
                    if not self._blocked and extra > 0:
                        extra -= self._prefill(waiting, extra, plan)
                    continue
            if sample is None:
                return
            extra -= self._prefill(sample, extra, plan)
            at += 1

    def _admit(self, sample: Sample, plan: Plan) -> bool:
        """Give a waiting sample a row, and blocks for all its tokens. False, and nothing changed, if there are too few."""
        pool, request = self.pool, sample.request
        shared, source, start = self._sharing.find(sample)
        need = (self._reserved or -(-len(sample.tokens) // self._size)) - len(shared)
        # A block is left for each running sample to grow by: to let one in that pushes another out costs more than it brings.
        spare = pool.num_available - need - pool.num_unheld(shared) - (0 if self._reserved else len(self._rows.running))
        if spare < 0:
            return False
        if source >= 0 and spare < pool.num_unheld((source,)):
            source, start = -1, 0  # no room for both the copy and what it is made from: computed instead
        pool.hold(shared)
        if source >= 0:
            self._sharing.hold_source(source)
        blocks = pool.take(need)
        if blocks is None:
            raise RuntimeError(f"[Scheduler._admit] {need} blocks were there and are not")
        if source >= 0:
            plan.copies.append((source, blocks[0]))
            pool.filled[blocks[0]] = start - len(shared) * self._size
        sample.table = shared + blocks
        sample.capacity = len(sample.table) * self._size
        sample.num_computed = start
        self._sharing.promise(sample, len(shared))
        self._queues.of(sample).remove(sample)
        if request.first_scheduled < 0:
            self._first_scheduled(request, min(request.num_prompt, max(start, len(shared) * self._size)))
        plan.new_rows.append(self._rows.place(sample))
        plan.new_blocks.append((sample.row, 0, list(sample.table)))
        self._activate(sample)
        return True

    def _first_scheduled(self, request: Request, cached_tokens: int) -> None:
        request.first_scheduled = self.step_started
        self.tally.count_admitted(request.id, self.step_started, cached_tokens)
        self._num_admitted += 1
        if self._queues.fair is not None:
            for sample in request.samples:
                sample.order = (request.submit.batch, 0, 0, self._num_admitted, sample.index)
        if not self._sharing.enabled:
            self._unpark(request)

    def _activate(self, sample: Sample) -> None:
        stalled = sample.request.activate(sample, self.step_started)
        if stalled >= 0:
            self.tally.stalled.append((sample.request_id, stalled))

    # How it is taken apart

    def _end_prefill(self, sample: Sample) -> None:
        """A sample has caught up with its tokens, the whole prompt among them."""
        self._rows.end_prefill(sample)
        self._sharing.add_donor(sample)
        self._unpark(sample.request)

    def _unpark(self, request: Request) -> None:
        """The prompt is computed (or is not to be shared): the other samples may come."""
        if request.parked:
            for sample in request.parked:
                self._queues.resuming.push(sample)
            request.parked = []
            self._blocked = False

    def _end_samples(self, request: Request, reason: FinishReason, index: int = -1) -> Finished:
        """End the samples of a request that are not over, or one of them."""
        ending = [sample for sample in request.samples if not sample.finished and index in (-1, sample.index)]
        now = self._clock()
        for sample in reversed(ending):  # so that none moves up for the first one
            self._end(sample, now)
        return [(request.id, sample.index, reason) for sample in ending]

    def _end(self, sample: Sample, now: float) -> None:
        """A sample is over: it gives back what it has, wherever it is."""
        request = sample.request
        was_active = sample.row >= 0 and not sample.paused
        if sample in request.parked:
            request.parked.remove(sample)
        else:
            if sample.row >= 0:
                self._vacate(sample)
            else:
                self._queues.of(sample).remove(sample)
            if request.parked:  # it has not computed the prompt: another one takes its place
                heir = request.parked.pop(0)
                self._queues.of(heir).push(heir)
        request.finish(sample, was_active, now)
        if request.num_open == 0:
            del self._requests[request.id]
            self._queues.num_interactive -= not request.submit.batch
            if self._queues.fair is not None:
                self._queues.fair.close(request)
        self._blocked = False

    def _vacate(self, sample: Sample) -> None:
        """Take a sample's row and blocks."""
        if sample.has_prompt:
            self._sharing.drop_donor(sample)
        self.pool.release(sample.table)
        sample.table = []
        sample.capacity = sample.num_computed = 0
        self._rows.vacate(sample)
        self._blocked = False
