"""/openapi.json: what the endpoints take, from the very types that their bodies are decoded into."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from headrace import __version__
from headrace.server.embeddings import EmbeddingsRequest
from headrace.server.messages_api import CountRequest, MessagesRequest
from headrace.server.protocol import ChatRequest, CompletionRequest, with_other_fields
from headrace.server.responses_api import ResponsesRequest
from headrace.server.tokens import DetokenizeRequest, TokenizeRequest


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """The body of every answer that is no success."""

    error: ErrorDetail


class Operation(NamedTuple):
    """`body`: its type with the extras of clients that are accepted. `plain`: the answer is text."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    plain: bool = False


def _with_extras(base: type[msgspec.Struct]) -> type[msgspec.Struct]:
    return with_other_fields(base, {})


OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a conversation", _with_extras(ChatRequest), streams=True),
    Operation("post", "/v1/completions", "Go on from a text", _with_extras(CompletionRequest), streams=True),
    Operation("post", "/v1/responses", "Answer an input; nothing is stored", _with_extras(ResponsesRequest), streams=True),
    Operation("post", "/v1/messages", "Answer a conversation in the Messages form", _with_extras(MessagesRequest), streams=True),
    Operation("post", "/v1/messages/count_tokens", "Count a conversation's tokens", _with_extras(CountRequest)),
    Operation("post", "/v1/embeddings", "Texts as vectors", _with_extras(EmbeddingsRequest)),
    Operation("get", "/v1/models", "The names the model is served under"),
    Operation("get", "/v1/models/{name}", "One of them"),
    Operation("post", "/tokenize", "A text or a conversation as token ids", TokenizeRequest),
    Operation("post", "/detokenize", "Token ids as text", DetokenizeRequest),
    Operation("get", "/queue", "The caller's requests that wait, and the wait of a new one"),
    Operation("get", "/metrics", "Prometheus metrics", plain=True),
    Operation("get", "/health", "The process lives"),
    Operation("get", "/ready", "A request would be served now"),
    Operation("get", "/openapi.json", "This document"),
)
_REF = "#/components/schemas/{name}"


def describe() -> dict[str, Any]:
    """The document: OpenAPI 3.1."""
    types = [Error, *(operation.body for operation in OPERATIONS if operation.body is not None)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    error, *bodies = schemas
    refs = iter(bodies)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        kinds = ["text/plain" if operation.plain else "application/json", *(["text/event-stream"] if operation.streams else [])]
        kinds += ["application/openmetrics-text"] if operation.plain else []
        said: dict[str, Any] = {
            "summary": operation.summary,
            "responses": {
                "200": {"description": "Success", "content": {kind: {"schema": {}} for kind in kinds}},
                "default": {"description": "An error", "content": {"application/json": {"schema": error}}},
            },
        }
        if operation.path in ("/health", "/ready"):
            said["security"] = []
            said["responses"]["503"] = {"description": "Not now; `status` says why", "content": {"application/json": {"schema": {}}}}
        if operation.body is not None:
            said["requestBody"] = {"required": True, "content": {"application/json": {"schema": next(refs)}}}
        if "{name}" in operation.path:
            said["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
        paths.setdefault(operation.path, {})[operation.method] = said
    return {
        "openapi": "3.1.0",
        "info": {"title": "headrace", "version": __version__},
        "paths": paths,
        "security": [{}, {"key": []}],
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }
