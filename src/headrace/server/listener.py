"""Who hears what the engine did of a request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from headrace.errors import RequestError
from headrace.request import FinishReason, PromptTold, TokenLogprob


class OpenSample:
    """What has come back of one sample. The worker only appends; the listener reads in `flush`, and sets `finish`: how it ended for the
    client, which a stop string decides before the engine does. `reason` is the engine's own."""

    __slots__ = ("finish", "logprobs", "reason", "tokens")

    def __init__(self) -> None:
        self.tokens: array[int] = array("i")
        self.logprobs: list[TokenLogprob | None] = []
        self.reason: FinishReason | None = None
        self.finish: str | None = None


class Listener(Protocol):
    """Hears about one submitted request. Called on the event loop, and must not raise."""

    @property
    def samples(self) -> Sequence[OpenSample]: ...

    def admitted(self, time: float, cached_tokens: int) -> None:
        """Scheduled for the first time (again after a crash)."""

    def stalled(self, seconds: float) -> None:
        """It ran again after that much lost time."""

    def scored(self, told: PromptTold) -> None:
        """What it asked of its prompt, or a piece of it: all comes before the first `flush`, and again after a crash."""

    def flush(self, time: float) -> bool:
        """Samples got tokens or reasons in a step that ended at `time`. True: it is over, whatever the engine still does."""

    def failed(self, error: RequestError) -> None:
        """It ends here."""
