"""The control groups that limit the memory of this process, as far as their mount shows them, and the kernel's kills.

GROUP-1  The limits of all groups count in which this process is: its own and those above, of version 1 or 2.
GROUP-2  The kernel does not say which process it has killed. What is told of a process that was killed by SIGKILL is
    that its group has more such ends than when somebody last looked. In version 1 a group counts only its own.
GROUP-3  Until a rank has state, the kernel kills it before any other process. It can heal again; the last rank that
    holds some part of the state would take the job along. A process that it forks meanwhile is as any other. One
    that it starts otherwise inherits the rank's score, and is as any other once the rank has state.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_FIRST_TO_DIE = 1000
_COUNTS = ("memory.events", "memory.oom_control")  # of version 2 and 1


class MemoryGroups:
    """As of its making. Any thread may call it."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc, self._groups = proc, _groups_of(proc / "self")
        self._lock = threading.Lock()
        self._num_killed = self._count()

    def available_bytes(self) -> int | None:
        """What the groups have left, with the pages of files that the kernel may drop (GROUP-1). None: no limit."""
        return min((left for left in map(_left_in, self._groups) if left is not None), default=None)

    def take_killed(self) -> int:
        """How many processes the kernel has killed since the last call, in the group or, without one, on this host
        (GROUP-2)."""
        with self._lock:
            before, self._num_killed = self._num_killed, self._count()
            return self._num_killed - before

    def _count(self) -> int:
        own = self._groups[:1]
        for path in (*[group / name for group in own for name in _COUNTS], self._proc / "vmstat"):
            if (count := _fields(path).get("oom_kill")) is not None:
                return count
        return 0


def _groups_of(process: Path) -> list[Path]:
    """Their directories, the process's own first."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        own = {fields[1]: fields[2] for fields in _split(process / "cgroup", ":", 2)}
        controllers = next((name for name in own if "memory" in name.split(",")), "")  # version 1; "": 2
        for fields in _split(process / "mountinfo", " "):
            kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
            if kind == "cgroup2" if not controllers else kind == "cgroup" and "memory" in options:
                root, mount, path = Path(fields[3]), Path(fields[4]), Path(own[controllers])
                inner = path.relative_to(root) if path.is_relative_to(root) else Path()
                return [mount / inner, *[mount / each for each in inner.parents]] if inner.parts else [mount]
    return []


def _split(path: Path, separator: str, most: int = -1) -> list[list[str]]:
    return [line.split(separator, most) for line in path.read_text().splitlines()]


def _left_in(group: Path) -> int | None:
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max"
            left = int((group / limit).read_text()) - int((group / used).read_text())
            return left + _fields(group / "memory.stat").get(cached, 0)
    return None


def _fields(path: Path) -> dict[str, int]:
    """Of a file with a name and a number in each line."""
    with contextlib.suppress(OSError, ValueError):
        return {name: int(value) for name, value in _split(path, " ")}
    return {}


def _descendants(process: Path) -> Iterator[Path]:
    """The children of a process, and theirs. All processes of the host, as psutil looks at, may be many: the others of
    a rank that heals wait meanwhile."""
    for listed in (process / "task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for pid in listed.read_text().split():
                yield _PROC / pid
                yield from _descendants(_PROC / pid)


class FirstToDie:
    """GROUP-3. From its making until `end`."""

    def __init__(self, path: Path = _PROC / "self/oom_score_adj") -> None:
        self._path, self._usual = path, ""
        with contextlib.suppress(OSError):
            usual = path.read_text()
            path.write_text(f"{_FIRST_TO_DIE}\n")
            self._usual = usual
            os.register_at_fork(after_in_child=self._put_back)

    def end(self) -> None:
        if usual := self._put_back():
            for child in _descendants(self._path.parent):
                path = child / self._path.name
                with contextlib.suppress(OSError):
                    if path.read_text() == f"{_FIRST_TO_DIE}\n":
                        path.write_text(usual)

    def _put_back(self) -> str:
        usual, self._usual = self._usual, ""
        with contextlib.suppress(OSError):
            if usual:
                self._path.write_text(usual)
        return usual
