"""The int4 and int8 linear layer at every level: against float64, and bit for bit between levels, numbers of rows and ranges of panels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from reference import linear as reference
from reference import pack as layout

from headrace import _native

LEVELS = _native.levels()
STORE, ADD, SILU_MUL = 0, 1, 2
ROWS = [*range(1, 14), 16, 24, 33, 64, 130]
SENTINEL = 0x5A


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    before = _native.level()
    yield
    _native.use(before)


class Activations:
    """Rows of int8 groups. `gap`: elements between rows that nobody may write."""

    def __init__(self, rows: int, k: int, gap: int = 0) -> None:
        self.rows, self.k = rows, k
        self.storage = {
            "q": np.full((rows, k + gap), SENTINEL, np.int8),
            "scale": np.full((rows, k // 32 + gap), SENTINEL, np.float32),
            "corr": np.full((rows, k // 32 + gap), SENTINEL, np.int32),
            "sum": np.full((rows, k // 32 + gap), SENTINEL, np.float32),
            "b": np.full((rows, k + gap), SENTINEL, np.uint16),
        }

    @classmethod
    def of(cls, q: NDArray[np.int8], scale: NDArray[np.float32], gap: int = 0) -> Activations:
        act = cls(*q.shape, gap)
        groups = q.shape[1] // 32
        total = q.reshape(-1, groups, 32).sum(axis=2, dtype=np.int32)
        act.storage["q"][:, : act.k] = q
        act.storage["scale"][:, :groups] = scale
        act.storage["corr"][:, :groups] = -128 * total
        with np.errstate(invalid="ignore", over="ignore"):
            act.storage["sum"][:, :groups] = scale * total.astype(np.float32)
        return act

    @classmethod
    def random(cls, rows: int, k: int, rng: np.random.Generator, gap: int = 0) -> Activations:
        q = rng.integers(-127, 128, (rows, k)).astype(np.int8)
        return cls.of(q, rng.uniform(0.001, 0.05, (rows, k // 32)).astype(np.float32), gap)

    def inputs(self) -> dict[str, Any]:
        return {name: self.storage[name] for name in ("q", "scale", "corr", "sum")}

    def outputs(self) -> dict[str, Any]:
        return {f"out_{name}": array for name, array in self.storage.items()}

    def of_width(self, name: str) -> np.ndarray:
        return self.storage[name][:, : self.k if name in ("q", "b") else self.k // 32]

    def untouched(self) -> bool:
        return all((a[:, self.of_width(name).shape[1] :] == SENTINEL).all() for name, a in self.storage.items())


def call(w: reference.Weight, packed: np.ndarray, act: Activations, epilogue: int, rows: int, **more: Any) -> None:
    n, k = w.codes.shape
    _native.linear(layout.FORMATS[w.fmt], packed, n, k, rows, epilogue, **act.inputs(), **more)


def floats(rows: int, n: int, fill: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """(out [rows, n] at an address and stride no vector likes, its storage)."""
    storage = np.full(3 + rows * (n + 5), SENTINEL, np.float32)
    out = storage[3:].reshape(rows, n + 5)[:, :n]
    out[:] = fill
    return out, storage


def linear(
    w: reference.Weight, packed: np.ndarray, act: Activations, epilogue: int, rows: int, bias: np.ndarray | None, **more: Any
) -> tuple[np.ndarray, ...]:
    """What the layer wrote, after checking that it wrote nothing else. Under `add` the residual is row + column / 8."""
    n = len(w.codes)
    if epilogue == SILU_MUL:
        result = Activations(rows, n // 2, gap=7)
        call(w, packed, act, epilogue, rows, bias=bias, **result.outputs(), **more)
        assert result.untouched()
        return tuple(result.of_width(name).copy() for name in result.storage)
    out, storage = floats(rows, n, residual(rows, n) if epilogue == ADD else SENTINEL)
    call(w, packed, act, epilogue, rows, bias=bias, out=out, **more)
    rest = storage[3:].reshape(rows, n + 5)[:, n:]
    assert (storage[:3] == SENTINEL).all()
    assert (rest == SENTINEL).all()
    return (out.copy(),)


def residual(rows: int, n: int) -> np.ndarray:
    return (np.arange(rows)[:, None] + np.arange(n)[None, :] / 8).astype(np.float32)


def same_bits(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def check_against_float64(
    w: reference.Weight, act: Activations, epilogue: int, bias: np.ndarray | None, got: tuple[np.ndarray, ...]
) -> None:
    y, bound = reference.product(w, act.of_width("q"), act.of_width("scale"))
    if bias is not None:
        y = y + bias
        bound = bound + reference.UNIT * (np.abs(y) + bound)
    if epilogue != SILU_MUL:
        if epilogue == ADD:
            y = y + residual(*y.shape)
            bound = bound + reference.UNIT * (np.abs(y) + bound)
        assert (np.abs(got[0] - y) <= bound).all()
        return
    # Panels of 32 alternate gate and up.
    y, bound = (x.reshape(act.rows, -1, 2, 32) for x in (y, bound))
    h, bound = reference.silu_mul(y[:, :, 0], bound[:, :, 0], y[:, :, 1], bound[:, :, 1])
    q, scale, corr, total, b = got
    q = q.reshape(h.shape).astype(np.int64)
    size = np.abs(h).max(axis=2)
    scale_bound = bound.max(axis=2) / 127 + size / 127 * reference.UNIT * 2
    assert (np.abs(scale - size / 127) <= scale_bound).all()
    # Rounding to a code costs half a step, the inverse and the product two roundings of at most 127 steps.
    assert (np.abs(q * scale[..., None].astype(np.float64) - h) <= bound + scale[..., None] * (0.5 + 127 * 4 * reference.UNIT)).all()
    assert (np.abs(q).max(axis=2)[size > 1e-29] == 127).all()
    np.testing.assert_array_equal(corr, -128 * q.sum(axis=2))
    np.testing.assert_array_equal(total, scale * q.sum(axis=2).astype(np.float32))
    stored = (b.astype(np.uint32) << 16).view(np.float32).reshape(h.shape)
    assert (np.abs(stored - h) <= bound + 2.0**-8 * (np.abs(h) + bound)).all()


@pytest.mark.parametrize("k", [32, 64, 96, 576])
@pytest.mark.parametrize("epilogue", [STORE, ADD, SILU_MUL])
@pytest.mark.parametrize("fmt", reference.FORMATS)
def test_float64_and_the_same_bits_for_every_level_and_number_of_rows(fmt: str, epilogue: int, k: int) -> None:
    rng = np.random.default_rng(k + epilogue)
    n = 128 if epilogue == SILU_MUL else {32: 1, 64: 33, 96: 95, 576: 70}[k]
    w = reference.Weight.random(fmt, n, k, rng)
    packed = reference.pack(w)
    act = Activations.random(max(ROWS), k, rng, gap=5)
    for bias in (None, rng.standard_normal(n).astype(np.float32)):
        _native.use("scalar")
        specified = linear(w, packed, act, epilogue, act.rows, bias)
        check_against_float64(w, act, epilogue, bias, specified)
        for level in LEVELS:
            _native.use(level)
            for rows in ROWS:
                assert same_bits(linear(w, packed, act, epilogue, rows, bias), tuple(x[:rows] for x in specified)), (level, rows)


@pytest.mark.parametrize("fmt", reference.FORMATS)
@pytest.mark.parametrize(("rows", "k", "n"), [(700, 32, 64), (200, 8192, 64), (97, 20000 // 32 * 32, 64)])
def test_blocks_of_rows_do_not_change_a_bit(fmt: str, rows: int, k: int, n: int) -> None:
    rng = np.random.default_rng(rows)
    w = reference.Weight.random(fmt, n, k, rng)
    packed, act = reference.pack(w), Activations.random(rows, k, rng)
    for epilogue in (STORE, SILU_MUL):
        results = []
        for level in (name for name in LEVELS if name != "scalar"):
            _native.use(level)
            results.append(linear(w, packed, act, epilogue, rows, None))
        assert all(same_bits(results[0], other) for other in results[1:])
        _native.use("scalar")
        for row in (0, rows // 2, rows - 1):
            one = Activations.of(act.of_width("q")[row : row + 1], act.of_width("scale")[row : row + 1])
            assert same_bits(linear(w, packed, one, epilogue, 1, None), tuple(x[row : row + 1] for x in results[0])), row


@pytest.mark.parametrize("fmt", reference.FORMATS)
@pytest.mark.parametrize("epilogue", [ADD, SILU_MUL])
def test_ranges_of_panels_write_their_own_columns_only(fmt: str, epilogue: int) -> None:
    rng = np.random.default_rng(7)
    n, k = 64 * 3, 64
    w = reference.Weight.random(fmt, n, k, rng)
    packed, act = reference.pack(w), Activations.random(30, k, rng)
    units = 3 if epilogue == SILU_MUL else 6
    for level in LEVELS:
        _native.use(level)
        for rows in (1, 5, 30):
            whole = linear(w, packed, act, epilogue, rows, None)
            for begin, end in ((0, 1), (1, 3), (2, 2), (units - 1, units)):
                part = linear(w, packed, act, epilogue, rows, None, begin=begin, end=end)
                nothing = linear(w, packed, act, epilogue, rows, None, begin=0, end=0)
                for x, y, z in zip(part, whole, nothing, strict=True):
                    width = x.shape[1] // units
                    inside = np.zeros(x.shape[1], bool)
                    inside[begin * width : end * width] = True
                    np.testing.assert_array_equal(x, np.where(inside, y, z))


EXTREMES = {
    "largest": (127, 15, 65504.0),
    "smallest": (-127, 0, 65504.0),
    "zero activations": (0, 15, 1.0),
    "zero scales": (127, 15, 0.0),
    "subnormal scales": (-127, 15, 2.0**-24),
    "negative scales": (127, 0, -65504.0),
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("fmt", reference.FORMATS)
def test_extremes_neither_saturate_nor_differ_between_levels(fmt: str, name: str) -> None:
    value, code, weight_scale = EXTREMES[name]
    rows, n, k = 14, 64, 96
    w = reference.Weight(
        fmt,
        np.full((n, k), code * 17 if fmt == "q8_0" else code, np.uint8),
        np.full((n, k // 32), weight_scale, np.float16),
        np.full((n, k // 32), -weight_scale if fmt == "q4_1" else 0, np.float16),
    )
    packed = reference.pack(w)
    # The last rows hold scales no finite product survives, and one that is not a number.
    scale = np.full((rows, k // 32), 0.5, np.float32)
    scale[1], scale[2], scale[10], scale[11], scale[12, 1], scale[13] = 1e-38, 1e-45, 3e38, np.inf, np.nan, 1e30
    act = Activations.of(np.full((rows, k), value, np.int8), scale)
    for epilogue in (STORE, ADD, SILU_MUL):
        results = {}
        for level in LEVELS:
            _native.use(level)
            results[level] = linear(w, packed, act, epilogue, rows, None)
            for one, all_rows in zip(linear(w, packed, act, epilogue, 1, None), results[level], strict=True):
                np.testing.assert_array_equal(one, all_rows[:1])
        for level in LEVELS:
            for x, y in zip(results[level], results["scalar"], strict=True):
                np.testing.assert_array_equal(x, y)
        first = Activations.of(act.of_width("q")[:10], scale[:10])
        if epilogue == STORE:
            check_against_float64(w, first, epilogue, None, (results["scalar"][0][:10],))
            assert np.isnan(results["scalar"][0][12]).all()


def test_a_gate_that_is_not_finite_stays_visible() -> None:
    rng = np.random.default_rng(11)
    w = reference.Weight.random("q8_0", 128, 32, rng)
    packed, act = reference.pack(w), Activations.random(3, 32, rng)
    for bad in (np.nan, np.inf):
        bias = np.zeros(128, np.float32)
        bias[5] = bad  # a gate of the first pair
        results = []
        for level in LEVELS:
            _native.use(level)
            results.append(linear(w, packed, act, SILU_MUL, 3, bias))
            _, scale, _, total, b = results[-1]
            assert not np.isfinite(scale[:, 0]).any()
            assert np.isnan(total[:, 0]).all()
            assert not np.isfinite((b[:, 5].astype(np.uint32) << 16).view(np.float32)).any()
            assert np.isfinite(scale[:, 1]).all()
        for other in results[1:]:
            for x, y in zip(results[0], other, strict=True):
                np.testing.assert_array_equal(x, y)


def test_saturated_gates() -> None:
    """Gates far beyond where the exponential is clamped: h is up * gate or nothing."""
    rng = np.random.default_rng(12)
    w = reference.Weight.random("q4_1", 64, 32, rng)
    packed, act = reference.pack(w), Activations.random(2, 32, rng)
    bias = np.concatenate([np.repeat([300.0, -300.0, 88.0, -88.0], 8), np.ones(32)]).astype(np.float32)
    for level in LEVELS:
        _native.use(level)
        check_against_float64(w, act, SILU_MUL, bias, linear(w, packed, act, SILU_MUL, 2, bias))


@pytest.mark.parametrize("fmt", reference.FORMATS)
def test_the_two_packed_oracles_agree(fmt: str) -> None:
    """This file's packer and the index arithmetic the packer's own test uses must mean the same layout."""
    w = reference.Weight.random(fmt, 70, 96, np.random.default_rng(13))
    np.testing.assert_array_equal(layout.packed_values(fmt, reference.pack(w), 70, 96), w.values())


BAD = {
    "format": ({"format": 9}, "format: expected 0 .* got 9"),
    "epilogue": ({"epilogue": 3}, "epilogue: expected 0 .* got 3"),
    "k": ({"k": 48}, "k: expected a positive multiple of 32, .* got 48"),
    "n": ({"n": 0}, "n: expected 1 to .*, got 0"),
    "rows": ({"rows": -1}, "rows: expected 0 or more, got -1"),
    "too many rows": ({"rows": 5}, r"q: expected at least \[5, 64\], got \[4, 64\]"),
    "weight": ({"weight": np.zeros(64, np.uint8)}, "weight: expected 2304 bytes, got 64"),
    "alignment": ({"weight": reference.aligned(np.zeros(2305, np.uint8))[1:]}, "weight: expected an address that is a multiple of 64"),
    "no activations": ({"q": None}, "q: expected an array, got None"),
    "short scales": ({"scale": np.zeros((4, 1), np.float32)}, r"scale: expected at least \[4, 2\], got \[4, 1\]"),
    "unequal strides": ({"corr": np.zeros((4, 3), np.int32)}, "corr: expected the row stride of scale, 2, got 3"),
    "columns apart": ({"q": np.zeros((64, 4), np.int8).T}, "q: expected contiguous rows"),
    "no output": ({"out": None}, "out: expected an array, got None"),
    "short output": ({"out": np.zeros((4, 39), np.float32)}, r"out: expected at least \[4, 40\], got \[4, 39\]"),
    "bias": ({"bias": np.zeros(41, np.float32)}, "bias: expected 40 values, got 41"),
    "range": ({"begin": 1, "end": 3}, "begin, end: expected 0 <= begin <= end <= 2, got 1, 3"),
    "silu columns": ({"epilogue": SILU_MUL}, "n: expected a multiple of 64 under silu_mul, got 40"),
    "bf16 activations": ({"format": 3, "weight": reference.aligned(np.zeros(8192, np.uint8))}, "b: expected an array, got None"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_are_refused_by_name(name: str) -> None:
    change, message = BAD[name]
    good: dict[str, Any] = {
        "format": 0, "weight": reference.aligned(np.zeros(2304, np.uint8)), "n": 40, "k": 64, "rows": 4, "epilogue": STORE,
        **Activations(4, 64).inputs(), "out": np.zeros((4, 40), np.float32),
    }  # fmt: skip
    _native.linear(**good)
    with pytest.raises(ValueError, match=r"^\[linear\] " + message):
        _native.linear(**{**good, **change})


def test_wrong_types_are_refused() -> None:
    good = Activations(1, 32).inputs()
    with pytest.raises(TypeError):
        _native.linear(0, reference.aligned(np.zeros(576, np.uint8)), 32, 32, 1, STORE, **good, out=np.zeros((1, 32)))


def test_bench_windows_measure_something() -> None:
    limits = _native.Limits(1, 4)
    assert min(limits.read(0.001), limits.int8(0.001), limits.fp32(0.001)) > 0
    for epilogue in (STORE, ADD, SILU_MUL):
        bench = _native.LinearBench(0, 64, 64, 3, epilogue, 2, 2)
        assert bench.bytes == 2304
        assert 0 < bench.run(0.001) < 1
