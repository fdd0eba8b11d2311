"""Processes that are stopped for good, and killed later."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from elasticgang.process.forkserver import ForkServer, Spawned
from elasticgang.process.stop_fence import halt, is_halted
from tests.support import wait_dead, wait_until

GUARD_S = 20.0


@dataclass
class Writer:
    """A process whose threads write to `memory` without a pause."""

    process: Spawned
    memory: mmap.mmap

    @property
    def content(self) -> bytes:
        return bytes(self.memory)

    def send(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self.process.pidfd, number)

    def halt(self, timeout: float = GUARD_S) -> bool:
        return halt(self.process.pid, self.process.pidfd, timeout)

    def wait_writes(self) -> None:
        before = self.content
        wait_until(lambda: self.content != before, "it writes", GUARD_S)

    def wait_gone(self) -> None:
        assert not wait_dead([self.process.pidfd], GUARD_S)


@pytest.fixture
def write(small_forkserver: ForkServer) -> Iterator[Callable[..., Writer]]:
    started: list[Spawned] = []

    def start(**args: object) -> Writer:
        shared = os.memfd_create("shared")
        os.ftruncate(shared, 1 << 16)
        reader, writer = os.pipe()
        process = small_forkserver.spawn("tests.integration.dying:write_on", {"bytes": 0, **args}, fds=[shared, writer])
        os.close(writer)
        started.append(process)
        with os.fdopen(reader) as told:
            assert told.readline()
        found = Writer(process, mmap.mmap(shared, 0))
        os.close(shared)
        found.wait_writes()
        return found

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
        assert not wait_dead([process.pidfd], GUARD_S)
        os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED)
        os.close(process.pidfd)


# STOP-1
def test_a_halted_process_writes_nothing_and_ends_if_it_is_continued(write: Callable[..., Writer]) -> None:
    for _ in range(8):
        writer = write()
        writer.send(signal.SIGSTOP)
        assert writer.halt()
        last = writer.content
        assert is_halted(writer.process.pid)
        assert wait_dead([writer.process.pidfd], 0.05), "it is there, until it is killed or continued"
        writer.send(signal.SIGCONT)
        writer.wait_gone()
        assert writer.content == last


# STOP-1
def test_a_process_that_is_continued_at_any_moment_is_halted_or_writes_on(write: Callable[..., Writer]) -> None:
    """After True it writes nothing, whenever it was continued: later and later, until that is late enough."""
    was_halted = 0
    for number in range(30):
        if number >= 10 and was_halted:
            return
        writer = write()
        delay_s = 1e-4 * 1.5**number

        def go_on(writer: Writer = writer, delay_s: float = delay_s) -> None:
            time.sleep(delay_s)  # any moment
            with contextlib.suppress(ProcessLookupError):
                writer.send(signal.SIGCONT)

        other = threading.Thread(target=go_on)
        writer.send(signal.SIGSTOP)
        other.start()
        if writer.halt(0.1):
            last = writer.content
            was_halted += len(wait_dead([writer.process.pidfd], 0.0))
            other.join()
            writer.send(signal.SIGCONT)
            writer.wait_gone()
            assert writer.content == last
        other.join()
    pytest.fail("it was not halted once")


def test_a_halted_process_is_killed_as_any_other(write: Callable[..., Writer]) -> None:
    writer = write()
    writer.send(signal.SIGSTOP)
    assert writer.halt()
    writer.send(signal.SIGKILL)
    writer.wait_gone()
    assert writer.halt(), "it is gone"


def test_a_process_that_is_not_stopped_is_not_halted(write: Callable[..., Writer]) -> None:
    writer = write()
    assert not writer.halt(0.05)
    writer.wait_writes()


# STOP-2
@pytest.mark.parametrize("how", ["ignore", "block", "handle"])
def test_a_process_that_refuses_the_signal_is_not_halted(write: Callable[..., Writer], how: str) -> None:
    writer = write(refuse=how)
    writer.send(signal.SIGSTOP)
    began = time.monotonic()
    assert not writer.halt()
    assert time.monotonic() - began < GUARD_S, "at once"
    writer.send(signal.SIGKILL)
    writer.wait_gone()


# STOP-3
def test_a_process_of_another_number_is_not_touched(write: Callable[..., Writer]) -> None:
    writer, other = write(), write()
    for each in (writer, other):
        each.send(signal.SIGSTOP)
    assert not halt(other.process.pid, writer.process.pidfd, GUARD_S)
    other.send(signal.SIGCONT)
    other.wait_writes()
