"""What requests say: texts of a wanted length that no cache has seen, or has seen just so far as is wanted, and prompts from a file."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from headrace.errors import UsageError

# Common short words: with a space before it each is one token of nearly every vocabulary.
_COMMON = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all were when we there "
    "can an your which their said if do will each about how up out them then she many some so these would other into has more her two "
    "like him see time could no make than first been its who now people my made over did down only way find use may water long little "
    "very after words called just where most know get through back much before go good new write our used me man too any day same right "
    "look think also around another came come work three word must because does part even place well such here take why things help put "
    "years different away again off went old number great tell men say small every found still between name should home big give air "
    "line set own under read last never us left end along while might next sound below saw something thought both few those always "
    "looked show large often together asked house world going want school important until form food keep children feet land side "
    "without boy once animals life enough took sometimes four head above kind began almost live page got earth need far hand high year "
    "mother light parts country father let night following picture being study second eyes soon times story boys since white days ever"
)
WORDS = _COMMON.split()
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ruler:
    """How a server counts: tokens = overhead + per_word x words, as two probes of it found."""

    overhead: float = 0.0
    per_word: float = 1.0

    def words(self, tokens: float) -> int:
        """Words that make a prompt of so many tokens, 1 at least."""
        return max(1, round((tokens - self.overhead) / self.per_word))


def text(words: int, name: str) -> str:
    """That many words, always the same for one name, and different from the first one on for another."""
    return " ".join(random.Random(name).choices(WORDS, k=words))


@lru_cache(maxsize=4096)
def _block(words: int, name: str) -> str:
    return text(words, name)


def shared_text(words: int, share: float, name: str, common: str) -> str:
    """Text named `name` that begins, for a share of its words, like every other with the same `common`."""
    alike = min(words, round(share * words))
    parts = [text(alike, common)] if alike else []
    return " ".join([*parts, text(words - alike, name)] if words > alike else parts)


def hashed_text(tokens: int, hashes: tuple[int, ...], block_tokens: int, ruler: Ruler, seed: str) -> str:
    """Text in which each of a trace's hash ids is a piece of `block_tokens`, so that prompts share what their ids share."""
    words, a_block = ruler.words(tokens), max(1, round(block_tokens / ruler.per_word))
    return " ".join(" ".join(_block(a_block, f"{seed}/block {name}") for name in hashes).split(" ")[:words])


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that are there, and what the user says in turn; each turn is sent with the answers to those before."""

    history: tuple[Message, ...]
    turns: tuple[Message, ...]
    max_tokens: int | None = None


def read_prompts(path: Path) -> list[Conversation]:
    """JSON lines: `prompt` (a text), `messages` (sent as they are) or `turns` (texts); `max_tokens` may be there. Raises UsageError."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path}: cannot be read: {getattr(error, 'strerror', None) or 'not text'}") from None
    found = [_conversation(line, f"--prompts {path}: line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UsageError(f"--prompts {path}: no prompts")
    return found


def _conversation(line: str, where: str) -> Conversation:
    try:
        told = json.loads(line)
    except ValueError:
        raise UsageError(f"{where}: not JSON") from None
    forms = [name for name in ("prompt", "messages", "turns") if isinstance(told, dict) and name in told]
    if len(forms) != 1:
        raise UsageError(f"{where}: expected an object with prompt, messages or turns")
    limit = told.get("max_tokens")
    if limit is not None and not (isinstance(limit, int) and not isinstance(limit, bool) and limit > 0):
        raise UsageError(f"{where}: max_tokens: expected a number from 1, got {limit!r}")
    given = told[forms[0]]
    if forms[0] == "prompt" and isinstance(given, str) and given:
        return Conversation((), ({"role": "user", "content": given},), limit)
    if forms[0] == "turns" and isinstance(given, list) and given and all(isinstance(turn, str) and turn for turn in given):
        return Conversation((), tuple({"role": "user", "content": turn} for turn in given), limit)
    if forms[0] == "messages" and isinstance(given, list) and given and all(isinstance(message, dict) for message in given):
        return Conversation(tuple(given[:-1]), (given[-1],), limit)
    raise UsageError(f"{where}: {forms[0]}: expected {'a text' if forms[0] == 'prompt' else 'a list that is not empty'}")
