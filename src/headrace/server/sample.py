"""One sample on its way from tokens to text, and to calls of functions where there may be some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.server.calls import Calls, SampleCalls
from headrace.server.codec import Detokenizer
from headrace.server.listener import OpenSample
from headrace.server.logprobs import LogprobWriter


class Sample(OpenSample):
    """One sample's text."""

    __slots__ = ("calls", "detokenizer", "fed", "head", "index", "last_at", "logprob_writer", "seen", "tail", "text")

    def __init__(self, index: int, detokenizer: Detokenizer, logprob_writer: LogprobWriter | None, calls: Calls | None) -> None:
        super().__init__()
        self.calls = SampleCalls(calls) if calls is not None else None
        self.index = index
        self.detokenizer = detokenizer
        self.logprob_writer = logprob_writer
        self.fed = 0  # tokens given to the detokenizer, and told as log-probabilities
        self.seen = 0  # tokens counted
        self.last_at = 0.0
        self.text: list[str] = []  # whole answers only
        self.head = self.tail = b""

    def pieces(self) -> list[str]:
        """The text that has become certain. Sets `finish` when the sample is over."""
        tokens, reason = self.tokens, self.reason
        end = len(tokens)
        if reason == "stop":
            end -= 1  # the token that ended it is no text
        add, writer = self.detokenizer.add, self.logprob_writer
        found: list[str] = []
        while self.fed < end:
            piece = add((tokens[self.fed],))
            if writer is not None and (it := self.logprobs[self.fed]) is not None:
                record = self.detokenizer.record
                writer.add(tokens[self.fed], record[-1] if record else None, it)
            self.fed += 1
            if piece:
                found.append(piece)
            if self.detokenizer.stop is not None:
                self.finish = "stop"
                return found
        if reason is not None:
            if reason == "stop" and writer is not None and (it := self.logprobs[end]) is not None:
                writer.add(tokens[end], None, it)
            self.finish = reason
            piece = self.detokenizer.finish()
            if self.detokenizer.stop is not None:
                self.finish = "stop"
            if piece:
                found.append(piece)
        return found

    def deltas(self, pieces: Sequence[str]) -> list[dict[str, Any]]:
        """What has become certain as parts of a message that may hold calls. Ends the sample when nothing more counts."""
        if self.calls is None:
            return []
        deltas = self.calls.add(pieces, over=self.finish is not None)
        if self.calls.done and self.finish is None:
            self.finish = "stop"
        return deltas

    @property
    def said_reason(self) -> str:
        """Why it ended, as the client is told."""
        return "tool_calls" if self.finish == "stop" and self.calls is not None and self.calls.calls else self.finish or "stop"

    @property
    def num_tokens(self) -> int:
        """Tokens the answer is made of, the one that ended it included."""
        return len(self.tokens) if self.reason == "stop" and self.detokenizer.stop is None else self.fed
