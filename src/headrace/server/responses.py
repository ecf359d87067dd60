"""The two ways an answer leaves: as a stream of server-sent events, or as one body."""

from __future__ import annotations

from typing import Any, cast

from headrace.errors import EngineFailed
from headrace.server.answer import JSON_HEADERS, STREAM_HEADERS, Answer, Part
from headrace.server.formats import DONE, ChatFormat, encode, event
from headrace.server.sample import Sample


def echoed_logprobs(part: Part) -> dict[str, Any] | None:
    """Those of a prompt that its answers begin with, in their form."""
    work = part.answer.work
    if not work.echo or work.params.logprobs < 0 or part.scores is None:
        return None
    return part.scores.echoed(work.params.logprobs)


class StreamAnswer(Answer):
    """Server-sent events: one write a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for part in self.parts:
            for sample in part.samples:
                sample.head, sample.tail = self.format.edges(sample.index)
        self._opened: set[int] = set()

    def next_token(self, sample: Sample) -> None:
        piece = sample.detokenizer.add(sample.tokens[-1:])
        sample.fed += 1
        if piece:
            self.wire.write(sample.head + encode(piece) + sample.tail)

    def flush(self, part: Part) -> bool:
        out: list[bytes] = []
        over = True
        for sample in part.samples:
            if sample.finish is not None:
                continue
            if sample.seen == 0 and sample.reason is None:
                over = False
                continue
            pieces = sample.pieces()
            deltas = sample.deltas(pieces)
            if sample.index not in self._opened:
                self._opened.add(sample.index)
                opening = self.format.opening(sample.index)
                if opening:
                    out.append(opening)
                if self.work.echo:
                    out.append(event(self.format.piece(sample.index, part.echo, echoed_logprobs(part))))
            if sample.calls is not None and sample.finish in (None, "stop", "length"):
                if chunks := self._calls(sample, deltas):
                    out.append(chunks)
                over = over and sample.finish is not None
            elif sample.finish is None:
                over = False
                if sample.logprob_writer is None:
                    for piece in pieces:
                        out += (sample.head, encode(piece), sample.tail)
                elif pieces:
                    out.append(event(self.format.piece(sample.index, "".join(pieces), sample.logprob_writer.take())))
            elif sample.finish in ("stop", "length"):
                self._finish(sample, pieces, out)
            else:
                self.fail(EngineFailed("the engine ended the request"))
                return True
        if over and all(other.done or other is part for other in self.parts):
            part.done = True
            self._complete()
            if self.format.with_usage:
                out.append(self.format.last(self.usage(), timings=self.timings(), seed=self.work.seed))
            out.append(DONE)
            self._write(b"".join(out), more=False)
        elif out:
            self._write(b"".join(out), more=True)
        return over

    def _calls(self, sample: Sample, deltas: list[dict[str, Any]]) -> bytes:
        """A step of a sample that may hold calls."""
        fmt = cast("ChatFormat", self.format)
        found = fmt.deltas(sample.index, deltas, sample.logprob_writer.take() if sample.logprob_writer else None)
        if sample.finish is None:
            return found
        more = {} if fmt.with_usage else {"timings": self.timings()}
        return found + fmt.ending(sample.index, "", None, sample.said_reason, **more)

    def _finish(self, sample: Sample, pieces: list[str], out: list[bytes]) -> None:
        logprobs = None
        text = pieces.pop() if pieces else ""
        if sample.logprob_writer is None:
            for piece in pieces:
                out += (sample.head, encode(piece), sample.tail)
        else:
            text = "".join((*pieces, text))
            logprobs = sample.logprob_writer.take()
        more = {} if self.format.with_usage else {"timings": self.timings()}
        out.append(self.format.ending(sample.index, text, logprobs, sample.finish or "stop", **more))

    def _write(self, body: bytes, *, more: bool) -> None:
        if not self.wire.started:
            self.wire.start(200, STREAM_HEADERS + self.headers())
        self.wire.write(body, more=more)


class WholeAnswer(Answer):
    """One JSON body at the end."""

    def next_token(self, sample: Sample) -> None:
        """Nothing: the text is made at the end, from the same tokens in the same way."""

    def flush(self, part: Part) -> bool:
        over = True
        for sample in part.samples:
            if sample.finish is None:
                pieces = sample.pieces()
                sample.text += pieces
                sample.deltas(pieces)
                if sample.finish is None:
                    over = False
                elif sample.finish not in ("stop", "length"):
                    self.fail(EngineFailed("the engine ended the request"))
                    return True
        if over and all(other.done or other is part for other in self.parts):
            part.done = True
            self._complete()
            choices = [self._choice(each, sample) for each in self.parts for sample in each.samples]
            more: dict[str, Any] = {}
            if self.work.prompt_logprobs >= 0:
                more = self.format.with_prompts(choices, [self._prompt_logprobs(each) for each in self.parts])
            body = self.format.whole(choices, self.usage(), timings=self.timings(), seed=self.work.seed, **more)
            self.wire.respond(200, JSON_HEADERS + self.headers(), body)
        return over

    def _prompt_logprobs(self, part: Part) -> list[dict[str, Any] | None]:
        return part.scores.described(self.work.prompt_logprobs) if part.scores is not None else []

    def _choice(self, part: Part, sample: Sample) -> dict[str, Any]:
        logprobs = sample.logprob_writer.take() if sample.logprob_writer else None
        if sample.calls is not None:
            return cast("ChatFormat", self.format).choice_of(sample.index, sample.calls.message(), logprobs, sample.said_reason)
        if logprobs is not None and (prompt := echoed_logprobs(part)) is not None:
            logprobs = {name: prompt[name] + values for name, values in logprobs.items()}
        return self.format.choice(sample.index, "".join((part.echo, *sample.text)), logprobs, sample.finish or "stop")
