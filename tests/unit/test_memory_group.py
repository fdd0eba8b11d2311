"""What the control groups of a process say of memory, in directories that look like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticgang.process.memory_group import FirstToDie, MemoryGroups

V2 = "36 25 0:32 {root} {mount} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "35 31 0:31 {root} /nowhere rw,relatime - cgroup cgroup rw,pids\n"
    "36 31 0:32 {root} {mount} rw,relatime - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /unified rw,relatime - cgroup2 cgroup2 rw\n"
)


class Kernel:
    """Groups below one mount; the process is in the group `own`."""

    def __init__(self, directory: Path, version: int, root: str = "/", own: str = "/job/rank") -> None:
        self.proc, self.mount, self.version = directory / "proc", directory / "mount", version
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "vmstat").write_text("nr_free_pages 7\noom_kill 4\n")
        mounts = (V2 if version == 2 else V1).format(root=root, mount=self.mount)
        (self.proc / "self/mountinfo").write_text(f"23 1 254:0 / / rw - ext4 /dev/vda rw\n{mounts}")
        groups = f"8:pids:/other\n4:memory:{own}\n0::/\n" if version == 1 else f"0::{own}\n"
        (self.proc / "self/cgroup").write_text(groups)

    def group(self, path: str, limit: int | None, used: int, cached: int, killed: int = 0) -> None:
        folder = self.mount / path
        folder.mkdir(parents=True, exist_ok=True)
        if self.version == 2:
            files = {
                "memory.max": "max" if limit is None else str(limit),
                "memory.current": str(used),
                "memory.stat": f"anon 5\ninactive_file {cached}",
                "memory.events": f"low 0\noom 9\noom_kill {killed}",
            }
        else:
            files = {
                "memory.limit_in_bytes": str(1 << 62 if limit is None else limit),
                "memory.usage_in_bytes": str(used),
                "memory.stat": f"inactive_file 0\ntotal_inactive_file {cached}",
                "memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {killed}",
            }
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")


# GROUP-1
@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_limit_of_all_groups_counts(tmp_path: Path, version: int) -> None:
    kernel = Kernel(tmp_path, version)
    kernel.group("job/rank", None, 100, 0)
    kernel.group("job", 1000, 700, 50)
    groups = MemoryGroups(kernel.proc)
    assert groups.available_bytes() == 350
    kernel.group("job/rank", 200, 100, 20)
    assert groups.available_bytes() == 120


# GROUP-1
def test_in_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 1, root="/docker/abc", own="/docker/abc")
    kernel.group("", 1000, 400, 0)
    assert MemoryGroups(kernel.proc).available_bytes() == 600


# GROUP-2
@pytest.mark.parametrize("version", [1, 2])
def test_each_kill_counts_once(tmp_path: Path, version: int) -> None:
    kernel = Kernel(tmp_path, version)
    kernel.group("job/rank", 1000, 400, 0, killed=3)
    groups = MemoryGroups(kernel.proc)
    assert groups.take_killed() == 0
    kernel.group("job/rank", 1000, 400, 0, killed=5)
    assert [groups.take_killed(), groups.take_killed()] == [2, 0]


# GROUP-2
def test_without_a_group_the_kills_of_the_host_count(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 2, own="/")
    groups = MemoryGroups(kernel.proc)
    (kernel.proc / "vmstat").write_text("oom_kill 5\n")
    assert groups.take_killed() == 1
    assert groups.available_bytes() is None


def test_where_the_kernel_shows_nothing_nothing_is_known(tmp_path: Path) -> None:
    groups = MemoryGroups(tmp_path)
    assert (groups.available_bytes(), groups.take_killed()) == (None, 0)


# GROUP-3
def test_the_score_is_put_back(tmp_path: Path) -> None:
    path = tmp_path / "oom_score_adj"
    path.write_text("-20\n")
    first = FirstToDie(path)
    assert path.read_text() == "1000\n"
    first.end()
    assert path.read_text() == "-20\n"
    path.write_text("7\n")
    first.end()
    assert path.read_text() == "7\n"
    FirstToDie(tmp_path / "nowhere" / "else").end()
