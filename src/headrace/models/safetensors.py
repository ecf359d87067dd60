"""Safetensors folders as Hugging Face lays them out: `config.json` and one file or several with an index. Nothing in a folder is executed.

Only `*.json` and `*.safetensors` are ever opened: pickled weights (`.bin`, `.pt`) and code (`auto_map`) are not looked at.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace.errors import ModelError, UnsupportedModel
from headrace.models.source import MAX_ELEMENTS, DataFile, TensorInfo

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_JSON_BYTES = 64 << 20  # of config.json and of an index
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 8
MAX_SHARDS = 4096

# Bytes a value. Types the packer does not read are listed all the same, so that the file around them can be checked.
VALUE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


def parse_json(path: Path, text: bytes, field: str) -> dict[str, Any]:
    """A JSON object of a model's file. Duplicate keys, NaN and Infinity, bad UTF-8 and endless nesting are ModelErrors."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ModelError(path, field, f"the key {twice!r} appears twice")
        return result

    def constant(name: str) -> Any:
        raise ModelError(path, field, f"{name} is not JSON")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
        if b"\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # escapes can spell half a character, which nobody could print
    except UnicodeEncodeError:
        raise ModelError(path, field, "a string with half a surrogate pair") from None
    except UnicodeDecodeError as error:
        raise ModelError(path, field, f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ModelError(path, field, "nested too deeply") from None
    except ValueError as error:
        raise ModelError(path, field, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(path, field, f"expected a JSON object, got a {type(value).__name__}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model's folder."""
    with DataFile(path) as file:
        if file.size > MAX_JSON_BYTES:
            raise ModelError(path, "", f"{file.size} bytes, expected at most {MAX_JSON_BYTES}")
        return parse_json(path, file.read(file.size, 0, ""), "")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def read_header(file: DataFile, index: int = 0) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, checked to cover its data exactly: no gap, no overlap, nothing behind."""
    path = file.path
    if file.size < 10:
        raise ModelError(path, "header", f"the file has {file.size} bytes; a safetensors file has at least 10")
    length = int.from_bytes(file.read(8, 0, "header length"), "little")
    if length > MAX_HEADER_BYTES or length > file.size - 8:
        raise ModelError(path, "header length", f"{length} bytes; at most {MAX_HEADER_BYTES}, and the file has {file.size}")
    text = file.read(length, 8, "header")
    if text[:1] != b"{":
        raise ModelError(path, "header", f"expected '{{', got {text[:1]!r}")
    header = parse_json(path, text, "header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelError(path, "__metadata__", "expected an object of strings")
    if len(header) > MAX_TENSORS:
        raise ModelError(path, "header", f"{len(header)} tensors, expected at most {MAX_TENSORS}")
    room = file.size - 8 - length
    tensors = {name: _tensor(path, name, entry, room, index) for name, entry in header.items()}
    end = 0
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            what = "overlaps the tensor before it" if info.offset < end else f"leaves a gap of {info.offset - end} bytes before it"
            raise ModelError(path, info.name, f"data_offsets: begins at {info.offset} and {what}")
        end = info.offset + info.nbytes  # at most room, as checked for each
    if end != room:
        raise ModelError(path, "data", f"the tensors take {end} bytes, the file has {room}")
    base = 8 + length
    return {name: TensorInfo(name, t.shape, t.type, base + t.offset, t.nbytes, index) for name, t in tensors.items()}


def _tensor(path: Path, name: str, entry: object, room: int, index: int) -> TensorInfo:
    """One entry of the header; its offset is still relative to the data."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ModelError(path, name, "expected dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in VALUE_BYTES:
        raise UnsupportedModel(path, name, f"unknown dtype {kind!r}; known are {', '.join(VALUE_BYTES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(_is_count(d) for d in shape):
        raise ModelError(path, name, f"shape: expected at most {MAX_DIMENSIONS} sizes, got {str(shape)[:80]}")
    elements = math.prod(shape)  # Python's integers do not wrap
    if elements > MAX_ELEMENTS or max(shape, default=0) > MAX_ELEMENTS:
        raise ModelError(path, name, f"shape {shape} is too large: at most {MAX_ELEMENTS} values")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise ModelError(path, name, f"data_offsets: expected two offsets, got {str(offsets)[:80]}")
    begin, end = offsets
    if begin > end or end > room:
        raise ModelError(path, name, f"data_offsets {offsets}: expected begin <= end <= {room}, the bytes of data in the file")
    nbytes = elements * VALUE_BYTES[kind]
    if end - begin != nbytes:
        raise ModelError(path, name, f"data_offsets span {end - begin} bytes; {kind} of shape {shape} takes {nbytes}")
    return TensorInfo(name, tuple(shape), kind, begin, nbytes, index)


class SafetensorsFolder:
    """An opened model folder: `config`, `generation` (generation_config.json or empty) and `tensors` of all its shards."""

    kind = "safetensors"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files: list[DataFile] = []
        self.tensors: dict[str, TensorInfo] = {}
        if not self.path.is_dir():
            raise ModelError(self.path, "", "expected a folder with config.json and safetensors files")
        try:
            self.config = read_json(self.path / "config.json")
            generation = self.path / "generation_config.json"
            self.generation: dict[str, Any] = read_json(generation) if generation.exists() else {}
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        single = self.path / "model.safetensors"
        index_path = self.path / "model.safetensors.index.json"
        if single.exists():
            self._add(single)
        elif index_path.exists():
            self._open_shards(index_path)
        else:
            pickled = any(self.path.glob("*.bin")) or any(self.path.glob("*.pt")) or any(self.path.glob("*.pth"))
            why = "; pickled weights are never opened: convert them to safetensors" if pickled else ""
            raise ModelError(self.path, "", f"expected model.safetensors or model.safetensors.index.json{why}")

    def _open_shards(self, index_path: Path) -> None:
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(index_path, "weight_map", "expected an object of tensor and file names")
        expected: dict[str, set[str]] = {}
        for name, shard in weight_map.items():
            # A plain name only: an index must not make us open files elsewhere.
            if not isinstance(shard, str) or not shard.endswith(".safetensors") or "/" in shard or "\\" in shard or "\0" in shard:
                raise ModelError(index_path, name, f"expected the name of a safetensors file in this folder, got {str(shard)[:80]!r}")
            expected.setdefault(shard, set()).add(name)
        if len(expected) > MAX_SHARDS:
            raise ModelError(index_path, "weight_map", f"{len(expected)} files, expected at most {MAX_SHARDS}")
        for shard in sorted(expected):
            added = self._add(self.path / shard)
            for name in sorted(expected[shard] ^ added):
                where = "in the index but not in the file" if name in expected[shard] else "in the file but not in the index for it"
                raise ModelError(self.path / shard, name, where)

    def _add(self, path: Path) -> set[str]:
        file = DataFile(path)
        self.files.append(file)
        found = read_header(file, len(self.files) - 1)
        for name in found:
            if name in self.tensors:
                raise ModelError(path, name, f"the tensor is also in {self.files[self.tensors[name].file].path.name}")
        self.tensors.update(found)
        return set(found)

    def file_of(self, tensor: TensorInfo) -> DataFile:
        return self.files[tensor.file]

    def read(self, name: str) -> bytes:
        """A tensor's bytes as they are in the file."""
        tensor = self.tensors[name]
        return self.file_of(tensor).read(tensor.nbytes, tensor.offset, name)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
