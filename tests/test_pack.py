"""The packers against index arithmetic in float64, against the gguf package, and under the sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import pack as reference

from headrace import _native

ROOT = Path(__file__).parents[1]
FORMATS, SOURCES = reference.FORMATS, reference.SOURCES
EXACT = [("q4_0", "q4_0"), ("q4_0", "q4_1"), ("q4_0", "q8_0"), ("q4_1", "q4_1"), ("q8_0", "q8_0"), ("bf16", "bf16")]  # source, format
Bytes = NDArray[np.uint8]


def half_bytes(x: NDArray[np.floating]) -> Bytes:
    return x.astype("<f2")[..., None].view(np.uint8)


def random_source(source: str, rows: int, k: int, seed: int, spread: float = 0.05) -> Bytes:
    """Bytes of a tensor [rows, k]; every bit pattern of the codes, finite scales of both signs."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, k)).astype(np.float32) * np.float32(spread)
    if source == "f32":
        return values.view(np.uint8).reshape(-1)
    if source == "f16":
        return half_bytes(values).reshape(-1)
    if source == "bf16":
        return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8).reshape(-1)
    blocks = rng.integers(0, 256, (rows, k // 32, reference.BLOCK_BYTES[source]), np.uint8)
    halves = 2 if source == "q4_1" else 1
    blocks[..., : 2 * halves] = half_bytes(rng.standard_normal((rows, k // 32, halves)) * spread).reshape(rows, k // 32, -1)
    return blocks.reshape(-1)


def pack(fmt: str, n: int, k: int, src: Bytes, source: str, rows: int, first: int = 0, map_: NDArray[np.int64] | None = None) -> Bytes:
    dst = np.full(_native.packed_bytes(fmt, n, k), 0xAA, np.uint8)
    _native.pack_zero(fmt, dst, n, k)
    _native.pack(fmt, dst, n, k, src, source, rows, first, map_)
    return dst


def pack_values(fmt: str, values: NDArray[np.floating]) -> NDArray[np.float64]:
    """What is left of fp32 values [rows, k] after packing."""
    rows, k = values.shape
    packed = pack(fmt, rows, k, np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1), "f32", rows)
    return reference.packed_values(fmt, packed, rows, k)[:, :k]


@pytest.mark.parametrize(("source", "fmt"), EXACT)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (32, 64), (45, 320), (96, 576)])
def test_exact_moves(source: str, fmt: str, n: int, k: int) -> None:
    src = random_source(source, n, k, seed=n)
    packed = pack(fmt, n, k, src, source, n)
    np.testing.assert_array_equal(reference.packed_values(fmt, packed, n, k), reference.source_values(source, src, n, k))
    # Columns past n are zero weights, to the byte.
    empty = np.zeros_like(packed)
    _native.pack_zero(fmt, empty, n, k)
    if fmt != "bf16":
        codes, scales, minima = reference.unpack(fmt, packed, -(-n // 32) * 32, k)
        assert np.all(codes[n:] == {"q4_0": 8, "q4_1": 0, "q8_0": 128}[fmt])
        assert not scales[n:].any()
        assert not minima[n:].any()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("k", [32, 96, 576])
def test_dequantize(source: str, k: int) -> None:
    src = random_source(source, 7, k, seed=k)
    out = _native.dequantize(src, source, 7, k)
    np.testing.assert_allclose(out, reference.source_values(source, src, 7, k), rtol=2**-24, atol=2**-24)  # q4_1: one rounding
    kind = getattr(gguf.GGMLQuantizationType, source.upper())
    np.testing.assert_array_equal(out, gguf.quants.dequantize(src.reshape(7, -1), kind).reshape(7, k))


@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("k", [*range(1, 34), 63, 65])
def test_k_inside_a_group(source: str, k: int) -> None:
    src = random_source(source, 3, k, seed=k)
    values = reference.source_values(source, src, 3, k)
    np.testing.assert_array_equal(_native.dequantize(src, source, 3, k), values)
    for fmt in FORMATS:
        packed = pack(fmt, 3, k, src, source, 3)
        w = reference.packed_values(fmt, packed, 3, k)
        assert np.abs(w[:, :k] - values).max() <= np.abs(values).max() / 8  # q4_0: the far end is one step short
        if fmt == "q4_1":
            assert not reference.unpack(fmt, packed, 3, k)[0][:, k:].any()
        else:
            assert not w[:, k:].any()


def test_every_fp16_is_read_exactly() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    halves = bits[np.isfinite(bits.view(np.float16))]
    out = _native.dequantize(halves.view(np.uint8), "f16", 1, len(halves))
    np.testing.assert_array_equal(out[0], halves.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(np.signbit(out[0]), halves >> 15)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-6, 3))
def test_q8_0_rounds_to_the_nearest_code(seed: int, exponent: float) -> None:
    x = (np.random.default_rng(seed).standard_normal((2, 64)) * 10.0**exponent).astype(np.float32)
    packed = pack("q8_0", 2, 64, x.view(np.uint8).reshape(-1), "f32", 2)
    codes, scales, _ = reference.unpack("q8_0", packed, 2, 64)
    groups = x.reshape(2, 2, 32).astype(np.float64)
    absmax = np.abs(groups).max(axis=2).astype(np.float32)
    expected = (absmax / np.float32(127)).astype(np.float16).astype(np.float64)
    normal = expected >= 2**-14
    np.testing.assert_array_equal(scales[normal], expected[normal])
    assert np.all(np.abs(scales - expected) <= 2**-24)
    q = codes.reshape(2, 2, 32) - 128
    assert np.abs(q).max() <= 127
    units = np.divide(groups, scales[..., None], out=np.zeros_like(groups), where=scales[..., None] > 0)
    assert np.abs(units).max() <= 127.5  # also a subnormal scale reaches the extreme
    assert np.all(np.abs(np.clip(units, -127, 127) - q) <= 0.5 + 127 * 2**-24)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-2, 3), st.floats(-3, 3))
def test_q4_1_spans_minimum_to_maximum(seed: int, exponent: float, shift: float) -> None:
    x = ((np.random.default_rng(seed).standard_normal((2, 32)) + shift) * 10.0**exponent).astype(np.float32)
    codes, scales, minima = reference.unpack("q4_1", pack("q4_1", 2, 32, x.view(np.uint8).reshape(-1), "f32", 2), 2, 32)
    low, high = x.min(axis=1), x.max(axis=1)
    np.testing.assert_array_equal(minima[:, 0], low.astype(np.float16))
    np.testing.assert_array_equal(scales[:, 0], ((high - low) / np.float32(15)).astype(np.float16))
    units = (x - minima) / scales
    assert np.all(np.abs(np.clip(units, 0, 15) - codes) <= 0.5 + 1e-4)


def test_q4_0_beats_the_usual_rule() -> None:
    x = np.random.default_rng(0).standard_normal((256, 320)).astype(np.float32) * 0.02
    usual = gguf.quants.dequantize(gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q4_0), gguf.GGMLQuantizationType.Q4_0)

    def error(w: NDArray[np.floating]) -> NDArray[np.float64]:
        return ((w.astype(np.float64) - x).reshape(-1, 32) ** 2).sum(axis=1)

    ours = error(pack_values("q4_0", x))
    assert np.all(ours <= error(usual) * (1 + 1e-5))
    assert ours.mean() < 0.91 * error(usual).mean()


