"""OpenAI JSON to a validated request. Every field is honoured or refused; `null` is the same as absent.

The structs are the parameter table: type and range of each field we honour. `REFUSED` lists the fields that would change the meaning of
the answer and are not honoured, with the values that ask for nothing; `HARMLESS` are the clients' extras.
"""

from __future__ import annotations

import random
import re
from array import array
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta

from headrace.errors import InvalidRequest, UnsupportedParameter
from headrace.request import SamplingParams
from headrace.server import structured

MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_SAMPLES = 128
MAX_PROMPTS = 256
MAX_STOP_IDS = 64
MAX_ALLOWED_IDS = 1 << 14
MAX_BIASES = 1024
MAX_CHAT_LOGPROBS = MAX_PROMPT_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
MAX_MESSAGES = 4096
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

Short = Annotated[str, Meta(max_length=1024)]
Unit = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]

HARMLESS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store", "prediction")

# field -> values that change nothing (beside null)
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
REFUSED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True, False),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding of OpenAI's own streams; none is sent


class Basic(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every endpoint that generates honours under the same name and within the same bounds."""

    model: Short | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Unit | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Short | None = None
    deadline_ms: Annotated[float, Meta(gt=0, le=86_400_000)] | None = None  # from when the request arrived


def basic(asked: Basic) -> dict[str, Any]:
    """The fields of `asked` that another endpoint's request takes as they are."""
    return {name: getattr(asked, name) for name in Basic.__struct_fields__}


class Common(Basic, kw_only=True):
    """The fields that chat and completions honour."""

    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_IDS)] | None = None
    allowed_token_ids: Annotated[list[int], Meta(min_length=1, max_length=MAX_ALLOWED_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Count | None = None
    service_tier: Literal["auto", "default", "flex", "batch"] | None = None  # flex and batch fill what others leave idle
    cache_prompt: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_PROMPT_LOGPROBS)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    response_format: structured.ResponseFormat | None = None
    structured_outputs: structured.StructuredOutputs | None = None
    guided_json: structured.Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: Short
    text: str | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: Short | None = None
    refusal: str | None = None
    tool_call_id: Short | None = None
    tool_calls: Annotated[list[structured.ToolCall], Meta(max_length=structured.MAX_TOOLS)] | None = None
    function_call: Any = None
    audio: Any = None


class ChatRequest(Common, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_CHAT_LOGPROBS)] | None = None
    tools: list[structured.ToolSpec] | None = None
    tool_choice: Literal["none", "auto", "required"] | structured.NamedTool | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None


class Limits(msgspec.Struct, frozen=True):
    """What the loaded model and the settings allow."""

    vocab_size: int
    context_length: int  # tokens, prompt and answer together; never more than the KV pool holds
    has_priorities: bool = False


def with_other_fields(base: type[msgspec.Struct], refused: dict[str, tuple[Any, ...]]) -> type[msgspec.Struct]:
    """`base` with a field for everything we know and do not honour, so that the decoder tells them from typing errors."""
    fields = [(name, Any, UNSET) for name in (*HARMLESS, *refused) if name not in base.__struct_fields__]
    return msgspec.defstruct(base.__name__, fields, bases=(base,), kw_only=True, forbid_unknown_fields=True)


_chat_refused = REFUSED
_completion_refused = REFUSED | REFUSED_IN_COMPLETIONS
_chat_decoder = msgspec.json.Decoder(with_other_fields(ChatRequest, _chat_refused))
_completion_decoder = msgspec.json.Decoder(with_other_fields(CompletionRequest, _completion_refused))


def parse_chat(body: bytes) -> ChatRequest:
    """Raises InvalidRequest or UnsupportedParameter."""
    request: Any = decode_request(_chat_decoder, body, _chat_refused)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs: only with logprobs set to true", param="top_logprobs")
    if request.max_completion_tokens is not None and request.max_tokens is not None and request.max_completion_tokens != request.max_tokens:
        raise InvalidRequest("max_completion_tokens and max_tokens disagree: give one of them", param="max_completion_tokens")
    return request  # type: ignore[no-any-return]


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises InvalidRequest or UnsupportedParameter."""
    return decode_request(_completion_decoder, body, _completion_refused)  # type: ignore[no-any-return]


_AT = re.compile(r" - at `(?:key` in `)?\$\.?(.*?)`$")


def decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """A body as the decoder's type. Raises InvalidRequest or UnsupportedParameter, with the field first."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest("the body is not valid JSON in UTF-8", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


def decode_request(decoder: msgspec.json.Decoder[Any], body: bytes, refused: dict[str, tuple[Any, ...]]) -> Any:
    """A generation request's body, whose decoder `with_other_fields` made. Raises as `decode`."""
    request = decode(decoder, body)
    for name, neutral in refused.items():
        value = getattr(request, name)
        if value is not UNSET and value is not None and not any(type(value) is type(each) and value == each for each in neutral):
            raise UnsupportedParameter(f"{name}: not supported by this server", param=name)
    if getattr(request, "prompt_logprobs", None) is not None and request.stream:
        raise InvalidRequest("prompt_logprobs: not together with stream", param="prompt_logprobs")
    if getattr(request, "stream_options", None) is not None and not request.stream:
        raise InvalidRequest("stream_options: only with stream set to true", param="stream_options")
    return request


def _explain(text: str) -> InvalidRequest | UnsupportedParameter:
    """msgspec's message as ours: the field first."""
    found = _AT.search(text)
    path = found[1].replace("[...]", "") if found else None
    said = text[: found.start()] if found else text
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", said, re.DOTALL)
    if unknown:
        name = f"{path}.{unknown[1]}" if path else unknown[1]
        return UnsupportedParameter(f"{name[:100]}: not a parameter of this server", param=name[:100])
    missing = re.fullmatch(r"Object missing required field `(.*)`", said)
    if missing:
        name = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"{name}: required", param=name, code="missing_required_parameter")
    said = said[:1].lower() + said[1:]
    return InvalidRequest(f"{path}: {said}" if path else f"the body: {said}", param=path or None)


def _check_message(where: str, message: Message) -> None:
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls: only in messages of the assistant", param=f"{where}.tool_calls")
    for name in ("function_call", "audio"):
        value = getattr(message, name)
        if value is not None and value != []:
            raise UnsupportedParameter(f"{where}.{name}: not supported by this server", param=f"{where}.{name}")
    if isinstance(message.content, list):
        for i, part in enumerate(message.content):
            at = f"{where}.content[{i}]"
            if part.type != "text":
                raise UnsupportedParameter(f"{at}: only text parts are supported, got {part.type[:40]!r}", param=f"{at}.type")
            if part.text is None:
                raise InvalidRequest(f"{at}.text: required", param=f"{at}.text")
    elif message.content is None and message.role != "assistant":
        raise InvalidRequest(f"{where}.content: required for the role {message.role}", param=f"{where}.content")


def message_rows(given: list[Message]) -> list[dict[str, Any]]:
    """A conversation as chat templates take it. Raises InvalidRequest or UnsupportedParameter."""
    messages: list[dict[str, Any]] = []
    for i, message in enumerate(given):
        _check_message(f"messages[{i}]", message)
        content = message.content
        text = content if isinstance(content, str) else "".join(part.text or "" for part in content or ())
        if content is None and message.refusal is not None:
            text = message.refusal
        row: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
        if message.name is not None:
            row["name"] = message.name
        if message.tool_call_id is not None:
            row["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            row["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}
                for call in message.tool_calls
            ]
        messages.append(row)
    return messages


def completion_prompts(request: CompletionRequest, vocab_size: int) -> list[str | list[int]]:
    """One entry a prompt: text, or ids that are checked. Raises InvalidRequest."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt: expected text or token ids, got an empty list", param="prompt")
    kinds = {type(each) for each in prompt}
    if len(kinds) > 1:
        raise InvalidRequest("prompt: expected one kind, got texts, ids and lists mixed", param="prompt")
    if kinds == {int}:
        return [_checked_ids(prompt, vocab_size, "prompt")]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: expected at most {MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt")
    if kinds == {str}:
        return list(prompt)  # type: ignore[arg-type]
    return [_checked_ids(each, vocab_size, f"prompt[{i}]") for i, each in enumerate(prompt)]


def _checked_ids(ids: Any, vocab_size: int, where: str) -> list[int]:
    if not ids:
        raise InvalidRequest(f"{where}: expected at least one token id", param="prompt")
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequest(f"{where}: expected token ids from 0 to {vocab_size - 1}, got {bad}", param="prompt")
    return list(ids)


def stop_strings(request: Common) -> tuple[str, ...]:
    stop = request.stop
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for each in stops:
        if not 0 < len(each) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"stop: expected 1 to {MAX_STOP_CHARS} characters each, got {len(each)}", param="stop")
    return stops


def draw_seed(request: Common) -> int:
    """The request's seed, or one of our own; as 64 bits without sign."""
    seed = request.seed
    return (random.getrandbits(63) if seed is None else seed) & (2**64 - 1)


def num_samples(request: Common) -> int:
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        raise UnsupportedParameter("best_of: only the value of n is supported", param="best_of")
    return n


def sampling_params(
    request: Common, limits: Limits, max_tokens: int, logprobs: int, grammar: str = "", *, embed: bool = False
) -> SamplingParams:
    """Everything about sampling, with token ids checked against the vocabulary. Raises RequestError."""
    bias: list[tuple[int, float]] = []
    if request.logit_bias:
        if len(request.logit_bias) > MAX_BIASES:
            raise InvalidRequest(f"logit_bias: expected at most {MAX_BIASES} entries, got {len(request.logit_bias)}", param="logit_bias")
        seen: dict[int, float] = {}
        for key, value in request.logit_bias.items():
            token = int(key) if key.isascii() and key.isdigit() and len(key) < 11 else -1
            if not 0 <= token < limits.vocab_size:
                raise InvalidRequest(
                    f"logit_bias: expected token ids from 0 to {limits.vocab_size - 1} as keys, got {key[:40]!r}", param="logit_bias"
                )
            seen[token] = value
        bias = sorted(seen.items())
    stops, allowed = (_distinct_ids(name, getattr(request, name), limits) for name in ("stop_token_ids", "allowed_token_ids"))
    if request.priority and not limits.has_priorities:
        raise UnsupportedParameter("priority: only under --policy priority", param="priority")
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens: expected at most max_tokens ({max_tokens}), got {min_tokens}", param="min_tokens")
    default = SamplingParams(max_tokens=max_tokens)

    def given(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else value

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=given(request.temperature, default.temperature),
        top_k=max(0, request.top_k or 0),
        top_p=given(request.top_p, default.top_p),
        min_p=given(request.min_p, default.min_p),
        presence_penalty=given(request.presence_penalty, default.presence_penalty),
        frequency_penalty=given(request.frequency_penalty, default.frequency_penalty),
        repetition_penalty=given(request.repetition_penalty, default.repetition_penalty),
        logit_bias=tuple(bias),
        logprobs=logprobs,
        min_tokens=min_tokens,
        stop_token_ids=tuple(stops),
        ignore_eos=bool(request.ignore_eos),
        grammar=grammar,
        prompt_logprobs=max(prompt_logprobs(request), logprobs if echo(request) else -1),
        embed=embed,
        allowed_token_ids=array("i", allowed).tobytes(),
    )


def echo(request: Common) -> bool:
    """The answer begins with its prompt."""
    return isinstance(request, CompletionRequest) and bool(request.echo)


def prompt_logprobs(request: Common) -> int:
    """-1: not asked for."""
    return -1 if request.prompt_logprobs is None else request.prompt_logprobs


def _distinct_ids(name: str, ids: list[int] | None, limits: Limits) -> list[int]:
    """Ids that are checked, ascending. Raises InvalidRequest."""
    for token in ids or ():
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequest(f"{name}: expected token ids from 0 to {limits.vocab_size - 1}, got {token}", param=name)
    return sorted(set(ids or ()))
