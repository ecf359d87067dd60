"""Tokenization spelled out: word rules by hand over Unicode categories, merging by looking at every pair again and again."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

WHITE_SPACE = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B))))


def is_letter(character: str) -> bool:
    return unicodedata.category(character).startswith("L")


def is_number(character: str) -> bool:
    return unicodedata.category(character).startswith("N")


def is_other(character: str) -> bool:
    return not (character in WHITE_SPACE or is_letter(character) or is_number(character))


def _run(text: str, start: int, test: Callable[[str], bool]) -> int:
    stop = start
    while stop < len(text) and test(text[stop]):
        stop += 1
    return stop


def _white_space(text: str, start: int) -> int:
    """A run of white space, without its last character where a word follows."""
    stop = _run(text, start, WHITE_SPACE.__contains__)
    return stop - 1 if stop < len(text) and stop - start > 1 else stop


def gpt2_words(text: str) -> list[str]:
    words, i = [], 0
    while i < len(text):
        stop = 0
        for contraction in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"):
            if text.startswith(contraction, i):
                stop = i + len(contraction)
                break
        after_space = i + 1 if text[i] == " " else i
        for test in (is_letter, is_number, is_other):
            if not stop and after_space < len(text) and test(text[after_space]):
                stop = _run(text, after_space, test)
        stop = stop or _white_space(text, i)
        words.append(text[i:stop])
        i = stop
    return words


def digits_gpt2_words(text: str) -> list[str]:
    """Each number character by itself, the rest as GPT-2."""
    words, start = [], 0
    for i, character in enumerate(text):
        if is_number(character):
            words += [*gpt2_words(text[start:i]), character]
            start = i + 1
    return words + gpt2_words(text[start:])


def cl100k_words(text: str, digits: int) -> list[str]:
    """Llama 3 (digits = 3) and Qwen 2 (digits = 1)."""
    words, i = [], 0
    while i < len(text):
        stop = 0
        for contraction in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"):
            if text[i : i + len(contraction)].lower() == contraction:
                stop = i + len(contraction)
                break
        if not stop:
            first = i if is_letter(text[i]) else i + 1
            if (first == i or not (text[i] in "\r\n" or is_number(text[i]))) and first < len(text) and is_letter(text[first]):
                stop = _run(text, first, is_letter)
        if not stop and is_number(text[i]):
            stop = min(_run(text, i, is_number), i + digits)
        if not stop:
            after_space = i + 1 if text[i] == " " else i
            if after_space < len(text) and is_other(text[after_space]):
                stop = _run(text, _run(text, after_space, is_other), "\r\n".__contains__)
        if not stop:
            run = text[i : _run(text, i, WHITE_SPACE.__contains__)]
            newline = max(run.rfind("\r"), run.rfind("\n"))
            stop = i + newline + 1 if newline >= 0 else _white_space(text, i)
        words.append(text[i:stop])
        i = stop
    return words


def byte_characters(data: bytes) -> str:
    """The printable alphabet of byte-level BPE: printable Latin-1 as it is, the other bytes, in order, from U+0100 on."""
    table, extra = {}, 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(256 + extra)
            extra += 1
    return "".join(table[byte] for byte in data)


def merge_ranked(symbols: Sequence[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Merge the pair of the lowest rank, the leftmost of several, until there is none."""
    symbols = list(symbols)
    while True:
        best = min(((ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks), default=None)
        if best is None:
            return symbols
        i = best[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def merge_scored(text: str, scores: Mapping[str, float]) -> list[str]:
    """Merge the neighbours whose joined piece has the highest score, the leftmost of several, until there are none."""
    symbols = list(text)
    while True:
        joined = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not joined:
            return symbols
        i = min(joined)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def first_completed(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Reading character by character, the first stop string to be complete (the longest of several): where it starts, and which."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return end - len(longest), longest
    return None
