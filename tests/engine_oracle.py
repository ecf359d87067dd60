"""The engine under random conditions, judged by what a request would get alone, one token at a time, without blocks or cache."""

from __future__ import annotations

import os
import random
from array import array
from dataclasses import dataclass, field

from headrace.config import SCORED_ROWS, EngineConfig
from headrace.engine.loop import Engine, StepRecord
from headrace.engine.plan import Plan
from headrace.engine.prefix import PrefixHasher
from headrace.engine.scheduler import Scheduler
from headrace.executors.simulated import SimulatedExecutor, StepCost, VirtualClock, choose_token, extend_history
from headrace.request import Abort, Command, Embedding, FinishReason, SamplingParams, StepEvents, Submit

FUZZ = float(os.environ.get("HEADRACE_FUZZ", "1"))  # multiplies how much is tried
VOCAB = 5
END = 4  # the model's end token: about every fifth token
END_TOKENS = (END,)


def ids(tokens: list[int] | tuple[int, ...]) -> bytes:
    return array("i", tokens).tobytes()


def submit(request_id: int, prompt: list[int], max_tokens: int = 4, **fields: object) -> Submit:
    """A request; fields of SamplingParams and of Submit by name."""
    names = set(SamplingParams.__struct_fields__)
    params = SamplingParams(max_tokens=max_tokens, **{name: value for name, value in fields.items() if name in names})  # type: ignore[arg-type]
    rest = {name: value for name, value in fields.items() if name not in names}
    return Submit(request_id=request_id, prompt=ids(prompt), params=params, **{"seed": 0, "received": 0.0, **rest})  # type: ignore[arg-type]


def expected_answers(command: Submit, context_length: int) -> list[tuple[list[int], FinishReason]]:
    """What each sample of a request answers, and why it ends."""
    params, prompt = command.params, array("i", command.prompt).tolist()
    ends = frozenset(() if params.ignore_eos else END_TOKENS) | frozenset(params.stop_token_ids)
    answers: list[tuple[list[int], FinishReason]] = []
    for index in range(command.num_samples):
        history = 0
        for token in prompt:
            history = extend_history(history, token)
        answer: list[int] = []
        while True:
            early = len(answer) < params.min_tokens
            token = choose_token(history, command.seed, index, VOCAB, ends if early else frozenset())
            history = extend_history(history, token)
            answer.append(token)
            if token in ends and not early:
                answers.append((answer, "stop"))
                break
            if len(answer) == params.max_tokens or len(prompt) + len(answer) == context_length:
                answers.append((answer, "length"))
                break
    return answers


def expected_scores(command: Submit) -> dict[int, float]:
    """What the simulated executor tells of each token of a prompt but the first, where that is asked for."""
    history, scores = 0, {}
    for position, token in enumerate(array("i", command.prompt)):
        history = extend_history(history, token)
        scores[position] = -float(history >> 48)
    del scores[0]
    if command.params.embed:
        return {-1: 1.0}  # that it was told
    return scores if command.params.prompt_logprobs >= 0 else {}


@dataclass
class Heard:
    """What came back of one request."""

    command: Submit
    answers: list[list[int]]
    reasons: list[FinishReason | None]
    admitted: list[tuple[float, int]] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)  # by position in the prompt
    stalled: float = 0.0
    refused: str = ""
    aborted: bool = False

    @property
    def is_over(self) -> bool:
        return bool(self.refused) or None not in self.reasons


class World:
    """An engine with a simulated executor on a virtual clock. Every step is checked; `finish` checks every answer."""

    def __init__(self, config: EngineConfig, block_tokens: int = 4, constant_digest: bool = False, cost: StepCost | None = None) -> None:
        self.config = config
        self.clock = VirtualClock(1.0)
        self.block_tokens = block_tokens
        self.heard: dict[int, Heard] = {}
        self.plans: list[Plan] = []
        self.restarts = 0
        self._digest = (lambda data: b"the same for all") if constant_digest else None
        self._cost = cost
        self._start()

    def _start(self) -> None:
        self.records: list[Command | StepRecord] = []
        self.scheduler = self._scheduler(self.clock)
        self.executor = SimulatedExecutor(self.clock, self.config.num_blocks, self._cost, VOCAB, self.block_tokens)
        self.engine = Engine(self.scheduler, self.executor, record=self.records.append, scorer=self.executor)
        self.stats_before = (0,) * 5

    def _scheduler(self, clock: VirtualClock) -> Scheduler:
        hasher = PrefixHasher(("model", "numerics 1"), b"secret", self._digest)
        return Scheduler(self.config, clock, END_TOKENS, hasher, self.block_tokens)

    def submit(self, command: Submit) -> None:
        self.heard[command.request_id] = Heard(command, [[] for _ in range(command.num_samples)], [None] * command.num_samples)
        self._hear(self.engine.apply(command))

    def abort(self, request_id: int) -> None:
        heard = self.heard[request_id]
        heard.aborted |= not heard.is_over
        self._hear(self.engine.apply(Abort(request_id)))
        assert heard.is_over
        self.scheduler.check()

    def step(self) -> None:
        scheduler = self.scheduler
        quiet = scheduler.steps_until_event()
        events = self.engine.step()
        if events is None:
            return
        record = self.records[-1]
        assert isinstance(record, StepRecord)
        self._check_plan(record.plan)
        if quiet:
            plan = record.plan
            changes = [*plan.new_rows, *plan.new_blocks, *plan.freed_rows, *plan.copies]
            assert not changes, "a step that was to have none"
            assert all(chunk.num_tokens == 1 and chunk.samples for chunk in plan.chunks)
            assert not any(reason == "length" for _, _, reason in events.finished)
            assert events.finished or scheduler.steps_until_event() >= quiet - 1
        self._hear(events)
        self._check_stats(events)
        scheduler.check()

    def _check_plan(self, plan: Plan) -> None:
        config = self.config
        self.plans.append(plan)
        assert plan.num_tokens <= config.max_batch_tokens
        assert 0 < len(plan.chunks) <= config.max_batch_size
        scored = [chunk for i, chunk in enumerate(plan.chunks) if i in plan.scored]
        assert sum(chunk.stop - chunk.logits_start for chunk in scored) <= SCORED_ROWS
        assert all(chunk.logits_start == chunk.stop - chunk.samples for chunk in plan.chunks if chunk not in scored)

    def _check_stats(self, events: StepEvents) -> None:
        stats = events.stats
        assert stats is not None
        growing = (stats.preemptions, stats.recomputed_tokens, stats.prompt_tokens, stats.cached_tokens, stats.steps)
        assert all(after >= before for before, after in zip(self.stats_before, growing, strict=True))
        self.stats_before = growing
        open_requests = sum(not heard.is_over for heard in self.heard.values())
        assert stats.running + stats.waiting == open_requests
        assert stats.blocks_free + stats.blocks_cached + stats.blocks_held == self.config.num_blocks
        if self.config.kv_reservation == "full":
            assert stats.preemptions == 0 or any(heard.command.batch for heard in self.heard.values())

    def _hear(self, events: StepEvents | None) -> None:
        if events is None:
            return
        for request_id, told in events.prompts:
            heard = self.heard[request_id]
            assert self.restarts or not any(heard.answers), "scores after the first token"
            if isinstance(told, Embedding):
                assert array("f", told.vector)[0] == sum(array("i", heard.command.prompt))
                heard.scores[-1] = 1.0
                continue
            assert len(told.top_ids) == len(told.logprobs) * heard.command.params.prompt_logprobs
            for position, value in enumerate(array("f", told.logprobs), told.first):
                assert heard.scores.setdefault(position, value) == value
        for request_id, sample, token in zip(events.request_ids, events.samples, events.tokens, strict=True):
            heard = self.heard[request_id]
            assert heard.reasons[sample] is None, "a token after the end"
            heard.answers[sample].append(token)
        assert len(events.logprobs) in (0, len(events.tokens))
        for request_id, sample, reason in events.finished:
            heard = self.heard[request_id]
            assert heard.reasons[sample] is None, "it ended twice"
            heard.reasons[sample] = reason
        for request_id, when, cached in events.admitted:
            heard = self.heard[request_id]
            assert heard.command.received <= when <= self.clock.now
            assert 0 <= cached < len(heard.command.prompt) // 4 + 1
            heard.admitted.append((when, cached))
        for request_id, seconds in events.stalled:
            assert seconds >= 0
            self.heard[request_id].stalled += seconds
        for refusal in events.refused:
            self.heard[refusal.request_id].refused = refusal.kind

    def restart(self) -> None:
        """The engine dies between steps; what was open is submitted again with what had been sent."""
        self.restarts += 1
        self._start()
        for heard in list(self.heard.values()):
            if not heard.is_over:
                command = heard.command
                again = Submit(
                    command.request_id, command.prompt, command.params, command.seed, command.received, command.num_samples,
                    tuple(ids(answer) for answer in heard.answers), command.priority, command.tenant, command.cache_salt,
                )  # fmt: skip
                # A sample that had ended ends again, at once, with the same reason.
                ended, heard.reasons = heard.reasons, [None] * command.num_samples
                self._hear(self.engine.apply(again))
                assert all(before in (None, after) for before, after in zip(ended, heard.reasons, strict=True))
                assert not heard.refused

    def finish(self) -> None:
        """Run until idle, then audit: nothing held, nothing lost, every answer as expected."""
        left = 50 + 4 * sum(
            (len(heard.command.prompt) // 4 + heard.command.params.max_tokens) * heard.command.num_samples for heard in self.heard.values()
        )
        while self.engine.has_work:
            self.step()
            left -= 1
            assert left, "it does not end"
        self.scheduler.check()
        assert self.scheduler.pool.num_held == 0
        for heard in self.heard.values():
            self._check_answer(heard)
        self._check_replay()

    def _check_answer(self, heard: Heard) -> None:
        assert heard.is_over
        if heard.refused:
            assert heard.refused == "QueueFull" or not self.fits(heard.command), heard
            return
        for answer, reason, expected in zip(
            heard.answers, heard.reasons, expected_answers(heard.command, self.config.context_length), strict=True
        ):
            if reason != "abort":
                assert heard.scores == expected_scores(heard.command)
            if reason == "abort":
                assert heard.aborted
                assert answer == expected[0][: len(answer)]
            else:
                assert (answer, reason) == expected
        assert len(heard.admitted) <= 1 + self.restarts

    def _check_replay(self) -> None:
        """The record of commands and times alone makes the same plans."""
        clock = VirtualClock()
        scheduler = self._scheduler(clock)
        engine = Engine(scheduler, self.executor)
        for entry in self.records:
            if isinstance(entry, StepRecord):
                clock.now = entry.started
                plan = scheduler.schedule()
                clock.now = entry.ended
                scheduler.commit(plan, entry.tokens)
                assert plan == entry.plan
            else:
                engine.apply(entry)

    def fits(self, command: Submit) -> bool:
        num_prompt = len(command.prompt) // 4
        longest = min(num_prompt + command.params.max_tokens, self.config.context_length)
        return num_prompt < self.config.context_length and -(-(longest - 1) // self.block_tokens) <= self.config.num_blocks


def random_config(rng: random.Random, block_tokens: int) -> EngineConfig:
    num_blocks = max(6, rng.randint(20, 56) // block_tokens)
    full = rng.random() < 0.15
    context = rng.randint(24, num_blocks * block_tokens * 2)
    return EngineConfig(
        context_length=min(context, num_blocks * block_tokens) if full else context,
        num_blocks=num_blocks,
        max_batch_size=rng.choice([1, 2, 4, 8, 8]),
        max_batch_tokens=rng.choice([1, 3, 8, 16, 64]),
        step_target_s=rng.choice([0.0, 0.003, 0.01]),
        policy=rng.choice(["fcfs", "shortest", "priority", "fair"]),
        batching="static" if rng.random() < 0.15 else "continuous",
        kv_reservation="full" if full else "paged",
        prefix_cache=rng.random() < 0.8,
        max_waiting=rng.choice([2, 100]),
    )


def random_submit(rng: random.Random, request_id: int, now: float, prompts: list[list[int]]) -> Submit:
    """Prompts over three letters, often beginning like, or equal to, an earlier one."""
    kind = rng.random()
    if prompts and kind < 0.3:
        prompt = list(rng.choice(prompts))
    elif prompts and kind < 0.7:
        base = rng.choice(prompts)
        prompt = base[: rng.randint(0, len(base))] + [rng.randrange(3) for _ in range(rng.randint(1, 8))]
    else:
        prompt = [rng.randrange(3) for _ in range(rng.choice([1, 4, 8, 12, 20]))]
    prompts.append(prompt)
    return submit(
        request_id,
        prompt,
        max_tokens=rng.choice([1, 4, 10, 20]),
        min_tokens=rng.choice([0, 0, 2]),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=(3,) if rng.random() < 0.1 else (),
        logprobs=2 if rng.random() < 0.1 else -1,
        prompt_logprobs=rng.choice([0, 2]) if rng.random() < 0.15 else -1,
        embed=rng.random() < 0.05,
        seed=rng.randrange(3),
        received=now,
        num_samples=rng.choice([1, 1, 1, 2, 4]),
        priority=rng.randrange(3),
        tenant=rng.choice(["a", "b", "c"]),
        cache_salt=rng.choice(["", "", "salt"]),
        batch=rng.random() < 0.2,
    )
