"""What is logged: one line an event, as text or as JSON, with an event's fields apart from its words."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

_FIELDS = "headrace_fields"


def fields(**values: Any) -> dict[str, Any]:
    """For a log call's `extra`: values with names of their own. What is None is left out."""
    return {_FIELDS: {name: value for name, value in values.items() if value is not None}}


def _stamp(seconds: float) -> str:
    """RFC 3339, UTC, milliseconds."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03d}Z"


def _visible(text: str) -> str:
    """Without control characters, which could end a line and begin another one."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class TextFormatter(logging.Formatter):
    """For people: time, level, logger, words, name=value."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_stamp(record.created), record.levelname, f"{record.name}:", _visible(record.getMessage())]
        for name, value in getattr(record, _FIELDS, {}).items():
            text = _visible(str(value))
            parts.append(f"{name}={json.dumps(text) if not text or ' ' in text or '=' in text else text}")
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """For machines: one object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": _stamp(record.created), "level": record.levelname.lower(), "logger": record.name, "msg": record.getMessage(),
        }  # fmt: skip
        line |= getattr(record, _FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=str)


def set_up(level: Any, form: str = "text") -> None:
    """One handler, on standard error, in one form, for us and what we stand on. `form`: text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    # uvicorn warns of every line of nonsense that somebody sends: an answer is enough.
    for name in ("uvicorn", "opentelemetry", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)


def say(text: str, form: str = "text") -> None:
    """A line on standard output for whoever started the server; as JSON where the log is."""
    if form == "json":
        text = json.dumps({"ts": _stamp(time.time()), "level": "info", "logger": "headrace", "msg": text}, ensure_ascii=False)
    print(text, flush=True)
