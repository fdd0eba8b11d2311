"""The thread that reads the replies of a comm process and runs callbacks."""

from __future__ import annotations

import bisect
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from elasticgang.comm.reply_reader import ReplyReader
from elasticgang.errors import StaleGenerationError
from tests.integration.conftest import Worlds
from tests.support import wait_dead

GUARD_S = 30.0
NUM_CALLBACKS = 1000
MAX_BEFORE = 100  # callbacks that have left the queue and have not begun: one to a thread, of which there are few


class Receiver:
    """Queues `NUM_CALLBACKS` at once, in the server's own thread, which runs none of them before."""

    has_works = False

    def __init__(self) -> None:
        self.reader: ReplyReader
        self.has_queued = False
        self.begun: list[int] = []
        self.are_all_begun = threading.Event()

    def begin(self, number: int) -> None:
        self.begun.append(number)
        if len(self.begun) == NUM_CALLBACKS:
            self.are_all_begun.set()

    def maintain(self) -> None:
        if not self.has_queued:
            self.has_queued = True
            for number in range(NUM_CALLBACKS):
                self.reader.call_back(lambda number=number: self.begin(number))  # type: ignore[misc]

    def finished(self, id: int, reason: str | None) -> None: ...

    def replied(self, message: dict[str, Any]) -> None: ...

    def end_found(self) -> None: ...

    def fence(self) -> None: ...

    def process_ended(self) -> None: ...

    def reap(self) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pidfd, bell = os.pidfd_open(os.getpid()), os.eventfd(0, os.EFD_NONBLOCK)
    receiver = Receiver()
    receiver.reader = ReplyReader(ours, pidfd, bell, receiver, "replies")
    receiver.reader.start()
    yield receiver
    theirs.close()
    receiver.reader.add_listeners(1)  # it reads, and finds the socket closed
    receiver.reader.wait_ended(GUARD_S)
    receiver.reader.join(GUARD_S)
    ours.close()
    os.close(pidfd)
    os.close(bell)


# REPLY-5
def test_the_callback_that_was_queued_first_begins_first(receiver: Receiver) -> None:
    assert receiver.are_all_begun.wait(GUARD_S)
    assert sorted(receiver.begun) == list(range(NUM_CALLBACKS))
    begun: list[int] = []
    for number in receiver.begun:
        num_overtaken = number - bisect.bisect(begun, number)  # that were queued before it, and begin after it
        assert num_overtaken < MAX_BEFORE
        bisect.insort(begun, number)


# REPLY-3
@pytest.mark.alone
def test_an_abort_does_not_wait_until_the_kernel_has_freed_the_memory(worlds: Worlds) -> None:
    """On a machine that stands still after the abort, the process is gone at once."""
    were_there = 0
    for number in range(40):
        if number >= 8 and were_there:
            break
        comm = worlds(1).comms[0]
        pidfd = os.pidfd_open(comm.pid)
        comm.abort(StaleGenerationError("over"))
        were_there += len(wait_dead([pidfd], 0.0))
        comm.close()
        assert comm.descriptors() == [-1, -1, -1]
        assert wait_dead([pidfd], 0.0) == []
        os.close(pidfd)
    assert were_there, "each process was gone at once"
