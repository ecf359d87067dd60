"""Bounds on the shape of a JSON body, counted on its bytes: nothing is built before it is known to be small."""

from __future__ import annotations

from headrace.errors import InvalidRequest

MAX_DEPTH = 64  # of arrays and objects in one another; a JSON schema of thirty levels has sixty
MAX_CONTAINERS = 100_000

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
