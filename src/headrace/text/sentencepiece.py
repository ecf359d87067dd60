"""SentencePiece-style BPE: neighbours merge in the order of the merged piece's score, the leftmost first among equals.

Not expressible as a list of ranked pairs: two ways to form one piece share one score there, and the leftmost must win. What no piece can
span is encoded apart, which changes nothing and makes words repeat, so that a table of seen words does most of the work.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence

import numpy as np

SPACE = "▁"  # U+2581, the escaped space

_MAX_CACHED_WORD = 64  # characters
_MAX_CACHED_WORDS = 1 << 16


class ScoreBPE:
    """Encodes text whose spaces are already U+2581. `tokens[i]` has `scores[i]`; only ids in `usable` take part in merging."""

    def __init__(
        self, tokens: Sequence[str], scores: Sequence[float], usable: Sequence[int], byte_ids: dict[int, int], unk_id: int | None
    ) -> None:
        _, ranks = np.unique(-np.asarray(scores, np.float64), return_inverse=True)  # best score first; equal scores, equal rank
        order = ranks.tolist()
        self._ids = {tokens[i]: i for i in usable}
        self._ranks = {tokens[i]: order[i] for i in usable}
        self._byte_ids = byte_ids
        self._unk_id = unk_id
        self._words: dict[str, tuple[int, ...]] = {}
        # Where no piece has a space behind another character, every run of spaces starts a word.
        splittable = not any(SPACE in token.lstrip(SPACE) for token in self._ids)
        self._word_pattern = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+") if splittable else None
        self._pairs: set[str] | None = None

    def encode(self, text: str) -> list[int]:
        words = self._word_pattern.findall(text) if self._word_pattern is not None else [text]
        ids: list[int] = []
        seen = self._words
        for word in words:
            found = seen.get(word)
            if found is None:
                found = self._encode_word(word)
            ids += found
        return ids

    def _encode_word(self, word: str) -> tuple[int, ...]:
        if len(word) > _MAX_CACHED_WORD:
            return tuple(token for part in self._parts(word) for token in self._merge(part))
        ids = tuple(self._merge(word))
        if len(self._words) >= _MAX_CACHED_WORDS:
            self._words.clear()
        self._words[word] = ids
        return ids

    def _parts(self, word: str) -> list[str]:
        """Cut where two neighbouring characters are neighbours in no piece: no merge can cross that."""
        if self._pairs is None:
            self._pairs = {token[i : i + 2] for token in self._ids for i in range(len(token) - 1)}
        pairs = self._pairs
        parts, start = [], 0
        for i in range(1, len(word)):
            if word[i - 1 : i + 1] not in pairs:
                parts.append(word[start:i])
                start = i
        parts.append(word[start:])
        return parts

    def _merge(self, word: str) -> list[int]:
        """O(n log n). The queue holds rank * n + position; an entry is stale when the pair there now forms something of another rank."""
        count = len(word)
        symbols: list[str | None] = list(word)
        following = list(range(1, count + 1))  # `count`: none
        previous = list(range(-1, count - 1))
        rank_of = self._ranks.get
        queue = []
        for i in range(count - 1):
            rank = rank_of(word[i : i + 2])
            if rank is not None:
                queue.append(rank * count + i)
        heapq.heapify(queue)
        pop, push = heapq.heappop, heapq.heappush
        while queue:
            rank, left = divmod(pop(queue), count)
            first = symbols[left]
            right = following[left]
            if first is None or right == count:
                continue
            merged = first + symbols[right]  # what follows a live symbol is live
            if rank_of(merged) != rank:
                continue
            symbols[left] = merged
            symbols[right] = None
            right = following[left] = following[right]
            if right < count:
                previous[right] = left
                rank = rank_of(merged + symbols[right])
                if rank is not None:
                    push(queue, rank * count + left)
            before = previous[left]
            if before >= 0:
                rank = rank_of(symbols[before] + merged)
                if rank is not None:
                    push(queue, rank * count + before)
        ids: list[int] = []
        for symbol in symbols:
            if symbol is not None:
                token = self._ids.get(symbol)
                if token is not None:
                    ids.append(token)
                else:
                    ids += self._bytes(symbol)
        return ids

    def _bytes(self, character: str) -> list[int]:
        """A character that is no piece, as bytes; as the unknown token where the vocabulary has no bytes."""
        try:
            return [self._byte_ids[byte] for byte in character.encode()]
        except KeyError:
            return [] if self._unk_id is None else [self._unk_id]
