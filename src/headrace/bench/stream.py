"""A streamed answer, event by event, into a record. No more is decoded of a chunk than is counted."""

from __future__ import annotations

import json

import msgspec

from headrace.bench.record import Record


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Logprobs(msgspec.Struct):
    content: list[msgspec.Raw] | None = None  # of a chat
    tokens: list[msgspec.Raw] | None = None  # of a text completion


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[msgspec.Raw] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Timings(msgspec.Struct):
    """Milliseconds. The first three are Headrace's, the others llama.cpp's."""

    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    prompt_ms: float | None = None
    predicted_ms: float | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_decode = msgspec.json.Decoder(_Chunk).decode


class Answer:
    """Reads server-sent events as the network cuts them, and notes in the record what came when.

    Tokens of a chunk are, in this order: what `usage` in it says beyond the last one's (continuous usage), the length of its
    log-probabilities, of its token ids, else one. Tokens that came without text are added to the next chunk that has some.
    """

    def __init__(self, record: Record, *, keep_text: bool = False) -> None:
        self.record = record
        self.text: list[str] | None = [] if keep_text else None
        self.is_done = False  # [DONE] was seen
        self._rest = b""
        self._counted = 0  # tokens up to the last chunk with text
        self._waiting = 0  # tokens since, by log-probabilities or ids

    def feed(self, data: bytes, now: float) -> None:
        """More bytes, at `now` on the record's clock."""
        if self._rest:
            data = self._rest + data
        lines = data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):  # names, comments and ids of events say nothing here
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    self.is_done = True
                elif payload:
                    self._event(payload, now)

    def close(self) -> str:
        """The response is over: what is wrong with it, or nothing."""
        record = self.record
        if record.error:
            return record.error
        if not self.is_done and record.finish is None:
            return "the stream ended early" if record.times or record.first_chunk is not None else "no event stream"
        return "" if record.times else "empty answer"

    def _event(self, payload: bytes, now: float) -> None:
        record = self.record
        try:
            chunk = _decode(payload)
        except msgspec.DecodeError:
            record.error = record.error or "a chunk that is no chunk of the protocol"
            return
        if bytes(chunk.error) != b"null":
            record.error = record.error or "error in the stream" + reason_of(bytes(chunk.error))
            return
        usage = chunk.usage
        if usage is not None:
            record.prompt_tokens = usage.prompt_tokens
            record.completion_tokens = usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if chunk.timings is not None:
            self._server(chunk.timings)
        if chunk.choices:
            self._choice(chunk.choices[0], usage, now)

    def _choice(self, choice: _Choice, usage: _Usage | None, now: float) -> None:
        record, delta = self.record, choice.delta
        if record.first_chunk is None:
            record.first_chunk = now
        record.last_chunk = now
        if choice.finish_reason is not None:
            record.finish = choice.finish_reason
        said = choice.text if delta is None else delta.content
        thought = delta is not None and (delta.reasoning_content or delta.reasoning)
        called = delta is not None and delta.tool_calls
        listed = (choice.logprobs and (choice.logprobs.content or choice.logprobs.tokens)) or choice.token_ids
        if listed:
            self._waiting += len(listed)
        if not (said or thought or called):
            return
        if (said or called) and record.answer is None:
            record.answer = now
        if said and self.text is not None:
            self.text.append(said)
        if usage is not None and usage.completion_tokens is not None:
            count, record.exact = usage.completion_tokens - self._counted, True
        elif self._waiting:
            count, record.exact = self._waiting, True
        else:
            count = 1
        self._counted += count
        self._waiting = 0
        record.times.append(now)
        record.counts.append(count)

    def _server(self, timings: _Timings) -> None:
        record = self.record
        prefill = timings.prompt_ms if timings.prefill is None else timings.prefill
        decode = timings.predicted_ms if timings.decode is None else timings.decode
        record.queue = None if timings.queue is None else timings.queue / 1e3
        record.prefill = None if prefill is None else prefill / 1e3
        record.decode = None if decode is None else decode / 1e3


def reason_of(body: bytes) -> str:
    """An error's code, or the beginning of what it says, to follow other words; empty if it says nothing."""
    try:
        told = json.loads(body)
    except ValueError:
        return ""
    if isinstance(told, dict) and isinstance(told.get("error"), dict):
        told = told["error"]
    if not isinstance(told, dict):
        return ""
    words = told.get("code") or told.get("type") or told.get("message") or told.get("detail")
    return f": {str(words)[:80]}" if words else ""
