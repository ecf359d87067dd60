"""/v1/messages: the other widespread form of a chat. Its request as ours, its answer as message objects and events."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.errors import InvalidRequest, RequestError, UnsupportedParameter
from headrace.server.formats import encode, error_body
from headrace.server.protocol import (
    MAX_MESSAGES,
    MAX_STOPS,
    Basic,
    ChatRequest,
    ContentPart,
    Message,
    Short,
    basic,
    decode_request,
    with_other_fields,
)
from headrace.server.single import TextFormat, named_event

REFUSED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "tools": ([],),
}


class TextBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Short
    text: str | None = None
    cache_control: Any = None  # the prefix cache needs no marks
    citations: Any = None


class InputMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[TextBlock], Meta(max_length=MAX_MESSAGES)]


Messages = Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class CountRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a prompt is made of: all that /v1/messages/count_tokens takes."""

    model: Short | None = None
    messages: Messages
    system: str | list[TextBlock] | None = None


class MessagesRequest(Basic, kw_only=True):
    """Sampling beyond the API's own is named and bounded as in a chat."""

    messages: Messages
    system: str | list[TextBlock] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    service_tier: Literal["auto", "standard_only", "flex", "batch"] | None = None


_decoder = msgspec.json.Decoder(with_other_fields(MessagesRequest, REFUSED))
_count_decoder = msgspec.json.Decoder(with_other_fields(CountRequest, REFUSED))


def parse_messages(body: bytes) -> ChatRequest:
    """The chat that is asked for. Raises InvalidRequest or UnsupportedParameter."""
    asked: Any = decode_request(_decoder, body, REFUSED)
    tier = None if asked.service_tier == "standard_only" else asked.service_tier
    return ChatRequest(messages=_chat(asked), max_tokens=asked.max_tokens, stop=asked.stop_sequences, service_tier=tier, **basic(asked))


def parse_count(body: bytes) -> tuple[str | None, list[Message]]:
    """The model and the conversation whose tokens are to be counted. Raises InvalidRequest or UnsupportedParameter."""
    asked: Any = decode_request(_count_decoder, body, REFUSED)
    return asked.model, _chat(asked)


def _chat(asked: CountRequest | MessagesRequest) -> list[Message]:
    system = [] if asked.system is None else [Message(role="system", content=_parts("system", asked.system))]
    return system + [Message(role=it.role, content=_parts(f"messages[{i}].content", it.content)) for i, it in enumerate(asked.messages)]


def _parts(where: str, content: str | list[TextBlock]) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        if block.type != "text":
            at = f"{where}[{i}].type"
            raise UnsupportedParameter(f"{at}: only text blocks are supported, got {block.type[:40]!r}", param=at)
        if block.text is None:
            raise InvalidRequest(f"{where}[{i}].text: required", param=f"{where}[{i}].text")
    return [ContentPart(type="text", text=block.text) for block in content]


def message_error(error: RequestError) -> bytes:
    """The form of all errors, with the `type` that clients of this endpoint look for."""
    return b'{"type":"error",' + error_body(error)[1:]


class MessagesFormat(TextFormat):
    endpoint = "messages"
    prefix = "msg_"
    object = "message"

    def _message(self, content: list[Any], reason: str | None, stop: str | None, usage: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": reason, "stop_sequence": stop, "usage": self._usage(usage),
        } | more  # fmt: skip

    @staticmethod
    def _usage(usage: dict[str, Any]) -> dict[str, Any]:
        cached = usage["prompt_tokens_details"]["cached_tokens"]  # this API counts them apart
        return {
            "input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }  # fmt: skip

    @staticmethod
    def _reason(reason: str, stop: str | None) -> str:
        if stop is not None:
            return "stop_sequence"
        return "end_turn" if reason == "stop" else "max_tokens"

    def whole_text(self, text: str, reason: str, stop: str | None, usage: dict[str, Any], **more: Any) -> bytes:
        return encode(self._message([{"type": "text", "text": text}], self._reason(reason, stop), stop, usage, **more))

    def start(self, usage: dict[str, Any]) -> bytes:
        begun = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return named_event({"type": "message_start", "message": self._message([], None, None, usage)}) + named_event(begun)

    def delta(self, text: str) -> bytes:
        return named_event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})

    def end(self, text: str, reason: str, stop: str | None, usage: dict[str, Any], **more: Any) -> bytes:
        delta = {"stop_reason": self._reason(reason, stop), "stop_sequence": stop}
        return (
            named_event({"type": "content_block_stop", "index": 0})
            + named_event({"type": "message_delta", "delta": delta, "usage": self._usage(usage)} | more)
            + named_event({"type": "message_stop"})
        )

    def error(self, error: RequestError) -> bytes:
        return message_error(error)

    def failure(self, error: RequestError) -> bytes:
        return b"event: error\ndata: " + message_error(error) + b"\n\n"
