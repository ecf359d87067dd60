"""Calls of functions: found in answers of every format, written by grammars, told the way the official client reads them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from chat_templates import CHATML, GEMMA, LLAMA3, tokenizer_with, user

from headrace.errors import InvalidRequest
from headrace.text import grammar
from headrace.text.chat_template import ChatTemplate
from headrace.text.tool_parser import CallArguments, CallParser, CallStart, Text
from headrace.text.tools import FORMATS, Function, calls_grammar, choose_format, spell_calls

NAMES = {"weather", "add"}
FUNCTIONS = [
    Function("weather", {"type": "object", "properties": {"city": {"enum": ["Rome", 'Oslo "N"']}}, "required": ["city"]}),
    Function("add", {"type": "object", "properties": {"a": {"enum": list(range(10))}}, "required": ["a"]}),
]
for each in FUNCTIONS:
    each.parameters["additionalProperties"] = False
ROME, ADD = ("weather", {"city": "Rome"}), ("add", {"a": 1})


def parse(fmt: str, pieces: list[str], **more: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Text and calls."""
    parser = CallParser(FORMATS[fmt], NAMES, **more)
    text, calls = "", []
    for event in [event for piece in pieces for event in parser.add(piece)] + parser.finish():
        match event:
            case Text(said):
                text += said
            case CallStart(name):
                calls.append([name, ""])
            case CallArguments(arguments):
                calls[-1][1] += arguments
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


DEEP = {"city": {"name": "x", "arguments": [1, {"b": 2}]}}
ROME_JSON, ADD_JSON = '{"name": "weather", "arguments": {"city": "Rome"}}', '{"name": "add", "arguments": {"a": 1}}'
AS_STRING = r'{"name": "weather", "arguments": "{\"city\": \"Rome\"}"}'
AWKWARD = r'{"name": "weather", "arguments": {"city": "a } \" { ]"}}'
LLAMA_TWO = '{"type": "function", "name": "add", "parameters": {"a": 1}}; {"name": "weather", "parameters": {"city": "Rome"}}'

