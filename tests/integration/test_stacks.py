"""The stacks of other processes: how they are read, what is shown of them, and that nobody is harmed."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import pytest

from elasticgang.process import stacks
from elasticgang.process.forkserver import ForkServer
from elasticgang.process.stacks import Frame, StackSource, describe, merge, parse
from tests.support import REPOSITORY, wait_until

GUARD_S = 20.0
PACKAGE = stacks.PACKAGE

DUMP = """\
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/home/me/loader.py", line 7 in fetch
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap_inner

Current thread 0x00007f02 (most recent call first):
  File "/home/me/a file.py", line 3 in <module>
"""


def test_a_dump_is_read_by_thread() -> None:
    assert parse(DUMP) == [
        (
            Frame("/usr/lib/python3.11/threading.py", 324, "wait"),
            Frame("/home/me/loader.py", 7, "fetch"),
            Frame("/usr/lib/python3.11/threading.py", 1045, "_bootstrap_inner"),
        ),
        (Frame("/home/me/a file.py", 3, "<module>"),),
    ]


@pytest.mark.parametrize("dump", ["", "garbage", '  File "/a.py", line 3 in f', DUMP[: len(DUMP) // 2]])
def test_what_is_no_whole_dump_is_read_as_far_as_it_goes(dump: str) -> None:
    assert len(parse(dump)) <= 1


def test_frames_that_started_the_script_are_left_out() -> None:
    script = Frame("/home/me/train.py", 12, "<module>")
    runtime = [
        Frame("<frozen runpy>", 88, "_run_code"),
        Frame("<frozen runpy>", 291, "run_path"),
        Frame(f"{PACKAGE}/member/rank_main.py", 50, "_run"),
        Frame(f"{PACKAGE}/process/forkserver.py", 400, "_serve"),
    ]
    assert describe([(script, *runtime)]) == '  File "/home/me/train.py", line 12 in <module>'
    inside = Frame(f"{PACKAGE}/member/manager.py", 1, "commit")  # of the script's own thread
    assert describe([(inside, script, *runtime)]).count("\n") == 1


def test_threads_of_the_runtime_are_left_out() -> None:
    threads = [
        (Frame(f"{PACKAGE}/comm/reply_reader.py", 2, "_serve"), Frame("/lib/threading.py", 1, "run")),
        (Frame("/lib/concurrent/futures/thread.py", 81, "_worker"), Frame("/lib/threading.py", 1, "run")),
        (
            Frame(f"{PACKAGE}/member/rendezvous.py", 2, "_start"),
            Frame("/lib/concurrent/futures/thread.py", 58, "run"),
            Frame("/lib/concurrent/futures/thread.py", 83, "_worker"),
            Frame("/lib/threading.py", 1, "run"),
        ),
        (Frame(f"{PACKAGE}/process/framing.py", 3, "receive"), Frame(f"{PACKAGE}/member/agent_link.py", 2, "_read")),
        (  # it asks the fork server for a process
            Frame("/lib/socket.py", 573, "recv_fds"),
            Frame(f"{PACKAGE}/process/forkserver.py", 99, "spawn"),
            Frame(f"{PACKAGE}/comm/standby_pool.py", 127, "_start_from"),
            Frame("/lib/concurrent/futures/thread.py", 58, "run"),
            Frame("/lib/threading.py", 1, "run"),
        ),
    ]  # fmt: skip
    assert describe(threads) == "  no frame of the script"
    assert describe([*threads, (Frame("/home/me/a.py", 1, "f"),)]) == '  File "/home/me/a.py", line 1 in f'


def test_ranks_with_equal_stacks_are_reported_together() -> None:
    found = [(2, 12, "  f"), (0, 10, "  f"), (1, 11, "stopped (state T)"), (3, 13, "  g")]
    assert merge(found) == "ranks 0, 2 (pids 10, 12):\n  f\nrank 1 (pid 11): stopped (state T)\nrank 3 (pid 13):\n  g"


# -- of real processes


class Child:
    """A process that runs `body`."""

    def __init__(self, body: Callable[[], object], *, serves: bool = True) -> None:
        self._file = stacks.create_file()
        ready, is_ready = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            if serves:
                stacks.serve(self._file)
            os.write(is_ready, b"x")
            body()
            os._exit(0)
        self._pidfd = os.pidfd_open(self.pid)
        assert os.read(ready, 1) == b"x"
        os.close(ready)
        os.close(is_ready)

    def read(self) -> str:
        return stacks.read(StackSource(self.pid, os.dup(self._pidfd), os.dup(self._file)))

    def send(self, number: int) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    @property
    def runs(self) -> bool:
        return os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        os.close(self._file)


Children = Callable[..., Child]


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[Children]:
    """Read without py-spy."""
    monkeypatch.setattr(stacks, "by_py_spy", lambda pid: [])
    made: list[Child] = []

    def make(body: Callable[[], object], **options: bool) -> Child:
        made.append(Child(body, **options))
        return made[-1]

    yield make
    for child in made:
        child.close()


def sleeps() -> None:
    time.sleep(1000)


def spins() -> None:
    while True:
        pass


def holds_the_gil() -> None:
    re.match("(a+)+$", "a" * 64 + "b")


@pytest.mark.parametrize("body", [sleeps, spins, holds_the_gil])
def test_a_process_that_is_stuck_shows_where_and_goes_on(children: Children, body: Callable[[], None]) -> None:
    child = children(body)
    wait_until(lambda: f"in {body.__name__}" in child.read(), "its stack", GUARD_S)
    first = child.read()
    assert f'File "{__file__}", line' in first
    assert child.read().count(f"in {body.__name__}") == 1  # the file is begun anew
    assert child.runs


class SlowClock:
    """The time of a process that reads `lines` from `file`, of which one is written in each `LINE_S`."""

    LINE_S = 0.2  # more than what a pause of a quick process takes

    def __init__(self, file: int, lines: Sequence[str]) -> None:
        self._file, self._left, self._now_s = file, deque(lines), 0.0
        self._due_s = math.inf

    def begin(self) -> None:
        self._due_s = self._now_s

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds
        if self._left and self._now_s >= self._due_s:
            os.write(self._file, self._left.popleft().encode() + b"\n")
            self._due_s += self.LINE_S


def test_a_dump_that_comes_slowly_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a process that gets no core."""
    file = stacks.create_file()
    frames = [
        *(f'  File "/home/me/train.py", line {n} in f{n}' for n in range(5)),
        f'  File "x", line 9{stacks.OUTERMOST[:-1]}',
    ]
    clock = SlowClock(file, ["Current thread 0x1 (most recent call first):", *frames])
    monkeypatch.setattr(stacks, "time", clock)
    monkeypatch.setattr(stacks, "handles_signal", lambda pid, number: True)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda pidfd, number: clock.begin())
    (thread,) = stacks.by_faulthandler(StackSource(os.getpid(), -1, file))
    os.close(file)
    assert [frame.name for frame in thread] == ["f0", "f1", "f2", "f3", "f4", "run_module", "<module>"]