@pytest.mark.parametrize("fmt", ["q4_0", "q8_0", "q4_1", "bf16"])
def test_what_is_already_in_a_format_stays(fmt: str) -> None:
    """Requantizing the values of a format (with codes that reach its ends, so that the scale shows) gives them back."""
    if fmt == "bf16":
        values = reference.source_values(fmt, random_source(fmt, 20, 96, seed=0), 20, 96)
    else:
        blocks = random_source(fmt, 20, 96, seed=0).reshape(20, 3, -1)
        blocks[..., -1] = {"q4_0": 0x00, "q4_1": 0x0F, "q8_0": 127}[fmt]
        if fmt == "q8_0":
            blocks[..., 2:][blocks[..., 2:] == 128] = 129  # -128 is past what 127 steps reach
        if fmt == "q4_1":
            blocks[..., 1] &= 0x7F  # min to max: a scale is not negative
            blocks[..., -2] = 0x00
        values = reference.source_values(fmt, blocks.reshape(-1), 20, 96)
    np.testing.assert_array_equal(pack_values(fmt, values), values.astype(np.float32))


@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_stay_exact(fmt: str) -> None:
    x = np.zeros((3, 64), np.float32)
    x[1, 32:] = -0.0
    x[2] = np.finfo(np.float32).smallest_subnormal  # vanishes in fp16
    w = pack_values(fmt, x)
    assert not w[:2].any()
    assert np.abs(w).max() <= 1e-44


def test_permuted_columns_and_pieces() -> None:
    """A weight packed at once, through a permutation in pieces, and with rows of two tensors, is the same bytes."""
    n, k = 70, 64
    src = random_source("q4_1", n, k, seed=5).reshape(n, -1)
    whole = pack("q4_1", n, k, src.reshape(-1), "q4_1", n)
    order = np.random.default_rng(0).permutation(n)
    dst = np.zeros_like(whole)
    _native.pack_zero("q4_1", dst, n, k)
    for piece in np.array_split(order, 3):
        _native.pack("q4_1", dst, n, k, np.ascontiguousarray(src[piece]), "q4_1", len(piece), map=piece.astype(np.int64))
    np.testing.assert_array_equal(dst, whole)
    _native.pack_zero("q4_1", dst, n, k)
    _native.pack("q4_1", dst, n, k, src[:33].tobytes(), 3, 33)
    _native.pack(1, (dst.ctypes.data, dst.nbytes), n, k, memoryview(src[33:].tobytes()), "q4_1", n - 33, 33)
    np.testing.assert_array_equal(dst, whole)


