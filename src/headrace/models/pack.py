"""The layout of packed weights in the arena, computed from headers alone, and the packing of one tensor into it.

The executor relies on: q, k, v of a layer lie directly one after another, each of whole panels (32 columns); gate and up are one weight
`layers.{i}.gate_up` whose panels alternate gate, up; columns and k that only pad are zero weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.config import Level, ModelConfig
from headrace.errors import ModelError
from headrace.kernels import native
from headrace.models.arena import ALIGNMENT
from headrace.models.families import Network, Use
from headrace.models.gguf import TENSOR_TYPES
from headrace.models.source import DataFile

PANEL = 32  # columns a panel holds
GROUP = 32  # k values that share a scale
GROUP_BYTES = {"q4_0": 576, "q4_1": 640, "q8_0": 1088, "bf16": 2048}  # of one panel; native/kernels.h
EXACT = {"Q4_0": "q4_0", "Q4_1": "q4_1", "Q8_0": "q8_0", "F32": "bf16", "F16": "bf16", "BF16": "bf16"}
SOURCE_BLOCKS = {name: TENSOR_TYPES[name] for name in EXACT}
VECTORS = {"attn_norm", "ffn_norm", "final_norm", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias"}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A linear layer or an embedding in the arena: n columns (outputs, or tokens) of k values."""

    format: str  # q4_0, q4_1, q8_0, bf16
    n: int
    k: int
    address: int  # in this process
    nbytes: int
    offset: int  # in the arena


@dataclass(frozen=True, slots=True)
class Part:
    """One source tensor of an item, and where its rows go: plain, rotary (un-interleave each head), gate or up (alternate panels)."""

    use: Use
    columns: str = "plain"


@dataclass(frozen=True, slots=True)
class PackedItem:
    """A packed weight to be made."""

    name: str
    format: str
    n: int
    k: int
    offset: int
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return packed_bytes(self.format, self.n, self.k)


