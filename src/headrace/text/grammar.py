"""Grammars for structured output: from what a client gives to what the engine follows. The only module that knows llguidance.

A grammar travels as a string (`SamplingParams.grammar`). The API process makes and checks it, the engine process compiles it against the
model's vocabulary.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from headrace.errors import InvalidRequest
from headrace.text.json_grammar import json_schema

MAX_TOOLS_CHARS = 256 << 10  # of the schemas of all functions
MAX_SOURCE_CHARS = 16 << 10  # of a regular expression or a Lark grammar
MAX_CHOICES = 1024
_MAX_MESSAGE = 300

_limits = LLParserLimits(max_lexer_states=10_000, verbose_errors=False)  # 1-2 kB a state, of each grammar


def schema_grammar(schema: dict[str, Any] | bool) -> str:
    """What matches a JSON schema. Raises InvalidRequest."""
    return str(LLMatcher.grammar_from_json_schema(json_schema(schema)))


def regex_grammar(pattern: str) -> str:
    """What matches a regular expression as a whole. Raises InvalidRequest."""
    return str(LLMatcher.grammar_from_regex(_limited(pattern)))


def lark_grammar(source: str) -> str:
    """What matches a grammar in Lark's notation, from its rule `start`. Raises InvalidRequest."""
    return str(LLMatcher.grammar_from_lark(_limited(source)))


def tools_grammar(source: str) -> str:
    """A grammar of calls (`tools.calls_grammar`): longer than clients' own may be, and of few rules. Raises InvalidRequest."""
    if len(source) > MAX_TOOLS_CHARS:
        raise InvalidRequest(f"expected schemas of at most {MAX_TOOLS_CHARS} characters in all, got {len(source)}")
    return str(LLMatcher.grammar_from_lark(source))


def choice_grammar(choices: Sequence[str]) -> str:
    """One of several texts. Raises InvalidRequest."""
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"expected 1 to {MAX_CHOICES} choices, got {len(choices)}")
    _limited("".join(choices))
    return str(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices)))


def check(grammar: str) -> None:
    """Raises InvalidRequest saying what is wrong with a grammar. Milliseconds as a rule, a second at most: not for an event loop."""
    problem = LLMatcher.validate_grammar(grammar, limits=_limits)
    if problem and not problem.startswith("WARNING"):
        raise InvalidRequest(_explain(problem))


def _explain(problem: str) -> str:
    """The line that says what is wrong; the others show where, with as much of the source."""
    lines = problem.strip().splitlines()
    said = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return said[:_MAX_MESSAGE]


def _limited(source: str) -> str:
    if len(source) > MAX_SOURCE_CHARS:
        raise InvalidRequest(f"expected at most {MAX_SOURCE_CHARS} characters, got {len(source)}")
    return source


class Words(Protocol):
    """What a grammar needs of a tokenizer."""

    vocab_size: int
    control_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes."""

    def encode(self, text: str) -> list[int]:
        """Text as ids."""


class Matcher:
    """Where one sample is in its grammar."""

    __slots__ = ("_state",)

    def __init__(self, state: LLMatcher) -> None:
        self._state = state

    @property
    def is_broken(self) -> bool:
        return bool(self._state.is_error())

    def copy(self) -> Matcher:
        return Matcher(self._state.deep_copy())

    def accept(self, tokens: Sequence[int]) -> None:
        self._state.consume_tokens(list(tokens))

    def mask(self) -> bytes:
        return bytes(self._state.compute_bitmask())


class Compiler:
    """Compiles grammars against one vocabulary, which is loaded when the first one comes. `vocab_size` is the model's."""

    def __init__(self, load: Callable[[], Words], vocab_size: int, end_ids: Sequence[int]) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()

    def __call__(self, grammar: str) -> Matcher:
        """Raises InvalidRequest."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._vocabulary()
        state = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits)
        if state.is_error():
            raise InvalidRequest(_explain(state.get_error()))
        return Matcher(state)

    def _vocabulary(self) -> LLTokenizer:
        words = self._load()
        size = max(words.vocab_size, self._vocab_size)
        return LLTokenizer(TokenizerWrapper(_Vocabulary(words, self._end_ids[0])), n_vocab=size, eos_token=self._end_ids)


class _Vocabulary:
    """A tokenizer as llguidance asks for it."""

    def __init__(self, words: Words, end_id: int) -> None:
        self.eos_token_id = end_id
        self.bos_token_id = None
        self.tokens = [words.token_bytes(i) for i in range(words.vocab_size)]
        self.special_token_ids = sorted({*words.control_ids, end_id})
        self._encode = words.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)