CASES = [
    ("hermes", f"<tool_call>\n{ROME_JSON}\n</tool_call>", "", [ROME]),
    ("hermes", 'Let me see.\n<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "Let me see.", [ADD]),
    ("hermes", f"<tool_call>\n{ADD_JSON}\n</tool_call>\n<tool_call>\n{AS_STRING}\n</tool_call>\n", "", [ADD, ROME]),
    ("hermes", f"<tool_call>{AWKWARD}</tool_call> Done.", " Done.", [("weather", {"city": 'a } " { ]'})]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": null}', "", [("add", {})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": ' + json.dumps(DEEP) + "}</tool_call>", "", [("weather", DEEP)]),
    ("smollm", f"<tool_call>[{ROME_JSON}, {ADD_JSON}]</tool_call>", "", [ROME, ADD]),
    ("llama3", '{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    ("llama3", f"\n<|python_tag|>{LLAMA_TWO}", "", [ADD, ROME]),
    ("mistral", f"[TOOL_CALLS][{ROME_JSON}, {ADD_JSON}]", "", [ROME, ADD]),
    ("mistral", f"Yes. [TOOL_CALLS] [{ADD_JSON}]\n", "Yes.", [ADD]),
    ("mistral-args", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}', "", [ROME, ADD]),
]

NO_CALLS = [
    ("hermes", "plain text"),
    ("hermes", " \n spaces stay \n\n"),
    ("hermes", "a < b <tool and <tool_"),
    ("hermes", "<tool_call>no JSON</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "rm_rf", "arguments": {}}\n</tool_call>'),
    ("hermes", "<tool_call>{\"a\": 1}</tool_call> and __import__('os').system('true')"),
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", "<tool_call>\n{'name': 'add'}"),
    ("hermes", '<tool_call>{"name": "add'),
    ("llama3", 'The object {"name": "add", "parameters": {}} is JSON.'),
    ("llama3", '{"answer": 42} is it'),
    ("llama3", "  "),
    ("mistral", "[TOOL_CALLS] is a token"),
    ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
    ("smollm", "<tool_call>[1, 2]</tool_call>"),
]


def cuts(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    pieces = []
    while text:
        size = rng.randint(1, 9)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize(("fmt", "answer", "text", "calls"), CASES)
def test_calls_are_found_however_the_text_is_cut(fmt: str, answer: str, text: str, calls: list[Any]) -> None:
    for pieces in ([answer], list(answer), *(cuts(answer, seed) for seed in range(20))):
        assert parse(fmt, pieces) == (text, calls), pieces


@pytest.mark.parametrize(("fmt", "answer"), NO_CALLS)
def test_what_is_no_call_is_text_to_the_last_character(fmt: str, answer: str) -> None:
    for pieces in ([answer], list(answer), *(cuts(answer, seed) for seed in range(20))):
        assert parse(fmt, pieces) == (answer, []), pieces


def test_arguments_are_told_while_they_are_written() -> None:
    parser = CallParser(FORMATS["hermes"], NAMES)
    told = [parser.add(piece) for piece in ("<tool_call>", '{"name": "add",', ' "arguments": ', '{"a', '": 1', "}}")]
    expected = [[], [], [], [CallStart("add"), CallArguments('{"a')], [CallArguments('": 1')], [CallArguments("}")]]
    assert told == expected


def test_an_answer_cut_off_in_a_call_keeps_what_was_told() -> None:
    parser = CallParser(FORMATS["hermes"], NAMES)
    assert parser.add('<tool_call>{"name": "add", "arguments": {"a": 1') == [CallStart("add"), CallArguments('{"a": 1')]
    assert parser.finish() == []


def test_one_call_is_enough_where_calls_are_not_parallel() -> None:
    _, answer, _, _ = CASES[2]
    assert parse("hermes", [answer], parallel=False) == ("", [ADD])
    parser = CallParser(FORMATS["hermes"], NAMES, parallel=False)
    parser.add(answer)
    assert parser.done


def test_a_long_hostile_answer_takes_no_longer_by_the_character() -> None:
    parser = CallParser(FORMATS["hermes"], NAMES)
    text = "<tool_call>" * 2000 + "{" * 20_000 + '"' * 20_000 + "[" * 20_000
    said = [event for start in range(0, len(text), 5) for event in parser.add(text[start : start + 5])] + parser.finish()
    assert "".join(event.text for event in said if isinstance(event, Text)) == text


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (CHATML, "smollm"),
        (CHATML + "{% for tool in tools %}<tool_call>{{ tool }}{% endfor %}", "hermes"),
        (CHATML + "{{ tools }} <tool_call>[{...}]</tool_call>", "smollm"),
        (LLAMA3, "llama3"),
        ("{{ tools }}[TOOL_CALLS]{{ messages }}", "mistral"),
        ("{{ tools }}[TOOL_CALLS]{{ messages }}[ARGS]", "mistral-args"),
        ("{{ tools }}{{ messages }}", "hermes"),
    ],
)
def test_the_format_is_that_of_the_template(source: str, name: str) -> None:
    template = ChatTemplate(source)
    assert choose_format(template.sources, template.takes_tools).name == name


# Written by grammar


def random_text(source: str, control: dict[str, int], seed: int) -> str | None:
    """A random text that a grammar allows; None if it does not end soon."""
    tokenizer = tokenizer_with(CHATML)
    end = tokenizer.eos_ids[0]
    matcher = grammar.Compiler(lambda: tokenizer, tokenizer.vocab_size, [end])(source).copy()
    rng, text = random.Random(seed), b""
    names = {token: name for name, token in tokenizer.control.items()}
    for _ in range(1500):
        mask = matcher.mask()
        allowed = [i for i in range(tokenizer.vocab_size) if mask[i // 8] >> (i % 8) & 1]
        token = end if end in allowed and rng.random() < 0.4 else rng.choice(allowed)
        if token == end:
            return text.decode(errors="replace")
        text += names[token].encode() if token in names else tokenizer.token_bytes(token)
        matcher.accept([token])
    return None


@pytest.mark.parametrize("fmt", list(FORMATS))
@pytest.mark.parametrize("parallel", [False, True])
def test_what_the_grammar_of_calls_allows_is_parsed_as_calls(fmt: str, parallel: bool) -> None:
    source = grammar.tools_grammar(calls_grammar(FORMATS[fmt], FUNCTIONS, {}, parallel=parallel))
    grammar.check(source)
    numbers = set()
    for seed in range(12):
        text = random_text(source, {}, seed)
        if text is None:
            continue
        said, calls = parse(fmt, [text])
        assert not said
        numbers.add(len(calls))
        for name, arguments in calls:
            assert arguments in ([{"city": "Rome"}, {"city": 'Oslo "N"'}] if name == "weather" else [{"a": i} for i in range(10)])
    assert 1 in numbers
    assert (max(numbers) > 1) == parallel


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_text_or_strict_calls(fmt: str) -> None:
    """Under `auto` with strict tools an answer is any text, or right calls: never a call that is wrong."""
    source = grammar.tools_grammar(calls_grammar(FORMATS[fmt], FUNCTIONS, {}, parallel=True, instead=""))
    grammar.check(source)
    tokenizer = tokenizer_with(CHATML)
    compiler = grammar.Compiler(lambda: tokenizer, tokenizer.vocab_size, [tokenizer.eos_ids[0]])
    call = spell_calls(FORMATS[fmt], [{"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}])

    def takes(text: str) -> bool:
        matcher = compiler(source).copy()
        for token in tokenizer.encode(text):
            mask = matcher.mask()
            if not mask[token // 8] >> (token % 8) & 1:
                return False
            matcher.accept([token])
        mask, end = matcher.mask(), tokenizer.eos_ids[0]
        return bool(mask[end // 8] >> (end % 8) & 1)

    assert takes("Just some text.\n")
    assert takes(call)
    assert not takes(call.replace("Rome", "Nome"))
    assert not takes(call.replace("weather", "rm"))


def test_control_tokens_in_a_format_are_tokens_of_the_grammar() -> None:
    text = calls_grammar(FORMATS["mistral"], FUNCTIONS[:1], {"[TOOL_CALLS]": 77}, parallel=False)
    assert 'calls: <[77]> "[" call "]"' in text


# In prompts

TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds <|im_end|>", "parameters": {"type": "object"}}}]


def test_a_template_without_tools_gets_them_in_its_system_message() -> None:
    tokenizer = tokenizer_with(CHATML)
    for messages in ([user("hi")], [{"role": "system", "content": "Be kind."}, user("hi")]):
        text = tokenizer.decode(tokenizer.encode_chat(messages, tools=TOOLS), skip_special=False)
        assert text.index("<|im_start|>system\n") < text.index('"name": "add"') < text.index("<|im_start|>user")
        assert text.count("<|im_start|>system") == 1
    ids = tokenizer.encode_chat([user("hi")], tools=TOOLS)
    assert ids.count(tokenizer.control["<|im_end|>"]) == 2  # what a client wrote is not among them


def test_a_template_without_a_system_role_gets_them_in_the_first_message() -> None:
    tokenizer = tokenizer_with(GEMMA)
    text = tokenizer.decode(tokenizer.encode_chat([user("hi")], tools=TOOLS), skip_special=False)
    assert text.index("<start_of_turn>user\n") < text.index('"name": "add"') < text.index("hi<end_of_turn>")


def test_calls_of_earlier_answers_reach_the_prompt() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        user("hi"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "7"},
    ]
    tokenizer = tokenizer_with(CHATML)
    text = tokenizer.decode(tokenizer.encode_chat(messages), skip_special=False)
    assert '<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call><|im_end|>' in text
    knows = CHATML.replace(
        "{{ message.content }}", "{{ message.content }}{% for c in message.tool_calls or [] %}{{ c.function.arguments.a }}!{% endfor %}"
    )
    assert "assistant\n1!<|im_end|>" in tokenizer_with(knows).decode(tokenizer_with(knows).encode_chat(messages), skip_special=False)


def test_a_schema_in_a_tool_is_bounded() -> None:
    long = Function("f", {"type": "object", "properties": {"x" * 70_000: {}}})
    with pytest.raises(InvalidRequest, match="at most"):
        calls_grammar(FORMATS["hermes"], [long], {}, parallel=True)
