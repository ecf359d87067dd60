"""Attention, rotary embedding and the bf16 format in float64, from their formulas."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
U16 = NDArray[np.uint16]

EPS_F32 = 2.0**-24  # half an ulp: the relative error of one rounding
EPS_BF16 = 2.0**-8


def to_bf16(x: NDArray[np.floating]) -> U16:
    """Round finite values to the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(h: U16) -> F64:
    return (h.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rms_norm(x: F64, weight: NDArray[np.floating], eps: float) -> F64:
    """Over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(x: F64, cos: F64, sin: F64) -> F64:
    """Rotates pairs (d, d + rotary/2) of the last axis; cos and sin are [..., rotary/2]. Dimensions beyond stay."""
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)


def attention(q: F64, k: F64, v: F64, start: int, scale: float, window: int = 0) -> tuple[F64, F64]:
    """Causal attention of queries at positions [start, start + rows) and a bound of a kernel's error.

    q [rows, q_heads, head_dim]; k, v [tokens, kv_heads, head_dim]; a query sees the last `window` keys, itself included (0: all).
    Returns out and bound, both [rows, q_heads, head_dim].

    The bound, with u = 2^-24: a score of n products summed in fp32 is off by at most 2 n u sum|q k| (twice: products rounded too), so
    p is off by the factor 2 * scale * that (its own and the maximum's), by exp's 2e-7 and by its argument's rounding 3 u |x|, |x| <= 88;
    p is rounded to bf16 for the sum with v but not for the normaliser: 2^-8; sums of n terms add 2 n u each; chunk merges add a few u.
    All of it times sum p |v|. exp is clamped at e^-87: nothing beside this.
    """
    rows, heads, dim = q.shape
    group = heads // k.shape[1]
    out, bound = np.empty_like(q), np.empty_like(q)
    for row in range(rows):
        last = start + row + 1
        first = max(0, last - window) if window else 0
        for head in range(heads):
            kk, vv = k[first:last, head // group], v[first:last, head // group]
            score = kk @ q[row, head]
            p = np.exp((score - score.max()) * scale)
            p /= p.sum()
            out[row, head] = p @ vv
            score_error = 2 * dim * EPS_F32 * (np.abs(kk) @ np.abs(q[row, head])).max()
            merges = (last - first) // 64 + 2
            factor = 2 * scale * score_error + 2e-7 + 3 * 88 * EPS_F32 + EPS_BF16 + (2 * 64 + 8 * merges) * 2 * EPS_F32
            bound[row, head] = (p @ np.abs(vv)) * np.expm1(factor) + 1e-30
    return out, bound
