"""The memory that packed weights live in.

Shared (a memfd), so that a restarted engine and its replicas map the same pages again; or private, backed by huge pages on machines
whose shared memory has none: with 4 KiB pages, two threads read weights at two thirds of the speed (93 against 140 GB/s where both
were measured side by side), which a restart that packs again does not outweigh everywhere. `shared_huge_pages` tells which it is.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

HUGE_PAGE = 2 << 20  # the mapping begins and ends on one, so that the kernel may back it with huge pages
ALIGNMENT = 64  # bytes: a cache line, and what the kernels load at once
MADV_HUGEPAGE = 14
PROT_NONE, MAP_FIXED = 0, 0x10
F_ADD_SEALS, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 0x2, 0x4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def shared_huge_pages(root: Path = Path("/")) -> bool:
    """Whether this machine backs memfds with huge pages when asked to."""
    try:
        setting = (root / "sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return False
    return any(f"[{mode}]" in setting for mode in ("always", "within_size", "advise", "force"))


def rounded(nbytes: int) -> int:
    """The bytes an arena of `nbytes` takes: whole huge pages."""
    return -(-max(nbytes, 1) // HUGE_PAGE) * HUGE_PAGE


class Arena:
    """A mapping aligned to 2 MiB, of a memfd or (fd -1) private. Arrays made by `array` keep it alive; addresses do not."""

    def __init__(self, fd: int, nbytes: int, writable: bool) -> None:
        self.fd = fd
        self.writable = writable
        self._owned = False
        self.nbytes = rounded(nbytes)
        self._base = 0
        size = os.fstat(fd).st_size if fd >= 0 else self.nbytes
        if size < self.nbytes:
            raise ValueError(f"[Arena] fd: expected at least {self.nbytes} bytes, got {size}")
        # Reserve one huge page more than needed, map the file over the aligned part, give the rest back.
        reserved = _map(0, self.nbytes + HUGE_PAGE, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._base = -(-reserved // HUGE_PAGE) * HUGE_PAGE
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        kind = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            _map(self._base, self.nbytes, protection, kind | MAP_FIXED, fd)
        except OSError:
            _libc.munmap(reserved, self.nbytes + HUGE_PAGE)
            self._base = 0
            raise
        before, after = self._base - reserved, HUGE_PAGE - (self._base - reserved)
        if before:
            _libc.munmap(reserved, before)
        if after:
            _libc.munmap(self._base + self.nbytes, after)
        _libc.madvise(self._base, self.nbytes, MADV_HUGEPAGE)  # a wish; without huge pages it works all the same

    @classmethod
    def create(cls, nbytes: int) -> Arena:
        """A new shared arena of zeros. Pages are taken when they are first written. The memfd keeps its size for good (sealed)."""
        fd = os.memfd_create("headrace-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, rounded(nbytes))
            fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
            arena = cls(fd, nbytes, writable=True)
            arena._owned = True  # closed with the arena; a descriptor given to Arena() stays its giver's
            return arena
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def private(cls, nbytes: int) -> Arena:
        """A new arena of zeros that only this process has."""
        return cls(-1, nbytes, writable=True)

    @property
    def address(self) -> int:
        """Where it begins in this process."""
        return self._base

    def array(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A view. Raises ValueError if it would leave the arena."""
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        self.check(offset, count * kind.itemsize)
        buffer = (ctypes.c_uint8 * (count * kind.itemsize)).from_address(self._base + offset)
        buffer._arena = self  # type: ignore[attr-defined]  # whoever holds the view holds the mapping
        view: NDArray[Any] = np.frombuffer(memoryview(buffer).cast("B"), kind).reshape(shape)
        view.flags.writeable = self.writable  # otherwise a write would not be an error but a fault
        return view

    def check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset % ALIGNMENT or offset > self.nbytes or nbytes > self.nbytes - offset:
            raise ValueError(f"[Arena] {nbytes} bytes at {offset}: expected a multiple of {ALIGNMENT} inside {self.nbytes} bytes")

    def __del__(self, munmap: Any = _libc.munmap, close: Any = os.close) -> None:  # at the interpreter's exit the module's names are gone
        if getattr(self, "_base", 0):
            munmap(self._base, self.nbytes)
            self._base = 0
        if getattr(self, "_owned", False):
            self._owned = False
            close(self.fd)


def _map(address: int, nbytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if result is None or result == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {nbytes} bytes: {os.strerror(error)}")
    return int(result)
