"""bf16 linear layers at every level: against float64, and the same bits for a row whatever is computed beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import linear as reference
from reference import pack as layout
from reference.rowwise import from_bf16

from headrace import _native

LEVELS = _native.levels()
WIDENING = [level for level in LEVELS if level != "avx512bf16"]  # the same bits among these
STORE, ADD, SILU_MUL = 0, 1, 2
ROWS = [*range(1, 27), 31, 37]
GUARD = np.float32(-77)
Bits = NDArray[np.uint16]
Array = NDArray[np.float32]


@pytest.fixture(autouse=True)
def restore_level() -> Iterator[None]:
    before = _native.level()
    yield
    _native.use(before)


def random_bits(shape: tuple[int, ...], rng: np.random.Generator) -> Bits:
    return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def packed(bits: Bits) -> NDArray[np.uint8]:
    """Weights [n, k], k a multiple of 32, in panels of 32 columns: [panel][pair of k][column][2]."""
    n, k = bits.shape
    padded = np.zeros((-(-n // 32) * 32, k), np.uint16)
    padded[:n] = bits
    panels = padded.reshape(-1, 32, k // 2, 2).transpose(0, 2, 1, 3)
    return reference.aligned(np.ascontiguousarray(panels).reshape(-1).view(np.uint8))


def activations(bits: Bits, gap: int) -> Bits:
    """A view of the same rows, `gap` elements of NaN between them."""
    rows, k = bits.shape
    storage = np.full((rows, k + gap), 0x7FC1, np.uint16)
    storage[:, :k] = bits
    return storage[:, :k]


def linear(w: NDArray[np.uint8], n: int, x: Bits, epilogue: int = STORE, bias: Array | None = None, **more: Any) -> tuple[np.ndarray, ...]:
    """What the layer wrote; nothing outside of it may change."""
    rows, k = x.shape
    if epilogue == SILU_MUL:
        out_b = np.full((rows, n // 2 + 3), 0x5A5A, np.uint16)
        _native.linear(3, w, n, k, rows, epilogue, b=x, bias=bias, out_b=out_b, **more)
        assert (out_b[:, n // 2 :] == 0x5A5A).all()
        return (out_b[:, : n // 2].copy(),)
    out = np.full((rows, n + 3), GUARD)
    out[:, :n] = np.arange(n) if epilogue == ADD else GUARD
    _native.linear(3, w, n, k, rows, epilogue, b=x, bias=bias, out=out[:, :n], **more)
    assert (out[:, n:] == GUARD).all()
    return (out[:, :n].copy(),)


def product(x: Bits, w: Bits) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(y, bound): at most one rounding an addition, on top of exact products."""
    a, b = from_bf16(x).astype(np.float64), from_bf16(w).astype(np.float64)
    return a @ b.T, (x.shape[1] + 1) * reference.UNIT * (np.abs(a) @ np.abs(b).T) * 1.01


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (33, 64), (96, 96), (70, 576), (64, 2048)])
def test_float64(level: str, n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    x, w, bias = random_bits((15, k), rng), random_bits((n, k), rng), rng.standard_normal(n).astype(np.float32)
    _native.use(level)
    y, bound = product(x, w)
    weight = packed(w)
    assert (np.abs(linear(weight, n, activations(x, 5))[0] - y) <= bound).all()
    y = y + bias
    bound = bound + reference.UNIT * (np.abs(y) + bound)
    assert (np.abs(linear(weight, n, x, bias=bias)[0] - y) <= bound).all()
    y = y + np.arange(n)
    bound = bound + reference.UNIT * (np.abs(y) + bound)
    assert (np.abs(linear(weight, n, x, ADD, bias)[0] - y) <= bound).all()


@pytest.mark.parametrize("level", LEVELS)
def test_silu_mul(level: str) -> None:
    rng = np.random.default_rng(3)
    n, k = 256, 96
    x, w, bias = random_bits((15, k), rng), random_bits((n, k), rng), rng.standard_normal(n).astype(np.float32)
    _native.use(level)
    y, bound = product(x, w)
    y = y + bias
    bound = bound + reference.UNIT * (np.abs(y) + bound)
    y, bound = (a.reshape(15, -1, 2, 32) for a in (y, bound))
    h, bound = reference.silu_mul(y[:, :, 0], bound[:, :, 0], y[:, :, 1], bound[:, :, 1])
    for rows in (1, 7, 15):
        got = from_bf16(linear(packed(w), n, x[:rows], SILU_MUL, bias)[0]).reshape(rows, -1, 32)
        assert (np.abs(got - h[:rows]) <= bound[:rows] + 2.0**-8 * (np.abs(h[:rows]) + bound[:rows])).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("epilogue", [STORE, ADD, SILU_MUL])
def test_a_row_has_the_same_bits_in_any_batch(level: str, epilogue: int) -> None:
    rng = np.random.default_rng(4)
    n, k = 192, 160
    x, weight = random_bits((max(ROWS), k), rng), packed(random_bits((n, k), rng))
    _native.use(level)
    alone = np.concatenate([linear(weight, n, x[row : row + 1], epilogue)[0] for row in range(len(x))])
    for rows in ROWS:
        np.testing.assert_array_equal(linear(weight, n, activations(x[:rows], rows % 3), epilogue)[0], alone[:rows])


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "scalar"])
def test_blocks_of_rows_do_not_change_a_bit(level: str) -> None:
    """More rows than stay in the cache at once."""
    rng = np.random.default_rng(5)
    n, k, rows = 64, 4096, 211
    x, weight = random_bits((rows, k), rng), packed(random_bits((n, k), rng))
    _native.use(level)
    whole = linear(weight, n, x)[0]
    for row in (0, 1, 63, 95, 96, 105, 106, 210):
        np.testing.assert_array_equal(linear(weight, n, x[row : row + 1])[0][0], whole[row])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("epilogue", [STORE, SILU_MUL])
