"""Which control tokens of a rendered conversation come from the template, and which are only spelled in what a client wrote.

The text is rendered twice. The second time, in every string the client wrote, each character that occurs in some control token has a
stand-in from a private plane of Unicode, so that no character of the client's can be part of a control token, neither alone nor joined
with the template's text. Control tokens found in that rendering are the template's own. The first rendering stays the text: templates may
trim, test or cut what they are given, and get to see it as it is.

The two renderings are compared. When they show the same control tokens at the same places, or differ only in stand-ins, those places are
trusted. A template that reacts to its input so that they differ in more is trusted only if nothing the client wrote can matter;
otherwise the request is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from headrace.errors import InvalidRequest
from headrace.text.chat_template import ChatTemplate, Message, plain_messages

Span = tuple[int, int, int]

_PLANE = 0x100000  # stand-ins: U+100000 and up
_ROLES = frozenset({"system", "user", "assistant", "tool", "developer", "function", "ipython"})
_TYPES = frozenset({"text", "function", "object", "array", "string", "number", "integer", "boolean", "null"})


def trusted_spans(
    template: ChatTemplate,
    find_control: Callable[[str], list[Span]],
    control: Mapping[str, int],
    messages: Sequence[Message],
    *,
    tools: Sequence[Message] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
    now: datetime | None = None,
) -> tuple[str, list[Span]]:
    """The rendered text and the spans of its control tokens that the template wrote. Raises InvalidRequest (see Tokenizer.encode_chat)."""
    messages = plain_messages(template, messages)
    moment = now or datetime.now()

    def render(change: Callable[[str], str] | None) -> str:
        disguise = _Disguise(change, template.words) if change is not None else None
        return template.render(
            [disguise.message(message) for message in messages] if disguise else messages,
            tools=disguise.values(tools) if disguise and tools else tools,
            add_generation_prompt=add_generation_prompt,
            variables=disguise.mapping(variables) if disguise and variables else variables,
            now=moment,
        )

    text = render(None)
    found = find_control(text)
    if not found:
        return text, []
    table = _stand_ins(control)
    try:
        twin = render(lambda string: string.translate(table))
    except InvalidRequest:  # it looks into what it is given
        twin = None
    if twin is not None:
        own = find_control(twin)
        if own == found or _differ_in_stand_ins_only(text, twin):
            return text, own
    # The template reacts to the strings themselves. Disturb them less: only where they spell a whole control token.
    strings = _strings(messages, tools, variables)
    spelled = any(find_control(string) for string in strings)
    same_kinds = twin is not None and _ids(own) == _ids(found)
    if not spelled and (same_kinds or not any(_punctuation(table) & set(string) for string in strings)):
        return text, found
    if spelled and twin is not None:

        def break_up(string: str) -> str:
            parts, position = [], 0
            for start, stop, _ in find_control(string):
                parts += [string[position:start], string[start:stop].translate(table)]
                position = stop
            return "".join([*parts, string[position:]])

        broken = render(break_up)
        rest = find_control(broken)
        if _ids(rest) == _ids(own) and _differ_in_stand_ins_only(text, broken):
            return text, rest
    raise InvalidRequest(
        "the messages contain text that looks like this model's control tokens, and its chat template changes it in a way that cannot be "
        "told from the template's own control tokens; rephrase the text",
        param="messages",
    )


def _ids(spans: Sequence[Span]) -> list[int]:
    return [token_id for _, _, token_id in spans]


def _stand_ins(control: Mapping[str, int]) -> dict[int, str]:
    alphabet = sorted({character for token in control for character in token if not character.isspace()})
    return {ord(character): chr(_PLANE + i) for i, character in enumerate(alphabet)}


def _punctuation(table: Mapping[int, str]) -> set[str]:
    return {chr(code) for code in table if not chr(code).isalnum()}


def _differ_in_stand_ins_only(text: str, other: str) -> bool:
    return len(text) == len(other) and all(b == a or ord(b) >= _PLANE for a, b in zip(text, other, strict=True))


def _strings(*values: Any) -> list[str]:
    """All strings in nested values, keys included."""
    found: list[str] = []
    stack = list(values)
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, Mapping):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            stack += value
    return found


class _Disguise:
    """Applies a change to everything a client can write, leaving what the template steers by: roles, and keys the template names."""

    def __init__(self, change: Callable[[str], str], words: frozenset[str]) -> None:
        self.change = change
        self.words = words

    def message(self, message: Message) -> dict[str, Any]:
        changed = self.mapping(message)
        if message.get("role") in _ROLES:
            changed["role"] = message["role"]
        return changed

    def mapping(self, value: Mapping[str, Any]) -> dict[str, Any]:
        return {self._key(key): item if self._steers(key, item) else self.values(item) for key, item in value.items()}

    def values(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.change(value)
        if isinstance(value, Mapping):
            return self.mapping(value)
        if isinstance(value, list | tuple):
            return [self.values(item) for item in value]
        return value

    def _key(self, key: Any) -> Any:
        return key if not isinstance(key, str) or self._known(key) else self.change(key)

    def _steers(self, key: Any, item: Any) -> bool:
        # `type` names a kind of part or tool, or a type of JSON schema: the template compares it with words of its own.
        return key == "type" and isinstance(item, str) and (item in _TYPES or self._known(item))

    def _known(self, word: str) -> bool:
        return word in self.words and word.isidentifier()  # a constant of the template may also be a control token
