"""When a process that holds its mutex is noticed to die, with real processes."""

from __future__ import annotations

import mmap
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from elasticgang.process.death_watch import DeathWatch, has_begun_to_exit, wait_writes_nothing
from elasticgang.process.forkserver import ForkServer, Spawned
from elasticgang.process.status_page import StatusPage
from tests.support import wait_dead, wait_until

GUARD_S = 20.0
MOST_TRIES = 5
_OWNER_DIED = 1 << 30


@dataclass
class Watched:
    page: StatusPage
    process: Spawned
    notices: queue.SimpleQueue[float]
    watch: DeathWatch

    @property
    def is_dying(self) -> bool:
        """By the kernel's mark, which is there before any notice."""
        return bool(self.page.mutex[0] & _OWNER_DIED)

    @property
    def is_gone(self) -> bool:
        poll = select.poll()
        poll.register(self.process.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        signal.pidfd_send_signal(self.process.pidfd, signal.SIGKILL)

    def assert_noticed_once(self) -> None:
        self.notices.get(timeout=GUARD_S)
        wait_ended(self.process.pid)
        assert self.notices.empty()

    def assert_not_noticed(self) -> None:
        assert not self.is_dying
        assert self.notices.empty()


def threads_of(pid: int) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"death-watch-{pid}"]


def wait_ended(pid: int) -> None:
    wait_until(lambda: not threads_of(pid), "the watch's thread ends", GUARD_S)


@pytest.fixture
def start(small_forkserver: ForkServer) -> Iterator[Any]:
    started: list[Watched] = []

    def start(then: str, **args: Any) -> Watched:
        fd = StatusPage.create()
        page = StatusPage(fd)
        reader, writer = os.pipe()
        process = small_forkserver.spawn("tests.integration.dying:hold_and", {"then": then, **args}, fds=[fd, writer])
        os.close(fd)
        os.close(writer)
        notices: queue.SimpleQueue[float] = queue.SimpleQueue()
        watch = DeathWatch(page.mutex, lambda: notices.put(time.monotonic()), f"death-watch-{process.pid}")
        started.append(Watched(page, process, notices, watch))
        with os.fdopen(reader) as told:
            told.readline()  # empty: it has died
        return started[-1]

    yield start
    for watched in started:
        watched.kill()
        assert not wait_dead([watched.process.pidfd], GUARD_S)
        watched.watch.close()
        os.waitid(os.P_PIDFD, watched.process.pidfd, os.WEXITED)
        os.close(watched.process.pidfd)
        wait_ended(watched.process.pid)


# DEATH-1
@pytest.mark.parametrize("then", ["exit", "crash", "raise SIGKILL", "exec"])
def test_what_ends_the_process_is_noticed(start: Any, then: str) -> None:
    start(then).assert_noticed_once()


@pytest.mark.parametrize("then", ["sleep", "end the main thread", "fork and spawn"])
def test_a_kill_is_noticed_and_nothing_before(start: Any, then: str) -> None:
    watched = start(then)
    watched.assert_not_noticed()
    watched.kill()
    watched.assert_noticed_once()


def test_a_stopped_process_is_not_dead(start: Any) -> None:
    watched = start("sleep")
    signal.pidfd_send_signal(watched.process.pidfd, signal.SIGSTOP)
    process = psutil.Process(watched.process.pid)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "it is stopped", GUARD_S)
    watched.assert_not_noticed()
    watched.kill()
    watched.assert_noticed_once()


# DEATH-3
def test_a_program_that_is_executed_lives_on_after_the_notice(start: Any) -> None:
    watched = start("exec")
    watched.assert_noticed_once()
    assert not watched.is_gone


# DEATH-2, DEATH-4
def test_a_page_that_is_overwritten_costs_the_notice_and_no_more(start: Any) -> None:
    watched = start("overwrite with zeros")
    watched.kill()
    assert not wait_dead([watched.process.pidfd], GUARD_S)
    assert watched.notices.empty()
    assert threads_of(watched.process.pid)
    watched.watch.close()
    wait_ended(watched.process.pid)
    assert watched.notices.empty()