def test_ranges_of_panels_write_their_own_columns_only(level: str, epilogue: int) -> None:
    rng = np.random.default_rng(6)
    n, k, units = 320, 64, 5 if epilogue == SILU_MUL else 10
    weight = packed(random_bits((n, k), rng))
    _native.use(level)
    for rows in (1, 5, 30):
        x = random_bits((rows, k), rng)
        whole, nothing = linear(weight, n, x, epilogue)[0], linear(weight, n, x, epilogue, begin=0, end=0)[0]
        for begin, end in ((0, 1), (1, 4), (2, 2), (2, units), (units - 1, units)):
            part = linear(weight, n, x, epilogue, begin=begin, end=end)[0]
            width = part.shape[1] // units
            inside = np.zeros(part.shape[1], bool)
            inside[begin * width : end * width] = True
            np.testing.assert_array_equal(part, np.where(inside, whole, nothing))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 13), st.integers(1, 100), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_levels_that_widen_agree_bit_for_bit(rows: int, n: int, groups: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, weight = random_bits((rows, 32 * groups), rng), packed(random_bits((n, 32 * groups), rng))
    results = []
    for level in WIDENING:
        _native.use(level)
        results.append(linear(weight, n, x)[0])
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("level", LEVELS)
def test_hostile_values(level: str) -> None:
    """Inf and NaN reach their own row and column and no other."""
    n, k = 40, 64
    x, w = np.full((14, k), 0x3F80, np.uint16), np.full((n, k), 0x3F80, np.uint16)
    x[3, 10], x[5, 63], x[13, 0] = 0x7F80, 0x7FC0, 0x7F7F
    w[7, 20], w[33, 33], w[39, 0] = 0xFF80, 0x7FC0, 0x7F7F
    _native.use(level)
    out = linear(packed(w), n, x)[0]
    poisoned = np.zeros(out.shape, bool)
    poisoned[[3, 5]] = True
    poisoned[:, [7, 33]] = True
    poisoned[13, 39] = True
    np.testing.assert_array_equal(np.isfinite(out), ~poisoned)
    assert np.isnan(out[5]).all()
    assert np.isnan(out[:, 33]).all()
    assert (out[0, [0, 6, 8, 38]] == k).all()


def test_the_two_packed_oracles_agree() -> None:
    w = random_bits((70, 96), np.random.default_rng(8))
    np.testing.assert_array_equal(layout.packed_values("bf16", packed(w), 70, 96), from_bf16(w))
