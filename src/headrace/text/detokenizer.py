"""Token ids to text while they come: whole characters only, stop strings found wherever tokens are cut.

What is emitted depends on the ids alone, not on how they were grouped into calls. Stop strings act as if the text came character by
character: the first to be *completed* ends it, of several completed by the same character the longest.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from headrace.errors import InvalidRequest


class PieceTexts(dict[int, str | None]):
    """Text of each token, worked out when first asked for: "" for hidden ones, None where the bytes are not whole characters."""

    def __init__(self, pieces: Mapping[int, bytes], hidden: frozenset[int], size: int) -> None:
        super().__init__()
        self.pieces = pieces
        self.hidden = hidden
        self._size = size

    def __missing__(self, token_id: int) -> str | None:
        text: str | None
        if token_id in self.hidden:
            text = ""
        else:
            try:
                text = self.pieces[token_id].decode()
            except UnicodeDecodeError:
                text = None
        if token_id < self._size:  # others are not kept: the table stays bounded
            self[token_id] = text
        return text


class TokenText(NamedTuple):
    """One token as log-probabilities show it. The texts of all tokens, joined, are the whole text before any stop string was cut off."""

    token_id: int
    text: str  # what the token completed: empty inside a character, which belongs to the token that ends it
    data: bytes  # its own bytes
    offset: int  # characters in front of `text`


class Detokenizer:
    """The text of one sample. `add` returns what may be shown now, `finish` the rest.

    A character whose bytes are not all there is held back, and so is a tail that may begin a stop string. Bytes that cannot become a
    character are U+FFFD. After a stop string (`stop` says which) nothing more comes and further ids are not looked at; `num_tokens` counts
    the ids used, the one that completed the stop string included.
    """

    __slots__ = (
        "_first", "_held", "_include_stop", "_last", "_longest", "_pending", "_stops", "_strip", "_texts", "num_tokens", "offset",
        "record", "stop",
    )  # fmt: skip

    def __init__(
        self,
        texts: PieceTexts,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        strip_space: bool = False,
        record: bool = False,
    ) -> None:
        if any(not string for string in stop):
            raise InvalidRequest("a stop string must not be empty", param="stop")
        self._texts = texts
        self._stops = tuple(dict.fromkeys(stop))
        self._longest = max(map(len, self._stops), default=0)
        self._first = frozenset(string[0] for string in self._stops)
        self._last = frozenset("".join(string[:-1] for string in self._stops))  # characters a held-back tail can end with
        self._include_stop = include_stop
        self._strip = strip_space  # the first text loses one leading space
        self._pending = b""  # at most three bytes that may begin a character
        self._held = ""  # text that may begin a stop string
        self.offset = 0  # characters decoded so far
        self.num_tokens = 0
        self.stop: str | None = None
        self.record: list[TokenText] | None = [] if record else None

    def add(self, ids: Iterable[int]) -> str:
        """Take tokens, return the text that is now safe to show: it is final and will not be part of a stop string."""
        if self.record is None and not self._stops and not self._strip:
            return self._add_plain(ids)
        shown: list[str] = []
        for token_id in ids:
            if self.stop is not None:
                break
            self.num_tokens += 1
            text = self._decode(token_id)
            if self._stops and text:
                shown.append(self._scan(text))
            else:
                shown.append(text)
        return "".join(shown)

    def finish(self) -> str:
        """No more tokens: what was held back. An unfinished character is one U+FFFD, and belongs to the last token."""
        if self.stop is not None:
            return ""
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        self.offset += len(text)
        if self.record and text:
            self.record[-1] = self.record[-1]._replace(text=self.record[-1].text + text)
        if text and self._stops:
            text = self._scan(text)
        if self.stop is None:
            text += self._held
            self._held = ""
        return text

    def _add_plain(self, ids: Iterable[int]) -> str:
        texts = self._texts
        shown: list[str] = []
        count = 0
        for token_id in ids:
            count += 1
            text = texts[token_id]
            if text is None or (self._pending and text):
                text = self._join(texts.pieces[token_id])
            shown.append(text)
        self.num_tokens += count
        whole = shown[0] if count == 1 else "".join(shown)
        self.offset += len(whole)
        return whole

    def _join(self, data: bytes) -> str:
        """Text of the pending bytes and these, keeping back what may still become a character."""
        data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def _decode(self, token_id: int) -> str:
        text = self._texts[token_id]
        data = self._texts.pieces[token_id] if token_id not in self._texts.hidden else b""
        if self._strip and data:
            self._strip = False
            if data.startswith(b" "):
                data = data[1:]
                text = None
        if text is None or (self._pending and text):
            text = self._join(data)
        if self.record is not None:
            self.record.append(TokenText(token_id, text, data, self.offset))
        self.offset += len(text)
        return text

    def _scan(self, text: str) -> str:
        """Append to the held-back tail, look for a stop string, return what can be shown."""
        if not self._held and self._first.isdisjoint(text):
            return text  # nothing in it begins a stop string
        text = self._held + text
        best_end, best_start = len(text) + 1, 0
        for string in self._stops:
            start = text.find(string)
            if start >= 0 and (start + len(string), start) < (best_end, best_start):
                best_end, best_start = start + len(string), start
        if best_end <= len(text):
            self.stop = text[best_start:best_end]
            self._held = ""
            return text[: best_end if self._include_stop else best_start]
        keep = self._tail(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _tail(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        if text[-1] not in self._last:
            return 0
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(string.startswith(end) for string in self._stops):
                return length
        return 0
