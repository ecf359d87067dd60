"""Bounds that are checked before anything is built: on the shape of a JSON body, and on the length of a text."""

from __future__ import annotations

from headrace.errors import ContextLengthExceeded, InvalidRequest

MAX_DEPTH = 64  # of arrays and objects in one another; a JSON schema of thirty levels has sixty
MAX_CONTAINERS = 100_000
CHARS_PER_TOKEN = 16  # of a context's worth of text, far more than prose has; the tokenizer takes up to 400 bytes a character
CUT_TIMES = 4  # a text that is to be truncated may be so many times as long

_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))


def refuse_shape(body: bytes | bytearray) -> None:
    """Raises InvalidRequest for too many arrays and objects, or too deep ones. What is no JSON at all is for the parser to say."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = b"".join(unescaped.translate(None, delete=_NOT_STRUCTURE).split(b'"')[::2])  # every second piece is inside a string
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise InvalidRequest(f"the body has more than {MAX_CONTAINERS} arrays and objects", code="invalid_json")
    depth = 0
    for byte in brackets:
        depth += 1 if byte in b"[{" else -1
        if depth > MAX_DEPTH:
            raise InvalidRequest(
                f"the body is nested too deeply: at most {MAX_DEPTH} arrays and objects in one another", code="invalid_json"
            )


def refuse_long_text(num_chars: int, context_length: int, *, cut: bool = False) -> None:
    """Raises ContextLengthExceeded for a text that cannot be a prompt, or be cut to one."""
    limit = context_length * CHARS_PER_TOKEN * (CUT_TIMES if cut else 1)
    if num_chars > limit:
        raise ContextLengthExceeded(
            f"the prompt has {num_chars} characters, expected at most {limit}: prompt and answer together may have {context_length} tokens",
            param="prompt",
        )
