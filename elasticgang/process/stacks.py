"""Reads the Python stacks of rank processes, for reports, without the rank's help where possible.

STACK-1  Reading a stack never harms a process: `STACK_SIGNAL` goes only to a process that handles it, and by a pidfd,
    so never to a process that has reused the pid.
STACK-2  Every read has a deadline: `_PY_SPY_S` for py-spy, `_ANSWER_S` for faulthandler. A stopped process cannot
    answer and gets no signal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

STACK_SIGNAL = signal.SIGRTMAX - 2  # leaves SIGUSR1 and SIGUSR2 to the script

_PY_SPY_S = 5.0
_ANSWER_S = 5.0
_POLL_S = 0.01
_QUIET_S = 0.5  # a dump without a recognisable end counts as complete when it has not grown for so long
# The outermost frames of a rank's main thread, which faulthandler writes last: of its fork server's command (OWN-PATH).
OUTERMOST = ' in run_module\n  File "<string>", line 1 in <module>\n'
_MAX_BYTES = 1 << 18
_STOPPED = "Tt"
_HEADER = re.compile(r"(Current thread|Thread) 0x")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_STARTERS = ("/threading.py", "/concurrent/futures/thread.py")  # they start threads that run other code
PACKAGE = str(Path(__file__).resolve().parents[1])
_FORK_SERVER = str(Path(__file__).resolve().with_name("forkserver.py"))


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line} in {self.name}'


Thread = tuple[Frame, ...]  # the innermost frame first


@dataclass(frozen=True)
class StackSource:
    """A process to read: its pid, its pidfd, and the file of `serve`. The reader owns both descriptors."""

    pid: int
    pidfd: int
    file: int

    def close(self) -> None:
        os.close(self.pidfd)
        os.close(self.file)


def create_file() -> int:
    """A descriptor for `serve` in the process, and for `StackSource` in the reader. The caller closes it."""
    return os.memfd_create("elasticgang-stack", os.MFD_CLOEXEC)


def serve(file: int) -> None:
    """Write the stacks of all threads to `file` on each `STACK_SIGNAL`, even while a thread holds the GIL. Forked
    children do not."""
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)

    def forget() -> None:
        faulthandler.unregister(STACK_SIGNAL)
        with contextlib.suppress(OSError):  # the script has closed it
            os.close(file)

    os.register_at_fork(after_in_child=forget)


def read(source: StackSource) -> str:
    """The script's frames, or why they cannot be read. Blocks for at most `_PY_SPY_S + _ANSWER_S`; closes `source`."""
    try:
        state = _state(source.pid)
        if state in _STOPPED:  # STACK-2
            return f"stopped (state {state})"
        threads = by_py_spy(source.pid) or by_faulthandler(source)
        return describe(threads) if threads else f"its stack cannot be read (state {state})"
    except (OSError, ValueError):
        return "it has ended"
    finally:
        source.close()


def _state(pid: int) -> str:
    """One letter, as `ps` shows it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def handles_signal(pid: int, number: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def by_py_spy(pid: int) -> list[Thread]:
    """Empty if py-spy is not installed or not permitted."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    program = shutil.which("py-spy") or shutil.which(beside)
    if program is None:
        return []
    command = [program, "dump", "--json", "--full-filenames", "--pid", str(pid)]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PY_SPY_S, check=False)
        return [
            tuple(Frame(frame["filename"], frame["line"], frame["name"]) for frame in thread["frames"])
            for thread in json.loads(done.stdout)
        ]
    return []


def by_faulthandler(source: StackSource) -> list[Thread]:
    if not handles_signal(source.pid, STACK_SIGNAL):  # STACK-1
        return []
    os.ftruncate(source.file, 0)
    os.lseek(source.file, 0, os.SEEK_SET)  # also for the process, which shares the file offset
    signal.pidfd_send_signal(source.pidfd, STACK_SIGNAL)
    now = time.monotonic()
    dump, deadline, grown_at = "", now + _ANSWER_S, now
    while now < deadline and not (dump and (dump.endswith(OUTERMOST) or now - grown_at > _QUIET_S)):
        time.sleep(_POLL_S)
        now, before = time.monotonic(), dump
        dump = os.pread(source.file, _MAX_BYTES, 0).decode(errors="replace")
        grown_at = now if len(dump) > len(before) else grown_at
    return parse(dump)


# -- pure


def parse(dump: str) -> list[Thread]:
    """The threads of a faulthandler dump."""
    threads: list[list[Frame]] = []
    for line in dump.splitlines():
        if _HEADER.match(line):
            threads.append([])
        elif (found := _FRAME.match(line)) is not None and threads:
            threads[-1].append(Frame(found["file"], int(found["line"]), found["name"]))
    return [tuple(frames) for frames in threads if frames]


def describe(threads: Iterable[Thread]) -> str:
    """The script's frames, innermost first, without the runtime's threads and the frames that start the script."""
    own = [frames for thread in threads if (frames := _own_frames(thread))]
    return "\n\n".join("\n".join(f"  {frame}" for frame in frames) for frames in own) or "  no frame of the script"


def _own_frames(thread: Thread) -> Thread:
    files = [frame.file for frame in thread]
    is_main = not files[-1].endswith(_STARTERS)
    if is_main and _FORK_SERVER in files:  # the fork server calls the runtime, which calls the script
        frames = list(thread[: files.index(_FORK_SERVER)])
        while frames and frames[-1].file.startswith(PACKAGE):
            frames.pop()
        while frames and "runpy" in frames[-1].file:
            frames.pop()
        return tuple(frames)
    started = [file for file in files if not file.endswith(_STARTERS)]
    is_idle = not started or files[0].endswith(_STARTERS[1])  # an idle worker of a thread pool
    return () if is_idle or started[-1].startswith(PACKAGE) else thread


def merge(stacks: Sequence[tuple[int, int, str]]) -> str:
    """(local rank, pid, stack) of each rank as text; ranks with equal stacks are grouped."""
    by_stack: dict[str, list[tuple[int, int]]] = {}
    for local_rank, pid, stack in sorted(stacks):
        by_stack.setdefault(stack, []).append((local_rank, pid))
    parts = []
    for stack, ranks in by_stack.items():
        names, pids = ", ".join(str(rank) for rank, _ in ranks), ", ".join(str(pid) for _, pid in ranks)
        who = f"rank {names} (pid {pids})" if len(ranks) == 1 else f"ranks {names} (pids {pids})"
        parts.append(f"{who}:\n{stack}" if stack.startswith(" ") else f"{who}: {stack}")
    return "\n".join(parts)
