"""What is told of prompts: their log-probabilities, and which rows of logits a step makes for these; their embeddings."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config import SCORED_ROWS
from headrace.engine.plan import Plan
from headrace.engine.samples import Request, Sample
from headrace.request import PromptTold


class Scoring:
    """Cuts chunks, so that a step makes at most SCORED_ROWS such rows.

    A request's prompt is scored from its first token to its last. What is computed a second time is not told a second time.
    """

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = 0  # rows of this step

    def begin(self) -> None:
        """A step begins."""
        self._left = SCORED_ROWS

    def cut(self, plan: Plan, request: Request, start: int, stop: int) -> tuple[int, int]:
        """Where the plan's next chunk, from `start` up to `stop` of a prompt that is not scored, must stop, and its first row of logits."""
        if request.submit.params.embed:
            plan.scored.append(len(plan.chunks))
            return stop, stop
        first = max(start, request.num_scored)
        stop = min(stop, request.num_prompt, first + self._left)
        first = min(first, stop)
        if first < stop:
            self._left -= stop - first
            plan.scored.append(len(plan.chunks))
        return stop, first

    def commit(self, plan: Plan, scheduled: Sequence[Sample], scores: Sequence[PromptTold | None]) -> list[tuple[int, PromptTold]]:
        """The plan was executed. Returns what the outside must hear."""
        samples = [scheduled[number] for number in plan.scored]
        for number, sample in zip(plan.scored, samples, strict=True):
            request = sample.request
            stop = plan.chunks[number].stop - request.submit.params.embed  # which is complete only with the last token
            request.num_scored = max(request.num_scored, min(stop, request.num_prompt - 1))
        return [(sample.request_id, told) for sample, told in zip(samples, scores, strict=False) if told is not None]