def test_threads_write_side_by_side() -> None:
    n, k = 256, 320
    src = random_source("bf16", n, k, seed=6).reshape(n, -1)
    whole = pack("q8_0", n, k, src.reshape(-1), "bf16", n)
    dst = np.zeros_like(whole)
    with ThreadPoolExecutor(2) as pool:  # columns of the same panels, interleaved
        parts = [np.arange(i, n, 2, dtype=np.int64) for i in range(2)]
        jobs = [pool.submit(_native.pack, "q8_0", dst, n, k, np.ascontiguousarray(src[part]), "bf16", len(part), 0, part) for part in parts]
        for job in jobs:
            job.result()
    np.testing.assert_array_equal(dst, whole)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("source", SOURCES)
def test_non_finite_is_refused(source: str, fmt: str) -> None:
    for bad in (np.inf, -np.inf, np.nan):
        for at in (0, 2) if source == "q4_1" else (0,):
            src = random_source(source, 2, 64, seed=0)
            if source == "f32":
                src.view(np.float32)[77] = bad
            elif source == "bf16":
                src.view(np.uint16)[77] = np.float32(bad).view(np.uint32) >> 16
            elif source == "f16":
                src.view(np.float16)[77] = bad
            else:
                src.reshape(4, -1)[3, at : at + 2] = half_bytes(np.float16(bad))
            with pytest.raises(ValueError, match="not finite"):
                pack(fmt, 2, 64, src, source, 2)
            with pytest.raises(ValueError, match="not finite"):
                _native.dequantize(src, source, 2, 64)


@pytest.mark.parametrize(("fmt", "largest"), [("q8_0", 127 * 65504.0), ("q4_0", 8 * 65504.0), ("q4_1", 65504.0), ("bf16", 3.3895e38)])
def test_too_large_is_refused(fmt: str, largest: float) -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, 5] = -largest
    pack_values(fmt, x)
    x[0, 5] = -largest * 1.002
    with pytest.raises(ValueError, match="too large"):
        pack_values(fmt, x)


def test_bad_arguments_are_named() -> None:
    src, dst = random_source("q4_0", 32, 64, seed=0), np.zeros(_native.packed_bytes("q4_0", 32, 64), np.uint8)

    def refused(match: str, **changes: object) -> None:
        good = {"format": "q4_0", "dst": dst, "n": 32, "k": 64, "src": src, "source": "q4_0", "rows": 32}
        with pytest.raises(ValueError, match=match):
            _native.pack(**{**good, **changes})

    refused(r"\[pack\] format: expected one of q4_0 \(0\), .*, got 'q5_0'", format="q5_0")
    refused(r"\[pack\] source: expected one of .*, got 6", source=6)
    refused("source is too short", src=src[:-1])
    refused("packed weight is too short", dst=dst[:-1])
    refused("not a multiple", k=63)
    refused("column lies outside", first=1)
    refused("column lies outside", map=np.full(32, 32))
    refused("column lies outside", map=np.full(32, -1))
    refused(r"map: expected 32 columns, got 31", map=np.arange(31))
    refused("not positive", rows=-1)
    refused("shape: expected positive", n=0)
    refused("shape: expected positive", n=2**62)
    refused("shape: expected positive", k=2**41)
    refused("contiguous writable", dst=dst.tobytes())
    refused("contiguous", src=src.reshape(-1, 2)[:, 0])
    refused(r"expected \(address, number of bytes\)", dst=(0, 100))
    with pytest.raises(ValueError, match=r"\[pack_zero\] dst: expected 1152 bytes, got 1151"):
        _native.pack_zero("q4_0", dst[:-1], 32, 64)
    with pytest.raises(ValueError, match="too short"):
        _native.dequantize(src, "f32", 2**39, 2)


def test_sizes() -> None:
    for fmt in FORMATS:
        for n, k in ((1, 1), (32, 32), (33, 33), (576, 1536)):
            assert _native.packed_bytes(fmt, n, k) == reference.packed_bytes(fmt, n, k)


def test_fuzz_under_sanitizers(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    assert compiler, "the sanitizer build of the packers needs g++"
    program = tmp_path / "fuzz_pack"
    flags = ["-std=gnu++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{ROOT / 'native'}"]
    subprocess.run([compiler, *flags, ROOT / "tests/fuzz_pack.cpp", ROOT / "native/pack.cpp", "-o", program], check=True)
    run = subprocess.run([program, "2024", "20000"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
