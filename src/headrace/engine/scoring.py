"""Log-probabilities of prompts: which rows of logits a step makes for them, and what is told."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config import SCORED_ROWS
from headrace.engine.plan import Plan
from headrace.engine.samples import Request, Sample
from headrace.request import PromptLogprobs


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
        first = max(start, request.num_scored)
        stop = min(stop, request.num_prompt, first + self._left)
        first = min(first, stop)
        if first < stop:
            self._left -= stop - first
            plan.scored.append(len(plan.chunks))
        return stop, first

    def commit(self, plan: Plan, scheduled: Sequence[Sample], scores: Sequence[PromptLogprobs]) -> list[tuple[int, PromptLogprobs]]:
        """The plan was executed. Returns what the outside must hear."""
        samples = [scheduled[number] for number in plan.scored]
        for number, sample in zip(plan.scored, samples, strict=True):
            request = sample.request
            request.num_scored = max(request.num_scored, min(plan.chunks[number].stop, request.num_prompt - 1))
        return [(sample.request_id, each) for sample, each in zip(samples, scores, strict=False)]
