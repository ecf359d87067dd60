"""What an executor's rows may say next: their grammars' state, and the tokens their requests allow.

Masks of grammars are made by one helper thread while `forward` runs, grammars are compiled by another.

Everything follows from plans and sampled tokens. A new row's state is made from the tokens it starts with, so that a sample which was
preempted, or resumed in another process, goes on where it was.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from headrace.engine.plan import NewRow, Plan
from headrace.threads import deep_pool

# Grammars kept: so many, of so many characters in all. A row whose grammar was dropped compiles it again.
MAX_COMPILED = 32
MAX_COMPILED_CHARS = 2 << 20


class Matcher(Protocol):
    """Where one sample is in its grammar. Both calls may release the interpreter's lock."""

    @property
    def is_broken(self) -> bool:
        """The grammar went beyond its limits of work: only an end token is allowed."""

    def copy(self) -> Matcher:
        """The same state, on its own."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on by tokens that were sampled."""

    def mask(self) -> bytes:
        """The tokens allowed next, one bit each, little end first; after the end of the grammar, the end tokens."""


def bits_of(ids: Sequence[int], vocab_size: int) -> bytes:
    """A mask: one bit a token, little end first, in whole 32-bit words."""
    chosen = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    chosen[np.asarray(ids, dtype=np.int64)] = 1
    return np.packbits(chosen, bitorder="little").tobytes()


def _both(mask: bytes, other: bytes) -> bytes:
    """What both allow; the first may be longer."""
    return (int.from_bytes(mask, "little") & int.from_bytes(other, "little")).to_bytes(len(other), "little")


class _Row:
    """One row's state; `tokens` are not accepted yet. Once the row has begun only the mask thread touches it."""

    __slots__ = ("allowed", "ends", "grammar", "is_stuck", "matcher", "tokens")

    def __init__(self, new: NewRow, vocab_size: int) -> None:
        self.grammar = new.params.grammar
        self.tokens = list(array("i", new.tokens)[new.num_prompt :])
        self.matcher: Matcher | None = None
        ids = array("i", new.params.allowed_token_ids)
        self.allowed = bits_of(ids, vocab_size) if ids else b""
        self.ends = bits_of(new.end_token_ids, vocab_size)
        self.is_stuck = False  # the grammar and the allowed tokens had nothing in common

    def mask(self) -> bytes:
        """What may come next, where there is a grammar."""
        if self.matcher is None:
            raise RuntimeError("[_Row.mask] before its grammar is compiled")
        mask = self.matcher.mask()
        if not self.allowed:
            return mask
        # What the grammar calls whole may end, though the end token is not in the list: there is nothing else left to say.
        for tokens in (self.allowed, self.ends):
            if any(both := _both(mask, tokens)):
                return both
        self.is_stuck = True
        return self.ends


class GrammarRows:
    """`compile_grammar` makes a matcher at its start, and raises RequestError for a grammar it cannot take. `vocab_size` is the model's."""

    def __init__(self, compile_grammar: Callable[[str], Matcher], vocab_size: int) -> None:
        self._compile = compile_grammar
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()
        self._lock = threading.Lock()  # of the table of compiled grammars
        self._rows: dict[int, _Row] = {}
        self._pending: Future[dict[int, bytes]] | None = None
        self._fixed: dict[int, bytes] = {}  # masks of this step's rows that have no grammar
        self.seconds = 0.0  # the helper has spent on masks

    @cached_property
    def _compilers(self) -> ThreadPoolExecutor:
        return deep_pool(1, "headrace-grammar")

    @cached_property
    def _helper(self) -> ThreadPoolExecutor:
        return deep_pool(1, "headrace-masks")

    def compile(self, grammar: str) -> Future[Any]:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                done: Future[Any] = Future()
                done.set_result(None)
                return done
        return self._compilers.submit(self._matcher, grammar)

    def begin(self, plan: Plan) -> None:
        rows = self._rows
        for row in plan.freed_rows:
            rows.pop(row, None)
        for new in plan.new_rows:
            if new.params.grammar or new.params.allowed_token_ids:
                rows[new.row] = _Row(new, self._vocab_size)
        found = [(chunk.row, rows[chunk.row]) for chunk in plan.chunks if chunk.samples and chunk.row in rows] if rows else []
        self._fixed = {number: row.allowed for number, row in found if not row.grammar}
        wanted = [(number, row) for number, row in found if row.grammar]
        self._pending = self._helper.submit(self._make, wanted) if wanted else None

    def masks(self) -> dict[int, bytes]:
        return self._fixed | (self._pending.result() if self._pending is not None else {})

    def accept(self, plan: Plan, tokens: list[int]) -> Collection[int]:
        if self._pending is None:
            return ()
        broken = []
        sampling = (chunk.row for chunk in plan.chunks if chunk.samples)
        for number, token in zip(sampling, tokens, strict=True):
            row = self._rows.get(number)
            if row is not None and row.matcher is not None:
                row.tokens.append(token)
                if row.is_stuck or row.matcher.is_broken:
                    broken.append(number)
        return broken

    def _make(self, wanted: list[tuple[int, _Row]]) -> dict[int, bytes]:
        masks = {}
        began = time.perf_counter()
        for number, row in wanted:
            if row.matcher is None:
                row.matcher = self._matcher(row.grammar).copy()
            if row.tokens:
                row.matcher.accept(row.tokens)
                row.tokens.clear()
            masks[number] = row.mask()
        self.seconds += time.perf_counter() - began
        return masks

    def _matcher(self, grammar: str) -> Matcher:
        with self._lock:
            found = self._compiled.get(grammar)
        if found is None:
            found = self._compile(grammar)
            with self._lock:
                self._compiled[grammar] = found
                while len(self._compiled) > MAX_COMPILED or (
                    len(self._compiled) > 1 and sum(map(len, self._compiled)) > MAX_COMPILED_CHARS
                ):
                    self._compiled.popitem(last=False)
        return found
