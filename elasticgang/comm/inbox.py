"""Who reads what a comm process says.

X1  One thread at a time reads: the first of those that wait for works, so that no other has to wake it; or the inbox's
    own, while a future or a reply is waited for, and else now and then.
X2  Each waiter has a wake of its own. Who stops reading wakes the next one, and so does a waiter that was woken to read
    and does not.
X3  When the process is dead, or as good as, the rest is the own thread's, which reads what is left, and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from elasticgang.comm.work import CommWork
from elasticgang.comm.worker import RUN, RUN_MARK

_MAX_MESSAGE = 1 << 17
_UNREAD_MS = 100  # at most, of a message that nobody waits for
_LONGEST_POLL_MS = 1 << 30
_LAST_READER_S = 5.0


class Receiver(Protocol):
    """What takes the messages. `finished` and `replied` are called by whichever thread reads, the others by the
    inbox's own."""

    @property
    def has_works(self) -> bool: ...

    def finished(self, id: int, reason: str | None) -> None: ...

    def replied(self, message: dict[str, Any]) -> None: ...

    def end_found(self) -> None:
        """End what was left to the own thread by `finished`, which rings."""

    def look_after(self) -> None:
        """That, and whatever else; now and then, too."""

    def process_ended(self) -> None:
        """The process is dead, or as good as, and everything that it said was read. Called once, last."""


class Inbox:
    """Of the process with that pidfd, behind that socket. The descriptors are their owner's."""

    def __init__(self, sock: socket.socket, pidfd: int, bell: int, receiver: Receiver, name: str) -> None:
        """`bell`: an eventfd that wakes the own thread."""
        self._sock, self._pidfd, self._bell = sock, pidfd, bell
        self._receiver = receiver
        self._buffer = bytearray(_MAX_MESSAGE)
        self._turn = threading.Condition()
        self._is_read = self._is_over = False
        self._num_listeners = 0
        self._waiting: dict[threading.Event, CommWork] = {}
        self._poll = select.poll()
        for fd in (sock.fileno(), pidfd):
            self._poll.register(fd, select.POLLIN)
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Once the receiver is ready."""
        self.thread.start()

    def add_listeners(self, number: int) -> None:
        """For whom the own thread reads."""
        with self._turn:
            self._num_listeners += number
        if number > 0:
            self.ring()

    def ring(self) -> None:
        """Wake the own thread."""
        with contextlib.suppress(OSError):  # closed: nobody is there to hear it
            os.eventfd_write(self._bell, 1)

    def wait_for(self, work: CommWork, timeout: float) -> bool:
        """Wait until `work` has ended, reading if nobody else does. False: it has not, in time."""
        deadline = time.monotonic() + timeout
        while not work.done():
            left = deadline - time.monotonic()
            if left <= 0:
                with self._turn:  # X2
                    if not self._is_read:
                        self._call_next()
                return False
            if self._take_turn():
                try:
                    self._read_until(work.done, deadline)
                finally:
                    self._hand_over()
            else:
                self._wait_beside(work, left)
        return True

    def _take_turn(self) -> bool:
        with self._turn:
            if self._is_read or self._is_over:
                return False
            self._is_read = True
            return True

    def _wait_beside(self, work: CommWork, seconds: float) -> None:
        """Until `work` has ended, or it is this thread's turn."""
        wake = threading.Event()
        with self._turn:
            if not (self._is_read or self._is_over):
                return
            self._waiting[wake] = work
        work.wake_at_end(wake)
        wake.wait(min(seconds, threading.TIMEOUT_MAX))
        work.forget_wake(wake)
        with self._turn:
            del self._waiting[wake]

    def _hand_over(self) -> None:
        with self._turn:
            self._is_read = False
            self._turn.notify_all()
            self._call_next()

    def _call_next(self) -> None:
        """Whoever waits for a work, or else the own thread, for those that listen."""
        following = next((wake for wake, work in self._waiting.items() if not work.done()), None)
        if following is not None:
            following.set()
        elif self._num_listeners:
            self.ring()

    def _read_until(self, is_over: Callable[[], bool], deadline: float | None = None) -> None:
        """Read messages until that, the deadline, or the process's end."""
        number = self._sock.fileno()
        while not is_over():
            left = None if deadline is None else (deadline - time.monotonic()) * 1000
            if left is not None and left <= 0:
                return
            ready = {fd for fd, _ in self._poll.poll(None if left is None else min(left, _LONGEST_POLL_MS))}
            if number in ready:
                if not self._read_one():
                    return
            elif ready:
                self._over()
                return

    def _over(self) -> None:
        """X3."""
        self._is_over = True
        self.ring()

    def _read_one(self) -> bool:
        """False at the end of the messages, or when there is none."""
        try:
            length = self._sock.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
        except OSError:
            return False
        data = self._buffer[:length]
        if not data:
            self._over()
            return False
        if data[0] == RUN_MARK:
            _, id = RUN.unpack_from(data)
            self._receiver.finished(id, data[RUN.size :].decode() or None)
        else:
            self._receiver.replied(json.loads(data))
        return True

    def _serve(self) -> None:
        poll = select.poll()
        for fd in (self._bell, self._pidfd):
            poll.register(fd, select.POLLIN)
        try:
            while not self._is_over:
                ready = {fd for fd, _ in poll.poll(_UNREAD_MS)}
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                self._receiver.look_after()
                if self._pidfd in ready:
                    return
                with self._turn:
                    if self._is_read or not (self._num_listeners or self._receiver.has_works):
                        continue  # whoever reads hands over
                    self._is_read = True
                try:
                    while self._read_one():  # works that nobody waits for hold memory and descriptors
                        pass
                    self._read_until(self._has_no_listener)
                finally:
                    self._hand_over()
        finally:
            self._read_the_rest()
            self._receiver.process_ended()

    def _has_no_listener(self) -> bool:
        self._receiver.end_found()
        return not self._num_listeners

    def _read_the_rest(self) -> None:
        """What had been said before the process died."""
        with self._turn:  # it is dead, or has closed its socket: who reads notices, and ends soon
            self._turn.wait_for(lambda: not self._is_read, _LAST_READER_S)
            self._is_read = True
        self._is_over = True
        while self._read_one():
            pass
        self._receiver.end_found()
