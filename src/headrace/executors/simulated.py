"""An executor without a model, on a virtual clock: for the planner, and for tests of the policy.

Its tokens depend on a row's tokens so far, its seed and its sample index alone, as a real executor's do, so whatever the scheduler does
to a request, its answer must not change. With `verify` it keeps, for every slot of every KV block, which history of tokens was written
there, and raises as soon as a chunk would read anything but its own history: what a real executor would turn into quietly wrong answers.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from headrace.config import BLOCK_TOKENS
from headrace.engine.plan import NewRow, Plan
from headrace.request import Embedding, PromptLogprobs, PromptTold, TokenLogprob

_WORD = (1 << 64) - 1


class PagingError(RuntimeError):
    """The plan would have made a real executor compute nonsense."""


class VirtualClock:
    """Seconds that pass only when told. Call it to read it."""

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds a step takes: fixed + per_token a token computed + per_context_token a token that one of them attends to."""

    fixed: float = 2e-3
    per_token: float = 2e-4
    per_context_token: float = 1e-8

    def seconds(self, plan: Plan) -> float:
        tokens = context = 0
        for chunk in plan.chunks:
            count = chunk.stop - chunk.start
            tokens += count
            context += count * (chunk.start + chunk.stop + 1) // 2
        return self.fixed + self.per_token * tokens + self.per_context_token * context


def extend_history(history: int, token: int) -> int:
    """The 64-bit name of a token history, one token longer (an odd multiplier and a shift: a bijection for each token)."""
    history = ((history ^ (token + 1)) * 0x9E3779B97F4A7C15) & _WORD
    return history ^ (history >> 29)


def choose_token(history: int, seed: int, sample_index: int, vocab_size: int, forbidden: frozenset[int] = frozenset()) -> int:
    """The token after `history`. Depends on nothing else. `forbidden` must leave one."""
    word = extend_history(extend_history(history, seed), sample_index)
    token = (word >> 32) % vocab_size
    while token in forbidden:
        token = (token + 1) % vocab_size
    return token


class _Row:
    __slots__ = ("histories", "new", "table", "tokens", "total")

    def __init__(self, new: NewRow) -> None:
        self.new = new
        self.tokens = array("i", new.tokens)
        self.table: list[int] = []
        self.total = 0
        self.histories: list[int] = []  # after each token
        for token in self.tokens:
            self.remember(token)

    def remember(self, token: int) -> None:
        self.histories.append(extend_history(self.histories[-1] if self.histories else 0, token))


