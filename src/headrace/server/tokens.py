"""/tokenize and /detokenize: what the model would see, and what ids say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import InvalidRequest, Unavailable
from headrace.server import protocol
from headrace.server.formats import encode
from headrace.server.generation import read_body, unknown_model
from headrace.server.limits import refuse_long_text
from headrace.server.messages_api import parse_count

if TYPE_CHECKING:
    from headrace.server.app import Application
    from headrace.server.codec import TextCodec


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text, or a conversation as the chat template turns it into a prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[protocol.Message], Meta(min_length=1, max_length=protocol.MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None  # of a text; a template has its own


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


class Tokens:
    """The two endpoints of one application."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def tokenize(self, request: Request) -> Response:
        limits, codec, body = await self._ready(request)
        asked: TokenizeRequest = protocol.decode(_tokenize, body)
        self._check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequest("prompt: expected either prompt or messages", param="prompt")
        if asked.messages is not None:
            messages = protocol.message_rows(asked.messages)
            num_chars = sum(len(row["content"]) for row in messages)
            refuse_long_text(num_chars, limits.context_length, cut=True)
            ids = await self._app.off_loop(lambda: [codec.encode_chat(messages)], num_chars)
        else:
            text, special = asked.prompt or "", asked.add_special_tokens is not False
            refuse_long_text(len(text), limits.context_length, cut=True)
            ids = await self._app.off_loop(lambda: [codec.encode(text, add_special=special)], len(text))
        return self._json(request, {"tokens": ids[0], "count": len(ids[0]), "max_model_len": limits.context_length})

    async def count_tokens(self, request: Request) -> Response:
        limits, codec, body = await self._ready(request)
        model, given = parse_count(body)
        self._check_model(model)
        messages = protocol.message_rows(given)
        num_chars = sum(len(row["content"]) for row in messages)
        refuse_long_text(num_chars, limits.context_length, cut=True)
        ids = await self._app.off_loop(lambda: [codec.encode_chat(messages)], num_chars)
        return self._json(request, {"input_tokens": len(ids[0])})

    async def detokenize(self, request: Request) -> Response:
        limits, codec, body = await self._ready(request)
        asked: DetokenizeRequest = protocol.decode(_detokenize, body)
        self._check_model(asked.model)
        bad = next((i for i in asked.tokens if not 0 <= i < limits.vocab_size), None)
        if bad is not None:
            raise InvalidRequest(f"tokens: expected token ids from 0 to {limits.vocab_size - 1}, got {bad}", param="tokens")
        text = codec.detokenizer()
        return self._json(request, {"prompt": text.add(asked.tokens) + text.finish()})

    async def _ready(self, request: Request) -> tuple[protocol.Limits, TextCodec, bytes]:
        body = await read_body(request.scope, request.receive, self._app.settings.max_body_bytes)
        limits, codec = self._app.limits, self._app.codec
        if codec is None:
            raise Unavailable("the model is still loading")
        return limits, codec, body

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._app.settings.model_names:
            raise unknown_model(name)

    @staticmethod
    def _json(request: Request, value: dict[str, Any]) -> Response:
        return Response(encode(value), media_type="application/json", headers={"x-request-id": request.scope["headrace.request_id"]})
