"""Encoding through the `tokenizers` library."""

from __future__ import annotations

from typing import Any

# Below this an encoding takes well under a millisecond; above it the lock is released, which costs some microseconds.
_SHORT = 1024  # characters


class LibraryEncoder:
    """A `tokenizers.Tokenizer` that leaves control tokens alone; `continued` encodes what comes behind a control token, if that differs."""

    def __init__(self, library: Any, continued: Any = None) -> None:
        self._library = library
        self._continued = continued if continued is not None else library

    def encode(self, text: str, at_start: bool) -> list[int]:
        library = self._library if at_start else self._continued
        if len(text) < _SHORT:
            encoding = library.encode(text, add_special_tokens=False)
        else:
            (encoding,) = library.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids
