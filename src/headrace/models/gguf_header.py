"""The cursor a GGUF header is read with, and the arrays of strings it finds. It trusts no number in the file."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.source import DataFile

MAX_HEADER_BYTES = 256 << 20  # a vocabulary of a million tokens with its merges takes about 60 MB
FIRST_READ = 2 << 20

BOOL, STRING, ARRAY = 7, 8, 9
SCALARS: dict[int, tuple[str, struct.Struct]] = {
    0: ("u8", struct.Struct("<B")), 1: ("i8", struct.Struct("<b")), 2: ("u16", struct.Struct("<H")), 3: ("i16", struct.Struct("<h")),
    4: ("u32", struct.Struct("<I")), 5: ("i32", struct.Struct("<i")), 6: ("f32", struct.Struct("<f")), 7: ("bool", struct.Struct("<B")),
    10: ("u64", struct.Struct("<Q")), 11: ("i64", struct.Struct("<q")), 12: ("f64", struct.Struct("<d")),
}  # fmt: skip
U32, U64 = SCALARS[4][1], SCALARS[10][1]


class StringArray(Sequence[str]):
    """The strings of one metadata array, kept as they lie in the file and decoded when asked for."""

    def __init__(self, file: Path, key: str, data: bytes, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        self._file, self._key, self._data, self._starts, self._lengths = file, key, data, starts, lengths
        self._list: list[str] | None = None

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self.tolist()[index]
        if self._list is not None:
            return self._list[index]
        start = int(self._starts[index])
        return self._decode(self._data[start : start + int(self._lengths[index])], index)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def tolist(self) -> list[str]:
        """All of them, decoded once. A string that is not UTF-8 is a ModelError with its index."""
        if self._list is None:
            self._list = self._decode_together() or [self[i] for i in range(len(self))]
        return self._list

    def _decode(self, value: bytes, index: int) -> str:
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise ModelError(self._file, self._key, f"string {index} is not UTF-8: {value[:32]!r}") from None

    def _decode_together(self) -> list[str] | None:
        # The strings lie one after another, each behind eight bytes of length: put one NUL in place of those eight, decode once, split.
        if len(self) == 0:
            return []
        begin = int(self._starts[0])
        region = np.frombuffer(self._data, np.uint8)[begin - 8 : int(self._starts[-1]) + int(self._lengths[-1])].copy()
        keep = np.ones(len(region), np.bool_)
        at = self._starts - begin
        for byte in range(7):
            keep[at + byte] = False
        region[at + 7] = 0
        packed = region[keep]
        if np.count_nonzero(packed == 0) != len(self):
            return None  # a NUL inside a string
        try:
            return packed.tobytes().decode("utf-8").split("\0")[1:]
        except UnicodeDecodeError:
            return None


class HeaderReader:
    """A cursor over the file's first bytes, which are read as far as they turn out to be needed."""

    def __init__(self, file: DataFile) -> None:
        self.file = file
        self.size = file.size
        self.pos = 0
        self.data = file.read(min(file.size, FIRST_READ), 0, "header")

    @property
    def room(self) -> int:
        """Bytes the header may still take: to the end of the file, or to the limit."""
        return min(self.size, MAX_HEADER_BYTES) - self.pos

    def need(self, count: int, field: str) -> None:
        """Make sure that `count` bytes at `pos` are loaded."""
        if count > self.size - self.pos:
            raise ModelError(self.file.path, field, f"needs {count} bytes at offset {self.pos}, but the file ends at {self.size}")
        missing = count - (len(self.data) - self.pos)
        if missing > 0:
            if count > MAX_HEADER_BYTES - self.pos:
                raise ModelError(self.file.path, field, f"the header exceeds {MAX_HEADER_BYTES} bytes")
            more = min(max(missing, len(self.data)), self.size - len(self.data))
            self.data += self.file.read(more, len(self.data), field)

    def scalar(self, kind: struct.Struct, field: str) -> Any:
        self.need(kind.size, field)
        (value,) = kind.unpack_from(self.data, self.pos)
        self.pos += kind.size
        return value

    def string(self, field: str, limit: int = MAX_HEADER_BYTES) -> str:
        length = self.scalar(U64, field)
        if length > limit:
            raise ModelError(self.file.path, field, f"a string of {length} bytes, expected at most {limit}")
        self.need(length, field)
        value = self.data[self.pos : self.pos + length]
        self.pos += length
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise ModelError(self.file.path, field, f"not UTF-8: {value[:32]!r}") from None

    def numbers(self, key: str, kind: int, count: int) -> NDArray[Any]:
        name, layout = SCALARS[kind]
        if count > self.room // layout.size:
            raise ModelError(self.file.path, key, f"an array of {count} {name} does not fit in the {self.room} bytes that remain")
        self.need(count * layout.size, key)
        code = "u1" if kind == BOOL else name[0] + str(layout.size)
        values = np.frombuffer(self.data, "<" + code, count, self.pos)
        self.pos += count * layout.size
        if kind == BOOL:
            if (values > 1).any():
                raise ModelError(self.file.path, key, "a bool is neither 0 nor 1")
            return values.astype(np.bool_)
        return values.copy()  # the header's bytes are not kept alive by a few numbers

    def strings(self, key: str, count: int) -> StringArray:
        if count > self.room // 8:
            raise ModelError(self.file.path, key, f"an array of {count} strings does not fit in the {self.room} bytes that remain")
        starts = np.empty(count, np.int64)
        lengths = np.empty(count, np.int64)
        done, window, by_hand = 0, 1 << 20, 1
        while done < count:
            # As many as can be found at once, then some by hand, which also loads more of the file and finds what is wrong with it. Short
            # runs shrink the window and lengthen the stretch by hand, so that no mix of lengths costs more than a few times either way.
            before = self.pos
            run = self._short_strings(starts[done:], lengths[done:], window)
            window = min(max(4 * (self.pos - before), 4096), 1 << 20)
            by_hand = 1 if run >= 32 else min(2 * by_hand, 4096)
            done += run
            for i in range(done, min(count, done + by_hand)):
                if len(self.data) - self.pos < 8:
                    self.need(8, key)
                (length,) = U64.unpack_from(self.data, self.pos)
                self.pos += 8
                if length > len(self.data) - self.pos:
                    if length > self.room:
                        raise ModelError(self.file.path, key, f"string {i} of {length} bytes does not fit in the {self.room} that remain")
                    self.need(length, key)
                starts[i], lengths[i] = self.pos, length
                self.pos += length
                done += 1
        return StringArray(self.file.path, key, self.data, starts, lengths)

    def _short_strings(self, starts: NDArray[np.int64], lengths: NDArray[np.int64], window: int) -> int:
        """Index consecutive strings of under 256 bytes in the next `window` bytes; returns how many, `pos` after them.

        Each byte position is read as a 64-bit length at once; those under 256 are candidates. Candidates that each begin exactly where
        the one before them ends are proven to be the chain, by induction from `pos`; the first that does not ends the run.
        """
        count = len(self.data) - self.pos - 7
        if count <= 0:
            return 0
        words: NDArray[np.uint64] = np.ndarray((min(count, window),), "<u8", self.data, self.pos, (1,))
        candidates = np.flatnonzero(words < 256)[: len(starts) + 1]
        if len(candidates) < 2 or candidates[0] != 0:
            return 0
        found = words[candidates].astype(np.int64)
        follows = candidates[:-1] + 8 + found[:-1] == candidates[1:]
        run = len(follows) if follows.all() else int(np.argmin(follows))
        run = min(run, len(starts))  # of these, the next one's start proves that they lie inside what is loaded
        starts[:run] = candidates[:run] + (self.pos + 8)
        lengths[:run] = found[:run]
        if run:
            self.pos += int(candidates[run])
        return run
