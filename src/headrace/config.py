"""Configuration: frozen, flat, composed, read once. What is derived (the number of blocks) is computed where memory is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.errors import UsageError

BLOCK_TOKENS = 32  # tokens a KV block holds; the kernels are built for it
NUMERICS_VERSION = 1  # of docs/numerics.md: keys and values of another one are not the same bits
SCORED_ROWS = 64  # of logits a step makes for log-probabilities of prompts, at most, beside one a sample
KV_LEVEL = "bf16"  # how keys and values are kept

Level = Literal["auto", "bf16", "int8", "int4"]
Policy = Literal["fcfs", "shortest", "priority", "fair"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the scheduler decides with."""

    context_length: int  # tokens, prompt and answer together
    num_blocks: int  # KV blocks in the pool
    max_batch_size: int = 256  # samples in a step
    max_batch_tokens: int = 512  # tokens in a step, at most
    step_target_s: float = 0.200  # a chunk is cut so that a step takes about this long; 0: no time budget
    itl_target_s: float = 0.0  # what a step should take that has decoding samples in it; 0: as any other
    policy: Policy = "shortest"
    batching: Literal["continuous", "static"] = "continuous"
    kv_reservation: Literal["paged", "full"] = "paged"
    prefix_cache: bool = True
    max_waiting: int = 1024  # requests in the queue

    def __post_init__(self) -> None:
        for name, least in (("context_length", 1), ("num_blocks", 1), ("max_batch_size", 1), ("max_batch_tokens", 1), ("max_waiting", 1)):
            value = getattr(self, name)
            if value < least:
                raise UsageError(f"[EngineConfig] {name}: expected at least {least}, got {value}")
        for name in ("step_target_s", "itl_target_s"):
            if not 0 <= getattr(self, name) < 3600:
                raise UsageError(f"[EngineConfig] {name}: expected 0 to 3600 seconds, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `scaling` names how positions beyond the original context are treated."""

    theta: float = 10000.0
    rotary_dim: int = 0  # 0: head_dim
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    attention_factor: float = 0.0  # yarn; 0: the formula's own
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    freq_factors: tuple[float, ...] = ()  # divisors per pair, when the file carries them (GGUF rope_freqs)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer's shape, from whatever file described it."""

    architecture: str  # our family name: llama, qwen2, qwen3, mistral
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = 0  # 0: full attention

    @property
    def kv_bytes_per_token(self) -> int:
        """bf16 keys and values of all layers."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim
