"""The thread that reads a comm process's replies and runs callbacks, with a socket in place of the process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from elasticgang.comm.reply_reader import ReplyReader

GUARD_S = 30.0
NUM_CALLBACKS = 1000
MAX_AHEAD = 100  # callbacks that have left the queue and have not begun: one to a thread, of which there are few


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

    def process_ended(self) -> None: ...


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
    lateness = [place - number for place, number in enumerate(receiver.begun)]
    assert max(map(abs, lateness)) < MAX_AHEAD
