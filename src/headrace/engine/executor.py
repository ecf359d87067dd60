"""What the engine needs from whatever runs a step. Two calls, so that grammar masks can be made while the first one runs."""

from __future__ import annotations

from typing import Protocol

from headrace.engine.plan import Plan
from headrace.request import TokenLogprob


class Executor(Protocol):
    """Runs plans. It owns weights, KV memory and rows; it knows nothing of requests, queues or time."""

    def forward(self, plan: Plan) -> None:
        """Apply the plan's changes, compute its chunks, keep the logits it asks for."""

    def sample(self, plan: Plan, masks: dict[int, bytes] | None = None) -> tuple[list[int], list[TokenLogprob | None]]:
        """Choose one token for each chunk that samples, in order, and append it to its row's tokens.

        `masks` maps a row to its allowed tokens, one bit each, little end first. The second list is empty when no row asked for
        log-probabilities, else one entry a token.
        """
