"""Bytes: of weights at a level, of a sequence's keys and values, of what a device needs beside them, and what is left over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.errors import UsageError
from headrace.plan.shape import Shape, Weight

Compute = Literal["bf16", "fp8", "int8", "fp4"]
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Level:
    """How weights are stored and multiplied: `bits` a value, `scale_bits` for every `group` values of a column (0: one a column)."""

    name: str
    bits: float
    group: int
    scale_bits: int
    compute: Compute  # type of the multiplication, whose peak counts
    head_bits: float = 16  # embedding and output layer

    def weight_bytes(self, weight: Weight) -> float:
        """Of all `count` tensors, on one device."""
        if weight.kind == "vector":
            return 2.0 * weight.values
        if weight.kind in ("embed", "head"):
            return weight.values * self.head_bits / 8
        groups = -(-weight.k // self.group) if self.group else 1
        return weight.count * weight.n * (weight.k * self.bits + groups * self.scale_bits) / 8


# As the engines for accelerators store them: embedding and output layer stay at 16 bits. int4 is AWQ/GPTQ with groups of 128, a 16-bit
# scale and a 4-bit zero, multiplied at 16 bits; fp4 is NVFP4: an 8-bit scale for 16 values.
LEVELS: dict[str, Level] = {
    "bf16": Level("bf16", 16, 0, 0, "bf16"),
    "fp8": Level("fp8", 8, 0, 32, "fp8"),
    "int8": Level("int8", 8, 0, 32, "int8"),
    "int4": Level("int4", 4, 128, 20, "bf16"),
    "fp4": Level("fp4", 4, 16, 8, "fp4"),
}
# As this server packs them for a CPU: groups of 32 with a 16-bit scale (Q8_0, Q4_0), an 8-bit embedding, multiplied as int8.
CPU_LEVELS: dict[str, Level] = {
    "bf16": Level("bf16", 16, 0, 0, "bf16"),
    "int8": Level("int8", 8, 32, 16, "int8", 8.5),
    "int4": Level("int4", 4, 32, 16, "int8", 8.5),
}


def levels_for(shape: Shape, kind: str) -> dict[str, Level]:
    """The levels of a kind of device; on a CPU also the file's own, when the model comes from one that is quantized."""
    levels = CPU_LEVELS if kind == "cpu" else LEVELS
    if kind != "cpu" or not shape.file_bytes:
        return levels
    bits = 8 * shape.file_bytes / shape.parameters
    return {"file": Level("file", bits, 0, 0, "int8" if bits < 12 else "bf16", bits)} | levels


def level_named(name: str, kind: str = "gpu") -> Level:
    """Raises UsageError for a level that devices of this kind do not have."""
    levels = CPU_LEVELS if kind == "cpu" else LEVELS
    if name not in levels:
        raise UsageError(f"level: expected one of {', '.join(levels)} on a {kind}, got {name!r}")
    return levels[name]


def weight_bytes(shape: Shape, level: Level, tp: int = 1) -> float:
    """On one device of `tp`. A tensor is split over as many devices as it has parts, and held whole by all where it has one."""
    return sum(level.weight_bytes(weight) / min(tp, weight.parts) for weight in shape.weights)


def activation_bytes(shape: Shape, batch_tokens: int, batch_size: int, tp: int = 1) -> float:
    """A step's buffers on one device: residual, normed input, q|k|v, the widest layer twice at 16 bits, and float32 logits of each row."""
    attention = sum(w.n for w in shape.weights if w.name in ("q", "k", "v", "q_b", "linear_qkv")) / tp
    widest = max((w.n for w in shape.weights if w.kind in ("linear", "expert")), default=0)
    active = max(1, shape.active_experts)
    row = 2 * (4 * shape.hidden_size + attention + 2 * widest * active / tp)
    return batch_tokens * row + 4 * batch_size * shape.vocab_size / tp


@dataclass(frozen=True, slots=True)
class Memory:
    """One device's memory, in bytes. `kv` is what is left for keys and values: negative if the rest does not fit."""

    total: float
    weights: float
    activations: float
    overhead: float  # runtime, library buffers, and what the engine leaves free
    kv: float
    kv_bytes_per_token: float

    @property
    def fits(self) -> bool:
        return self.kv > 0

    def sequences(self, kv_bytes: float) -> int:
        """Of that many bytes each (Shape.kv_bytes)."""
        return max(0, int(self.kv // kv_bytes)) if kv_bytes > 0 else 0


def split_memory(
    shape: Shape,
    level: Level,
    *,
    memory: float,
    usable: float,
    overhead: float,
    tp: int = 1,
    batch_tokens: int = 8192,
    batch_size: int = 256,
    kv_value_bytes: float = 2,
) -> Memory:
    """Share a device's `memory` (bytes) out. `usable`: the share an engine takes; `overhead`: bytes its runtime needs."""
    weights = weight_bytes(shape, level, tp)
    activations = activation_bytes(shape, batch_tokens, batch_size, tp)
    reserved = overhead + (1 - usable) * memory
    left = memory - reserved - weights - activations
    return Memory(memory, weights, activations, reserved, left, shape.kv_bytes_per_token(tp, kv_value_bytes))
