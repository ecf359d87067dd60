"""Row-wise operations: quantized activations and RMSNorm."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GROUP = 32


def padded(x: NDArray[np.floating]) -> NDArray[np.float64]:
    """x [rows, k] with zeros up to a multiple of 32 columns."""
    rows, k = x.shape
    out = np.zeros((rows, -(-k // GROUP) * GROUP))
    out[:, :k] = x
    return out


def quantize(x: NDArray[np.floating]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Unrounded codes [rows, padded k] in units of the scale, and scales [rows, groups], of groups of 32: scale = absmax / 127."""
    groups = padded(x).reshape(len(x), -1, GROUP)
    scale = np.abs(groups).max(axis=2) / 127
    codes = np.divide(groups, scale[:, :, None], out=np.zeros_like(groups), where=scale[:, :, None] > 0)
    return codes.reshape(len(x), -1), scale


def rms_norm(x: NDArray[np.floating], weight: NDArray[np.floating], eps: float) -> NDArray[np.float64]:
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps) * weight.astype(np.float64)


def bf16_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even, by comparing with both neighbours; finite values only."""
    down = (x.view(np.uint32) >> 16).astype(np.uint32)
    low = (down << 16).view(np.float32).astype(np.float64)
    high_bits = (down + 1) << 16
    overflow = (high_bits & 0x7F800000) == 0x7F800000
    with np.errstate(invalid="ignore"):
        high = np.where(overflow, np.sign(low) * 2.0**128, high_bits.view(np.float32).astype(np.float64))
    below, above = np.abs(x - low), np.abs(high - x)
    up = (above < below) | ((above == below) & (down & 1 == 1))
    return (down + up).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)
