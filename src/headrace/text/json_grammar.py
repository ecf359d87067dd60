"""A JSON schema as grammars take it."""

from __future__ import annotations

import json
from typing import Any

from headrace.errors import InvalidRequest

MAX_SCHEMA_CHARS = 64 << 10

# White space between the parts of JSON is one space at most, or a line feed and an indentation: models that may write any amount of it
# tend to write nothing else.
_WHITE_SPACE = r"( |\n[ \t]{0,40})"


def json_schema(schema: dict[str, Any] | bool) -> str:
    """A schema as it stands in a grammar, also behind `%json` in one of Lark. Raises InvalidRequest when it is too long."""
    options = {"x-guidance": {"whitespace_pattern": _WHITE_SPACE}}
    text = json.dumps({**schema, **options} if isinstance(schema, dict) else ({} if schema else {"not": {}}) | options)
    if len(text) > MAX_SCHEMA_CHARS:
        raise InvalidRequest(f"expected a schema of at most {MAX_SCHEMA_CHARS} characters, got {len(text)}")
    return text
