"""Source blocks as GGUF defines them and the packed layout of native/kernels.h, both read one value at a time by index arithmetic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
FORMATS = {"q4_0": 0, "q4_1": 1, "q8_0": 2, "bf16": 3}
SOURCES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 8, "bf16": 30}
GROUP_BYTES = {"q4_0": 576, "q4_1": 640, "q8_0": 1088, "bf16": 2048}
BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}


def groups_of(k: int) -> int:
    return -(-k // 32)


def packed_bytes(fmt: str, n: int, k: int) -> int:
    return -(-n // 32) * groups_of(k) * GROUP_BYTES[fmt]


def half(pairs: Bytes) -> NDArray[np.float64]:
    """Little-endian fp16 in the last axis of two bytes."""
    return np.ascontiguousarray(pairs).view("<f2")[..., 0].astype(np.float64)


def bf16(pairs: Bytes) -> NDArray[np.float64]:
    bits = np.ascontiguousarray(pairs).view("<u2")[..., 0].astype(np.uint32) << 16
    return bits.view(np.float32).astype(np.float64)


def source_values(source: str, data: Bytes, rows: int, k: int) -> NDArray[np.float64]:
    """Values [rows, k] of a tensor as the file holds it."""
    if source == "f32":
        return data.view("<f4").reshape(rows, k).astype(np.float64)
    if source == "f16":
        return half(data.reshape(rows, k, 2))
    if source == "bf16":
        return bf16(data.reshape(rows, k, 2))
    blocks = data.reshape(rows, k // 32, BLOCK_BYTES[source])
    scale = half(blocks[..., :2])[..., None]
    if source == "q8_0":
        return (scale * blocks[..., 2:].view(np.int8)).reshape(rows, k)
    body = blocks[..., 4:] if source == "q4_1" else blocks[..., 2:]
    codes = np.concatenate([body & 15, body >> 4], axis=2).astype(np.float64)
    values = scale * codes + half(blocks[..., 2:4])[..., None] if source == "q4_1" else scale * (codes - 8)
    return values.reshape(rows, k)


def unpack(fmt: str, packed: Bytes, n: int, k: int) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """(codes [n, padded k], scales [n, groups], minima [n, groups]) of an integer format, columns past n left out."""
    groups, size = groups_of(k), GROUP_BYTES[fmt]
    record = packed.reshape(-1, groups, size)
    head = 128 if fmt == "q4_1" else 64
    codes = np.zeros((n, groups * 32), np.int64)
    scales, minima = np.zeros((n, groups)), np.zeros((n, groups))
    for column in range(n):
        panel, c = divmod(column, 32)
        scales[column] = half(record[panel, :, 2 * c : 2 * c + 2])
        if fmt == "q4_1":
            minima[column] = half(record[panel, :, 64 + 2 * c : 66 + 2 * c])
        body = record[panel, :, head:]
        for k_in in range(32):
            if fmt == "q8_0":
                quad, i = divmod(k_in, 4)
                codes[column, k_in::32] = body[:, quad * 128 + c * 4 + i]
            else:
                j, rest = divmod(k_in, 8)
                high, i = divmod(rest, 4)
                codes[column, k_in::32] = (body[:, j * 128 + c * 4 + i] >> (4 * high)) & 15
    return codes, scales, minima


def packed_values(fmt: str, packed: Bytes, n: int, k: int) -> NDArray[np.float64]:
    """Weights [n, padded k] of a packed tensor."""
    groups = groups_of(k)
    if fmt == "bf16":
        # [panel][group][pair][column][2]
        w = bf16(packed.reshape(-1, groups, 16, 32, 2, 2))
        return w.transpose(0, 3, 1, 2, 4).reshape(-1, groups * 32)[:n]
    codes, scales, minima = unpack(fmt, packed, n, k)
    scale, low = np.repeat(scales, 32, axis=1), np.repeat(minima, 32, axis=1)
    zero = {"q4_0": 8, "q4_1": 0, "q8_0": 128}[fmt]
    return scale * (codes - zero) + low


def random_packed(fmt: str, n: int, k: int, rng: np.random.Generator) -> Bytes:
    """A packed tensor of random codes and finite random scales, 64-byte aligned as the kernels expect it."""
    size = packed_bytes(fmt, n, k)
    storage = np.empty(size + 64, np.uint8)
    start = -storage.ctypes.data % 64
    out = storage[start : start + size]
    out[:] = rng.integers(0, 256, size, np.uint8)
    record = out.reshape(-1, GROUP_BYTES[fmt])
    if fmt == "bf16":
        values = rng.standard_normal((len(record), 1024)).astype(np.float32)
        record[:] = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return out
    halves = 64 if fmt == "q4_1" else 32
    record[:, : 2 * halves] = rng.normal(0, 0.05, (len(record), halves)).astype(np.float16).view(np.uint8)
    return out
