"""/v1/responses: its request as a chat, its answer as response objects and events. Nothing is stored: a request brings all of its input."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.errors import InvalidRequest, RequestError, UnsupportedParameter
from headrace.server.formats import encode
from headrace.server.protocol import MAX_MESSAGES, Basic, ChatRequest, ContentPart, Message, Short, basic, decode_request, with_other_fields
from headrace.server.single import TextFormat, named_event

TEXT_PARTS = ("input_text", "output_text", "text")

REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "parallel_tool_calls": (True, False),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({}, {"effort": "none"}, {"effort": None}),
    "text": ({}, {"format": {"type": "text"}}, {"format": {"type": "text"}, "verbosity": "medium"}, {"verbosity": "medium"}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


class InputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message. Its parts are input_text, or output_text in an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    id: Short | None = None
    status: Short | None = None
    phase: Short | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None  # padding of OpenAI's own streams; none is sent


class ResponsesRequest(Basic, kw_only=True):
    """Sampling beyond OpenAI's own is named and bounded as in a chat."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stream_options: ResponseStreamOptions | None = None
    service_tier: Literal["auto", "default", "flex", "batch"] | None = None


_decoder = msgspec.json.Decoder(with_other_fields(ResponsesRequest, REFUSED))


def parse_response(body: bytes) -> tuple[ChatRequest, dict[str, Any]]:
    """The chat that is asked for, and what the response object repeats of the request. Raises InvalidRequest or UnsupportedParameter."""
    asked: Any = decode_request(_decoder, body, REFUSED)
    messages = [] if asked.instructions is None else [Message(role="system", content=asked.instructions)]
    items = [InputItem(role="user", content=asked.input)] if isinstance(asked.input, str) else asked.input
    messages += [Message(role=item.role, content=_text(i, item.content)) for i, item in enumerate(items)]
    chat = ChatRequest(messages=messages, max_tokens=asked.max_output_tokens, service_tier=asked.service_tier, **basic(asked))
    metadata = asked.metadata if isinstance(asked.metadata, dict) else {}
    echo = {
        "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens, "metadata": metadata,
        "temperature": 1.0 if asked.temperature is None else asked.temperature, "top_p": 1.0 if asked.top_p is None else asked.top_p,
    }  # fmt: skip
    return chat, echo


def _text(index: int, content: str | list[ContentPart]) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            at = f"input[{index}].content[{i}].type"
            raise UnsupportedParameter(f"{at}: only text parts are supported, got {part.type[:40]!r}", param=at)
        if part.text is None:
            raise InvalidRequest(f"input[{index}].content[{i}].text: required", param=f"input[{index}].content[{i}].text")
    return [ContentPart(type="text", text=part.text) for part in content]


class ResponsesFormat(TextFormat):
    endpoint = "responses"
    prefix = "resp_"
    object = "response"

    echo: dict[str, Any]
    _number = 0  # of events sent

    def _response(self, status: str, output: list[Any], usage: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "model": self.model, "output": output,
            "usage": usage, "error": None, "incomplete_details": None, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
            "text": {"format": {"type": "text"}}, "truncation": "disabled", "store": False, "background": False,
            "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "service_tier": "default",
        } | self.echo | more  # fmt: skip

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item(self, status: str, content: list[Any]) -> dict[str, Any]:
        return {
            "id": "msg_" + self.id.removeprefix(self.prefix),
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _over(self, text: str, reason: str, usage: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        status = "completed" if reason == "stop" else "incomplete"
        if reason != "stop":
            more = more | {"incomplete_details": {"reason": "max_output_tokens"}}
        counts = {
            "input_tokens": usage["prompt_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }  # fmt: skip
        return self._response(status, [self._item(status, [self._part(text)])], counts, **more)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = named_event({"type": kind, "sequence_number": self._number} | fields)
        self._number += 1
        return event

    def _at(self) -> dict[str, Any]:
        return {"item_id": "msg_" + self.id.removeprefix(self.prefix), "output_index": 0, "content_index": 0}

    def whole_text(self, text: str, reason: str, stop: str | None, usage: dict[str, Any], **more: Any) -> bytes:
        return encode(self._over(text, reason, usage, more))

    def start(self, usage: dict[str, Any]) -> bytes:
        response = self._response("in_progress", [], None)
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
            + self._event("response.content_part.added", **self._at(), part=self._part(""))
        )

    def delta(self, text: str) -> bytes:
        return self._event("response.output_text.delta", **self._at(), delta=text, logprobs=[])

    def end(self, text: str, reason: str, stop: str | None, usage: dict[str, Any], **more: Any) -> bytes:
        response = self._over(text, reason, usage, more)
        return (
            self._event("response.output_text.done", **self._at(), text=text, logprobs=[])
            + self._event("response.content_part.done", **self._at(), part=self._part(text))
            + self._event("response.output_item.done", output_index=0, item=response["output"][0])
            + self._event(f"response.{response['status']}", response=response)
        )

    def failure(self, error: RequestError) -> bytes:
        told = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
        return self._event("error", code=error.code, message=error.message, param=error.param, error=told)