def test_a_page_that_says_dead_is_believed(start: Any) -> None:
    watched = start("overwrite with ones")
    noticed = threading.Event()  # the watch that waits is not woken
    DeathWatch(watched.page.mutex, noticed.set, f"death-watch-{watched.process.pid}")
    assert noticed.wait(GUARD_S)
    assert not watched.is_gone


def test_a_watch_that_is_closed_gives_no_notice() -> None:
    notices: queue.SimpleQueue[None] = queue.SimpleQueue()
    watch = DeathWatch(StatusPage().mutex, lambda: notices.put(None), "death-watch-0")
    assert threads_of(0)
    watch.close()
    wait_ended(0)
    assert notices.empty()


@pytest.mark.alone
def test_a_large_process_is_noticed_long_before_it_is_gone(start: Any) -> None:
    """The quickest notice of some counts: the machine may stand still between a death and its notice."""
    found = []
    for _ in range(MOST_TRIES):
        watched = start("sleep", bytes=1 << 30)
        poll = select.poll()
        poll.register(watched.process.pidfd, select.POLLIN)
        killed_at = time.monotonic()
        watched.kill()
        assert poll.poll(GUARD_S * 1000)
        gone_s = time.monotonic() - killed_at
        noticed_s = watched.notices.get(timeout=GUARD_S) - killed_at
        if noticed_s < gone_s / 4:
            return
        found.append((noticed_s, gone_s))
    pytest.fail(f"noticed, and gone, after so many seconds: {found}")


def test_a_process_has_begun_to_exit_before_the_kernel_closes_its_descriptors() -> None:
    """That of a device too, whose memory and events are released then."""
    reading, writing = os.pipe()
    program = "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); print(flush=True)"
    process = subprocess.Popen([sys.executable, "-c", program], pass_fds=[writing], stdout=subprocess.PIPE)
    os.close(writing)
    assert process.stdout is not None
    process.stdout.readline()
    assert not has_begun_to_exit(process.pid)
    process.send_signal(signal.SIGSTOP)
    assert not has_begun_to_exit(process.pid)
    process.kill()
    assert os.read(reading, 1) == b"", "the kernel has closed the pipe"
    assert has_begun_to_exit(process.pid)
    process.wait()
    process.stdout.close()
    os.close(reading)
    assert has_begun_to_exit(process.pid), "it is gone"


# DEATH-5
@pytest.mark.alone
def test_a_killed_process_writes_nothing_more_before_it_is_gone(small_forkserver: ForkServer) -> None:
    """Threads write without a pause. What is there once it writes nothing stays there while the kernel frees 512 MB."""
    were_there = 0
    for number in range(20):
        if number >= 4 and were_there:
            break
        shared = os.memfd_create("shared")
        os.ftruncate(shared, 1 << 20)
        reader, writer = os.pipe()
        process = small_forkserver.spawn("tests.integration.dying:write_on", {"bytes": 1 << 29}, fds=[shared, writer])
        os.close(writer)
        memory = mmap.mmap(shared, 0)
        try:
            with os.fdopen(reader) as told:
                assert told.readline()
            before = bytes(memory)
            wait_until(lambda: bytes(memory) != before, "it writes", GUARD_S)  # noqa: B023
            assert not wait_writes_nothing(process.pidfd, 0.0)
            signal.pidfd_send_signal(process.pidfd, signal.SIGSTOP)
            assert not wait_writes_nothing(process.pidfd, 0.1)
            signal.pidfd_send_signal(process.pidfd, signal.SIGCONT)  # it writes when it is killed
        finally:
            signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
        assert wait_writes_nothing(process.pidfd, GUARD_S)
        last = bytes(memory)
        were_there += len(wait_dead([process.pidfd], 0.0))
        assert not wait_dead([process.pidfd], GUARD_S)
        assert bytes(memory) == last
        assert wait_writes_nothing(process.pidfd, 0.0), "it is a zombie"
        os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED)
        assert wait_writes_nothing(process.pidfd, 0.0), "it is gone"
        os.close(process.pidfd)
        os.close(shared)
    assert were_there, "the kernel freed its memory at once each time"
