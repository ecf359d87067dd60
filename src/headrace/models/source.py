"""What a model file gives, whichever format it is in: named tensors of known type and shape, read by pread into the caller's buffer.

Tensors are never mapped: a file cut short while it is read is an error, where a mapping would be a SIGBUS.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from headrace.errors import ModelError

MAX_ELEMENTS = 2**48  # of one tensor: far above any model, far below where 64-bit sizes wrap in native code


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `shape` has the outermost dimension first, so that a linear layer is (n, k) in either format."""

    name: str
    shape: tuple[int, ...]
    type: str  # F32, F16, BF16, Q4_0, Q4_1, Q8_0, ... as GGUF spells it
    offset: int  # bytes from the start of its file
    nbytes: int
    file: int = 0  # which of the source's files

    @property
    def elements(self) -> int:
        count = 1
        for dimension in self.shape:
            count *= dimension
        return count


class Source(Protocol):
    """A model's files, opened, their headers checked."""

    @property
    def path(self) -> Path: ...

    @property
    def kind(self) -> str: ...  # gguf, safetensors

    @property
    def tensors(self) -> dict[str, TensorInfo]: ...

    def file_of(self, tensor: TensorInfo) -> DataFile:
        """The file the tensor's bytes lie in."""

    def close(self) -> None: ...


class DataFile:
    """A regular file opened for reading. `size` is what it had when it was opened; every bound is checked against it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_NONBLOCK: a named pipe in place of a model must not hang the server.
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise ModelError(path, "", f"cannot be opened: {getattr(error, 'strerror', None) or error}") from None
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise ModelError(path, "", "expected a regular file")
        self.size = status.st_size

    def read_into(self, buffer: memoryview[Any], offset: int, field: str) -> None:
        """Fill `buffer` from `offset`. A file that has become shorter is a ModelError."""
        view = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        while len(view) > 0:
            try:
                count = os.preadv(self.fd, [view], offset)
            except OSError as error:
                raise ModelError(self.path, field, f"cannot be read: {error.strerror}") from None
            if count == 0:
                raise ModelError(self.path, field, f"the file ends at byte {offset}, {len(view)} bytes too early")
            view = view[count:]
            offset += count

    def read(self, count: int, offset: int, field: str) -> bytes:
        """`count` bytes from `offset`; the caller has checked both against `size`."""
        buffer = bytearray(count)
        self.read_into(memoryview(buffer), offset, field)
        return bytes(buffer)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
