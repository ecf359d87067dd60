"""Limits on what a configuration may say, and the checks that both kinds of file share."""

from __future__ import annotations

from pathlib import Path

from headrace.config import ModelConfig
from headrace.errors import ModelError, UnsupportedModel

# Above any model that fits a machine; below what makes loops over a lying header long.
MAX_LAYERS = 1024
MAX_HIDDEN = 1 << 17
MAX_INNER = 1 << 20
MAX_HEADS = 1 << 12
MAX_VOCAB = 1 << 22
MAX_CONTEXT = 1 << 25
MAX_HEAD_DIM = 256  # the attention kernels' registers
HEAD_DIM_STEP = 16


def check(file: Path, config: ModelConfig) -> ModelConfig:
    """Refuse shapes that contradict themselves or that the kernels do not have. Single sizes have been checked where they were read."""
    if config.num_heads % config.num_kv_heads:
        raise ModelError(file, "heads", f"{config.num_heads} query heads are not a multiple of {config.num_kv_heads} key heads")
    if config.head_dim % HEAD_DIM_STEP or not HEAD_DIM_STEP <= config.head_dim <= MAX_HEAD_DIM:
        raise UnsupportedModel(file, "head_dim", f"expected a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, got {config.head_dim}")
    rope = config.rope
    if rope.rotary_dim % 2 or not 2 <= rope.rotary_dim <= config.head_dim:
        raise ModelError(file, "rotary dimensions", f"expected an even number up to head_dim {config.head_dim}, got {rope.rotary_dim}")
    if not rope.theta > 1:
        raise ModelError(file, "rope theta", f"expected a number above 1, got {rope.theta}")
    if rope.scaling != "none" and not rope.factor > 0:
        raise ModelError(file, "rope scaling factor", f"expected a positive number, got {rope.factor}")
    if rope.scaling in ("llama3", "yarn") and not 0 < rope.original_context <= MAX_CONTEXT:
        raise ModelError(file, "original context", f"expected 1 to {MAX_CONTEXT} tokens, got {rope.original_context}")
    if rope.scaling == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
        raise ModelError(
            file, "rope scaling", f"expected low_freq_factor {rope.low_freq_factor} < high_freq_factor {rope.high_freq_factor}"
        )
    if rope.scaling == "yarn" and not (rope.factor >= 1 and 0 < rope.beta_slow < rope.beta_fast and rope.attention_factor >= 0):
        raise ModelError(file, "rope scaling", "expected factor >= 1, 0 < beta_slow < beta_fast and attention_factor >= 0")
    if not 0 < config.norm_eps < 1:
        raise ModelError(file, "rms norm epsilon", f"expected a number between 0 and 1, got {config.norm_eps}")
    return config


def window(sliding_window: int, context_length: int) -> int:
    """A window that holds the whole context is none."""
    return 0 if sliding_window >= context_length else sliding_window