@dataclass(frozen=True, slots=True)
class FloatItem:
    """A float32 vector to be made: a norm or a bias."""

    name: str
    shape: tuple[int, ...]
    offset: int
    part: Part


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything that goes into the arena. `nbytes` is known before anything is allocated."""

    packed: tuple[PackedItem, ...]
    floats: tuple[FloatItem, ...]
    nbytes: int


def packed_bytes(format: str, n: int, k: int) -> int:  # noqa: A002  # the field's word for it
    """Bytes of a packed [n, k] weight: a multiple of 64."""
    return -(-n // PANEL) * -(-k // GROUP) * GROUP_BYTES[format]


def weight_format(kind: str, source: str, level: Level) -> str:
    """The packed format of a tensor of type `source`. `kind` is its canonical name without the layer.

    auto: as the file is; 16- and 32-bit floats become bf16. int8: q8_0. int4: 4-bit linear layers, q4_0 unless the file is Q4_1 already;
    embedding and head stay at what a quantized file has, else q8_0, because 4 bits there cost more quality than the memory is worth.
    """
    exact = EXACT[source]
    if level == "auto" or level == "bf16":
        return exact if level == "auto" else "bf16"
    if level == "int8":
        return "q8_0"
    if kind in ("embed", "head"):
        return "q8_0" if exact == "bf16" else exact
    return "q4_1" if exact == "q4_1" else "q4_0"


def _common(first: str, second: str) -> str:
    """What two weights share that must share a format."""
    return first if first == second else "bf16" if "bf16" in (first, second) else "q8_0"


def plan(network: Network, level: Level) -> Layout:
    """Lay out a network's weights at a level."""
    packed: list[PackedItem] = []
    floats: list[FloatItem] = []
    end = 0
    uses = network.uses

    def add(name: str, form: str, n: int, k: int, *parts: Part) -> None:
        nonlocal end
        packed.append(PackedItem(name, form, n, k, end, parts))
        end += packed_bytes(form, n, k)

    for name, use in uses.items():
        kind = name.rpartition(".")[2]
        if kind in VECTORS or kind == "up":
            continue  # up comes with gate
        n, k = use.tensor.shape
        form = weight_format(kind, use.tensor.type, level)
        if kind == "gate":
            up = uses[name.removesuffix("gate") + "up"]
            form = _common(form, weight_format("up", up.tensor.type, level))
            add(name.removesuffix("gate") + "gate_up", form, 2 * -(-n // PANEL) * PANEL, k, Part(use, "gate"), Part(up, "up"))
        else:
            add(name, form, n, k, Part(use, "rotary" if use.interleaved else "plain"))
    for name, use in uses.items():
        if name.rpartition(".")[2] in VECTORS:
            floats.append(FloatItem(name, use.tensor.shape, end, Part(use, "rotary" if use.interleaved else "plain")))
            end += -(-4 * use.tensor.elements // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(packed), tuple(floats), end)


def column_map(columns: str, rows: int, config: ModelConfig) -> NDArray[np.int64] | None:
    """The column of the packed weight that each source row becomes; None: its own number."""
    row = np.arange(rows, dtype=np.int64)
    if columns == "rotary":
        head, at = np.divmod(row, config.head_dim)
        rotary = config.rope.rotary_dim or config.head_dim
        paired = at // 2 + (at % 2) * (rotary // 2)
        return head * config.head_dim + np.where(at < rotary, paired, at)
    if columns in ("gate", "up"):
        return row // PANEL * (2 * PANEL) + row % PANEL + (PANEL if columns == "up" else 0)
    return None


def row_step(columns: str, config: ModelConfig) -> int:
    """Rows that end on a panel's edge in source and packed weight, so that two threads never write one panel."""
    return math.lcm(PANEL, config.head_dim) if columns == "rotary" else PANEL


def row_bytes(source: str, k: int) -> int:
    """Bytes of one row of k values as the file has it."""
    _, block, block_bytes = SOURCE_BLOCKS[source]
    return k // block * block_bytes


@dataclass(frozen=True, slots=True)
class Task:
    """Rows [start, stop) of a source tensor, to be read and packed by one thread."""

    item: PackedItem
    part: Part
    file: DataFile
    start: int
    stop: int
    columns: NDArray[np.int64] | None

    @property
    def position(self) -> int:
        """Where its bytes begin in the file."""
        tensor = self.part.use.tensor
        return tensor.offset + self.start * row_bytes(tensor.type, self.item.k)


def split(item: PackedItem, part: Part, file: DataFile, config: ModelConfig, piece_bytes: int) -> Iterator[Task]:
    """Cut one part into tasks of about `piece_bytes` of the file."""
    tensor = part.use.tensor
    rows, k = tensor.shape
    columns = column_map(part.columns, rows, config)
    unit = row_step(part.columns, config)
    step = max(1, piece_bytes // max(1, row_bytes(tensor.type, k) * unit)) * unit
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        yield Task(item, part, file, start, stop, None if columns is None else columns[start:stop])


def zero_padding(item: PackedItem, address: int) -> None:
    """Zero weights wherever no source row will be written."""
    rows = sum(part.use.tensor.shape[0] for part in item.parts)
    if rows % PANEL or item.k % GROUP or rows < item.n:
        native.pack_zero(item.format, (address, item.nbytes), item.n, item.k)


def run(task: Task, buffer: bytearray, address: int) -> None:
    """Read a task's bytes into the reused `buffer` and pack them into the item at `address`. The GIL is free while either runs."""
    item, tensor = task.item, task.part.use.tensor
    count = (task.stop - task.start) * row_bytes(tensor.type, item.k)
    if len(buffer) < count:
        buffer.extend(bytes(count - len(buffer)))
    with memoryview(buffer) as whole, whole[:count] as view:
        task.file.read_into(view, task.position, tensor.name)
        to = (address, item.nbytes)
        try:
            native.pack(item.format, to, item.n, item.k, view, tensor.type.lower(), task.stop - task.start, task.start, task.columns)
        except ValueError as error:
            raise ModelError(task.file.path, tensor.name, f"rows {task.start} to {task.stop}: {error}") from None


def read_vector(file: DataFile, item: FloatItem, config: ModelConfig) -> NDArray[np.float32]:
    """A norm or a bias as float32, its heads un-interleaved. A value that is not finite is a ModelError."""
    tensor = item.part.use.tensor
    raw = file.read(tensor.nbytes, tensor.offset, tensor.name)
    if tensor.type == "BF16":
        values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(raw, "<f2" if tensor.type == "F16" else "<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise ModelError(file.path, tensor.name, f"value {int(np.flatnonzero(~np.isfinite(values))[0])} is not finite")
    columns = column_map(item.part.columns, len(values), config)
    if columns is not None:
        moved = np.empty_like(values)
        moved[columns] = values
        return moved
    return values