class SimulatedExecutor:
    """Runs plans by the book. Raises PagingError for one that breaks the contract of `engine/plan.py`."""

    def __init__(
        self,
        clock: VirtualClock,
        num_blocks: int,
        cost: StepCost | None = None,
        vocab_size: int = 1000,
        block_tokens: int = BLOCK_TOKENS,
        verify: bool = True,
    ) -> None:
        self.clock = clock
        self.cost = cost or StepCost()
        self.vocab_size = vocab_size
        self._size = block_tokens
        self._verify = verify
        self._rows: dict[int, _Row] = {}
        self._slots = [[0] * block_tokens if verify else [] for _ in range(num_blocks)]  # the history whose last token was written there

    def forward(self, plan: Plan) -> None:
        """Apply the plan's changes and check its chunks. The clock advances by the step's cost."""
        for row in plan.freed_rows:
            if self._rows.pop(row, None) is None:
                raise PagingError(f"row {row} is freed, and was not in use")
        for new in plan.new_rows:
            if new.row in self._rows:
                raise PagingError(f"row {new.row} is new, and still in use")
            self._rows[new.row] = _Row(new)
        for row, first, blocks in plan.new_blocks:
            table = self._rows[row].table
            if len(table) != first or not blocks:
                raise PagingError(f"row {row} has {len(table)} blocks and gets {len(blocks)} from {first} on")
            table += blocks
        if self._verify:
            self._check(plan)
        self.clock.advance(self.cost.seconds(plan))

    def sample(self, plan: Plan, masks: dict[int, bytes] | None = None) -> tuple[list[int], list[TokenLogprob | None]]:
        """One token for each chunk that samples; it is appended to its row's tokens."""
        tokens: list[int] = []
        logprobs: list[TokenLogprob | None] = []
        for chunk in plan.chunks:
            if not chunk.samples:
                continue
            row = self._rows[chunk.row]
            new = row.new
            forbidden = frozenset(new.end_token_ids) if len(row.tokens) - new.num_prompt < new.params.min_tokens else frozenset()
            mask = (masks or {}).get(chunk.row)
            if mask is not None:
                forbidden |= {token for token in range(self.vocab_size) if not mask[token >> 3] >> (token & 7) & 1}
                if len(forbidden) == self.vocab_size:  # as of logits that are all impossible: the lowest that the mask allows
                    forbidden -= {next(token for token in range(self.vocab_size) if mask[token >> 3] >> (token & 7) & 1)}
            token = choose_token(row.histories[-1], new.seed, new.sample_index, self.vocab_size, forbidden)
            row.tokens.append(token)
            row.remember(token)
            tokens.append(token)
            best = new.params.logprobs
            logprobs.append(TokenLogprob(-1.0, (token,) * best, (-1.0,) * best) if best >= 0 else None)
        return tokens, logprobs if any(entry is not None for entry in logprobs) else []

    def score(self, plan: Plan) -> list[PromptTold | None]:
        """Made-up numbers that depend on the tokens up to each one alone; as an embedding, the sum of the tokens computed."""
        found: list[PromptTold | None] = []
        for number in plan.scored:
            chunk = plan.chunks[number]
            row = self._rows[chunk.row]
            if row.new.params.embed:
                row.total += sum(row.tokens[chunk.start : min(chunk.stop, row.new.num_prompt)])
                found.append(Embedding(array("f", [row.total]).tobytes()) if chunk.stop >= row.new.num_prompt else None)
                continue
            first, stop, best = chunk.logits_start + 1, min(chunk.stop + 1, row.new.num_prompt), row.new.params.prompt_logprobs
            if not chunk.start < first < stop:
                raise PagingError(f"{chunk} is to score tokens {first} to {stop} of a prompt of {row.new.num_prompt}")
            values = array("f", [-float(row.histories[position] >> 48) for position in range(first, stop)])
            tops = array("f", [value for value in values for _ in range(best)])
            ids = array("i", [row.tokens[position] for position in range(first, stop) for _ in range(best)])
            ranks = array("i", [1]) * len(values)
            found.append(PromptLogprobs(first, values.tobytes(), ranks.tobytes(), ids.tobytes(), tops.tobytes()))
        return found

    def _check(self, plan: Plan) -> None:
        """Copy, write the keys and values of all chunks, then read: the order within a layer of a real executor."""
        size, slots = self._size, self._slots
        targets = {target for _, target in plan.copies}
        if len(targets) < len(plan.copies) or targets & {source for source, _ in plan.copies}:
            raise PagingError(f"copies {plan.copies} depend on their order")
        for source, target in plan.copies:
            slots[target] = list(slots[source])
        written: set[tuple[int, int]] = set()
        chunk_rows: set[int] = set()
        for chunk in plan.chunks:
            row = self._rows.get(chunk.row)
            if row is None or chunk.row in chunk_rows:
                raise PagingError(f"row {chunk.row} is not in use, or has two chunks")
            chunk_rows.add(chunk.row)
            length = len(row.tokens)
            if not 0 <= chunk.start < chunk.stop <= length or not chunk.start <= chunk.logits_start <= chunk.stop:
                raise PagingError(f"{chunk} of a row with {length} tokens")
            if chunk.samples and not (chunk.stop == length and chunk.logits_start < length):
                raise PagingError(f"{chunk} samples, and does not reach the last of {length} tokens")
            if chunk.stop > len(row.table) * size:
                raise PagingError(f"{chunk} of a row with {len(row.table)} blocks of {size} tokens")
            for position in range(chunk.start, chunk.stop):
                place = (row.table[position // size], position % size)
                if place in written:
                    raise PagingError(f"{chunk} writes block {place[0]} slot {place[1]}, and another chunk of the step does")
                written.add(place)
                slots[place[0]][place[1]] = row.histories[position]
        for chunk in plan.chunks:
            row = self._rows[chunk.row]
            for i in range(-(-chunk.stop // size)):
                begin, end = i * size, min(chunk.stop, (i + 1) * size)
                if slots[row.table[i]][: end - begin] != row.histories[begin:end]:
                    raise PagingError(f"{chunk}: its block {i} (id {row.table[i]}) does not hold its tokens {begin} to {end}")
