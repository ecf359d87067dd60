"""Who may call: named keys, compared in constant time, on the route that was matched. Without keys everybody on the address may."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import RequestError, UsageError
from headrace.server.formats import error_body
from headrace.server.quotas import NO_QUOTA, Quota

Scope = MutableMapping[str, Any]
ENVIRONMENT = "HEADRACE_API_KEYS"
MIN_KEY_CHARS = 8
_MAX_FILE_BYTES = 1 << 20
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})=(?!=*$)(.*)")  # base64 may end in = signs


class Unauthorized(RequestError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class WrongHost(RequestError):
    """A page elsewhere whose name was made to point here (DNS rebinding) has its own name in the Host header."""

    status = 421
    code = "misdirected_request"


def check_host(headers: Iterable[tuple[bytes, bytes]], allowed: frozenset[str]) -> None:
    """Raises WrongHost unless the Host header, without its port, is one of `allowed` (lower case; none: all are)."""
    if not allowed:
        return
    for name, value in headers:
        if name == b"host":
            host = re.sub(r":\d*$", "", value.decode("latin-1")).rstrip(".").lower()
            if host not in allowed:
                raise WrongHost(f"Host: {host[:100]!r} is not this server; --allowed-host names more")


class Keys:
    """Names by key. Only digests are kept."""

    def __init__(self, keys: dict[str, str], quotas: dict[str, Quota] | None = None) -> None:
        """`keys`: name -> key; `quotas`: name -> limits, of the keys that have their own."""
        self.quotas = quotas or {}
        self._digests = [(name, hashlib.sha256(key.encode()).digest()) for name, key in keys.items()]

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, presented: bytes) -> str | None:
        """The name of a key. Every key is compared, whole, whatever was presented."""
        digest = hashlib.sha256(presented).digest()
        found = None
        for name, known in self._digests:
            if hmac.compare_digest(known, digest):
                found = name
        return found


class Guarded:
    """An ASGI application behind the keys; the caller's name goes into the scope as the tenant."""

    def __init__(self, app: Any, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        presented = _presented(scope["headers"])
        name = self._keys.find(presented) if presented is not None else None
        if name is None:
            said = "the API key is not known here" if presented is not None else "an API key is needed: Authorization: Bearer KEY"
            await refuse(scope, send, Unauthorized(said))
            return
        scope["headrace.tenant"] = name
        await self._app(scope, receive, send)


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else None
        if name == b"x-api-key":
            return value.strip()
    return None


async def refuse(scope: Scope, send: Any, error: RequestError) -> None:
    """Answer with an error before anything of the body is read."""
    body = error_body(error)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", scope["headrace.request_id"].encode()),
        (b"connection", b"close"),  # its body was not read
    ]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def read_keys(given: Sequence[str], file: Path | None, environment: str | None, quota: Quota = NO_QUOTA) -> Keys:
    """Keys from flags, a file (one a line, # comments) and the environment (commas between): `NAME=KEY`, or `KEY` alone,
    and after it the key's own limits, such as `rpm=60`, where they are not those of `quota`.

    Raises UsageError, which never repeats a key.
    """
    sources = [("--api-key", list(given)), (ENVIRONMENT, (environment or "").split(","))]
    if file is not None:
        try:
            if file.stat().st_size > _MAX_FILE_BYTES:
                raise UsageError(f"--api-key-file: {file} has more than {_MAX_FILE_BYTES} bytes")
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file: {file} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
        found = [line for line in lines if not line.lstrip().startswith("#")]
        if not any(line.strip() for line in found):
            raise UsageError(f"--api-key-file: {file} has no key")
        sources.append((f"--api-key-file {file}", found))
    keys: dict[str, str] = {}
    quotas: dict[str, Quota] = {}
    for where, entries in sources:
        for entry in entries:
            text, *options = entry.split() or [""]
            if not text and where != "--api-key":
                continue
            named = _NAMED.fullmatch(text)
            name, key = (named[1], named[2]) if named else (f"key-{len(keys) + 1}", text)
            if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
                raise UsageError(f"{where}: {name}: expected a key of at least {MIN_KEY_CHARS} printable ASCII characters without spaces")
            if name in keys:
                raise UsageError(f"{where}: the name {name} is given twice")
            if key in keys.values():
                raise UsageError(f"{where}: {name} has the same key as another name")
            keys[name] = key
            if options:
                quotas[name] = quota.with_options(options, f"{where}: {name}")
    return Keys(keys, quotas)
