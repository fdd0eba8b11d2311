"""The block in which the ranks of a host add up numbers, with real processes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticgang.process import futex
from elasticgang.process.sum_block import MAX_VALUES, SumBlock, SumBlockEnded
from tests.integration.summing import GUARD_S
from tests.support import REPOSITORY, wait_until

PAST_S = 0.0  # a deadline for what is there already, or not


@pytest.fixture
def fd() -> Iterator[int]:
    descriptor = SumBlock.create()
    yield descriptor
    os.close(descriptor)


def block_of(fd: int, num_ranks: int) -> SumBlock:
    SumBlock.prepare(fd, num_ranks)
    return SumBlock(fd, num_ranks)


def put(block: SumBlock, row: int, number: int, *values: float) -> None:
    block.write(row, number, values)
    block.publish(row, number)


@contextlib.contextmanager
def processes(fd: int, num_ranks: int, rows: range, what: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-m", "tests.integration.summing", str(fd), str(num_ranks)]
    started = [
        subprocess.Popen([*command, str(row), what], pass_fds=[fd], cwd=REPOSITORY, env={**os.environ}) for row in rows
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def in_kernel(pid: int) -> bool:
    """Whether its main thread waits for a word to change."""
    words = Path(f"/proc/{pid}/syscall").read_text().split()
    return words[0] == str(futex.SYSTEM_CALL)


def test_processes_add_up_their_numbers(fd: int) -> None:
    block_of(fd, 4)
    with processes(fd, 4, range(4), "sum") as started:
        assert [process.wait(GUARD_S) for process in started] == [0] * 4


# BLOCK-1
def test_what_a_killed_writer_has_not_published_is_missing(fd: int) -> None:
    block = block_of(fd, 2)
    with processes(fd, 2, range(1), "die half-way") as (process,):
        assert process.wait(GUARD_S) == -signal.SIGKILL
    with pytest.raises(TimeoutError):
        block.read(0, 1, PAST_S)
    with processes(fd, 2, range(1, 2), "die") as (process,):
        assert process.wait(GUARD_S) == -signal.SIGKILL
    assert block.read(1, 1, PAST_S) == [2.0, 3.0]
    with pytest.raises(TimeoutError):
        block.read(1, 2, PAST_S)


# BLOCK-2
def test_a_rank_that_is_one_sum_ahead_leaves_the_last_one_readable(fd: int) -> None:
    block = block_of(fd, 2)
    put(block, 0, 1, 1.0)
    put(block, 1, 1, 10.0)
    put(block, 1, 2, 20.0, 21.0)
    assert [block.read(row, 1, PAST_S) for row in (0, 1)] == [[1.0], [10.0]]
    put(block, 0, 2, 2.0, 3.0)
    assert [block.read(row, 2, PAST_S) for row in (0, 1)] == [[2.0, 3.0], [20.0, 21.0]]


def test_a_row_holds_as_many_numbers_as_it_says(fd: int) -> None:
    block = block_of(fd, 2)
    most = [float(at) for at in range(MAX_VALUES)]
    for row, first in ((0, 0.5), (1, 1.5), (block.outcome, 2.5)):
        put(block, row, 1, *[first + value for value in most])
        put(block, row, 2, *[-first - value for value in most])
    for row, first in ((0, 0.5), (1, 1.5), (block.outcome, 2.5)):
        assert block.read(row, 1, PAST_S) == [first + value for value in most]
        assert block.read(row, 2, PAST_S) == [-first - value for value in most]


@pytest.fixture
def before_waiting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], list[None]]:
    """Calls a function once when a waiter has found nothing and is about to wait in the kernel."""
    wait = futex.wait

    def install(action: Callable[[], object]) -> list[None]:
        calls: list[None] = []

        def waiting(word: ctypes.c_uint32, value: int, timeout_s: float) -> None:
            calls.append(None)
            if len(calls) == 1:
                action()
            wait(word, value, timeout_s)

        monkeypatch.setattr(futex, "wait", waiting)
        return calls

    return install


# BLOCK-3
def test_a_row_that_is_written_as_a_reader_begins_to_wait_wakes_it(fd: int, before_waiting: Callable[..., Any]) -> None:
    block = block_of(fd, 2)
    calls = before_waiting(lambda: put(block, 1, 1, 4.0))
    assert block.read(1, 1, time.monotonic() + GUARD_S) == [4.0]
    assert len(calls) == 1


# BLOCK-3, BLOCK-4
def test_an_end_as_a_reader_begins_to_wait_wakes_it(fd: int, before_waiting: Callable[..., Any]) -> None:
    block, other = block_of(fd, 2), SumBlock(fd, 2)
    calls = before_waiting(other.end)
    with pytest.raises(SumBlockEnded):
        block.read(block.outcome, 1, time.monotonic() + GUARD_S)
    assert len(calls) == 1


# BLOCK-3
def test_a_writer_does_not_hide_the_end(fd: int) -> None:
    block = block_of(fd, 2)
    block.end()
    put(block, 1, 1, 4.0)  # its bell says no more that the block has ended
    assert block.read(1, 1, PAST_S) == [4.0]
    with pytest.raises(SumBlockEnded):
        block.read(1, 2, time.monotonic() + GUARD_S)


# BLOCK-4
def test_the_end_wakes_the_waiters_of_all_processes(fd: int) -> None:
    block = block_of(fd, 4)
    with processes(fd, 4, range(1, 4), "wait") as started:
        for row, process in enumerate(started, 1):
            block.read(row, 1, time.monotonic() + GUARD_S)
            wait_until(functools.partial(in_kernel, process.pid), "a wait in the kernel")
        block.end()
        assert [process.wait(GUARD_S) for process in started] == [7] * 3


# BLOCK-4
def test_what_was_complete_at_the_end_stays_readable(fd: int) -> None:
    block = block_of(fd, 2)
    put(block, 0, 1, 1.0)
    block.end()
    assert block.read(0, 1, PAST_S) == [1.0]
    with pytest.raises(SumBlockEnded):
        block.read(1, 1, PAST_S)


def held(fd: int) -> tuple[int, int]:
    """How often this process has mapped the block of `fd`, and how many descriptors of it."""
    block = os.fstat(fd)
    device = f"{os.major(block.st_dev):02x}:{os.minor(block.st_dev):02x}"
    mapped = [line.split()[3:5] for line in Path("/proc/self/maps").read_text().splitlines()]
    num_open = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            num_open += os.path.samestat(os.fstat(int(name)), block)
    return mapped.count([device, str(block.st_ino)]), num_open


# BLOCK-5
def test_a_block_that_is_closed_is_unmapped_while_an_error_of_it_lives(fd: int) -> None:
    block = block_of(fd, 2)
    assert held(fd) == (1, 2)  # one of the descriptors is `fd`
    with pytest.raises(TimeoutError) as late:
        block.read(1, 1, time.monotonic() + 0.001)
    block.end()
    with pytest.raises(SumBlockEnded) as ended:
        block.read(1, 1, time.monotonic() + GUARD_S)
    block.close()
    assert held(fd) == (0, 1)
    assert late.tb is not None
    assert ended.tb is not None
    block.end()  # by another thread, which is late
    block.close()


def test_a_block_can_be_closed_after_a_signal_has_ended_a_wait(fd: int, before_waiting: Callable[..., Any]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    block = block_of(fd, 2)
    before_waiting(interrupt)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        block.read(1, 1, time.monotonic() + GUARD_S)
    block.close()
    assert interrupted.tb is not None


# FUTEX-1
def test_a_cpu_without_wake_ups_reads_all_the_same(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "SYSTEM_CALL", None)
    block = block_of(fd, 2)
    assert not futex.is_available()
    found: list[list[float]] = []
    reader = threading.Thread(target=lambda: found.append(block.read(1, 1, time.monotonic() + GUARD_S)))
    reader.start()
    put(block, 1, 1, 5.0)
    reader.join(GUARD_S)
    assert found == [[5.0]]
