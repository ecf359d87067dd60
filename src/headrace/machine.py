"""What this process may use of the machine: threads and memory, as affinity, cgroups (v1 and v2) and the hardware bound them.

Every function takes the root of the file system, so that tests use a made-up tree.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MAX_FILES = 1 << 16  # open files: clients, more than one event loop can serve
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `limit` is the lesser of the machine's memory and the cgroups' limits; `available` what can still be taken of it."""

    total: int
    limit: int
    available: int


def threads(root: Path = Path("/"), affinity: set[int] | None = None) -> int:
    """Threads that can run at once: min(affinity, cgroup quota rounded down but at least 1, physical cores)."""
    cpus = os.sched_getaffinity(0) if affinity is None else affinity
    quota = cpu_quota(root)
    return max(1, min(len(cpus), physical_cores(root, cpus), int(quota) if quota is not None else len(cpus)))


def physical_cores(root: Path, cpus: set[int]) -> int:
    """Distinct cores among `cpus`: hyperthreads of one core count once."""
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
        cores.add(siblings or f"cpu{cpu}")
    return len(cores)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the tightest cgroup around this process grants, or None without a limit."""
    quotas: list[float] = []
    for folder in _chain(root, "cpu"):
        unified = _read(folder / "cpu.max").split()
        if len(unified) == 2 and unified[0].isdigit() and unified[1].isdigit() and int(unified[1]):
            quotas.append(int(unified[0]) / int(unified[1]))
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:  # -1: no limit
            quotas.append(quota / period)
    return min(quotas, default=None)


def memory(root: Path = Path("/")) -> Memory:
    """What memory there is. Page cache that the kernel would give back at once does not count as used."""
    meminfo = _table(root / "proc/meminfo")
    total = meminfo.get("MemTotal:", 0) * 1024
    available = meminfo.get("MemAvailable:", meminfo.get("MemFree:", 0)) * 1024
    limit = total
    for folder in _chain(root, "memory"):
        for most, current, inactive in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.high", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            bound = _number(folder / most)  # "max" is no number
            if bound is None or not 0 <= bound < UNLIMITED:
                continue
            used = (_number(folder / current) or 0) - _table(folder / "memory.stat").get(inactive, 0)
            limit = min(limit, bound)
            available = min(available, max(0, bound - max(0, used)))
    return Memory(total, limit, min(available, limit))


def raise_file_limit() -> int:
    """Let this process open as many files as it may ever: each client is one. Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def _chain(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the cgroups this process is in, from its own up to the mount, for the unified hierarchy and for the controller's."""
    mounts = [line.split(" - ") for line in _read(root / "proc/self/mountinfo").splitlines()]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        kind = "cgroup" if controllers else "cgroup2"
        for mount in mounts:
            fields = mount[0].split()
            system = mount[1].split() if len(mount) == 2 else []
            if len(fields) < 5 or len(system) < 3 or system[0] != kind or (controllers and controller not in system[2].split(",")):
                continue
            yield from _upwards(root, PurePosixPath(fields[3]), PurePosixPath(fields[4]), PurePosixPath(path))
            break


def _upwards(root: Path, mounted: PurePosixPath, at: PurePosixPath, path: PurePosixPath) -> Iterator[Path]:
    """`mounted` is what of the hierarchy is mounted `at`. A path outside it (another namespace) leaves the mount itself."""
    below = path.relative_to(mounted).parts if path.is_relative_to(mounted) and ".." not in path.parts else ()
    base = root / at.relative_to("/")
    for depth in range(len(below), -1, -1):
        yield base.joinpath(*below[:depth])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(_read(path))
    except ValueError:
        return None


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    table = {}
    for line in _read(path).splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[1].isdigit():
            table[fields[0]] = int(fields[1])
    return table
