"""A linear layer with int8 activations in float64, how far fp32 may be from it, and a packer that works by reshaping alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
UNIT = 2.0**-24  # of one fp32 rounding
FORMATS = ("q4_0", "q4_1", "q8_0")
ZERO = {"q4_0": 8, "q4_1": 0, "q8_0": 128}
# exp of simd.h is within 2e-7; then come one addition and one division.
SILU_RELATIVE = 2e-7 + 3 * UNIT
SILU_CLAMPED = 1e-38  # times |x|: past 88 the exponential is exp(88)


@dataclass
class Weight:
    """Columns as a file defines them: w = scale * (code - ZERO) + minimum, one fp16 scale (and minimum) per 32 k."""

    fmt: str
    codes: NDArray[np.uint8]  # [n, k], below 16 for q4
    scale: NDArray[np.float16]  # [n, k / 32]
    minimum: NDArray[np.float16]  # [n, k / 32], zeros but for q4_1

    @classmethod
    def random(cls, fmt: str, n: int, k: int, rng: np.random.Generator) -> Weight:
        codes = rng.integers(0, 256 if fmt == "q8_0" else 16, (n, k)).astype(np.uint8)
        scale = rng.normal(0, 0.1, (n, k // 32)).astype(np.float16)
        minimum = rng.normal(0, 0.5, (n, k // 32)).astype(np.float16)
        return cls(fmt, codes, scale, minimum if fmt == "q4_1" else np.zeros_like(minimum))

    def values(self) -> Float:
        scale, minimum = (np.repeat(x.astype(np.float64), 32, axis=1) for x in (self.scale, self.minimum))
        return scale * (self.codes.astype(np.float64) - ZERO[self.fmt]) + minimum


def pack(w: Weight) -> NDArray[np.uint8]:
    """Panels of 32 columns, groups of 32 k ascending: scales, minima, then nibbles [j][column][i] or bytes [quad][column][i]."""
    n, k = w.codes.shape
    panels, groups, missing = -(-n // 32), k // 32, -n % 32
    codes = np.pad(w.codes, ((0, missing), (0, 0)), constant_values=ZERO[w.fmt])
    codes = codes.reshape(panels, 32, groups, 4, 2, 4).transpose(0, 2, 3, 4, 1, 5)  # panel, group, j, half, column, i
    heads = [w.scale, w.minimum] if w.fmt == "q4_1" else [w.scale]
    parts = []
    for head in heads:
        padded = np.pad(head, ((0, missing), (0, 0))).reshape(panels, 32, groups).transpose(0, 2, 1)
        parts.append(np.ascontiguousarray(padded).view(np.uint8))
    if w.fmt == "q8_0":
        body = codes
    else:
        body = codes[:, :, :, 0] | codes[:, :, :, 1] << 4
    parts.append(np.ascontiguousarray(body).reshape(panels, groups, -1))
    return aligned(np.concatenate(parts, axis=2).reshape(-1))


def aligned(x: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy whose address is a multiple of 64."""
    storage = np.empty(x.size + 64, np.uint8)
    start = -storage.ctypes.data % 64
    out = storage[start : start + x.size]
    out[:] = x
    return out


def product(w: Weight, q: NDArray[np.int8], scale: NDArray[np.float32]) -> tuple[Float, Float]:
    """(y, bound) [rows, n]: q * scale [rows, k] times the weight's columns, and how far a sum of fp32 fmas over groups may be from it."""
    n, k = w.codes.shape
    groups = k // 32
    a = q[:, :k].astype(np.float64).reshape(-1, groups, 32)
    code = (w.codes.astype(np.float64) - ZERO[w.fmt]).reshape(n, groups, 32)
    dot = np.einsum("rgk,ngk->rng", a, code)  # exact: integers
    step = scale[:, None, :groups].astype(np.float64) * w.scale.astype(np.float64)
    total = a.sum(axis=2)[:, None, :] * scale[:, None, :groups].astype(np.float64)
    terms = dot * step
    offset = total * w.minimum.astype(np.float64)
    # Each term goes through its own rounding (scale product, or the sum's) and those of the 2 * groups accumulations after it; a scale
    # product below the normal range is off by half a subnormal times at most 255 * 127 * 32.
    size = np.abs(terms).sum(axis=2) + np.abs(offset).sum(axis=2)
    return (terms + offset).sum(axis=2), (2 * groups + 2) * UNIT * size * 1.01 + groups * 2.0**-150 * 2**20


def silu_mul(gate: Float, gate_bound: Float, up: Float, up_bound: Float) -> tuple[Float, Float]:
    """(h, bound) of gate / (1 + exp(-gate)) * up. The slope of SiLU is at most 1.1."""
    with np.errstate(over="ignore"):
        silu = gate / (1 + np.exp(-gate))
    silu_bound = 1.1 * gate_bound + SILU_RELATIVE * (np.abs(silu) + 1.1 * gate_bound) + SILU_CLAMPED * np.abs(gate)
    h = silu * up
    bound = silu_bound * np.abs(up) + np.abs(silu) * up_bound + silu_bound * up_bound
    return h, bound * (1 + UNIT) + UNIT * np.abs(h)
