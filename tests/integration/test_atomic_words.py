"""Shared words are read whole: a reader never sees a value that no writer has stored."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from elasticgang.process.lease import Lease
from elasticgang.process.status_page import SIZE, StatusPage

HAMMER_S = 2.0
GUARD_S = 60.0  # for a writer that gets no core
EVERY_BYTE_DIFFERS = (b"\x11" * 8, b"\x66" * 8)  # any mixture of the two is a third value
FLOATS = tuple(struct.unpack("=d", pattern)[0] for pattern in EVERY_BYTE_DIFFERS)
ATTEMPTS = ((0x11_11111111, 0x111111), (0x66_66666666, 0x666666))  # 40 and 24 bits: the same patterns


@contextmanager
def writer(store: Callable[[int], None]) -> Iterator[None]:
    """A process that calls `store` with 0 and 1 in turn, as fast as it can."""
    pid = os.fork()
    if pid == 0:
        while True:
            store(0)
            store(1)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def seen_while_hammered(load: Callable[[], object], store: Callable[[int], None]) -> set[object]:
    store(0)
    seen: set[object] = set()
    with writer(store):
        end = time.monotonic() + HAMMER_S
        while (now := time.monotonic()) < end or (len(seen) < 2 and now < end + GUARD_S):
            seen.update(load() for _ in range(1000))
    return seen


# LEASE-3
def test_a_lease_is_never_read_torn() -> None:
    lease = Lease.create()
    theirs = Lease(lease.fd)

    def store(number: int) -> None:
        theirs.until = FLOATS[number]

    assert seen_while_hammered(lambda: lease.until, store) == set(FLOATS)


@pytest.fixture
def pages() -> Iterator[tuple[StatusPage, StatusPage]]:
    """Two mappings of one page."""
    fd = StatusPage.create()
    yield StatusPage(fd), StatusPage(fd)
    os.close(fd)


# STATUS-1
def test_a_committed_attempt_is_never_read_torn(pages: tuple[StatusPage, StatusPage]) -> None:
    rank, agent = pages
    assert seen_while_hammered(lambda: agent.committed, lambda number: rank.commit(*ATTEMPTS[number])) == set(ATTEMPTS)


def test_a_counter_of_a_comm_process_is_never_read_torn(pages: tuple[StatusPage, StatusPage]) -> None:
    """Written through a slice of the page's words, as every word of a block is."""
    rank, agent = pages
    assert rank.fd is not None
    words = memoryview(mmap.mmap(rank.fd, SIZE)).cast("Q")
    block = agent.block(1)
    block.beat()
    beats = words[list(words).index(1) :]
    values = [int.from_bytes(pattern, "little") for pattern in EVERY_BYTE_DIFFERS]

    def store(number: int) -> None:
        beats[0] = values[number]

    assert seen_while_hammered(lambda: block.beats, store) == set(values)
