"""What an answer must look like: `response_format` and its kin, `tools` and `tool_choice`. From the fields of a request to a grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from headrace.errors import InvalidRequest, QueueFull, UnsupportedParameter
from headrace.server.calls import Calls
from headrace.server.codec import TextCodec
from headrace.text.tools import Function, calls_grammar
from headrace.threads import deep_pool

MAX_TOOLS = 128
MAX_PENDING = 64  # grammars that wait to be checked
MAX_CHECK_S = 5.0
MAX_KNOWN = 4096  # digests of good grammars

Schema = dict[str, Any] | bool
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None  # the schema is followed either way


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One of these."""

    json: Schema | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class FunctionSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionSpec


class FunctionName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Name


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Name
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Asked(Protocol):
    """The fields of a request that say what its answer must look like."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: Schema | str | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    ignore_eos: bool | None


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a chat that may call some. `forced`: the answer is calls; `functions`: those it may call."""

    specs: list[dict[str, Any]]  # as chat templates take them
    functions: tuple[Function, ...]
    forced: bool
    parallel: bool
    strict: bool


def tools_of(tools: Sequence[ToolSpec] | None, choice: str | NamedTool | None, parallel: bool | None) -> Tools | None:
    """None: nothing may be called. Raises InvalidRequest."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice: only with tools", param="tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: expected at most {MAX_TOOLS}, got {len(tools)}", param="tools")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"tools: two of them are called {twice!r}", param="tools")
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise InvalidRequest(f"tool_choice: no tool is called {choice.function.name!r}", param="tool_choice")
        names = [choice.function.name]
    elif choice == "none":
        return None
    functions = tuple(_function(tool.function) for tool in tools if tool.function.name in names)
    return Tools(
        [_spec(tool.function) for tool in tools],
        functions,
        forced=choice == "required" or isinstance(choice, NamedTool),
        parallel=parallel is not False and not isinstance(choice, NamedTool),
        strict=any(tool.function.strict for tool in tools),
    )


def _function(spec: FunctionSpec) -> Function:
    return Function(spec.name, spec.parameters or {"type": "object"})


def _spec(spec: FunctionSpec) -> dict[str, Any]:
    function = {
        "name": spec.name,
        "description": spec.description or "",
        "parameters": spec.parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A grammar to be made, off the event loop; `param` is the field it comes from, `schema` is set where it is one of JSON."""

    param: str
    make: Callable[[], str]
    schema: Schema | None = None


def wanted_of(request: Asked) -> Wanted | None:
    """What the format fields ask for. Raises InvalidRequest."""
    found = []
    form = request.response_format
    if form is not None and form.type == "json_object":
        found.append(_schema("response_format", {"type": "object"}))
    elif form is not None and form.type == "json_schema":
        at = "response_format.json_schema"
        if form.json_schema is None or form.json_schema.schema is None:
            at = at if form.json_schema is None else f"{at}.schema"
            raise InvalidRequest(f"{at}: required", param=at, code="missing_required_parameter")
        found.append(_schema(f"{at}.schema", form.json_schema.schema))
    outputs = request.structured_outputs or StructuredOutputs()
    for kind in ("json", "regex", "choice", "grammar"):
        for param, value in (
            (f"structured_outputs.{kind}", getattr(outputs, kind)),
            (f"guided_{kind}", getattr(request, f"guided_{kind}")),
        ):
            if value is not None:
                found.append(_of_kind(kind, param, value))
    if outputs.json_object:
        found.append(_schema("structured_outputs.json_object", {"type": "object"}))
    if len(found) > 1:
        raise InvalidRequest(f"{found[1].param}: not together with {found[0].param}", param=found[1].param)
    if found and request.ignore_eos:
        raise InvalidRequest(f"ignore_eos: not together with {found[0].param}, whose end is the answer's", param="ignore_eos")
    return found[0] if found else None


def _schema(param: str, schema: Schema) -> Wanted:
    def make() -> str:
        from headrace.text.grammar import schema_grammar

        return schema_grammar(schema)

    return Wanted(param, make, schema)


def _of_kind(kind: str, param: str, value: Any) -> Wanted:
    if kind == "json":
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value, type=Schema)
            except msgspec.MsgspecError:
                raise InvalidRequest(f"{param}: expected a JSON schema", param=param) from None
        return _schema(param, value)

    def make() -> str:
        from headrace.text import grammar

        return {"regex": grammar.regex_grammar, "choice": grammar.choice_grammar, "grammar": grammar.lark_grammar}[kind](value)

    return Wanted(param, make)


def wanted_calls(tools: Tools, wanted: Wanted | None, codec: TextCodec) -> Wanted | None:
    """The grammar of an answer that may or must call tools. Raises UnsupportedParameter."""
    if not tools.forced:
        if wanted is not None and wanted.schema is None:
            raise UnsupportedParameter(f"{wanted.param}: not together with tools that may be called", param=wanted.param)
        if wanted is None and not tools.strict:
            return None

    def make() -> str:
        from headrace.text.grammar import tools_grammar
        from headrace.text.json_grammar import json_schema

        schema = wanted.schema if wanted is not None else None
        instead = None if tools.forced else "" if schema is None else json_schema(schema)
        return tools_grammar(calls_grammar(codec.tool_format, tools.functions, codec.control, parallel=tools.parallel, instead=instead))

    return Wanted("tools" if wanted is None else wanted.param, make)


def other_texts(messages: Sequence[dict[str, Any]], specs: Sequence[dict[str, Any]] | None) -> list[str]:
    """What a prompt is made of beside the contents of its messages: calls and tools."""
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
    return calls + ([msgspec.json.encode(specs).decode()] if specs else [])


def calls_of(tools: Tools, codec: TextCodec) -> Calls:
    return Calls(codec.tool_format, frozenset(function.name for function in tools.functions), tools.parallel)


class GrammarChecks:
    """Makes grammars and finds out whether they are any good, on one thread, for a bounded number of requests at a time."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._pending = 0
        self._known: dict[bytes, None] = {}

    async def grammar(self, wanted: Wanted) -> str:
        """Raises InvalidRequest naming the field, or QueueFull."""
        if self._pending >= MAX_PENDING:
            raise QueueFull("too many grammars are waiting to be compiled")
        if self._pool is None:
            self._pool = deep_pool(1, "headrace-check")
        loop = asyncio.get_running_loop()
        self._pending += 1
        future = self._pool.submit(self._make, wanted)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), MAX_CHECK_S)
        except TimeoutError:
            raise InvalidRequest(f"{wanted.param}: it took longer than {MAX_CHECK_S:g} s to compile", param=wanted.param) from None
        except InvalidRequest as error:
            raise InvalidRequest(f"{wanted.param}: {error.message}", param=wanted.param) from None

    def _done(self) -> None:
        self._pending -= 1

    def _make(self, wanted: Wanted) -> str:
        from headrace.text.grammar import check

        grammar = wanted.make()
        digest = blake2b(grammar.encode(), digest_size=16).digest()
        if digest not in self._known:
            check(grammar)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[digest] = None
        return grammar
