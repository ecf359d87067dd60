"""Calls of functions in one sample's answer, as the chat endpoint tells them: deltas of a stream, and the whole message."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headrace.text.tool_parser import CallParser, CallStart, Text
from headrace.text.tools import ToolFormat

_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Calls:
    """How calls are to be found in an answer."""

    format: ToolFormat
    names: frozenset[str]
    parallel: bool


class SampleCalls:
    """What a sample has called so far. `calls` are as in a message; `content` is the text beside them."""

    __slots__ = ("_format", "_parser", "calls", "content")

    def __init__(self, plan: Calls) -> None:
        self._format = plan.format
        self._parser = CallParser(plan.format, plan.names, parallel=plan.parallel)
        self.calls: list[dict[str, Any]] = []
        self.content = ""

    @property
    def done(self) -> bool:
        """Nothing that follows counts."""
        return self._parser.done

    def add(self, pieces: Iterable[str], *, over: bool) -> list[dict[str, Any]]:
        """The deltas that more text brings; `over`: it was the last."""
        events = [event for piece in pieces for event in self._parser.add(piece)]
        if over:
            events += self._parser.finish()
        deltas: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, Text):
                self.content += event.text
                deltas.append({"content": event.text})
                continue
            if isinstance(event, CallStart):
                function = {"name": event.name, "arguments": ""}
                call = {"id": self._new_id(), "type": "function", "function": function}
                self.calls.append(call)
                told = {"index": len(self.calls) - 1, **call, "function": dict(function)}
            else:
                function = self.calls[-1]["function"]
                function["arguments"] += event.text
                told = {"index": len(self.calls) - 1, "function": {"arguments": event.text}}
            deltas.append({"tool_calls": [told]})
        return deltas

    def message(self) -> dict[str, Any]:
        """The whole answer, when it is over."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.calls:
            message |= {"content": self.content or None, "tool_calls": self.calls}
        return message

    def _new_id(self) -> str:
        chars = self._format.id_chars
        name = "".join(secrets.choice(_ALPHABET) for _ in range(chars))
        return name if chars == 9 else f"call_{name}"
