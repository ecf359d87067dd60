"""Chat templates: what they render, what they are given, and how they fail."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.errors import InvalidRequest, ModelError
from headrace.text import sandbox
from headrace.text.chat_template import ChatTemplate
from tests.chat_templates import CHATML, GEMMA, MISTRAL, NOW, tokenizer_with, user


def render(source: str, *messages: Any, **options: Any) -> str:
    return ChatTemplate(source).render(list(messages), **options)


def test_white_space_filters_and_tags_as_models_expect_them() -> None:
    source = """{% for message in messages %}
    {% if loop.first %}
{{ message | tojson }}
    {% endif %}
    {%- generation %}{{ message.content }}{% endgeneration %}
    {% if message.content == 'stop' %}{% break %}{% endif %}
{% endfor %}
"""
    assert render(source, user("<é>'&"), user("stop"), user("no")) == '{"role": "user", "content": "<é>\'&"}\n<é>\'&stop'
    assert render("{{ [1, {'a': 'é'}] | tojson(indent=2) }}") == json.dumps([1, {"a": "é"}], ensure_ascii=False, indent=2)
    assert render("{{ strftime_now('%d %b %Y') }}", now=NOW) == "04 Mar 2025"
    assert render("{{ messages is iterable }}{{ tools is none }}{{ nothing is defined }}") == "TrueTrueFalse"


def test_special_tokens_and_further_variables() -> None:
    template = ChatTemplate("{{ bos_token }}{% if enable_thinking %}!{% endif %}", special_tokens={"bos_token": "<s>"})
    assert template.variables == {"enable_thinking"}
    assert template.render([]) == "<s>"
    assert template.render([], variables={"enable_thinking": True}) == "<s>!"


@pytest.mark.parametrize("name", ["messages", "tokenize", "add_generation_prompt", "chat_template", "bos_token", "tools", "range", "other"])
def test_variables_cannot_replace_what_is_not_the_clients(name: str) -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages }}{{ range }}", special_tokens={"bos_token": "<s>"})
    with pytest.raises(InvalidRequest, match=name) as caught:
        template.render([], variables={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


def test_what_the_template_raises_reaches_the_client() -> None:
    tokenizer = tokenizer_with(GEMMA)
    with pytest.raises(InvalidRequest, match="System role not supported") as caught:
        tokenizer.encode_chat([{"role": "system", "content": "x"}])
    assert (caught.value.status, caught.value.param) == (400, "messages")
    with pytest.raises(InvalidRequest, match="must alternate"):
        tokenizer_with(MISTRAL).encode_chat([user("a"), user("b")])
    with pytest.raises(InvalidRequest, match="misses something"):
        render("{{ messages[3].content.x }}", user("a"))
    with pytest.raises(InvalidRequest, match="fails"):
        render("{{ 1 + 'a' }}")


def test_content_in_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    tokenizer = tokenizer_with(CHATML)
    assert tokenizer.encode_chat([user(parts)]) == tokenizer.encode_chat([user("one\ntwo")])
    taker = tokenizer_with("{% for m in messages %}{% for part in m.content %}<|im_start|>{{ part.text }}{% endfor %}{% endfor %}")
    assert taker.decode(taker.encode_chat([user(parts)]), skip_special=False) == "<|im_start|>one<|im_start|>two"
    with pytest.raises(InvalidRequest, match="image_url") as caught:
        tokenizer.encode_chat([user([{"type": "image_url", "image_url": {"url": "x"}}])])
    assert caught.value.param == "messages.0.content"
    assert tokenizer.encode_chat([user(None)]) == tokenizer.encode_chat([user("")])


def test_arguments_of_tool_calls_are_objects_for_the_template() -> None:
    tokenizer = tokenizer_with(
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ids = tokenizer.encode_chat([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert tokenizer.decode(ids) == '{"a": 1}'


def test_templates_that_do_not_compile_name_file_and_line() -> None:
    with pytest.raises(ModelError, match=r"^m\.gguf: chat_template: line 2"):
        ChatTemplate("\n{% if %}", file="m.gguf")
    with pytest.raises(ModelError, match="at most"):
        ChatTemplate("x" * (sandbox.MAX_TEMPLATE + 1))
