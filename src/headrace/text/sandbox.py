"""The one place that builds Jinja environments.

A model's template is a program from a stranger. It may read what it is given and build text, and nothing else: no files, no attributes
beginning with an underscore, no change of its input, and no more time or text than a budget allows. Jinja's sandbox gives the first
three. The budget is charged where a template can spend: at every round of a loop, every call of a macro, every value written, every
operator, method and filter that makes text or lists longer.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jinja2.parser import Parser

MAX_TEMPLATE = 1 << 20  # characters of a template; the largest published ones have 20,000
MAX_TEXT = 1 << 25  # characters a rendering may make, all intermediate text counted
MAX_SECONDS = 5.0
MAX_NUMBER = 1 << 16  # a number given to a method or filter: a width, a count
MAX_REPEAT = 1 << 20  # items or characters made by * or by joining and replacing beyond the input's own length
MAX_DIGITS = 512  # bits of a product or power

_LONG_NUMBER = re.compile(r"[0-9]{4}")  # in a format string: a width

FILTERS = frozenset(
    {
        "abs", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "forceescape", "format",
        "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "pprint", "reject",
        "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string", "striptags", "sum", "title",
        "trim", "truncate", "unique", "upper", "wordcount",
    }
)  # fmt: skip


class TemplateLimit(TemplateRuntimeError):
    """The template asked for more time or text than it may have."""


class _Budget:
    __slots__ = ("characters", "deadline", "steps")

    def __init__(self, seconds: float, characters: int) -> None:
        self.deadline = time.monotonic() + seconds
        self.characters = characters
        self.steps = 0

    def charge(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise TemplateLimit("it makes too much text")
        self.steps += 1
        if not self.steps & 63 and time.monotonic() > self.deadline:
            raise TemplateLimit("it takes too long")


_BUDGET: ContextVar[_Budget | None] = ContextVar("budget", default=None)


@contextmanager
def budget(seconds: float = MAX_SECONDS, characters: int = MAX_TEXT) -> Iterator[None]:
    """Everything a template does inside is charged to one budget."""
    token = _BUDGET.set(_Budget(seconds, characters))
    try:
        yield
    finally:
        _BUDGET.reset(token)


def _charge(characters: int) -> None:
    current = _BUDGET.get()
    if current is not None:
        current.charge(characters)


def _weigh(value: Any) -> int:
    """Charge for a value about to become text, nested ones item by item: a list of lists of lists may hold itself a million times."""
    if isinstance(value, str):
        size = len(value)
        _charge(size)
        return size
    _charge(8)
    if isinstance(value, Mapping):
        return sum(_weigh(key) + _weigh(item) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return sum(map(_weigh, value))
    return 8


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise TemplateLimit(f"the number {value} is too large for a method or filter")


def _check_growth(size: int) -> None:
    if size > MAX_REPEAT:
        raise TemplateLimit("it makes too much text")


def _check_format(text: object) -> None:
    if isinstance(text, str) and _LONG_NUMBER.search(text):
        raise TemplateLimit("a width in a format is too large")


def _check_replace(text: Any, old: Any, new: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        _check_growth(text.count(old) * (len(new) - len(old)))


def _check_join(separator: Any, parts: Any) -> None:
    if isinstance(separator, str) and hasattr(parts, "__len__"):
        _check_growth(len(separator) * len(parts))


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # The leading argument is a context where jinja passes one; then the value.
    value_at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        value, rest = args[value_at], args[value_at + 1 :]
        _check_numbers((*rest, *kwargs.values()))
        if name == "replace":
            _check_replace(str(value), *(rest[:2] if len(rest) >= 2 else (None, None)))
        elif name == "join":
            if not hasattr(value, "__len__"):
                value = list(value)
                args = (*args[:value_at], value, *rest)
            _weigh(value)
            _check_join(rest[0] if rest else kwargs.get("d", ""), value)
        elif name == "format":
            _check_format(value)
        elif name == "indent":
            width = rest[0] if rest else kwargs.get("width", 4)
            width = len(width) if isinstance(width, str) else int(width)
            _check_growth(width * (str(value).count("\n") + 1))
        elif name in ("string", "pprint", "escape", "e", "forceescape", "trim", "upper", "lower", "title", "capitalize", "striptags"):
            _weigh(value)
        result = function(*args, **kwargs)
        _charge(len(result) if isinstance(result, str | list) else 1)
        return result

    return guarded


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON as model templates expect it: nothing escaped for HTML, characters as they are."""
    _weigh(value)
    if isinstance(indent, int) and not 0 <= indent <= 16:
        raise TemplateLimit(f"tojson: indent {indent} is too large")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    _charge(len(text))
    return text


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's part for training; for us its body is all there is."""

    tags = {"generation"}  # noqa: RUF012  # as jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Meter(NodeTransformer):
    """Puts a charge at the head of every loop and macro, and `~` under the budget."""

    def _metered(self, node: Any) -> Any:
        self.generic_visit(node)
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        call = nodes.Call(nodes.EnvironmentAttribute("charge"), [nodes.Const(text)], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _metered  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> Any:  # noqa: N802
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("concatenate"), list(node.nodes), [], None, None, lineno=node.lineno)

    def _refused(self, node: Any) -> Any:
        raise TemplateSyntaxError("a model's template cannot load other templates", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refused  # noqa: N815


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as models' templates expect it, under a budget. Build it with `template_environment`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def charge(self, characters: int) -> None:
        _charge(characters)

    def concatenate(self, *parts: Any) -> str:
        for part in parts:
            _weigh(part)
        return "".join(map(str, parts))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Meter().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)  # type: ignore[return-value]

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        # Jinja's own only fails when the result is used.
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is not allowed")

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sized = (str, list, tuple)
        if operator == "+":
            if isinstance(left, sized) and isinstance(right, sized):
                _charge(len(left) + len(right))
        elif operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, sized) and isinstance(count, int):
                    _check_growth(len(value) * max(count, 0))
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_DIGITS:
                raise TemplateLimit("a product is too large")
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_DIGITS:
                raise TemplateLimit("a power is too large")
        else:
            _check_format(left)
            if isinstance(left, str):
                _weigh(right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  # as jinja declares it
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes):
            _check_numbers((*args, *kwargs.values()))
            name = getattr(__obj, "__name__", "")
            if name == "replace" and len(args) >= 2:
                _check_replace(owner, args[0], args[1])
            elif name == "join" and args:
                _check_join(owner, args[0])
            elif name in ("translate", "maketrans"):
                raise SecurityError(f"str.{name} is not allowed")
        elif getattr(__obj, "__name__", "") in ("format", "format_map"):
            _check_numbers((*args, *kwargs.values()))
            for value in (*args, *kwargs.values()):
                _weigh(value)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            _charge(len(result))
        return result


def _written(value: Any) -> Any:
    _weigh(value)
    return value


def template_environment() -> Sandbox:
    """The environment every template is compiled and rendered in."""
    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        finalize=_written,
        extensions=[loopcontrols, _GenerationTag],
    )
    environment.filters = {name: _guarded_filter(name, function) for name, function in environment.filters.items() if name in FILTERS}
    environment.filters["tojson"] = _to_json
    for name in ("lipsum", "cycler", "joiner"):
        environment.globals.pop(name, None)
    return environment
