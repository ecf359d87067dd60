"""Quantize, RMSNorm and the embedding lookup, at every level, against float64; and bit for bit between the levels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import pack as layout
from reference import rowwise as reference

from headrace import _native

LEVELS = _native.levels()
EPS = np.finfo(np.float32).eps / 2  # of one rounding
Array = NDArray[np.float32]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.level()
    _native.use(request.param)
    yield request.param
    _native.use(before)


@dataclass
class Activations:
    q: NDArray[np.int8]
    scale: Array
    corr: NDArray[np.int32]
    sum: Array
    b: NDArray[np.uint16]

    @classmethod
    def empty(cls, rows: int, k: int, gap: int = 0) -> Activations:
        """Filled with a pattern, rows `gap` elements further apart than they need to be."""
        groups = -(-k // 32)
        q = np.full((rows, groups * 32 + gap), 0x55, np.int8)
        scale, corr, total = (np.full((rows, groups + gap), 7, t) for t in (np.float32, np.int32, np.float32))
        return cls(q, scale, corr, total, np.full((rows, groups * 32 + gap), 0x5555, np.uint16))

    def outputs(self) -> dict[str, np.ndarray]:
        return vars(self)

    def bytes(self) -> tuple[bytes, ...]:
        return tuple(a.tobytes() for a in vars(self).values())


def quantize(x: Array, gap: int = 0, **rows: int) -> Activations:
    out = Activations.empty(*x.shape, gap)
    _native.quantize(x, **out.outputs(), **rows)
    return out


def rms_norm(x: Array, weight: Array, eps: float, gap: int = 0) -> Activations:
    out = Activations.empty(*x.shape, gap)
    _native.rms_norm(x, weight, eps, **out.outputs())
    return out


def random_rows(rows: int, k: int, seed: int) -> Array:
    """Rows of different sizes with a few outliers, as activations have."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, k)) * 10.0 ** rng.uniform(-3, 3, (rows, 1))
    x[rng.random(x.shape) < 0.01] *= 40
    return x.astype(np.float32)


def check_quantized(out: Activations, x: NDArray[np.floating], slack: float) -> None:
    """`slack`: relative error x may have had before it was quantized."""
    codes, scale = reference.quantize(x)
    k = codes.shape[1]
    q = out.q[:, :k].astype(np.float64)
    # Half a step, and what the rounding of x, of 127 / absmax and of the product move a code of up to 127.
    assert np.all(np.abs(q - codes) <= 0.5 + 127 * (3 * EPS + 2 * slack))
    np.testing.assert_allclose(out.scale[:, : scale.shape[1]], scale, rtol=2 * EPS + slack, atol=0)
    sums = out.q[:, :k].astype(np.int32).reshape(len(x), -1, 32).sum(axis=2)
    np.testing.assert_array_equal(out.corr[:, : scale.shape[1]], -128 * sums)
    np.testing.assert_array_equal(out.sum[:, : scale.shape[1]], out.scale[:, : scale.shape[1]] * sums.astype(np.float32))


@pytest.mark.parametrize("k", [*range(1, 68), 96, 100, 576, 1000])
def test_quantize(level: str, k: int) -> None:
    x = random_rows(3, k, seed=k)
    out = quantize(x)
    check_quantized(out, x, slack=0)
    np.testing.assert_array_equal(out.b[:, :k], reference.bf16_bits(x))
    assert not out.q[:, k:].any()
    assert not out.b[:, k:].any()


def test_quantize_rounds_to_even_and_reaches_127(level: str) -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, -127]
    np.testing.assert_array_equal(quantize(x).q[0, :8], [127, 0, 2, 2, 0, -2, -126, -127])


def test_only_the_rows_and_columns_asked_for_are_written(level: str) -> None:
    x = random_rows(5, 70, seed=1)
    out = quantize(x, gap=3, begin=1, end=4)
    whole = quantize(x)
    empty = Activations.empty(5, 70, gap=3)
    for name, written in out.outputs().items():
        width = whole.outputs()[name].shape[1]
        np.testing.assert_array_equal(written[1:4, :width], whole.outputs()[name][1:4])
        np.testing.assert_array_equal(written[:, width:], empty.outputs()[name][:, width:])
        np.testing.assert_array_equal(written[[0, 4]], empty.outputs()[name][[0, 4]])


def test_strided_and_misaligned_rows_read_the_same(level: str) -> None:
    x = random_rows(4, 75, seed=2)
    weight = random_rows(1, 75, seed=3)[0]
    wide = np.full((4, 90), np.nan, np.float32)
    for offset in range(3):
        wide[:, offset : offset + 75] = x
        view = wide[:, offset : offset + 75]
        assert quantize(view).bytes() == quantize(x).bytes()
        assert rms_norm(view, weight, 1e-5).bytes() == rms_norm(x, weight, 1e-5).bytes()
        wide[:] = np.nan


