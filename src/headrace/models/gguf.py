"""GGUF files, versions 2 and 3: the header, read by a parser that trusts nothing in it.

Rules: a size is compared with what remains of the file before anything is allocated or read; sizes are compared by subtraction from
the file's length, never by adding numbers the file gave; every limit is a constant here. Errors name the file and the field.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError, UnsupportedModel
from headrace.models.gguf_header import ARRAY, BOOL, SCALARS, STRING, U32, U64, HeaderReader, StringArray
from headrace.models.source import MAX_ELEMENTS, DataFile, TensorInfo

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1  # the format's own limit
MAX_NAME_BYTES = 64  # the format's own limit
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

# name -> (number in the file, values a block, bytes a block)
TENSOR_TYPES: dict[str, tuple[int, int, int]] = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34), "Q8_1": (9, 32, 40), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "Q8_K": (15, 256, 292), "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74),
    "IQ3_XXS": (18, 256, 98), "IQ1_S": (19, 256, 50), "IQ4_NL": (20, 32, 18), "IQ3_S": (21, 256, 110), "IQ2_S": (22, 256, 82),
    "IQ4_XS": (23, 256, 136), "I8": (24, 1, 1), "I16": (25, 1, 2), "I32": (26, 1, 4), "I64": (27, 1, 8), "F64": (28, 1, 8),
    "IQ1_M": (29, 256, 56), "BF16": (30, 1, 2), "TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66), "MXFP4": (39, 32, 17),
}  # fmt: skip
TYPE_NAMES = {number: name for name, (number, _, _) in TENSOR_TYPES.items()}

INTEGERS = frozenset({0, 1, 2, 3, 4, 5, 10, 11})
FLOATS = frozenset({6, 12})

Value = int | float | bool | str | StringArray | NDArray[Any]


class GGUFFile:
    """An opened GGUF file: `metadata`, `tensors`, and reading by pread. Raises ModelError on anything that is not as it should be."""

    kind = "gguf"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Value] = {}
        self.metadata_types: dict[str, int] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.file = DataFile(self.path)
        try:
            self._parse(HeaderReader(self.file))
        except BaseException:
            self.close()
            raise

    def _parse(self, header: HeaderReader) -> None:
        if header.size < 4 or header.data[:4] != b"GGUF":
            found = header.data[:4]
            raise ModelError(self.path, "magic", f"expected b'GGUF', got {found!r}")
        header.pos = 4
        version = header.scalar(U32, "version")
        if version & 0xFFFF == 0 and version != 0:
            raise UnsupportedModel(self.path, "version", "a big-endian file; only little-endian files are supported")
        if version not in (2, 3):
            raise UnsupportedModel(self.path, "version", f"GGUF version {version}; supported are 2 and 3")
        self.version: int = version
        num_tensors = header.scalar(U64, "tensor_count")
        num_keys = header.scalar(U64, "metadata_kv_count")
        # The least a key takes: length, character, type, one byte; a tensor: length, character, dimensions, one of them, type, offset.
        for field, count, limit, least in (("metadata_kv_count", num_keys, MAX_KEYS, 14), ("tensor_count", num_tensors, MAX_TENSORS, 33)):
            if count > limit or count > (header.size - header.pos) // least:
                raise ModelError(
                    self.path, field, f"{count} entries; at most {limit}, and they must fit in the file of {header.size} bytes"
                )
        for index in range(num_keys):
            self._parse_key(header, index)
        alignment = self._alignment()
        infos = [self._parse_tensor(header, index) for index in range(num_tensors)]
        self._place(header, infos, alignment)

    def _parse_key(self, header: HeaderReader, index: int) -> None:
        key = header.string(f"metadata key {index}", MAX_KEY_BYTES)
        if not key:
            raise ModelError(self.path, f"metadata key {index}", "the key is empty")
        if key in self.metadata:
            raise ModelError(self.path, key, "the key appears twice")
        kind = header.scalar(U32, key)
        self.metadata_types[key] = kind
        if kind == STRING:
            self.metadata[key] = header.string(key)
        elif kind == ARRAY:
            item = header.scalar(U32, key)
            count = header.scalar(U64, key)
            if item == STRING:
                self.metadata[key] = header.strings(key, count)
            elif item in SCALARS:
                self.metadata[key] = header.numbers(key, item, count)
            elif item == ARRAY:
                raise UnsupportedModel(self.path, key, "an array of arrays is not supported")
            else:
                raise ModelError(self.path, key, f"unknown array item type {item}")
        elif kind in SCALARS:
            value = header.scalar(SCALARS[kind][1], key)
            if kind == BOOL:
                if value > 1:
                    raise ModelError(self.path, key, f"a bool is 0 or 1, got {value}")
                value = bool(value)
            self.metadata[key] = value
        else:
            raise ModelError(self.path, key, f"unknown value type {kind}")

    def _alignment(self) -> int:
        key = "general.alignment"
        if key not in self.metadata:
            return DEFAULT_ALIGNMENT
        if self.metadata_types[key] != 4:
            raise ModelError(self.path, key, "expected a u32")
        alignment = self.metadata[key]
        if not isinstance(alignment, int) or alignment < 8 or alignment > 1 << 20 or alignment & (alignment - 1):
            raise ModelError(self.path, key, f"expected a power of two from 8 to {1 << 20}, got {alignment}")
        return alignment

    def _parse_tensor(self, header: HeaderReader, index: int) -> tuple[TensorInfo, int]:
        """The tensor with its offset relative to the data section, which begins where the header ends."""
        name = header.string(f"name of tensor {index}", MAX_NAME_BYTES)
        if not name:
            raise ModelError(self.path, f"name of tensor {index}", "the name is empty")
        dimensions = header.scalar(U32, name)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ModelError(self.path, name, f"{dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(header.scalar(U64, name) for _ in range(dimensions))[::-1]
        number = header.scalar(U32, name)
        if number not in TYPE_NAMES:
            raise UnsupportedModel(self.path, name, f"unknown tensor type {number}; known are {', '.join(TENSOR_TYPES)}")
        kind = TYPE_NAMES[number]
        elements = math.prod(shape)  # Python's integers do not wrap
        if elements > MAX_ELEMENTS or max(shape) > MAX_ELEMENTS:
            raise ModelError(self.path, name, f"shape {shape} is too large: at most {MAX_ELEMENTS} values")
        _, block, block_bytes = TENSOR_TYPES[kind]
        if shape[-1] % block:
            raise ModelError(self.path, name, f"rows of {shape[-1]} values; {kind} has blocks of {block}")
        offset = header.scalar(U64, name)
        return TensorInfo(name, shape, kind, 0, elements // block * block_bytes), offset

    def _place(self, header: HeaderReader, infos: list[tuple[TensorInfo, int]], alignment: int) -> None:
        """Check that the tensors lie one after another, padded to the alignment, and end inside the file."""
        if not infos:
            return
        padding = -header.pos % alignment
        if padding > header.size - header.pos:
            raise ModelError(self.path, "tensor data", f"missing: the file ends at {header.size}, inside the padding behind the header")
        base = header.pos + padding  # at most the file's size, as just checked
        room = header.size - base
        expected = 0  # never exceeds room by more than the padding
        for info, offset in infos:
            if info.name in self.tensors:
                raise ModelError(self.path, info.name, "the tensor appears twice")
            if offset % alignment:
                raise ModelError(self.path, info.name, f"offset {offset} is not aligned to {alignment}")
            if offset != expected:
                raise ModelError(
                    self.path, info.name, f"offset {offset}, expected {expected}: tensors follow each other, padded to {alignment}"
                )
            if offset > room or info.nbytes > room - offset:
                raise ModelError(
                    self.path, info.name, f"{info.nbytes} bytes at offset {offset} exceed the {room} bytes of data in the file"
                )
            self.tensors[info.name] = TensorInfo(info.name, info.shape, info.type, base + offset, info.nbytes)
            expected = offset + info.nbytes + -info.nbytes % alignment

    def _typed(self, key: str, kinds: frozenset[int], wanted: str, default: Any) -> Any:
        if key not in self.metadata:
            if default is None:
                raise ModelError(self.path, key, f"missing; expected {wanted}")
            return default
        if self.metadata_types[key] not in kinds:
            raise ModelError(self.path, key, f"expected {wanted}, got a value of type {self.metadata_types[key]}")
        return self.metadata[key]

    def integer(self, key: str, least: int, most: int, default: int | None = None) -> int:
        """An integer of the metadata within [least, most]; without a default it must be there."""
        value: int = self._typed(key, INTEGERS, "an integer", default)
        if key in self.metadata and not least <= value <= most:
            raise ModelError(self.path, key, f"expected {least} to {most}, got {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite float of the metadata."""
        value: float = self._typed(key, FLOATS, "a float", default)
        if not math.isfinite(value):
            raise ModelError(self.path, key, f"expected a finite number, got {value}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value: str = self._typed(key, frozenset({STRING}), "a string", default)
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value: bool = self._typed(key, frozenset({BOOL}), "a bool", default)
        return value

    def strings(self, key: str) -> StringArray | None:
        """An array of strings, or None if the key is absent."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, StringArray):
            raise ModelError(self.path, key, "expected an array of strings")
        return value

    def integers(self, key: str) -> NDArray[np.int64] | None:
        """An array of integers, or None if the key is absent."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise ModelError(self.path, key, "expected an array of integers")
        return value.astype(np.int64)

    def file_of(self, tensor: TensorInfo) -> DataFile:
        return self.file

    def read(self, name: str) -> bytes:
        """A tensor's bytes as they are in the file."""
        tensor = self.tensors[name]
        return self.file.read(tensor.nbytes, tensor.offset, name)

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
