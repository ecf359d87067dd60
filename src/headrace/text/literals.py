"""Finding any of many literal strings in a text: one regular expression shaped as a trie."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


def literal_pattern(strings: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that matches the longest of `strings` at the leftmost place; None when there are none.

    A flat alternation tries every string at every candidate position: with 256 reserved tokens, a megabyte of "<" would take seconds.
    In a trie each step looks at one character, so the work at a position is bounded by the longest string.
    """
    root: dict[str, Any] = {}
    for string in strings:
        if not string:
            continue
        node = root
        for character in string:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_branch(root)) if root else None


def _branch(node: dict[str, Any]) -> str:
    """The pattern of all continuations of a node; longest first, because the optional end comes last."""
    singles, alternatives = [], []
    for character in sorted(key for key in node if key):
        suffix = ""
        child = node[character]
        while len(child) == 1 and "" not in child:  # a chain without forks: no groups, so that depth does not grow
            (only,) = child
            suffix += re.escape(only)
            child = child[only]
        rest = _branch(child)
        if not suffix and not rest:
            singles.append(re.escape(character))
        else:
            alternatives.append(re.escape(character) + suffix + rest)
    if singles:
        alternatives.append(singles[0] if len(singles) == 1 else "[" + "".join(singles) + "]")
    if not alternatives:
        return ""
    if "" in node:
        return "(?:" + "|".join(alternatives) + ")?"
    return alternatives[0] if len(alternatives) == 1 else "(?:" + "|".join(alternatives) + ")"