@pytest.mark.parametrize("k", [*range(1, 35), 63, 64, 65, 127, 129, 576, 1000, 2048])
def test_rms_norm(level: str, k: int) -> None:
    x = random_rows(3, k, seed=k)
    weight = random_rows(1, k, seed=k + 1)[0]
    out = rms_norm(x, weight, 1e-5)
    expected = reference.rms_norm(x, weight, 1e-5)
    # The sum of squares: at most k / 64 + 7 roundings, halved by the root; the root, the division and two products.
    slack = ((k / 64 + 7 + 2) / 2 + 4) * EPS
    check_quantized(out, expected, slack)
    np.testing.assert_allclose(reference.from_bf16(out.b[:, :k]), expected, rtol=2**-8 + 2 * slack, atol=1e-37)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200), st.integers(0, 2**32 - 1), st.floats(-36, 36))
def test_levels_agree_bit_for_bit(k: int, seed: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((2, k)) * 10.0 ** rng.uniform(-2, 2, (2, k)) * 10.0**exponent).astype(np.float32)
    weight = rng.standard_normal(k).astype(np.float32)
    before = _native.level()
    seen = set()
    try:
        for name in LEVELS:
            _native.use(name)
            seen.add((quantize(x).bytes(), rms_norm(x, weight, 1e-6).bytes()))
    finally:
        _native.use(before)
    assert len(seen) == 1


def test_hostile_values(level: str) -> None:
    x = np.zeros((6, 64), np.float32)
    x[1, 3] = np.inf
    x[2, 40] = np.nan
    x[3, :] = np.finfo(np.float32).max
    x[4, :] = np.finfo(np.float32).smallest_subnormal
    x[5, :] = 1e-30
    out = quantize(x)
    assert not out.q[[0, 1, 2, 4]].any()  # zeros, not finite, too small to divide by
    np.testing.assert_array_equal(out.scale[:, 0], np.float32([0, np.inf, 0, x[3, 0], 0, x[5, 0]]) / np.float32([1, 1, 1, 127, 1, 127]))
    assert np.isnan(out.scale[2, 1])
    assert np.isnan(out.sum[1, 0])  # a poisoned group stays visible in every product
    assert np.isnan(out.sum[2, 1])
    np.testing.assert_array_equal(out.q[3], 127)
    np.testing.assert_array_equal(out.q[5], 127)
    np.testing.assert_array_equal(reference.from_bf16(out.b[1:3]), reference.from_bf16(np.where(np.isnan(x[1:3]), 0x7FC0, out.b[1:3])))
    rms_norm(x, np.ones(64, np.float32), 0.0)


@pytest.mark.parametrize("fmt", layout.FORMATS)
@pytest.mark.parametrize(("n", "k"), [(32, 32), (70, 96), (33, 50)])
def test_embed(level: str, fmt: str, n: int, k: int) -> None:
    packed = layout.random_packed(fmt, n, k, np.random.default_rng(n))
    expected = layout.packed_values(fmt, packed, n, k)[:, :k]
    for id_ in range(n):
        out = np.full(k + 1, 7, np.float32)
        _native.embed(layout.FORMATS[fmt], packed, n, id_, 1.5, out[:k])
        # scale * code is exact (11 + 8 bits); the minimum and the factor round once each.
        np.testing.assert_allclose(out[:k], expected[id_] * 1.5, rtol=3 * EPS, atol=2 * EPS * np.abs(expected).max())
        assert out[k] == 7


def test_embed_levels_agree() -> None:
    before = _native.level()
    for fmt, number in layout.FORMATS.items():
        packed = layout.random_packed(fmt, 64, 160, np.random.default_rng(0))
        seen = set()
        for name in LEVELS:
            _native.use(name)
            out = np.empty(160, np.float32)
            _native.embed(number, packed, 64, 37, 0.7, out)
            seen.add(out.tobytes())
        assert len(seen) == 1
    _native.use(before)


def test_bad_arguments_are_named() -> None:
    x = np.zeros((2, 40), np.float32)
    good = Activations.empty(2, 40).outputs()
    with pytest.raises(ValueError, match=r"\[quantize\] q: expected at least \(2, 64\), got \(2, 63\)"):
        _native.quantize(x, **{**good, "q": good["q"][:, :63]})
    with pytest.raises(ValueError, match=r"\[quantize\] expected q or b"):
        _native.quantize(x)
    with pytest.raises(ValueError, match=r"q: expected scale, corr and sum"):
        _native.quantize(x, q=good["q"])
    with pytest.raises(ValueError, match=r"rows: expected a range inside \[0, 2\), got \[1, 3\)"):
        _native.quantize(x, **good, begin=1, end=3)
    with pytest.raises(ValueError, match=r"\[rms_norm\] weight: expected shape \(40,\), got \(39,\)"):
        _native.rms_norm(x, np.ones(39, np.float32), 1e-5, **good)
    with pytest.raises(ValueError, match="without gaps"):
        _native.quantize(np.zeros((2, 80), np.float32)[:, ::2], **good)
    with pytest.raises(TypeError):
        _native.quantize(x, **{**good, "scale": good["scale"].astype(np.float64)})  # would be written to a copy
    packed = layout.random_packed("q8_0", 32, 64, np.random.default_rng(0))
    out = np.zeros(64, np.float32)
    with pytest.raises(ValueError, match=r"id: expected one of 32 rows, got 32"):
        _native.embed(2, packed, 32, 32, 1.0, out)
    with pytest.raises(ValueError, match="too short"):
        _native.embed(2, packed[:-1], 32, 0, 1.0, out)
    with pytest.raises(ValueError, match="format"):
        _native.embed(4, packed, 32, 0, 1.0, out)
