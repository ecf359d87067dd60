"""The recorded network in float64, one request at a time: the oracle that the fast executors are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from headrace.config import ModelConfig
from headrace.models import decoder

Array = npt.NDArray[np.float64]


def logits(config: ModelConfig, weights: Mapping[str, npt.NDArray[np.floating]], tokens: Sequence[int]) -> Array:
    """Logits [len(tokens), vocab] of a whole prompt. `weights`: canonical name -> [n, k] matrices and vectors, any float type."""
    return _run(config, weights, tokens)["logits"]


def hidden(config: ModelConfig, weights: Mapping[str, npt.NDArray[np.floating]], tokens: Sequence[int]) -> Array:
    """What the head is given, normed: [len(tokens), hidden size]."""
    return _run(config, weights, tokens)["h"]


def _run(config: ModelConfig, weights: Mapping[str, npt.NDArray[np.floating]], tokens: Sequence[int]) -> dict[str, Array]:
    weight = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    table = decoder.rope_table(config, len(tokens)).astype(np.float64)
    values: dict[str, Array] = {}
    for op in decoder.record(config):
        match op:
            case decoder.Embed():
                values[op.out] = weight[op.weight][np.asarray(tokens)]
            case decoder.RmsNorm():
                values[op.out] = _rms_norm(values[op.x], weight[op.weight], op.eps)
            case decoder.Linear():
                values[op.out] = values[op.x] @ weight[op.weight].T + (weight[op.bias] if op.bias else 0.0)
            case decoder.HeadNorm():
                x = values[op.x]
                values[op.out] = _rms_norm(x.reshape(len(x), -1, config.head_dim), weight[op.weight], op.eps).reshape(x.shape)
            case decoder.Rope():
                values[op.out] = _rope(values[op.x], table, config.head_dim)
            case decoder.Attention():
                values[op.out] = _attention(op, config, values[op.q], values[op.k], values[op.v])
            case decoder.SiluMul():
                values[op.out] = values[op.gate] / (1.0 + np.exp(-values[op.gate])) * values[op.up]
            case decoder.Add():
                values[op.out] = values[op.x] + values[op.y]
            case decoder.Select():
                values[op.out] = values[op.x]
    return values


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    normed: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight
    return normed


def _rope(x: Array, table: Array, head_dim: int) -> Array:
    heads = x.reshape(len(x), -1, head_dim).copy()
    half = table.shape[1]
    cos, sin = table[:, None, :, 0], table[:, None, :, 1]
    low, high = heads[..., :half].copy(), heads[..., half : 2 * half].copy()
    heads[..., :half] = low * cos - high * sin
    heads[..., half : 2 * half] = high * cos + low * sin
    rotated: Array = heads.reshape(x.shape)
    return rotated


def _attention(op: decoder.Attention, config: ModelConfig, q: Array, k: Array, v: Array) -> Array:
    rows, group = len(q), config.num_heads // config.num_kv_heads
    q3 = q.reshape(rows, config.num_heads, config.head_dim)
    k3 = k.reshape(rows, config.num_kv_heads, config.head_dim).repeat(group, axis=1)
    v3 = v.reshape(rows, config.num_kv_heads, config.head_dim).repeat(group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q3, k3) * op.scale
    distance = np.arange(rows)[:, None] - np.arange(rows)[None, :]
    hidden = (distance < 0) | ((distance >= op.window) if op.window else False)
    scores = np.where(hidden, -np.inf, scores)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    out: Array = np.einsum("hqk,khd->qhd", p, v3).reshape(rows, -1)
    return out
