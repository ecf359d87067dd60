"""Calls of functions found in an answer while it is written, in any of the formats of `tools.py`.

A scanner by hand: one look at each character, nothing is evaluated. What turns out to be no call (not JSON, no name, a function that does
not exist) is given back as text, unless its name and the beginning of its arguments were told already.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import NamedTuple

from headrace.text.tools import ToolFormat

_PUNCTUATION = " \t\r\n,;[]"  # between calls
_MAX_HEAD = 200  # characters of a call's name and id where they stand in front of its arguments
_HEAD = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9_-]{0,64})?(?:\[ARGS\])?")


class Text(NamedTuple):
    text: str


class CallStart(NamedTuple):
    name: str


class CallArguments(NamedTuple):
    """A piece of the arguments of the call that was started last."""

    text: str


Event = Text | CallStart | CallArguments


class CallParser:
    """The events of one answer. They do not depend on how the text is cut into pieces, except for where pieces are cut."""

    def __init__(self, fmt: ToolFormat, names: Collection[str], *, parallel: bool = True) -> None:
        self._format = fmt
        self._names = names
        self._parallel = parallel
        self._buffer = ""  # not looked at yet, or not long enough to be told apart
        self._region = ""  # looked at since the text ended: text again if no call comes of it
        self._call: _Call | None = None
        self._between = False  # where calls may begin and end
        self._said_text = False
        self._events: list[Event] = []
        self.num_calls = 0  # complete ones
        self.done = False  # the only call there may be is complete: nothing after it counts

    def add(self, text: str) -> list[Event]:
        self._buffer += text
        while not self.done and self._buffer and self._step():
            pass
        return self._take()

    def finish(self) -> list[Event]:
        """No more text comes."""
        if not self.done:
            call, self._call = self._call, None
            if call is None or not call.told:
                rest = self._region + (call.raw if call is not None else "") + self._buffer
                if rest.strip(_PUNCTUATION) or not self.num_calls:  # what only separates calls is nothing behind them
                    self._say(rest)
        self._buffer = ""
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _say(self, text: str) -> None:
        if text:
            self._said_text = True
            self._events.append(Text(text))

    # One step: True if something was consumed

    def _step(self) -> bool:
        if self._call is not None:
            return self._in_call(self._call)
        return self._in_between() if self._between else self._in_text()

    def _in_text(self) -> bool:
        buffer, marker = self._buffer, self._format.marker
        if not (self._format.before or self._format.opening) and not self._said_text:
            start = buffer.lstrip()
            if start.startswith("{") or not start:
                self._between = bool(start)
                return self._between
        at = buffer.find(marker)
        if at >= 0:
            said = buffer[:at].rstrip()
            self._say(said)
            self._region, self._buffer, self._between = buffer[len(said) : at] + marker, buffer[at + len(marker) :], True
            return True
        keep = _overlap(buffer, marker)
        said = buffer[: len(buffer) - keep].rstrip()  # white space belongs to the text if more of it follows
        self._say(said)
        self._buffer = buffer[len(said) :]
        return False

    def _in_between(self) -> bool:
        buffer, end = self._buffer, self._format.end_marker
        for marker in (end, self._format.marker):
            if marker and buffer.startswith(marker):
                self._buffer = buffer[len(marker) :]
                if marker == end:
                    self._between = False
                    if self._region.strip(_PUNCTUATION):
                        self._region += end
                    self._leave_region()
                else:
                    self._region += marker
                return True
            if marker.startswith(buffer):
                return False
        first = buffer[0]
        if first in _PUNCTUATION:
            self._region += first
            self._buffer = buffer[1:]
            return True
        if first == "{":
            self._call = _Call(None)
            return True
        if self._format.marker == "[TOOL_CALLS]":  # a name may stand in front of the arguments
            at = buffer.find("{")
            if at < 0 and len(buffer) <= _MAX_HEAD and "\n" not in buffer:
                return False
            found = _HEAD.fullmatch(buffer[:at].strip()) if at >= 0 else None
            if found is not None and found[1] in self._names:
                self._region += buffer[:at]
                self._buffer = buffer[at:]
                self._call = _Call(found[1])
                return True
        self._between = False
        self._leave_region()
        return True

    def _leave_region(self) -> None:
        """What was between calls, or before one that did not come, is text where it is more than punctuation."""
        region, self._region = self._region, ""
        if region.strip(_PUNCTUATION) or not self.num_calls:
            self._say(region)

    def _in_call(self, call: _Call) -> bool:
        used = call.scan(self._buffer)
        self._buffer = self._buffer[used:]
        self._events += call.events(self._names)
        if not call.over:
            return False
        self._call = None
        if call.told:
            self.num_calls += 1
            self._region = ""
            self.done = not self._parallel
        else:
            self._region += call.raw
            self._between = False
            self._leave_region()
        return True


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[len(text) - length :]):
            return length
    return 0


class _Call:
    """One JSON object, scanned as it comes. With `name` all of it is that call's arguments."""

    def __init__(self, name: str | None) -> None:
        self.raw = ""
        self.over = False
        self.told = False  # name and arguments have begun to be told
        self._bare = name is not None
        self._name = name
        self._depth = 0
        self._in_string = self._escaped = False
        self._key = ""
        self._start = -1  # of the key or value at depth 1 in raw
        self._is_value = False
        self._arguments = (0, -1) if self._bare else (-1, -1)  # begin and end in raw, -1: not known
        self._sent = 0  # raw that was told as arguments

    def scan(self, text: str) -> int:
        """Look at text up to the object's end. Returns how much of it was looked at."""
        offset = len(self.raw)
        self.raw += text
        for i in range(offset, len(self.raw)):
            self._look(self.raw[i], i)
            if self.over:
                self.raw = self.raw[: i + 1]
                return i + 1 - offset
        return len(text)

    def _look(self, character: str, i: int) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                if self._depth == 1:
                    self._end_scalar(i + 1)
            return
        if character == '"':
            self._in_string = True
            self._begin(i)
        elif character in "{[":
            self._begin(i)
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._end_scalar(i + 1)
            elif self._depth <= 0:
                self._end_scalar(i)
                self.over = True
                if self._bare:
                    self._arguments = (0, i + 1)
        elif character == ":" and self._depth == 1:
            self._is_value = True
        elif character == "," and self._depth == 1:
            self._end_scalar(i)
            self._is_value = False
        elif not character.isspace():
            self._begin(i)

    def _begin(self, i: int) -> None:
        if self._depth == 1 and self._start < 0:
            self._start = i
            if self._is_value and self._key in ("arguments", "parameters") and not self._bare and self._arguments[0] < 0:
                self._arguments = (i, -1)

    def _end_scalar(self, i: int) -> None:
        """A key or a value at depth 1 ends in front of i."""
        if self._start < 0:
            return
        text, self._start = self.raw[self._start : i], -1
        if not self._is_value:
            self._key = _string(text)
        elif self._key == "name" and self._name is None:
            self._name = _string(text)
        elif self._arguments[0] >= 0 and self._arguments[1] < 0 and not self._bare:
            self._arguments = (self._arguments[0], i)

    def events(self, names: Collection[str]) -> list[Event]:
        """What can be told since the last call."""
        if self._name is None or self._name not in names:
            return []
        begin, end = self._arguments
        found: list[Event] = []
        if begin < 0:
            if self.over:
                found = [CallStart(self._name), CallArguments("{}")]
                self.told = True
            return found
        if self.raw[begin] != "{":  # null, or an object written as a string
            if not self.over:
                return []
            text = self.raw[begin : end if end >= 0 else len(self.raw)].strip()
            inner = _string(text) if text.startswith('"') else "{}" if text == "null" else ""
            if not inner.lstrip().startswith("{"):
                return []
            self.told = True
            return [CallStart(self._name), CallArguments(inner)]
        if not self.told:
            self.told = True
            self._sent = begin
            found.append(CallStart(self._name))
        stop = end if end >= 0 else len(self.raw)
        if stop > self._sent:
            found.append(CallArguments(self.raw[self._sent : stop]))
            self._sent = stop
        return found


def _string(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
