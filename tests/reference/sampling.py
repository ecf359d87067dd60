"""Sampling in float64, by full sorts. `possible` says which tokens rounding may lead to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


@dataclass
class Params:
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt: list[int] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    bias: list[tuple[int, float]] = field(default_factory=list)
    allowed: NDArray[np.bool_] | None = None


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., 2011)."""
    c, (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = (b >> 32 ^ c[1] ^ k0, b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k1, a & 0xFFFFFFFF)
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def uniform(seed: int, sample_index: int, position: int) -> float:
    words = philox((position, sample_index, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return ((words[0] << 32 | words[1]) >> 11) / 2**53


def adjusted(logits: NDArray[np.floating], p: Params) -> Float:
    """Logits after penalties, bias and mask. Every impossible one is -inf."""
    x = logits.astype(np.float64)
    for token in {t for t in p.prompt + p.generated if 0 <= t < len(x)}:
        if p.repetition_penalty != 1:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in {t for t in p.generated if 0 <= t < len(x)}:
        x[token] -= p.frequency_penalty * p.generated.count(token) + p.presence_penalty
    for token, value in p.bias:
        if 0 <= token < len(x):
            x[token] += value
    if p.allowed is not None:
        x[~p.allowed] = -np.inf
    x[np.isnan(x)] = -np.inf
    return x


def log_softmax(x: Float) -> Float:
    most = x.max()
    return x - most - math.log(np.exp(x - most).sum())


def kept(x: Float, p: Params) -> tuple[NDArray[np.int64], Float]:
    """(ids ascending, their weights) that the filters leave, in adjusted logits x; temperature > 0."""
    weight = np.exp((x - x.max()) / p.temperature)
    order = np.argsort(-x, kind="stable")
    order = order[x[order] > -np.inf]
    if p.top_k > 0:
        order = order[: p.top_k]
    if p.min_p > 0:
        order = order[weight[order] >= min(p.min_p, 1.0)]
    if p.top_p < 1:
        running = np.cumsum(weight[order])
        order = order[: 1 + np.searchsorted(running, p.top_p * running[-1])]
    ids = np.sort(order)
    return ids, weight[ids]


def possible(x: Float, p: Params, u: float, slack: float = 1e-5) -> set[int]:
    """The tokens of a draw at u, where p.min_p, p.top_p and u may each be off by `slack`, relatively."""
    result: set[int] = set()
    for near_p in {p.top_p * (1 - slack), p.top_p, p.top_p * (1 + slack) if p.top_p < 1 else p.top_p}:
        for near_min in {p.min_p * (1 - slack), p.min_p, p.min_p * (1 + slack)}:
            changed = Params(temperature=p.temperature, top_k=p.top_k, top_p=near_p if p.top_p < 1 else 1.0, min_p=near_min)
            ids, weight = kept(x, changed)
            running = np.cumsum(weight) / weight.sum()
            first, last = np.searchsorted(running, [u - slack, u + slack], side="right")
            result.update(int(i) for i in ids[first : last + 1])
    return result
