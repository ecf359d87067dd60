"""Names for what a block holds: a digest over its tokens and everything before them.

The digests are keyed BLAKE2b, 128 bits, chained a full block at a time, so equal names mean equal keys and values: the root covers
whatever else they depend on (model, numerics version, KV level, tenant salt), and without the secret nobody can make two prompts collide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


class Prefix:
    """One link of the chain: these tokens, after those of `parent`. The root has no parent, and its `tokens` are the scope."""

    __slots__ = ("digest", "parent", "tokens")

    def __init__(self, digest: bytes, tokens: bytes, parent: Prefix | None) -> None:
        self.digest = digest
        self.tokens = tokens
        self.parent = parent

    def equals(self, other: Prefix) -> bool:
        """The same tokens all the way down: what a digest only promises. Links that were compared once are joined, so this is cheap."""
        a: Prefix | None = self
        b: Prefix | None = other
        while a is not b:
            if a is None or b is None or a.tokens != b.tokens:
                return False
            a, b = a.parent, b.parent
        if self.parent is not other.parent:
            self.parent = other.parent
        return True


class PrefixHasher:
    """Makes links. `scope` names what keys and values depend on beside the tokens; `secret` keeps the digests unguessable."""

    def __init__(self, scope: Sequence[str] = (), secret: bytes = b"", digest: Callable[[bytes], bytes] | None = None) -> None:
        self._scope = tuple(scope)
        self._key = blake2b(secret).digest()  # BLAKE2b takes keys up to 64 bytes: exactly this
        self._digest = digest or self._keyed

    def root(self, salt: str) -> Prefix:
        """The start of every chain under `salt`. Fields are framed by their length, so that no two lists of fields read alike."""
        fields = [field.encode() for field in (*self._scope, salt)]
        content = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
        return Prefix(self._digest(content), content, None)

    def extend(self, parent: Prefix, tokens: bytes) -> Prefix:
        """`parent`, then `tokens` (int32 ids of one block, or of a prompt's last, partial one)."""
        return Prefix(self._digest(parent.digest + tokens), tokens, parent)

    def _keyed(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=DIGEST_BYTES, key=self._key).digest()
