"""The network, recorded once as a list of semantic operations; read it top to bottom.

Executors interpret or lower the list: executors/native.py fuses it into one native program, executors/interpreter.py runs it in float64.
Values are named by strings, weights by their canonical names (see models/families.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.config import ModelConfig, RopeConfig


@dataclass(frozen=True, slots=True)
class Embed:
    """out[rows, hidden] = weight[token of each row]."""

    out: str
    weight: str


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """out = x / sqrt(mean(x^2) + eps) * weight."""

    out: str
    x: str
    weight: str
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """out[rows, n] = x[rows, k] @ weight[n, k].T + bias. `split`: the axis a tensor-parallel executor cuts."""

    out: str
    x: str
    weight: str
    bias: str | None
    split: str  # "column": n is cut, "row": k is cut and the results are summed


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RmsNorm over each head of x[rows, heads, head_dim]."""

    out: str
    x: str
    weight: str
    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotates pairs (d, d + rotary/2) of each head by the row's position."""

    out: str
    x: str


@dataclass(frozen=True, slots=True)
class Attention:
    """Appends k, v to the layer's cache; of each row of q, softmax(q k^T * scale) v over positions <= its own, within the window."""

    out: str
    q: str
    k: str
    v: str
    layer: int
    scale: float
    window: int  # 0: all


@dataclass(frozen=True, slots=True)
class SiluMul:
    """out = silu(gate) * up."""

    out: str
    gate: str
    up: str


@dataclass(frozen=True, slots=True)
class Add:
    """out = x + y: the residual stream."""

    out: str
    x: str
    y: str


@dataclass(frozen=True, slots=True)
class Select:
    """Keeps the rows whose logits are wanted."""

    out: str
    x: str


Op = Embed | RmsNorm | Linear | HeadNorm | Rope | Attention | SiluMul | Add | Select


def record(config: ModelConfig) -> list[Op]:
    """The decoder of the Llama family: Llama, Mistral, Qwen2 (biases), Qwen3 (head norms)."""
    ops: list[Op] = [Embed("x", "embed")]
    eps = config.norm_eps
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        ops.append(RmsNorm("h", "x", at + "attn_norm", eps))
        for name in ("q", "k", "v"):
            ops.append(Linear(name, "h", at + name, f"{at}{name}_bias" if config.qkv_bias else None, "column"))
        if config.qk_norm:
            ops += [HeadNorm("q", "q", at + "q_norm", eps), HeadNorm("k", "k", at + "k_norm", eps)]
        ops += [Rope("q", "q"), Rope("k", "k")]
        ops.append(Attention("a", "q", "k", "v", layer, config.head_dim**-0.5, config.sliding_window))
        ops += [Linear("y", "a", at + "o", None, "row"), Add("x", "x", "y")]
        ops.append(RmsNorm("h", "x", at + "ffn_norm", eps))
        ops += [Linear("gate", "h", at + "gate", None, "column"), Linear("up", "h", at + "up", None, "column")]
        ops.append(SiluMul("g", "gate", "up"))
        ops += [Linear("y", "g", at + "down", None, "row"), Add("x", "x", "y")]
    ops += [Select("x", "x"), RmsNorm("h", "x", "final_norm", eps), Linear("logits", "h", "head", None, "column")]
    return ops


def rope_table(config: ModelConfig, context_length: int) -> npt.NDArray[np.float32]:
    """cos and sin of every position: float32 [context_length, rotary/2, 2], computed in float64."""
    rope = config.rope
    rotary = rope.rotary_dim or config.head_dim
    inverse, magnitude = rope_frequencies(rope, rotary)
    angles = np.arange(context_length, dtype=np.float64)[:, None] * inverse[None, :]
    return np.stack([np.cos(angles) * magnitude, np.sin(angles) * magnitude], axis=-1).astype(np.float32)


def rope_frequencies(rope: RopeConfig, rotary: int) -> tuple[npt.NDArray[np.float64], float]:
    """Angle per position of each pair, float64 [rotary/2], and the factor on cos and sin (YaRN's attention scaling)."""
    inverse = rope.theta ** -(np.arange(0, rotary, 2, dtype=np.float64) / rotary)
    if rope.freq_factors:
        inverse = inverse / np.asarray(rope.freq_factors, dtype=np.float64)
    if rope.scaling == "linear":
        return inverse / rope.factor, 1.0
    if rope.scaling == "llama3":
        # Long wavelengths are slowed by `factor`, short ones kept, and those between blended.
        turns = rope.original_context * inverse / (2 * np.pi)
        keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
        return inverse * (keep + (1.0 - keep) / rope.factor), 1.0
    if rope.scaling == "yarn":
        # The pair that makes `beta` turns over the original context bounds the ramp from kept to interpolated.
        def pair(beta: float) -> float:
            return float(rotary * np.log(rope.original_context / (beta * 2 * np.pi)) / (2 * np.log(rope.theta)))

        low, high = max(np.floor(pair(rope.beta_fast)), 0.0), min(np.ceil(pair(rope.beta_slow)), rotary - 1.0)
        ramp = np.clip((np.arange(rotary // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
        magnitude = rope.attention_factor or 0.1 * float(np.log(rope.factor)) + 1.0
        return inverse * (1.0 - ramp) + inverse / rope.factor * ramp, magnitude
    return inverse, 1.0
