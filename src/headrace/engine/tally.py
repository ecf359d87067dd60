"""What the engine has done: counters that only grow, and the events that wait for the end of the step."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.blocks import BlockPool
from headrace.request import EngineStats, FinishReason, PromptTold, Refusal, StepEvents, TokenLogprob

Finished = list[tuple[int, int, FinishReason]]


class Tally:
    """Counts as in `EngineStats`. `admitted` and `stalled` collect what a step's scheduling did, until `step_events` takes them along."""

    __slots__ = ("admitted", "cached_tokens", "preemptions", "prompt_tokens", "recomputed_tokens", "stalled", "steps")

    def __init__(self) -> None:
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.steps = 0
        self.admitted: list[tuple[int, float, int]] = []
        self.stalled: list[tuple[int, float]] = []

    def count_chunk(self, start: int, stop: int, num_prompt: int, computed_before: int) -> None:
        """Tokens [start, stop) of a sample are computed, those below `computed_before` for the second time."""
        new = max(start, min(stop, computed_before))
        self.recomputed_tokens += new - start
        self.prompt_tokens += max(0, min(stop, num_prompt) - new)

    def count_admitted(self, request_id: int, now: float, cached_tokens: int) -> None:
        """A request is scheduled for the first time."""
        self.cached_tokens += cached_tokens
        self.admitted.append((request_id, now, cached_tokens))

    def stats(self, pool: BlockPool, running: int, open_requests: int, seconds: float, num_tokens: int, num_rows: int) -> EngineStats:
        """The engine after a step of `seconds`, which computed `num_tokens` tokens of `num_rows` samples."""
        return EngineStats(
            running, open_requests - running, pool.num_free, pool.num_cached, pool.num_held, self.preemptions, self.recomputed_tokens,
            self.prompt_tokens, self.cached_tokens, self.steps, seconds, num_tokens, num_rows,
        )  # fmt: skip

    def step_events(
        self,
        now: float,
        request_ids: list[int],
        samples: list[int],
        tokens: list[int],
        logprobs: Sequence[TokenLogprob | None],
        finished: Finished,
        stats: EngineStats,
        prompts: list[tuple[int, PromptTold]],
    ) -> StepEvents:
        """The events of a whole step."""
        events = StepEvents(now, request_ids, samples, tokens, list(logprobs), self.admitted, finished, self.stalled, [], stats, prompts)
        self.admitted, self.stalled = [], []
        return events


def events_between_steps(now: float, finished: Finished, refused: list[Refusal] | None = None) -> StepEvents | None:
    """What a command did by itself. None: nothing that the outside must hear."""
    if not finished and not refused:
        return None
    return StepEvents(now, [], [], [], [], [], finished, [], refused or [])
