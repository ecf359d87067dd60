"""The GGUF reader: what it reads, and that it refuses every lie with a ModelError naming file and field."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_models import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    TYPES,
    U8,
    U16,
    U32,
    U64,
    Tensor,
    Tiny,
    cuts,
    entry,
    gguf_bytes,
    gguf_entries,
    gguf_tensors,
    mutated,
    random_tensor,
    text,
)  # fmt: skip

from headrace.errors import ModelError, UnsupportedModel
from headrace.models import gguf, gguf_header
from headrace.models.gguf import GGUFFile, StringArray

MAX = 2**64 - 1


def write(path: Path, data: bytes) -> Path:
    file = path / "model.gguf"
    file.write_bytes(data)
    return file


def some_tensors(kind: str = "F32", count: int = 2) -> list[Tensor]:
    rng = np.random.default_rng(1)
    return [Tensor(f"t{i}", (3, 64), kind, random_tensor(rng, (3, 64), kind)) for i in range(count)]


def tiny_bytes(**settings: Any) -> bytes:
    tiny = Tiny(**settings)
    return gguf_bytes(gguf_entries(tiny), gguf_tensors(tiny))


@pytest.mark.parametrize("version", [2, 3])
def test_everything_is_read(tmp_path: Path, version: int) -> None:
    scalars = {
        "u8": (U8, 255), "i8": (I8, -128), "u16": (U16, 65535), "i16": (I16, -32768), "u32": (U32, 2**32 - 1), "i32": (I32, -(2**31)),
        "f32": (F32, 0.25), "bool": (BOOL, True), "string": (STRING, "grüße, 世界"), "u64": (U64, MAX), "i64": (I64, -(2**63)),
        "f64": (F64, 1e300), "empty": (STRING, ""),
    }  # fmt: skip
    arrays = {
        "a.u8": (U8, [0, 255]), "a.i16": (I16, [-1, 5, -32768]), "a.f32": (F32, [0.5, -2.0]), "a.bool": (BOOL, [True, False]),
        "a.none": (I32, []), "a.u64": (U64, [MAX, 0]), "a.strings": (STRING, ["a", "", "ö", "x" * 1000]), "a.no strings": (STRING, []),
    }  # fmt: skip
    entries = [entry(key, kind, value) for key, (kind, value) in scalars.items()]
    entries += [entry(key, ARRAY, value, kind) for key, (kind, value) in arrays.items()]
    rng = np.random.default_rng(0)
    tensors = [Tensor(kind, (5, 96), kind, random_tensor(rng, (5, 96), kind)) for kind in TYPES]
    with GGUFFile(write(tmp_path, gguf_bytes(entries, tensors, version=version))) as file:
        assert file.version == version
        for key, (kind, value) in scalars.items():
            assert file.metadata[key] == value
            assert type(file.metadata[key]) is type(value), key
            assert file.metadata_types[key] == kind
        for key, (_, value) in arrays.items():
            found = file.metadata[key]
            assert isinstance(found, np.ndarray | StringArray)
            assert found.tolist() == value, key
        assert list(file.tensors) == list(TYPES)
        for tensor in tensors:
            info = file.tensors[str(tensor.name)]
            assert (info.shape, info.type, info.nbytes) == (tensor.shape, tensor.type, len(tensor.data))
            assert file.read(info.name) == tensor.data


def test_an_empty_file_and_a_zero_dimension_are_accepted(tmp_path: Path) -> None:
    with GGUFFile(write(tmp_path, gguf_bytes())) as file:
        assert (file.metadata, file.tensors) == ({}, {})
    with GGUFFile(write(tmp_path, gguf_bytes([], [Tensor("none", (0, 32)), *some_tensors()]))) as file:
        assert file.tensors["none"].nbytes == 0
        assert file.read("t1") == some_tensors()[1].data


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_custom_alignment(tmp_path: Path, alignment: int) -> None:
    data = gguf_bytes([entry("general.alignment", U32, alignment)], some_tensors("Q4_0", 3), alignment=alignment)
    with GGUFFile(write(tmp_path, data)) as file:
        assert all(tensor.offset % alignment == 0 for tensor in file.tensors.values())
        assert file.read("t2") == some_tensors("Q4_0", 3)[2].data


def test_the_last_tensor_needs_no_padding(tmp_path: Path) -> None:
    tensor = Tensor("t", (3,), "F32", bytes(12))
    data = gguf_bytes([], [tensor])
    with GGUFFile(write(tmp_path, data[: len(data) - 20])) as file:
        assert file.tensors["t"].nbytes == 12


def alignment_of(value: bytes) -> bytes:
    return gguf_bytes([text("general.alignment") + value], some_tensors())


ONE = [entry("a", U32, 1)]
# name -> (file, field the error names, words of the problem)
REFUSED: dict[str, tuple[bytes, str, str]] = {
    "no file": (b"", "magic", "expected b'GGUF'"),
    "three bytes": (b"GGU", "magic", "expected b'GGUF'"),
    "bad magic": (gguf_bytes(magic=b"FUGG"), "magic", "expected b'GGUF'"),
    "magic only": (b"GGUF", "version", "the file ends at 4"),
    "version 0": (gguf_bytes(version=0), "version", "version 0; supported are 2 and 3"),
    "version 1": (gguf_bytes(version=1), "version", "version 1"),
    "future version": (gguf_bytes(version=4), "version", "version 4"),
    "big-endian": (gguf_bytes(order=">"), "version", "big-endian"),
    "no counts": (gguf_bytes()[:12], "tensor_count", "the file ends at 12"),
    "tensor count": (gguf_bytes(num_tensors=MAX), "tensor_count", f"{MAX} entries"),
    "key count": (gguf_bytes(num_keys=MAX), "metadata_kv_count", f"{MAX} entries"),
    "key count that wraps": (gguf_bytes(ONE * 3, num_keys=2**62), "metadata_kv_count", "entries"),
    "more keys than there are": (gguf_bytes(ONE, num_keys=2) + bytes(64), "metadata key 1", "empty"),
    "key length": (gguf_bytes([struct.pack("<Q", MAX) + bytes(32)]), "metadata key 0", f"a string of {MAX} bytes"),
    "key length to the end": (gguf_bytes([struct.pack("<Q", 60) + bytes(32)]), "metadata key 0", "needs 60 bytes"),
    "empty key": (gguf_bytes([entry("", U32, 1)]), "metadata key 0", "empty"),
    "key not UTF-8": (gguf_bytes([entry(b"\xff\xfe", U32, 1)]), "metadata key 0", "not UTF-8"),
    "value type": (gguf_bytes([text("k") + struct.pack("<IQ", 13, 0)]), "k", "unknown value type 13"),
    "array item type": (gguf_bytes([text("k") + struct.pack("<IIQ", ARRAY, 99, 0)]), "k", "unknown array item type 99"),
    "array of arrays": (gguf_bytes([text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 0)]), "k", "array of arrays"),
    "array length": (gguf_bytes([text("k") + struct.pack("<IIQ", ARRAY, U8, 2**60)]), "k", "does not fit"),
    "array length that wraps": (gguf_bytes([text("k") + struct.pack("<IIQ", ARRAY, U64, 2**61) + bytes(64)]), "k", "does not fit"),
    "string array length": (gguf_bytes([text("k") + struct.pack("<IIQ", ARRAY, STRING, 2**60)]), "k", "does not fit"),
    "string length": (gguf_bytes([text("k") + struct.pack("<IQ", STRING, MAX - 7)]), "k", "a string of"),
    "string in an array": (gguf_bytes([entry("k", ARRAY, ["ab", "c"], STRING)[:-9] + struct.pack("<Q", 2**32 - 1)]), "k", "string 1 of"),
    "bool": (gguf_bytes([entry("k", BOOL, 2)]), "k", "0 or 1, got 2"),
    "bool in an array": (gguf_bytes([entry("k", ARRAY, [0, 2], U8).replace(b"\x09\0\0\0\0", b"\x09\0\0\0\x07")]), "k", "neither 0 nor 1"),
    "duplicate key": (gguf_bytes(ONE * 2), "a", "twice"),
    "alignment 0": (alignment_of(struct.pack("<II", U32, 0)), "general.alignment", "power of two"),
    "alignment 1": (alignment_of(struct.pack("<II", U32, 1)), "general.alignment", "power of two"),
    "alignment 13": (alignment_of(struct.pack("<II", U32, 13)), "general.alignment", "power of two"),
    "alignment 2^31": (alignment_of(struct.pack("<II", U32, 2**31)), "general.alignment", "power of two"),
    "alignment of another type": (alignment_of(struct.pack("<IQ", U64, 32)), "general.alignment", "expected a u32"),
    "alignment as text": (alignment_of(struct.pack("<I", STRING) + text("32")), "general.alignment", "expected a u32"),
    "inconsistent alignment": (gguf_bytes([entry("general.alignment", U32, 64)], [Tensor("a", (8,), "F32", bytes(32)), *some_tensors()]),
                               "t0", "offset 32 is not aligned to 64"),
    "name too long": (gguf_bytes([], [Tensor("n" * 65, (8,), data=bytes(32))]), "name of tensor 0", "65 bytes, expected at most 64"),
    "empty name": (gguf_bytes([], [Tensor("", (8,), data=bytes(32))]), "name of tensor 0", "empty"),
    "no dimensions": (gguf_bytes([], [Tensor("t", (8,), data=bytes(32), dimensions=0)]), "t", "0 dimensions"),
    "five dimensions": (gguf_bytes([], [Tensor("t", (1, 1, 1, 1, 8), data=bytes(32))]), "t", "5 dimensions"),
    "2^32 - 1 dimensions": (gguf_bytes([], [Tensor("t", (8,), data=bytes(32), dimensions=2**32 - 1)]), "t", "dimensions"),
    "row no multiple of the block": (gguf_bytes([], [Tensor("t", (4, 33), "Q4_0", bytes(72))]), "t", "rows of 33 values; Q4_0"),
    "negative dimension": (gguf_bytes([], [Tensor("t", (2**63, 1), data=bytes(32))]), "t", "too large"),
    "elements wrap 2^64": (gguf_bytes([], [Tensor("t", (2**32, 2**32), data=bytes(32))]), "t", "too large"),
    "elements wrap 2^32": (gguf_bytes([], [Tensor("t", (2**16, 2**16), data=bytes(32))]), "t", "exceed"),
    "zero times huge": (gguf_bytes([], [Tensor("t", (0, 2**63))]), "t", "too large"),
    "bytes wrap": (gguf_bytes([], [Tensor("t", (2**48, 2**14), data=bytes(32))]), "t", "too large"),
    "sum wraps": (gguf_bytes([], [Tensor("a", (2**46 - 16,)), Tensor("b", (2**46 - 16,), offset=2**48 - 64)]), "a", "exceed"),
    "upstream's size overflow": (gguf_bytes([], [Tensor(n, (0x7FFFFFFFFFFFFFC0,), number=24) for n in ("a", "b")]), "a", "too large"),
    "unknown type": (gguf_bytes([], [Tensor("t", (8,), data=bytes(32), number=4)]), "t", "unknown tensor type 4; known are F32, F16, Q4_0"),
    "type 2^32 - 1": (gguf_bytes([], [Tensor("t", (8,), data=bytes(32), number=2**32 - 1)]), "t", "unknown tensor type"),
    "offset": (gguf_bytes([], [Tensor("t", (8,), data=bytes(32), offset=2**60)]), "t", "offset"),
    "offset that wraps": (gguf_bytes([], [Tensor("t", (8,), data=bytes(32), offset=MAX - 31)]), "t", "offset"),
    "offset of one byte": (gguf_bytes([], [Tensor("t", (8,), data=bytes(32), offset=1)]), "t", "not aligned"),
    "overlap": (gguf_bytes([], [Tensor("a", (8,), data=bytes(32)), Tensor("b", (8,), data=bytes(32), offset=0)]), "b", "expected 32"),
    "gap": (gguf_bytes([], [Tensor("a", (8,), data=bytes(32)), Tensor("b", (8,), data=bytes(32), offset=64)]), "b", "expected 32"),
    "duplicate tensor": (gguf_bytes([], [Tensor("a", (8,), data=bytes(32))] * 2), "a", "twice"),
    "not enough data": (gguf_bytes([], some_tensors())[:-1], "t1", "exceed"),
    "no data": (gguf_bytes([], some_tensors(), num_tensors=1)[:80], "tensor data", "missing"),
    "shorter than the padding": (gguf_bytes([], [Tensor("t", (8,), data=bytes(32))])[:60], "tensor data", "inside the padding"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_lies_are_refused(tmp_path: Path, name: str) -> None:
    data, field, words = REFUSED[name]
    path = write(tmp_path, data)
    with pytest.raises(ModelError) as caught:
        GGUFFile(path)
    message = str(caught.value)
    assert caught.value.field == field, message
    assert words in message
    assert message.startswith(f"{path}: {field}: ")


@pytest.mark.parametrize("name", ["version 1", "big-endian", "unknown type", "array of arrays"])
def test_what_is_well_formed_but_unknown_is_unsupported(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedModel):
        GGUFFile(write(tmp_path, REFUSED[name][0]))


def test_what_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, words in ((tmp_path / "absent", "No such file"), (tmp_path, "regular file"), (tmp_path / "pipe", "regular file")):
        with pytest.raises(ModelError, match=words):
            GGUFFile(path)
    with pytest.raises(ModelError):
        GGUFFile("a\0b")


@pytest.mark.parametrize(
    "claim", [struct.pack("<IIQ", ARRAY, U8, 2**38), struct.pack("<IIQ", ARRAY, STRING, 2**36), struct.pack("<IQ", STRING, 2**38)]
)
def test_sizes_are_checked_before_memory_is_taken(tmp_path: Path, claim: bytes) -> None:
    """A terabyte of nothing: the claims are true of the file's size, and still no header."""
    path = write(tmp_path, gguf_bytes([text("k") + claim]))
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    with pytest.raises(ModelError, match="k"):
        GGUFFile(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("seed", range(4))
def test_string_arrays_of_any_lengths(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short, long, empty strings and ones with NULs and length-like bytes, read through a small first buffer."""
    monkeypatch.setattr(gguf_header, "FIRST_READ", 64)
    rng = np.random.default_rng(seed)
    longest = (8, 300, 5000, 40)[seed]
    strings = [
        "\0" * int(n) if rng.random() < 0.1 * (seed == 3) else chr(97 + int(n) % 26) * int(n) for n in rng.integers(0, longest, 3000)
    ]
    with GGUFFile(write(tmp_path, gguf_bytes([entry("k", ARRAY, strings, STRING), entry("after", U32, 5)]))) as file:
        found = file.strings("k")
        assert found is not None
        assert len(found) == len(strings)
        assert found[17] == strings[17]
        assert found[-1] == strings[-1]
        assert found.tolist() == strings
        assert found[3:9] == strings[3:9]
        assert file.metadata["after"] == 5


def test_a_string_that_is_not_utf8_is_named_when_it_is_asked_for(tmp_path: Path) -> None:
    with GGUFFile(write(tmp_path, gguf_bytes([entry("k", ARRAY, [b"fine", b"\xc3\x28"], STRING)]))) as file:
        strings = file.strings("k")
        assert strings is not None
        assert strings[0] == "fine"
        with pytest.raises(ModelError, match="k: string 1 is not UTF-8"):
            strings.tolist()


@pytest.mark.parametrize("lengths", ["vocabulary", "alternating", "long"])
def test_large_vocabularies_are_read_fast(tmp_path: Path, lengths: str) -> None:
    count = 150_000
    size = {"vocabulary": lambda i: 2 + i % 13, "alternating": lambda i: 3 if i % 40 else 300, "long": lambda i: 260}[lengths]
    tokens = [f"{i:06}".ljust(size(i), "x")[: size(i)] for i in range(count)]
    path = write(tmp_path, gguf_bytes([entry("tokenizer.ggml.tokens", ARRAY, tokens, STRING)]))
    best = 10.0
    for _ in range(3):
        start = time.perf_counter()
        with GGUFFile(path) as file:
            found = file.strings("tokenizer.ggml.tokens")
            assert found is not None
            best = min(best, time.perf_counter() - start)
            assert found.tolist() == tokens
    assert best < 1.0  # about 10 to 150 ms; the bound is for busy machines


def test_typed_access(tmp_path: Path) -> None:
    entries = [
        entry("n", U32, 7),
        entry("f", F32, float("nan")),
        entry("s", STRING, "x"),
        entry("b", BOOL, True),
        entry("a", ARRAY, [1], F32),
    ]
    with GGUFFile(write(tmp_path, gguf_bytes(entries))) as file:
        assert file.integer("n", 0, 10) == 7
        assert file.integer("absent", 1, 10, 0) == 0
        assert (file.text("s"), file.flag("b"), file.number("absent", 2.0)) == ("x", True, 2.0)
        assert file.strings("absent") is None
        for call, words in (
            (lambda: file.integer("n", 8, 10), "n: expected 8 to 10, got 7"),
            (lambda: file.integer("s", 0, 1), "s: expected an integer"),
            (lambda: file.integer("b", 0, 1), "b: expected an integer"),
            (lambda: file.integer("absent", 0, 1), "absent: missing; expected an integer"),
            (lambda: file.number("f"), "f: expected a finite number"),
            (lambda: file.number("n"), "n: expected a float"),
            (lambda: file.strings("a"), "a: expected an array of strings"),
            (lambda: file.integers("a"), "a: expected an array of integers"),
        ):
            with pytest.raises(ModelError, match=words):
                call()


def test_a_file_cut_short_after_it_was_opened(tmp_path: Path) -> None:
    path = write(tmp_path, gguf_bytes([], some_tensors()))
    with GGUFFile(path) as file:
        with path.open("r+b") as other:
            other.truncate(path.stat().st_size - 40)
        assert file.read("t0") == some_tensors()[0].data
        with pytest.raises(ModelError, match="t1: the file ends at byte"):
            file.read("t1")


def test_reads_that_bring_only_a_part_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system may answer at any time; the header is read so as well."""
    path = write(tmp_path, tiny_bytes())
    with GGUFFile(path) as file:
        whole = {name: file.read(name) for name in file.tensors}
    preadv = os.preadv
    calls = []

    def a_part(fd: int, views: list[memoryview], offset: int) -> int:
        calls.append(len(views[0]))
        return preadv(fd, [views[0][:997]], offset)

    monkeypatch.setattr(os, "preadv", a_part)
    with GGUFFile(path) as file:
        assert {name: file.read(name) for name in file.tensors} == whole
    assert max(calls) > 997


def test_descriptors_are_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    path = write(tmp_path, REFUSED["not enough data"][0])
    for _ in range(20):
        with pytest.raises(ModelError):
            GGUFFile(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_truncation_anywhere(tmp_path: Path) -> None:
    data = tiny_bytes()
    data = data[: len(data.rstrip(b"\0"))]  # without the padding behind the last tensor, every byte counts
    for size in cuts(len(data)):
        with pytest.raises(ModelError):
            GGUFFile(write(tmp_path, data[:size]))
    GGUFFile(write(tmp_path, data)).close()


def test_mutations(tmp_path: Path) -> None:
    """Whatever happens to the header, it is read or refused with a ModelError."""
    rng = np.random.default_rng(20)
    data = tiny_bytes(layers=1)
    reach = len(data) - sum(len(tensor.data) for tensor in gguf_tensors(Tiny(layers=1)))
    refused = 0
    for _ in range(1000):
        path = write(tmp_path, mutated(rng, data, reach))
        try:
            with GGUFFile(path) as file:
                for value in file.metadata.values():
                    if isinstance(value, StringArray):
                        value.tolist()
        except ModelError as error:
            refused += str(error).startswith(str(path))
    assert refused > 400


def test_types_are_those_of_the_gguf_package() -> None:
    constants = pytest.importorskip("gguf.constants", reason="gguf is not installed")
    sizes = {kind.name: (int(kind), *size) for kind, size in constants.GGML_QUANT_SIZES.items()}
    assert gguf.TENSOR_TYPES.items() <= sizes.items()


def test_a_file_written_by_the_gguf_package(tmp_path: Path) -> None:
    package = pytest.importorskip("gguf", reason="gguf is not installed")
    path = tmp_path / "other.gguf"
    writer = package.GGUFWriter(str(path), "llama")
    writer.add_token_list(["a", "bc", ""])
    writer.add_rope_freq_base(5e5)
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    writer.add_tensor("plain", values)
    quantized = package.quants.quantize(values, package.GGMLQuantizationType.Q4_1)
    writer.add_tensor("quantized", quantized, raw_dtype=package.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(path) as file:
        tokens = file.strings("tokenizer.ggml.tokens")
        assert tokens is not None
        assert tokens.tolist() == ["a", "bc", ""]
        assert file.number("llama.rope.freq_base") == 5e5
        assert (file.tensors["quantized"].shape, file.tensors["quantized"].type) == ((4, 64), "Q4_1")
        assert file.read("quantized") == quantized.tobytes()
        assert file.read("plain") == values.tobytes()
