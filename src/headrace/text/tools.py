"""How models write calls of functions: the formats of the families, the grammar of each, and a prompt for templates that know no tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.text.json_grammar import json_schema
from headrace.text.literals import literal_pattern

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Function:
    """What a client says of one function. `parameters` is a JSON schema."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`before` all `opening` {"name": ..., `key`: {...}} `closing`, `separator` between calls, `after` all.

    Where `key` is empty a call is its name, `[ARGS]` and the arguments.
    """

    name: str
    marker: str  # what tells that calls follow; none: an answer that begins with a brace is calls
    before: str = ""
    opening: str = ""
    closing: str = ""
    separator: str = ", "
    after: str = ""
    key: str = "arguments"
    id_chars: int = 24  # of a call's id, behind "call_"; or of all of it, where templates demand nine

    @property
    def tokens(self) -> tuple[str, ...]:
        """What is to be seen in the text even where it is a control token."""
        return (self.marker, "[ARGS]", "[CALL_ID]") if self.marker == "[TOOL_CALLS]" else (self.marker, self.end_marker)

    @property
    def end_marker(self) -> str:
        return "</tool_call>" if self.marker == "<tool_call>" else ""


FORMATS = {
    each.name: each
    for each in (
        ToolFormat("hermes", "<tool_call>", opening="<tool_call>\n", closing="\n</tool_call>", separator="\n"),
        ToolFormat("smollm", "<tool_call>", before="<tool_call>[", after="]</tool_call>"),
        ToolFormat("llama3", "<|python_tag|>", key="parameters", separator="; "),
        ToolFormat("mistral", "[TOOL_CALLS]", before="[TOOL_CALLS][", after="]", id_chars=9),
        ToolFormat("mistral-args", "[TOOL_CALLS]", opening="[TOOL_CALLS]", separator="", key="", id_chars=9),
    )
}


def choose_format(sources: Sequence[str], takes_tools: bool) -> ToolFormat:
    """The format a chat template shows its model; that of `tools_prompt` where it shows none."""
    text = "\n".join(sources)
    if not takes_tools:
        return FORMATS["smollm"]
    if "[TOOL_CALLS]" in text:
        return FORMATS["mistral-args" if "[ARGS]" in text else "mistral"]
    if "<tool_call>" in text:
        return FORMATS["smollm" if "<tool_call>[" in text else "hermes"]
    if "<|python_tag|>" in text or "<|start_header_id|>" in text:
        return FORMATS["llama3"]
    return FORMATS["hermes"]


def calls_grammar(
    fmt: ToolFormat,
    functions: Sequence[Function],
    control: Mapping[str, int],
    *,
    parallel: bool,
    instead: str | None = None,
) -> str:
    """A Lark grammar of one call, or of several where `parallel`. Raises InvalidRequest for a schema that is too long.

    `instead` is what may be written in place of calls: a JSON schema, or "" for any text, which calls may also follow.
    """
    rules = []
    for i, function in enumerate(functions):
        name = json.dumps(function.name)
        head = f'{{"name": {name}, "{fmt.key}": ' if fmt.key else f"{function.name}[ARGS]"
        rules.append(_sequence(control, f"call_{i}: ", head, f"@args_{i}", "}" if fmt.key else ""))
        rules.append(f"args_{i}: %json {json_schema(dict(function.parameters))}")
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    whole = _calls(fmt, control, parallel)
    if instead is None:
        start = ["start: calls", f"calls: {whole}"]
    elif instead:
        start = ["start: calls | text", f"calls: {whole}", f"text: %json {instead}"]
    elif not (fmt.before or fmt.opening):  # calls are told from text by how an answer begins
        start = ["start: calls | TEXT?", f"calls: {whole}", r"TEXT: /(?s:[^{ \n\t].*)/"]
    elif fmt.marker in control:
        start = ["start: TEXT? calls?", f"calls: {whole}", "TEXT: /(?s:.+)/"]
    else:  # text ends where the marker does: what comes behind it is a call
        marker = re.escape(fmt.marker)
        start = [
            "start: (marked calls)? TEXT",
            f"marked[suffix={json.dumps(fmt.marker)}]: /(?s:.*)/",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*){marker}(?s:.*)/",
            f"calls: {_calls(fmt, control, parallel, skipped=fmt.marker)}",
        ]
    return "\n".join([*start, *rules])


def _calls(fmt: ToolFormat, control: Mapping[str, int], parallel: bool, skipped: str = "") -> str:
    """The right side of a rule. `skipped` has been written already."""
    one = (fmt.before + fmt.opening).removeprefix(skipped), "@call", fmt.closing
    more = f" ({_sequence(control, '', fmt.separator + fmt.opening, '@call', fmt.closing)})*" if parallel else ""
    return _sequence(control, "", *one) + more + _sequence(control, " " if fmt.after else "", fmt.after)


def _sequence(control: Mapping[str, int], start: str, *parts: str) -> str:
    """Texts as literals, control tokens in them as such; @ marks the name of a rule."""
    return start + " ".join(part[1:] if part.startswith("@") else literal(part, control) for part in parts if part)


def literal(text: str, control: Mapping[str, int]) -> str:
    """A text in a Lark grammar; what is a control token in it, as that token."""
    pattern = literal_pattern(control)
    position, parts = 0, []
    for match in pattern.finditer(text) if pattern is not None else ():
        if match.start() > position:
            parts.append(json.dumps(text[position : match.start()]))
        parts.append(f"<[{control[match.group()]}]>")
        position = match.end()
    if position < len(text):
        parts.append(json.dumps(text[position:]))
    return " ".join(parts)


def spell_calls(fmt: ToolFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls of an earlier answer as the model would have written them."""
    texts = []
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        if fmt.key:
            texts.append(f'{fmt.opening}{{"name": {json.dumps(function["name"])}, "{fmt.key}": {text}}}{fmt.closing}')
        else:
            texts.append(f"{fmt.opening}{function['name']}[ARGS]{text}{fmt.closing}")
    return fmt.before + fmt.separator.join(texts) + fmt.after


def tools_prompt(fmt: ToolFormat, tools: Sequence[Message]) -> str:
    """What tells a model of its functions where its chat template does not."""
    example = spell_calls(fmt, [{"function": {"name": "function_name", "arguments": {"parameter": "value"}}}])
    described = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return (
        f"You can call these functions:\n<tools>{described}</tools>\n"
        f"To call one or more of them, write nothing but:\n{example}\n"
        "If none of them helps, answer in plain text."
    )


def plain_tool_messages(
    fmt: ToolFormat, messages: Sequence[Message], tools: Sequence[Message] | None, *, knows_calls: bool, takes_system: bool
) -> list[Message]:
    """Messages for a template that knows no tools: the system message, or else the first, describes them; earlier calls are text."""
    found: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls and not knows_calls:
            text = "\n".join(filter(None, (message.get("content") or "", spell_calls(fmt, calls))))
            message = {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": text}
        found.append(message)
    if tools:
        prompt = tools_prompt(fmt, tools)
        first = found[0] if found else {}
        content = first.get("content") or ""
        if first.get("role") == "system":
            found[0] = {**first, "content": f"{content}\n\n{prompt}"}
        elif takes_system or not found or not isinstance(content, str):
            found.insert(0, {"role": "system", "content": prompt})
        else:
            found[0] = {**first, "content": f"{prompt}\n\n{content}"}
    return found
