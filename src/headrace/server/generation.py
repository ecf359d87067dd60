"""One generation request from its bytes to an answer: read under limits, validated, tokenized, bounded, and sent to the engine."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from headrace.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    RequestError,
    Unavailable,
    UnsupportedParameter,
)
from headrace.server import protocol, structured
from headrace.server.answer import JSON_HEADERS, Answer, Work, retry_headers
from headrace.server.codec import TextCodec
from headrace.server.embeddings import EmbeddingsAnswer, EmbeddingsFormat, parse_embeddings
from headrace.server.formats import ChatFormat, CompletionFormat, Endpoint, Format, error_body
from headrace.server.limits import refuse_long_text, refuse_shape
from headrace.server.messages_api import MessagesFormat, message_error, parse_messages
from headrace.server.prompt import prompt_text, refuse_many
from headrace.server.report import Ended, traceparent_of
from headrace.server.responses import StreamAnswer, WholeAnswer
from headrace.server.responses_api import ResponsesFormat, parse_response
from headrace.server.single import SingleStream, SingleWhole, TextFormat
from headrace.server.wire import Wire

if TYPE_CHECKING:
    from headrace.server.app import Application

log = logging.getLogger("headrace.http")

Scope = MutableMapping[str, Any]
FORMATS: dict[Endpoint, type[Format]] = {
    "chat": ChatFormat,
    "completions": CompletionFormat,
    "responses": ResponsesFormat,
    "messages": MessagesFormat,
    "embeddings": EmbeddingsFormat,
}
# What a chat's fields are called where it is asked for in another form.
NAMES: dict[Endpoint, dict[str, str]] = {
    "responses": {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"},
    "messages": {"prompt": "messages", "stop": "stop_sequences"},
    "embeddings": {"prompt": "input"},
}
INLINE_CHARS = 4096  # longer text is tokenized off the event loop


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"


class WrongMediaType(RequestError):
    status = 415
    code = "unsupported_media_type"


class Disconnected(Exception):
    """The client left before it had sent everything."""


class Generate:
    """One generation endpoint, as a raw ASGI application: it lives as long as the request, and waits for the client to leave."""

    def __init__(self, app: Application, endpoint: Endpoint) -> None:
        self._app = app
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        app = self._app
        extensions = scope.get("extensions") or {}
        # The server's own `send`: the router's wrappers around it watch for exceptions, and none leave here.
        wire = Wire(scope["headrace.send"], extensions.get("headrace.abort"), extensions.get("headrace.write"))
        tenant: str = scope.get("headrace.tenant", "")
        try:
            _ = app.limits  # what cannot be served now is refused first, and before its body is read
            app.front.queue.check(tenant)
            app.front.quotas.enter(tenant)
        except RequestError as error:
            self._refuse(wire, scope, error)
            return
        try:
            await self._serve(scope, receive, wire)
        finally:
            app.front.quotas.leave(tenant)

    async def _serve(self, scope: Scope, receive: Any, wire: Wire) -> None:
        app, request_id = self._app, scope["headrace.request_id"]
        try:
            answer = await self._prepare(scope, receive, wire, request_id)
        except Disconnected:
            return
        except RequestError as error:
            self._refuse(wire, scope, _renamed(error, NAMES.get(self._endpoint, {})))
            return
        except Exception:
            log.exception("%s: request could not be prepared", request_id)
            self._refuse(wire, scope, EngineFailed("internal error"))
            return
        app.answers.add(answer)
        app.idle.clear()
        deadline: asyncio.TimerHandle | None = None
        try:
            if answer.work.deadline_ms is not None:
                over = DeadlineExceeded(
                    f"deadline_ms: the request was not done {answer.work.deadline_ms:g} ms after it came", param="deadline_ms"
                )
                left = answer.arrived_at + answer.work.deadline_ms / 1000 - time.monotonic()
                deadline = asyncio.get_running_loop().call_later(max(0.0, left), answer.fail, over)
            answer.begin()
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            if deadline is not None:
                deadline.cancel()
            answer.cancel()
            app.answers.discard(answer)
            if not app.answers:
                app.idle.set()

    def _refuse(self, wire: Wire, scope: Scope, error: RequestError) -> None:
        app, tenant, request_id = self._app, scope.get("headrace.tenant", ""), scope["headrace.request_id"]
        headers = [*JSON_HEADERS, (b"x-request-id", request_id.encode()), *retry_headers(error), *app.front.quotas.headers(tenant)]
        # The rest of an unwanted body is read and dropped (HttpProtocol bounds the time): who still sends would not see the answer.
        if app.draining:
            headers.append((b"connection", b"close"))
        wire.respond(error.status, headers, message_error(error) if self._endpoint == "messages" else error_body(error))
        took = time.monotonic() - scope["headrace.arrived"]
        app.metrics.ended(self._endpoint, "refused" if error.status < 500 or error.status == 503 else "failed", error.code or "error")
        if error.status == 429:
            app.metrics.refusal.observe(took)
        app.front.reporter.ended(
            Ended(
                request_id, self._endpoint, tenant, error.status, error.code or "error", app.settings.model_names[0],
                traceparent_of(scope["headers"]), timings={"total": round(1000 * took, 3)},
            )
        )  # fmt: skip

    async def _prepare(self, scope: Scope, receive: Any, wire: Wire, request_id: str) -> Answer:
        app = self._app
        body = await read_body(scope, receive, app.settings.max_body_bytes)
        limits = app.limits  # again: the body may have taken its time
        tenant: str = scope.get("headrace.tenant", "")
        codec = app.codec
        if codec is None:
            raise Unavailable("the model is still loading")
        request: protocol.Common
        tools: structured.Tools | None = None
        given_back: dict[str, Any] = {}
        as_base64 = False
        if self._endpoint not in ("completions", "embeddings"):
            if self._endpoint == "responses":
                chat, given_back = parse_response(body)
            else:
                chat = parse_messages(body) if self._endpoint == "messages" else protocol.parse_chat(body)
            request = chat
            asked, logprobs = chat.max_completion_tokens or chat.max_tokens, (chat.top_logprobs or 0) if chat.logprobs else -1
            messages = protocol.message_rows(chat.messages)
            tools = structured.tools_of(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
            specs = tools.specs if tools is not None else None
            texts = [*(message["content"] for message in messages), *structured.other_texts(messages, specs)]
            self._check_model(request)
            app.front.queue.check(tenant, request.priority or 0)
            chars = _check_texts(codec, texts, request, limits, together=True)
            prompts = await app.off_loop(lambda: [codec.encode_chat(messages, tools=specs)], chars)
        else:
            if self._endpoint == "embeddings":
                completion, as_base64 = parse_embeddings(body)
            else:
                completion = protocol.parse_completion(body)
            request = completion
            asked = completion.max_tokens or protocol.COMPLETION_TOKENS
            logprobs = -1 if completion.logprobs is None else completion.logprobs
            self._check_model(request)
            given = protocol.completion_prompts(completion, limits.vocab_size)
            app.front.queue.check(tenant, request.priority or 0, len(given))
            chars = _check_texts(codec, [each for each in given if isinstance(each, str)], request, limits)
            prompts = await app.off_loop(
                lambda: [codec.encode(each, add_special=True) if isinstance(each, str) else each for each in given], chars
            )
        wanted = structured.wanted_of(request)
        if tools is not None:
            wanted = structured.wanted_calls(tools, wanted, codec)
        grammar = await app.grammars.grammar(wanted) if wanted is not None else ""
        if request.truncate_prompt_tokens is not None:
            prompts = [ids[-request.truncate_prompt_tokens :] for ids in prompts]
        max_tokens = _max_tokens(prompts, asked, limits.context_length)
        n, echo, scored = protocol.num_samples(request), protocol.echo(request), protocol.prompt_logprobs(request)
        copies = n if self._endpoint == "completions" else 1  # each of its choices has them
        for param, best in (("prompt_logprobs", scored), ("logprobs", logprobs if echo else -1)):
            if best >= 0:
                refuse_many(prompts, best, copies, param)
        stream = bool(request.stream)
        salt = f"{tenant}\n{request.cache_salt or ''}"  # one key's prompts are nobody else's to time
        if request.cache_prompt is False:
            salt = f"{salt}/{random.getrandbits(64):x}"  # shares blocks with nobody
        work = Work(
            endpoint=self._endpoint,
            prompts=prompts,
            params=protocol.sampling_params(request, limits, max_tokens, logprobs, grammar, embed=self._endpoint == "embeddings"),
            seed=protocol.draw_seed(request),
            num_samples=n,
            stop=protocol.stop_strings(request),
            include_stop=bool(request.include_stop_str_in_output),
            stream=stream,
            priority=request.priority or 0,
            cache_salt=salt,
            tenant=tenant,
            batch=request.service_tier in ("batch", "flex"),
            deadline_ms=request.deadline_ms,
            calls=structured.calls_of(tools, codec) if tools is not None else None,
            echo=await app.off_loop(lambda: [prompt_text(codec, ids) for ids in prompts], sum(map(len, prompts))) if echo else (),
            prompt_logprobs=scored,
        )
        options = request.stream_options
        fmt = FORMATS[self._endpoint](
            f"{random.getrandbits(96):024x}",
            int(time.time()),
            request.model or app.settings.model_names[0],
            with_usage=bool(options is not None and options.include_usage),
        )
        make: type[Answer]
        if isinstance(fmt, ResponsesFormat):
            fmt.echo = given_back
        if isinstance(fmt, EmbeddingsFormat):
            fmt.as_base64 = as_base64
            make = EmbeddingsAnswer
        elif isinstance(fmt, TextFormat):
            make = SingleStream if stream else SingleWhole
        else:
            make = StreamAnswer if stream else WholeAnswer
        return make(
            work, fmt, wire, app.worker, codec, app.metrics, app.front,
            request_id=request_id, arrived_at=scope["headrace.arrived"], traceparent=traceparent_of(scope["headers"]),
        )  # fmt: skip

    def _check_model(self, request: protocol.Common) -> None:
        if request.model is not None and request.model not in self._app.settings.model_names:
            raise unknown_model(request.model)


def _renamed(error: RequestError, names: dict[str, str]) -> RequestError:
    """The error with the name that the endpoint has for the field. What is not supported has the client's own name already."""
    if not isinstance(error, UnsupportedParameter) and (old := error.param) is not None and (new := names.get(old)) is not None:
        error.param = new
        if error.message.startswith(f"{old}:") or old == "max_tokens":
            error.message = error.message.replace(old, new, 1)
    return error


