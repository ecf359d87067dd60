"""The JSON of the two OpenAI endpoints: what a chunk, a last chunk and a whole body look like.

A stream's chunks differ in a few bytes, so everything around the text is encoded once per sample (`edges`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.errors import RequestError

Endpoint = Literal["chat", "completions", "responses", "messages", "embeddings"]
encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
_MARK = "\x00"  # stands for the text while the bytes around it are made; no id or model name has it


def error_body(error: RequestError) -> bytes:
    return encode({"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}})


def event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Format:
    """One response's constant parts. `with_usage`: the stream ends with a usage chunk, so all others carry `usage: null`."""

    endpoint: Endpoint
    prefix: str
    object: str
    chunk_object: str

    def __init__(self, id_hex: str, created: int, model: str, *, with_usage: bool = False) -> None:
        self.id = self.prefix + id_hex
        self.created = created
        self.model = model
        self.with_usage = with_usage

    def error(self, error: RequestError) -> bytes:
        """The body of a response that is an error."""
        return error_body(error)

    def failure(self, error: RequestError) -> bytes:
        """The end of a stream that fails."""
        return b"data: " + error_body(error) + b"\n\n" + DONE

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        chunk = {"id": self.id, "object": self.chunk_object, "created": self.created, "model": self.model, "choices": choices}
        if self.with_usage and "usage" not in more:
            chunk["usage"] = None
        return chunk | more

    def edges(self, index: int) -> tuple[bytes, bytes]:
        """The bytes before and after the JSON string of a piece of text, for a chunk that holds nothing else."""
        head, _, tail = event(self.piece(index, _MARK)).partition(encode(_MARK))
        return head, tail

    def piece(self, index: int, text: str, logprobs: Any = None, reason: str | None = None, **more: Any) -> dict[str, Any]:
        raise NotImplementedError

    def opening(self, index: int) -> bytes:
        """What precedes the first text of a sample."""
        return b""

    def ending(self, index: int, text: str, logprobs: Any, reason: str, **more: Any) -> bytes:
        """The last text of a sample, and why it ended."""
        raise NotImplementedError

    def last(self, usage: dict[str, Any], **more: Any) -> bytes:
        """The chunk after all samples, when usage was asked for."""
        return event(self._chunk([], usage=usage, **more))

    def choice(self, index: int, text: str, logprobs: Any, reason: str) -> dict[str, Any]:
        raise NotImplementedError

    def with_prompts(self, choices: list[dict[str, Any]], prompts: list[Any]) -> dict[str, Any]:
        """Tell log-probabilities of prompts, one entry each: in the choices, or by what is returned, in the body."""
        return {"prompt_logprobs": prompts[0]}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any], **more: Any) -> bytes:
        return encode(
            {"id": self.id, "object": self.object, "created": self.created, "model": self.model, "choices": choices, "usage": usage} | more
        )


class ChatFormat(Format):
    endpoint = "chat"
    prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def piece(self, index: int, text: str, logprobs: Any = None, reason: str | None = None, **more: Any) -> dict[str, Any]:
        return self._chunk([{"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": reason}], **more)

    def deltas(self, index: int, deltas: list[dict[str, Any]], logprobs: Any = None) -> bytes:
        """Parts of a message that may hold calls, one chunk each; log-probabilities go with the first."""
        chunks = []
        for delta in deltas or ([{}] if logprobs else []):
            chunks.append(event(self._chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}])))
            logprobs = None
        return b"".join(chunks)

    def opening(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return event(self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]))

    def ending(self, index: int, text: str, logprobs: Any, reason: str, **more: Any) -> bytes:
        last_text = event(self.piece(index, text, logprobs)) if text or logprobs else b""
        return last_text + event(self._chunk([{"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}], **more))

    def choice_of(self, index: int, message: dict[str, Any], logprobs: Any, reason: str) -> dict[str, Any]:
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def choice(self, index: int, text: str, logprobs: Any, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self.choice_of(index, message, logprobs, reason)


class CompletionFormat(Format):
    endpoint = "completions"
    prefix = "cmpl-"
    object = chunk_object = "text_completion"

    def with_prompts(self, choices: list[dict[str, Any]], prompts: list[Any]) -> dict[str, Any]:
        for choice in choices:
            choice["prompt_logprobs"] = prompts[choice["index"] // (len(choices) // len(prompts))]
        return {}

    def piece(self, index: int, text: str, logprobs: Any = None, reason: str | None = None, **more: Any) -> dict[str, Any]:
        return self._chunk([self.choice(index, text, logprobs, reason)], **more)

    def ending(self, index: int, text: str, logprobs: Any, reason: str, **more: Any) -> bytes:
        return event(self.piece(index, text, logprobs, reason, **more))

    def choice(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
