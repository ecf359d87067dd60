"""Thread and memory limits from made-up trees of /proc and /sys: cgroups v1, v2, nested, limited and not."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from headrace import machine

GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712


class Tree:
    """A root with /proc and /sys as a container of some kind sees them."""

    def __init__(self, root: Path, total: int = 64 * GIB, available: int = 48 * GIB) -> None:
        self.root = root
        self.mounts: list[str] = []
        self.groups: list[str] = []
        self.write("proc/meminfo", f"MemTotal: {total // 1024} kB\nMemFree: 1024 kB\nMemAvailable: {available // 1024} kB\n")

    def write(self, path: str, value: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")

    def v2(self, path: str, mounted: str = "/", at: str = "/sys/fs/cgroup") -> None:
        self.mounts.append(f"30 23 0:26 {mounted} {at} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate")
        self.groups.append(f"0::{path}")
        self._proc()

    def v1(self, controllers: str, path: str, mounted: str = "/") -> None:
        self.mounts.append(f"33 31 0:30 {mounted} /sys/fs/cgroup/{controllers} rw,relatime shared:9 - cgroup cgroup rw,{controllers}")
        self.groups.append(f"{len(self.groups) + 2}:{controllers}:{path}")
        self._proc()

    def _proc(self) -> None:
        self.write("proc/self/mountinfo", "\n".join(["22 1 8:1 / / rw - ext4 /dev/sda1 rw", *self.mounts]))
        self.write("proc/self/cgroup", "\n".join(self.groups))

    def cores(self, siblings: list[str]) -> None:
        for cpu, of in enumerate(siblings):
            self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", of)

    def threads(self, cpus: int = 16) -> int:
        return machine.threads(self.root, set(range(cpus)))

    def memory(self) -> machine.Memory:
        return machine.memory(self.root)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_nothing_known_is_affinity_and_meminfo(tree: Tree) -> None:
    assert tree.threads(6) == 6
    assert machine.cpu_quota(tree.root) is None
    assert tree.memory() == machine.Memory(64 * GIB, 64 * GIB, 48 * GIB)


def test_an_empty_root_gives_no_memory_and_one_thread(tmp_path: Path) -> None:
    assert machine.threads(tmp_path, {3}) == 1
    assert machine.memory(tmp_path) == machine.Memory(0, 0, 0)


def test_this_machine() -> None:
    assert machine.threads() >= 1
    memory = machine.memory()
    assert 0 < memory.available <= memory.limit <= memory.total


def test_as_many_files_as_may_be() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
        limit = machine.raise_file_limit()
        assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 100
        assert limit == machine.MAX_FILES or limit == before[1] < machine.MAX_FILES
        assert machine.raise_file_limit() == limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", 16), ("50000 100000", 1), ("765000 100000", 7), ("100000 100000", 1), ("200000 50000", 4), ("6400000 100000", 16),
     ("nonsense", 16), ("", 16)],
)  # fmt: skip
def test_quota_v2(tree: Tree, quota: str, threads: int) -> None:
    tree.v2("/user.slice/app.service")
    tree.write("sys/fs/cgroup/user.slice/app.service/cpu.max", quota)
    assert tree.threads() == threads


@pytest.mark.parametrize(
    ("quota", "period", "threads"), [(-1, 100000, 16), (50000, 100000, 1), (765000, 100000, 7), (0, 100000, 16), (200000, 0, 16)]
)
def test_quota_v1(tree: Tree, quota: int, period: int, threads: int) -> None:
    tree.v1("cpu,cpuacct", "/docker/abc", mounted="/docker/abc")  # the container's own group is mounted as the root
    tree.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", quota)
    tree.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", period)
    assert tree.threads() == threads


def test_the_tightest_of_nested_groups_counts(tree: Tree) -> None:
    tree.v2("/a/b/c")
    tree.write("sys/fs/cgroup/a/cpu.max", "300000 100000")
    tree.write("sys/fs/cgroup/a/b/cpu.max", "500000 100000")
    tree.write("sys/fs/cgroup/a/b/c/cpu.max", "max 100000")
    assert tree.threads() == 3


@pytest.mark.parametrize("path", ["/", "/../../elsewhere", "/somewhere/else"])
def test_a_path_of_another_namespace_leaves_the_mount_itself(tree: Tree, path: str) -> None:
    tree.v2(path, mounted="/kubepods/pod1")
    tree.write("sys/fs/cgroup/cpu.max", "200000 100000")
    tree.write("sys/fs/cgroup/memory.max", 4 * GIB)
    tree.write("sys/fs/cgroup/memory.current", GIB)
    assert tree.threads() == 2
    assert tree.memory().available == 3 * GIB


def test_other_controllers_do_not_count(tree: Tree) -> None:
    tree.v1("pids", "/x")
    tree.write("sys/fs/cgroup/pids/x/cpu.cfs_quota_us", 100000)
    tree.write("sys/fs/cgroup/pids/x/cpu.cfs_period_us", 100000)
    assert tree.threads() == 16


def test_affinity_and_hyperthreads(tree: Tree) -> None:
    tree.cores([f"{i % 4},{i % 4 + 4}" for i in range(8)])
    assert tree.threads(8) == 4  # eight hyperthreads are four cores
    assert machine.threads(tree.root, {0, 4}) == 1
    assert machine.threads(tree.root, {0, 1, 5}) == 2
    tree.v2("/")
    tree.write("sys/fs/cgroup/cpu.max", "300000 100000")
    assert tree.threads(8) == 3


def test_memory_v2(tree: Tree) -> None:
    """Page cache that can be given back is not used memory."""
    tree.v2("/app")
    tree.write("sys/fs/cgroup/app/memory.max", 8 * GIB)
    tree.write("sys/fs/cgroup/app/memory.current", 7 * GIB)
    tree.write("sys/fs/cgroup/app/memory.stat", f"anon 100\ninactive_file {5 * GIB}\nactive_file 7")
    assert tree.memory() == machine.Memory(64 * GIB, 8 * GIB, 6 * GIB)
    tree.write("sys/fs/cgroup/app/memory.max", "max")
    assert tree.memory() == machine.Memory(64 * GIB, 64 * GIB, 48 * GIB)
    tree.write("sys/fs/cgroup/app/memory.high", 4 * GIB)
    assert tree.memory() == machine.Memory(64 * GIB, 4 * GIB, 2 * GIB)


def test_memory_v1(tree: Tree) -> None:
    tree.v1("memory", "/docker/abc")
    tree.write("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", 4 * GIB)
    tree.write("sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", 3 * GIB)
    tree.write("sys/fs/cgroup/memory/docker/abc/memory.stat", f"inactive_file 1\ntotal_inactive_file {2 * GIB}")
    tree.write("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", V1_UNLIMITED)
    tree.write("sys/fs/cgroup/memory/memory.limit_in_bytes", V1_UNLIMITED)
    assert tree.memory() == machine.Memory(64 * GIB, 4 * GIB, 3 * GIB)


def test_a_full_parent_leaves_less_than_the_child_allows(tree: Tree) -> None:
    tree.v2("/pod/app")
    tree.write("sys/fs/cgroup/pod/memory.max", 6 * GIB)
    tree.write("sys/fs/cgroup/pod/memory.current", 5 * GIB)
    tree.write("sys/fs/cgroup/pod/app/memory.max", 32 * GIB)
    tree.write("sys/fs/cgroup/pod/app/memory.current", GIB)
    assert tree.memory() == machine.Memory(64 * GIB, 6 * GIB, GIB)


def test_a_group_over_its_limit_and_a_full_machine(tmp_path: Path) -> None:
    tree = Tree(tmp_path, available=GIB)
    tree.v2("/app")
    tree.write("sys/fs/cgroup/app/memory.max", 4 * GIB)
    tree.write("sys/fs/cgroup/app/memory.current", 2 * GIB)
    assert tree.memory().available == GIB
    tree.write("sys/fs/cgroup/app/memory.current", 5 * GIB)
    assert tree.memory().available == 0


def test_both_hierarchies_at_once(tree: Tree) -> None:
    """A hybrid machine: memory by v1, cpu by v2."""
    tree.v1("memory", "/m")
    tree.v2("/c", at="/sys/fs/cgroup/unified")
    tree.write("sys/fs/cgroup/memory/m/memory.limit_in_bytes", 2 * GIB)
    tree.write("sys/fs/cgroup/unified/c/cpu.max", "200000 100000")
    assert tree.threads() == 2
    assert tree.memory().limit == 2 * GIB