def test_the_end_of_a_dump_is_recognised_in_a_process_of_a_fork_server() -> None:
    """Otherwise each reading would wait whether more comes, for half of the time that an agent gives it."""
    server = ForkServer(preload=(), env={"PYTHONPATH": str(REPOSITORY)})
    file, (ready, is_ready) = stacks.create_file(), os.pipe()
    try:
        server.wait_ready()
        spawned = server.spawn("tests.integration.children:serve_stack", {}, fds=[file, is_ready])
        try:
            assert os.read(ready, 1) == b"x"
            (thread,) = stacks.by_faulthandler(StackSource(spawned.pid, spawned.pidfd, file))
        finally:  # it is a child of this process, and not of the server (FORK-2)
            signal.pidfd_send_signal(spawned.pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, spawned.pidfd, os.WEXITED)
            os.close(spawned.pidfd)
        assert os.pread(file, 1 << 16, 0).decode().endswith(stacks.OUTERMOST)
        assert thread[-1] == Frame("<string>", 1, "<module>")
    finally:
        server.close()
        for each in (file, ready, is_ready):
            os.close(each)


def test_a_stopped_process_is_reported_by_its_state(children: Children) -> None:
    child = children(sleeps)
    child.send(signal.SIGSTOP)
    wait_until(lambda: child.read() == "stopped (state T)", "its stop", GUARD_S)


# STACK-1
def test_a_process_that_does_not_handle_the_signal_is_not_sent_it(children: Children) -> None:
    child = children(sleeps, serves=False)
    assert child.read().startswith("its stack cannot be read (state ")
    assert child.runs


# STACK-2
def test_a_process_that_blocks_the_signal_is_given_up(children: Children) -> None:
    def body() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {stacks.STACK_SIGNAL})
        sleeps()

    child = children(body)
    wait_until(lambda: child.read().startswith("its stack cannot be read"), "its silence", GUARD_S)
    assert child.runs


def test_a_process_that_has_exited_is_reported(children: Children) -> None:
    child = children(lambda: None)
    wait_until(lambda: not child.runs, "its end", GUARD_S)
    assert child.read() in ("it has ended", "its stack cannot be read (state Z)")


def test_forked_children_of_a_process_do_not_answer_for_it(children: Children) -> None:
    def body() -> None:
        if os.fork() == 0:
            os.kill(os.getpid(), stacks.STACK_SIGNAL)  # not handled any more: it ends
            time.sleep(1000)
        _, status = os.wait()
        if os.waitstatus_to_exitcode(status) == -stacks.STACK_SIGNAL:
            sleeps()

    child = children(body)
    wait_until(lambda: "in sleeps" in child.read(), "the end of its child", GUARD_S)


@pytest.mark.skipif(shutil.which(os.path.join(os.path.dirname(sys.executable), "py-spy")) is None, reason="no py-spy")
def test_py_spy_reads_a_process_that_does_not_help() -> None:
    code = "import time\ndef deep():\n    time.sleep(1000)\ndeep()"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:

        def is_deep() -> bool:
            found = stacks.by_py_spy(process.pid)  # maybe while the interpreter starts
            return [[frame.name for frame in thread][-2:] for thread in found] == [["deep", "<module>"]]

        wait_until(is_deep, "its stack", GUARD_S)
    finally:
        process.kill()
        process.wait()


def test_a_thread_of_the_script_is_shown_beside_its_main_thread(children: Children) -> None:
    def body() -> None:
        threading.Thread(target=sleeps, daemon=True).start()
        spins()

    child = children(body)
    wait_until(lambda: {"in sleeps", "in spins"} <= set(re.findall(r"in s\w+", child.read())), "both", GUARD_S)
