"""What the engine needs from whatever runs a step. Two calls, so that grammar masks can be made while the first one runs."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Any, Protocol

from headrace.engine.plan import Plan
from headrace.request import PromptTold, TokenLogprob


class Executor(Protocol):
    """Runs plans. It owns weights, KV memory and rows; it knows nothing of requests, queues or time."""

    def forward(self, plan: Plan) -> None:
        """Apply the plan's changes, compute its chunks, keep the logits it asks for."""

    def sample(self, plan: Plan, masks: dict[int, bytes] | None = None) -> tuple[list[int], list[TokenLogprob | None]]:
        """Choose one token for each chunk that samples, in order, and append it to its row's tokens.

        `masks` maps a row to its allowed tokens, one bit each, little end first. The second list is empty when no row asked for
        log-probabilities, else one entry a token.
        """


class Scorer(Protocol):
    """What an executor may offer beside: log-probabilities and embeddings of prompts."""

    def score(self, plan: Plan) -> list[PromptTold | None]:
        """One entry for each of `plan.scored`, after `forward` and before `sample`; none where a prompt's embedding is not complete.

        The last row of a prompt is the sample's.
        """


class Grammars(Protocol):
    """Holds what rows may say, by plans alone: a row that starts again is rebuilt from the tokens it starts with."""

    def compile(self, grammar: str) -> Future[Any]:
        """Make a grammar ready for rows, beside the steps. The future may hold a RequestError."""

    def begin(self, plan: Plan) -> None:
        """Start on the masks of the rows that sample; called before `forward`."""

    def masks(self) -> dict[int, bytes]:
        """The masks of the plan begun, of the rows that have a grammar or a list of allowed tokens; waits for them."""

    def accept(self, plan: Plan, tokens: list[int]) -> Collection[int]:
        """The tokens sampled. Returns the rows whose grammar could not be followed further: all it allowed was an end token."""