def _check_texts(codec: TextCodec, texts: list[str], request: protocol.Common, limits: protocol.Limits, *, together: bool = False) -> int:
    """Refuse what is far too long before working on it; `together`: they become one prompt. Returns the characters in all."""
    limit, num_chars = limits.context_length, sum(map(len, texts))
    cut = request.truncate_prompt_tokens is not None
    if not cut:
        for text in texts:
            if len(text) > INLINE_CHARS and (least := codec.min_tokens(text)) > limit:
                raise ContextLengthExceeded(
                    f"the prompt has at least {least} tokens: prompt and answer together may have {limit}", param="prompt"
                )
    refuse_long_text(num_chars if together else max(map(len, texts), default=0), limit, cut=cut)
    return num_chars


def _max_tokens(prompts: list[list[int]], asked: int | None, limit: int) -> int:
    """The answer's length limit. Raises InvalidRequest or ContextLengthExceeded."""
    for ids in prompts:
        if not ids:
            raise InvalidRequest("prompt: it has no tokens", param="prompt")
    longest = max(len(ids) for ids in prompts)
    if longest >= limit:
        raise ContextLengthExceeded(
            f"the prompt has {longest} tokens and leaves no room for an answer: prompt and answer together may have {limit}", param="prompt"
        )
    if asked is None:
        return limit - longest
    if longest + asked > limit:
        raise ContextLengthExceeded(
            f"the prompt has {longest} tokens and max_tokens asks for {asked}, {longest + asked} in all: "
            f"prompt and answer together may have {limit}",
            param="max_tokens",
        )
    return asked


def unknown_model(name: str) -> ModelNotFound:
    return ModelNotFound(f"the model {name[:100]!r} is not served here", param="model")


async def read_body(scope: Scope, receive: Any, limit: int) -> bytes:
    """A JSON body of at most `limit` bytes. Raises BodyTooLarge, WrongMediaType or Disconnected."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise BodyTooLarge(f"the body has {int(value)} bytes, expected at most {limit}")
        if name == b"content-encoding" and value.lower() != b"identity":
            raise WrongMediaType("content-encoding: a compressed body is not accepted")
        if name == b"content-type" and not value.lower().startswith(b"application/json"):
            raise WrongMediaType("content-type: expected application/json")
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        body += message.get("body", b"")
        if len(body) > limit:
            raise BodyTooLarge(f"the body has more than {limit} bytes")
        if not message.get("more_body", False):
            refuse_shape(body)
            return bytes(body)
