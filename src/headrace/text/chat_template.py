"""A model's chat template: messages in, the text the model was trained to continue out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError, UndefinedError

from headrace.errors import InvalidRequest, ModelError
from headrace.text.sandbox import MAX_TEMPLATE, Sandbox, TemplateLimit, budget, template_environment

Message = Mapping[str, Any]

# What this module sets itself: a client cannot put its own in their place.
RESERVED = frozenset(
    {
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "raise_exception",
        "strftime_now",
    }
)  # fmt: skip

_MAX_DATE_FORMAT = 64  # characters


class _Raised(TemplateError):
    """The template itself refused: `raise_exception`."""


def _raise_exception(message: object) -> None:
    raise _Raised(str(message)[:1000])


class ChatTemplate:
    """One model's template, compiled. `tool_use` is a second one for requests with tools, where the model has two.

    `special_tokens` are names such as bos_token with the tokens' text. Raises ModelError naming file and field when it does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_use: str | None = None,
        special_tokens: Mapping[str, Any] | None = None,
        file: object = "model",
        field: str = "chat_template",
    ) -> None:
        self.sources = [source] if tool_use is None else [source, tool_use]
        self.special_tokens = dict(special_tokens or {})
        self._environment = template_environment()
        self._main = _compile(self._environment, source, file, field)
        self._tool_use = None if tool_use is None else _compile(self._environment, tool_use, file, f"{field} tool_use")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> str:
        """The conversation as text. `variables` are further names the template asks for (`enable_thinking`).

        Raises InvalidRequest: what the template refuses, what it cannot handle, a variable it does not know, a budget exceeded.
        """
        template = self._tool_use if tools and self._tool_use is not None else self._main
        moment = now or datetime.now()

        def strftime_now(form: object) -> str:
            form = str(form)
            if len(form) > _MAX_DATE_FORMAT or re.search(r"[0-9]", form):
                raise TemplateLimit(f"strftime_now: cannot use the format {form[:_MAX_DATE_FORMAT]!r}")
            return moment.strftime(form)

        names: dict[str, Any] = {**self.special_tokens, **self._check_variables(variables or {})}
        names.update(
            messages=messages,
            tools=list(tools) if tools else None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            raise_exception=_raise_exception,
            strftime_now=strftime_now,
        )
        try:
            with budget():
                text: str = template.render(names)
                return text
        except _Raised as error:
            raise InvalidRequest(f"the model's chat template refuses the messages: {error.message}", param="messages") from None
        except SecurityError as error:
            raise InvalidRequest(f"the model's chat template does what is not allowed: {error}", param="messages") from None
        except UndefinedError as error:
            raise InvalidRequest(f"the model's chat template misses something in the messages: {error}", param="messages") from None
        except RecursionError:
            raise InvalidRequest("the model's chat template: it calls itself without end", param="messages") from None
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the model's chat template fails on the messages: {error}", param="messages") from None

    def _check_variables(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        for name in variables:
            if name in RESERVED or name in self.special_tokens or name not in self.variables:
                allowed = ", ".join(sorted(self.variables)) or "none"
                raise InvalidRequest(f"the chat template takes no variable {name!r}; it takes: {allowed}", param="chat_template_kwargs")
        return variables

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names a client may set: those the template reads and nobody else sets."""
        names: set[str] = set()
        for tree in self._trees():
            names |= meta.find_undeclared_variables(tree)
        return frozenset(names - RESERVED - set(self.special_tokens) - set(self._environment.globals))

    @cached_property
    def words(self) -> frozenset[str]:
        """Attribute names and string constants of the template: keys with these names mean something to it."""
        found: set[str] = set()
        for tree in self._trees():
            found |= {node.attr for node in tree.find_all(nodes.Getattr)}
            found |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return frozenset(found)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template writes the tools it is given."""
        return len(self.sources) > 1 or any("tools" in meta.find_undeclared_variables(tree) for tree in self._trees())

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template takes a system message."""
        try:
            return "probe of system" in self.render([{"role": "system", "content": "probe of system"}, {"role": "user", "content": "x"}])
        except InvalidRequest:
            return False

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template writes content given as a list of parts as text, rather than as the list's spelling."""
        probe = "probe of parts"
        try:
            text = self.render([{"role": "user", "content": [{"type": "text", "text": probe}]}])
        except InvalidRequest:
            return False
        return probe in text and f"'{probe}'" not in text and f'"{probe}"' not in text

    def _trees(self) -> list[nodes.Template]:
        return [self._environment.parse(source) for source in self.sources]


def _compile(environment: Sandbox, source: str, file: object, field: str) -> Any:
    if len(source) > MAX_TEMPLATE:
        raise ModelError(file, field, f"{len(source)} characters; at most {MAX_TEMPLATE}")
    try:
        with budget():
            return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ModelError(file, field, f"line {error.lineno}: {error.message}") from None
    except (TemplateError, RecursionError, ArithmeticError, LookupError, TypeError, ValueError, SyntaxError) as error:
        raise ModelError(file, field, f"the template does not compile: {error}") from None


def plain_messages(template: ChatTemplate, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: missing content empty, text parts joined by line feeds unless the template takes parts, arguments
    of tool calls as objects. Raises InvalidRequest for parts that are not text."""
    return [_plain_message(template, message, index) for index, message in enumerate(messages)]


def _plain_message(template: ChatTemplate, message: Message, index: int) -> dict[str, Any]:
    plain = dict(message)
    content = plain.get("content")
    if content is None:
        plain["content"] = ""
    elif not isinstance(content, str):
        texts = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise InvalidRequest(f"content parts of type {kind!r} are not supported; use text", param=f"messages.{index}.content")
            texts.append(part["text"])
        plain["content"] = list(content) if template.takes_parts else "\n".join(texts)
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _plain_call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return {**call, "function": function}
