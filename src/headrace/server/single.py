"""Answers of the endpoints whose streams are named events around one text: /v1/responses and /v1/messages."""

from __future__ import annotations

from typing import Any

from headrace.errors import EngineFailed
from headrace.server.answer import JSON_HEADERS, STREAM_HEADERS, Answer, Part
from headrace.server.formats import Format, encode
from headrace.server.sample import Sample


class TextFormat(Format):
    """What such an endpoint says. `usage` is OpenAI's of /v1/completions; `stop`: the stop string that ended the text."""

    def whole_text(self, text: str, reason: str, stop: str | None, usage: dict[str, Any], **more: Any) -> bytes:
        raise NotImplementedError

    def start(self, usage: dict[str, Any]) -> bytes:
        """The events before the first text."""
        raise NotImplementedError

    def delta(self, text: str) -> bytes:
        raise NotImplementedError

    def end(self, text: str, reason: str, stop: str | None, usage: dict[str, Any], **more: Any) -> bytes:
        """The events after the last text; `text` is all of it."""
        raise NotImplementedError


def named_event(value: dict[str, Any]) -> bytes:
    """A server-sent event with the name that its `type` has."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), encode(value))


class SingleAnswer(Answer):
    """One prompt, one sample."""

    format: TextFormat

    def next_token(self, sample: Sample) -> None:
        piece = sample.detokenizer.add(sample.tokens[-1:])
        sample.fed += 1
        if piece:
            sample.text.append(piece)
            self._more(piece)

    def flush(self, part: Part) -> bool:
        (sample,) = part.samples
        if sample.seen == 0 and sample.reason is None:
            return False
        pieces = sample.pieces()
        sample.text += pieces
        if sample.finish is None:
            if pieces:
                self._more("".join(pieces))
            return False
        if sample.finish not in ("stop", "length"):
            self.fail(EngineFailed("the engine ended the request"))
            return True
        part.done = True
        self._complete()
        self._over("".join(pieces), "".join(sample.text), sample.finish, sample.detokenizer.stop)
        return True

    def _more(self, piece: str) -> None:
        """Deliver a piece of text; others follow, or the end."""
        raise NotImplementedError

    def _over(self, piece: str, text: str, reason: str, stop: str | None) -> None:
        """Deliver the last piece, and all that is to be said at the end."""
        raise NotImplementedError


class SingleStream(SingleAnswer):
    def _more(self, piece: str) -> None:
        self.wire.write(self._opening() + self.format.delta(piece))

    def _over(self, piece: str, text: str, reason: str, stop: str | None) -> None:
        last = self._opening() + (self.format.delta(piece) if piece else b"")
        self.wire.write(last + self.format.end(text, reason, stop, self.usage(), timings=self.timings(), seed=self.work.seed), more=False)

    def _opening(self) -> bytes:
        if self.wire.started:
            return b""
        self.wire.start(200, STREAM_HEADERS + self.headers())
        return self.format.start(self.usage())


class SingleWhole(SingleAnswer):
    def _more(self, piece: str) -> None:
        """Nothing: it is all delivered at the end."""

    def _over(self, piece: str, text: str, reason: str, stop: str | None) -> None:
        body = self.format.whole_text(text, reason, stop, self.usage(), timings=self.timings(), seed=self.work.seed)
        self.wire.respond(200, JSON_HEADERS + self.headers(), body)
