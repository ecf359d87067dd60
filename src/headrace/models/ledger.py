"""The memory ledger: weights, KV, activations and overhead in bytes, known before anything is loaded, and a bound that is then held.

The weights come from the file's header and the level, the KV pool takes what remains of the budget, and what does not fit is refused
with the numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.config import BLOCK_TOKENS, SCORED_ROWS, ModelConfig
from headrace.errors import MemoryBudgetExceeded, UsageError
from headrace.models.arena import rounded

DEFAULT_SHARE = 0.60  # of the lesser of the cgroup's limit and what is available
# Both processes with their libraries, tokenizer, streams and the allocator's slack; an executor that has measured its own passes that.
DEFAULT_OVERHEAD = 192 << 20
LEAST_POOL_TOKENS = 512  # a KV pool below this (or below the context) serves nobody: refused rather than started

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}


@dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes by purpose. `total` never exceeds `budget`."""

    weights: int
    kv: int
    activations: int
    overhead: int
    budget: int
    num_blocks: int
    block_bytes: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.overhead

    @property
    def kv_tokens(self) -> int:
        """Tokens the KV pool holds."""
        return self.num_blocks * BLOCK_TOKENS

    def rows(self) -> list[tuple[str, int, str]]:
        """(purpose, bytes, remark) of each line, the total and the budget last: what a table shows."""
        return [
            ("weights", self.weights, ""),
            ("KV cache", self.kv, f"{self.num_blocks} blocks of {BLOCK_TOKENS} tokens, {format_bytes(self.block_bytes)} each"),
            ("activations", self.activations, ""),
            ("overhead", self.overhead, ""),
            ("total", self.total, ""),
            ("budget", self.budget, f"{100 * self.total / self.budget:.0f} % used"),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{name:<12}{format_bytes(size):>12}  {remark}".rstrip() for name, size, remark in self.rows())


def estimate_activations(config: ModelConfig, max_batch_tokens: int, max_batch_size: int, context_length: int) -> int:
    """A bound on the step's buffers, for when no executor has said: float32 rows of everything a layer makes, logits, the rotary table."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # Residual stream, q|k|v, attention's result in float32; each linear layer's input once more as int8 and bf16 with its scales.
    row = 4 * (config.hidden_size + 2 * q + 2 * kv) + 4 * (config.hidden_size + q + config.intermediate_size) + 2 * q
    sampled = 4 * config.vocab_size + 16 * config.vocab_size // 8
    table = 4 * context_length * (config.rope.rotary_dim or config.head_dim)
    return max(max_batch_tokens, max_batch_size) * row + (max_batch_size + SCORED_ROWS) * sampled + table


def plan_memory(
    config: ModelConfig,
    *,
    weights: int,
    budget: int,
    max_batch_size: int,
    context_length: int,
    activations: int,
    overhead: int = DEFAULT_OVERHEAD,
) -> Ledger:
    """Share a budget out. `weights` is the arena's size (Prepared.nbytes); the KV pool gets the rest, up to full use of every sample.

    Raises MemoryBudgetExceeded, with the numbers, if the rest is no pool to speak of.
    """
    weights = rounded(weights)
    block = BLOCK_TOKENS * config.kv_bytes_per_token
    fixed = weights + activations + overhead
    least = -(-min(context_length, LEAST_POOL_TOKENS) // BLOCK_TOKENS)
    fits = (budget - fixed) // block if budget > fixed else 0
    if fits < least:
        raise MemoryBudgetExceeded(
            f"needs at least {format_bytes(fixed + least * block)}: weights {format_bytes(weights)}, activations "
            f"{format_bytes(activations)}, overhead {format_bytes(overhead)}, KV {format_bytes(least * block)} for {least * BLOCK_TOKENS} "
            f"tokens; the budget is {format_bytes(budget)}. Raise --memory, or choose a smaller model or --level"
        )
    wanted = max_batch_size * -(-context_length // BLOCK_TOKENS)
    num_blocks = min(fits, wanted)
    return Ledger(weights, num_blocks * block, activations, overhead, budget, num_blocks, block)


def default_budget(limit: int, available: int) -> int:
    """`limit` and `available` as headrace.machine.memory gives them."""
    return int(DEFAULT_SHARE * min(limit, available))


def parse_bytes(text: str, whole: int) -> int:
    """Bytes of "2GiB", "1.5G", "800MB", "2147483648", or a share such as "60%" of `whole`. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,6})?)\s*(?:([KMGTkmgt]i?)?[Bb]?|(%))\s*", text)
    if match is None:
        raise UsageError(f"memory: expected a size such as 2GiB, 800MB or 60%, got {text!r}")
    number, unit, percent = float(match[1]), match[2] or "", match[3]
    if percent and number > 100:
        raise UsageError(f"memory: expected at most 100%, got {text!r}")
    size = int(number / 100 * whole) if percent else int(number * UNITS[unit.upper()])
    if size <= 0:
        raise UsageError(f"memory: expected more than nothing, got {text!r}")
    return size


def format_bytes(size: int) -> str:
    """Binary units with the digits that matter: 92.1 MiB."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
