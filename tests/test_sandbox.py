"""What a template may not do: reach out, change what it is given, take more than its budget."""

from __future__ import annotations

import ast
import threading
import time
from pathlib import Path

import pytest

from headrace.errors import InvalidRequest, ModelError
from headrace.text import chat_template, sandbox
from headrace.text.chat_template import ChatTemplate
from tests.chat_templates import user


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__closure__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{x.__class__}'.format_map({'x': messages}) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].pop('role') }}",
        "{{ 'a'.translate({97: 'b'}) }}",
        "{{ (messages | map(attribute='__class__') | list)[0] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ lipsum.__globals__ }}",
        "{{ joiner() }}",
    ],
)  # fmt: skip
def test_attacks_fail_and_change_nothing(source: str) -> None:
    messages = [user("hello")]
    with pytest.raises(InvalidRequest):
        ChatTemplate(source).render(messages)
    assert messages == [user("hello")]


@pytest.mark.parametrize(
    "source",
    [
        "{% include 'x' %}", "{% import 'x' as y %}", "{% from 'x' import y %}", "{% extends 'x' %}", "{{ messages | attr('__class__') }}",
        "{{ 1 | random }}", "{% do messages %}",
    ],
)  # fmt: skip
def test_what_is_not_part_of_the_language(source: str) -> None:
    with pytest.raises(ModelError):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ messages[0].content * 10**8 }}",
        "{{ [0] * 10**8 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = ns.x | replace('a', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] | join(ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | string }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=3) %}{% for i in range(64) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ 10 ** (10 ** 8) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a'.center(10**9) }}",
        "{{ '1'.zfill(10**9) }}",
        "{{ '\t'.expandtabs(10**9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ 'a' | indent(10**9, first=true) }}",
        "{{ messages | slice(10**9) | list }}",
        "{{ [1] | batch(10**9, 'x') | list }}",
        "{{ strftime_now('%999999999d') }}",
        "{{ strftime_now('%d' * 100) }}",
    ],
)  # fmt: skip
def test_no_template_takes_more_than_its_budget(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "budget", lambda: sandbox.budget(seconds=0.3))
    start = time.perf_counter()
    with pytest.raises((InvalidRequest, ModelError)):
        ChatTemplate(source).render([user("hello")])
    assert time.perf_counter() - start < 3


def test_the_budget_is_one_renderings_own() -> None:
    template = ChatTemplate("{% for i in range(1000) %}{{ i }}{% endfor %}")
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(template.render([]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["".join(map(str, range(1000)))] * 4
    for _ in range(50):  # nothing adds up over renderings
        template.render([])


def test_one_function_builds_environments() -> None:
    """Every other use of jinja's environments would be a template outside the sandbox."""
    package = Path(sandbox.__file__).parents[1]
    builders = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if name.endswith("Environment") or name == "Sandbox":
                builders.append(path.relative_to(package).as_posix())
    assert set(builders) == {"text/sandbox.py", "text/chat_template.py"}  # the latter for an annotation
