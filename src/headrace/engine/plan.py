"""The scheduler's answer for one step: data and nothing else. The only thing an executor ever sees.

An executor keeps a *row* per running sample (its tokens, block table and sampling parameters), so a plan only says what changed.
Order of application: `freed_rows`, `new_rows`, `new_blocks`, `copies`, then the chunks are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.request import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sample starts (or starts again after preemption) in row `row`."""

    row: int
    tokens: bytes  # int32 ids: prompt and what was generated before
    num_prompt: int
    params: SamplingParams
    seed: int
    sample_index: int
    end_token_ids: tuple[int, ...]  # what `min_tokens` must forbid


class Chunk(NamedTuple):
    """One row's share of the step: compute its tokens [start, stop) and the logits of [logits_start, stop).

    A named tuple because one is made for every row of every step: less than half the price of a frozen dataclass.
    """

    row: int
    start: int
    stop: int
    logits_start: int  # == stop: none wanted
    samples: bool  # the last row of logits chooses the next token

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class Plan:
    """One step. `chunks` are in the order in which their results come back."""

    chunks: list[Chunk] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    freed_rows: list[int] = field(default_factory=list)
    new_blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)  # row, index of the first, block ids
    # Chunks, ascending, of prompts of which something is told: an embedding, or log-probabilities, for which are the rows of logits up to
    # the one of the prompt's last token.
    scored: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # block copies (from, to), in any order: copy on write

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)
